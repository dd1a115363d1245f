"""`lingering_job`: a rank is dead, the others wait for it for ever, Slurm says RUNNING."""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from watchdog.detect.view import ClusterView, JobView, ProcessView
from watchdog.diagnose.filesystem import describe
from watchdog.diagnose.stacks import vote
from watchdog.model import Culprit, Finding, Kind, StacksWanted, Truth

SUSPICION = 0.3
"""From this share of the grace on, the survivors' stacks are collected."""

PROGRESS_SLACK_S = 5.0
"""A step may be read this much later than it was made: the agent's default interval."""


class Settings(Protocol):
    """Durations in seconds."""

    @property
    def grace(self) -> float: ...


def detect(view: ClusterView, settings: Settings) -> list[Finding]:
    """One finding for each running job."""
    return [_judge(job, settings) for job in view.jobs]


def dead_for_s(rank: ProcessView) -> float:
    """Seconds since the rank was last known alive, 0 while it is."""
    if rank.alive:
        return 0.0
    return rank.seen_age_s if rank.gone_s is None else rank.gone_s


def _judge(job: JobView, settings: Settings) -> Finding:
    job_id = job.job.job_id
    finding = Finding(
        kind=Kind.LINGERING_JOB, subject=f"job:{job_id}", truth=Truth.UNKNOWN, summary="", job_ids=(job_id,)
    )
    ranks = job.ranks
    if job.job.state != "RUNNING":
        return replace(finding, summary=f"job {job_id} is {job.job.state}")
    if not ranks:
        return replace(finding, summary=f"no ranks of job {job_id} are known")
    if job.silent_nodes:
        return replace(finding, summary=f"no report from {', '.join(job.silent_nodes)}")
    dead = sorted((rank for rank in ranks if not rank.alive), key=dead_for_s, reverse=True)
    survivors = [rank for rank in ranks if rank.alive]
    if not dead or not survivors:
        return replace(finding, truth=Truth.OK, summary=f"no rank of job {job_id} is missing")
    first = dead[0]
    progress = job.progress
    if progress and progress.total_steps is not None and progress.step >= progress.total_steps:
        return replace(finding, summary=f"job {job_id} has made its last step and is ending")
    if (
        progress
        and progress.rose_age_s is not None
        and progress.rose_age_s + PROGRESS_SLACK_S < dead_for_s(first)
    ):
        return replace(
            finding, truth=Truth.OK, summary=f"job {job_id} makes steps without rank {first.process.rank}"
        )
    age_s = min(dead_for_s(first), job.run_age_s)  # a grace that was granted counts here as well
    finding = replace(finding, lasted_s=age_s)
    if age_s >= SUSPICION * settings.grace:
        apart_s = max(2.5, SPACING * settings.grace)
        finding = replace(finding, wanted=(StacksWanted(job_id=job_id, apart_s=apart_s),))
    if age_s < settings.grace:
        return replace(finding, summary=f"rank {first.process.rank} of job {job_id} ended {age_s:.0f} s ago")
    return _accuse(job, finding, dead, survivors, settings.grace)


SPACING = 0.25
"""Time between two dumps of the survivors as a share of the grace: two dumps before it ends."""


PATIENCE = 10.0
"""So many times the grace is waited before an alert where the survivors are not seen to wait for the dead."""


def _accuse(
    job: JobView, finding: Finding, dead: list[ProcessView], survivors: list[ProcessView], grace_s: float
) -> Finding:
    """The grace is over: BAD if the survivors are seen to wait and to stand still, and only then to be acted on.

    At the end of a job the ranks leave one after the other, and the last one may still write for a long time: few
    survivors that wait for nobody are an ending. If most are left there is an alert, after ten times the grace.
    """
    first, age_s = dead[0], finding.lasted_s
    voted = vote(job.snapshots, survivors)
    ended = f"rank {first.process.rank} of job {job.job.job_id} ended {age_s:.0f} s ago"
    waits = voted.moving is False and voted.waiting > 0 and not voted.missing
    if voted.moving:
        return replace(finding, summary=f"{ended}, the others still work")
    if not waits and (len(survivors) <= len(dead) or age_s < PATIENCE * grace_s):
        return replace(finding, summary=f"{ended}, and the others are not seen to wait")
    culprits = tuple(
        Culprit(
            node=rank.node,
            rank=rank.process.rank,
            pid=rank.process.pid,
            reason=f"has been a zombie for {dead_for_s(rank):.0f} s"
            if rank.process.state in ("Z", "X")
            else f"ended {dead_for_s(rank):.0f} s ago",
        )
        for rank in dead
    )
    more = f" and {len(dead) - 1} more" if len(dead) > 1 else ""
    words = last_words(job, first)
    return replace(
        finding,
        truth=Truth.BAD,
        summary=f"Job {job.job.job_id} is {job.job.state} but cannot go on: {describe(culprits[0])}{more} ended "
        f"{age_s:.0f} s ago, {_are_left(len(survivors))}"
        f"{f', {voted.waiting} of them wait in a collective' if voted.waiting else ''}.",
        culprits=culprits,
        facts=(
            *(f"{describe(c)} {c.reason}" for c in culprits[:8]),
            *(f"last words: {line}" for line in words),
            *(f"{len(g.ranks)} of them: {g.place}, {' < '.join(g.frames[:3])}" for g in voted.groups[:4]),
            "add --kill-on-bad-exit=1 and --wait=60 to srun, so that Slurm ends such a job by itself",
        ),
        actionable=waits,
    )


def _are_left(number: int) -> str:
    return "1 rank is left" if number == 1 else f"{number} ranks are left"


def last_words(job: JobView, first: ProcessView) -> list[str]:
    """Error lines that name the dead rank, otherwise the last ones of its node."""
    named = [e for e in job.errors if e.event.rank is not None and e.event.rank == first.process.rank]
    nearby = [e for e in job.errors if e.event.rank is None]
    return [error.event.line for error in (named or nearby)[-3:]]
