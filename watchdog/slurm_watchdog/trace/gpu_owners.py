"""Whose GPUs are whose in a trace: what its lines leave to be inferred, as narrowly as it can be. Pure.

A trace has no `/proc/*/fd` and no cgroups. That a process holds a GPU and belongs to no job that runs is
known only of one that the trace itself said to be of a job, which is over. Which rank computes on which GPU,
where no line lists processes, follows the order in which every launcher deals them out, and only if there are
as many of the one as of the other. Nothing else shows an orphan in a plain trace (tests/replay/test_outsider.py);
the other accuracy cases do not depend on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from slurm_watchdog.model.observations import Gpu, GpuHolder, Process, Role

GRACE_S = 60.0  # For a job's processes after its end to let go of GPUs; the agents' `orphan_grace` as shipped.
LEAST_BYTES = 64 * 1024**2  # A driver keeps less of a card that no one uses; a context alone takes hundreds of MiB.
UNKNOWN_USER = "an unknown user"


@dataclass
class GpuHolders:
    """Those of one node."""

    _job_of: dict[int, str] = field(default_factory=dict)  # pid -> the job that it was said to be of.
    _uuids_of: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _over_at: dict[str, float] = field(default_factory=dict)  # Job -> when it was first known to be over.

    def remember(self, processes: Iterable[Process], gpus: Iterable[Gpu]) -> None:
        """Remembers whose process is whose, and on which GPU it was seen."""
        job_of, uuids_of = self._job_of, self._uuids_of
        for process in processes:
            if process.pid > 0:
                job_of[process.pid] = process.job_id
        for gpu in gpus:
            for pid in gpu.pids or ():
                if gpu.uuid and gpu.uuid not in uuids_of.get(pid, ()):
                    uuids_of[pid] = (*uuids_of.get(pid, ()), gpu.uuid)

    def of_process(self, pid: int | None) -> str | None:
        """The one GPU on which a process was seen; None if it is not known, or there were several."""
        uuids = self._uuids_of.get(pid, ()) if pid is not None else ()
        return uuids[0] if len(uuids) == 1 else None

    def orphans(
        self,
        processes: Sequence[Process],
        gpus: Sequence[Gpu],
        over: Mapping[str, str],
        now: float,
        looked_at: float | None = None,
    ) -> tuple[GpuHolder, ...]:
        """Processes of jobs that are `over` (job -> its user) which hold a GPU: it lists them, or it holds
        memory that they had. `looked_at`: when that was seen last, if not now; later they may have let go."""
        self._over_at = {job: self._over_at.get(job, now) for job in over}
        if not over:
            return ()
        there = {process.pid: process for process in processes if process.state not in ("Z", "X")}
        held: dict[int, list[Gpu]] = {}
        for gpu in gpus:
            listed = set(gpu.pids or ())
            remembered = {pid for pid in there if gpu.uuid in self._uuids_of.get(pid, ()) and gpu.pids is not None}
            if not listed and (gpu.memory_used_bytes or 0) >= LEAST_BYTES:
                listed = remembered
            for pid in listed:
                if self._job_of.get(pid) in over:
                    held.setdefault(pid, []).append(gpu)
        on_card = Counter(gpu.index for cards in held.values() for gpu in cards)
        return tuple(
            self._holder(
                pid, there.get(pid), held[pid], over[self._job_of[pid]], now if looked_at is None else looked_at,
                alone=all(on_card[gpu.index] == 1 for gpu in held[pid]),
            )
            for pid in sorted(held)
        )  # fmt: skip

    def _holder(
        self, pid: int, process: Process | None, gpus: list[Gpu], user: str, looked_at: float, *, alone: bool
    ) -> GpuHolder:
        """`alone`: what its cards hold is its own; of several processes on one card that is not known."""
        job_id = self._job_of[pid]
        over_s = looked_at - self._over_at[job_id]
        known = [gpu.memory_used_bytes for gpu in gpus if gpu.memory_used_bytes is not None]
        return GpuHolder(
            pid=pid,
            start_ticks=process.start_ticks if process is not None else 0,
            uid=-1,
            user=user or UNKNOWN_USER,
            comm=process.comm if process is not None else "process",
            state=process.state if process is not None else "?",
            job_id=job_id,
            rank=process.rank if process is not None and process.role is Role.RANK else None,
            gpu_uuids=tuple(gpu.uuid for gpu in gpus if gpu.uuid),
            minors=tuple(gpu.index for gpu in gpus),
            memory_bytes=sum(known) if known and alone else None,
            listed_by_nvml=any(pid in (gpu.pids or ()) for gpu in gpus),
            orphan_for_s=over_s - GRACE_S if over_s >= GRACE_S else None,
        )


AssignedGpus = dict[str, tuple[Gpu, Gpu]]
"""UUID or place -> a GPU as the trace has it, and as it was handed out: the same one again, as long as
no line gives new values for it."""


def assign_gpus(gpus: Sequence[Gpu], processes: Iterable[Process], seats: AssignedGpus) -> tuple[Gpu, ...]:
    """The GPUs with the ranks that compute on them, where no line of the node lists any process: the ranks of
    the one job that is there, in their order, if they are as many as the GPUs. Elsewhere the GPUs as they
    are."""
    if any(gpu.pids is not None for gpu in gpus):
        return tuple(gpus)
    ranks = [each for each in processes if each.role is Role.RANK and each.rank is not None]
    if len({rank.job_id for rank in ranks}) != 1 or len({rank.rank for rank in ranks}) != len(gpus):
        return tuple(gpus)
    if len(ranks) != len(gpus):
        return tuple(gpus)
    in_order = zip(sorted(gpus, key=lambda gpu: gpu.index), sorted(ranks, key=lambda r: r.rank or 0), strict=True)
    return tuple(_assigned(gpu, rank.pid, seats) for gpu, rank in in_order)


def _assigned(gpu: Gpu, pid: int, seats: AssignedGpus) -> Gpu:
    name = gpu.uuid or str(gpu.index)
    known = seats.get(name)
    if known is None or known[0] is not gpu or known[1].pids != (pid,):
        known = seats[name] = gpu, replace(gpu, pids=(pid,))
    return known[1]
