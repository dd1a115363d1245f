"""From reports and listings to lines of a trace, such that replaying them gives what was judged. Pure.

The fields that trace v1 has are written as everybody writes them; whatever else our own values hold goes into `more`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from slurm_watchdog.model.observations import Checkpoint, Event, Gpu, LogFile, MountProbe, NodeEvent, Process
from slurm_watchdog.model.protocol import CommandResult
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.trace.processes import TICKS_PER_S
from slurm_watchdog.trace.records import MAX_LINE_BYTES, Own
from slurm_watchdog.trace.to_report import KEPT_OF_REPORT, MIB

GONE_STATE = "NOT_LISTED"  # Of a job that Slurm's list does not have any more.


def line_of(t: float, kind: str, fields: dict[str, Any]) -> bytes | None:
    """One line with its end; None if it would be longer than any reader takes."""
    given = {name: value for name, value in fields.items() if value is not None and value != {}}
    line = msgspec.json.encode({"t": round(t, 3), "kind": kind, **given}) + b"\n"
    return line if len(line) <= MAX_LINE_BYTES else None


def report_lines(report: Report, t: float) -> Iterator[bytes | None]:
    """Everything that one report says, received at `t`. None stands for a line that is too long."""
    more = {"listed": len(report.processes), "boot_id": report.boot_id} | _rest(report, KEPT_OF_REPORT)
    node = report.node
    yield line_of(t, "report", {"node": node, "more": more})
    for kind, name, fields_of in SECTIONS:
        for row in getattr(report, name):
            yield line_of(t, kind, {"node": node, **fields_of(row)})
    for result in report.results:
        yield from _result_lines(node, result, t)


def listing_lines(jobs: Iterable[SlurmJob], nodes: Iterable[SlurmNode], t: float) -> Iterator[bytes | None]:
    """Slurm's word about these jobs and nodes."""
    v1 = ("job_id", "state", "nodes", "restarts", "name", "user", "batch_host")
    for job in jobs:
        built = msgspec.to_builtins(job)
        fields = {name: built.pop(name, getattr(job, name)) for name in v1}
        yield line_of(t, "job", {**fields, "more": built})
    for node in nodes:
        built = msgspec.to_builtins(node)
        fields = {"node": built.pop("name"), "state": built.pop("state"), "reason": node.reason}
        built.pop("reason", None)
        yield line_of(t, "node", {**fields, "more": {k: v for k, v in built.items() if v}})


def own_line(record: Own, t: float) -> bytes | None:
    """What the controller says of itself."""
    fields = msgspec.to_builtins(record)
    return line_of(t, fields.pop("kind"), {name: fields[name] for name in fields if name != "t"})


def gone_line(job_id: str, t: float) -> bytes | None:
    """Slurm does not list this job any more."""
    return line_of(t, "job", {"job_id": job_id, "state": GONE_STATE})


def _rest(value: msgspec.Struct, names: Iterable[str]) -> dict[str, Any]:
    built = msgspec.to_builtins(value)  # defaults are left out
    return {name: built[name] for name in names if name in built}


def _split(value: msgspec.Struct, moved: Mapping[str, str], **given: Any) -> dict[str, Any]:
    """The fields of a line: those of trace v1 that a value has as they are (`moved`: v1's name -> ours), those
    that are computed from it, and `more`, with whatever else it holds."""
    built = msgspec.to_builtins(value)
    return {name: built.pop(field, None) for name, field in moved.items()} | given | {"more": built}


def _process(process: Process) -> dict[str, Any]:
    moved = {"job_id": "job_id", "rank": "rank", "pid": "pid", "start": "start_ticks", "state": "state"}
    line = _split(process, moved | {"cpu_s": "cpu_s"}, state_age_s=process.state_age_s)
    line["start"] = process.start_ticks / TICKS_PER_S
    call = process.blocked
    if call is not None:
        line["state_age_s"] = call.seconds
        line |= {name: getattr(call, name) for name in ("wchan", "syscall", "path", "mount")}
    # Exactly what the agent said: its age in this state, and nothing of a call that it does not stand in.
    line["more"] = {"state_age_s": None, "blocked": None} | line["more"]
    return line


def _gpu(gpu: Gpu) -> dict[str, Any]:
    moved = {"gpu": "index", "uuid": "uuid", "power_w": "power_w", "temp_c": "temperature_c", "throttle": "throttle"}
    ratio, clock_hz, used = gpu.utilization_ratio, gpu.sm_clock_hz, gpu.memory_used_bytes
    return _split(
        gpu,
        moved | {"pids": "pids"},
        util=None if ratio is None else round(100 * ratio, 1),
        sm_clock_mhz=None if clock_hz is None else clock_hz / 1e6,
        mem_used_mib=None if used is None else used // MIB,
    )


def _event(event: Event) -> dict[str, Any]:
    line = _split(event, {"job_id": "job_id", "stream": "source", "line": "line"})
    return line | {"line": event.line}


def _log_file(log: LogFile) -> dict[str, Any]:
    line = _split(log, {"job_id": "job_id", "stream": "path"})
    return line | {"more": {"growth_age_s": None} | line["more"]}  # `more` without `line` is what makes it one


def _node_event(event: NodeEvent) -> dict[str, Any]:
    return _split(event, {"line": "line"}) | {"line": event.line}


def _probe(probe: MountProbe) -> dict[str, Any]:
    line = _split(probe, {"mount": "mount", "responding": "responding", "probe_s": "seconds"})
    return line | {"more": {"wrote": False} | line["more"]}


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return _split(checkpoint, {"job_id": "job_id"}, step=checkpoint.step, complete=not checkpoint.writing)


SECTIONS: tuple[tuple[str, str, Callable[[Any], dict[str, Any]]], ...] = (
    ("proc", "processes", _process),
    ("gpu", "gpus", _gpu),
    ("log", "events", _event),
    ("log", "logs", _log_file),
    ("kmsg", "node_events", _node_event),
    ("mount", "mounts", _probe),
    ("checkpoint", "checkpoints", _checkpoint),
)
"""Kind of line, the report's rows that are written so, and how one of them is."""


def _result_lines(node: str, result: CommandResult, t: float) -> Iterator[bytes | None]:
    if result.probe is not None:
        yield line_of(t, "mount", {"node": node, **_probe(result.probe)})
    for stack in result.stacks:
        fields = {"node": node, "job_id": stack.job_id, "dump": result.command_id, "of": len(result.stacks)}
        yield line_of(t, "stack", fields | {"stack": msgspec.to_builtins(stack)})
