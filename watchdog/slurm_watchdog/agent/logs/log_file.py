"""One log file of one job, followed through rotation, truncation and replacement; used in a `files` child
(see slurm_watchdog.agent.logs.follow).

A look asks once what stands at the path. Only if that has grown or was changed, something is read: from where the last
read ended, together with the bytes before it (the anchor), which show whether this still is the text that was read.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from math import isfinite

from msgspec.structs import replace

from slurm_watchdog.agent.files.safe_open import check_regular, open_log
from slurm_watchdog.agent.logs.position import ANCHOR, FilePosition, Identity, LineBuffer, again, goes_on
from slurm_watchdog.agent.logs.step_rows import StepRows, make_event
from slurm_watchdog.base.descriptors import describe
from slurm_watchdog.knowledge.frameworks import recognise
from slurm_watchdog.knowledge.progress_patterns import Pattern
from slurm_watchdog.knowledge.ray_train import WorkerRankReader
from slurm_watchdog.model.observations import Event, EventKind
from slurm_watchdog.parse.timestamps import stamp_of
from slurm_watchdog.parse.training_log.learned_format import KNOWN_AFTER, Learner
from slurm_watchdog.parse.training_log.line import parse_line
from slurm_watchdog.parse.training_log.line_scan import Scan, ShapeMemory, scan
from slurm_watchdog.parse.training_log.text import LogFact, kept_line

MAX_EVENTS = 50  # Of each kind, a file and a report.
STEPS_IN_FULL, EVENLY = 1, 5
"""Of lines alike, lines with steps that are all read, and of the others how many: a row of them keeps a few."""


def shown(event: Event) -> Event:
    """The event as it leaves for people: with secrets masked; of progress the line has said what it says."""
    if event.kind is EventKind.PROGRESS and event.phase is None:
        return replace(event, line="")
    return replace(event, line=kept_line(event.line))


def condense(events: list[Event], limit: int = MAX_EVENTS) -> tuple[list[Event], int]:
    """At most `limit` events of each kind, in order, and how many were left out. Of progress the last and an even
    choice of the others stay. Of errors, phases and checkpoints the first of each pattern, for one cause may stand in
    the middle of another's consequences, and the last; then the first that each rank says of a pattern, for who is
    silent in a cascade is what matters; then the first ones."""
    if len(events) <= limit:
        return events, 0
    keep: set[int] = set()
    for kind in EventKind:
        at = [index for index, event in enumerate(events) if event.kind is kind]
        if len(at) > limit:
            if kind is EventKind.PROGRESS:
                at = [at[(place + 1) * len(at) // limit - 1] for place in range(limit)]
            else:
                firsts = {events[index].pattern: index for index in reversed(at)}
                of_ranks = {(events[index].pattern, events[index].rank): index for index in reversed(at)}
                order = dict.fromkeys([*sorted(firsts.values()), at[-1], *sorted(of_ranks.values()), *at])
                at = list(order)[:limit]
        keep.update(at)
    return [event for index, event in enumerate(events) if index in keep], len(events) - len(keep)


READ = 256 * 1024  # Bytes of one read: the files of a child are read in turns of this size.
BACKLOG = 64 * 1024  # Where a file is opened in the middle of its life: enough for the last steps of any framework.
MAX_LAG = 256 * 1024**2  # Further behind reading does not run: then it continues KEPT_AFTER_SKIP before the end.
KEPT_AFTER_SKIP = 16 * 1024**2
MAX_ITEMS = 500  # So many are gathered before they are condensed.
DATED = 8 * 1024  # Of the end of a file so much is searched for its newest date.
MAX_MARKS = 64
MAX_LEFT = 64
LOOK_AHEAD = 1024  # Beyond the size that was seen: a file grows while it is read.
RECOGNISED_BYTES = 16 * 1024  # So much is searched for the words of a framework: they stand in the beginning.
QUIET_S = 15.0  # A last line without an end is read for its error, or its bar, when nothing has followed for so long.
WHOLE_BAR = re.compile(r"\[\d+:\d\d[^\[\]\r]*\]\s*$")
"""`[00:10<00:05, 5.5it/s, loss=0.4]` at its end: no number of it was cut in two."""


@dataclass
class LogFollower:
    """One name of one file."""

    path: str
    start: int | None = None  # Where this run's lines begin, or how far an earlier child has read it.
    left: MutableMapping[Identity, FilePosition] = field(default_factory=dict)  # Files of the same job, closed.
    own: tuple[Pattern, ...] = ()  # Patterns of progress that the site wrote.
    fd: int = -1
    place: FilePosition | None = None
    size: int = 0  # As last seen.
    grown_at: float | None = None  # Monotonic clock; before it was seen to grow, from the file's modification time.
    error: str | None = None
    skipped_bytes: int = 0
    left_out: int = 0  # Events since the last drain_events().
    framework: str | None = None  # Which one wrote the file, None while nothing shows it.
    seats: WorkerRankReader = field(default_factory=WorkerRankReader)  # Which process is which rank, where Ray says it.
    _searched: int = 0  # Bytes that were searched for the framework's words.
    _items: list[Event] = field(default_factory=list)
    _rows: StepRows = field(default_factory=StepRows)
    _seen: ShapeMemory = field(default_factory=lambda: ShapeMemory(steps_in_full=STEPS_IN_FULL, evenly=EVENLY))
    _learner: Learner | None = field(default_factory=Learner)
    _known: int = 0  # Lines of progress in a known format.
    _modified_ns: int = 0
    _unread: bool = False  # There is something to read, or to compare.
    _retired: bool = False  # Its name has gone, or stands for another file now: this one is read to its end.
    _marks: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MAX_MARKS))
    """(when, size) of what is not read yet: how old its lines are."""
    _told: tuple[str, str] | None = None  # A last line without an end that was told already, and its pattern.
    _held: MutableMapping[Identity, LogFollower] = field(default_factory=dict)

    def use(self, own: tuple[Pattern, ...]) -> None:
        """Reads with these patterns of the site from now on."""
        if own is not self.own:
            self.own, self._seen.known = own, {}

    def glance(self, now: float, wall: float) -> None:
        """Between two looks: whether it has grown, so that its lines are dated more exactly. It is not read, and one
        that is closed stays so."""
        if self.fd >= 0 and self.place is not None and self.place.last_steps:
            self.refresh(now, wall, self._held)

    @property
    def identity(self) -> Identity | None:
        """Of the file that is open."""
        return self.place.identity if self.fd >= 0 and self.place is not None else None

    @property
    def lag_bytes(self) -> int:
        """What stands in the file and has not been read."""
        return max(0, self.size - self.place.position) if self.fd >= 0 and self.place is not None else 0

    @property
    def has_more(self) -> bool:
        """Whether read() has something to do."""
        return self.fd >= 0 and (self._unread or self._retired)

    def refresh(self, now: float, wall: float, held: MutableMapping[Identity, LogFollower]) -> LogFollower | None:
        """Finds out what is new. `held` are the files that the job's tails have open; another one's is not opened
        again. Returns the tail that reads this very file under another name. What hinders is in `error`."""
        self.error, self._held = None, held
        try:
            return self._check_path(now, wall)
        except OSError as problem:
            self._fail(problem)
            return None

    def read(self, now: float, wall: float) -> int:
        """Reads a block and takes its facts; returns how many bytes it was. What hinders is in `error`."""
        before = self.place.position if self.place else 0
        try:
            if self._unread:
                self._read_block(now)
            elif self._retired:
                self._finish(now)
                if self.error is None:
                    self._check_path(now, wall)
                return 0
        except OSError as problem:
            self._fail(problem)
        return max(0, self.place.position - before) if self.place else 0

    def drain_events(self) -> tuple[list[Event], int]:
        """The events since the last call, and how many more were left out."""
        self._seen.look += 1
        if not self._items and not self._rows.rows and not self.left_out:
            return [], 0
        items, left_out = condense(self._items + self._rows.close())
        left_out += self.left_out
        self._items, self.left_out = [], 0
        return [shown(each) for each in items], left_out

    def close(self) -> None:
        """Closes the file; what is known of it is kept."""
        if self.fd >= 0:
            os.close(self.fd)
            if self.place is not None:
                self.left.pop(self.place.identity, None)
                self.left[self.place.identity] = self.place
                while len(self.left) > MAX_LEFT:
                    del self.left[next(iter(self.left))]
        self.fd, self._unread, self._retired = -1, False, False
        self._marks.clear()

    # -- which file it is --------------------------------------------------------------------------------------

    def _check_path(self, now: float, wall: float) -> LogFollower | None:
        mine = self.identity
        try:
            about = os.stat(self.path)
            check_regular(about)
        except OSError as problem:
            if mine is None:
                raise
            # What was open is read to its end and closed: a directory must stay removable, a filesystem unmountable.
            self.error, self._retired = _say(problem), True
            self._measure(os.fstat(self.fd), now)
            return None
        identity = (about.st_dev, about.st_ino)
        holder = self._held.get(identity)
        if mine == identity:
            self._retired = False
            self._measure(about, now)
        elif mine is not None:
            self._retired = True
            self._measure(os.fstat(self.fd), now)
        elif holder is not None and holder is not self:
            return holder
        else:
            self._open(now, wall)
        self._tell_last_line(now)
        return None

    def _measure(self, about: os.stat_result, now: float) -> None:
        assert self.place is not None
        if about.st_size == self.size and about.st_mtime_ns == self._modified_ns:
            return
        if about.st_size > self.size:
            self.grown_at = now
        elif about.st_size < self.place.position:
            self._begin_anew()
            self.grown_at = now if about.st_size else self.grown_at
        self.size, self._modified_ns, self._unread = about.st_size, about.st_mtime_ns, True
        self._marks.append((now, self.size))
        self._skip()

    def _open(self, now: float, wall: float) -> None:
        first, before = self.place is None, self.place
        fd = open_log(self.path)
        try:
            about = os.fstat(fd)
            known = self.left.get((about.st_dev, about.st_ino)) or before
            same = known is not None and goes_on(fd, about.st_size, known)
            place = self._begin(fd, about, first) if known is None or not same else again(known, about)
            at_first = first and self.start is None and not same
            # No more than its size: a file of /proc has none, and reading it may take what others wait for.
            backlog = os.pread(fd, min(BACKLOG, about.st_size - place.position), place.position) if at_first else b""
        except OSError:
            os.close(fd)
            raise
        self.left.pop(place.identity, None)
        self._held[place.identity] = self
        self.fd, self.place, self.size, self._modified_ns = fd, place, about.st_size, about.st_mtime_ns
        self._retired, self._told = False, None
        self._marks.clear()
        if first:
            self.grown_at = now - max(0.0, wall - about.st_mtime)
        elif not same or self.size > place.position:
            self.grown_at = now
        if at_first:
            self._take_backlog(backlog, max(0.0, wall - about.st_mtime))
        self._unread = self.size > place.position
        self._marks.append((now - max(0.0, wall - about.st_mtime) if first else now, self.size))
        self._skip()

    def _begin(self, fd: int, about: os.stat_result, first: bool) -> FilePosition:
        """Where reading begins in a file that is new to us."""
        place = FilePosition((about.st_dev, about.st_ino))
        if first and self.start is not None:
            place.position = self.start if self.start <= about.st_size else 0
        elif first:
            place.position = max(0, about.st_size - BACKLOG)
            place.lines = LineBuffer(skipping=place.position > 0)
        place.head = os.pread(fd, min(ANCHOR, place.position), 0)
        return place

    def _begin_anew(self) -> None:
        assert self.place is not None
        self.place = FilePosition(self.place.identity)
        self._marks.clear()

    def _finish(self, now: float) -> None:
        """The end of a file whose name stands for another one: its last line may lack its end."""
        if self.place is not None and self.place.lines.pending:
            self._take(self.place.lines.feed(b"\n"), now)
        self.close()

    def _fail(self, problem: OSError) -> None:
        self.error = _say(problem)
        self.close()  # a stale handle is of no use; the next look opens the file again and continues

    # -- reading it --------------------------------------------------------------------------------------------

    def _read_block(self, now: float) -> None:
        place = self.place
        assert place is not None
        before = len(place.anchor)
        wanted = min(READ, max(0, self.size - place.position) + LOOK_AHEAD)  # memory is made for so many
        data = os.pread(self.fd, before + wanted, place.position - before)
        if data[:before] != place.anchor:
            self._compare(data[:before])
            return
        data = data[before:]
        at_end = place.position + len(data) >= self.size or len(data) < wanted
        if at_end and data.endswith(b"\0"):
            # What another node has written shows as NULs on NFS until it has arrived. They are read when more follows.
            data = data.rstrip(b"\0")
        self._unread = not at_end
        place.advance(data)
        self.size = max(self.size, place.position)
        self._take(place.lines.feed(data), now)

    def _compare(self, found: bytes) -> None:
        """The bytes before our place are not those that were read: is it another text in the same file?"""
        place = self.place
        assert place is not None
        self.size = os.fstat(self.fd).st_size
        if self.size >= place.position:
            head = os.pread(self.fd, len(place.head), 0)
            hole = not any(head) and not any(found)  # truncated, and its writer continues at its old place
            if hole or (head == place.head and head):
                place.head, place.anchor = head, found
                return
        self._begin_anew()

    def _skip(self) -> None:
        place = self.place
        assert place is not None
        if self.size - place.position <= MAX_LAG:
            return
        target = self.size - KEPT_AFTER_SKIP
        self.skipped_bytes += target - place.position
        place.position, place.anchor, place.lines = target, b"", LineBuffer(skipping=True)

    def _take_backlog(self, data: bytes, age_s: float) -> None:
        """The end of a file that is seen for the first time: where the job stands, dated no younger than the file, and
        by the dates of its lines as long before its newest one."""
        assert self.place is not None
        self.place.advance(data)
        self._recognise(data)
        whole = self.place.lines.feed(data)
        self.seats.feed(whole)
        found = scan(whole, own=self.own)
        self._gather(found, [age_s] * len(found.facts))
        items, self._items = self._items + self._rows.close(), []
        last_step = max((at for at, item in enumerate(items) if item.kind is EventKind.PROGRESS), default=-1)
        checkpoint = next((item for item in reversed(items) if item.kind is EventKind.CHECKPOINT), None)
        older_s = _ages(whole)
        # What stands before the newest step is over: an old error, an evaluation that ended.
        kept = [item for at, item in enumerate(items) if at >= last_step or item is checkpoint]
        self._items = [
            replace(item, backlog=True, age_s=age_s + older_s(item.line), lines=1, earlier=()) for item in kept
        ]

    # -- what it says ------------------------------------------------------------------------------------------

    def _take(self, whole: bytes, now: float) -> None:
        assert self.place is not None
        if whole:
            self._recognise(whole)
            self.seats.feed(whole)
            found = scan(whole, self._seen, self.own)
            ages_s = self._ages_s(
                whole, [fact.line for fact in found.facts], now, self.place.position - len(self.place.lines.pending)
            )
            if self._learner is not None:
                self._learn(self._learner, found, ages_s, whole, now)
            self._gather(found, ages_s)
            self._told = None

    def _recognise(self, text: bytes) -> None:
        if self._searched < RECOGNISED_BYTES:
            self._searched += len(text)
            self.framework = recognise(text, self.framework)

    def _learn(self, learner: Learner, found: Scan, ages_s: list[float], whole: bytes, now: float) -> None:
        """Looks for progress of an unknown format, until the file has shown a known one."""
        self._known += sum(fact.kind is EventKind.PROGRESS for fact in found.facts)
        if self._known >= KNOWN_AFTER:
            self._learner = None
            return
        age_s = now - self._marks[0][0] if self._marks else 0.0
        learnt = learner.feed(whole, now - age_s)
        found.facts += learnt
        ages_s += [age_s] * len(learnt)

    def _ages_s(self, whole: bytes, places: list[int], now: float, end: int) -> list[float]:
        """How long the lines at these places have been in the file, as far as looks have shown; `end`: where the last
        of the whole lines ends in it."""
        ages_s, line, at = list[float](), 0, -1
        for place in places if len(self._marks) > 1 else ():
            while line <= place:
                at, line = whole.find(b"\n", at + 1), line + 1
            ages_s.append(self._age_s(now, end - len(whole) + at + 1))
        age_s = self._age_s(now, end)
        return ages_s or [age_s] * len(places)

    def _age_s(self, now: float, end: int) -> float:
        """How long the bytes before `end` have been in the file, as far as looks have shown."""
        while len(self._marks) > 1 and self._marks[0][1] < end:
            self._marks.popleft()
        return max(0.0, now - self._marks[0][0]) if self._marks else 0.0

    def _gather(self, found: Scan, ages_s: list[float]) -> None:
        for alone, age_s in zip(found.facts, ages_s, strict=True):
            self.left_out += 0 if alone.kind is EventKind.PROGRESS else alone.stands_for - 1
            self._note(alone, age_s)
        if len(self._items) > MAX_ITEMS:
            self._items, left_out = condense(self._items)
            self.left_out += left_out

    def _note(self, alone: LogFact, age_s: float) -> None:
        assert self.place is not None
        steps, fact = self.place.last_steps, self.place.context.with_context(alone)
        number = fact.count if fact.step is None else fact.step
        if fact.kind is EventKind.PROGRESS and number is not None and isfinite(number):
            if steps.get(fact.pattern) != number or fact.has_own_loss:  # else a bar that was redrawn
                steps[fact.pattern] = number
                self._items += self._rows.add(fact, age_s)
        elif not (self._told and fact.text.startswith(self._told[0]) and fact.pattern == self._told[1]):
            self._items += [*self._rows.close(), make_event(fact, age_s)]

    def _tell_last_line(self, now: float) -> None:
        """Last words without an end of line: whole bars and errors alone, for a number may be cut in two."""
        place = self.place
        if place is None or self.grown_at is None or self._told or not place.lines.pending:
            return
        if now - self.grown_at >= QUIET_S and not self._unread:
            line = place.lines.pending.decode("utf-8", errors="replace")
            fact = parse_line(line)
            self._told = (line, fact.pattern if fact is not None else "")
            if fact is not None and fact.kind is EventKind.ERROR:
                self._items += [*self._rows.close(), make_event(fact, now - self.grown_at)]
            elif fact is not None and fact.kind is EventKind.PROGRESS and not self.own and WHOLE_BAR.search(line):
                self._note(fact, now - self.grown_at)


def _ages(whole: bytes) -> Callable[[str], float]:
    """How much older a line is than the newest one of these, by their own dates; 0 where it has none."""
    lines = whole[-DATED:].decode(errors="replace").splitlines()
    newest = next((stamp for line in reversed(lines) if (stamp := stamp_of(line.lstrip())) is not None), None)

    def older_s(line: str) -> float:
        stamp = stamp_of(line.lstrip())
        alike = newest is not None and stamp is not None and newest.sort == stamp.sort
        return max(0.0, newest.seconds - stamp.seconds) if alike and newest is not None and stamp is not None else 0.0

    return older_s


def _say(problem: OSError) -> str:
    return describe(problem) if problem.errno else str(problem.strerror)
