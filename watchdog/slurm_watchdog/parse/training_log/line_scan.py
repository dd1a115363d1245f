"""What the lines of a block of a log say, in one pass: the facts that parse_line gives line by line. Pure.

Nearly all lines of a training log say nothing we know, and nearly all are alike: they differ in digits and punctuation.
Which rows of the tables can match a line is shown by its letters alone, its *shape*: taking characters out of a text
never takes out a needle, when all of them are taken out of both. So it is looked up once for each shape, and in further
lines of it the pattern that matched last is tried first. Of a flood of one shape so many lines are parsed, then a
sample, and the rest is counted.
"""

from __future__ import annotations

import string
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, pairwise

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.progress_patterns import (
    MAPPING_NEEDLES,
    NOT_PROGRESS_NEEDLES,
    SPOKEN_OF_NEEDLES,
    Pattern,
)
from slurm_watchdog.knowledge.site_rows import SiteRows
from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.training_log.line import Rows, all_rows, parse_line
from slurm_watchdog.parse.training_log.text import LogFact

PIECE_BYTES = 128 * 1024  # Looked at together: with what is made of them, they stay in the processor's cache.
MAX_LINE_BYTES = 8192  # Of a line so much is decoded; parse_line looks at less.
IN_FULL = 128  # Lines of one shape that may be errors: 100 ranks that say the same are 100 facts.
STEPS_IN_FULL = (
    32  # Lines of the shape that most lines with steps have, once it is known, and of one that says nothing.
)
BARREN = 256  # After so many lines of a shape without a fact a sample is enough.
EVENLY = 8  # Of the further lines of one shape so many are parsed, an even choice with the last, in each piece.
MAX_SHAPES = 512  # That are remembered; then counting starts again. A shape is as long as its line.
MAX_SHAPE_BYTES = 512

