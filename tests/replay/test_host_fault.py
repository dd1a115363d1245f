"""host_fault: lines of a kernel in, incidents out; what a hang after it says, and which restart avoids the node."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from slurm_watchdog.controller.node_history.suspicion import blamed
from slurm_watchdog.detect.host_fault import detect
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Incident, Severity, Truth
from slurm_watchdog.model.node_view import NodeView, SeenEvent
from slurm_watchdog.model.observations import FaultSeverity, NodeEvent
from slurm_watchdog.replay.player import Outcome
from tests.builders.gpu_faults import NOW
from tests.builders.views import cluster, job, slurm_job
from tests.replay.stories import SPINS, WAITS, Story, few

CASES = yaml.safe_load((Path(__file__).parents[1] / "captures/kernel/host_faults.yaml").read_text())
UE = "EDAC MC3: 1 UE memory read error on CPU_SrcID#1_MC#1_Chan#2_DIMM#0 (channel:2 slot:0 page:0xb7 offset:0xdc0)"
ACT = "mode: act\npolicy: {cooldown: 0s, budget_percent: 100}\n"


def with_kernel(story: Story, lines: Iterable[tuple[float, str]], node: str = "n0", begin: float = 0.0) -> None:
    """The story's trace, with lines of the kernel of a node; they are `begin` later than they say."""
    story.lines += [{"t": begin + at, "kind": "kmsg", "node": node, "line": text} for at, text in lines]


def of_kind(found: Outcome, kind: str) -> list[Incident]:
    return [each for each in found.incidents if each.kind == kind]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["title"])
def test_lines_of_a_kernel_become_what_is_reported(case: dict[str, Any]) -> None:
    story = Story(per_node=1, every_s=10.0)
    story.train(12)
    lines = [(at, text) for at, text in case.get("lines", ())]
    if "every" in case:
        apart_s, for_s, *texts = case["every"]
        lines += [(n * apart_s + 0.1 * m, text) for n in range(int(for_s / apart_s)) for m, text in enumerate(texts)]
    with_kernel(story, lines, begin=story.t + 1.0)
    story.train(max(6, int(max(at for at, _ in lines) / 10) + 3))
    found = of_kind(story.play(), "host_fault")
    if case["report"] == "nothing":
        assert [each.summary for each in found] == []
        return
    (incident,) = found
    assert incident.severity == case["report"]
    assert incident.exclude_nodes == (("n0",) if case["report"] == "critical" else ())
    assert [word for word in case["says"] if word not in incident.summary] == [], incident.summary
    assert any("the kernel of n0" in fact for fact in incident.facts)


def test_an_uncorrected_error_after_corrected_ones_is_critical() -> None:
    story = Story(per_node=1, every_s=10.0)
    story.train(12)
    corrected = UE.replace("1 UE", "1 CE")
    with_kernel(story, [*((20.0 * n, corrected) for n in range(40)), (900.0, UE)], begin=story.t)
    story.train(95)
    fired = [(str(each.severity), each.exclude_nodes) for each in of_kind(story.play(), "host_fault")]
    assert fired == [("warning", ()), ("critical", ("n0",))]


def test_a_hang_after_an_uncorrected_memory_error_names_it_and_its_restart_avoids_the_node() -> None:
    story = Story()
    story.train(14)
    with_kernel(story, [(0.0, UE)], node="n1", begin=story.t + 3.0)
    story.go_on(300, few({5: WAITS}, SPINS))
    found = story.play(ACT)
    (hang,) = of_kind(found, "collective_hang")
    (fault,) = of_kind(found, "host_fault")
    assert "probable cause: uncorrected memory error (CPU_SrcID#1_MC#1_Chan#2_DIMM#0) on n1" in hang.summary
    assert "3 s after the last step" in hang.summary
    assert [fault.job_ids, hang.inhibited_by] == [hang.job_ids, None]
    restart = [each for each in found.decided if each.incident_id == hang.id and each.action == "requeue"]
    assert restart and all("n1" in each.exclude for each in restart)


@pytest.mark.parametrize(("node", "after_s"), [("n9", 3.0), ("n1", -4000.0)])
def test_a_hang_names_no_fault_of_another_node_and_none_of_long_ago(node: str, after_s: float) -> None:
    story = Story()
    story.say({"kind": "report", "node": "n9"})
    story.train(460 if after_s < 0 else 14)
    with_kernel(story, [(0.0, UE)], node=node, begin=story.t + after_s)
    story.lines += [{"t": t, "kind": "report", "node": "n9"} for t in range(0, int(story.t) + 300, 10)]
    story.go_on(300, few({5: WAITS}, SPINS))
    found = story.play(ACT)
    (hang,) = of_kind(found, "collective_hang")
    assert "probable cause" not in hang.summary
    restart = [each for each in found.decided if each.incident_id == hang.id]
    assert not any(node in each.exclude for each in restart if node == "n9")


def test_a_rank_that_dies_of_a_memory_error_is_its_consequence() -> None:
    story = Story()
    story.train(14)
    killed = "Memory failure: 0xb757589: Killing python:280061 due to hardware memory corruption"
    with_kernel(story, [(0.0, UE), (0.1, killed)], begin=story.t + 1.0)
    story.go_on(90, few({3: None}, SPINS))
    found = story.play()
    (fault,) = of_kind(found, "host_fault")
    assert [(each.inhibited_by, each.fired_at) for each in of_kind(found, "dead_rank")] == [(fault.id, None)]


