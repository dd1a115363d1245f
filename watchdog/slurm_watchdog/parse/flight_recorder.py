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
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, NoReturn

import msgspec
from msgspec import Meta

from slurm_watchdog.base.text import one_line
from slurm_watchdog.model.collective_records import Call, CollectiveRecord, Communicator

MAX_BYTES: Final = 8 << 20
"""Of one dump: 2,000 entries with their frames have some 3 MiB."""
MAX_COMMUNICATORS, MAX_WAITS, MAX_MEMBERS, MAX_PEERS = 64, 8, 65_536, 1024
"""Of one rank, and of one communicator, that are kept; the members of a larger one are not known."""
MAX_MEMBERS_IN_ALL: Final = 65_536
"""Of all communicators of a rank together."""
LONG: Final = 256
"""Entries of a buffer from which nothing unfinished falls out: so many do not begin and end beside it (the default is
2,000)."""
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
NEEDS_ALL: Final = frozenset({
    "all_reduce", "all_reduce_barrier", "allreduce_coalesced", "all_gather", "_all_gather_base", "all_gather_single",
    "_reduce_scatter_base", "reduce_scatter_single", "barrier",
})  # fmt: skip
"""Collectives whose result depends on every rank. With all_to_all and reduce_scatter a rank may have nothing for
another; of broadcast, reduce, gather and scatter only one rank waits for all, or all for one."""
UNDONE: Final = frozenset({"scheduled", "started"})
_PEER: Final = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")
_Number = Annotated[int, Meta(ge=-1, le=2**53)]
_Text = Annotated[str, Meta(max_length=4096)]


class _Entry(msgspec.Struct, gc=False):
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
    def is_coalesced(self) -> bool:
        """Whether it starts what the entries before it are parts of."""
        return self.name == "coalesced"

    @property
    def direction(self) -> str:
        match = _PEER.match(self.name)
        return match[1] if match is not None else ""

    @property
    def peer(self) -> int | None:
        """As its communicator has it; None: not known."""
        match = _PEER.match(self.name)
        return int(match[2]) if match is not None and len(match[2]) < 8 else None


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


def parse_flight_recorder(body: bytes, rank: int, made_at: float | None = None) -> CollectiveRecord:
    """What `rank` had recorded, in a dump that was written at `made_at` (date). Raises ValueError, with the reason, for
    what is no dump of a known format."""
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
    return _record(dump, rank, made_at)


def _record(dump: _Dump, rank: int, made_at: float | None) -> CollectiveRecord:
    numbers = [each.record_id for each in dump.entries]
    if numbers and numbers[-1] - numbers[0] not in (0, len(numbers) - 1):
        raise ValueError("entries are left out of it: whether what they belong to has finished is not known")
    of_group = _by_group(dump.entries)
    found, talks, room = [], list[_Talk](), MAX_MEMBERS_IN_ALL
    since_start = bool(dump.entries) and dump.entries[0].record_id == 0
    # Sending and receiving has numbers of its own, and a status holds the newest of either.
    statuses: Mapping[str, _Status] = {} if any(each.is_p2p for each in dump.entries) else dump.pg_status
    for (name, desc), entries in of_group.items():
        members = _members(name, desc, dump.pg_config)
        ends = _ends_of_batches(entries)
        collectives = [each for at, each in enumerate(entries) if not each.is_p2p and at not in ends]
        waits, finished = _unfinished(collectives, statuses)
        kept = members if waits and len(members) <= room else ()
        room -= len(kept)
        talks += [each.between(members) for each in _talks(entries, ends, since_start)]
        calls: dict[int, Call] = {}
        for each in waits:
            before = calls.get(each.collective_seq_id)
            calls[each.collective_seq_id] = _call(each, since=before.since if before is not None else each.since)
        found.append(
            Communicator(
                key=_key(name, members),
                label=one_line(f"group {name}" if desc in ("", "undefined") else desc, MAX_NAME),
                entered=_entered(entries, statuses),
                waits=tuple(calls.values())[:MAX_WAITS],
                members=kept,
                finished=max((each.collective_seq_id for each in finished), default=None),
                together=max((e.collective_seq_id for e in finished if members and _needs_all(e)), default=0),
                comparable=_comparable(entries, ends),
            )
        )
    found.sort(key=lambda each: not each.waits)
    peers: dict[int, float | None] = {}
    for talk in sorted(talks, key=lambda talk: talk.since or 0.0):
        for peer in talk.peers:
            peers.setdefault(peer, talk.since)
    sure = {peer for talk in talks if len(talk.peers) == 1 for peer in talk.peers}
    return CollectiveRecord(
        rank=rank,
        communicators=tuple(found[:MAX_COMMUNICATORS]),
        whole=len(found) <= MAX_COMMUNICATORS,
        peers=tuple(peers)[:MAX_PEERS],
        peers_since=tuple(peers.values())[:MAX_PEERS],
        busy=bool(talks),
        unsure_peers=tuple(peer for peer in peers if peer not in sure)[:MAX_PEERS],
        made_at=made_at,
        since_start=since_start,
        lossy=0 < len(numbers) < LONG and numbers[0] > 0,
        point_to_point=not any(each.profiling_name.startswith("gloo:") for each in dump.entries),
    )


def _by_group(entries: Sequence[_Entry]) -> dict[tuple[str, str], list[_Entry]]:
    """Those of each process group, in order; of one that was made again under its name, those of the newest."""
    found: dict[tuple[str, str], list[_Entry]] = {}
    for entry in entries:
        before = found.get(entry.process_group)
        if before is None or before[-1].pg_id != entry.pg_id:
            found[entry.process_group] = [entry]
        else:
            before.append(entry)
    return found


