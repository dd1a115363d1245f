"""Dumps of PyTorch's Flight Recorder, as pickle or as JSON, into what one rank has entered and not finished. Pure.

A pickle may name any function to be called when it is read. Here nothing can be named: what a dump consists of
(dictionaries, lists, tuples, text, numbers) needs no name, and the first name that is met ends the reading. How much
memory a pickle takes is bounded by the process that reads it: see `agent/workers/resource_limits.py`.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zlib
from collections.abc import Mapping
from typing import Annotated, Any, Final, NoReturn

import msgspec
from msgspec import Meta

from slurm_watchdog.model.collective_records import Call, CollectiveRecord, Communicator

MAX_BYTES: Final = 8 << 20
"""Of one dump: 2,000 entries with their frames have some 3 MiB."""
MAX_COMMUNICATORS, MAX_WAITS, MAX_MEMBERS, MAX_PEERS = 64, 8, 65_536, 1024
"""Of one rank, and of one communicator, that are kept; the members of a larger one are not known."""
MAX_MEMBERS_IN_ALL: Final = 65_536
"""Of all communicators of a rank together."""
MAX_NAME: Final = 64
MAX_SIZES: Final = 64
"""Tensors of one call whose elements are counted."""
SAME_ELEMENTS: Final = frozenset({
    "all_reduce", "all_reduce_barrier", "allreduce_coalesced", "reduce", "broadcast", "_broadcast_oop", "_reduce_oop",
    "all_gather", "_all_gather_base", "all_gather_single", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single",
})  # fmt: skip
"""Collectives in which each rank hands in as many elements, of the same type (NCCL user guide, Collective
Operations; torch/distributed/flight_recorder/components/types.py)."""
REFUSED: Final = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, ImportError,
    RuntimeError, SystemError, BufferError, msgspec.MsgspecError,
)  # fmt: skip
"""What the reader of pickles raises for one that is spoilt, as fuzzing has shown, and msgspec for another content."""
_PEER: Final = re.compile(r"(?:send \d+->|recv \d+<-)(\d+)")
_Number = Annotated[int, Meta(ge=-1, le=2**53)]
_Text = Annotated[str, Meta(max_length=4096)]


class _Entry(msgspec.Struct, gc=False):
    """FlightRecorderDetail.hpp, `getTraceEntry…`; format 2.0 (PyTorch 2.4) and later."""

    process_group: tuple[_Text, _Text]
    profiling_name: _Text
    collective_seq_id: _Number
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
    def finished(self) -> bool:
        return self.retired is True or self.state == "completed"


class _Group(msgspec.Struct, gc=False):
    desc: _Text = ""
    ranks: Annotated[str, Meta(max_length=1 << 20)] = ""


class _Status(msgspec.Struct, gc=False):
    last_enqueued_collective: _Number = -1
    last_completed_collective: _Number = -1


class _Dump(msgspec.Struct, gc=False):
    version: str
    entries: Annotated[list[_Entry], Meta(max_length=200_000)] = []
    pg_config: dict[str, _Group] = {}
    pg_status: dict[str, _Status] = {}


class _NoNames(pickle.Unpickler):
    """Reads what a pickle can say without naming anything that Python has."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module[:40]}.{name[:40]}, and a dump names nothing: it was not read")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside of itself: it was not read")


def parse_flight_recorder(body: bytes, rank: int) -> CollectiveRecord:
    """What `rank` had recorded. Raises ValueError, with the reason, for what is no dump of a known format."""
    if len(body) > MAX_BYTES:
        raise ValueError(f"{len(body)} bytes, and a dump has at most {MAX_BYTES}")
    try:
        if body[:1] == b"{":
            dump = msgspec.json.decode(body, type=_Dump, strict=False)  # its numbers of pg_status are text
        else:
            dump = msgspec.convert(_NoNames(io.BytesIO(body)).load(), _Dump)
    except MemoryError:
        raise ValueError("reading it takes too much memory") from None
    except REFUSED as error:
        raise ValueError(f"no dump of the Flight Recorder: {str(error)[:200] or type(error).__name__}") from None
    return _record(dump, rank)


