"""A small report says that a node is as a whole one said: what that is worth where it is known, and that it is worth
nothing where it is not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.cluster_view import ProcessView
from slurm_watchdog.model.observations import Checkpoint, Gpu
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from slurm_watchdog.wire.codec import WireError, decode_report, encode_report
from tests.accuracy.cases import CASES, Case
from tests.accuracy.drive import Drive, Story
from tests.accuracy.run import case_scene, quiet
from tests.builders.reported_cluster import progress_event
from tests.builders.views import process, slurm_job

RANKS = tuple(
    process(n, cpu_ratio=1.0, worked_age_s=0.0, quiet_s=3.0, storage_age_s=40.0, runnable_s=7.0) for n in range(2)
)
GPU = Gpu(uuid="G", index=0, idle_age_s=50.0, pids=(RANKS[0].pid,))
WHOLE = Report(node="n1", boot_id="b", agent_id="a", sequence=1, state=b"s", processes=RANKS, gpus=(GPU,))
SMALL = Report(node="n1", boot_id="b", agent_id="a", sequence=2, state=b"s", same_as=1)


def cluster(*reports: Report, at: float = 1000.0) -> ClusterState:
    state = ClusterState(silent_after_s=15, report_lifetime_s=60)
    node = SlurmNode(name="n1", address="n1", state="ALLOCATED")
    state.apply_slurm(SlurmView(jobs=(slurm_job(),), nodes=(node,)), at - 10.0)
    for number, report in enumerate(reports):
        state.apply_report(report, at + 5.0 * number)
    return state


def ranks(state: ClusterState, now: float) -> tuple[ProcessView, ...]:
    view = state.job_view("7", now)
    assert view is not None
    return view.processes


def test_what_the_whole_one_said_counts_as_seen_now() -> None:
    state = cluster(WHOLE, SMALL)
    first = ranks(state, 1006.0)[0]
    assert (first.seen_age_s, first.process.cpu_ratio, first.worked_age_s, first.quiet_s) == (1.0, 1.0, 1.0, 4.0)
    assert first.storage_age_s == 46.0, "what ran on has run on"
    node = state.nodes.view("n1")
    assert node is not None and node.gpus[0].idle_since == 950.0
    assert node.reported_at == 1000.0 and state.view(1006.0).last_heard(node) == 1005.0
    assert state.unsure_of == set()


def test_a_small_one_makes_no_job_due_and_a_step_in_it_none_that_is_calm() -> None:
    state = cluster(WHOLE)
    run = state.runs.get("7")
    assert run is not None
    run.is_due = False
    assert state.apply_report(SMALL, 1005.0) == "accepted"
    assert not run.is_due
    for sequence, step, calm in ((3, 1, False), (4, 2, False), (5, 3, True)):
        run.is_due, run.numbers_wait_s = False, 30.0 if calm else 0.0
        report = Report(
            node="n1", boot_id="b", agent_id="a", sequence=sequence, state=b"s", same_as=1,
            events=(progress_event(step),),
        )  # fmt: skip
        assert state.apply_report(report, 1000.0 + 5 * sequence) == "accepted"
        assert run.is_due is not calm
    assert run.has_numbers


UNKNOWN = {
    "another base": (WHOLE, Report(node="n1", boot_id="b", agent_id="a", sequence=9, state=b"s", same_as=8)),
    "other classes": (WHOLE, Report(node="n1", boot_id="b", agent_id="a", sequence=2, state=b"t", same_as=1)),
    "another agent": (WHOLE, Report(node="n1", boot_id="b", agent_id="x", sequence=2, state=b"s", same_as=1)),
    "nothing before": (SMALL,),
    "a base that was too old": (
        WHOLE,
        Report(node="n1", boot_id="b", agent_id="a", sequence=2, state=b"s", processes=RANKS, age_s=61.0),
        Report(node="n1", boot_id="b", agent_id="a", sequence=3, state=b"s", same_as=2),
    ),
}


@pytest.mark.parametrize("reports", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_one_that_builds_on_what_is_not_known_says_that_the_node_lives_and_no_more(reports: tuple[Report, ...]) -> None:
    state, at = cluster(*reports[:-1]), 1000.0 + 5.0 * (len(reports) - 1)
    assert state.apply_report(reports[-1], at) == "unknown"
    assert state.agents.reports("n1", at + 14.0) and state.unsure_of == {"n1"}
    for each in ranks(state, at):
        assert each.seen_age_s >= 5.0 and each.gone_s is None, "it was not seen since, nor is it gone"
    number = reports[-1].sequence + 1
    again = Report(node="n1", boot_id="b", agent_id=reports[-1].agent_id, sequence=number, state=b"s", processes=RANKS)
    assert state.apply_report(again, at + 5.0) == "accepted"
    assert state.unsure_of == set() and ranks(state, at + 5.0)[0].seen_age_s == 0.0


def test_a_new_controller_knows_of_no_base_and_names_nobody() -> None:
    state = cluster(SMALL)
    assert ranks(state, 1001.0) == () and state.nodes.views() == ()
    step = Report(node="n1", boot_id="b", agent_id="a", sequence=3, state=b"s", same_as=1, events=(progress_event(5),))
    assert state.apply_report(step, 1005.0) == "unknown"
    view = state.job_view("7", 1005.0)
    assert view is not None and view.progress is not None and view.progress.step == 5, "its logs count"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"worked_age_s": 4.0}, {"worked_age_s": 5.0}),
        ({"worked_age_s": 7.0}, {"worked_age_s": None}),
        ({"quiet_s": 25.0}, {"quiet_s": 26.0}),
        ({"quiet_s": 30.0}, {"quiet_s": None}),
        ({"quiet_s": 50.0}, {"quiet_s": 56.0}),
    ],
)
def test_a_number_that_does_not_cover_the_time_since_is_not_known(
    said: dict[str, float], shown: dict[str, float | None]
) -> None:
    state = cluster(replace(WHOLE, processes=(replace(RANKS[0], **said),)), SMALL)
    (rank,) = ranks(state, 1006.0)
    assert {name: getattr(rank, name) for name in shown} == shown


def test_a_small_one_has_no_more_rights_than_a_whole_one() -> None:
    state = cluster(WHOLE)
    state.require_node_ownership = True
    other = slurm_job(job_id="8", nodes=("n2",))
    state.apply_slurm(SlurmView(jobs=(slurm_job(), other), nodes=()), 1001.0)
    theirs = Checkpoint(job_id="8", directory="/c", step=9, path="/c/9", writing=True)
    small = replace(SMALL, checkpoints=(theirs,))
    assert state.apply_report(small, 1005.0) == "accepted" and state.dropped == 1
    run = state.runs.get("8")
    assert run is not None and run.growing_at is None and not run.disk_steps
    with pytest.raises(WireError, match="a small one, and it has checkpoints"):
        decode_report(encode_report(small))


def test_each_look_counts_once_a_job_is_late_and_not_while_it_starts_or_trains() -> None:
    scene = case_scene(next(case for case in CASES if case.key == "case_02_hang_in_a_step"), 7, 2)
    drive = Drive(scene.world, Config(), calm_s=2.0)
    close: list[tuple[bool, frozenset[str]]] = []

    def look(story: Story, now: float) -> bool:
        close.append((scene.fault_at is not None and now >= scene.fault_at, drive.controller.commands.close))
        return bool(story.incidents)

    with quiet():
        story = drive.run(scene.until_s, look)
    (incident,) = story.incidents.values()
    asked = [nodes for has_begun, nodes in close if not has_begun]
    assert sum(map(bool, asked)) <= len(asked) / 50
    of_job = {rank.node for rank in scene.world.jobs[0].ranks}
    assert close[-1][1] == of_job and incident.kind == "collective_hang"


def test_who_is_to_be_looked_at_closely_is_asked_once_and_at_once() -> None:
    queue, asked = CommandQueue(), list[str]()
    queue.on_asked = asked.append
    for nodes in ({"n1"}, {"n1", "n2"}, {"n2"}, {"n1", "n2"}):
        queue.look_closely(frozenset(nodes))
    assert asked == ["n1", "n2", "n1"]


@pytest.mark.parametrize("case", CASES[::9], ids=lambda case: case.key)
def test_trouble_is_found_as_soon_as_if_each_report_were_whole(case: Case) -> None:
    fired = []
    for small in (True, False):
        scene = case_scene(case, 7, 2)
        drive = Drive(scene.world, Config(), calm_s=2.0, small=small)
        with quiet():
            story = drive.run(min(scene.until_s, 700.0))
        assert not story.failures
        fired.append(
            {(each.kind, each.subject): each.fired_at or 0.0 for each in story.incidents.values() if each.fired_at}
        )
    ours, theirs = fired
    assert ours.keys() == theirs.keys()
    assert all(ours[key] <= theirs[key] + 2 * drive.interval_s for key in ours), (ours, theirs)
