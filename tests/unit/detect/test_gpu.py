"""Faults and low clocks of GPUs: the right card is named, an idle one never, a program's fault is not the
hardware's."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.detect import device_rules, gpu_fault
from slurm_watchdog.detect.gpu_fault import GpuFault
from slurm_watchdog.knowledge.xids import describe_xid
from slurm_watchdog.model.cluster_view import ClusterView, RankGpu
from slurm_watchdog.model.incidents import Finding, Severity, Truth
from slurm_watchdog.model.node_view import GpuView, SeenEvent, SlurmNodeView
from slurm_watchdog.model.observations import FaultSeverity, HungProbe, NodeEvent
from tests.builders.gpu_faults import NOW, card, nodes, xid
from tests.builders.views import cluster, job

SETTINGS = GpuFault()


def faults(view: ClusterView) -> list[Finding]:
    return [f for f in gpu_fault.detect(view, SETTINGS) if f.truth is Truth.BAD]


def test_nothing_is_wrong_with_a_card_that_is_well() -> None:
    found = gpu_fault.detect(nodes(), SETTINGS)
    assert found and all(f.truth is Truth.OK for f in found)


@pytest.mark.parametrize(
    "error",
    [
        "NVML_ERROR_GPU_IS_LOST: GPU is lost",
        "NVML does not list this GPU any more",
        "NVML_ERROR_RESET_REQUIRED: x",
    ],
)
def test_a_card_that_is_gone_is_named_with_its_node_and_its_rank(error: str) -> None:
    gone = card(utilization_ratio=None, busy_since=None, error=error)
    (found,) = faults(nodes(gpus=(gone, card(1))))
    assert (found.culprits[0].node, found.culprits[0].gpu_uuid) == ("n1", "GPU-n1-0")
    assert found.severity is Severity.CRITICAL
    assert any("rank 0 of job 7" in fact for fact in found.facts)


def test_a_card_that_is_lost_lists_nobody_and_its_rank_is_remembered() -> None:
    gone = card(utilization_ratio=None, busy_since=None, error="NVML_ERROR_GPU_IS_LOST: GPU is lost", pids=())
    view = nodes(gpus=(gone, card(1)))
    seat = RankGpu(rank=0, pid=100, view=gone)
    (found,) = faults(replace(view, jobs=(replace(view.jobs[0], gpus=(seat,)),)))
    assert [(c.rank, c.pid) for c in found.culprits] == [(0, 100)]
    assert found.job_ids == ("7",)


def test_a_line_about_a_card_that_nobody_knows_names_its_process() -> None:
    """Whose GPU is then known from the time before: GpuPids remembers it."""
    line = xid(79, FaultSeverity.CRITICAL, pci_bus_id="0000:9a:00.0", pid=101)
    (found,) = faults(nodes(events=(line,), gpus=()))
    assert [(c.node, c.pid, c.gpu_uuid) for c in found.culprits] == [("n1", 101, None)]
    stranger = xid(79, FaultSeverity.CRITICAL, pci_bus_id="0000:9a:00.0", pid=4242)
    (found,) = faults(nodes(events=(stranger,), gpus=()))
    assert [(c.pid, c.rank) for c in found.culprits] == [(4242, None)]
    assert found.job_ids == ()


def test_a_card_that_says_nothing_for_another_reason_is_unknown() -> None:
    mute = card(utilization_ratio=None, busy_since=None, error="NVML has not answered for 7.0 s")
    assert [f.truth for f in gpu_fault.detect(nodes(gpus=(mute,)), SETTINGS)] == [Truth.OK, Truth.UNKNOWN]


@pytest.mark.parametrize("number", [48, 64, 79, 95, 119, 120])
def test_a_hardware_xid_is_a_fault_of_the_card_at_that_address(number: int) -> None:
    (found,) = faults(nodes(gpus=(card(0), card(1)), events=(xid(number, FaultSeverity.CRITICAL),)))
    assert found.culprits[0].gpu_uuid == "GPU-n1-0"
    assert f"Xid {number}" in found.summary
    assert found.duration_s == 5.0


@pytest.mark.parametrize(
    ("changes", "events", "avoided", "actionable"),
    [
        ({"error": "NVML_ERROR_GPU_IS_LOST: GPU is lost", "busy_since": None}, (), True, True),
        ({"remap_failed": True}, (), True, False),  # it is to be exchanged one day, and stops nobody
        ({}, ((79, True),), True, True),
        ({"pids": ()}, ((79, True),), True, False),  # whose card it was is not known
        ({}, ((63, False),), False, False),
        ({"ecc_uncorrected_rose_at": NOW - 20, "ecc_uncorrected": 1}, (), False, False),
        ({"remap_pending": True}, (), False, False),
    ],
)
def test_a_restart_avoids_a_node_only_where_hardware_is_proven_to_be_broken(
    changes: dict[str, Any], events: tuple[tuple[int, bool], ...], avoided: bool, actionable: bool
) -> None:
    lines = tuple(xid(number, FaultSeverity.CRITICAL, may_exclude_node=sure) for number, sure in events)
    (found,) = faults(nodes(gpus=(card(**changes),), events=lines))
    assert found.exclude_nodes == (("n1",) if avoided else ())
    assert found.actionable is actionable


@pytest.mark.parametrize("number", [63, 94])
def test_memory_that_failed_is_reported_and_keeps_no_job_off_the_node(number: int) -> None:
    (found,) = faults(nodes(events=(xid(number, describe_xid(number).severity),)))
    assert (found.severity, found.exclude_nodes, found.job_ids) == (Severity.WARNING, (), ())


@pytest.mark.parametrize("number", [13, 31, 43, 45])
def test_an_applications_xid_is_no_fault_of_the_gpu(number: int) -> None:
    assert faults(nodes(events=(xid(number, FaultSeverity.WARNING),))) == []


def test_an_xid_is_over_after_its_time() -> None:
    view = nodes(events=(xid(79, FaultSeverity.CRITICAL, age_s=601.0),))
    assert faults(view) == []
    assert all(f.truth is Truth.OK for f in gpu_fault.detect(view, SETTINGS))


def test_where_no_address_is_known_the_process_in_the_line_tells_its_gpu() -> None:
    cards = (card(0, pci_bus_id=None), card(1, pci_bus_id=None))
    line = xid(79, FaultSeverity.CRITICAL, pci_bus_id="0000:9a:00.0", pid=101)
    (found,) = faults(nodes(gpus=cards, events=(line,)))
    assert found.culprits[0].gpu_uuid == "GPU-n1-1"
    both = (card(0, pci_bus_id=None, pids=(101,)), card(1, pci_bus_id=None))
    (found,) = faults(nodes(gpus=both, events=(line,)))
    assert found.culprits[0].gpu_uuid is None


def test_a_card_that_nvml_does_not_list_is_named_by_its_address() -> None:
    (found,) = faults(nodes(events=(xid(79, FaultSeverity.CRITICAL, pci_bus_id="0000:9a:00.0"),)))
    assert found.culprits[0].gpu_uuid is None
    assert "0000:9a:00.0" in found.summary


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({"ecc_uncorrected_rose_at": NOW - 20, "ecc_uncorrected": 1}, Severity.CRITICAL),
        ({"remap_failed": True}, Severity.CRITICAL),
        ({"remap_pending": True}, Severity.WARNING),
        ({"retired_pages_pending": True}, Severity.WARNING),
        ({"pcie_link_width": 8, "pcie_link_width_max": 16}, Severity.WARNING),
    ],
)
def test_gpu_fault_reports_the_cards_own_fault_flags(changes: dict[str, Any], severity: Severity) -> None:
    (found,) = faults(nodes(gpus=(card(**changes),)))
    assert found.severity is severity


@pytest.mark.parametrize(
    "changes",
    [
        {"ecc_uncorrected": 7},
        {"ecc_corrected": 100_000},
        {"pcie_link_width": 8, "pcie_link_width_max": 16, "busy_since": None},
        {"pcie_link_generation": 1, "pcie_link_generation_max": 5},
        {"remapped_rows_uncorrected": 3},
    ],
)
def test_old_errors_and_power_saving_are_no_fault(changes: dict[str, Any]) -> None:
    assert faults(nodes(gpus=(card(**changes),))) == []


def test_a_driver_that_does_not_answer_is_the_nodes_trouble_after_its_time() -> None:
    for seconds, truth in ((30.0, Truth.UNKNOWN), (61.0, Truth.BAD)):
        driver = gpu_fault.detect(nodes(hung_probes=(HungProbe(probe="nvml", seconds=seconds),)), SETTINGS)[0]
        assert (driver.subject, driver.truth) == ("node:n1", truth)


def test_a_silent_node_has_no_fault() -> None:
    view = replace(nodes(events=(xid(79, FaultSeverity.CRITICAL),)), silent_nodes=("n1",))
    assert gpu_fault.detect(view, SETTINGS) == []


def test_on_a_node_that_was_drained_nothing_is_told() -> None:
    view = nodes(events=(xid(79, FaultSeverity.CRITICAL),))
    for state, told in (("IDLE+DRAIN", False), ("MIXED+DRAIN", True), ("ALLOCATED", True)):
        states = (SlurmNodeView(name="n1", state=state),)
        assert bool(faults(replace(view, slurm_nodes=states))) is told


# ------------------------------------------------------------------------------------------------ clocks


def clocks(*cards: GpuView) -> Finding:
    seats = tuple(RankGpu(rank=rank, pid=100 + rank, view=each) for rank, each in enumerate(cards))
    (found,) = device_rules.CLOCK_LOW.detect(cluster(job(gpus=seats)))
    return found


def test_where_the_past_is_not_known_the_first_of_two_kinds_of_cards_to_be_low_enough_is_not_accused() -> None:
    """The median lies between 1395 and 1700 MHz, and the noise of a minute puts one card below nine tenths of it."""
    slow = [
        card(0, name="", recent_sm_clock_hz=(1.393e9, 1.4e9)[n > 0], node=f"n{n}", usual_sm_clock_hz=None)
        for n in range(8)
    ]
    fast = [card(0, name="", recent_sm_clock_hz=1.7e9, node=f"m{n}", usual_sm_clock_hz=None) for n in range(8)]
    assert clocks(*slow, *fast).truth is Truth.OK


def line(name: str, *, age_s: float = 5.0, **changes: Any) -> SeenEvent:
    given = {
        "source": "kernel_log",
        "name": name,
        "part": "gpu",
        "severity": FaultSeverity.CRITICAL,
        "line": f"the words of {name}",
    }
    return SeenEvent(at=NOW - age_s, event=NodeEvent(age_s=0.0, **{**given, **changes}))


def test_a_gpu_that_an_assertion_does_not_name_excludes_its_node_once() -> None:
    lost = line("gpu_lost", may_exclude_node=True)
    (found,) = faults(nodes(events=(lost,)))
    assert found.summary == "A GPU of n1, which its driver does not name: 5 s ago: the words of gpu_lost."
    assert (found.exclude_nodes, found.job_ids, found.culprits[0].gpu_uuid) == (("n1",), ("7",), None)
    named = xid(79, FaultSeverity.CRITICAL, may_exclude_node=True)
    (found,) = faults(nodes(events=(named, lost)))
    assert found.culprits[0].gpu_uuid == "GPU-n1-0"


def test_a_reset_that_failed_and_succeeded_later_is_no_fault() -> None:
    failed = line("amdgpu_reset_failed", pci_bus_id="0000:00:00.0", age_s=50.0, may_exclude_node=True)
    done = line("amdgpu_reset_done", pci_bus_id="0000:00:00.0", severity=FaultSeverity.INFO)
    other = line("amdgpu_reset_done", pci_bus_id="0000:07:00.0", severity=FaultSeverity.INFO)
    assert not faults(nodes(events=(failed, done)))
    for events in (
        (failed,),
        (failed, other),
        (line("amdgpu_reset_failed", pci_bus_id="0000:00:00.0", age_s=1.0, may_exclude_node=True), done),
    ):
        (found,) = faults(nodes(events=events))
        assert found.exclude_nodes == ("n1",)


def test_a_gpu_that_needs_a_reset_is_reported_and_excludes_nothing() -> None:
    (found,) = faults(nodes(events=(xid(109, FaultSeverity.ERROR),)))
    assert "needs a reset" in found.summary and found.exclude_nodes == ()
