"""The entries of a recording, one after the other, and how they are found again in a damaged file.

Each is a head (a mark, its kind, the controller's two clocks, the size and the checksum of its body) and a body. A file
that was cut or overwritten in the middle costs the entries there: the next mark is looked for.
"""

from __future__ import annotations

import struct
from binascii import crc32
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.config.schema import Config
from slurm_watchdog.model.actions import ActionEnd
from slurm_watchdog.model.protocol import Command
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode

VERSION = 1
BEGIN, FRAME, LISTING, NO_ANSWER, TICK, OWN, COMMAND = b"b", b"f", b"s", b"n", b"t", b"o", b"c"
"""Kinds of entries. The body of FRAME is the frame's own kind (slurm_watchdog.wire.frames) and its content, that of
TICK is empty, those of the others are the values below."""
MARK: Final = b"\x89SWR"
HEAD = struct.Struct(">4scddII")
MAX_BODY = 64 * 1024**2  # A listing of 100,000 nodes has 20 MiB; more is damage.
CHUNK = 1 << 20
COUNTING = ("agent", "controller", "slurm", "jobs", "policy", "ladder", "restart", "exceptions", "detectors")
"""Sections of the configuration that judging and deciding depend on."""


class Begin(Struct):
    """A controller starts: what follows is its own, on its own clock."""

    version: int = VERSION
    release: str = ""
    cluster: str = ""
    settings: dict[str, Any] = msgspec.field(default_factory=dict)  # What judging depends on.


def settings_of(config: Config) -> dict[str, Any]:
    """What `Begin` has of a configuration."""
    of: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(config))
    of = {name: of[name] for name in COUNTING if name in of}
    of.get("controller", {}).pop("journal_url", None)  # a password may be in it
    return of


class Listing(Struct):
    """What has changed of Slurm's jobs and nodes since the listing before."""

    jobs: tuple[SlurmJob, ...] = ()
    nodes: tuple[SlurmNode, ...] = ()
    gone_jobs: tuple[str, ...] = ()  # Not listed any more.
    gone_nodes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    partial: str = ""


class NoAnswer(Struct):
    """Slurm could not be asked, or its answer could not be used."""

    reason: str
    answered: bool = False


class Asked(Struct):
    """A node was asked: its answer names the command's id."""

    node: str
    command: Command


class State(Struct, tag="state"):
    """What the controller knew of itself when it judged; written when it changes."""

    paused: str | None = None  # Why nothing was to be done, as a person said; None: it was not paused.
    journal_error: str | None = None
    acting: tuple[str, ...] = ()  # Runs (`JOB.RESTARTS`) and processes (`NODE/PID`) that an action was under way for.
    drained: int = 0  # Nodes that it had drained.


class Request(Struct, tag="request"):
    """A person asked for a restart."""

    job_id: str
    by: str = ""
    reason: str = ""
    exclude: tuple[str, ...] = ()
    at_once: bool = False
    wish: str = "restart"  # `restart`, `save` or `hold`.
    within_s: float | None = None


class Touched(Struct, tag="touched"):
    """An action touched this run of a job: what it says from then on is our doing."""

    job_id: str
    restarts: int
    age_s: float | None = None  # So long ago; None: the run continues, and nothing of it was our doing.


class Ended(Struct, tag="ended"):
    """An action ended."""

    subject: str  # As in `State.acting`.
    end: ActionEnd


Own = State | Request | Touched | Ended
"""What decisions depend on and neither a frame nor Slurm says."""


class Entry(NamedTuple):
    kind: bytes
    at: float  # The controller's monotonic clock, which every time in a frame is an age on.
    wall: float
    body: bytes = b""


@dataclass
class Tally:
    """What was used of a recording, and what was not, and why."""

    used: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def skipped_entries(self) -> int:
        return sum(self.skipped.values())

    @property
    def entries(self) -> int:
        return self.used + self.skipped_entries

    def skip(self, why: str) -> None:
        self.skipped[why] = self.skipped.get(why, 0) + 1


def pack(entry: Entry) -> bytes:
    """The bytes of one entry."""
    return HEAD.pack(MARK, entry.kind, entry.at, entry.wall, len(entry.body), crc32(entry.body)) + entry.body


def read_entries(read: Callable[[int], bytes], tally: Tally) -> Iterator[Entry]:
    """The entries in what `read(n)` gives in pieces of at most n bytes; each damaged stretch is counted once. Raises
    what `read` raises."""
    data, begin, more, whole = b"", 0, True, True
    while more or begin < len(data):
        entry, size = _first(data, begin) if len(data) - begin >= HEAD.size else (None, HEAD.size)
        if entry is not None:
            begin, whole = begin + size, True
            yield entry
        elif size > len(data) - begin and more:
            part = read(max(CHUNK, size))
            data, begin, more = data[begin:] + part, 0, bool(part)
        else:
            if whole:
                tally.skip("damaged, or cut short")
            whole, found = False, data.find(MARK, begin + 1)
            begin = found if found >= 0 else max(begin + 1, len(data) - (len(MARK) - 1 if more else 0))


def _first(data: bytes, begin: int) -> tuple[Entry | None, int]:
    """(entry, its size) at this place; (None, size) where more bytes are needed, (None, 0) where there is none."""
    mark, kind, at, wall, size, checksum = HEAD.unpack_from(data, begin)
    if mark != MARK or size > MAX_BODY:
        return None, 0
    body = data[begin + HEAD.size : begin + HEAD.size + size]
    if len(body) < size:
        return None, HEAD.size + size
    if crc32(body) != checksum:
        return None, 0
    return Entry(kind, at, wall, body), HEAD.size + size


def value_of(entry: Entry, kind: Any) -> Any:
    """The value in its body. Raises ValueError if it is another one, or of a newer release."""
    try:
        return msgspec.msgpack.decode(entry.body, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error
