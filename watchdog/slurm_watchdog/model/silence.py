"""Silences: what people are not notified of for a while. Pure."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.incidents import Incident

OF_JOBS = ("job:", "run:", "loop:", "chain:")
"""Subjects that are a job, its runs (log_error, memory_kill), its restarts (crash_loop) or the jobs that it begins
(chain_broken). Whatever else an incident is about concerns others, too: a node, a GPU, a filesystem."""


class Silence(Struct):
    """Of the selectors each that is given has to match; none of them matches a part of an incident."""

    id: str
    by: str
    at: float  # Date.
    reason: str = ""
    until: float  # Date of its end.
    kinds: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    owner: int | None = None
    """Uid of a job's owner who made it with no other right: it covers what is about jobs of that owner alone."""
    ended_at: float | None = None
    ended_why: str = ""

    @property
    def words(self) -> str:
        """What it is about: `kind gpu_fault, node n1,n2`."""
        named = (("kind", self.kinds), ("job", self.jobs), ("node", self.nodes))
        return ", ".join(f"{name} {','.join(values)}" for name, values in named if values)

    def is_over(self, now: float) -> bool:
        """Whether its time is over, also where the clock was set back so far that it would be for longer than it was
        made for: it was made by a clock that was ahead."""
        return not 2 * self.at - self.until <= now < self.until

    def covers(self, incident: Incident) -> bool:
        """Whether all that the incident is about is within the selectors: of two jobs the silence of one hides
        nothing. An array's id stands for its elements."""
        alone = incident.subject.startswith(OF_JOBS) and set(incident.owners) == {self.owner}
        if self.owner is not None and not alone:
            return False
        if self.kinds and incident.kind not in self.kinds:
            return False
        jobs = {job if job in self.jobs else job.partition("_")[0] for job in incident.job_ids}
        if self.jobs and not (jobs and jobs.issubset(self.jobs)):
            return False
        named = incident.named_nodes
        return not self.nodes or bool(named and named.issubset(self.nodes))
