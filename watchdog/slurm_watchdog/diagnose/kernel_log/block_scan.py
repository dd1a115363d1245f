"""Finds the lines of a kernel log that say anything, block by block. Pure.

Most lines hold no needle of any row: what is left of a block when all but its letters is taken out is searched for the
letters of the needles, and only the lines in which they are found are taken apart. After a line about a stuck task its
call trace is read line by line.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.diagnose.kernel_log.verdict import ELSEWHERE_NEEDLES, STUCK
from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.kernel_signatures import kernel_rows
from slurm_watchdog.knowledge.site_rows import SiteRows
from slurm_watchdog.parse.kernel_log.file import Message, is_indented, is_stamped, read_line
from slurm_watchdog.parse.training_log.block_scan import cover, letters

MAX_LINE_BYTES = 65536  # Of a line so much is looked at; a record of the journal as JSON has a few thousand bytes.
TRACE_REACH = 5000
"""Lines after a stuck task in which its node's next lines are looked for, where the lines of many nodes lie
over each other."""
TRIED = 2000  # Lines of a block in which the kernel is looked for, if none of them tells anything.
SENTENCE_LINES = 6
MAX_RECORD_LINES = 64
MAX_NODES = 4096
_ESCAPES = late_regex(rb"\x1b\[[0-9;]*m|\\x[0-9a-fA-F]{2}")
"""Colours, and the kernel's way to write a byte: letters that are none of the message."""
_BYTES = b'"MESSAGE":['  # The journal writes what is no UTF-8 as a list of numbers: such lines are always read.


@lru_cache(maxsize=2)
def _needles_of(_site: SiteRows) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """(letters of which some are in the shape of each line that a row may match, needles without any letter)."""
    needles = {*(needle for row in kernel_rows() for needle in row.needles), *ELSEWHERE_NEEDLES}
    bare = {needle for needle in needles if not letters(needle)}
    return cover(needles - bare), tuple(sorted(needle.strip().encode() for needle in bare))


class KernelScan:
    """Takes blocks of whole lines and gives those that say something."""

    def __init__(self) -> None:
        self.lines = 0
        self.speaks = False
        """Whether the kernel speaks in any of them."""
        self._read_until = 0
        self._gpus: dict[str | None, tuple[int, str]] = {}
        """Node -> (line, address) of the GPU that the first of several lines named."""

    def messages(self, data: bytes, number: int | Sequence[int]) -> Iterator[Message]:
        """Every line of the block with a fact or a word about the node's disks, and those of call traces.

        `number` is that of the first line in its file, or of each line.
        """
        lines = data.removesuffix(b"\n").split(b"\n") if data else []
        self.lines += len(lines)
        telling = _telling(data)
        for at, line in enumerate(lines):
            line_number = number + at if isinstance(number, int) else number[at]
            tried = at < TRIED and not self.speaks
            if not tried and at not in telling and line_number > self._read_until:
                continue
            message = read_line(line_number, _text(line).rstrip("\r"))
            if message is None:
                continue
            self.speaks = True
            if message.fact is not None and _is_continued(lines, at):
                message = replace(message, fact=None)
            message = self._with_address(message)
            if message.fact is not None and message.fact.name in STUCK:
                self._read_until = line_number + TRACE_REACH
            yield message

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


def _telling(data: bytes) -> set[int]:
    """The places of the lines in which the letters of a needle are."""
    wanted, bare = _needles_of(site_rows.current())
    plain = _ESCAPES.sub(b"", data) if b"\x1b" in data or b"\\x" in data else data
    return _places(letters(plain), wanted) | _places(data, (*bare, _BYTES))


def _places(text: bytes, needles: Iterable[bytes]) -> set[int]:
    """The places of the lines that hold one of them."""
    ends = [match.start() for match in re.finditer(b"\n", text)]
    places: set[int] = set()
    for needle in needles:
        at = text.find(needle)
        while at >= 0:
            place = bisect_left(ends, at)
            places.add(place)
            at = text.find(needle, ends[place]) if place < len(ends) else -1
    return places


def _is_continued(lines: Sequence[bytes], at: int) -> bool:
    """Whether a line is a further one of the record before it."""
    first = at
    while first > 0 and at - first < MAX_RECORD_LINES and is_indented(_text(lines[first])):
        first -= 1
    return first < at and is_stamped(_text(lines[first]))


def _text(line: bytes) -> str:
    return line[:MAX_LINE_BYTES].decode("utf-8", "replace")
