"""Whose GPU is whose: which process computes on which GPU, as agents last reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.model.incidents import Finding
from slurm_watchdog.model.report import Report

KEPT_S = 3600.0  # A process that is gone from its GPU is remembered so long: a dead rank has a GPU to be named, too.
MAX_OWNERS = 1024  # Of one node; those that were seen longest ago go first.


@dataclass(slots=True)
class GpuOwner:
    """The GPUs of one process."""

    start_ticks: int
    uuids: tuple[str, ...]
    seen_at: float


@dataclass
class GpuPids:
    """Node -> pid -> its GPUs; only of processes of jobs, for no one else can be a culprit."""

    left_out: LeftOut
    _owners: dict[str, dict[int, GpuOwner]] = field(default_factory=dict)

    def apply(self, report: Report, made_at: float) -> bool:
        """Takes over what one report says. A pid that is another process now is forgotten. Returns whether anyone
        computes elsewhere than before."""
        started = {process.pid: process.start_ticks for process in report.processes}
        owners = {
            pid: owner
            for pid, owner in self._owners.get(report.node, {}).items()
            if started.get(pid, owner.start_ticks) == owner.start_ticks and made_at - owner.seen_at <= KEPT_S
        }
        uuids: dict[int, tuple[str, ...]] = {}
        for gpu in report.gpus:
            for pid in gpu.pids or ():
                if pid in started and gpu.uuid:
                    uuids[pid] = (*uuids.get(pid, ()), gpu.uuid)
        for pid, named in uuids.items():
            owner = owners.get(pid)
            if owner is not None and owner.uuids == named:
                owner.seen_at = made_at
            else:
                owners[pid] = GpuOwner(started[pid], named, made_at)
        if len(owners) > MAX_OWNERS:
            newest = sorted(owners, key=lambda pid: (-owners[pid].seen_at, owners[pid].start_ticks))[:MAX_OWNERS]
            self.left_out.note("gpu_processes", report.node, len(owners) - MAX_OWNERS)
            owners = {pid: owners[pid] for pid in newest}
        before, self._owners[report.node] = self._owners.get(report.node, {}), owners
        return before.keys() != owners.keys() or any(before[pid] is not owner for pid, owner in owners.items())

    def forget(self, node: str) -> None:
        """This node is no part of the cluster any more."""
        self._owners.pop(node, None)

    def on(self, node: str) -> Mapping[int, GpuOwner]:
        """Pid -> where it computes, of all processes of jobs on a node, as far as it is known."""
        return self._owners.get(node, {})

    def with_gpus(self, finding: Finding) -> Finding:
        """The finding, with the GPU of every culprit whose process is named and known to compute on that one alone."""
        if all(each.gpu_uuid for each in finding.culprits):
            return finding
        found = []
        for each in finding.culprits:
            owner = self._owners.get(each.node or "", {}).get(each.pid or 0)
            uuid = owner.uuids[0] if owner is not None and len(owner.uuids) == 1 else None
            found.append(replace(each, gpu_uuid=each.gpu_uuid or uuid))
        return replace(finding, culprits=tuple(found))
