"""Lines of a kernel log, read one by one: what the scan by blocks is held against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from slurm_watchdog.parse.kernel_log.file import Message, is_indented, is_stamped, read_line, split_line
from slurm_watchdog.parse.kernel_log.line import KernelFact, parse_message


def read_messages(lines: Iterable[str]) -> Iterator[Message]:
    """Every line in which the kernel speaks, with what the knowledge makes of it. Lines of programs are left out."""
    in_record = False
    for number, line in enumerate(lines, start=1):
        in_record = is_stamped(line) or (in_record and is_indented(line))
        if (message := read_line(number, line)) is not None:
            yield replace(message, fact=None) if in_record and is_indented(line) else message


def parse_kernel_line(text: str) -> KernelFact | None:
    """The fact in a line as people paste it, with whatever prefix, or in a bare message; None if there is none."""
    found = split_line(text)
    return parse_message(found.text) if found and found.text else None
