"""The runs of all jobs: which begin and end with a listing of Slurm, and what incidents and actions do to them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from slurm_watchdog.controller.state.progress_clock import main_clock
from slurm_watchdog.controller.state.run import Run, mark_unseen, new_run, past_run, started_at
from slurm_watchdog.controller.state.run_updates import note_early_dump, note_snapshot
from slurm_watchdog.controller.state.wait_tally import kept_blocks
from slurm_watchdog.model.actions import Fence
from slurm_watchdog.model.collective_records import RecordSet
from slurm_watchdog.model.evidence import OwnWords, ProcessStack
from slurm_watchdog.model.past_runs import EndedJob, PastRun
from slurm_watchdog.model.slurm import SlurmJob, SlurmView
from slurm_watchdog.model.slurm_states import ALIVE, FAILED, OVER, RUNNING, WAITING, is_known

KEPT_ENDED_S = 3600.0  # Slurm forgets a job after minutes (MinJobAge, 300 s): too soon for who looks in the morning.
MAX_ENDED = 500
MAX_NAMES = 2000
MAX_LINKS = 20  # Ended jobs that are remembered of one user and name.
SLACK_S = 30.0  # Slurm is asked every few seconds: a job may be seen to begin before the one before it is seen to end.


@dataclass
class _Link:
    ended_at: float
    first_step: int | None
    successors: set[str] = field(default_factory=set)


@dataclass
class PastJobs:
    """One loop owns it."""

    _gone: OrderedDict[str, Run] = field(default_factory=OrderedDict)  # Runs of jobs that Slurm lists no more.
    _links: OrderedDict[tuple[str, str], OrderedDict[str, _Link]] = field(default_factory=OrderedDict)
    """(user, name) -> job -> how it ended."""
    _past: dict[str, tuple[tuple[int, int | None, str], PastRun]] = field(default_factory=dict)

    def add_gone(self, run: Run, now: float) -> None:
        """Slurm does not list this run's job any more."""
        if run.started and run.inactive_since is not None:
            self._gone[run.job.job_id] = run
        while self._gone:
            oldest = next(iter(self._gone.values()))
            if len(self._gone) <= MAX_ENDED and now - (oldest.inactive_since or now) < KEPT_ENDED_S:
                break
            del self._gone[oldest.job.job_id]
            self._past.pop(oldest.job.job_id, None)

    def gone(self, now: float) -> list[Run]:
        """The jobs that have left Slurm's list within the last hour."""
        return [run for run in self._gone.values() if now - (run.inactive_since or now) < KEPT_ENDED_S]

    def returned(self, job_id: str) -> None:
        """Slurm lists it again, so it is no past."""
        self._gone.pop(job_id, None)
        self._past.pop(job_id, None)

    def past(self, run: Run, now: float) -> PastRun:
        """The run as past; rebuilt only when something more is known of it."""
        key = (run.errors.noted, max((c.step for c in run.clocks.values()), default=None), run.job.state)
        known = self._past.get(run.job.job_id)
        if known is None or known[0] != key or known[1].restarts != run.job.restarts:
            known = self._past[run.job.job_id] = (key, past_run(run, now))
        return known[1]

    def add_link(self, job: SlurmJob, past: PastRun, successors: tuple[str, ...]) -> None:
        """This job is over, and these were there to come after it."""
        links = self._links.setdefault((job.user, job.name), OrderedDict())
        self._links.move_to_end((job.user, job.name))
        link = links.setdefault(job.job_id, _Link(past.ended_at, past.first_step))
        link.successors.update(successors[:MAX_LINKS])
        while len(links) > MAX_LINKS:
            links.popitem(last=False)
        while len(self._links) > MAX_NAMES:
            self._links.popitem(last=False)

    def preceded_by(self, job: SlurmJob, past: PastRun) -> tuple[str, ...]:
        """The jobs that this one followed on: it was there when they ended, ran after them, and its steps continued
        from theirs. A sweep, or someone who tries again and again, begins at the first step each time and is no
        chain."""
        links: Mapping[str, _Link] = self._links.get((job.user, job.name), {})
        return tuple(
            job_id
            for job_id, link in links.items()
            if job_id != job.job_id
            and job.job_id in link.successors
            and link.ended_at <= past.began_at + SLACK_S
            and link.first_step is not None
            and past.first_step is not None
            and past.first_step > link.first_step
        )


TROUBLE_BREAK_S = 60.0  # Trouble that comes back sooner is the same.


