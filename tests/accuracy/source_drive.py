"""A judgement without some of its sources of evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as changed

from slurm_watchdog.config.schema import Config
from slurm_watchdog.model.evidence import ProcessStack, WaitingThreads
from slurm_watchdog.model.observations import MountProbe, Role
from slurm_watchdog.model.report import Report
from tests.accuracy.drive import Drive, _Mail
from tests.accuracy.looks import Look
from tests.accuracy.run import COARSE_LOOKS_S
from tests.accuracy.training import Job, Node, Rank, Worker
from tests.accuracy.world import Mount, World

STACKS, GPUS, JOB_LOG, KERNEL_LOG = "stacks", "GPU readings", "the job's log", "the kernel's log"
SLEEP, PROBES, MEMORY, LINKS = "sleep in the kernel", "probes of mounts", "memory and limits", "links"

_EMPTY: Mapping[str, Mapping[str, Any]] = {
    GPUS: {"gpus": (), "gpu_holders": ()},
    JOB_LOG: {"events": (), "logs": ()},
    KERNEL_LOG: {"node_events": ()},
    MEMORY: {"usages": (), "pressures": ()},
    LINKS: {"links": ()},
    PROBES: {"mounts": ()},
}
"""Source -> what a report holds where an agent does not have it."""
_HUNG_PROBES: Mapping[str, str] = {LINKS: "links"}
"""Source -> the look at it, which may hang."""


class SourceDrive(Drive):
    """`off`: of the sources above, FLIGHT_RECORDER and RAS."""

    def __init__(self, world: World, off: frozenset[str]):
        super().__init__(world, Config(), calm_s=COARSE_LOOKS_S)
        self._off = off
        kept = world.records
        if kept is not None:
            world.records = lambda: tuple(each for each in kept() if each.source not in off)

    def _deliver(self, mail: _Mail, t: float) -> None:
        super()._deliver(replace(mail, report=self._without(mail.report)), t)

    def _without(self, report: Report) -> Report:
        fields: dict[str, Any] = {}
        for source in self._off & _EMPTY.keys():
            fields |= _EMPTY[source]
        looks = {_HUNG_PROBES[source] for source in self._off & _HUNG_PROBES.keys()}
        if looks:
            fields["hung_probes"] = tuple(each for each in report.hung_probes if each.probe not in looks)
        if SLEEP in self._off:
            fields["processes"] = tuple(
                changed(each, blocked=None, state="S", state_age_s=None) if each.blocked or each.state == "D" else each
                for each in report.processes
            )
        return changed(report, **fields) if fields else report

    def _dump(self, job: Job, node: Node, t: float) -> tuple[ProcessStack, ...]:
        return () if STACKS in self._off else super()._dump(job, node, t)

    def _stack(
        self, job: Job, rank: Rank, role: Role, process: Rank | Worker, look: Look, others: tuple[WaitingThreads, ...]
    ) -> ProcessStack:
        stack = super()._stack(job, rank, role, process, look, others)
        return changed(stack, state="S", syscall=None) if SLEEP in self._off else stack

    def _probe(self, node: Node, mount: Mount, t: float) -> MountProbe | None:
        return None if PROBES in self._off else super()._probe(node, mount, t)
