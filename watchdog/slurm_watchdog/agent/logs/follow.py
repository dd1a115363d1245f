"""Follows the logs of jobs, in a `files` child that is the job's owner: here, and not in the loop, files are touched.

What one request may cost is bounded, in bytes and in CPU time, over all files of the child together: they are read in
turns, so that one that is flooded does not starve the others. What does not fit waits for the next request and is
reported as lag; only far behind is something skipped, and counted. One file is in slurm_watchdog.agent.logs.log_file.
"""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.children.answers import FollowedFile, FollowedLogs
from slurm_watchdog.agent.children.requests import Follow, WorkerState
from slurm_watchdog.agent.logs.log_file import LogFollower, condense
from slurm_watchdog.agent.logs.position import FilePosition, Identity
from slurm_watchdog.base import clock
from slurm_watchdog.knowledge.progress_patterns import Pattern
from slurm_watchdog.model.observations import Event
from slurm_watchdog.parse.training_log.site_patterns import compile_patterns

MAX_ANSWER_EVENTS = 3000  # In one answer: with lines of 500 characters a few megabytes.
MAX_ENTRIES = 4096  # Names that are read in directories for one pattern.
MAX_MATCHES = 24
MAGIC = "*?["
GROWS_S = 60.0  # Files that have grown within about this long are alike: the first is looked at between two requests.

Key = tuple[str, str]  # Job and path.


News = tuple[list[Event], int]  # Events of one file, and how many more were left out.


@dataclass(frozen=True)
class FollowLimits:
    """What one request may cost, and how often a pattern is looked up."""

    look_bytes: int = 32 * 1024**2
    look_cpu_s: float = 0.25  # Of one core: a flood may cost 5 % of it at 5 s, and is read at some 5 MB/s.
    look_s: float = 1.0  # Wall-clock time on a filesystem that is slow; a child has seconds until it counts as hung.
    expand_every_s: float = 30.0


class FollowMemory(msgspec.Struct):
    """What a child remembers of the logs that it follows."""

    limits: FollowLimits = FollowLimits()
    tails: dict[Key, LogFollower] = {}
    closed: dict[str, dict[Identity, FilePosition]] = {}  # By job: files that are not open now.
    patterns: dict[tuple[str, ...], tuple[Pattern, ...]] = {}  # The sites' patterns of progress, compiled.
    late: list[Key] = []  # Files that the last request did not reach.
    answers: int = 0
    token: str | None = None  # Of the last answer.
    untaken: dict[Key, News] = {}  # What was in it.
    untaken_at: float = 0.0
    expanded: dict[tuple[str, str], float] = {}  # (job, pattern) -> when its files were looked up.


def follow(request: Follow, worker: WorkerState) -> FollowedLogs:
    """Reads what is new in all files of this child; files that are no longer named are closed. What was in an answer
    that the agent did not use (the child had counted as hung) is in the next one again: `taken` is the token of the
    last answer that was used."""
    now, wall = clock.monotonic(), clock.wall()
    memory = worker.memory(FollowMemory)
    tails = _tails(request.files, memory)
    _give_patterns(tails, request.own, memory)
    twins = _refresh_all(tails, now, wall)
    _read_in_turns(tails, memory, now, wall)
    news = {key: tail.drain_events() for key, tail in tails.items()}
    if request.taken != memory.token:
        news = _with_untaken(news, memory, now)
    _bound(news)
    memory.answers += 1
    memory.token = f"{os.getpid()}:{memory.answers}"
    memory.untaken = {key: each for key, each in news.items() if each[0] or each[1]}
    memory.untaken_at = now
    closely: dict[str, LogFollower] = {}
    for (job, _), tail in sorted(tails.items(), key=_carries_steps, reverse=True):
        if job in request.closely:
            closely.setdefault(job, tail)
    worker.between = partial(_glance, list(closely.values())) if closely else None
    return FollowedLogs(
        files=tuple(_row(key, tail, twins.get(key, tail), news[key], now) for key, tail in tails.items()),
        token=memory.token,
        globs=tuple(_expand_all(request.globs, memory, now)),
    )


