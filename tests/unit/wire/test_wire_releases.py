"""Agent and controller one release apart understand each other, in both directions: nodes are upgraded over days."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import inspect

from slurm_watchdog.model.observations import Gpu, Process, Role
from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import OPEN_LISTS, WireError, decode_reply, decode_report
from tests.builders.wire_fill import filled

MESSAGES = {"report": (Report, decode_report), "reply": (Reply, decode_reply)}


ORDER = {
    Process: [
        "cpu_ratio",
        "io_bytes_s",
        "storage_age_s",
        "worked_age_s",
        "quiet_s",
        "pid",
        "start_ticks",
        "job_id",
        "role",
        "comm",
        "state",
        "state_age_s",
        "uid",
        "member_by",
        "step_id",
        "rank",
        "local_rank",
        "world_size",
        "cpu_s",
        "io_bytes",
        "threads",
        "context_switches",
        "container_pid",
        "blocked",
        "collective_timeout_s",
        "collective_timeout_assumed",
        "runnable_s",
        "runnable_age_s",
    ],
    Gpu: [
        "ecc_corrected",
        "ecc_uncorrected",
        "remapped_rows_corrected",
        "remapped_rows_uncorrected",
        "remap_pending",
        "remap_failed",
        "retired_pages",
        "retired_pages_pending",
        "pcie_link_width",
        "pcie_link_width_max",
        "pcie_link_generation",
        "pcie_link_generation_max",
        "pcie_replays",
        "nvlinks_active",
        "nvlinks_down",
        "nvlink_errors",
        "sm_active_ratio",
        "tensor_active_ratio",
        "dram_active_ratio",
        "nvlink_bytes_s",
        "pcie_bytes_s",
        "mig",
        "idle_age_s",
        "busy_age_s",
        "recent_sm_clock_hz",
        "usual_sm_clock_hz",
        "recent_power_w",
        "usual_power_w",
        "usual_work_ratio",
        "throttled",
        "idle_ratio",
        "looks",
        "uuid",
        "index",
        "pci_bus_id",
        "minor",
        "name",
        "utilization_ratio",
        "sm_clock_hz",
        "memory_clock_hz",
        "power_w",
        "temperature_c",
        "memory_used_bytes",
        "memory_total_bytes",
        "throttle",
        "pids",
        "error",
        "process_memory_bytes",
    ],
}  # Of rows that travel as lists, in version 1 of the wire.


@pytest.mark.parametrize("kind", ORDER)
def test_what_travels_as_a_list_gets_new_fields_at_its_end(kind: type[Process] | type[Gpu]) -> None:
    assert list(kind.__struct_fields__[: len(ORDER[kind])]) == ORDER[kind]


@pytest.mark.parametrize("name", MESSAGES)
def test_fields_that_a_later_release_adds_are_passed_over(name: str) -> None:
    def with_more(value: Any) -> Any:
        if isinstance(value, dict):
            return {"added_later": {"x": [1]}, **{key: with_more(each) for key, each in value.items()}}
        return [with_more(each) for each in value] if isinstance(value, list) else value

    kind, decode = MESSAGES[name]
    message = filled(inspect.type_info(kind))
    assert decode(msgspec.msgpack.encode(with_more(message))) == decode(msgspec.msgpack.encode(message))


def test_a_command_that_a_later_controller_has_learnt_costs_no_other_command() -> None:
    reply = filled(inspect.type_info(Reply))
    known = decode_reply(msgspec.msgpack.encode(reply))
    reply["commands"].insert(0, {"type": "play_music", "id": "c9", "song": "x"})
    assert decode_reply(msgspec.msgpack.encode(reply)) == known
    assert len(known.commands) == len(OPEN_LISTS[Reply]["commands"][1])


@pytest.mark.parametrize(("name", "key"), [("events", "kind"), ("node_events", "severity")])
def test_a_kind_of_event_that_a_later_agent_has_learnt_costs_no_other_event(name: str, key: str) -> None:
    report = filled(inspect.type_info(Report))
    known = decode_report(msgspec.msgpack.encode(report))
    report[name].append({**report[name][0], key: "of_tomorrow"})
    assert decode_report(msgspec.msgpack.encode(report)) == known


def test_a_process_with_a_word_that_is_not_known_is_never_left_out_for_it_would_look_dead() -> None:
    report = filled(inspect.type_info(Report))
    report["processes"][0][Process.__struct_fields__.index("role")] = "conductor"
    with pytest.raises(WireError, match="conductor"):
        decode_report(msgspec.msgpack.encode(report))
    assert "processes" not in OPEN_LISTS[Report]
    assert set(Role) == {"rank", "worker", "helper"}  # a new one takes a new version of the wire


def test_report_with_a_new_word_and_another_error_is_refused() -> None:
    report = filled(inspect.type_info(Report))
    report["events"][0]["kind"] = "of_tomorrow"
    report["sequence"] = "seven"
    with pytest.raises(WireError, match="not a report"):
        decode_report(msgspec.msgpack.encode(report))
    with pytest.raises(WireError):
        decode_reply(msgspec.msgpack.encode({"commands": [{"type": 7}]}))
    with pytest.raises(WireError):
        decode_reply(msgspec.msgpack.encode([{"commands": []}]))


def test_another_version_of_the_wire_is_refused_with_what_to_do() -> None:
    report = filled(inspect.type_info(Report)) | {"version": 2}
    with pytest.raises(WireError, match="bring both to one release"):
        decode_report(msgspec.msgpack.encode(report))
