"""Reads whole blocks of a log at once: a million lines a second, with the facts that parse_line would give
line by line.

Nearly all lines of a training log say nothing we know, and nearly all are alike: they differ in digits and
punctuation. So the letters alone of each line, its *shape*, are compared first. A row of the tables can only
match a line whose shape holds the letters of one of the row's needles; each different shape of a block is
looked at once, and the lines of a shape without any needle are done with. The others are parsed.

What makes this exact: taking characters out of a text never takes out a needle, when all of them are taken out of both.
What bounds it in a flood: of the lines of one shape so many are parsed, then a sample, and the rest is counted.

Pure. See scan() for what is given and returned.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.progress_patterns import MAPPING_NEEDLES, Pattern
from slurm_watchdog.knowledge.site_rows import SiteRows
from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.training_log.line import Rows, all_rows, parse_line
from slurm_watchdog.parse.training_log.text import LogFact

PIECE_BYTES = 128 * 1024
"""Bytes that are looked at together: with what is made of them, they stay in the processor's cache."""
MAX_LINE_BYTES = 8192  # Of a line so much is decoded; parse_line looks at less.
IN_FULL = 128
"""So many lines of one shape are all parsed if they may be errors: 100 ranks that say the same are 100 facts."""
STEPS_IN_FULL = 32  # So many if they can only be steps or phases.
BARREN = 256  # After so many lines of a shape without a fact only its last line in each piece is parsed.
EVENLY = 8  # Of the further lines of one shape so many are parsed, an even choice with the last, in each piece.
SAMPLE_PIECES = 8  # Of so many pieces whose shapes have all had their share one is looked at, and the last of a block.
MAX_SHAPES = 512
"""Shapes that are remembered from piece to piece; then counting starts again. A shape is as long as its line."""
MAX_SHAPE_BYTES = 512
FEW_SHAPES = 64  # New ones of a piece; of more, as text has them, none is remembered, for none comes again.

