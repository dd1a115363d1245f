"""A dump of PyTorch's Flight Recorder, as pickle or as JSON, into its entries. Pure.

A pickle may name any function to be called when it is read. Here nothing can be named: what a dump consists of
(dictionaries, lists, tuples, text, numbers) needs no name, and the first name that is met ends the reading. How much
memory a pickle takes is bounded by the process that reads it: see `agent/children/child.py`.
"""

from __future__ import annotations

import io
import pickle
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from slurm_watchdog.base.late_regex import late_regex

MAX_BYTES = 8 << 20  # Of one dump: 2,000 entries with their frames have some 3 MiB.
MAX_NAME = 64
REFUSED = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, ImportError,
    RuntimeError, SystemError, BufferError, msgspec.MsgspecError,
)  # fmt: skip
"""What the reader of pickles raises for one that is spoilt, as fuzzing has shown, and msgspec for another content."""
UNDONE = frozenset({"scheduled", "started"})
_PEER = late_regex(r"(send|recv) \d+(?:->|<-)(\d+)")
_Number = Annotated[int, Meta(ge=-1, le=2**53)]
_Text = Annotated[str, Meta(max_length=4096)]


class Entry(msgspec.Struct, gc=False):
    """FlightRecorderDetail.hpp, `getTraceEntry…`; format 2.0 (PyTorch 2.4) and later."""

    process_group: tuple[_Text, _Text]
    profiling_name: _Text
    collective_seq_id: _Number
    p2p_seq_id: _Number = -1
    record_id: _Number = -1
    time_created_ns: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    state: _Text | None = None
    retired: bool | None = False
    is_p2p: bool = False
    pg_id: _Number = -1
    input_sizes: list[list[Annotated[int, Meta(ge=0, le=2**53)]]] = []
    input_dtypes: list[_Text] = []

    @property
    def name(self) -> str:
        return self.profiling_name.rpartition(":")[2][:MAX_NAME]

    @property
    def since(self) -> float | None:
        return self.time_created_ns / 1e9 if self.time_created_ns else None

    @property
    def given_up(self) -> bool:
        """Its timeout or an error ended the wait for it, not the GPU, of which NCCL records what it has done: "a
        retired but not completed event has timed out" (FlightRecorder.hpp). gloo records nothing of that."""
        return self.retired is True and self.state in UNDONE and self.profiling_name.startswith("nccl:")

    @property
    def finished(self) -> bool:
        return self.state == "completed" or (self.retired is True and not self.given_up)

    @property
    def sends(self) -> bool:
        """Whether its group sends or receives by itself: it has counted that."""
        return self.is_p2p or self.p2p_seq_id > 0

    @property
    def is_coalesced(self) -> bool:
        """Whether it starts what the entries before it are parts of."""
        return self.name == "coalesced"

    @property
    def stream(self) -> tuple[str, int | None]:
        """`send` or `recv`, and the peer as its communicator has it; None: not known."""
        match = _PEER.match(self.name)
        return ("", None) if match is None else (match[1], int(match[2]) if len(match[2]) < 8 else None)


class Group(msgspec.Struct, gc=False):
    desc: _Text = ""
    ranks: Annotated[str, Meta(max_length=1 << 20)] | list[_Number] = ""


class Status(msgspec.Struct, gc=False):
    last_enqueued_collective: _Number = -1
    last_completed_collective: _Number = -1


class Dump(msgspec.Struct, gc=False):
    version: str
    entries: Annotated[list[Entry], Meta(max_length=200_000)] = []
    pg_config: dict[str, Group] = {}
    pg_status: dict[str, Status] = {}


class _NoNames(pickle.Unpickler):
    """Reads what a pickle can say without naming anything that Python has."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module[:40]}.{name[:40]}, and a dump names nothing: it was not read")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside of itself: it was not read")


def read_dump(body: bytes) -> Dump:
    """Raises ValueError, with the reason, for what is no dump of a known format."""
    if len(body) > MAX_BYTES:
        raise ValueError(f"{len(body)} bytes, and a dump has at most {MAX_BYTES}")
    try:
        if body[:1] == b"{":
            return msgspec.json.decode(body, type=Dump, strict=False)  # its numbers of pg_status are text
        return msgspec.convert(_NoNames(io.BytesIO(body)).load(), Dump)
    except MemoryError:
        raise ValueError("reading it takes too much memory") from None
    except REFUSED as error:
        raise ValueError(f"no dump of the Flight Recorder: {str(error)[:200] or type(error).__name__}") from None