class Runs:
    """The newest run of each job. One loop owns it."""

    def __init__(self) -> None:
        self._runs: dict[str, Run] = {}
        self.past_jobs = PastJobs()
        self._before: dict[str, str] | None = None  # Job -> its state in the listing before the newest, if any.
        self._acted_on: dict[str, int] = {}  # Job -> restarts, of actions left open: how it ended counts.

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def get(self, job_id: str) -> Run | None:
        """The newest run of the job; None if nothing is known of it."""
        return self._runs.get(job_id)

    def judge_all(self) -> None:
        """Something that concerns every job has changed."""
        for run in self:
            run.is_due = True

    def active(self) -> list[tuple[str, Run]]:
        """Job and run of those that run, sorted by job."""
        return [(job_id, run) for job_id, run in sorted(self._runs.items()) if run.job.state in RUNNING]

    def waiting(self) -> list[Run]:
        """Runs that have begun, or follow one that has, and whose job waits in the queue."""
        return [
            run
            for _, run in sorted(self._runs.items())
            if (run.past or run.started) and run.job.state in ALIVE and run.job.state not in RUNNING
        ]

    def begin_listing(self, before: Mapping[str, SlurmJob] | None) -> None:
        """A new listing is applied next. `before`: the jobs of the one before; None: there was none."""
        self._before = None if before is None else {name: job.state for name, job in before.items()}
        kept = kept_blocks(sum(run.waits.ranks for run in self))
        for run in self:
            run.waits.kept = kept

    def drop_unlisted(self, jobs: Mapping[str, SlurmJob], now: float) -> None:
        """Jobs that Slurm does not list any more are past."""
        for job_id in [job_id for job_id in self._runs if job_id not in jobs]:
            self.past_jobs.add_gone(self._runs.pop(job_id), now)

    def apply(self, job: SlurmJob, now: float, wall: float | None) -> None:
        """What Slurm says of one job: its run begins, continues or ends."""
        run = self._runs.get(job.job_id)
        if run is not None and run.job != job:
            run.is_due = True
        if not is_known(job.state) or "restarts" in job.unreadable:
            return  # which run it is, or its state, is not known: nothing changes, nothing is done (policy: unsure)
        is_new = run is None or run.job.restarts != job.restarts
        if job.state in RUNNING and is_new:
            self._begin(job, now, run, wall)
            self.past_jobs.returned(job.job_id)
        elif run is None:
            self._apply_unseen(job, now, wall)
        elif is_new:
            self._begin(job, now, run, wall)
        elif job.state in RUNNING:
            _continue(run, job, now, wall)
        else:
            if not run.started and job.state not in ALIVE and job.state != "CANCELLED":
                mark_unseen(run)
            run.inactive_since = now if run.inactive_since is None else run.inactive_since
            run.job = job
        run = self._runs.get(job.job_id)
        last = run.past[-1] if job.held and job.state in WAITING and run is not None and run.past else None
        # A requeue of ours holds the job for a moment, too: that says nothing of the run before.
        if run is not None and last is not None and last.touched_at is None and not last.held_after:
            run.amend_last(held_after=True)

    def _begin(self, job: SlurmJob, now: float, before: Run | None, wall: float | None) -> Run:
        run = self._runs[job.job_id] = new_run(job, now, before, wall)
        return run

    def _apply_unseen(self, job: SlurmJob, now: float, wall: float | None) -> None:
        """A job that does not run, and that was never seen to."""
        acted_on = self._acted_on.get(job.job_id) == job.restarts and job.state != "PENDING"
        if job.restarts > 0 and job.state in WAITING:
            self._begin(job, now, None, wall)  # the run before was too short to be seen
        elif acted_on or self._was_too_short(job):
            run = self._begin(job, now, None, wall)
            run.started, run.unseen, run.inactive_since = True, not acted_on, now
            run.valid_from = started_at(job, now, wall)

    def _was_too_short(self, job: SlurmJob) -> bool:
        """Whether the job began and failed between two listings: it waited in the one before, or was not
        there at all."""
        if self._before is None or job.state not in FAILED or not job.nodes:
            return False
        return self._before.get(job.job_id, "PENDING") in (*WAITING, "CONFIGURING")

    def add_snapshot(
        self,
        job_id: str,
        restarts: int,
        stacks: tuple[ProcessStack, ...],
        silent: tuple[str, ...],
        now: float,
        early_asked_at: float | None = None,
    ) -> None:
        """One dump of all ranks; dropped if the job has restarted since it was asked for. `early_asked_at`: when that
        was, of one that is early (StackRequest.early)."""
        run = self._runs.get(job_id)
        if run is None or run.job.restarts != restarts:
            return
        if early_asked_at is None:
            note_snapshot(run, stacks, silent, now)
        else:
            note_early_dump(run, stacks, silent, now, early_asked_at)

    def add_usual(self, job_id: str, restarts: int, stacks: tuple[ProcessStack, ...], now: float) -> None:
        """One dump of all ranks that shows where they usually are (StackRequest.usual)."""
        run = self._runs.get(job_id)
        if run is not None and run.job.restarts == restarts:
            run.waits.note_dump(stacks, now)
            run.is_due = True

    def add_records(
        self, job_id: str, restarts: int, found: tuple[RecordSet, ...], asked_at: float,
        own_words: tuple[OwnWords, ...] = (), now: float = 0.0,
    ) -> None:  # fmt: skip
        """What the ranks of this run had recorded of their collectives, and, at `now`, of their own ends; dropped if a
        step was made since `asked_at` (monotonic), when they were asked."""
        run = self._runs.get(job_id)
        clock = main_clock(run.clocks) if run is not None else None
        if run is not None and run.job.restarts == restarts and (clock is None or clock.rose_at <= asked_at):
            run.collectives = found
            run.own_words = (now, own_words) if own_words else run.own_words
            run.is_due = True

    def grant_grace(self, now: float, job_ids: Iterable[str] | None = None) -> None:
        """Restarts the clocks of these jobs (all by default): a cause has gone, or the controller slept."""
        for job_id in self._runs if job_ids is None else job_ids:
            if job_id in self._runs:
                run = self._runs[job_id]
                run.grace_from = now
                run.is_due = True
                run.forget_dumps()

    def note_trouble(self, job_ids: Iterable[str], now: float) -> None:
        """These jobs have an open incident at this moment."""
        for job_id in job_ids:
            if job_id in self._runs:
                run = self._runs[job_id]
                if now - run.troubled_at > TROUBLE_BREAK_S:
                    run.troubled_from = now
                run.troubled_at = now

    def note_action(self, job_id: str, restarts: int, at: float | None) -> None:
        """An action of ours touched this run at that moment, also of a run that is over by now; None: the run
        continues without the action."""
        run = self._runs.get(job_id)
        if run is None:
            return
        run.is_due = True
        if run.job.restarts == restarts:
            run.touched_at = at if at is None or run.touched_at is None else min(at, run.touched_at)
        elif at is not None:
            run.past = tuple(
                replace(past, touched_at=at if past.touched_at is None else min(at, past.touched_at))
                if past.restarts == restarts
                else past
                for past in run.past
            )

    def remember_action(self, fence: Fence) -> None:
        """An action that an earlier controller left open is about this run."""
        self._acted_on[fence.job_id] = fence.restarts

    def ended(self, now: float, jobs: Iterable[SlurmJob]) -> Iterable[EndedJob]:
        """Jobs that were seen running and that Slurm says are over, with what waits or runs in their place."""
        successors: dict[tuple[str, str], list[SlurmJob]] = {}
        dependent: dict[str, list[SlurmJob]] = {}
        for job in jobs:
            if job.state in ALIVE:
                successors.setdefault((job.user, job.name), []).append(job)
                if job.reason.startswith("Dependency"):  # on which job, Slurm's listing does not tell
                    dependent.setdefault(job.user, []).append(job)
        for run in [*self._runs.values(), *self.past_jobs.gone(now)]:
            if run.inactive_since is None or run.job.state in ALIVE or not run.started:
                continue
            job, past = run.job, self.past_jobs.past(run, now)
            behind = [*successors.get((job.user, job.name), ()), *dependent.get(job.user, ())]
            succeeded_by = tuple(dict.fromkeys(each.job_id for each in behind if each.job_id != job.job_id))
            self.past_jobs.add_link(job, past, succeeded_by)
            yield EndedJob(
                job=job,
                ended_at=run.inactive_since,
                last_step=past.last_step,
                total_steps=past.total_steps,
                succeeded_by=succeeded_by,
                preceded_by=self.past_jobs.preceded_by(job, past),
                run=past,
                past=run.past,
            )