_SHAPE_CHARACTERS = (string.ascii_letters + "%|\n").encode()
_LOWER = bytes(range(256)).lower()
_DELETED = bytes(code for code in range(256) if code not in _SHAPE_CHARACTERS)
_HEXADECIMAL = b"abcdef"
# As in slurm_watchdog.parse.training_log.line, for bytes. A title (ESC ] … BEL) may hold any text: such lines
# are always parsed.
_ESCAPES = late_regex(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[^\n]")
_TITLE = b"\x1b]"
_KELVIN = "\u212a".encode()  # The only character outside ASCII whose lower case is a letter of a needle.


class ShapeMemory(msgspec.Struct):
    """How many lines of which shape were parsed so far: one for each file and look, so that a flood stays bounded."""

    parsed: dict[bytes, int] = msgspec.field(default_factory=dict)
    telling: set[bytes] = msgspec.field(default_factory=set)  # Of these, the shapes that have given a fact.
    known: dict[bytes, bool] = msgspec.field(default_factory=dict)  # Whether a shape holds a needle.
    errors_in_full: int = IN_FULL
    steps_in_full: int = STEPS_IN_FULL
    evenly: int = EVENLY

    def add(self, shape: bytes, count: int, tells: bool) -> None:
        if len(shape) <= MAX_SHAPE_BYTES:
            if len(self.parsed) >= MAX_SHAPES and shape not in self.parsed:
                self.parsed.clear()
                self.telling.clear()
            self.parsed[shape] = self.parsed.get(shape, 0) + count
            if tells:
                self.telling.add(shape)

    def loud_of(self, shapes: set[bytes]) -> set[bytes]:
        """The shapes that hold a needle."""
        new = shapes.difference(self.known)
        loud = with_needle(new, needles_in_force().cover) if new else new
        loud = loud | {shape for shape in shapes - new if self.known[shape]}
        if len(new) <= FEW_SHAPES:
            if len(self.known) >= MAX_SHAPES:
                self.known.clear()
            self.known |= {shape: shape in loud for shape in new if len(shape) <= MAX_SHAPE_BYTES}
        return loud

    def sated(self, shape: bytes) -> bool:
        """Whether of further lines only the last of one piece in SAMPLE_PIECES counts: the others are not looked at."""
        in_full = min(self.errors_in_full, self.steps_in_full) if shape in self.telling else BARREN
        return self.evenly == 1 and self.parsed.get(shape, 0) >= in_full


class Scan(msgspec.Struct):
    """What a block says: `facts` with their lines (without their ends), in order."""

    facts: list[tuple[str, LogFact]] = msgspec.field(default_factory=list)
    left_out: int = 0  # Lines that were not parsed, of a shape whose other lines gave facts.
    errors_left_out: int = 0  # Of these, lines whose like were all errors: at least so many are.
    parsed: int = 0  # Lines that were given to parse_line.
    places: list[int] = msgspec.field(default_factory=list)  # Of each fact the line of the block, counted from 0.
    lines: int = 0  # How many line feeds the block has.


def letters(text: str | bytes) -> bytes:
    """What a shape keeps of `text`: its ASCII letters in lower case, and the signs of bars."""
    data = text.encode() if isinstance(text, str) else text
    return data.translate(_LOWER, _DELETED)


def cover(needles: Iterable[str]) -> tuple[bytes, ...]:
    """The fewest of the needles' letters that are in all others: one is in the shape of a line with a needle."""
    kept: list[bytes] = []
    for needle in sorted({letters(needle) for needle in needles}, key=lambda needle: (len(needle), needle)):
        for shorter in kept:  # any() takes three times as long, and there are 60,000 pairs
            if shorter in needle:
                break
        else:
            kept.append(needle)
    return tuple(kept)


class Needles(msgspec.Struct, frozen=True, eq=False):
    """What is searched for in shapes, of all rows together."""

    rows: Rows
    cover: tuple[bytes, ...]  # In the shape of each line that can say anything, one of these is.
    letters: Mapping[str, bytes]  # Needle -> what is left of it in a shape.


def needles_in_force() -> Needles:
    """Of the rows in force in this process."""
    return _needles_of(site_rows.current())


@lru_cache(maxsize=2)
def _needles_of(_site: SiteRows) -> Needles:
    rows = all_rows()
    each = list(
        chain(
            *(row.needles for row in rows.signatures),
            *(row.needles for row in rows.signs),
            *(row.needles for row in rows.patterns),
            MAPPING_NEEDLES,
        )
    )
    return Needles(rows, cover(each), {needle: letters(needle) for needle in each})


def scan(block: bytes, seen: ShapeMemory | None = None, own: tuple[Pattern, ...] = ()) -> Scan:
    """The facts of whole lines, each ended by a line feed (the last one may lack it); a carriage return ends none.

    With a `ShapeMemory` that is given again for the next block, lines of one shape are parsed IN_FULL times
    and then sampled. Without: each block for itself. Every line of a shape that has not been seen before is
    always parsed.

    With patterns of a site's `own`, which have no needles, each shape may say something: it costs a few times as much.
    """
    seen = ShapeMemory() if seen is None else seen
    found = Scan()
    parts = list(pieces(block))
    for number, piece in enumerate(parts, 1):
        _scan_piece(piece, seen, found, own, number % SAMPLE_PIECES == 0 or number == len(parts))
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


def _scan_piece(piece: bytes, seen: ShapeMemory, found: Scan, own: tuple[Pattern, ...], sample: bool) -> None:
    shapes = _shapes(piece)
    line = found.lines
    found.lines += len(shapes) - 1
    loud = set(shapes) if own else seen.loud_of(set(shapes))
    has_title = _TITLE in piece
    if not has_title and (not loud or (not sample and all(seen.sated(_coarse(shape)) for shape in loud))):
        return
    lines = piece.split(b"\n")
    titled: set[bytes] = set()
    for at, each in enumerate(lines if has_title else ()):
        if _TITLE in each:
            shapes[at] = letters(each)
            titled.add(shapes[at])
    facts: list[tuple[int, str, LogFact]] = []
    for shape, places in _groups(shapes, loud | titled, seen).items():
        facts += _parse_alike(shape, places, _Piece(lines, shapes, titled, own), seen, found)
    facts.sort(key=lambda each: each[0])
    found.facts += [(text, fact) for _, text, fact in facts]
    found.places += [line + at for at, _, _ in facts]


def _shapes(piece: bytes) -> list[bytes]:
    plain = piece
    if b"\x1b" in piece:
        plain = _ESCAPES.sub(b"", piece)
    if not plain.isascii():
        plain = plain.replace(_KELVIN, b"k")
    shapes = plain.translate(_LOWER, _DELETED).split(b"\n")
    if len(piece) > PIECE_BYTES:  # it holds a line longer than itself
        shapes = [shape[:MAX_LINE_BYTES] for shape in shapes]
    return shapes


class _Piece(msgspec.Struct, frozen=True):
    lines: list[bytes]
    shapes: list[bytes]
    titled: set[bytes]
    own: tuple[Pattern, ...]


def _parse_alike(
    shape: bytes, places: list[int], piece: _Piece, seen: ShapeMemory, found: Scan
) -> list[tuple[int, str, LogFact]]:
    first = piece.shapes[places[0]]
    errors = bool(_rows(first, first in piece.titled, piece.own).signatures)
    before = seen.parsed.get(shape, 0)
    chosen = _chosen(places, (seen.errors_in_full if errors else seen.steps_in_full) - before, seen.evenly)
    facts: list[tuple[int, str, LogFact]] = []
    tells, parsed = shape in seen.telling, 0
    for at in chosen:
        if seen.evenly == 1 and not tells and before + parsed >= BARREN and at != chosen[-1]:
            continue
        parsed += 1
        text = piece.lines[at][:MAX_LINE_BYTES].decode("utf-8", errors="replace")
        fact = parse_line(text, _rows(piece.shapes[at], piece.shapes[at] in piece.titled, piece.own))
        if fact is not None:
            tells = True
            facts.append((at, text, fact))
    seen.add(shape, parsed, tells)
    found.parsed += parsed
    if facts:
        found.left_out += len(places) - parsed
        if sum(fact.kind is EventKind.ERROR for _, _, fact in facts) == parsed:
            found.errors_left_out += len(places) - parsed
    return facts


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


def _rows(shape: bytes, everything: bool, own: tuple[Pattern, ...]) -> Rows:
    needles = needles_in_force()
    if everything:
        return replace(needles.rows, own=own)
    if len(shape) <= MAX_SHAPE_BYTES:
        return _rows_of(shape, own, needles)
    return _rows_of.__wrapped__(shape, own, needles)


@lru_cache(maxsize=MAX_SHAPES)
def _rows_of(shape: bytes, own: tuple[Pattern, ...], needles: Needles) -> Rows:
    rows, parts = needles.rows, needles.letters
    return Rows(
        tuple(row for row in rows.signatures if _may_match(row.needles, shape, parts)),
        tuple(row for row in rows.signs if _may_match(row.needles, shape, parts)),
        tuple(row for row in rows.patterns if _may_match(row.needles, shape, parts)),
        _may_match(MAPPING_NEEDLES, shape, parts),
        own,
    )


def _may_match(needles: tuple[str, ...], shape: bytes, parts: Mapping[str, bytes]) -> bool:
    for needle in needles:  # noqa: SIM110 - any() takes twice as long
        if parts[needle] in shape:
            return True
    return False


def _coarse(shape: bytes) -> bytes:
    return shape.translate(None, _HEXADECIMAL)


def _groups(shapes: list[bytes], wanted: set[bytes], seen: ShapeMemory) -> dict[bytes, list[int]]:
    """The lines of the shapes that are wanted, by shape; here, an address in hexadecimal makes no new one."""
    coarse: dict[bytes, list[int]] = {}
    wanted = wanted.intersection(shapes)  # a line with a title has another shape now
    fine: dict[bytes, list[int]] = {shape: [] for shape in wanted if not seen.sated(_coarse(shape))}
    for at, shape in enumerate(shapes if fine else ()):
        if shape in fine:
            fine[shape].append(at)
    if len(fine) < len(wanted):
        last = dict(zip(shapes, range(len(shapes)), strict=True))
        fine |= {shape: [last[shape]] for shape in wanted - fine.keys()}
    for shape, places in fine.items():
        coarse.setdefault(_coarse(shape), []).extend(places)
    if len(coarse) < len(fine):
        for places in coarse.values():
            places.sort()
    return coarse


def _chosen(places: list[int], in_full: int, evenly: int) -> list[int]:
    """Which lines of one shape are parsed: the first ones, and of the others an even choice with the last."""
    in_full = max(0, in_full)
    if len(places) <= in_full + evenly:
        return places
    others = places[in_full:]
    return places[:in_full] + [others[(place + 1) * len(others) // evenly - 1] for place in range(evenly)]
