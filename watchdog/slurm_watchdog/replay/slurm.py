"""What Slurm would list at a moment of a trace: jobs as they were said last, and their nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.model.slurm_states import ALIVE, RUNNING
from slurm_watchdog.trace import records
from slurm_watchdog.trace.records import ParseStats, with_more

JOBLESS, SILENT = "IDLE", "FUTURE"
"""The states of a node that no running job has and of which a trace says no more: while it reports, and after that.
It may rightly have no agent; what it says itself counts."""


LOST_SHARE = 0.5  # Of the time after which a node counts as silent: Slurm has given its word already.
LOST = "DOWN*"  # The state of a node that Slurm has lost, where the trace says only that its job ended so.


@dataclass
class SlurmListing:
    """Everything that job and node lines have said."""

    tally: ParseStats
    patience_s: float  # A node that has not said anything since its job began gets this long.
    jobs: dict[str, SlurmJob] = field(default_factory=dict)
    _nodes: dict[str, SlurmNode] = field(default_factory=dict)
    _used: dict[str, set[str]] = field(default_factory=dict)  # Job -> nodes, of jobs whose line does not name any.
    _active_since: dict[str, float] = field(default_factory=dict)
    _presumed: dict[str, float] = field(default_factory=dict)
    """Job that no line names -> when a rank of it was listed last, in a trace that has no job line yet."""

    def take_job(self, record: records.Job) -> str | None:
        """What a job line changes. Returns what agents call the job if a run of it is over."""
        job_id = str(record.job_id)
        self._forget_presumed(float("inf"))
        old = self.jobs.get(job_id)
        if old is None and record.state is None:
            self.tally.ignore("a job whose state was never recorded")
            return None
        given = {
            "state": None if record.state is None else record.state.upper(),
            "nodes": None if record.nodes is None else tuple(record.nodes),
            "restarts": record.restarts,
            "name": record.name,
            "user": record.user,
            "batch_host": record.batch_host,
        }
        fields = {name: value for name, value in given.items() if value is not None}
        job = SlurmJob(job_id=job_id, **fields) if old is None else replace(old, **fields)  # type: ignore[arg-type]
        job = with_more(job, record.more, self.tally) or job
        self.jobs[job_id] = job
        over = old is not None and (old.restarts != job.restarts or job.state not in RUNNING)
        return job.process_id if over else None

    def take_node(self, record: records.Node) -> None:
        node = SlurmNode(name=record.node, address="", state=record.state, reason=record.reason)
        self._nodes[record.node] = with_more(node, record.more, self.tally) or node

    def is_new_run(self, record: object) -> bool:
        """Whether Slurm has started a job again: what was there before is over."""
        old = self.jobs.get(str(record.job_id)) if isinstance(record, records.Job) else None
        return old is not None and isinstance(record, records.Job) and (record.restarts or 0) > old.restarts

    def _forget_presumed(self, now: float) -> None:
        """Those of which no rank was listed for long: nothing says that they still run."""
        for job_id, at in list(self._presumed.items()):
            if now - at > LOST_SHARE * self.patience_s:
                del self._presumed[job_id], self.jobs[job_id]
                self._used.pop(job_id, None)
                self._active_since.pop(job_id, None)

    def note_use(self, given: Mapping[str, Sequence[records.Any_]], now: float) -> None:
        """Where a job without a list of nodes has processes, and lines about jobs that no job line has named.

        In a trace without any job line a job runs as long as its ranks are listed.
        """
        if len(self.jobs) == len(self._presumed):
            ranks = (each for lines in given.values() for each in lines if isinstance(each, records.Proc))
            for rank in ranks:
                if rank.job_id is not None and rank.rank is not None and rank.state not in ("Z", "X"):
                    job_id = str(rank.job_id)
                    self.jobs.setdefault(job_id, SlurmJob(job_id=job_id, state="RUNNING"))
                    self._presumed[job_id] = now
        known = {job.process_id: job for job in self.jobs.values()}
        settled = {job_id for job_id, job in known.items() if job.nodes}
        for name, lines in given.items():
            for record in lines:
                if type(record) is not records.Proc and type(record) is not records.Log:
                    continue
                if record.job_id not in settled and record.job_id is not None:
                    job = known.get(str(record.job_id))
                    if job is None:
                        kind = record.__struct_config__.tag
                        self.tally.ignore(f"a {kind} line about a job that no job line has named yet")
                    elif not job.nodes:
                        self._used.setdefault(job.job_id, set()).add(name)

    def running(self, process_job_id: str) -> SlurmJob | None:
        """The job that agents call so."""
        return next((job for job in self.jobs.values() if job.process_id == process_job_id), None)

    def over(self) -> dict[str, str]:
        """The jobs that have ended, as agents call them, and their users."""
        return {job.process_id: job.user for job in self.jobs.values() if job.state not in ALIVE}

    def view(self, heard: Mapping[str, float], now: float) -> SlurmView:
        """The listing at `now`; `heard`: node -> when it last said anything."""
        jobs = []
        self._forget_presumed(now)
        lost_s = LOST_SHARE * self.patience_s
        states = {name: JOBLESS if now - at <= lost_s else SILENT for name, at in heard.items()}
        for job in self.jobs.values():
            if not job.nodes and job.job_id in self._used:
                job = replace(job, nodes=tuple(sorted(self._used[job.job_id])))
            jobs.append(job)
            if job.state in RUNNING:
                since = self._active_since.setdefault(job.job_id, now)
                states.update(dict.fromkeys(self._expected(job.nodes, heard, since, now), "ALLOCATED"))
            else:
                self._active_since.pop(job.job_id, None)
        nodes = {name: SlurmNode(name=name, address="", state=state) for name, state in states.items()}
        nodes.update(self._lost(heard, now))
        nodes.update(self._nodes)
        return SlurmView(jobs=tuple(jobs), nodes=tuple(nodes.values()))

    def _lost(self, heard: Mapping[str, float], now: float) -> dict[str, SlurmNode]:
        """NODE_FAIL: Slurm has lost nodes of the job that fell silent while others continued, or its only one."""
        newest = max(heard.values(), default=now)
        return {
            name: SlurmNode(name=name, address="", state=LOST, reason=f"job {job.job_id} ended {job.state}")
            for job in self.jobs.values()
            if job.state == "NODE_FAIL"
            for name in job.nodes
            if name in heard and heard[name] < (now if len(job.nodes) == 1 else newest) - LOST_SHARE * self.patience_s
        }

    def patience_ends(self, since: float, until: float) -> bool:
        """Whether nodes that have said nothing yet begin to count as silent between these two."""
        return any(since < at + self.patience_s <= until for at in self._active_since.values())

    def _expected(self, nodes: Sequence[str], heard: Mapping[str, float], since: float, now: float) -> Iterator[str]:
        """Those of a job's nodes that should have reported: many speak only while a job runs there."""
        return (name for name in nodes if now - since > self.patience_s or heard.get(name, float("-inf")) >= since)
