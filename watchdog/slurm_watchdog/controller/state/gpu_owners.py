"""Whose GPU is whose: which process computes on which GPU, as agents last said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.model.incidents import Culprit, Finding
from slurm_watchdog.model.report import Report

KEPT_S = 3600.0
"""A process that is gone from its GPU is remembered so long: a dead rank has a GPU to be named, too."""
MAX_SEATS = 1024
"""Of one node; those that were seen longest ago go first."""


@dataclass(slots=True)
class GpuOwner:
    """The GPUs of one process."""

    start_ticks: int
    uuids: tuple[str, ...]
    seen_at: float


@dataclass
class GpuPids:
    """Node -> pid -> its GPUs; only of processes of jobs, for nobody else can be a culprit."""

    left_out: LeftOut = field(default_factory=LeftOut)
    _seats: dict[str, dict[int, GpuOwner]] = field(default_factory=dict)

    def apply(self, report: Report, made_at: float) -> None:
        """Takes over what one report says. A pid that is another process now is forgotten."""
        started = {process.pid: process.start_ticks for process in report.processes}
        seats = {
            pid: seat
            for pid, seat in self._seats.get(report.node, {}).items()
            if started.get(pid, seat.start_ticks) == seat.start_ticks and made_at - seat.seen_at <= KEPT_S
        }
        uuids: dict[int, tuple[str, ...]] = {}
        for gpu in report.gpus:
            for pid in gpu.pids or ():
                if pid in started and gpu.uuid:
                    uuids[pid] = (*uuids.get(pid, ()), gpu.uuid)
        for pid, named in uuids.items():
            seat = seats.get(pid)
            if seat is not None and seat.uuids == named:
                seat.seen_at = made_at
            else:
                seats[pid] = GpuOwner(started[pid], named, made_at)
        if len(seats) > MAX_SEATS:
            newest = sorted(seats, key=lambda pid: (-seats[pid].seen_at, seats[pid].start_ticks))[:MAX_SEATS]
            self.left_out.note("gpu_processes", report.node, len(seats) - MAX_SEATS)
            seats = {pid: seats[pid] for pid in newest}
        self._seats[report.node] = seats

    def forget(self, node: str) -> None:
        """This node is no part of the cluster any more."""
        self._seats.pop(node, None)

    def uuid_of(self, node: str | None, pid: int | None) -> str | None:
        """The GPU of this process; None if it is not known, or if it computes on several."""
        seat = self._seats.get(node or "", {}).get(pid or 0)
        return seat.uuids[0] if seat is not None and len(seat.uuids) == 1 else None

    def on(self, node: str) -> Mapping[int, GpuOwner]:
        """Pid -> where it computes, of all processes of jobs on a node, as far as it is known."""
        return self._seats.get(node, {})

    def name(self, finding: Finding) -> Finding:
        """The finding, with the GPU of every culprit whose process is named and whose GPU is known."""
        if not finding.culprits:
            return finding
        return replace(finding, culprits=tuple(self._named(culprit) for culprit in finding.culprits))

    def _named(self, culprit: Culprit) -> Culprit:
        uuid = culprit.gpu_uuid or self.uuid_of(culprit.node, culprit.pid)
        return replace(culprit, gpu_uuid=uuid)
