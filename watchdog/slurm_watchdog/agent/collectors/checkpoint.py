"""Checkpoints of the jobs on this node, and files that jobs write to as their loop turns, where a site has named them.

The loop only knows names: the child that reads the logs of the same mount as the same user looks, and what is asked in
one tick is answered in a later one.

Sees: the newest complete checkpoint: step, age, size, and whether a newer one is being written (Megatron,
    DeepSpeed, PyTorch DCP, Hugging Face, Lightning, NeMo, Composer, Orbax and plain files)
From: directories that the ranks' command lines or `jobs.checkpoint_directories` name, trackers
How often: every 30 s, every 5 s while one is awaited; 8 directories a job
Never: the tensors: of a file its end or its header
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.children.answers import (
    CheckpointMemory,
    ScannedPlace,
)
from slurm_watchdog.agent.children.children import Answer, Children
from slurm_watchdog.agent.children.requests import PlaceKind, ScanCheckpoints
from slurm_watchdog.agent.collectors.collector import Collector, CollectorContext, CollectorSpec
from slurm_watchdog.agent.logs.job_logs import JobLogs
from slurm_watchdog.agent.processes.identity_cache import MAX_DIRECTORIES
from slurm_watchdog.base.mounts import mount_of
from slurm_watchdog.base.structs import only
from slurm_watchdog.model.observations import Checkpoint, Event, EventKind, Role
from slurm_watchdog.model.report import CheckpointSection, ProcessSection

MAX_TRACKERS = 4
MAX_CLOCKS = 4
CLOCK_S = 30.0  # Files that are named for progress are looked at this often at least.
CLOCK_PATTERN = "file"
MAX_PLACES = 64  # Of the node: directories and trackers together.
SOON_S = 5.0  # While one is being written its directory is looked at this often: the controller waits for it.
BUDGET_S = 2.0  # For one look of a child at all that it is asked about, system calls that hang not counted.
CACHED_S = 60.0  # A client may show a directory that old (acdirmax of nfs(5)): a checkpoint was complete since then.
MAX_MOVES = 8  # A directory that is named through links is followed over so many mounts.


@dataclass
class _Place:
    """One directory or tracker of one job. `path` is where it lies, `reported` what of it was reported last."""

    path: str
    kind: PlaceKind
    due: float
    row: Checkpoint
    at: float = 0.0  # When the child was asked for `row`.
    asked_at: float = 0.0
    scanned_at: float | None = None
    memory: CheckpointMemory | None = None
    reported: tuple[object, ...] | None = None
    reported_ns: int = 0
    moves: int = 0


Key = tuple[str, str]  # Job, and the directory or tracker as it was named.


class CheckpointSchedule(msgspec.Struct):
    """What is looked at, and what came of it since the last report."""

    probes: Children
    logs: JobLogs
    interval_s: float
    _places: dict[Key, _Place] = {}
    _asked: set[str] = set()
    _events: list[tuple[float, Event]] = []
    _recent: dict[Key, tuple[float, Event]] = {}

    def collect(
        self, now: float, deadline_s: float, directories: Mapping[str, Iterable[str]], hurry: Collection[str] = ()
    ) -> tuple[tuple[Checkpoint, ...], tuple[Event, ...]]:
        """A row for each directory, and an event for each newest complete checkpoint that is new since the last call.
        `directories` are absolute, by job; the trackers that the controller names for its jobs are read as well. Those
        of the jobs in `hurry` are looked at every SOON_S: of them someone waits for the next one. Call it after the
        logs were read: it shares their children."""
        self._note_places(now, directories)
        for (job_id, _), place in self._places.items():
            if job_id in hurry:
                place.due = min(place.due, place.asked_at + SOON_S)
        self._ask(now, deadline_s)
        rows = tuple(self._row(place, now) for place in self._places.values() if place.kind == "directory")
        events = tuple(replace(event, age_s=event.age_s + now - at) for at, event in self._events)
        self._events = []
        return rows, events

    def retell(self) -> None:
        """Puts the newest checkpoint of each place before what is new: the controller restarted and knows none."""
        past = [each for each in self._recent.values() if each not in self._events]
        self._events = sorted(past, key=lambda each: each[0] - each[1].age_s) + self._events

    # -- where -------------------------------------------------------------------------------------------------

    def _note_places(self, now: float, directories: Mapping[str, Iterable[str]]) -> None:
        wanted: dict[Key, PlaceKind] = {}
        for job_id, paths in directories.items():
            for path in list(dict.fromkeys(paths))[:MAX_DIRECTORIES]:
                wanted[job_id, path] = "directory"
        for job_id, watch in self.logs.watch.items():
            for path in watch.checkpoint_trackers[:MAX_TRACKERS]:
                wanted[job_id, path] = "tracker"
            for path in watch.progress_files[:MAX_CLOCKS]:
                wanted.setdefault((job_id, path), "clock")
        wanted = {key: wanted[key] for key in list(wanted)[:MAX_PLACES] if key[1].startswith("/")}
        for key, kind in wanted.items():
            if key not in self._places:
                row = Checkpoint(job_id=key[0], directory=key[1], error="not read yet")
                self._places[key] = _Place(key[1], kind, now, row)
        self._places = {key: place for key, place in self._places.items() if key in wanted}
        self._recent = {key: event for key, event in self._recent.items() if key in wanted}

    def _child_of(self, job_id: str, path: str) -> tuple[str, int]:
        uid = self.logs.owner_of(job_id)
        return self.logs.key_of(path, uid), uid

    def _ask(self, now: float, deadline_s: float) -> None:
        plan: dict[tuple[str, int, str], list[Key]] = {}
        for key, place in self._places.items():
            if (untouched := self.logs.why_untouched(place.path)) is not None:
                place.row = replace(place.row, error=untouched)
                continue
            if now >= place.due and (key[0] in self.logs.jobs or not self.logs.become_owner):
                where = mount_of(place.path, self.logs.mounts)
                point = where.point if where is not None else "/"
                plan.setdefault((*self._child_of(key[0], place.path), point), []).append(key)
        for (child, uid, mount), keys in plan.items():
            if child in self._asked:
                continue
            places = [(job, self._places[job, named]) for job, named in keys]
            request = ScanCheckpoints(
                mount=mount,
                others=sorted({m.point for m in self.logs.mounts if _is_below(m.point, mount)}),
                budget_s=BUDGET_S,
                places=[(place.kind, job, place.path, place.memory) for job, place in places],
            )
            then = partial(self._apply, child, now, tuple(keys))
            if self.probes.ask(child, request, deadline_s, now, then, uid) is not None:
                self._asked.add(child)

    # -- what came of it ---------------------------------------------------------------------------------------

    def _apply(self, child: str, asked_at: float, keys: tuple[Key, ...], answer: Answer[list[ScannedPlace]]) -> None:
        """The answer of a child about `keys`. One that hangs shows in every row, for as long as it does."""
        self._asked.discard(child)
        for key, found in zip_longest(keys, answer.value or ()):
            place = self._places.get(key)
            if place is None:
                continue
            every_s = min(CLOCK_S, self.interval_s) if place.kind == "clock" else self.interval_s
            place.asked_at, place.due = asked_at, asked_at + every_s
            if found is None:
                if not answer.timed_out:
                    self._fail(place, asked_at, answer.error or "")
            elif found.moved is not None:
                self._move(place, asked_at, found.moved)
            else:
                place.path, place.moves = key[1], 0  # next time from its name again: links may be changed
                apply = {"directory": self._apply_directory, "tracker": self._apply_tracker, "clock": self._apply_clock}
                apply[place.kind](key, place, asked_at, found)

    def _fail(self, place: _Place, at: float, error: str) -> None:
        place.row, place.at = replace(self._aged(place, at), error=error), at

    def _apply_directory(self, key: Key, place: _Place, at: float, found: ScannedPlace) -> None:
        if not found.was_read:  # what was known before stays, with the reason
            self._fail(place, at, found.error or "")
            return
        # A new place is compared from its second scan on; what was there at the first has its true age.
        first, since_s = place.scanned_at is None, at - (place.scanned_at or at)
        place.memory, place.scanned_at, place.at = found.memory, at, at
        place.row = replace(only(Checkpoint, found), directory=key[1])
        if found.writing:
            place.due = at + min(SOON_S, self.interval_s)
        newest = (found.path, found.step, found.at_ns)
        if found.path is None or newest == place.reported:
            return
        age_s = found.age_s or 0.0
        if not first and found.at_ns > place.reported_ns:
            age_s = min(age_s, since_s + CACHED_S)  # the server's clock may be slow; it was not there then
        place.reported, place.reported_ns = newest, found.at_ns
        self._add_event(key, at, found.path, found.step, age_s, "directory")

    def _apply_tracker(self, key: Key, place: _Place, at: float, found: ScannedPlace) -> None:
        if found.step is not None and place.reported != (found.step,):
            place.reported = (found.step,)
            self._add_event(key, at, key[1], found.step, found.age_s or 0.0, "tracker")

    def _apply_clock(self, key: Key, place: _Place, at: float, found: ScannedPlace) -> None:
        """A file that was changed since the scan before; at the first scan the event says where the count begins."""
        first, place.scanned_at = place.scanned_at is None, at
        newest = (found.at_ns, found.size_bytes)
        if not found.at_ns or newest == place.reported:
            return
        place.reported = newest
        event = Event(
            kind=EventKind.PROGRESS, job_id=key[0], source=key[1], age_s=0.0, count=found.at_ns / 1e9,
            pattern=CLOCK_PATTERN, backlog=first,
        )  # fmt: skip
        self._keep(at, event)

    def _move(self, place: _Place, at: float, path: str) -> None:
        """The directory is named through a link to another mount: its child is asked, at once."""
        place.moves += 1
        if place.moves > MAX_MOVES:
            place.moves, place.path = 0, place.row.directory
            self._fail(place, at, "its name leads through too many links from mount to mount")
        else:
            place.path, place.due = path, at

    def _add_event(self, key: Key, at: float, source: str, step: int | None, age_s: float, pattern: str) -> None:
        kind = EventKind.CHECKPOINT
        event = Event(kind=kind, job_id=key[0], source=source, step=step, age_s=age_s, pattern=pattern)
        self._keep(at, event)
        self._recent[key] = (at, event)

    def _keep(self, at: float, event: Event) -> None:
        self._events.append((at, event))
        del self._events[: -4 * MAX_PLACES]

    def _aged(self, place: _Place, now: float) -> Checkpoint:
        age_s = None if place.row.age_s is None else place.row.age_s + now - place.at
        return replace(place.row, age_s=age_s, looked_age_s=now - place.at if place.scanned_at is not None else 0.0)

    def _row(self, place: _Place, now: float) -> Checkpoint:
        row = self._aged(place, now)
        child, _ = self._child_of(row.job_id, place.path)
        silent = self.logs.why_silent(child, now)
        return row if silent is None else replace(row, writing=False, error=silent)


def _is_below(path: str, mount: str) -> bool:
    return path != mount and path.startswith(mount.rstrip("/") + "/")


class CheckpointCollector(Collector):
    """The newest complete checkpoint of each job, and whether one is being written."""

    def __init__(self, context: CollectorContext):
        super().__init__(context)
        self.keeper = self._schedule = CheckpointSchedule(
            context.children, context.logs, context.settings.checkpoint_interval
        )

    def collect(self, now: float) -> CheckpointSection:
        """Where the controller says so, and what command lines name on the node of rank 0 alone."""
        directories = {job_id: list(watch.checkpoint_directories) for job_id, watch in self.context.jobs.watch.items()}
        processes = self.sections.of(ProcessSection).processes
        for job_id in {each.job_id for each in processes if each.rank == 0 and each.role is Role.RANK}:
            directories.setdefault(job_id, []).extend(self.context.processes.checkpoint_directories_of(job_id))
        rows, events = self._schedule.collect(now, self.deadline_s, directories, self.context.jobs.awaiting_checkpoints)
        return CheckpointSection(checkpoints=rows, events=events)


SPEC = CollectorSpec("checkpoint", CheckpointSection, CheckpointCollector)