def _carries_steps(item: tuple[Key, LogFollower]) -> tuple[bool, float]:
    """The greatest of a job carries its step: it has some, and grows."""
    place, grown_at = item[1].place, item[1].grown_at
    return (place is not None and bool(place.last_steps), 0.0 if grown_at is None else grown_at // GROWS_S)


def _glance(tails: list[LogFollower]) -> None:
    now, wall = clock.monotonic(), clock.wall()
    for tail in tails:
        tail.glance(now, wall)


def _tails(files: list[tuple[str, str, int | None]], memory: FollowMemory) -> dict[Key, LogFollower]:
    """The followers of what is requested, in its order; those of other names are closed."""
    before = memory.tails
    jobs = {job for job, _, _ in files}
    tails = {}
    for job, path, start in files:
        tail = before.pop((job, path), None)
        tails[job, path] = tail or LogFollower(path, start, memory.closed.setdefault(job, {}))
    for tail in before.values():
        tail.close()
    for job in [job for job in memory.closed if job not in jobs]:
        del memory.closed[job]
    memory.tails = tails
    return tails


def _give_patterns(tails: dict[Key, LogFollower], own: dict[str, list[str]], memory: FollowMemory) -> None:
    """Each follower gets the patterns of progress that its job's site wrote; they are compiled once."""
    memory.patterns = {
        texts: memory.patterns.get(texts) or compile_patterns(texts) for texts in {tuple(each) for each in own.values()}
    }
    for (job, _), tail in tails.items():
        tail.use(memory.patterns.get(tuple(own.get(job, ())), ()))


def _refresh_all(tails: dict[Key, LogFollower], now: float, wall: float) -> dict[Key, LogFollower]:
    """Looks at each file; returns, for each second name of a file of the same job, the follower that reads it."""
    held: dict[str, dict[Identity, LogFollower]] = {}
    for (job, _), tail in tails.items():
        if tail.identity is not None:
            held.setdefault(job, {})[tail.identity] = tail
    twins = {}
    for (job, path), tail in tails.items():
        twin = tail.refresh(now, wall, held.setdefault(job, {}))
        if twin is not None:
            twins[job, path] = twin
    return twins


def _read_in_turns(tails: dict[Key, LogFollower], memory: FollowMemory, now: float, wall: float) -> None:
    """Reads block after block, one of each file that has more, until nothing is left or it has cost enough. The files
    that were not reached the last time come first."""
    waiting = [key for key, tail in tails.items() if tail.has_more]
    if not waiting and not memory.late:
        return
    late = {key: place for place, key in enumerate(memory.late)}
    waiting.sort(key=lambda key: late.get(key, len(late)))
    limits = memory.limits
    cpu_end_s, read_bytes = clock.thread_cpu() + limits.look_cpu_s, 0
    while waiting:
        if (
            read_bytes >= limits.look_bytes
            or clock.thread_cpu() >= cpu_end_s
            or clock.monotonic() >= now + limits.look_s
        ):
            break
        key = waiting.pop(0)
        read_bytes += tails[key].read(now, wall)
        if tails[key].has_more:
            waiting.append(key)
    memory.late = waiting


def _with_untaken(news: dict[Key, News], memory: FollowMemory, now: float) -> dict[Key, News]:
    older_s = now - memory.untaken_at
    for key, (events, left_out) in memory.untaken.items():
        if key in news:
            aged = [replace(event, age_s=event.age_s + older_s) for event in events]
            kept, more = condense(aged + news[key][0])
            news[key] = (kept, left_out + news[key][1] + more)
    return news


def _bound(news: dict[Key, News]) -> None:
    """Keeps an answer small: many files in flood get less room each."""
    if sum(len(events) for events, _ in news.values()) <= MAX_ANSWER_EVENTS:
        return
    talking = sum(1 for events, _ in news.values() if events)
    limit = max(2, MAX_ANSWER_EVENTS // (4 * talking))
    for key, (events, left_out) in news.items():
        kept, more = condense(events, limit)
        news[key] = (kept, left_out + more)


def _row(key: Key, tail: LogFollower, reader: LogFollower, news: News, now: float) -> FollowedFile:
    return FollowedFile(
        job_id=key[0], path=key[1], error=tail.error, events=tuple(news[0]), dropped=news[1],
        growth_age_s=None if reader.grown_at is None else max(0.0, now - reader.grown_at),
        offset=reader.place.position if reader.fd >= 0 and reader.place is not None else None,
        lag_bytes=reader.lag_bytes, skipped_bytes=tail.skipped_bytes, framework=reader.framework,
        seats=tuple(
            (pid, seat.rank, seat.local_rank, seat.world_size) for pid, seat in reader.seats.seats().items()
        ),
    )  # fmt: skip


def _expand_all(
    globs: list[tuple[str, str]], memory: FollowMemory, now: float
) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The files of those patterns that are due to be looked up again."""
    done = memory.expanded
    for key in [key for key in done if key not in globs]:
        del done[key]
    for job, pattern in globs:
        if now - done.get((job, pattern), float("-inf")) >= memory.limits.expand_every_s:
            done[job, pattern] = now
            yield job, pattern, tuple(expand(pattern))


def expand(pattern: str, max_entries: int = MAX_ENTRIES) -> list[str]:
    """The files that an absolute pattern with `*`, `?`, `[…]` names: at most MAX_MATCHES, the last written ones. Of the
    names in directories at most `max_entries` are read; directories that cannot be read hold nothing. `*` matches no
    slash and, as in a shell, no name that begins with a dot."""
    paths, entries = ["/"], max_entries
    for part in pattern.strip("/").split("/"):
        if not any(sign in part for sign in MAGIC):
            paths = [os.path.join(path, part) for path in paths]
            continue
        matches: list[str] = []
        for path in paths:
            names = _names(path, entries)
            entries -= len(names)
            matches += [os.path.join(path, name) for name in names if _matches(name, part)]
        paths = matches
    dated = sorted((-modified, path) for path in paths if (modified := _modified(path)) is not None)
    return [path for _, path in dated[:MAX_MATCHES]]


def _names(path: str, limit: int) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in islice(entries, max(0, limit))]
    except OSError:
        return []


def _matches(name: str, part: str) -> bool:
    return fnmatch.fnmatchcase(name, part) and (part.startswith(".") or not name.startswith("."))


def _modified(path: str) -> float | None:
    try:
        about = os.stat(path)
    except OSError:
        return None
    return about.st_mtime if stat.S_ISREG(about.st_mode) else None