def _continue(run: Run, job: SlurmJob, now: float, wall: float | None) -> None:
    """The job runs as before, or again after it waited or was suspended."""
    if run.inactive_since is not None or (job.state == "RUNNING" and run.job.state != "RUNNING"):
        run.grace_from = now  # no step was due in that time
        run.forget_dumps()
    if not run.started:
        run.began_at, run.started = now, True
        run.valid_from = max(run.valid_from, started_at(job, now, wall))
    run.job, run.inactive_since = job, None


REMEMBERED = ("uid", "nodes", "start_at", "is_batch", "requeueable", "required_nodes")
"""Fields that stay as they were while Slurm's word for them cannot be read: nothing is done to such a job
either way."""


def jobs_now(before: Mapping[str, SlurmJob], view: SlurmView) -> dict[str, SlurmJob]:
    """The jobs by id: those of the listing and, if it does not show all, those that were not over in the one before."""
    now = {job.job_id: remembered(job, before.get(job.job_id)) for job in view.jobs}
    if not view.partial:
        return now
    missing = {name: job for name, job in before.items() if name not in now and job.state not in OVER}
    return missing | now


def remembered(job: SlurmJob, before: SlurmJob | None) -> SlurmJob:
    """The job, with what could not be read as it was before in the same run."""
    if not job.unreadable or before is None or before.raw_id != job.raw_id:
        return job
    if "restarts" not in job.unreadable and job.restarts != before.restarts:
        return job
    return replace(job, **{name: getattr(before, name) for name in REMEMBERED if name in job.unreadable})