_LOWER = bytes(range(256)).lower()
_DELETED = bytes(code for code in range(256) if code not in (string.ascii_letters + "%|\n").encode())
# As in slurm_watchdog.parse.training_log.line, for bytes. A title (ESC ] … BEL) may hold any text.
_ESCAPES = late_regex(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[^\n]")
_TITLE = b"\x1b]"
_KELVIN = "\u212a".encode()  # The only character outside ASCII whose lower case is a letter of a needle.
_ADDRESS = late_regex(rb"\b0x[0-9a-fA-F]+\b")  # No needle holds one: lines that differ in it are of one shape.


class Shape(msgspec.Struct):
    """What lines of one shape can say, and what came of those that were parsed."""

    rows: Rows
    last: Pattern | None = None  # Which pattern of progress matched last.
    tells: bool = False  # Whether a line of it has given a fact.
    is_barren: bool = False  # … and whether one has not.
    parsed: int = 0  # Lines in the present look.
    look: int = 0


class ShapeMemory(msgspec.Struct):
    """The shapes of one file, and how many lines of each may be parsed in one look: so a flood stays bounded."""

    errors_in_full: int = IN_FULL
    steps_in_full: int = STEPS_IN_FULL
    evenly: int = EVENLY
    at_end: int = 2  # Lines of one shape that are parsed at a piece's end, beside the last of these.
    look: int = 0  # Lines are counted anew in each.
    known: dict[bytes, Shape | None] = msgspec.field(default_factory=dict)  # None: its lines say nothing.

    def telling(self, wanted: set[bytes], needles: Needles, own: tuple[Pattern, ...]) -> dict[bytes, Shape]:
        """Those of the shapes whose lines may say something."""
        new = wanted.difference(self.known)
        found = {each: shape for each in wanted - new if (shape := self.known[each]) is not None}
        if not new:
            return found
        loud = new if own else with_needle(new, needles.cover) | {each for each in new if each.startswith(_TITLE)}
        found |= {each: Shape(needles.rows_of(each, own)) for each in loud}
        if len(self.known) + len(new) > MAX_SHAPES:
            self.known.clear()
            new = set(found)
        if len(new) <= MAX_SHAPES:
            self.known.update((each, found.get(each)) for each in new if len(each) <= MAX_SHAPE_BYTES)
        return found


class Scan(msgspec.Struct):
    """What a block says: `facts` in the order of their lines."""

    facts: list[LogFact] = msgspec.field(default_factory=list)
    left_out: int = 0  # Lines that were not parsed, of a shape whose other lines gave facts.
    errors_left_out: int = 0  # Of these, lines whose like were all errors: at least so many are.
    parsed: int = 0  # Lines that were given to parse_line.
    lines: int = 0  # How many line feeds the block has.
    shapes: set[bytes] = msgspec.field(default_factory=set)  # Of all its lines.


def letters(text: str | bytes) -> bytes:
    """What a shape keeps of `text`: its ASCII letters in lower case, and the signs of bars."""
    data = text.encode() if isinstance(text, str) else text
    return data.translate(_LOWER, _DELETED)


def cover(needles: Iterable[str]) -> tuple[bytes, ...]:
    """The fewest of the needles' letters that are in all others: one is in the shape of a line with a needle."""
    kept: list[bytes] = []
    for needle in sorted({letters(needle) for needle in needles}, key=lambda needle: (len(needle), needle)):
        if not any(shorter in needle for shorter in kept):
            kept.append(needle)
    return tuple(kept)


class Needles(msgspec.Struct, frozen=True, eq=False):
    """What is searched for in shapes, of all rows together."""

    rows: Rows
    cover: tuple[bytes, ...]  # In the shape of each line that can say anything, one of these is.
    letters: Mapping[str, bytes]  # Needle -> what is left of it in a shape.

    def rows_of(self, shape: bytes, own: tuple[Pattern, ...]) -> Rows:
        """The rows that may match a line of this shape; of one with a title, all."""
        if shape.startswith(_TITLE):
            return replace(self.rows, own=own)
        rows = self.rows

        def holds(needles: tuple[str, ...]) -> bool:
            return any(self.letters[needle] in shape for needle in needles)

        return Rows(
            tuple(row for row in rows.signatures if holds(row.needles)),
            tuple(row for row in rows.signs if holds(row.needles)),
            tuple(row for row in rows.patterns if holds(row.needles)),
            holds(MAPPING_NEEDLES),
            own,
            tuple(needle for needle in _DOUBTS if self.letters[needle] in shape),
        )


_DOUBTS = (*NOT_PROGRESS_NEEDLES, *chain(*SPOKEN_OF_NEEDLES.values()))


def needles_in_force() -> Needles:
    """Of the rows in force in this process."""
    return _needles_of(site_rows.current())


@lru_cache(maxsize=2)
def _needles_of(_site: SiteRows) -> Needles:
    rows = all_rows()
    tables = (rows.signatures, rows.signs, rows.patterns)
    each = {*MAPPING_NEEDLES, *(needle for table in tables for row in table for needle in row.needles)}
    return Needles(rows, cover(each), {needle: letters(needle) for needle in (*each, *_DOUBTS)})


def scan(block: bytes, memory: ShapeMemory | None = None, own: tuple[Pattern, ...] = ()) -> Scan:
    """The facts of whole lines, each ended by a line feed (the last one may lack it); a carriage return ends none.

    With a `ShapeMemory` that is given again for the next block, lines of one shape are parsed IN_FULL times
    and then sampled. Without: each block for itself. The first line of a shape is always parsed. `own`: patterns of a
    site, always the same for one memory; they have no needles, so each line may say something.
    """
    memory = ShapeMemory() if memory is None else memory
    found = Scan()
    for piece in pieces(block):
        _scan_piece(piece, memory, found, own)
    return found


def pieces(block: bytes) -> Iterator[bytes]:
    """The block in parts of whole lines, each of at most PIECE_BYTES if its lines allow."""
    start = 0
    while len(block) - start > PIECE_BYTES:
        end = block.rfind(b"\n", start, start + PIECE_BYTES) + 1
        if end <= start:
            end = block.find(b"\n", start + PIECE_BYTES) + 1 or len(block)
        yield block[start:end]
        start = end
    yield block[start:] if start else block


def _scan_piece(piece: bytes, memory: ShapeMemory, found: Scan, own: tuple[Pattern, ...]) -> None:
    shapes, first = _shapes(piece), found.lines
    found.lines += len(shapes) - 1
    of_piece = set(shapes)
    found.shapes |= of_piece
    telling = memory.telling(of_piece, needles_in_force(), own)
    if not telling:
        return
    alike: dict[bytes, list[int]] = {shape: [] for shape in telling}
    for at, shape in enumerate(shapes):
        if shape in alike:
            alike[shape].append(at)
    lines = piece.split(b"\n")
    facts: list[LogFact] = []

    def usual_steps() -> bytes | None:
        steps = [text for text in alike if telling[text].last is not None and not telling[text].rows.signatures]
        return max(steps, key=lambda text: len(alike[text]), default=None)

    usual = usual_steps()
    for text, places in alike.items():
        facts += _parse_alike(telling[text], places, lines, memory, found, is_usual=text == usual)
    usual = usual_steps()  # of a file that is read for the first time it is known by now
    if usual is not None and len(alike) > 1:
        facts += _parse_between(telling[usual], alike[usual], [fact.line for fact in facts], lines, found)
    facts.sort(key=lambda each: each.line)
    found.facts += [replace(fact, line=first + fact.line) for fact in facts] if first else facts


def _shapes(piece: bytes) -> list[bytes]:
    has_escapes = b"\x1b" in piece
    plain = _ESCAPES.sub(b"", piece) if has_escapes else piece
    if b"x" in plain and b"0x" in plain:  # zeros are everywhere: to search for both takes longer than all else
        plain = _ADDRESS.sub(b"", plain)
    if not plain.isascii():
        plain = plain.replace(_KELVIN, b"k")
    shapes = letters(plain).split(b"\n")
    if len(piece) > PIECE_BYTES:  # it holds a line longer than itself
        shapes = [shape[:MAX_LINE_BYTES] for shape in shapes]
    if has_escapes and _TITLE in piece:
        lines = zip(shapes, piece.split(b"\n"), strict=True)
        shapes = [_TITLE + letters(line)[:MAX_LINE_BYTES] if _TITLE in line else shape for shape, line in lines]
    return shapes


def _parse_alike(
    shape: Shape, places: list[int], lines: list[bytes], memory: ShapeMemory, found: Scan, *, is_usual: bool
) -> list[LogFact]:
    if shape.look != memory.look:
        shape.look, shape.parsed = memory.look, 0
    is_rare = shape.rows.signatures or (not is_usual and (shape.tells or not shape.is_barren))
    in_full = max(memory.steps_in_full, memory.errors_in_full if is_rare else 0)
    chosen, before = _chosen(places, max(0, in_full - shape.parsed), memory), found.parsed
    facts: list[LogFact] = []
    for at, count in chosen:
        if not shape.tells and shape.parsed >= BARREN and at != chosen[-1][0]:
            continue
        shape.parsed += 1
        if (fact := _parse(shape, lines, at, count, found)) is not None:
            shape.tells = True
            facts.append(fact)
        else:
            shape.is_barren = True
    if facts:
        left_out = len(places) - (found.parsed - before)
        found.left_out += left_out
        if sum(fact.kind is EventKind.ERROR for fact in facts) == found.parsed - before:
            found.errors_left_out += left_out
    return facts


def _parse(shape: Shape, lines: list[bytes], at: int, count: int, found: Scan) -> LogFact | None:
    text = lines[at][:MAX_LINE_BYTES].decode("utf-8", errors="replace")
    found.parsed += 1
    fact = parse_line(text, shape.rows, shape.last)
    if fact is None:
        return None
    if shape.last is None or shape.last.name != fact.pattern:
        shape.last = next((row for row in shape.rows.patterns if row.name == fact.pattern), None)
    return replace(fact, line=at, stands_for=count)


def _parse_between(
    shape: Shape, places: list[int], parsed: list[int], lines: list[bytes], found: Scan
) -> Iterator[LogFact]:
    """Of the usual shape of steps one line between any two of others: what is read as three bad losses in a row was
    three in a row."""
    usual = set(places)
    for one, two in pairwise(sorted(parsed)):
        at = len(places) if one in usual or two in usual else bisect(places, one)
        if at < len(places) and places[at] < two and (fact := _parse(shape, lines, places[at], 0, found)) is not None:
            yield fact


def _chosen(places: list[int], in_full: int, memory: ShapeMemory) -> list[tuple[int, int]]:
    """Which lines of one shape are parsed, and for how many each stands: the first ones, of the others an even choice,
    and the last ones, for a loss that comes back now and then must not look like one that lasts."""
    at_end = min(memory.at_end, memory.evenly - 1)
    evenly = memory.evenly - at_end  # The last of them is one of the last three.
    if len(places) <= in_full + memory.evenly:
        return [(at, 1) for at in places]
    others = places[in_full : len(places) - at_end]
    ends = [(place + 1) * len(others) // evenly for place in range(evenly)]
    even = [(others[end - 1], end - begin) for begin, end in zip([0, *ends], ends, strict=False)]
    return [(at, 1) for at in places[:in_full]] + even + [(at, 1) for at in places[len(places) - at_end :]]


def with_needle(shapes: set[bytes], needles: tuple[bytes, ...]) -> set[bytes]:
    """The shapes that hold a needle of a `cover`."""
    joined = b"\n".join(shapes)
    hits: set[bytes] = set()
    for needle in needles:
        at = joined.find(needle)
        while at >= 0:
            end = joined.find(b"\n", at)
            end = len(joined) if end < 0 else end
            hits.add(joined[joined.rfind(b"\n", 0, at) + 1 : end])
            at = joined.find(needle, end)
    return hits
