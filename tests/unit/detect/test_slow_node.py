"""slow_node: the node that its hardware tells from the others is named; what many have, chance and missing
data name nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slurm_watchdog.controller.state.nodes import RISE_BREAK_S, Nodes
from slurm_watchdog.detect.slow_job import SlowJob, slow_node
from slurm_watchdog.model.cluster_view import ClusterView, RankGpu
from slurm_watchdog.model.incidents import Finding, Truth
from slurm_watchdog.model.node_view import Rise, SeenEvent
from slurm_watchdog.model.observations import FaultSeverity, Gpu, NodeEvent
from slurm_watchdog.model.report import Report
from tests.builders.gpu_faults import NOW, card
from tests.builders.slow_nodes import NAMES, SLOWER, cards, times, view
from tests.builders.step_noise import noisy
from tests.builders.views import cluster, job, slurm_job

CHANGE = NOW - 300.0


def event(name: str, at: float = NOW - 60.0, repeats: int = 0) -> SeenEvent:
    severity = FaultSeverity.WARNING
    return SeenEvent(
        at=at,
        event=NodeEvent(source="kernel_log", name=name, severity=severity, age_s=0, line=name, repeats=repeats),
    )


def judge(of: ClusterView) -> Finding:
    (finding,) = slow_node(of, SlowJob())
    return finding


def rising(counter: str = "pcie_replays", times: int = 6, first_at: float = CHANGE) -> dict[str, Any]:
    return {"rising": (Rise(counter=counter, first_at=first_at, last_at=NOW - 30, times=times),)}


SIGNS: dict[str, tuple[dict[str, Any], str]] = {
    "a low clock": ({"recent_sm_clock_hz": 1.7e9}, "1700 MHz under load"),
    "heat held it back often": (
        {"throttled": (("hw_thermal_slowdown", 0.4),)},
        "hw_thermal_slowdown (40% of five minutes)",
    ),
    "heat holds it back": ({"throttle": ("hw_thermal_slowdown",)}, "held back by hw_thermal_slowdown"),
    "less power than it usually draws": ({"recent_power_w": 480.0}, "79 % of its usual power"),
    "heat": ({"temperature_c": 88.0}, "88 C"),
    "a narrow link": ({"pcie_link_width": 8, "pcie_link_width_max": 16}, "8 of 16 lanes"),
    "NVLinks that are down": ({"nvlinks_down": 2}, "2 NVLinks"),
    "a counter that rises since": (rising(), "pcie_replays"),
}


@pytest.mark.parametrize("name", SIGNS)
def test_the_one_node_that_is_unlike_the_others_is_named_with_its_card(name: str) -> None:
    odd, words = SIGNS[name]
    finding = judge(view({"n3": odd}))
    assert finding.truth is Truth.BAD
    assert [(c.node, c.rank, c.gpu_uuid) for c in finding.culprits] == [("n3", 4, "GPU-n3-0")]
    assert words in finding.summary and "slower since step" in finding.summary
    assert (finding.exclude_nodes, finding.actionable) == (("n3",), True)


@pytest.mark.parametrize("name", SIGNS)
def test_slow_node_ignores_signs_shared_by_many_nodes(name: str) -> None:
    odd, _ = SIGNS[name]
    assert judge(view({"n2": odd, "n3": odd})).truth is Truth.UNKNOWN


def test_the_kernels_word_of_heat_and_a_stream_of_corrections_name_a_node() -> None:
    for events in ((event("cpu_throttled"),), (event("memory_corrected", repeats=20),)):
        finding = judge(view(events={"n2": events}))
        assert [(c.node, c.rank) for c in finding.culprits] == [("n2", None)]


def test_a_card_of_which_nothing_is_known_may_be_as_odd_as_the_one_that_is() -> None:
    odd = {"n3": {"recent_power_w": 480.0}}
    assert judge(view(odd)).truth is Truth.BAD
    for unknown in (
        {"recent_power_w": None},
        {"usual_power_w": None},
        {"busy_since": None, "idle_since": None},
    ):
        assert judge(view({**odd, "n1": unknown})).truth is not Truth.BAD


def test_several_nodes_that_are_odd_each_in_its_way_accuse_nobody() -> None:
    odd = {"n1": {"temperature_c": 88.0}, "n3": {"recent_power_w": 480.0}}
    assert judge(view(odd)).truth is Truth.UNKNOWN


OLD = NOW - 5000.0
NOBODY: dict[str, Callable[[], ClusterView]] = {
    "no signal": view,
    "one correction by chance": lambda: view(events={"n2": (event("pcie_corrected"),)}),
    "a counter that rose twice": lambda: view({"n3": rising(times=2)}),
    "a counter that rose long before": lambda: view({"n3": rising(first_at=OLD)}),
    "heat long before": lambda: view(events={"n2": (event("cpu_throttled", at=OLD),)}),
    "a card that was always slower": lambda: view({"n3": {"recent_sm_clock_hz": 1.7e9, "usual_sm_clock_hz": 1.7e9}}),
    "an idle card": lambda: view({"n3": {"recent_sm_clock_hz": 0.3e9, "busy_since": None, "throttle": ("hw_slowdown",)}}),
    "a card at its full power": lambda: view({"n3": {"throttle": ("sw_power_cap",)}}),
    "a card that has just begun": lambda: view({"n3": {"pcie_link_width": 8, "pcie_link_width_max": 16, "busy_since": NOW - 60}}),
    "no cards are known": lambda: view(gpus=()),
    "a node is silent": lambda: view({"n3": {"temperature_c": 88.0}}, silent_nodes=("n1",)),
    "a node has no agent": lambda: view({"n3": {"temperature_c": 88.0}}, nodes=NAMES[:3]),
    "too few steps": lambda: view({"n3": {"temperature_c": 88.0}}, series=[10.0] * 10),
    "the job is as fast as ever": lambda: view({"n3": {"temperature_c": 88.0}}, series=noisy([10.0] * 90, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", NOBODY)
def test_slow_node_names_no_node_if_there_is(name: str) -> None:
    finding = judge(NOBODY[name]())
    assert finding.truth is not Truth.BAD
    assert finding.culprits == ()


def test_of_two_cards_with_the_same_sign_none_is_chosen_by_its_place() -> None:
    slow = {"recent_sm_clock_hz": 1.2e9, "usual_sm_clock_hz": 1.98e9}
    usual = cards({"n2": slow})
    twins = tuple(RankGpu(rank=g.rank, pid=g.pid, view=card(1, node="n2", **slow)) if g.rank == 3 else g for g in usual)
    for gpus in (twins, twins[::-1]):
        found = judge(view(gpus=gpus))
        assert sorted(c.gpu_uuid or "" for c in found.culprits) == ["GPU-n2-0", "GPU-n2-1"]


def test_slow_node_attributes_signs_of_three_cards_to_the_node() -> None:
    slow = {"recent_sm_clock_hz": 1.2e9, "usual_sm_clock_hz": 1.98e9}
    three = tuple(RankGpu(rank=9 + i, pid=200 + i, view=card(i, node="n2", **slow)) for i in range(3))
    found = judge(view(gpus=(*(g for g in cards() if g.view.node != "n2"), *three)))
    assert [(c.node, c.gpu_uuid) for c in found.culprits] == [("n2", None)]


def test_a_job_on_one_node_has_nobody_to_compare_with() -> None:
    one = job(job=slurm_job(nodes=("n1",)), step_times=times(SLOWER), gpus=cards()[:2])
    assert slow_node(cluster(one), SlowJob()) == []


def test_a_counter_rises_since_the_first_of_its_rises_without_a_long_break() -> None:
    nodes = Nodes()

    def look(number: int, at: float, count: int) -> tuple[Rise, ...]:
        gpu = Gpu(uuid="GPU-1", index=0, pcie_replays=count)
        nodes.apply(Report(node="n1", boot_id="b", agent_id="a", sequence=number, gpus=(gpu,)), at)
        seen = nodes.view("n1")
        assert seen is not None
        return seen.gpus[0].rising

    assert look(1, 0.0, 70) == ()
    assert look(2, 60.0, 71) == (Rise(counter="pcie_replays", first_at=60.0, last_at=60.0, times=1),)
    assert look(3, 120.0, 71)[0].times == 1
    assert look(4, 180.0, 90) == (Rise(counter="pcie_replays", first_at=60.0, last_at=180.0, times=2),)
    assert look(5, 200.0 + RISE_BREAK_S, 90) == ()
    assert look(6, 260.0 + RISE_BREAK_S, 91)[0].times == 1
    assert look(7, 300.0 + RISE_BREAK_S, 0)[0].times == 1
