"""From what a simulated agent has to say to the `Report` that the real agent makes of it, with the agent's own
functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from slurm_watchdog.agent.logs.log_file import condense, shown
from slurm_watchdog.agent.logs.step_rows import StepRows, make_event
from slurm_watchdog.model.observations import Event, EventKind, LogFile, NodeEvent
from slurm_watchdog.model.report import Report
from slurm_watchdog.parse.training_log.line import parse_line
from slurm_watchdog.parse.training_log.text import LogFact
from tests.accuracy.world import INTERVAL_S, Said
from tests.builders.kernel_messages import parse_kernel_line


@dataclass
class Reader:
    """Reads the simulated logs as the agent does: a bar that was redrawn says nothing new."""

    grown: dict[tuple[str, str], float] = field(default_factory=dict)
    """(job, file) -> when its newest line was written: a file that is followed is in every report."""
    _last: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def events(self, said: Said) -> tuple[tuple[Event, ...], int]:
        """The events of these lines, and how many more were left out."""
        found: dict[tuple[str, str], list[Event]] = {}
        rows: dict[tuple[str, str], StepRows] = {}
        for at, job_id, stream, text in said.lines:
            for line in text.replace("\r", "\n").split("\n"):
                fact = parse_line(line) if line else None
                if fact is None or self._known(job_id, stream, fact):
                    continue
                items, open_rows = found.setdefault((job_id, stream), []), rows.setdefault((job_id, stream), StepRows())
                age_s = said.at - at if said.dated else 0.0
                if fact.kind is EventKind.PROGRESS:
                    items += open_rows.add(fact, age_s)
                else:
                    items += [*open_rows.close(), make_event(fact, age_s)]
        events: list[Event] = []
        dropped = 0
        for (job_id, stream), items in found.items():
            kept, left_out = condense(items + rows[job_id, stream].close())
            dropped += left_out
            events += [replace(shown(event), job_id=job_id, source=stream) for event in kept]
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
