"""The logs of the jobs on this node: which files there are, who reads them, and what came of it.

The loop only knows names. One child for each mount and owner reads (see slurm_watchdog.agent.logs.follow), so
a filesystem that hangs holds one child and the logs on it, and nothing else.
"""

from __future__ import annotations

import glob
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.children.answers import FollowedLogs
from slurm_watchdog.agent.children.become_user import refusal_as
from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import Follow, ListMounts
from slurm_watchdog.agent.logs.follow import MAGIC
from slurm_watchdog.agent.processes.jobs_here import JobsHere
from slurm_watchdog.agent.processes.open_files import OpenFilesSchedule
from slurm_watchdog.agent.processes.reader import SETTLE_S
from slurm_watchdog.agent.processes.user_looks import UserLooks
from slurm_watchdog.base.mounts import Mount, MountNews, mount_of
from slurm_watchdog.base.redact import mask_words
from slurm_watchdog.base.structs import only
from slurm_watchdog.knowledge.launchers import HEARTBEAT_VARIABLE
from slurm_watchdog.knowledge.ray_train import WorkerRank, speaker_of
from slurm_watchdog.model.observations import BY_SLURM, Event, EventKind, LogFile, Process
from slurm_watchdog.model.protocol import JobWatch

MAX_FILES = 24  # Logs of one job that are followed on one node: of the job and of eight ranks, and more.
MAX_WAITING_EVENTS = 5000  # In one report; of more, progress goes first, and of that the oldest.
KEPT = 12
"""Lines of each counter, and of each phase, for a controller that restarted: enough to learn the job's speed from at
once, and what was between its steps."""
ORDER_S = 30.0  # Which of two lines in different files came first is not known where they were read so close together.
KEPT_AFTER_END_S = 30.0  # So long the logs of a job are followed after its last process: the last words are the best.
MOUNTS_EVERY_S = 60.0
MOUNTS_AT_LEAST_EVERY_S = 900.0  # The table of mounts is read again, though the kernel says that it is as it was.
MAX_KNOWN = 256
MOUNTS = "node:mounts"


class FollowedJob(msgspec.Struct):
    uid: int
    seen_at: float
    opened: list[str] = []
    found: dict[str, list[str]] = {}  # What stands for each pattern with wildcards.
    left_out: list[str] = []  # Logs that are not followed, for there are too many.
    seats: dict[int, WorkerRank] = {}  # Pid, as the job sees it -> rank, as a log of this run said last.
    said: tuple[tuple[int, int, int, int], ...] = ()  # The rows of that, also where an earlier run wrote them.
    restarts: int | None = None


class LogMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of logs, for the one that it becomes: how far each was read, and the recent past."""

    jobs: dict[str, FollowedJob] = {}
    rows: tuple[tuple[LogFile, float], ...] = ()
    recent: tuple[tuple[float, Event], ...] = ()  # In the order in which they were read.


@dataclass
class JobLogs:
    """What is followed, and what came in since the last report."""

    looks: UserLooks
    mounts: tuple[Mount, ...]
    node: str
    patterns: tuple[str, ...]
    become_owner: bool  # Whether the agent is root, and its children can become the job's owner.
    max_waiting_events: int = MAX_WAITING_EVENTS
    here: JobsHere = field(default_factory=JobsHere)
    jobs: dict[str, FollowedJob] = field(default_factory=dict)
    dropped: int = 0
    _recent: dict[tuple[str, str, EventKind, str], deque[tuple[int, float, Event]]] = field(default_factory=dict)
    """(number, read at, event)."""
    _noted: int = 0  # Events so far: those of one look have one date.
    _rows: dict[tuple[str, str], tuple[LogFile, float]] = field(default_factory=dict)
    _taken: dict[str, str] = field(default_factory=dict)  # The token of each child's last answer that was taken.
    _events: list[tuple[float, Event]] = field(default_factory=list)
    mount_news: Callable[[], bool] = field(default_factory=MountNews)  # Mounts have come or gone.
    _mounts_at: float = float("-inf")
    _mounts_old: bool = True
    _known: dict[str, Mount | None] = field(default_factory=dict)
    """On which of the mounts in `_known_in` a path lies: a node has hundreds of them."""
    _known_in: tuple[Mount, ...] | None = None

    def __post_init__(self) -> None:
        self.probes = self.looks.children
        self.open_files = OpenFilesSchedule(self.looks, self._note_open)

    def collect(
        self, now: float, processes: Iterable[Process], environs: Mapping[str, Mapping[str, str]], deadline_s: float
    ) -> tuple[tuple[LogFile, ...], tuple[Event, ...], int]:
        """The files that are followed, what happened in them since the last call, and how much was left out."""
        self._renew_mounts(now, deadline_s)
        mine = list(processes)
        self._note_jobs(mine, now)
        requests = self.open_files.ask(mine, now, deadline_s)
        if requests:
            self.probes.settle(SETTLE_S, requests)
        followed, hung = self._follow(now, environs, deadline_s, {each.uid for each in mine})
        rows = tuple(self._row(key, now, hung.get(key)) for key in followed) + self._left_out()
        self._rows = {key: row for key, row in self._rows.items() if key in followed}
        again = [each for each in self._announced() if each not in self._events]
        events = tuple(replace(event, age_s=event.age_s + now - at) for at, event in again + self._events)
        dropped, self.dropped = self.dropped, 0
        self._events = []
        return rows, events, dropped

    @property
    def watch(self) -> Mapping[str, JobWatch]:
        """What the controller wants followed, by job."""
        return self.here.watch

    def owner_of(self, job_id: str) -> int:
        """The user to read as: the job's owner, or -1 (the agent's own user) where it cannot become someone else."""
        job = self.jobs.get(job_id)
        return job.uid if self.become_owner and job is not None else -1

    def key_of(self, path: str, uid: int) -> str:
        """The child that touches `path` as `uid`: one for each mount, so that what hangs on it is its silence alone."""
        mount = self._mount_of(path)
        return f"files:{mount.point if mount else '/'}:{uid if uid >= 0 else 'self'}"

    def _mount_of(self, path: str) -> Mount | None:
        if self._known_in is not self.mounts or len(self._known) > MAX_KNOWN:
            self._known_in, self._known = self.mounts, {}
        if path not in self._known:
            self._known[path] = mount_of(path, self.mounts)
        return self._known[path]

    def why_untouched(self, path: str) -> str | None:
        """Why nothing of ours touches this path: its filesystem is served by a user's program. None elsewhere."""
        mount = self._mount_of(path)
        if mount is None or mount.owner is None:
            return None
        return f"not read: {mount.point} is served by a program of uid {mount.owner} ({mount.fs_type})"

    def why_silent(self, key: str, now: float) -> str | None:
        """Why nothing is known of what the child `key` touches; None while that child does not hang."""
        since_s = self.probes.hung_since(key, now)
        return None if since_s is None else f"its filesystem has not answered for {since_s:.0f} s"

    def seats(self) -> dict[str, dict[int, WorkerRank]]:
        """Of each job whose log says it: pid, in the job's own namespace -> which rank that process is."""
        return {job_id: job.seats for job_id, job in self.jobs.items() if job.seats}

    def followed_of(self, job_id: str) -> list[str]:
        """The files of a job that are followed, those that were opened longest ago first."""
        return [path for job, path in self._rows if job == job_id]

    def memory(self) -> LogMemory:
        """What `remember` of the next agent takes; to be called when all events are in a report."""
        return LogMemory(
            jobs=dict(self.jobs),
            rows=tuple(self._rows.values()),
            recent=tuple((at, event) for _, at, event in self._in_order()),
        )

    def remember(self, memory: LogMemory) -> None:
        """Before the first look: children continue where the last answer that was taken ended."""
        self.jobs |= memory.jobs
        self._rows = {(row.job_id, row.path): (row, at) for row, at in memory.rows}
        for at, event in memory.recent:
            self._note_recent(at, event)

    def _note_jobs(self, processes: list[Process], now: float) -> None:
        for job_id in (*dict.fromkeys(process.job_id for process in processes), *self.watch):
            uid = self._owner(job_id, processes)
            if uid is None and self.become_owner and job_id not in self.jobs:
                continue  # no one has said whose it is: nothing of it is read
            job = self.jobs.setdefault(job_id, FollowedJob(-1 if uid is None else uid, now))
            job.seen_at, job.uid = now, job.uid if uid is None else uid
            watch = self.watch.get(job_id)
            if watch is not None and watch.restarts != job.restarts:
                # Another run has other processes.
                job.seats = {} if job.restarts is not None else job.seats
                job.restarts = watch.restarts
        for job_id in [job_id for job_id, job in self.jobs.items() if now - job.seen_at > KEPT_AFTER_END_S]:
            del self.jobs[job_id]
        if any(key[0] not in self.jobs for key in self._recent):
            self._recent = {key: recent for key, recent in self._recent.items() if key[0] in self.jobs}

    def _owner(self, job_id: str, processes: list[Process]) -> int | None:
        """Whose a job is: as Slurm says, else the one ordinary user in the job's control group; else None."""
        watch = self.watch.get(job_id)
        if watch is not None:
            return watch.uid if watch.uid >= 0 else None
        users = {
            each.uid
            for each in processes
            if each.job_id == job_id and each.member_by == BY_SLURM and refusal_as(each.uid) is None
        }
        return users.pop() if len(users) == 1 else None

    # -- which files -------------------------------------------------------------------------------------------

    def _note_open(self, job_id: str, paths: tuple[str, ...]) -> None:
        job = self.jobs.get(job_id)
        if job is not None:
            # A file that was open once stays: who wrote it may be dead, which is when it matters.
            job.opened += [path for path in paths if path not in job.opened]
            del job.opened[: -2 * MAX_FILES]

    def _paths(self, job_id: str, environ: Mapping[str, str]) -> list[str]:
        watch = self.watch.get(job_id)
        paths = self._heartbeat(job_id, environ) + list(watch.log_paths) if watch else []
        values = {"job_id": job_id, "node": self.node}
        if environ.get("SLURM_JOB_USER"):
            values["user"] = environ["SLURM_JOB_USER"]
        if environ.get("SLURM_SUBMIT_DIR"):
            values["workdir"] = environ["SLURM_SUBMIT_DIR"]
        job = self.jobs[job_id]
        for pattern in self.patterns:
            wild = any(sign in pattern for sign in MAGIC)
            try:
                path = pattern.format_map(
                    {name: glob.escape(value) for name, value in values.items()} if wild else values
                )
            except KeyError:
                continue  # the job's environment is not known (yet)
            if wild:
                paths += job.found.setdefault(path, [])
            else:
                paths.append(path)
        paths += job.opened
        named = list(dict.fromkeys(path for path in paths if path.startswith("/")))
        job.left_out = named[MAX_FILES:]
        return named[:MAX_FILES]

    def _heartbeat(self, job_id: str, environ: Mapping[str, str]) -> list[str]:
        """The heartbeat of the run, before any log; it is looked for like a pattern, for most have none."""
        path = environ.get(HEARTBEAT_VARIABLE, "")
        return self.jobs[job_id].found.setdefault(glob.escape(path), []) if path.startswith("/") else []

    # -- reading them ------------------------------------------------------------------------------------------

    def _follow(
        self, now: float, environs: Mapping[str, Mapping[str, str]], deadline_s: float, here: set[int]
    ) -> tuple[list[tuple[str, str]], dict[tuple[str, str], str]]:
        """`here`: users with a process. As another no child is started, but one that is there reads the last lines."""
        plan: dict[tuple[str, int], Follow] = {}
        followed, hung = [], {}
        for job_id, job in self.jobs.items():
            uid = self.owner_of(job_id)
            watch = self.watch.get(job_id)
            starts = dict(watch.log_offsets) if watch is not None else {}
            for path in self._paths(job_id, environs.get(job_id, {})):
                if (untouched := self.why_untouched(path)) is not None:
                    followed.append((job_id, path))
                    hung[job_id, path] = untouched
                    continue
                key = self.key_of(path, uid)
                start = self._read_so_far((job_id, path), starts.get(mask_words(path)))
                planned = plan.setdefault((key, uid), Follow([], [], {}, []))
                planned.files.append((job_id, path, start))
                if watch is not None and watch.log_paths and job_id not in planned.closely:
                    planned.closely.append(job_id)  # This is its batch host: what it prints has the steps of most.
                if watch is not None and watch.progress_patterns:
                    planned.own[job_id] = list(watch.progress_patterns)
                followed.append((job_id, path))
                if (silent := self.why_silent(key, now)) is not None:
                    hung[job_id, path] = silent
            for pattern in job.found:
                if self.why_untouched(pattern) is not None:
                    continue
                plan.setdefault((self.key_of(pattern, uid), uid), Follow([], [], {}, [])).globs.append(
                    (job_id, pattern)
                )
        requests = [
            self.probes.ask(
                key, replace(each, taken=self._taken.get(key)), deadline_s, now, partial(self._apply_news, now), uid
            )
            for (key, uid), each in plan.items()
            if uid < 0 or uid in here or key in self.probes.names()
        ]
        self.probes.settle(SETTLE_S, [request for request in requests if request is not None])
        for key in self.probes.names():
            if key.startswith("files:") and not any(key == planned for planned, _ in plan):
                self.probes.retire(key)  # closes what it held open: a filesystem must stay unmountable
        self._taken = {key: token for key, token in self._taken.items() if any(key == k for k, _ in plan)}
        return followed, hung

    def _read_so_far(self, key: tuple[str, str], start: int | None) -> int | None:
        """Where a new child continues: an earlier one may have ended."""
        row = self._rows.get(key)
        return row[0].offset if row is not None and row[0].offset is not None else start

    def _apply_news(self, asked_at: float, answer: Answer[FollowedLogs]) -> None:
        news = answer.value
        if news is None:
            return  # timed out: rows say so while it hangs, and what it read comes with its next answer
        self._taken[answer.key] = news.token
        for each in news.files:
            key = (each.job_id, each.path)
            row = only(LogFile, each)
            if row.framework is None and key in self._rows:
                row = replace(row, framework=self._rows[key][0].framework)
            self._rows[key] = (row, asked_at)
            self._set_seats(self.jobs.get(each.job_id), each.seats)
            self.dropped += each.dropped
            for event in each.events:
                event = self._of_rank(replace(event, job_id=each.job_id, source=each.path))
                self._events.append((asked_at, event))
                self._note_recent(asked_at, event)
        for job_id, pattern, paths in news.globs:
            if job_id in self.jobs and pattern in self.jobs[job_id].found:
                self.jobs[job_id].found[pattern] = list(paths)
        self._drop_excess()

    def _of_rank(self, event: Event) -> Event:
        """The event, with the rank of the process that Ray names before the line."""
        job = self.jobs.get(event.job_id)
        if job is None or not job.seats or event.rank is not None:
            return event
        seat = job.seats.get(speaker_of(event.line) or 0)
        return event if seat is None else replace(event, rank=seat.rank)

    def _set_seats(self, job: FollowedJob | None, rows: tuple[tuple[int, int, int, int], ...]) -> None:
        if job is not None and rows and rows != job.said:
            job.said = rows
            job.seats = {pid: WorkerRank(rank, local, size) for pid, rank, local, size in rows}

    def _drop_excess(self) -> None:
        excess = len(self._events) - self.max_waiting_events
        if excess > 0:
            self.dropped += excess
            order = sorted(range(len(self._events)), key=lambda at: self._events[at][1].kind is not EventKind.PROGRESS)
            gone = set(order[:excess])
            self._events = [each for at, each in enumerate(self._events) if at not in gone]

    def _note_recent(self, at: float, event: Event) -> None:
        """The recent past, for a controller that comes later."""
        if event.kind is not EventKind.ERROR:
            key = (event.job_id, event.source, event.kind, event.pattern or "")
            self._noted += 1
            self._recent.setdefault(key, deque(maxlen=KEPT)).append((self._noted, at, event))

    def _in_order(self) -> list[tuple[int, float, Event]]:
        """The recent past, as it was read."""
        return sorted((each for recent in self._recent.values() for each in recent), key=lambda each: each[0])

    def _announced(self) -> list[tuple[float, Event]]:
        """The newest line of each phase that a job is in, as far as its logs on this node tell: it is in every report
        until the file has more to say, for a report that is lost, or a controller that is new, makes no difference
        then."""
        found: dict[tuple[str, str], tuple[int, float, Event]] = {}
        passed: dict[tuple[str, str], int] = {}
        stepped_at: dict[str, float] = {}
        for recent in self._recent.values():
            number, at, event = recent[-1]
            if event.phase:
                key = (event.job_id, event.phase)
                found[key] = max(found.get(key, (0, 0.0, event)), (number, at, event), key=lambda each: each[0])
                continue
            file = (event.job_id, event.source)
            passed[file] = max(number, passed.get(file, 0))
            if event.kind is EventKind.PROGRESS:
                stepped_at[event.job_id] = max(at - event.age_s, stepped_at.get(event.job_id, 0.0))
        return [
            (at, event)
            for number, at, event in found.values()
            if number > passed.get((event.job_id, event.source), 0)
            and at - event.age_s >= stepped_at.get(event.job_id, 0.0) - ORDER_S
        ]

    def retell(self) -> None:
        """Puts the recent past before what is new, for a controller that restarted, or after lost reports."""
        past = sorted(self._in_order(), key=lambda each: each[1] - each[2].age_s)
        told = [(at, event) for _, at, event in past]
        self._events = told + [each for each in self._events if each not in told]

    def _row(self, key: tuple[str, str], now: float, hung: str | None) -> LogFile:
        row, at = self._rows.get(key, (LogFile(job_id=key[0], path=key[1]), now))
        age_s = None if row.growth_age_s is None else row.growth_age_s + now - at
        if key not in self._rows and not hung:
            return replace(row, error="not read yet")
        return replace(row, growth_age_s=age_s, error=hung or row.error)

    def _left_out(self) -> tuple[LogFile, ...]:
        """A row for each job with too many logs: it names the first that is not followed."""
        return tuple(
            LogFile(
                job_id=job_id,
                path=job.left_out[0],
                error=f"not followed, like {len(job.left_out) - 1} more: "
                f"at most {MAX_FILES} logs of a job are on one node",
            )
            for job_id, job in self.jobs.items()
            if job.left_out
        )

    # -- mounts ------------------------------------------------------------------------------------------------

    def _renew_mounts(self, now: float, deadline_s: float) -> None:
        since_s = now - self._mounts_at
        self._mounts_old = self._mounts_old or self.mount_news()
        if since_s >= (MOUNTS_EVERY_S if self._mounts_old else MOUNTS_AT_LEAST_EVERY_S):
            asked = self.probes.ask(MOUNTS, ListMounts(), deadline_s, now, self._apply_mounts)
            if asked is not None:
                self._mounts_at, self._mounts_old = now, False
                self.probes.settle(SETTLE_S, [asked])

    def _apply_mounts(self, answer: Answer[list[Mount]]) -> None:
        mounts = tuple(answer.value or ())
        if mounts and mounts != self.mounts:
            self.mounts = mounts
