"""What is kept of a log while it is read: its facts, and the lines around what matters. Pure, and bounded.

A log of gigabytes is looked at in blocks (slurm_watchdog.parse.training_log.line_scan). Of its lines those
near an error are kept, the first and the last ones, and of its progress an even choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.diagnose.logs.grouping import with_sections, without_line_numbers, without_modules
from slurm_watchdog.diagnose.logs.line import Line, classify, host_word, read_line
from slurm_watchdog.diagnose.logs.wrapped import unwrapped
from slurm_watchdog.knowledge.progress_patterns import LONE_LOSS, LONE_LOSS_SHAPES, Pattern
from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.timestamps import Clock, Stamp, origin_of, stamp_of
from slurm_watchdog.parse.training_log.context import Context
from slurm_watchdog.parse.training_log.line_scan import MAX_LINE_BYTES, ShapeMemory, scan
from slurm_watchdog.parse.training_log.text import LogFact, plain_line

HEAD_LINES = 150
TAIL_LINES = 250
TAIL_BYTES = 64 * 1024  # So far from a block's end its last lines are looked for first.
AROUND = 60  # Lines kept before and after each that looks like an error: a traceback of average depth.
MAX_KEPT = 60_000
MAX_LATE = 20_000  # Of the kept lines so many are kept for what comes last, when the first ones have taken the others.
ERRORS_IN_FULL = 6_000
STEPS_IN_FULL = 1_500
CLOSELY, AT_END = 100, 60
"""Of further lines with steps so many are parsed in each piece of the last block, where the run ended, and of these so
many at its end; in the blocks before one."""
MAX_FACTS = 120_000
MAX_STEP = 1 << 53
MOST_EXCERPTS = 60  # More have no one's patience, and each is judged.
TRIES_OF_BLOCK, MAX_TRIES = 200, 5000
"""Lines that are searched for a time behind the last line that tells anything, if that has none."""
SEEN_BYTES = 400  # A line's time stands within its first characters.
HOST_SHARE = 0.1
HOST_LINES = 3
LABEL_SHARE = 0.5
_LABEL = late_regex(r"( {0,5}\d{1,6}): ")
_SETUP = (b"orld", b"WORLD_SIZE", b"nranks", b"rocesses", b"nproc_per_node")
_INDENTED = late_regex(r"(?: {4}|\t)")
_FENCE = late_regex(r"^\s*(?:> ?)*(?:```|~~~)")
_TOLD_TO_END = late_regex(r"CANCELLED AT|DUE TO (?:TIME LIMIT|PREEMPTION)|death signal|got signal: 15|Job step aborted")
_BATCH = late_regex(r"global batch size:\s*(\d+)|\bbatch_size[=:]\s*(\d+)")


class Digest(msgspec.Struct):
    """What is kept of one log."""

    facts: list[LogFact] = msgspec.field(default_factory=list)
    lines: list[Line] = msgspec.field(default_factory=list)  # In the order of the file, with gaps.
    left_out: int = 0
    pasted: bool = False  # Its lines stood in excerpts of a text; lines of prose are not kept.
    excerpts: list[Digest] = msgspec.field(default_factory=list)
    """Of a text with several (Markdown with fences, a letter) each as what would have been kept of it alone."""
    headings: list[int] = msgspec.field(default_factory=list)
    """Lines that say whose the lines below them are: what stands below another one is no later."""
    clock: str | None = None  # The sort of its times,
    origin: Stamp | None = None  # and the first of this sort.
    begins: float | None = None
    stamped: list[tuple[int, float]] = msgspec.field(default_factory=list)
    """(line, time) of those whose time is known, in the order of the file."""
    ended_line: int | None = None  # Where someone ended the run, if no step was made after it.
    lone_losses: tuple[int, int] = (0, 0)
    """(how often the loss that has a line of its own was no number, up to the end; the first of these lines)."""

    known: dict[str, Any] = msgspec.field(default_factory=dict)  # What was worked out of it: see progress.once.

    def ends(self, since_line: int) -> float | None:
        """The latest time in the lines from `since_line` on: what stands before it may be of a clock that was set
        back since, or of an hour that comes twice."""
        return max((at for line, at in self.stamped if line >= since_line), default=None)


class Collector:
    """Takes blocks of whole lines; `digest()` gives what was kept."""

    def __init__(self, markdown: bool = False, own: tuple[Pattern, ...] = ()) -> None:
        self._seen = ShapeMemory(errors_in_full=ERRORS_IN_FULL, steps_in_full=STEPS_IN_FULL, evenly=1)
        self._raw: dict[int, str] = {}
        self._tail: list[tuple[int, str]] = []
        self._facts: list[LogFact] = []
        self.bytes = 0  # That were given.
        self._next: tuple[bytes, int, Sequence[int] | None] = (b"", 1, None)
        self.first_error: tuple[int, str] | None = None  # (line, text).
        self._left_out = 0
        self._lines = 0
        self._kept_until = 0
        self._markdown, self._own = markdown, own
        self._lone_losses = (0, 0)
        self._owed = 0
        self._undated = False
        self._tries = 0
        self._context = Context()

    def add(self, data: bytes, first_line: int, numbers: Sequence[int] | None = None) -> None:
        """`numbers`: of each line of `data` its number in the file, where these are not counted from `first_line`."""
        self._read_next(closely=False)
        self._next = (data, first_line, numbers)
        self.bytes += len(data)

    def _read_next(self, *, closely: bool) -> None:
        """Takes the facts of the block before; which one is the last shows when another one comes, or none."""
        if not self._next[0]:
            return
        self._seen.evenly, self._seen.at_end = (CLOSELY, AT_END) if closely else (1, 0)
        data, numbers = unwrapped(*self._next)
        first_line, self._next = self._next[1], (b"", 1, None)
        found = scan(data, self._seen, self._own)
        self._left_out += found.errors_left_out

        def number(place: int) -> int:
            return first_line + place if numbers is None else numbers[place]

        errors = [fact.line for fact in found.facts if fact.kind is EventKind.ERROR]
        if errors and self.first_error is None:
            first = next(fact for fact in found.facts if fact.kind is EventKind.ERROR)
            self.first_error = (number(first.line), first.text)
        telling = [fact for fact in found.facts if fact.kind is not EventKind.ERROR]
        for fact in telling:
            self._add_fact(number(fact.line), self._context.with_context(fact))
        self._date_the_last(data, telling[-1].line if telling else -1)
        if any(needle in shape for shape in found.shapes for needle in LONE_LOSS_SHAPES):
            self._note_lone_losses(data, number)
        count = found.lines + (not data.endswith(b"\n"))
        wanted = self._wanted(count, errors)
        if not self._lines:
            wanted |= _setup_lines(data)
        if wanted:
            self._keep(data.split(b"\n"), sorted(wanted), number)
        last = _last_lines(data)
        texts = [(number(count - len(last) + at), _text(line)) for at, line in enumerate(last)]
        self._tail = (self._tail + texts)[-TAIL_LINES:]
        self._lines = number(count - 1)

    def _add_fact(self, number: int, fact: LogFact) -> None:
        if max(fact.step or 0, fact.count or 0) > MAX_STEP:
            return  # no run makes so many
        if len(self._facts) >= MAX_FACTS:
            self._facts = self._facts[::2]
        batch = _BATCH.search(fact.text) if "batch" in fact.text else None
        size = int(next(value for value in batch.groups() if value)) if batch else None
        stamp = stamp_of(plain_line(fact.text).lstrip())
        self._facts.append(replace(fact, line=number, stamp=stamp, batch=size, text=fact.text[:300]))

    def _date_the_last(self, data: bytes, last_place: int) -> None:
        """Of the last line that tells of a step, a phase or a checkpoint, if it has no time, looks for the next line
        that has one; `last_place` is that line's in this block, -1 if it is in an earlier one."""
        if last_place >= 0:
            self._undated, self._tries = bool(self._facts) and self._facts[-1].stamp is None, 0
        if not self._undated or self._tries >= MAX_TRIES:
            return
        for line in data.split(b"\n")[last_place + 1 : last_place + 1 + TRIES_OF_BLOCK]:
            self._tries += 1
            stamp = stamp_of(line[:SEEN_BYTES].decode("utf-8", "replace").lstrip())
            if stamp is not None:
                self._facts[-1], self._undated = replace(self._facts[-1], until=stamp), False
                return

    def _note_lone_losses(self, data: bytes, number: Callable[[int], int]) -> None:
        place, before = 0, 0
        for match in LONE_LOSS.finditer(data):
            place, before = place + data.count(b"\n", before, match.start()), match.start()
            bad = match[1].lower().lstrip(b"+-") in (b"nan", b"inf", b"infinity")
            times, first = self._lone_losses
            self._lone_losses = (times + 1, first or number(place)) if bad else (0, 0)

    def _wanted(self, count: int, errors: list[int]) -> set[int]:
        wanted: set[int] = set(range(min(count, max(0, HEAD_LINES - self._lines))))
        wanted.update(range(min(self._owed, count)))
        self._owed = max(0, self._owed - count)
        for place in errors:
            wanted.update(range(max(0, place - AROUND), min(count, place + AROUND + 1)))
            self._owed = max(self._owed, place + AROUND + 1 - count)
        if self._markdown:
            wanted.update(range(count))
        return wanted

    def _keep(self, lines: list[bytes], places: list[int], number: Callable[[int], int]) -> None:
        for place in places:
            if len(self._raw) >= MAX_KEPT:
                late = list(self._raw)[MAX_KEPT - MAX_LATE : MAX_KEPT - MAX_LATE // 2]
                for each in late:
                    del self._raw[each]
            at = number(place)
            text = _text(lines[place])
            # Redraws of a bar are lines of one number; the last says most.
            self._raw[at] = text if at not in self._raw or len(text.strip()) > 0 else self._raw[at]

    def digest(self) -> Digest:
        """What was kept."""
        self._read_next(closely=True)
        raw = dict(self._raw)
        for number, text in self._tail:
            raw.setdefault(number, text)
        ordered = sorted(raw.items())
        segments = (
            (_fenced(ordered) or _indented(ordered, {fact.line for fact in self._facts})) if self._markdown else None
        )
        if segments is not None:
            ordered = [(number, text) for number, text in ordered if number in segments]
            self._facts = [fact for fact in self._facts if fact.line in segments]
        lines, headings = take_apart(ordered)
        digest = Digest(self._facts, lines, self._left_out, segments is not None, headings=headings)
        places = sorted(set(segments.values())) if segments is not None else []
        if segments is not None and len(places) > 1:
            digest.excerpts = [_excerpt(digest, place, segments) for place in places[:MOST_EXCERPTS]]
        digest.lone_losses = self._lone_losses
        put_on_clock(digest)
        return digest


def _excerpt(digest: Digest, place: int, segments: dict[int, int]) -> Digest:
    lines = [line for line in digest.lines if segments.get(line.number) == place]
    facts = [replace(fact, at=None) for fact in digest.facts if segments.get(fact.line) == place]
    if facts and facts[-1].stamp is None:
        later = (line.stamp for line in lines if line.number > facts[-1].line and line.stamp is not None)
        facts[-1] = replace(facts[-1], until=next(later, None))
    own = Digest(facts, lines, headings=digest.headings)
    put_on_clock(own)
    return own


def take_apart(ordered: list[tuple[int, str]], hosts: frozenset[str] = frozenset()) -> tuple[list[Line], list[int]]:
    """(the lines, the numbers of headings) of (number, text) in the order of a file; `hosts` are known to be hosts."""
    ordered = _unpadded(ordered)
    hosts |= _hosts([text for _, text in ordered])
    quoted = sum(text.startswith(">") for _, text in ordered) > 0.3 * max(1, len(ordered))
    taken = [read_line(number, text, hosts, quoted) for number, text in ordered]
    return with_sections(without_modules(without_line_numbers(taken)))


def _text(line: bytes) -> str:
    return line[:MAX_LINE_BYTES].decode("utf-8", "replace")


def _last_lines(data: bytes) -> list[bytes]:
    """The last lines of a block, at most TAIL_LINES, without splitting all that stands before them."""
    end = len(data) - data.endswith(b"\n")
    window = TAIL_BYTES
    while True:
        tail = data[max(0, end - window) : end]
        last = tail.rsplit(b"\n", TAIL_LINES)
        if len(last) > TAIL_LINES or window >= end:
            return last[-TAIL_LINES:]
        window *= 4


def _setup_lines(data: bytes) -> set[int]:
    """The lines that may tell how many ranks there are; few, for such words stand in few lines."""
    places: set[int] = set()
    for needle in _SETUP:
        at, tries = data.find(needle), 0
        while at >= 0 and tries < 20:
            places.add(data.count(b"\n", 0, at))
            at, tries = data.find(needle, at + 200), tries + 1
    return places


def _fenced(lines: list[tuple[int, str]]) -> dict[int, int] | None:
    """Of a text with fences the lines between them, by excerpt; None if there are none, or if one stays open."""
    segments: dict[int, int] = {}
    current, number_of = None, 0
    for number, text in lines:
        if _FENCE.match(text):
            current = None if current is not None else number_of
            number_of += current is None
            continue
        if current is not None:
            segments[number] = current
    return segments if len(segments) >= 1 and number_of >= 1 else None


def _indented(lines: list[tuple[int, str]], facts: set[int]) -> dict[int, int] | None:
    """Of a letter whose excerpts are indented the lines of these, by excerpt; None if anything else in it
    could be of a log.

    `facts` are the numbers of lines that tell of progress.
    """
    segments: dict[int, int] = {}
    current, telling, inside = 0, 0, False
    for number, text in lines:
        if not text.strip():
            continue
        if _INDENTED.match(text):
            segments[number], inside = current, True
            continue
        if (
            number in facts
            or classify(text) is not None
            or stamp_of(text) is not None
            or read_line(number, text).who.named
        ):
            return None
        telling += 1
        current += inside
        inside = False
    return segments if telling and segments and max(segments.values()) >= 1 else None


def _unpadded(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Without the blanks with which `srun --label` makes its numbers equally wide, if most lines have such numbers."""
    widths = Counter(len(match[1]) for _, text in lines if (match := _LABEL.match(text)))
    if not widths:
        return lines
    width, times = widths.most_common(1)[0]
    if times < LABEL_SHARE * len(lines):
        return lines
    return [
        (number, text.lstrip(" ") if (match := _LABEL.match(text)) and len(match[1]) == width else text)
        for number, text in lines
    ]


def _hosts(texts: list[str]) -> frozenset[str]:
    """Words before a colon at the beginning of so many lines that they must be hosts (`pdsh`, `clush`)."""
    counted = Counter(word for text in texts if (word := host_word(text)) is not None)
    total = sum(counted.values())
    if total < max(HOST_LINES, HOST_SHARE * len(texts)):
        return frozenset()
    return frozenset(word for word, times in counted.items() if times >= HOST_LINES)


def put_on_clock(digest: Digest) -> None:
    """Times of facts and of the last line, on one clock."""
    stamps: list[tuple[int, Stamp, int | None]] = [
        (fact.line, stamp, place) for place, fact in enumerate(digest.facts) if (stamp := fact.stamp or fact.until)
    ]
    ends = [line.number for line in digest.lines if _TOLD_TO_END.search(line.raw)]
    told_at = frozenset(ends)
    steps = [fact.line for fact in digest.facts if fact.kind is EventKind.PROGRESS]
    ended = digest.ended_line = next((line for line in ends if not steps or line > steps[-1]), None)
    stamps += [(line.number, line.stamp, None) for line in digest.lines if line.stamp is not None]
    stamps.sort(key=lambda each: each[0])
    told = [stamp for number, stamp, _ in stamps if number not in told_at and (ended is None or number < ended)]
    digest.origin = origin_of(told or [stamp for _, stamp, _ in stamps])
    clock = Clock(digest.origin)
    for number, stamp, place in stamps:
        at = clock.place(stamp)
        if place is not None:
            digest.facts[place] = replace(digest.facts[place], at=at)
        if at is None or number in told_at or (ended is not None and number >= ended):
            continue  # the line that ends the run may have another clock: no hang
        digest.begins = at if digest.begins is None else min(digest.begins, at)
        digest.stamped.append((number, at))
    digest.clock = clock.sort
