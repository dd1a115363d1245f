"""`rank_stopped`: a rank was stopped by a signal, or by a debugger, and its job waits for it."""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from watchdog.detect.view import ClusterView, JobView, ProcessView
from watchdog.model import Culprit, Finding, Kind, Truth

WORDS = {"T": "stopped by a signal", "t": "held by a debugger or tracer"}


class Settings(Protocol):
    @property
    def stopped_for(self) -> float: ...


def detect(view: ClusterView, settings: Settings) -> list[Finding]:
    """One finding for each running job."""
    return [_judge(job, settings.stopped_for) for job in view.jobs]


def _judge(job: JobView, stopped_for_s: float) -> Finding:
    job_id = job.job.job_id
    finding = Finding(
        kind=Kind.RANK_STOPPED, subject=f"job:{job_id}", truth=Truth.UNKNOWN, summary="", job_ids=(job_id,)
    )
    if job.job.state != "RUNNING" or not job.ranks:
        return replace(finding, summary=f"job {job_id} is {job.job.state}, {len(job.ranks)} ranks are known")
    stopped = [
        (rank, _stopped_s(job, rank)) for rank in job.ranks if rank.alive and rank.process.state in WORDS
    ]
    long = sorted(((r, s) for r, s in stopped if s >= stopped_for_s), key=lambda each: -each[1])
    if not long:
        # A node that does not report may hold one: nothing is said, so that an incident about it stays open.
        truth = Truth.UNKNOWN if stopped or job.silent_nodes else Truth.OK
        return replace(finding, truth=truth, summary=f"{len(stopped)} ranks of job {job_id} are stopped")
    culprits = tuple(
        Culprit(
            node=rank.node,
            rank=rank.process.rank,
            pid=rank.process.pid,
            reason=f"{WORDS[rank.process.state]} for {seconds:.0f} s",
        )
        for rank, seconds in long
    )
    first, more = culprits[0], f" and {len(culprits) - 1} more" if len(culprits) > 1 else ""
    return replace(
        finding,
        truth=Truth.BAD,
        summary=f"Rank {first.rank} of job {job_id} on {first.node} (pid {first.pid}){more} is {first.reason}: the job waits for it.",
        culprits=culprits,
        facts=tuple(f"to let it go on, on {c.node}: kill -CONT {c.pid}" for c in culprits[:8]),
        lasted_s=long[0][1],
    )


def _stopped_s(job: JobView, rank: ProcessView) -> float:
    """How long it has been stopped, as the agent saw it; a job that was granted a grace starts anew."""
    return min(rank.process.state_age_s or 0.0, job.run_age_s)
