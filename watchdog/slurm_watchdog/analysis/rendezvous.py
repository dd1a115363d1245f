"""A run whose ranks wait for others to join, of which no process was ever seen. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from slurm_watchdog.diagnose.stacks.vote import vote
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import Culprit, Finding

MAX_NAMED: Final = 8
MAX_WORLD: Final = 1 << 20
"""What a process says about the number of ranks is a user's word."""


def not_joined(job: JobView, finding: Finding, patience_s: float) -> Finding | None:
    """`finding` as BAD, with the absent ranks, if dump after dump every rank there is waits for the others to
    join and `patience_s` have gone by without a step; None: it is not so, or not known.

    Never acted on: the others may still be started, and a restart would not start them either.
    """
    absent = absent_ranks(job)
    if job.progress is not None or not absent or job.run_age_s < patience_s:
        return None
    voted = vote(job.snapshots, job.ranks)
    joining = voted.groups and all(group.place is Place.RENDEZVOUS for group in voted.groups)
    if not joining or voted.moving is not False or voted.missing or voted.undumped:
        return None
    here = {rank.node for rank in job.ranks}
    empty = [node for node in job.job.nodes if node not in here]
    where = f"; {_few(empty)} {'has' if len(empty) == 1 else 'have'} no rank at all" if empty else ""
    there = len(job.ranks)
    return finding.bad(
        f"Job {job.job.job_id} does not start: after {job.run_age_s:.0f} s {there} "
        f"{'rank waits' if there == 1 else 'ranks wait'} for the others to join, and of "
        f"{'rank' if len(absent) == 1 else 'ranks'} {_few(absent)} (of {there + len(absent)} in all) no "
        f"process has been seen{where}.",
        duration_s=job.run_age_s,
        culprits=tuple(Culprit(rank=rank, reason="no process of it has been seen") for rank in absent[:MAX_NAMED]),
    )


def absent_ranks(job: JobView) -> tuple[int, ...]:
    """The ranks that its processes say there are and of which none was seen, on nodes that all report."""
    world = max((rank.process.world_size or 0 for rank in job.ranks), default=0)
    if job.silent_nodes or world > MAX_WORLD:
        return ()
    known = {rank.process.rank for rank in job.ranks}
    return tuple(rank for rank in range(world) if rank not in known)


def _few(values: Sequence[object]) -> str:
    shown = ", ".join(map(str, values[:6]))
    return shown if len(values) <= 6 else f"{shown}, …"
