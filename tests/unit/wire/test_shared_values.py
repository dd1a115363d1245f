"""Texts and numbers that thousands of nodes have alike are held once, and the report stays the same."""

from __future__ import annotations

from msgspec.structs import replace

from lab.bench.fleet_reports import Shape, report_of
from slurm_watchdog.controller.state.agents import with_shared_values
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import decode_report, encode_report


def arrived(index: int) -> Report:
    sent = replace(report_of(Shape(4, 1), index, 1, 0), agent_id="a", sequence=1)
    return decode_report(encode_report(sent))


def test_values_of_two_nodes_that_are_alike_are_one_and_nothing_else_changes() -> None:
    one, other = arrived(0), arrived(1)
    assert one.gpus[0].name is not other.gpus[0].name, "each report has its own when it arrives"
    first, second = with_shared_values(one), with_shared_values(other)
    assert (first, second) == (one, other)
    for mine, theirs in zip(first.gpus, second.gpus, strict=True):
        assert mine.name is theirs.name and mine.pci_bus_id is theirs.pci_bus_id and mine.uuid != theirs.uuid
        assert mine.memory_total_bytes is theirs.memory_total_bytes
    for process, neighbour in zip(first.processes, second.processes, strict=True):
        assert process.comm is neighbour.comm and process.job_id is neighbour.job_id
        assert process.uid is neighbour.uid and process.world_size is neighbour.world_size
        assert process.state is first.processes[0].state or process.state != first.processes[0].state


def test_a_report_without_processes_or_gpus_is_taken_as_it_is() -> None:
    empty = Report(node="n1", boot_id="b", agent_id="a", sequence=1)
    assert with_shared_values(empty) == empty
