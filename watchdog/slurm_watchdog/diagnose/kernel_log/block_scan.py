"""Reads the kernel's log of a machine in whole blocks: a hundred megabytes a second, with what a look at each
line would give.

Nearly all lines say nothing we know, and nearly all are alike: they differ in digits. So the letters alone of
each line, its *shape*, are compared first (slurm_watchdog.parse.training_log.block_scan does the same with
logs of jobs). A row of the knowledge can only match a line whose shape holds the letters of its needle; each
different shape is looked at once, and the lines of a shape without any needle are done with. After a line
about a stuck task its call trace is read line by line.

Pure; it remembers shapes from block to block.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from slurm_watchdog.diagnose.kernel_log.verdict import ELSEWHERE_NEEDLES, STUCK, TRACE_LINES
from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.kernel_signatures import kernel_rows
from slurm_watchdog.knowledge.site_rows import SiteRows
from slurm_watchdog.parse.kernel_log.file import Message, is_indented, is_stamped, kernel_text_of, read_line
from slurm_watchdog.parse.training_log.block_scan import PIECE_BYTES, cover, letters, pieces

MAX_LINE_BYTES = 65536
"""Of a line so much is looked at; a record of the journal as JSON has a few thousand bytes."""
MAX_SHAPES = 8192
MAX_SHAPE_BYTES = 512
IN_FULL = 20_000
"""So many lines of one shape with a fact are all read; then the last of each block. A storm says nothing new
after that."""
SAYS_NOTHING = 200
"""So many lines of one shape with a needle and without a fact are read; then the last of each block."""
TRACE_REACH = 5000
"""Lines after a stuck task in which its node's next lines are looked for, where the lines of many nodes lie
over each other."""

SENTENCE_LINES = 6
MAX_RECORD_LINES = 64
MAX_NODES = 4096
_ESCAPES = re.compile(rb"\x1b\[[0-9;]*m|\\x[0-9a-fA-F]{2}")
"""Colours, and the kernel's way to write a byte: letters that are none of the message."""
_BYTES = b'"MESSAGE":['
"""The journal writes what is no UTF-8 as a list of numbers: such lines are always read."""


@lru_cache(maxsize=2)
def _cover_of(_site: SiteRows) -> tuple[bytes, ...]:
    """Letters of which some are in the shape of each line that a row may match."""
    return cover([*(needle for row in kernel_rows() for needle in row.needles), *ELSEWHERE_NEEDLES])


