"""`memory_kill`: the kernel killed a process of a job for memory, which explains what follows from it.

Fires: the kernel's log names a process of the job that it killed for memory: a rank at once; another process where
the run ended within 5 min for no other reason, or is beyond the limit of a step. Not once a step was made since.
Names: the rank, what it held, and whether its job had no memory left or the node.
Acts: `lingering_job` or `collective_hang` takes over if the job stays, with the kill in its sentence.
"""

from __future__ import annotations

from collections.abc import Iterator

from slurm_watchdog.analysis.memory_kills import Kills, MemoryKill, kills_in_job, kills_in_run, memory_kills, why_not
from slurm_watchdog.analysis.progress_limit import progress_limit
from slurm_watchdog.base.text import duration
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.spec import DetectorSpec, Subject
from slurm_watchdog.diagnose.culprit_words import describe_all
from slurm_watchdog.diagnose.logs.root_cause import work_lost
from slurm_watchdog.knowledge.limits import PhaseLimits
from slurm_watchdog.model.cluster_view import ClusterView, JobView
from slurm_watchdog.model.incidents import Finding, IncidentKind, Severity
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.past_runs import PastRun
from slurm_watchdog.model.slurm import SlurmJob

NAMED = 16
RECENT_S = 600.0  # A kill is reported for so long, or until the run makes steps again.


def detect(view: ClusterView, limits: PhaseLimits) -> list[Finding]:
    """One finding for each run in which the kernel killed a process, or of which an incident is open."""
    found = (_finding(view, *each, limits) for each in _runs(view, memory_kills(view)))
    return [finding for finding in found if finding is not None]


def _runs(view: ClusterView, kills: Kills) -> Iterator[tuple[SlurmJob, JobView | PastRun, tuple[MemoryKill, ...]]]:
    for job in view.jobs:
        yield job.job, job, kills_in_job(kills, job, view.now) if kills else ()
    for each in (*view.jobs, *view.waiting):
        for run in each.past:
            yield each.job, run, kills_in_run(kills, each.job, run) if kills else ()
    for ended in view.ended:
        if ended.run is not None:
            yield ended.job, ended.run, kills_in_run(kills, ended.job, ended.run) if kills else ()


def _finding(
    view: ClusterView, job: SlurmJob, run: JobView | PastRun, kills: tuple[MemoryKill, ...], limits: PhaseLimits
) -> Finding | None:  # fmt: skip
    restarts = job.restarts if isinstance(run, JobView) else run.restarts
    finding = SPEC.about(f"run:{job.job_id}.{restarts}", job.job_id)
    recent = tuple(each for each in kills if view.now - each.at <= RECENT_S)
    if not recent:
        if view.asked is not None and finding.subject not in view.asked:
            return None
        unheard = set(job.nodes) - {node.name for node in view.nodes}
        if unheard or (isinstance(run, JobView) and (run.silent_nodes or run.run_age_s < RECENT_S)):
            return finding
        return finding.ok(f"the kernel has killed no process of job {job.job_id} within {duration(RECENT_S)}")
    reasons = [why_not(each, run, view.now) for each in recent]
    if all(reasons):
        return finding.ok(reasons[0])
    recent = tuple(each for each, why in zip(recent, reasons, strict=True) if not why)
    if not _is_reason(run, recent[0], limits):
        return finding
    first, age_s = recent[0], view.now - min(each.at for each in recent)
    lost = () if isinstance(run, JobView) else work_lost(run)
    return finding.bad(
        f"{_who(recent)} of job {job.job_id} {'was' if len(recent) == 1 else 'were'} {first.words}, {age_s:.0f} s ago.",
        culprits=tuple(each.culprit for each in recent[:NAMED]),
        facts=(*(f"the kernel of {each.node}: {line}" for each in recent[:4] for line in each.lines), *lost),
        duration_s=max(0.0, age_s),
    )


def _who(kills: tuple[MemoryKill, ...]) -> str:
    words = describe_all([each.culprit for each in kills])
    name = f" `{kills[0].comm}`" if kills[0].role is not Role.RANK and kills[0].comm else ""
    return f"{words[0].upper()}{words[1:]}{name}"


def _is_reason(run: JobView | PastRun, kill: MemoryKill, limits: PhaseLimits) -> bool:
    """Whether a run that is over, or makes no steps, is known to be so for this kill."""
    if isinstance(run, PastRun) or kill.role is Role.RANK:
        return True
    return run.progress is not None and run.progress.age_s >= progress_limit(run, limits).seconds


SPEC = DetectorSpec(
    detect=detect,
    also=(CollectiveHang,),
    subject=Subject.RUN,
    severity=Severity.CRITICAL,
    sentence="The kernel killed a process for memory",
    steps_continue=True,
    explained_by=(IncidentKind.CRASH_LOOP,),
    explains=(IncidentKind.DEAD_RANK, IncidentKind.LOG_ERROR),
    not_delayed_by=(IncidentKind.LINGERING_JOB, IncidentKind.COLLECTIVE_HANG),
    why_no_action="the kill is reported; a job that stays without the process, or hangs, is decided about as that",
    alerts=("SlurmWatchdogRankLost",),
)
