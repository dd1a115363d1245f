"""Nodes: what is excluded, what is not, for how long; drains of ours, and of others."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.model.node_events import NodeEvent
from tests.behaviour.cluster import EPOCH
from tests.behaviour.story import QUICK, Story

Tell = Callable[..., Story]


def acting(policy: str) -> str:
    return f"mode: act\npolicy: {{cooldown: 0s, budget_percent: 100, {policy}}}\n{QUICK}"


DRAINING = acting(
    "kinds: {collective_hang: {drain: true}}, drain_lifetime: 10min, max_drained_nodes: 1, drained_percent: 50"
)


def test_given_too_few_other_nodes_then_the_job_is_requeued_without_excluding_any(story: Story) -> None:
    job = story.job(hangs=True, wants=4)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=2)
    assert job.excluded == () and job.state == "RUNNING"
    assert "only 3 would be left that can start it" in story.why(hang)
    assert "without" not in story.end(hang).detail


def test_given_other_nodes_that_are_down_then_they_do_not_count(story: Story) -> None:
    for name in ("n3", "n4"):
        story.cluster.nodes[name] = replace(story.cluster.nodes[name], state="DOWN")
    job = story.job(hangs=True, wants=2)
    story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=2)
    assert job.excluded == () and job.state == "RUNNING"


def test_given_nodes_of_another_partition_then_they_do_not_count(story: Story) -> None:
    story.cluster.add_nodes("c1", "c2", "c3", partition="cpu")
    job = story.job(hangs=True, wants=4)
    story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=2)
    assert job.excluded == ()


def test_given_a_job_that_was_submitted_for_one_node_then_that_node_is_never_excluded(story: Story) -> None:
    job = story.job(hangs=True, wants=1, required=("n1",))
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=2)
    assert job.excluded == () and job.nodes == ("n1",)
    assert "--nodelist" in story.why(hang)


def test_given_nodes_that_go_down_while_the_job_waits_then_our_exclusion_is_taken_back(tell: Tell) -> None:
    story = tell(acting("exclusion_lifetime: 7d"))
    job = story.job(hangs=True, wants=3)

    def two_go_down() -> None:
        for name in ("n3", "n4"):
            story.cluster.nodes[name] = replace(story.cluster.nodes[name], state="DOWN")

    story.at("after outcome exclude", two_go_down)
    story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(seconds=20)
    assert job.excluded == ("n1",)
    story.passes(minutes=2)
    assert job.excluded == ()


def test_given_an_exclusion_of_ours_that_is_old_then_it_is_dropped_at_the_next_requeue_and_others_stay(
    tell: Tell,
) -> None:
    story = tell(acting("exclusion_lifetime: 10min, budget_window: 1s"))
    story.cluster.add_nodes("n5", "n6")
    job = story.job(hangs=True, excluded=("n6",))
    job.excluded = ("n6",)
    story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=2)
    assert set(job.excluded) == {"n6", "n1"}
    story.passes(minutes=10)
    job.hangs = True
    story.finds(IncidentKind.LINGERING_JOB, job, blames="n2")
    story.passes(minutes=2)
    assert set(job.excluded) == {"n6", "n2"}
    assert [entry.node for entry in story.journal.node_entries("excluded")] == ["n2"]


def test_given_a_job_that_cannot_be_read_in_that_moment_then_no_node_is_excluded_that_would_never_be_given_back(
    tell: Tell,
) -> None:
    story = tell(acting("exclusion_lifetime: 1h"))
    story.cluster.add_nodes("n5", "n6")
    job = story.job(hangs=True, excluded=("n6",))
    story.at("after intent exclude", lambda: story.cluster.loses.update(read_job=["Socket timed out"]))
    story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=3)
    assert set(job.excluded) == {"n6", "n1"}
    assert [entry.node for entry in story.journal.node_entries("excluded")] == ["n1"]


def test_given_a_rule_that_drains_then_the_node_is_drained_with_our_reason_before_the_job_goes_on(
    tell: Tell,
) -> None:
    story = tell(DRAINING)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, story.job(hangs=True), blames="n1")
    story.passes(minutes=2)
    assert story.done.index("drain n1") < story.done.index("release 7")
    reason = story.cluster.nodes["n1"].reason
    assert reason.startswith("slurm-watchdog: ") and hang.id in reason


def test_given_what_is_shipped_then_no_node_is_drained(story: Story) -> None:
    story.finds(IncidentKind.COLLECTIVE_HANG, story.job(hangs=True), blames="n1")
    story.passes(minutes=2)
    assert "drain n1" not in story.done


def test_given_a_cluster_with_drained_nodes_then_no_more_are_drained_than_the_budget(tell: Tell) -> None:
    story = tell(DRAINING)
    story.cluster.nodes["n4"] = replace(story.cluster.nodes["n4"], state="DOWN", reason="dead fan")
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, story.job(hangs=True), blames="n1")
    story.passes(minutes=2)
    assert "drain n1" not in story.done
    assert "not drained" in story.why(hang) and story.end(hang).ok


def test_given_a_drain_of_ours_that_is_old_then_the_node_is_given_back(tell: Tell) -> None:
    story = tell(DRAINING)
    story.finds(IncidentKind.COLLECTIVE_HANG, story.job(hangs=True), blames="n1")
    story.passes(minutes=5)
    assert "DRAIN" in story.cluster.nodes["n1"].state
    story.passes(minutes=10)
    assert story.cluster.nodes["n1"].state == "IDLE"
    assert not story.journal.node_entries("drained")


def test_given_a_person_who_changed_the_reason_of_our_drain_then_the_node_stays_drained(tell: Tell) -> None:
    story = tell(DRAINING)
    story.finds(IncidentKind.COLLECTIVE_HANG, story.job(hangs=True), blames="n1")
    story.passes(minutes=5)
    node = story.cluster.nodes["n1"]
    story.cluster.nodes["n1"] = replace(node, reason="ordered a new cable")
    story.passes(minutes=12)
    assert story.cluster.nodes["n1"].state == "IDLE+DRAIN"
    assert not any(deed.startswith("undrain") for deed in story.done)
    assert not story.journal.node_entries("drained"), "it is not ours any more"


def test_given_a_person_who_drained_it_again_in_the_same_words_then_the_node_stays_drained(
    tell: Tell,
) -> None:
    story = tell(DRAINING)
    story.finds(IncidentKind.COLLECTIVE_HANG, story.job(hangs=True), blames="n1")
    story.passes(minutes=5)
    node = story.cluster.nodes["n1"]
    assert node.reason_at is not None
    story.cluster.nodes["n1"] = replace(node, reason_at=node.reason_at + 60)
    story.passes(minutes=12)
    assert story.cluster.nodes["n1"].state == "IDLE+DRAIN"


def test_given_a_node_that_somebody_drained_before_then_its_reason_stays(tell: Tell) -> None:
    story = tell(DRAINING.replace("max_drained_nodes: 1", "max_drained_nodes: 4"))
    job = story.job(hangs=True)
    story.cluster.nodes["n1"] = replace(story.cluster.nodes["n1"], state="MIXED+DRAIN", reason="dead fan")
    story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=12)
    assert story.cluster.nodes["n1"].reason == "dead fan"
    assert not story.journal.node_entries("drained")


def test_given_a_job_that_waits_when_our_exclusion_is_over_then_it_may_use_the_node_again(tell: Tell) -> None:
    story = tell(acting("exclusion_lifetime: 10min"))
    job = story.job(hangs=True, excluded=("n4",))
    job.excluded = ("n4",)
    story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=2)
    job.held = True
    story.cluster.requeued(job, held=True)
    story.passes(minutes=5)
    assert set(job.excluded) == {"n4", "n1"}
    story.passes(minutes=6)
    assert job.excluded == ("n4",)
    assert not story.journal.node_entries("excluded")


def test_given_a_job_that_is_gone_then_the_ledger_forgets_its_exclusions(tell: Tell) -> None:
    story = tell(acting("exclusion_lifetime: 3min"))
    job = story.job(hangs=True)
    story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=2)
    del story.cluster.jobs["7"]
    story.passes(minutes=4)
    assert not story.journal.node_entries("excluded")


def test_given_a_job_that_runs_well_without_the_node_then_that_is_remembered_of_the_node(story: Story) -> None:
    job = story.job(hangs=True)
    hang = story.finds(IncidentKind.COLLECTIVE_HANG, job, blames="n1")
    story.passes(minutes=3)
    assert story.end(hang).ok
    kinds = [each.kind for each in story.journal.node_events.of(node=["n1"])]
    assert "restart_helped" in kinds
    assert [each.node for each in story.controller.ledger.suspicions()] == ["n1"]


def test_given_a_drain_by_somebody_else_then_it_is_remembered_and_ours_is_not(tell: Tell) -> None:
    story = tell(DRAINING)
    bad = {"state": "IDLE+DRAIN", "reason": "NHC: no GPU 3", "reason_at": EPOCH}
    story.cluster.nodes["n4"] = replace(story.cluster.nodes["n4"], **bad)
    story.finds(IncidentKind.COLLECTIVE_HANG, story.job(hangs=True), blames="n1")
    story.passes(minutes=2)
    kinds = {node: [each.kind for each in story.journal.node_events.of(node=[node])] for node in ("n1", "n4")}
    assert kinds["n4"] == ["drained"] and "drained" not in kinds["n1"]


QUARANTINE = acting("quarantine: true, suspects: exclude, max_drained_nodes: 1, drained_percent: 50")


def fails_again(story: Story, node: str = "n1", times: int = 3) -> None:
    """The same GPU of a node, every other day."""
    for number in range(times):
        at = clock.wall() - number * 2 * 86400.0
        what = {"kind": "gpu_fault", "at": at, "what": "Xid 79", "place": "GPU-a"}
        story.controller.ledger.record(NodeEvent(key=f"fault {number}", node=node, **what))


def test_given_a_node_that_fails_again_and_again_then_it_is_drained_and_returned_after_its_test(tell: Tell) -> None:
    story = tell(QUARANTINE)
    fails_again(story)
    story.judges()
    story.passes(minutes=3)
    assert story.done.count("drain n1") == 1
    assert story.cluster.nodes["n1"].reason.startswith("slurm-watchdog: suspect node, incident ")
    story.passes(minutes=1)
    passed = {"kind": "test_passed", "at": clock.wall(), "what": "all is as fast as its peers"}
    story.controller.ledger.record(NodeEvent(key="test_passed:root:t1:n1:", node="n1", **passed))
    story.passes(minutes=3)
    assert story.done[-1] == "undrain n1"
    assert story.controller.ledger.suspicions() == []


def test_given_what_is_shipped_then_a_suspect_node_is_reported_and_nothing_else(story: Story) -> None:
    fails_again(story)
    story.judges()
    story.passes(minutes=3)
    assert [each.kind for each in story.controller.judge.incidents] == [IncidentKind.SUSPECT_NODE]
    assert "drain n1" not in story.done


def test_given_a_time_at_which_nothing_is_done_by_itself_then_no_node_is_taken_out_of_service(tell: Tell) -> None:
    story = tell(QUARANTINE.replace("cooldown: 0s", "cooldown: 0s, no_action: ['00:00-24:00']"))
    fails_again(story)
    story.judges()
    story.passes(minutes=5)
    assert [each.kind for each in story.controller.judge.incidents] == [IncidentKind.SUSPECT_NODE]
    assert story.cluster.nodes["n1"].reason == "" and "drain n1" not in story.done
