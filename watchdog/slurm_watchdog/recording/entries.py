"""The entries of a recording, one after the other, and how they are found again in a damaged file.

Each is a line: a checksum, the controller's two clocks, and a frame as it came (its kind and its content, see
slurm_watchdog.wire.frames) or one of the values below. Where a file was cut or overwritten, the next line is whole.
"""

from __future__ import annotations

from binascii import crc32
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import one_line
from slurm_watchdog.config.schema import Config
from slurm_watchdog.model.actions import ActionEnd
from slurm_watchdog.model.protocol import Command
from slurm_watchdog.model.slurm import SlurmView

VERSION = 1
MAX_BYTES = 64 * 1024**2  # A listing of 100,000 nodes has 20 MiB; more is damage.
ESCAPE = b"\x1a"  # So a line has no other end but its own.
OF_RELEASE_0_1 = "of a trace of release 0.1"
COUNTING: dict[str, tuple[str, ...]] = {
    "agent": ("interval", "probe_deadline", "mount_probe_interval", "checkpoint_interval", "orphan_grace"),
    "controller": ("tick", "agent_silent_after", "warm_up"),
    "slurm": ("poll_interval", "deadline"),
    **dict.fromkeys(("jobs", "policy", "ladder", "restart", "exceptions", "detectors"), ()),
}
"""Section of the configuration -> the options in it that judging and deciding depend on; none: all."""


class Begin(Struct, tag=True):
    """A controller starts: what follows is its own, on its own clock."""

    version: int = VERSION
    release: str = ""
    settings: dict[str, Any] = msgspec.field(default_factory=dict)  # What judging depends on.


def settings_of(config: Config) -> dict[str, Any]:
    """What `Begin` has of a configuration."""
    of = msgspec.msgpack.decode(msgspec.msgpack.encode({name: getattr(config, name) for name in COUNTING}))
    return {name: {key: of[name][key] for key in keys} if keys else of[name] for name, keys in COUNTING.items()}


class Answer(Struct, tag=True):
    """Slurm's; without a view it could not be asked, or its answer could not be used."""

    view: SlurmView | None = None
    why_not: str = ""
    answered: bool = True


class Tick(Struct, tag=True):
    """The controller judges."""


class Asked(Struct, tag=True):
    """A node was asked: its answer names the command's id."""

    node: str
    command: Command


class State(Struct, tag=True):
    """What the controller knew of itself when it judged, or was asked for something."""

    paused: str | None = None  # Why nothing was to be done, as a person said; None: it was not paused.
    journal_error: str | None = None
    acting: tuple[str, ...] = ()  # Runs (`JOB.RESTARTS`) and processes (`NODE/PID`) that an action was under way for.
    drained: int = 0  # Nodes that it had drained.


class Request(Struct, tag=True):
    """A person asked for a restart."""

    job_id: str
    by: str = ""
    reason: str = ""
    exclude: tuple[str, ...] = ()
    at_once: bool = False
    wish: str = "restart"  # `restart`, `save` or `hold`.
    within_s: float | None = None


class Touched(Struct, tag=True):
    """An action touched this run of a job: what it says from then on is our doing."""

    job_id: str
    restarts: int
    age_s: float | None = None  # So long ago; None: the run continues, and nothing of it was our doing.


class Ended(Struct, tag=True):
    """An action ended."""

    subject: str  # As in `State.acting`.
    end: ActionEnd


Value = Begin | Answer | Tick | Asked | State | Request | Touched | Ended


class Entry(NamedTuple):
    at: float  # The controller's monotonic clock, which every time in a frame is an age on.
    wall: float
    what: bytes | Value  # A frame, or something else.


@dataclass
class Tally:
    """What was used of a recording, and what was not, and why."""

    used: int = 0
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def entries(self) -> int:
        return self.used + sum(self.skipped.values())


def pack(entry: Entry) -> bytes:
    """Its line. Raises ValueError, OverflowError, TypeError or RecursionError where it has none."""
    data = msgspec.msgpack.encode(entry)
    if len(data) > MAX_BYTES:
        raise ValueError("it is too long")
    data = crc32(data).to_bytes(4, "big") + data
    return b"\n" + data.replace(ESCAPE, ESCAPE + b"e").replace(b"\n", ESCAPE + b"n") + b"\n"


def read_entries(readline: Callable[[int], bytes], tally: Tally) -> Iterator[Entry]:
    """The entries of a file; each damaged stretch is counted once. Raises what `readline` raises."""
    damaged = ""
    while line := readline(2 * MAX_BYTES):
        data = line[:-1].replace(ESCAPE + b"n", b"\n").replace(ESCAPE + b"e", ESCAPE)
        if crc32(data[4:]).to_bytes(4, "big") == data[:4]:
            damaged = ""
            try:
                yield msgspec.msgpack.decode(data[4:], type=Entry)
            except (ValueError, RecursionError) as error:
                tally.skipped[f"not of this release ({one_line(str(error), 80)})"] += 1
        elif data and not damaged:
            damaged = OF_RELEASE_0_1 if data.startswith(b'{"t":') else "damaged, or cut short"
            tally.skipped[damaged] += 1
