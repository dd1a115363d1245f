"""From reports and listings to lines of a trace, such that replaying them gives what was judged. Pure.

The fields that trace v1 has are written as everybody writes them; whatever else our own values hold goes into `more`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from slurm_watchdog.model.observations import Checkpoint, Event, Gpu, LogFile, MountProbe, NodeEvent, Process
from slurm_watchdog.model.protocol import CommandResult
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.trace.processes import TICKS_PER_S
from slurm_watchdog.trace.records import MAX_LINE_BYTES, Own
from slurm_watchdog.trace.to_report import KEPT_OF_REPORT, MIB

GONE_STATE = "NOT_LISTED"
"""Of a job that Slurm's list does not have any more."""


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
    for process in report.processes:
        yield line_of(t, "proc", {"node": node, **_process(process)})
    for gpu in report.gpus:
        yield line_of(t, "gpu", {"node": node, **_gpu(gpu)})
    for event in report.events:
        yield line_of(t, "log", {"node": node, **_event(event)})
    for log in report.logs:
        yield line_of(t, "log", {"node": node, **_log_file(log)})
    for said in report.node_events:
        yield line_of(t, "kmsg", {"node": node, **_node_event(said)})
    for probe in report.mounts:
        yield line_of(t, "mount", {"node": node, **_probe(probe)})
    for checkpoint in report.checkpoints:
        yield line_of(t, "checkpoint", {"node": node, **_checkpoint(checkpoint)})
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


def _process(process: Process) -> dict[str, Any]:
    built = msgspec.to_builtins(process)
    call = process.blocked
    fields = {
        "job_id": built.pop("job_id"),
        "rank": built.pop("rank", None),
        "pid": built.pop("pid"),
        "start": built.pop("start_ticks") / TICKS_PER_S,
        "state": built.pop("state"),
        "state_age_s": built.get("state_age_s"),
        "cpu_s": built.pop("cpu_s", None),
    }
    if call is not None:
        fields |= {
            "state_age_s": call.seconds,
            "wchan": call.wchan,
            "syscall": call.syscall,
            "path": call.path,
            "mount": call.mount,
        }
    # Exactly what the agent said: its age in this state, and nothing of a call that it does not stand in.
    built.setdefault("state_age_s", None)
    built.setdefault("blocked", None)
    return {**fields, "more": built}


def _gpu(gpu: Gpu) -> dict[str, Any]:
    built = msgspec.to_builtins(gpu)
    used = built.get("memory_used_bytes")
    ratio, clock_hz = built.get("utilization_ratio"), built.get("sm_clock_hz")
    return {
        "gpu": built.pop("index"),
        "uuid": built.pop("uuid"),
        "util": None if ratio is None else round(100 * ratio, 1),
        "sm_clock_mhz": None if clock_hz is None else clock_hz / 1e6,
        "power_w": built.pop("power_w", None),
        "temp_c": built.pop("temperature_c", None),
        "mem_used_mib": None if used is None else used // MIB,
        "throttle": built.pop("throttle", None),
        "pids": built.pop("pids", None),
        "more": built,
    }


def _event(event: Event) -> dict[str, Any]:
    built = msgspec.to_builtins(event)
    fields = {"job_id": built.pop("job_id"), "stream": built.pop("source"), "line": built.pop("line", "")}
    return {**fields, "more": built}


def _log_file(log: LogFile) -> dict[str, Any]:
    built = msgspec.to_builtins(log)
    built.setdefault("growth_age_s", None)  # `more` without `line` is what makes it one
    return {"job_id": built.pop("job_id"), "stream": built.pop("path"), "more": built}


def _node_event(event: NodeEvent) -> dict[str, Any]:
    built = msgspec.to_builtins(event)
    return {"line": built.pop("line", ""), "more": built}


def _probe(probe: MountProbe) -> dict[str, Any]:
    built = msgspec.to_builtins(probe)
    fields = {"mount": built.pop("mount"), "responding": built.pop("responding")}
    return {**fields, "probe_s": built.pop("seconds"), "more": {"wrote": False} | built}


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    built = msgspec.to_builtins(checkpoint)
    fields = {"job_id": built.pop("job_id"), "step": checkpoint.step, "complete": not checkpoint.writing}
    return {**fields, "more": built}


def _result_lines(node: str, result: CommandResult, t: float) -> Iterator[bytes | None]:
    if result.probe is not None:
        yield line_of(t, "mount", {"node": node, **_probe(result.probe)})
    for stack in result.stacks:
        fields = {
            "node": node,
            "job_id": stack.job_id,
            "dump": result.command_id,
            "of": len(result.stacks),
            "stack": msgspec.to_builtins(stack),
        }
        yield line_of(t, "stack", fields)
