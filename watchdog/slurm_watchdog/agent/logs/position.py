"""How far a log was read: the lines over the borders of reads, and what identifies the file when it is opened again."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from slurm_watchdog.parse.training_log.context import Context

MAX_PENDING = 64 * 1024  # Of a line without an end so much is kept.
ANCHOR = 256  # Bytes that are compared, at the beginning of a file and before our place in it: a line or two.

Identity = tuple[int, int]  # Device and inode: which file it is, whatever it is called.


@dataclass
class LineBuffer:
    """Cuts bytes into lines over the borders of reads. A carriage return ends a line, too: bars are redrawn with it.
    NUL bytes are taken out: they fill the holes of sparse files, and without them UTF-16 reads like ASCII."""

    pending: bytes = b""
    skipping: bool = False  # In the rest of a line that was too long; its beginning has been handed out.

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes, each with a line feed."""
        if b"\0" in data:
            data = data.replace(b"\0", b"")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        # A carriage return at the very end may be the first half of \r\n: an empty line then follows, which
        # says nothing.
        if self.skipping:
            end = data.find(b"\n")
            if end < 0:
                return b""
            data, self.skipping = data[end + 1 :], False
        end = data.rfind(b"\n") + 1
        whole, rest = (self.pending + data[:end], data[end:]) if end else (b"", self.pending + data)
        if len(rest) > MAX_PENDING:
            whole, rest, self.skipping = whole + rest[:MAX_PENDING] + b"\n", b"", True
        self.pending = rest
        return whole


@dataclass
class FilePosition:
    """How far a file was read: enough to continue under another name, or when it is opened again."""

    identity: Identity
    position: int = 0
    head: bytes = b""  # The first bytes of the file, of what was read from its beginning.
    anchor: bytes = b""  # The last bytes before `position`.
    lines: LineBuffer = field(default_factory=LineBuffer)
    last_steps: dict[str, float] = field(default_factory=dict)
    context: Context = field(default_factory=Context)

    def advance(self, data: bytes) -> None:
        """Notes that `data` was read."""
        if self.position == len(self.head) < ANCHOR:
            self.head += data[: ANCHOR - len(self.head)]
        self.position += len(data)
        self.anchor = (self.anchor + data[-ANCHOR:])[-ANCHOR:]


def goes_on(fd: int, size: int, known: FilePosition) -> bool:
    """Whether an open file holds, up to there, what was read before."""
    if not known.anchor or size < known.position:
        return False
    anchor = os.pread(fd, len(known.anchor), known.position - len(known.anchor))
    return anchor == known.anchor and os.pread(fd, len(known.head), 0) == known.head


def again(known: FilePosition, about: os.stat_result) -> FilePosition:
    """The same place in what is, maybe under another name or after a mount was made again, the same text."""
    return replace(
        known, identity=(about.st_dev, about.st_ino), lines=replace(known.lines), last_steps=dict(known.last_steps)
    )
