"""Follows the logs of jobs, in a `files` child that is the job's owner: here, and not in the loop, files are touched.

What a look may cost is bounded, in bytes and in CPU time, over all files of the child together: they are read in turns,
so that one that is flooded does not starve the others. What does not fit waits for the next look and is told as lag;
only far behind is something skipped, and counted. See slurm_watchdog.agent.logs.log_file for one file.
"""

from __future__ import annotations

import fnmatch
import os
import resource
import stat
from itertools import islice
from typing import Any

from slurm_watchdog.agent.logs.events import Item, condense
from slurm_watchdog.agent.logs.log_file import LogFollower
from slurm_watchdog.agent.logs.position import FilePosition, Identity
from slurm_watchdog.agent.workers.request_types import Follow
from slurm_watchdog.base import clock
from slurm_watchdog.knowledge.progress_patterns import Pattern
from slurm_watchdog.parse.training_log.site_patterns import compile_patterns

LOOK_BYTES = 32 * 1024**2
LOOK_CPU_S = 0.25
"""Of one core, each look: a flood may cost 5 % of it at an interval of 5 s, and is then read at some 5 MB/s or more."""
LOOK_S = 1.0
"""Wall-clock time of a look on a filesystem that is slow; a child has seconds until it counts as hung."""
MAX_ANSWER_EVENTS = 3000
"""In one answer: with lines of 500 characters a few megabytes."""
EXPAND_EVERY_S = 30.0
MAX_ENTRIES = 4096
"""Names that are read in directories for one pattern."""
MAX_MATCHES = 24
MAGIC = "*?["

Key = tuple[str, str]
"""Job and path."""


def follow(args: Follow, state: dict[str, Any]) -> dict[str, Any]:
    """One look at all files of this child.

    Returns {"files": [{job, path, growth_age_s, error, events, dropped, offset, lag, skipped,
    framework, seats: [[pid, rank, local rank, world size]…]}…], "token": …,
    "globs": [[job, pattern, [path…]]…]}; patterns are in it only when they were looked up anew. Files that
    are no longer
    named are closed.

    What was in an answer that nobody took (the child had counted as hung) comes again with the next: `taken` is the
    token of the last answer that was.
    """
    now, wall = clock.monotonic(), clock.wall()
    tails = _tails(args.files, state)
    _give_patterns(tails, args.own, state)
    twins = _look(tails, now, wall)
    _read_in_turns(tails, state, now, wall)
    news = {key: tail.take() for key, tail in tails.items()}
    if args.taken != state.get("token"):
        news = _with_untaken(news, state, now)
    _bound(news)
    state["number"] = state.get("number", 0) + 1
    state["token"] = f"{os.getpid()}:{state['number']}"
    state["untaken"] = {key: each for key, each in news.items() if each[0] or each[1]}
    state["untaken_at"] = now
    return {
        "files": [_row(key, tail, twins.get(key, tail), news[key], now) for key, tail in tails.items()],
        "token": state["token"],
        "globs": _expand_all(args.globs, state, now),
    }


def _tails(files: list[tuple[str, str, int | None]], state: dict[str, Any]) -> dict[Key, LogFollower]:
    """The tails of what is to be followed, in its order; those of other names are closed."""
    before: dict[Key, LogFollower] = state.setdefault("tails", {})
    left: dict[str, dict[Identity, FilePosition]] = state.setdefault("left", {})
    jobs = {job for job, _, _ in files}
    tails = {}
    for job, path, start in files:
        tail = before.pop((job, path), None)
        tails[job, path] = tail or LogFollower(path, start, left.setdefault(job, {}))
    for tail in before.values():
        tail.close()
    for job in [job for job in left if job not in jobs]:
        del left[job]
    state["tails"] = tails
    return tails


def _give_patterns(tails: dict[Key, LogFollower], own: dict[str, list[str]], state: dict[str, Any]) -> None:
    """Each tail gets the patterns of progress that its job's site wrote; they are compiled once."""
    known: dict[tuple[str, ...], tuple[Pattern, ...]] = state.get("own", {})
    state["own"] = {
        texts: known.get(texts) or compile_patterns(texts) for texts in {tuple(each) for each in own.values()}
    }
    for (job, _), tail in tails.items():
        tail.own = state["own"].get(tuple(own.get(job, ())), ())