# ---------------------------------------------------------------------------------------- of several nodes and jobs


def line(age_s: float = 5.0, **changes: Any) -> SeenEvent:
    given = {
        "source": "kernel_log", "name": "memory_uncorrected", "part": "memory", "severity": FaultSeverity.CRITICAL,
        "may_exclude_node": True, "line": UE, "device": "MC3",
    }  # fmt: skip
    return SeenEvent(at=NOW - age_s, event=NodeEvent(age_s=0.0, **{**given, **changes}))


def nodes(*names: str, **changes: Any) -> tuple[NodeView, ...]:
    return tuple(NodeView(name=name, reported_at=NOW - 2.0, events=(line(**changes),)) for name in names)


def bad(view: ClusterView) -> list[Any]:
    return [each for each in detect(view) if each.truth is Truth.BAD]


def test_only_jobs_that_had_the_node_at_that_moment_were_hit() -> None:
    jobs = [
        job(run_age_s=900.0),
        job(job=slurm_job(job_id="8", nodes=("n1",)), run_age_s=2.0),
        job(job=slurm_job(job_id="9", nodes=("n2",)), run_age_s=900.0),
    ]
    (found,) = bad(cluster(*jobs, nodes=nodes("n1")))
    assert (found.job_ids, found.exclude_nodes, found.actionable) == (("7",), ("n1",), True)
    (found,) = bad(cluster(*jobs[1:], nodes=nodes("n1")))
    assert (found.job_ids, found.actionable) == ((), False)


def test_heat_in_a_room_excludes_no_node() -> None:
    hot = {"name": "overheated", "part": "heat", "device": "thermal_zone0"}
    view = cluster(job(run_age_s=900.0), nodes=nodes("n1", "n2", "n3", **hot))
    found = bad(view)
    assert [(each.severity, each.exclude_nodes, each.actionable) for each in found] == [
        (Severity.CRITICAL, (), False)
    ] * 3
    assert "3 nodes have the same" in found[0].facts[0]
    assert [each.exclude_nodes for each in bad(cluster(job(), nodes=nodes("n1", "n2", **hot)))] == [("n1",), ("n2",)]


SITE = "mode: act\npolicy: {cooldown: 0s, budget_percent: 100, kinds: {host_fault: {ladder: [requeue]}}}\n"


@pytest.mark.parametrize(("config", "verdicts"), [("", [("none", "allowed")]), (SITE, [("requeue", "allowed")])])
def test_nothing_is_done_about_it_until_a_site_gives_it_a_ladder(config: str, verdicts: list[tuple[str, str]]) -> None:
    story = Story(per_node=1, every_s=10.0)
    story.train(12)
    with_kernel(story, [(0.0, UE)], node="n1", begin=story.t + 1.0)
    story.train(4)
    found = story.play(config)
    (fault,) = of_kind(found, "host_fault")
    decided = [each for each in found.decided if each.incident_id == fault.id]
    assert [(str(each.action), str(each.verdict)) for each in decided] == verdicts
    assert all(each.exclude == ("n1",) for each in decided if each.action == "requeue")


def test_a_dead_adapter_and_a_dimm_are_two_faults_of_a_node_that_its_history_keeps() -> None:
    nic = line(name="nic_dead", part="nic", device=None, pci_bus_id="0000:5e:00.0", age_s=20.0)
    node = NodeView(name="n1", reported_at=NOW - 2.0, events=(nic, line()))
    found = bad(cluster(job(run_age_s=900.0), nodes=(node,)))
    assert [each.subject for each in found] == ["host:n1/0000:5e:00.0", "host:n1/board"]
    assert [blamed(each) for each in found] == [(("n1", ""),)] * 2
    minutes = tuple(line(60.0 * n, severity=FaultSeverity.WARNING, may_exclude_node=False) for n in range(20, 0, -1))
    (often,) = bad(cluster(nodes=(NodeView(name="n1", reported_at=NOW - 2.0, events=minutes),)))
    assert (often.severity, blamed(often)) == (Severity.WARNING, ())


@pytest.mark.parametrize("changes", [{"may_exclude_node": False, "severity": FaultSeverity.WARNING}, {"age_s": 3700.0}])
def test_what_was_corrected_or_is_old_says_nothing(changes: dict[str, Any]) -> None:
    assert bad(cluster(job(run_age_s=9000.0), nodes=nodes("n1", **changes))) == []


def test_it_ends_when_an_hour_has_passed() -> None:
    view = cluster(nodes=nodes("n1", age_s=3700.0), asked=frozenset({"host:n1/board"}), watched_s=4000.0)
    assert [(each.subject, each.truth) for each in detect(view)] == [("host:n1/board", Truth.OK)]
    (young,) = detect(replace(view, watched_s=30.0))
    assert young.truth is Truth.UNKNOWN, "a controller that was started again has not seen the line"


def test_a_line_that_an_earlier_agent_sends_without_its_part_counts() -> None:
    (found,) = bad(cluster(nodes=nodes("n1", part="none")))
    assert found.summary.startswith("Hardware failed on n1")