class KernelScan:
    """Takes blocks of whole lines and gives those that say something."""

    def __init__(self) -> None:
        self.counted = 0
        """Lines in which the kernel speaks."""
        self.left_out = 0
        """Lines of a storm that were not read."""
        self._speaks: dict[bytes, bool] = {}
        """Shapes without any needle, and whether the kernel speaks in such lines."""
        self._read: Counter[bytes] = Counter()
        self._facts: Counter[bytes] = Counter()
        """How many lines of a shape were read, and how many of them said something."""
        self._mute: set[bytes] = set()
        """Shapes of which enough lines were read, and none said anything."""
        self._following: dict[str | None, int] = {}
        self._follow_until = 0
        self._gpus: dict[str | None, tuple[int, str]] = {}
        """Node -> (line, address) of the GPU that the first of several lines named."""

    def messages(self, data: bytes, number: int | Sequence[int]) -> Iterator[Message]:
        """Every line of the block with a fact or a word about the node's disks, and those of call traces.

        `number` is that of the first line in its file, or of each line.
        """
        first = 0
        for piece in pieces(data):
            lines = piece.split(b"\n")
            if lines and not lines[-1]:
                lines.pop()
            shapes, loud = self._loud(piece, lines)
            if loud or self._following or _BYTES in piece:
                for at in self._to_be_read(shapes, loud, lines, _BYTES in piece):
                    line_number = number + first + at if isinstance(number, int) else number[first + at]
                    text = lines[at][:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip("\r")
                    message = read_line(line_number, text)
                    if message is not None and message.fact is not None and _is_continued(lines, at):
                        message = replace(message, fact=None)
                    if line_number > self._follow_until:
                        self._following.clear()
                    if message is not None:
                        message = self._with_address(message)
                        self._facts[shapes[at][:MAX_SHAPE_BYTES]] += message.fact is not None
                        self._follow(message)
                        yield message
            first += len(lines)

    def _to_be_read(self, shapes: list[bytes], loud: set[bytes], lines: list[bytes], has_bytes: bool) -> Iterator[int]:
        """The places to be read, one at a time: what was found in one decides about the next."""
        last = dict(zip(shapes, range(len(shapes)), strict=True))
        if loud <= self._mute and not self._following and not has_bytes:
            places: Iterable[int] = sorted(last[shape] for shape in loud)
        else:
            places = range(len(shapes))
        for at in places:
            shape = shapes[at]
            if shape in loud:
                if self._is_to_be_read(shape[:MAX_SHAPE_BYTES]) or at == last[shape] or self._following:
                    yield at
                else:
                    self.left_out += self._facts[shape[:MAX_SHAPE_BYTES]] > 0
            elif self._following or (has_bytes and _BYTES in lines[at]):
                yield at

    def _with_address(self, message: Message) -> Message:
        """The message with the GPU that a line just before it named: NVIDIA's driver parts one sentence into
        four lines."""
        fact = message.fact
        if fact is None or not fact.name.startswith("gpu_"):
            return message
        if fact.name == "gpu_identity" and fact.pci_bus_id is not None:
            if len(self._gpus) >= MAX_NODES:
                self._gpus.clear()
            self._gpus[message.node] = (message.number, fact.pci_bus_id)
        line, address = self._gpus.get(message.node, (0, ""))
        near = 0 < message.number - line <= SENTENCE_LINES
        if fact.pci_bus_id is not None or fact.gpu is not None or not near or not line:
            return message
        return replace(message, fact=replace(fact, pci_bus_id=address))

    def _follow(self, message: Message) -> None:
        """Notes whose call trace comes next."""
        if message.fact is not None and message.fact.name in STUCK:
            self._following[message.node] = TRACE_LINES
            self._follow_until = message.number + TRACE_REACH
        elif message.fact is not None:
            self._following.pop(message.node, None)
        elif message.node in self._following:
            self._following[message.node] -= 1
            if self._following[message.node] <= 0:
                del self._following[message.node]

    def _loud(self, piece: bytes, lines: list[bytes]) -> tuple[list[bytes], set[bytes]]:
        """(the shape of each line, those that hold a needle)."""
        plain = _ESCAPES.sub(b"", piece) if b"\x1b" in piece or b"\\x" in piece else piece
        shapes = letters(plain).split(b"\n")[: len(lines)]
        if len(piece) > PIECE_BYTES:  # it holds a line longer than itself
            shapes = [shape[:MAX_LINE_BYTES] for shape in shapes]
        for counter in (self._read, self._facts):
            if len(counter) > MAX_SHAPES:
                counter.clear()
                self._mute.clear()
        return shapes, self._loud_shapes(Counter(shapes), shapes, lines)

    def _is_to_be_read(self, shape: bytes) -> bool:
        self._read[shape] += 1
        if self._facts[shape] == 0:
            if self._read[shape] > SAYS_NOTHING:
                self._mute.add(shape)
            return self._read[shape] <= SAYS_NOTHING
        self._mute.discard(shape)
        return self._read[shape] <= IN_FULL

    def _loud_shapes(self, counts: Counter[bytes], shapes: list[bytes], lines: list[bytes]) -> set[bytes]:
        """The shapes with a needle; of the others it is noted whether the kernel speaks in them."""
        new = {shape for shape in counts if shape not in self._speaks}
        together = b"\n".join(new)
        needles = [needle for needle in _cover_of(site_rows.current()) if needle in together]
        loud = {shape for shape in new if any(needle in shape for needle in needles)} if needles else set()
        if len(self._speaks) > MAX_SHAPES:
            self._speaks.clear()
        speaks_of = dict(self._speaks)
        places = dict(zip(shapes, range(len(shapes)), strict=True)) if new else {}
        for shape in new:
            at = places[shape]
            speaks = _is_stamped(lines[at]) or _speaks(lines[at])
            speaks_of[shape] = speaks
            if shape not in loud and len(shape) <= MAX_SHAPE_BYTES:
                self._speaks[shape] = speaks
        self.counted += sum(times for shape, times in counts.items() if speaks_of[shape])
        return loud


def _is_continued(lines: Sequence[bytes], at: int) -> bool:
    """Whether a line is a further one of the record before it."""
    first = at
    while first > 0 and at - first < MAX_RECORD_LINES and is_indented(_text(lines[first])):
        first -= 1
    return first < at and is_stamped(_text(lines[first]))


def _text(line: bytes) -> str:
    return line[:MAX_LINE_BYTES].decode("utf-8", "replace")


def _is_stamped(line: bytes) -> bool:
    """Whether a line is one of dmesg's with words behind its time; the quick answer for most."""
    return line[:1] == b"[" and line.rstrip()[-1:] != b"]"


def _speaks(line: bytes) -> bool:
    text = kernel_text_of(line[:MAX_LINE_BYTES].decode("utf-8", "replace"))
    return text is not None and bool(text.text)