def _record(dump: _Dump, rank: int) -> CollectiveRecord:
    of_group: dict[tuple[str, str], list[_Entry]] = {}
    for entry in dump.entries:
        of_group.setdefault(entry.process_group, []).append(entry)
    found, peers, busy, room = [], dict[int, None](), False, MAX_MEMBERS_IN_ALL
    # Sending and receiving has numbers of its own, and a status holds the newest of either.
    statuses: Mapping[str, _Status] = {} if any(each.is_p2p for each in dump.entries) else dump.pg_status
    for (name, desc), entries in of_group.items():
        waits, members = _unfinished(entries, statuses), _members(name, desc, dump.pg_config)
        kept = members if waits and len(members) <= room else ()
        room -= len(kept)
        for entry in waits:
            if not entry.is_p2p:
                continue
            busy, peer = True, _PEER.match(entry.name)
            if peer is not None and int(peer[1]) < len(members):
                peers[members[int(peer[1])]] = None
        calls: dict[int, Call] = {e.collective_seq_id: _call(e) for e in waits if not e.is_p2p}
        found.append(
            Communicator(
                key=f"{name}@{zlib.crc32(repr(members).encode()):08x}" if members else name,
                label=(f"group {name}" if desc in ("", "undefined") else desc)[:MAX_NAME],
                entered=_entered(entries, statuses),
                waits=tuple(calls.values())[:MAX_WAITS],
                members=kept,
            )
        )
    found.sort(key=lambda each: not each.waits)
    return CollectiveRecord(
        rank=rank,
        communicators=tuple(found[:MAX_COMMUNICATORS]),
        whole=len(found) <= MAX_COMMUNICATORS,
        peers=tuple(peers)[:MAX_PEERS],
        busy=busy,
        point_to_point=not any(each.profiling_name.startswith("gloo:") for each in dump.entries),
    )


def _unfinished(entries: list[_Entry], statuses: Mapping[str, _Status]) -> list[_Entry]:
    """Those after the last that has finished: a communicator does one after the other. The parts of a coalesced
    operation never count as finished themselves. A status counts only where the first of the group is still there: of
    what has left the ring, some may have been sending."""
    begin, whole = 0, min(each.collective_seq_id for each in entries) <= 1
    for at, entry in enumerate(entries):
        status = statuses.get(str(entry.pg_id)) if whole else None
        done = status is not None and entry.collective_seq_id <= status.last_completed_collective
        if entry.finished or done:
            begin = at + 1
    return entries[begin:]


def _entered(entries: list[_Entry], statuses: Mapping[str, _Status]) -> int:
    whole = min(each.collective_seq_id for each in entries) <= 1
    status = (statuses.get(str(entries[-1].pg_id)) if whole else None) or _Status()
    return max(0, status.last_enqueued_collective, *(each.collective_seq_id for each in entries))


def _members(name: str, desc: str, groups: Mapping[str, _Group]) -> tuple[int, ...]:
    """The ranks of a communicator as `pg_config` has them ("[0, 1, 2]"); gloo's default group has no name there."""
    group = groups.get(name) or (groups.get("") if desc == "default_pg" else None)
    if group is None or not re.fullmatch(r"\[[\d, ]*\]", group.ranks):
        return ()
    found = tuple(sorted(int(each) for each in re.findall(r"\d{1,7}", group.ranks)))
    return found if len(found) <= MAX_MEMBERS else ()


def _call(entry: _Entry) -> Call:
    if entry.name not in SAME_ELEMENTS:
        return Call(seq=entry.collective_seq_id, name=entry.name)
    elements = min(sum(math.prod(sizes[:8]) for sizes in entry.input_sizes[:MAX_SIZES]), 2**53)
    return Call(seq=entry.collective_seq_id, name=entry.name, elements=elements, types=tuple(entry.input_dtypes[:4]))
