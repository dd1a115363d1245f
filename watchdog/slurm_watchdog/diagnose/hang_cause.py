"""What stopped the rank which the others wait for, an error in the job's log or a process that the kernel killed: a
hang names it as its cause. Pure.

A line counts that this rank has logged since the last step, and one that names no rank if it says by itself that a
thread has died, or that data could not be read or sent to the rank, while the rank waits inside of its own process:
for a queue, a lock, its data loader. A queue lasts for some steps after its reader has died. A collective that timed
out, a peer that was lost and a server that did not answer follow from a hang as often as they cause one: they name
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from slurm_watchdog.analysis.memory_kills import Kills, kills_in_job, why_not
from slurm_watchdog.base.text import EXCERPT_CHARS, shortened
from slurm_watchdog.diagnose.culprit_words import describe_all
from slurm_watchdog.diagnose.logs.reported_run import AttributedError, attributed_errors
from slurm_watchdog.diagnose.logs.root_cause import running
from slurm_watchdog.knowledge.log_signatures import log_table
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import Culprit, Finding
from slurm_watchdog.model.observations import Role
from slurm_watchdog.parse.training_log.text import split_prefix

OF_DATA = frozenset(
    {"io_error", "stale_file_handle", "read_only", "disk_full", "quota", "too_many_files", "process_limit",
     "shared_memory", "bus_error", "dataloader_worker", "oom_kill", "host_oom"}
)  # fmt: skip
"""Rows of log_signatures: what keeps data from a rank, whoever reports it."""
NO_CAUSE = frozenset({"network", "terminated", "interrupted"})
"""A server that does not answer is tried again; a process that was ended was ended by someone."""
INSIDE = (Place.QUEUE, Place.DATALOADER, Place.LOCK, Place.SLEEP, Place.SUBPROCESS, Place.TEARDOWN)
"""Waits inside of a process, of which another thread or process of it may be the reason."""
THREAD = "Exception in thread "
SAME_TRACE_S = 2.0  # The lines of one traceback are read within this time.
QUEUED_STEPS = 16
"""Batches that a queue still has when its reader dies: torch's data loader prefetches 2 for each of up to 8 workers."""
QUEUED_S = (10.0, 300.0)  # The same in time, at least and at most.


def with_kill(job: JobView, found: Finding, kills: Kills, now: float) -> Finding | None:
    """A hang with the process of the job, no rank, that the kernel has killed for memory since the last step; None:
    there is none. A rank that was killed is gone, and no matter of a hang."""
    killed = [
        each
        for each in kills_in_job(kills, job, now)
        if each.role not in (None, Role.RANK) and not why_not(each, job, now)
    ]
    if not killed:
        return None
    first = killed[0]
    who = describe_all([each.culprit for each in killed])
    text = f"{who[0].upper()}{who[1:]} was {first.words}, {now - first.at:.0f} s ago"
    return replace(found, summary=f"{found.summary.rstrip('.')}. {text}.", facts=(*found.facts, *first.lines))


def with_logged_cause(job: JobView, found: Finding, now: float, within_s: float) -> Finding:
    """A hang with the error that stopped its rank, if the log has one that is no older than `within_s`, or stopped it
    some steps earlier."""
    cause = logged_cause(job, found.culprits, now, within_s)
    if cause is None:
        return found
    text = shortened(split_prefix(cause.error.line)[0], EXCERPT_CHARS).rstrip(".:")
    where = "Its log says why" if cause.rank is not None else "The job's log says why, in a line that names no rank"
    ago = f"logged {now - cause.error.at:.0f} s ago: {cause.error.line}"
    return replace(found, summary=f"{found.summary.rstrip('.')}. {where}: {text}.", facts=(*found.facts, ago))


def logged_cause(job: JobView, culprits: Sequence[Culprit], now: float, within_s: float) -> AttributedError | None:
    """The line that says why these ranks are where they are; None: none is known. Its `rank` is one of theirs, or
    None where the line does not tell whose it is."""
    if not culprits or not job.errors:
        return None
    found = list(_candidates(job, culprits, now, within_s))
    headers = log_table().headers
    return max(found, key=lambda each: (each.error.pattern not in headers, each.error.at), default=None)


def _candidates(job: JobView, culprits: Sequence[Culprit], now: float, within_s: float) -> Iterator[AttributedError]:
    table, ranks = log_table(), {each.rank for each in culprits}
    inside = all(each.reason.startswith(INSIDE) for each in culprits)
    step_s = 0.0 if job.progress is None else job.progress.step_s or 0.0
    before_s = min(QUEUED_S[1], max(QUEUED_S[0], QUEUED_STEPS * step_s)) if inside else 0.0
    events = [each.event for each in sorted(job.errors, key=lambda each: now - each.age_s)]
    said = zip(events, attributed_errors(running(job, now)), strict=True)
    errors = [each if event.rank is None else replace(each, rank=event.rank) for event, each in said]
    threads = [each for each in errors if THREAD in each.error.line]
    for each in errors:
        name, age_s = each.error.pattern, now - each.error.at
        if not name or name in table.consequences | table.from_outside | NO_CAUSE or age_s > within_s + before_s:
            continue
        rank = job.ranks[0].process.rank if each.rank is None and len(job.ranks) == 1 else each.rank
        of_data = name in OF_DATA or (
            name not in table.headers and any(_is_one_trace(each, thread) for thread in threads)
        )
        if age_s > within_s and not of_data:
            continue
        if rank in ranks and rank is not None:
            yield replace(each, rank=rank)
        elif rank is None and inside and of_data and each.node in {None, *(c.node for c in culprits)}:
            yield each


def _is_one_trace(error: AttributedError, thread: AttributedError) -> bool:
    same = error.error.source == thread.error.source and error.rank in (thread.rank, None)
    return same and 0.0 <= error.error.at - thread.error.at <= SAME_TRACE_S
