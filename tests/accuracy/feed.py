"""From what a simulated agent has to say to what the product takes: a `Report`, or the lines of a *trace v1*.

Both are made from the same `Said`. A report holds what the real agent makes of it, with the agent's own
functions; a trace holds nothing but the fields that trace v1 has, raw lines included, as somebody else would
write it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.logs.log_file import condense, make_event
from slurm_watchdog.model.observations import Event, EventKind, Gpu, LogFile, NodeEvent, Process
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmView
from slurm_watchdog.parse.kernel_log.file import parse_kernel_line
from slurm_watchdog.parse.training_log.line import parse_line
from slurm_watchdog.parse.training_log.text import LogFact
from tests.accuracy.world import INTERVAL_S, Said

Line = dict[str, Any]


@dataclass
class Reader:
    """Reads the simulated logs as the agent does: a bar that was redrawn says nothing new."""

    grown: dict[tuple[str, str], float] = field(default_factory=dict)
    """(job, file) -> when its newest line was written: a file that is followed is in every report."""
    _last: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def events(self, said: Said) -> tuple[tuple[Event, ...], int]:
        """The events of these lines, and how many more were left out."""
        found: dict[tuple[str, str], list[Event]] = {}
        for at, job_id, stream, text in said.lines:
            for line in text.replace("\r", "\n").split("\n"):
                fact = parse_line(line) if line else None
                if fact is not None and not self._known(job_id, stream, fact):
                    found.setdefault((job_id, stream), []).append(
                        make_event(line, fact, said.at - at if said.dated else 0.0)
                    )
        events: list[Event] = []
        dropped = 0
        for (job_id, stream), items in found.items():
            kept, left_out = condense(items)
            dropped += left_out
            events += [replace(event, job_id=job_id, source=stream) for event in kept]
        return tuple(events), dropped

    def _known(self, job_id: str, stream: str, fact: LogFact) -> bool:
        if fact.kind is not EventKind.PROGRESS or fact.step is None:
            return False
        key = (job_id, stream, fact.pattern)
        known = self._last.get(key) == fact.step
        self._last[key] = fact.step
        return known


def report_of(said: Said, reader: Reader) -> Report:
    """The report that the agent of this node would have sent."""
    node = said.node
    node.sequence += 1
    events, dropped = reader.events(said)
    reader.grown |= {(job_id, stream): at for at, job_id, stream, _ in said.lines}
    return Report(
        node=node.name,
        boot_id=node.boot_id,
        agent_id=f"{node.name}-{node.agent}",
        sequence=node.sequence,
        interval_s=INTERVAL_S,
        processes=tuple(said.processes),
        gpus=tuple(said.gpus),
        events=events,
        events_dropped=dropped,
        logs=tuple(
            LogFile(job_id=job_id, path=path, growth_age_s=said.at - at) for (job_id, path), at in reader.grown.items()
        ),
        node_events=tuple(_kernel_events(said)),
        mounts=tuple(said.probes),
        hung_probes=tuple(said.hung),
        checkpoints=tuple(said.checkpoints),
        gpu_holders=tuple(said.holders),
        usages=said.usages,
        pressures=said.pressures,
        links=said.links,
    )


def _kernel_events(said: Said) -> Iterator[NodeEvent]:
    for at, line in said.kernel:
        fact = parse_kernel_line(line)
        if fact is not None:
            yield NodeEvent(
                source="kernel_log",
                name=fact.name,
                severity=fact.severity,
                age_s=said.at - at,
                line=fact.message,
                xid=fact.xid,
                gpu_uuid=fact.gpu,
                pci_bus_id=fact.pci_bus_id,
                pid=fact.pid,
                process=fact.process,
                mount=fact.mount,
                server=fact.server,
                device=fact.device,
                may_exclude_node=fact.may_exclude_node,
                part=fact.part,
            )


# ------------------------------------------------------------------------------------ trace v1


def trace_of(said: Said, t: float) -> Iterator[Line]:
    """The lines of one report that came at `t`."""
    node = said.node.name
    more = {
        name: msgspec.to_builtins(rows)
        for name, rows in (
            ("usages", said.usages), ("pressures", said.pressures), ("links", said.links), ("hung_probes", said.hung)
        )
        if rows
    }  # fmt: skip
    yield {"t": t, "kind": "report", "node": node} | ({"more": more} if more else {})
    for process in said.processes:
        yield _bare({"t": t, "kind": "proc", "node": node, **_process(process)})
    for gpu in said.gpus:
        yield _bare({"t": t, "kind": "gpu", "node": node, **_gpu(gpu, said.processes)})
    for _, job_id, stream, text in said.lines:
        yield {"t": t, "kind": "log", "node": node, "job_id": job_id, "stream": stream, "line": text}
    for _, text in said.kernel:
        yield {"t": t, "kind": "kmsg", "node": node, "line": text}
    for probe in said.probes:
        yield {"t": t, "kind": "mount", "node": node, "mount": probe.mount, "responding": probe.responding,
               "probe_s": probe.seconds if probe.responding else None}  # fmt: skip
    for checkpoint in said.checkpoints:
        if checkpoint.step is not None:
            yield {"t": t, "kind": "checkpoint", "node": node, "job_id": checkpoint.job_id, "step": checkpoint.step,
                   "complete": True}  # fmt: skip


def _process(process: Process) -> Line:
    call = process.blocked
    fields = {
        "job_id": process.job_id,
        "rank": process.rank,
        "pid": process.pid,
        "start": process.start_ticks / 100,
        "state": process.state,
        "state_age_s": process.state_age_s,
        "cpu_s": process.cpu_s,
    }
    if call is not None:
        fields |= {
            "state_age_s": call.seconds,
            "wchan": call.wchan,
            "syscall": call.syscall,
            "path": call.path,
            "mount": call.mount,
        }
    return fields


def _gpu(gpu: Gpu, processes: Iterable[Process]) -> Line:
    jobs = [process.job_id for process in processes if process.pid in (gpu.pids or ())]
    return {
        "job_id": jobs[0] if jobs else None,
        "gpu": gpu.index,
        "uuid": gpu.uuid,
        "util": None if gpu.utilization_ratio is None else round(100 * gpu.utilization_ratio),
        "sm_clock_mhz": None if gpu.sm_clock_hz is None else gpu.sm_clock_hz / 1e6,
        "power_w": gpu.power_w,
        "temp_c": gpu.temperature_c,
        "mem_used_mib": None if gpu.memory_used_bytes is None else gpu.memory_used_bytes >> 20,
        "throttle": None if gpu.throttle is None else list(gpu.throttle),
        "pids": None if gpu.pids is None else list(gpu.pids),
    }


AGAIN_S = 60.0
"""Slurm's word about a job is written again after so long, although nothing has changed: time passes."""


def slurm_trace(view: SlurmView, t: float, told: dict[str, tuple[object, float]]) -> Iterator[Line]:
    """Slurm's words that have changed since the last time; `told` remembers them."""
    for node in view.nodes:
        usual = node.state in ("ALLOCATED", "IDLE")
        if (node.name in told and told[node.name][0] == node.state) or (usual and node.name not in told):
            continue
        told[node.name] = (node.state, t)
        yield {"t": t, "kind": "node", "node": node.name, "state": node.state}
    for job in view.jobs:
        now = (job.state, job.nodes, job.restarts)
        before, at = told.get(job.job_id, (None, t))
        if before != now or t - at >= AGAIN_S:
            told[job.job_id] = (now, t)
            yield _bare(
                {
                    "t": t,
                    "kind": "job",
                    "job_id": job.job_id,
                    "state": job.state,
                    "nodes": list(job.nodes) or None,
                    "restarts": job.restarts,
                    "name": job.name,
                    "user": job.user,
                    "batch_host": job.batch_host,
                }
            )


def _bare(line: Line) -> Line:
    return {name: value for name, value in line.items() if value is not None}