class _Talk(msgspec.Struct, gc=False):
    """One operation that sends or receives and has not finished."""

    peers: tuple[int, ...]
    """First as the communicator has them, then as the job does; empty: not known."""
    since: float | None

    def between(self, members: tuple[int, ...]) -> _Talk:
        return _Talk(tuple(dict.fromkeys(members[peer] for peer in self.peers if peer < len(members))), self.since)


def _ends_of_batches(entries: Sequence[_Entry]) -> dict[int, list[int]]:
    """Where operations are that start several sends and receives at once, and for each where its parts are.

    The parts come before it with its number; they have no state of their own (ProcessGroupNCCL.cpp, endCoalescing).
    """
    found: dict[int, list[int]] = {}
    parts: list[int] = []
    for at, entry in enumerate(entries):
        if parts and entry.p2p_seq_id != entries[parts[0]].p2p_seq_id:
            parts = []
        if entry.is_coalesced and (entry.is_p2p or parts):
            found[at], parts = parts, []
        elif entry.is_p2p:
            parts.append(at)
        else:
            parts = []
    return found


def _talks(entries: Sequence[_Entry], ends: Mapping[int, list[int]], since_start: bool) -> list[_Talk]:
    """What of its sending and receiving a rank has not finished. One after the other are finished only those with the
    same peer in the same direction, and batches: each has a communicator or a place in one of its own. What all say
    is `finished` is, whatever came later."""
    batched = {at for parts in ends.values() for at in parts}
    open_ones: dict[tuple[str, int | None], list[_Talk]] = {}
    for at, entry in enumerate(entries):
        if at in ends:
            if entry.finished:
                open_ones.pop(("batch", None), None)
                continue
            whole = since_start or 0 not in ends[at]  # else its first parts may have left the ring
            peers = dict.fromkeys(peer for part in ends[at] if (peer := entries[part].peer) is not None)
            open_ones.setdefault(("batch", None), []).append(_Talk(tuple(peers) if whole else (), entry.since))
        elif entry.is_p2p and at not in batched:
            stream = entry.direction, entry.peer
            if entry.finished:
                open_ones.pop(stream, None)
            else:
                open_ones.setdefault(stream, []).append(_Talk(() if entry.peer is None else (entry.peer,), entry.since))
    return [talk for talks in open_ones.values() for talk in talks]


def _unfinished(collectives: list[_Entry], statuses: Mapping[str, _Status]) -> tuple[list[_Entry], list[_Entry]]:
    """Those after the last that has finished, and those up to it: a communicator does one after the other. The parts
    of a coalesced operation never count as finished themselves. A status counts only where the first of the group is
    still there: of what has left the ring, some may have been sending. It counts what was given up as completed."""
    begin, whole = 0, min((each.collective_seq_id for each in collectives), default=0) <= 1
    for at, entry in enumerate(collectives):
        status = statuses.get(str(entry.pg_id)) if whole else None
        done = status is not None and entry.collective_seq_id <= status.last_completed_collective
        if entry.finished or (done and not entry.given_up):
            begin = at + 1
    return collectives[begin:], collectives[:begin]


def _entered(entries: list[_Entry], statuses: Mapping[str, _Status]) -> int:
    whole = min(each.collective_seq_id for each in entries) <= 1
    status = (statuses.get(str(entries[-1].pg_id)) if whole else None) or _Status()
    return max(0, status.last_enqueued_collective, *(each.collective_seq_id for each in entries))


def _comparable(entries: Sequence[_Entry], ends: Mapping[int, list[int]]) -> bool:
    """Whether sending and receiving leaves the number of collectives as it is. In older releases a batch takes one,
    on the ranks that are in it alone (ProcessGroupNCCL.cpp, startCoalescing)."""
    number: int | None = None
    for at, entry in enumerate(entries):
        if (entry.is_p2p or at in ends) and number not in (None, entry.collective_seq_id):
            return False
        number = entry.collective_seq_id
    return all(entries[at].is_p2p for at in ends)


def _needs_all(entry: _Entry) -> bool:
    """Whether no rank finishes it before all have entered it. One without elements is finished at once."""
    sizes = entry.input_sizes[:MAX_SIZES]
    return entry.name in NEEDS_ALL and (not sizes or all(math.prod(each[:8]) for each in sizes))


def _members(name: str, desc: str, groups: Mapping[str, _Group]) -> tuple[int, ...]:
    """The ranks of a communicator as `pg_config` has them ("[0, 1, 2]"); gloo's default group has no name there."""
    group = groups.get(name) or (groups.get("") if desc == "default_pg" else None)
    if group is None or not re.fullmatch(r"\[[\d, ]*\]", group.ranks):
        return ()
    found = tuple(sorted(int(each) for each in re.findall(r"\d{1,7}", group.ranks)))
    return found if len(found) <= MAX_MEMBERS else ()


def _key(name: str, members: tuple[int, ...]) -> str:
    """The same on all ranks of the communicator, and plain text."""
    plain = one_line(name, MAX_NAME)
    return f"{plain}@{zlib.crc32(repr((name, members)).encode()):08x}" if members or plain != name else name


def _call(entry: _Entry, since: float | None) -> Call:
    name = one_line(entry.name, MAX_NAME)
    if name not in SAME_ELEMENTS:
        return Call(seq=entry.collective_seq_id, name=name, since=since)
    elements = min(sum(math.prod(sizes[:8]) for sizes in entry.input_sizes[:MAX_SIZES]), 2**53)
    types = tuple(one_line(each, MAX_NAME) for each in entry.input_dtypes[:4])
    return Call(seq=entry.collective_seq_id, name=name, elements=elements, types=types, since=since)
