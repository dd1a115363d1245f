"""What owners of jobs want of the watchdog, from the environment of their processes.

Sees: what a job asks of the watchdog: [what a job's owner may say](acting.md#what-a-jobs-owner-may-say)
From: `SLURM_WATCHDOG…` in the environment of its processes, as the child read it for `process`
How often: every tick; four variables of 1024 characters
Never: a permission: it can only take away
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from slurm_watchdog.agent.collectors.collector import Collector, CollectorSpec
from slurm_watchdog.agent.proc.entry import Entry
from slurm_watchdog.knowledge.launchers import KILL_SWITCH_OPTION, WISH_VARIABLES
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.report import DirectiveSection, JobDirectives

MAX_WISH = 1024  # Characters of one variable that are reported.


def directives_of(entries: Iterable[Entry], owners: Mapping[str, int]) -> tuple[JobDirectives, ...]:
    """Of jobs that Slurm has here (`owners`: job -> user), as their ranks have it, else any process of the
    owner's in the run; no one else's processes count. One without variables: its ranks were read, and say nothing."""
    best: dict[str, tuple[int, JobDirectives]] = {}  # The higher number of two says more: see `weight`.
    named: dict[str, tuple[str, str]] = {}  # What command lines of ranks name, beside whatever anybody says.
    for entry in entries:
        environ, member = entry.known.environ, entry.member
        if member is None or environ is None or entry.known.uid != owners.get(member.job_id):
            continue
        job_id, is_rank = member.job_id, member.role is Role.RANK
        said = tuple((name, environ[name][:MAX_WISH]) for name in WISH_VARIABLES if environ.get(name))
        if is_rank and (switch := environ.get(KILL_SWITCH_OPTION)):
            named.setdefault(job_id, (KILL_SWITCH_OPTION, switch))
        weight = 2 * bool(said) + is_rank  # a rank that says something, then any other one, then a rank that does not
        if weight and weight > best.get(job_id, (0, None))[0]:
            restarts = environ.get("SLURM_RESTART_COUNT", "0")
            run = int(restarts) if restarts.isascii() and restarts.isdecimal() and len(restarts) < 10 else 0
            wish = JobDirectives(job_id=job_id, restarts=run, variables=said, uid=entry.known.uid)
            best[job_id] = weight, wish
    return tuple(
        replace(wish, variables=(*wish.variables, named[job_id])) if job_id in named else wish
        for job_id, (_, wish) in best.items()
    )


class JobDirectiveCollector(Collector):
    """Reads no process itself: takes what was read of it when it was met."""

    def collect(self, now: float) -> DirectiveSection:
        """Of every job that has any."""
        return DirectiveSection(wishes=directives_of(self.context.processes.mine, self.context.jobs.owners))


SPEC = CollectorSpec("job_directives", DirectiveSection, JobDirectiveCollector)
