"""Follows the logs of jobs, in a `files` child that is the job's owner: here, and not in the loop, files are touched.

A file is followed by its inode through rotation, truncation and replacement. What a tick may cost is bounded: MAX_READ bytes a
file, the newest and the oldest of what is new; what was left out is counted, never silently lost.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import Any

from watchdog import clock
from watchdog.agent.probe import describe
from watchdog.model import EventKind
from watchdog.progress import clean_line, parse_line

MAX_READ = 1 << 20
"""Bytes of one file in one tick. Megatron writes 500 bytes a step; NCCL's debug output has been seen to write 1 MB/s."""
BACKLOG = 64 * 1024
"""Where a file is opened in the middle of its life: enough for the last steps of any framework."""
MAX_PENDING = 64 * 1024
MAX_EVENTS = 50
"""Of each kind, a file and a report."""
MAX_TRACKER = 256

Item = dict[str, Any]
"""One event on its way to the agent: the fields of model.Event without job and source."""


@dataclass
class Lines:
    """Cuts bytes into lines over the borders of reads. A carriage return ends a line, too: bars are redrawn with it."""

    pending: bytes = b""
    skipping: bool = False
    """In the rest of a line that was too long; its beginning has been handed out."""

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        whole = (self.pending + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, rest = whole.split(b"\n")
        if lines and self.skipping:
            lines, self.skipping = lines[1:], False
        if self.skipping:
            rest = b""
        elif len(rest) > MAX_PENDING:
            lines.append(rest)
            rest, self.skipping = b"", True
        # A carriage return at the very end may be the first half of \r\n: an empty line then follows, which says nothing.
        self.pending = rest
        return [line[:8192].decode("utf-8", errors="replace") for line in lines if line]


@dataclass
class Tail:
    """One file of one job."""

    path: str
    start: int | None = None
    """Where this run's lines begin, if an earlier run wrote the file, too: known to the controller."""
    fd: int = -1
    identity: tuple[int, int] | None = None
    position: int = 0
    lines: Lines = field(default_factory=Lines)
    grown_at: float | None = None
    """Monotonic clock; before it was seen to grow, from the file's modification time."""
    last_steps: dict[str, int] = field(default_factory=dict)
    dropped: int = 0

    def read(self, now: float, wall: float) -> list[Item]:
        """What is new, as events. Raises OSError."""
        self.dropped = 0
        about = os.stat(self.path)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(None, "not a regular file")
        items: list[Item] = []
        if (about.st_dev, about.st_ino) != self.identity:
            first = self.identity is None
            if not first:
                items += self._drain(now)  # the rest of what was moved away
            self._open(first)
            if first and self.start is None:
                return self._backlog(now, wall)
        return self._condensed(items + self._drain(now))

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _open(self, first: bool) -> None:
        self.close()
        self.fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        about = os.fstat(self.fd)
        if not stat.S_ISREG(about.st_mode):
            self.close()
            raise OSError(None, "not a regular file")
        self.identity = (about.st_dev, about.st_ino)
        self.position, self.lines = 0, Lines()
        if first and self.start is not None:
            self.position = self.start if self.start <= about.st_size else 0
        elif first:
            self.position = max(0, about.st_size - BACKLOG)
            self.lines = Lines(skipping=self.position > 0)

    def _backlog(self, now: float, wall: float) -> list[Item]:
        """The end of a file that is seen for the first time: where the job stands, dated no younger than the file."""
        about = os.fstat(self.fd)
        age_s = max(0.0, wall - about.st_mtime)
        self.grown_at = now - age_s
        items = self._parse(os.pread(self.fd, about.st_size - self.position, self.position))
        self.position = about.st_size
        last_step = max(
            (at for at, item in enumerate(items) if item["kind"] == EventKind.PROGRESS), default=-1
        )
        kept = [
            item
            for at, item in enumerate(items)
            # What stands before the newest step is over: an old error, an evaluation that ended.
            if at >= last_step or item is _last(items, EventKind.CHECKPOINT)
        ]
        return self._condensed([{**item, "age_s": age_s, "backlog": True} for item in kept])

    def _drain(self, now: float) -> list[Item]:
        if self.fd < 0:
            return []
        size = os.fstat(self.fd).st_size
        if size < self.position:
            self.position, self.lines = 0, Lines()
        if size == self.position:
            return []
        self.grown_at = now
        new = size - self.position
        if new <= MAX_READ:
            items = self._parse(os.pread(self.fd, new, self.position))
        else:
            items = self._parse(os.pread(self.fd, MAX_READ // 2, self.position))
            self.lines = Lines(skipping=True)
            items += self._parse(os.pread(self.fd, MAX_READ // 2, size - MAX_READ // 2))
            self.dropped += new - MAX_READ
        self.position = size
        return items

    def _parse(self, data: bytes) -> list[Item]:
        items = []
        for line in self.lines.feed(data):
            fact = parse_line(line)
            if fact is None:
                continue
            if fact.kind is EventKind.PROGRESS and fact.step is not None:
                if self.last_steps.get(fact.pattern) == fact.step:
                    continue  # a bar that was redrawn
                self.last_steps[fact.pattern] = fact.step
            items.append(
                {
                    "kind": fact.kind.value, "age_s": 0.0, "line": clean_line(line), "step": fact.step,
                    "total_steps": fact.total_steps, "step_s": fact.step_s, "loss": fact.loss, "phase": fact.phase,
                    "pattern": fact.pattern, "rank": fact.rank,
                }
            )  # fmt: skip
        return items

    def _condensed(self, items: list[Item]) -> list[Item]:
        kept, left_out = condense(items)
        self.dropped += left_out
        return kept


def _last(items: list[Item], kind: EventKind) -> Item | None:
    return next((item for item in reversed(items) if item["kind"] == kind), None)


def condense(items: list[Item], limit: int = MAX_EVENTS) -> tuple[list[Item], int]:
    """At most `limit` events of each kind, in order, and how many were left out.

    Of progress the last and an even choice of the others stay; of errors, phases and checkpoints the first ones, for the cause
    comes before its consequences, and the last.
    """
    keep: set[int] = set()
    for kind in EventKind:
        at = [index for index, item in enumerate(items) if item["kind"] == kind]
        if len(at) > limit:
            if kind is EventKind.PROGRESS:
                step = len(at) / limit
                at = [at[min(len(at) - 1, int((place + 1) * step) - 1)] for place in range(limit - 1)] + at[
                    -1:
                ]
            else:
                at = at[: limit - 1] + at[-1:]
        keep.update(at)
    kept = [item for index, item in enumerate(items) if index in keep]
    return kept, len(items) - len(kept)


def follow(args: Any, state: dict[str, Any]) -> dict[str, Any]:
    """One look at all files of this child. Given {"files": [[job, path, start or None]…], "trackers": [[job, path]…]}.

    Returns {"files": [{job, path, growth_age_s, error, events, dropped, offset}…], "trackers": [{job, path, step, age_s}…]}; a tracker is in
    it only when its step has changed. Files that are no longer named are closed.
    """
    now, wall = clock.monotonic(), clock.wall()
    tails: dict[tuple[str, str], Tail] = state.setdefault("tails", {})
    starts = {(job, path): start for job, path, start in args["files"]}
    wanted = list(starts)
    for key in [key for key in tails if key not in wanted]:
        tails.pop(key).close()
    files = []
    for key in wanted:
        tail = tails.setdefault(key, Tail(key[1], starts[key]))
        error, events = None, []
        try:
            events = tail.read(now, wall)
        except OSError as problem:
            error = describe(problem) if problem.errno else str(problem.strerror)
        age_s = None if tail.grown_at is None else max(0.0, now - tail.grown_at)
        files.append(
            {"job": key[0], "path": key[1], "growth_age_s": age_s, "error": error, "events": events,
             "dropped": tail.dropped, "offset": tail.position if tail.fd >= 0 else None}
        )  # fmt: skip
    return {"files": files, "trackers": _read_trackers(args["trackers"], state, wall)}


def _read_trackers(wanted: list[list[str]], state: dict[str, Any], wall: float) -> list[dict[str, Any]]:
    seen: dict[tuple[str, str], int] = state.setdefault("trackers", {})
    found = []
    for job, path in wanted:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
            try:
                about = os.fstat(fd)
                text = os.read(fd, MAX_TRACKER) if stat.S_ISREG(about.st_mode) else b""
            finally:
                os.close(fd)
        except OSError:
            continue  # there is none before the first checkpoint
        step = parse_tracker(text.decode(errors="replace"))
        if step is not None and seen.get((job, path)) != step:
            seen[job, path] = step
            found.append({"job": job, "path": path, "step": step, "age_s": max(0.0, wall - about.st_mtime)})
    return found


def parse_tracker(text: str) -> int | None:
    """The step in a tracker file: `1200`, `global_step1200`, `iter_0001200`, `checkpoint-1200`; None for anything else."""
    digits = text.strip().removeprefix("global_step").removeprefix("iter_").removeprefix("checkpoint-")
    return int(digits) if digits.isdecimal() and len(digits) < 19 else None