def _look(tails: dict[Key, LogFollower], now: float, wall: float) -> dict[Key, LogFollower]:
    """Looks at each; returns for those that name a file of the same job once more the tail that reads it."""
    held: dict[str, dict[Identity, LogFollower]] = {}
    for (job, _), tail in tails.items():
        if tail.identity is not None:
            held.setdefault(job, {})[tail.identity] = tail
    twins = {}
    for (job, path), tail in tails.items():
        twin = tail.look(now, wall, held.setdefault(job, {}))
        if twin is not None:
            twins[job, path] = twin
    return twins


def _read_in_turns(tails: dict[Key, LogFollower], state: dict[str, Any], now: float, wall: float) -> None:
    """Reads block after block, one of each file that has more, until nothing is left or the look has cost enough.

    The files that were not reached the last time come first.
    """
    waiting = [key for key, tail in tails.items() if tail.has_more]
    late = {key: place for place, key in enumerate(state.get("late", ()))}
    waiting.sort(key=lambda key: late.get(key, len(late)))
    cpu_end_s, read_bytes = _cpu_s() + LOOK_CPU_S, 0
    while waiting:
        if read_bytes >= LOOK_BYTES or _cpu_s() >= cpu_end_s or clock.monotonic() >= now + LOOK_S:
            break
        key = waiting.pop(0)
        read_bytes += tails[key].read(now, wall)
        if tails[key].has_more:
            waiting.append(key)
    state["late"] = waiting


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _with_untaken(
    news: dict[Key, tuple[list[Item], int]], state: dict[str, Any], now: float
) -> dict[Key, tuple[list[Item], int]]:
    older_s = now - state.get("untaken_at", now)
    for key, (items, left_out) in state.get("untaken", {}).items():
        if key in news:
            aged = [{**item, "age_s": item["age_s"] + older_s} for item in items]
            kept, more = condense(aged + news[key][0])
            news[key] = (kept, left_out + news[key][1] + more)
    return news


def _bound(news: dict[Key, tuple[list[Item], int]]) -> None:
    """Keeps an answer small: many files in flood get less room each."""
    if sum(len(items) for items, _ in news.values()) <= MAX_ANSWER_EVENTS:
        return
    talking = sum(1 for items, _ in news.values() if items)
    limit = max(2, MAX_ANSWER_EVENTS // (4 * talking))
    for key, (items, left_out) in news.items():
        kept, more = condense(items, limit)
        news[key] = (kept, left_out + more)


def _row(
    key: Key, tail: LogFollower, reader: LogFollower, news: tuple[list[Item], int], now: float
) -> dict[str, Any]:
    age_s = None if reader.grown_at is None else max(0.0, now - reader.grown_at)
    offset = reader.place.position if reader.fd >= 0 and reader.place is not None else None
    return {
        "job": key[0], "path": key[1], "growth_age_s": age_s, "error": tail.error, "events": news[0],
        "dropped": news[1], "offset": offset, "lag": reader.lag_bytes, "skipped": tail.skipped_bytes, "framework": reader.framework,
        "seats": [[pid, seat.rank, seat.local_rank, seat.world_size] for pid, seat in reader.seats.seats().items()],
    }  # fmt: skip


def _expand_all(globs: list[tuple[str, str]], state: dict[str, Any], now: float) -> list[Any]:
    done: dict[tuple[str, str], float] = state.setdefault("expanded", {})
    found = []
    for job, pattern in globs:
        if now - done.get((job, pattern), float("-inf")) >= EXPAND_EVERY_S:
            done[job, pattern] = now
            found.append([job, pattern, expand(pattern)])
    for key in [key for key in done if key not in globs]:
        del done[key]
    return found


def expand(pattern: str) -> list[str]:
    """The files that an absolute pattern with `*`, `?`, `[…]` names: at most MAX_MATCHES, the last written ones.

    Of each directory's names at most MAX_ENTRIES are read; directories that cannot be read hold nothing. `*` matches no
    slash and, as in a shell, no name that begins with a dot.
    """
    paths, entries = ["/"], MAX_ENTRIES
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
