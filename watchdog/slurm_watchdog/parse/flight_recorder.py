"""Dumps of PyTorch's Flight Recorder into what one rank has entered and not finished. Pure."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.text import one_line
from slurm_watchdog.model.collective_records import Call, CollectiveRecord, Communicator
from slurm_watchdog.parse.flight_recorder_format import MAX_NAME, Dump, Entry, Group, Status, read_dump

# Dumps from which finished entries are left out (`onlyActive=True`, as Megatron and NVRx ask for them). A gap in their
# numbers hides what has finished, and nothing else (FlightRecorder.hpp, `getCollectiveTrace`): a rank in no entry
# has finished what it entered. How far that was, the status of each group says.
UNUSED = Status()


def is_active_only(dump: Dump) -> bool:
    """Whether finished entries are left out of it. Without a gap it may be a whole ring as well, or the end of one: the
    status of each group tells that newer ones are not in it, or that nothing older is unfinished."""
    entries = dump.entries
    if any(each.finished for each in entries):
        return False
    if _has_gaps(entries) or _lacks_newest(dump):
        return True
    begins_late = bool(entries) and entries[0].record_id > 0
    return begins_late and bool(dump.pg_status) and not loses_unfinished(dump)


def _lacks_newest(dump: Dump) -> bool:
    """Whether a group has begun more than its entries say. A ring loses the oldest alone."""
    newest: dict[str, int] = {}
    for each in dump.entries:
        group = str(each.pg_id)
        newest[group] = max(each.p2p_seq_id, each.collective_seq_id, newest.get(group, 0))
    whole = not dump.entries or dump.entries[0].record_id == 0
    return any(
        status.last_enqueued_collective > newest.get(group, 0)
        for group, status in dump.pg_status.items()
        if whole or group in newest
    )


def _has_gaps(entries: Sequence[Entry]) -> bool:
    return entries != [] and entries[-1].record_id - entries[0].record_id not in (0, len(entries) - 1)


def loses_unfinished(dump: Dump) -> bool:
    """Whether the status of some group has more in flight than there are entries of it, or there is no status."""
    first: dict[str, int] = {}
    for each in dump.entries:
        group = str(each.pg_id)
        first[group] = min(_number(each), first.get(group, _number(each)))
    if not dump.pg_status:
        return True
    for group, status in dump.pg_status.items():
        done = max(0, status.last_completed_collective)
        in_flight = status.last_enqueued_collective > done
        if in_flight and first.get(group, status.last_enqueued_collective + 1) > done + 1:
            return True
    return False


def without_finished_parts(dump: Dump) -> tuple[list[Entry], frozenset[int]]:
    """Without parts of batches and of coalesced collectives that have finished, and the numbers of those entries that
    may be such parts as well. Parts have no state of their own, and the entry that ends them is left out. Whether one
    send alone is a part is known only where a rank has batches: it has them throughout, then."""
    runs = list(_runs(dump.entries))
    batches = any(each.is_coalesced for each in dump.entries) or any(len(run) > 1 for run, _ in runs if run[0].is_p2p)
    gave_up = any(each.given_up for each in dump.entries)
    kept: list[Entry] = []
    doubtful = set[int]()
    for run, ends_in_gap in runs:
        last, parts = run[-1], len(run) > 1 or (run[0].is_p2p and batches)
        status, at_end = dump.pg_status.get(str(last.pg_id), UNUSED), last is dump.entries[-1] and not gave_up
        # The status of a group that does both holds a number of either.
        done = status.last_completed_collective
        told = done > last.collective_seq_id or not last.is_p2p
        ended = at_end and told and status.last_enqueued_collective == done == _number(last)
        if parts and (ends_in_gap or ended):
            continue
        kept += run
        if ends_in_gap or (last is dump.entries[-1] and not (told and status.last_enqueued_collective > done)):
            doubtful.update(each.record_id for each in run)
    return kept, frozenset(doubtful)


def _number(entry: Entry) -> int:
    return entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id


def _runs(entries: Sequence[Entry]) -> Iterator[tuple[list[Entry], bool]]:
    """Entries that follow one another with the numbers of one operation, and whether the next one is left out."""
    run = list(entries[:1])
    for before, each in pairwise(entries):
        together = each.record_id == before.record_id + 1
        if not (together and not each.is_coalesced and _operation(each) == _operation(before)):
            yield run, not together
            run = []
        run.append(each)
    if run:
        yield run, False


def _operation(entry: Entry) -> tuple[int, bool, int, int]:
    return entry.pg_id, entry.is_p2p, entry.collective_seq_id, entry.p2p_seq_id


def status_of_names(dump: Dump) -> dict[str, Status] | None:
    """The status of each group by its name. Both are numbered as the groups are made, so the order joins them; None
    where that does not fit the entries."""
    if not all(each.isdecimal() for each in (*dump.pg_status, *dump.pg_config)):
        return None
    names, numbers = sorted(dump.pg_config, key=int), sorted(dump.pg_status, key=int)
    if len(names) != len(numbers):
        return None
    number_of = dict(zip(names, numbers, strict=True))
    if any(number_of.get(each.process_group[0]) != str(each.pg_id) for each in dump.entries):
        return None
    return {name: dump.pg_status[number] for name, number in number_of.items()}


class Talk(msgspec.Struct, gc=False):
    """One operation that sends or receives and has not finished."""

    peers: tuple[int, ...]  # First as the communicator has them, then as the job does; empty: not known.
    since: float | None
    number: int  # Of its entry.
    sure: bool = True  # Whether it is known to be unfinished.

    def between(self, members: tuple[int, ...]) -> Talk:
        peers = tuple(dict.fromkeys(members[peer] for peer in self.peers if peer < len(members)))
        return replace(self, peers=peers)


def ends_of_batches(entries: Sequence[Entry]) -> dict[int, list[int]]:
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


def talks_of(entries: Sequence[Entry], ends: Mapping[int, list[int]], since_start: bool) -> list[Talk]:
    """What of its sending and receiving a rank has not finished. One after the other are finished only those with the
    same peer in the same direction, and batches: each has a communicator or a place in one of its own. What all say
    is `finished` is, whatever came later."""
    batched = {at for parts in ends.values() for at in parts}
    open_ones: dict[tuple[str, int | None], list[Talk]] = {}
    for at, entry in enumerate(entries):
        if at in ends:
            if entry.finished:
                open_ones.pop(("batch", None), None)
                continue
            whole = since_start or 0 not in ends[at]  # else its first parts may have left the ring
            peers = dict.fromkeys(peer for part in ends[at] if (peer := entries[part].stream[1]) is not None)
            open_ones.setdefault(("batch", None), []).append(
                Talk(tuple(peers) if whole else (), entry.since, entry.record_id)
            )
        elif entry.is_p2p and at not in batched:
            stream = entry.stream
            to = () if stream[1] is None else (stream[1],)
            if entry.finished:
                open_ones.pop(stream, None)
            else:
                open_ones.setdefault(stream, []).append(Talk(to, entry.since, entry.record_id))
    return [talk for talks in open_ones.values() for talk in talks]


MAX_COMMUNICATORS, MAX_WAITS, MAX_MEMBERS, MAX_PEERS = 64, 8, 65_536, 1024
"""Of one rank, and of one communicator, that are kept; the members of a larger one are not known."""
MAX_MEMBERS_IN_ALL = 65_536  # Of all communicators of a rank together.
LONG = 256
"""Entries of a buffer from which nothing unfinished falls out: so many don't begin and end beside (default 2,000)."""
CLOCKS_APART_S = 60.0
"""A file whose date is so much older than what is in it was copied, or unpacked: its date says nothing."""
MAX_SIZES = 64  # Tensors of one call whose elements are counted.
SAME_ELEMENTS = frozenset({
    "all_reduce", "all_reduce_barrier", "allreduce_coalesced", "reduce", "broadcast", "_broadcast_oop", "_reduce_oop",
    "all_gather", "_all_gather_base", "all_gather_single", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single",
})  # fmt: skip
"""Collectives in which each rank hands in as many elements, of the same type (NCCL user guide, Collective
Operations; torch/distributed/flight_recorder/components/types.py)."""
NEEDS_ALL = frozenset({
    "all_reduce", "all_reduce_barrier", "allreduce_coalesced", "all_gather", "_all_gather_base", "all_gather_single",
    "_reduce_scatter_base", "reduce_scatter_single", "barrier",
})  # fmt: skip
"""Collectives whose result depends on every rank. With all_to_all and reduce_scatter a rank may have nothing for
another; of broadcast, reduce, gather and scatter only one rank waits for all, or all for one."""


def parse_flight_recorder(body: bytes, rank: int, made_at: float | None = None) -> CollectiveRecord:
    """What `rank` had recorded, in a dump that was written at `made_at` (date). Raises ValueError, with the reason, for
    what is no dump of a known format."""
    dump = read_dump(body)
    active = is_active_only(dump)
    if _has_gaps(dump.entries) and not active:
        raise ValueError("entries are left out of it: whether what they belong to has finished is not known")
    return _record(dump, rank, made_at, active)


def _record(dump: Dump, rank: int, made_at: float | None, active: bool) -> CollectiveRecord:
    """`active`: what is not among the entries has finished."""
    entries, doubtful = without_finished_parts(dump) if active else (dump.entries, frozenset[int]())
    newest = max((each.since or 0.0 for each in entries), default=0.0)
    made_at = None if made_at is not None and made_at + CLOCKS_APART_S < newest else made_at
    found, talks = [], list[Talk]()
    groups = _Groups(dump.pg_config)
    since_start = not active and bool(entries) and entries[0].record_id == 0
    for (name, desc), of_group in _by_group(entries).items():
        place, open_ones = _place(groups, name, desc, of_group, _statuses(dump, of_group, active), since_start, active)
        found.append(place)
        talks += [replace(each, sure=each.sure and each.number not in doubtful) for each in open_ones]
    whole, elsewhere = bool(entries or dump.pg_status or dump.pg_config), None
    if active:
        seen, by_name = {each.process_group[0] for each in dump.entries}, status_of_names(dump)
        whole = by_name is not None
        elsewhere = max((each.last_enqueued_collective for each in dump.pg_status.values()), default=None)
        found += [groups.idle(name, status) for name, status in (by_name or {}).items() if name not in seen]
    found.sort(key=lambda each: not each.waits)
    peers: dict[int, float | None] = {}
    for talk in sorted(talks, key=lambda talk: talk.since or 0.0):
        for peer in talk.peers:
            peers.setdefault(peer, talk.since)
    sure = {peer for talk in talks if talk.sure and len(talk.peers) == 1 for peer in talk.peers}
    lost = loses_unfinished(dump) if active else 0 < len(entries) < LONG and entries[0].record_id > 0
    return CollectiveRecord(
        rank=rank,
        communicators=tuple(found[:MAX_COMMUNICATORS]),
        whole=whole and len(found) <= MAX_COMMUNICATORS,
        elsewhere=elsewhere,
        peers=tuple(peers)[:MAX_PEERS],
        peers_since=tuple(peers.values())[:MAX_PEERS],
        busy=bool(talks),
        unsure_peers=tuple(peer for peer in peers if peer not in sure)[:MAX_PEERS],
        made_at=made_at,
        since_start=since_start,
        lossy=lost,
        active_only=active,
        point_to_point=not any(each.profiling_name.startswith("gloo:") for each in entries),
    )


def _statuses(dump: Dump, entries: Sequence[Entry], active: bool) -> Mapping[str, Status]:
    """Those that say how far this group is: sending and receiving has numbers of its own, and a status holds the newest
    of either. Where entries have left a ring, some may have been sending."""
    if any(each.sends for each in entries) if active else any(each.is_p2p for each in dump.entries):
        return {}
    whole = active or min((each.collective_seq_id for each in entries), default=0) <= 1
    return dump.pg_status if whole else {}


class _Groups:
    """The groups of a dump: each one's members are read once."""

    def __init__(self, config: Mapping[str, Group]):
        self._config = config
        self._known: dict[tuple[str, bool], tuple[tuple[int, ...], str]] = {}
        self._room = MAX_MEMBERS_IN_ALL

    def of(self, name: str, desc: str) -> tuple[tuple[int, ...], str]:
        """Members and key."""
        which = name, desc == "default_pg"
        if which not in self._known:
            members = _members(name, desc, self._config)
            self._known[which] = members, _key(name, members)
        return self._known[which]

    def kept(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """These, as long as there is room for them."""
        if len(members) > self._room:
            return ()
        self._room -= len(members)
        return members

    def idle(self, name: str, status: Status) -> Communicator:
        """One of which everything has finished."""
        desc = self._config[name].desc
        done = max(0, status.last_completed_collective)
        entered = max(done, status.last_enqueued_collective)
        return Communicator(
            key=self.of(name, desc)[1], label=_label(name, desc), entered=entered, finished=done, by_status=True
        )


def _place(
    groups: _Groups,
    name: str,
    desc: str,
    entries: list[Entry],
    statuses: Mapping[str, Status],
    since_start: bool,
    active: bool,
) -> tuple[Communicator, list[Talk]]:
    members, key = groups.of(name, desc)
    ends = ends_of_batches(entries)
    collectives = [each for at, each in enumerate(entries) if not each.is_p2p and at not in ends]
    waits, finished = _unfinished(collectives, statuses)
    calls: dict[int, Call] = {}
    for each in waits:
        if (before := calls.get(each.collective_seq_id)) is not None or len(calls) < MAX_WAITS:
            calls[each.collective_seq_id] = _call(each, since=before.since if before is not None else each.since)
    entered, last = _entered(entries, statuses), max((each.collective_seq_id for each in finished), default=None)
    if active:
        last = min(calls, default=entered + 1) - 1
    place = Communicator(
        key=key,
        label=_label(name, desc),
        entered=entered,
        waits=tuple(calls.values()),
        members=groups.kept(members) if waits else (),
        finished=last,
        together=max((e.collective_seq_id for e in finished if members and _needs_all(e)), default=0),
        sends=any(each.sends for each in entries),
        comparable=_comparable(entries, ends, active),
    )
    return place, [each.between(members) for each in talks_of(entries, ends, since_start)]


def _label(name: str, desc: str) -> str:
    return one_line(f"group {name}" if desc in ("", "undefined") else desc, MAX_NAME)


def _by_group(entries: Sequence[Entry]) -> dict[tuple[str, str], list[Entry]]:
    found: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        before = found.get(entry.process_group)
        if before is None or before[-1].pg_id != entry.pg_id:
            found[entry.process_group] = [entry]
        else:
            before.append(entry)
    return found


def _unfinished(collectives: list[Entry], statuses: Mapping[str, Status]) -> tuple[list[Entry], list[Entry]]:
    """Those after the last that has finished, and those up to it: a communicator does one after the other. The parts
    of a coalesced operation never count as finished themselves. A status counts what was given up as completed."""
    begin = 0
    for at, entry in enumerate(collectives):
        status = statuses.get(str(entry.pg_id))
        done = status is not None and entry.collective_seq_id <= status.last_completed_collective
        if entry.finished or (done and not entry.given_up):
            begin = at + 1
    return collectives[begin:], collectives[:begin]


def _entered(entries: list[Entry], statuses: Mapping[str, Status]) -> int:
    status = statuses.get(str(entries[-1].pg_id)) or Status()
    return max(0, status.last_enqueued_collective, *(each.collective_seq_id for each in entries))


def _comparable(entries: Sequence[Entry], ends: Mapping[int, list[int]], active: bool) -> bool:
    """Whether sending and receiving leaves the number of collectives as it is. In older releases a batch takes one,
    on the ranks that are in it alone (ProcessGroupNCCL.cpp, startCoalescing)."""
    number: int | None = None
    for at, entry in enumerate(() if active else entries):
        if (entry.is_p2p or at in ends) and number not in (None, entry.collective_seq_id):
            return False
        number = entry.collective_seq_id
    return all(entries[at].is_p2p for at in ends)


def _needs_all(entry: Entry) -> bool:
    """Whether no rank finishes it before all have entered it. One without elements is finished at once."""
    sizes = entry.input_sizes[:MAX_SIZES]
    return entry.name in NEEDS_ALL and (not sizes or all(math.prod(each[:8]) for each in sizes))


def _members(name: str, desc: str, groups: Mapping[str, Group]) -> tuple[int, ...]:
    """The ranks of a communicator as `pg_config` has them ("[0, 1, 2]"); gloo's default group has no name there."""
    group = groups.get(name) or (groups.get("") if desc == "default_pg" else None)
    if group is None:
        return ()
    if isinstance(group.ranks, list):
        found = tuple(sorted(group.ranks))
    elif re.fullmatch(r"\[[\d, ]*\]", group.ranks):
        found = tuple(sorted(int(each) for each in re.findall(r"\d{1,7}", group.ranks)))
    else:
        return ()
    return found if len(found) <= MAX_MEMBERS else ()


def _key(name: str, members: tuple[int, ...]) -> str:
    plain = one_line(name, MAX_NAME)
    return f"{plain}@{zlib.crc32(repr((name, members)).encode()):08x}" if members or plain != name else name


def _call(entry: Entry, since: float | None) -> Call:
    name = one_line(entry.name, MAX_NAME)
    call = Call(seq=entry.collective_seq_id, name=name, since=since, needs_all=_needs_all(entry))
    if name not in SAME_ELEMENTS:
        return call
    elements = min(sum(math.prod(sizes[:8]) for sizes in entry.input_sizes[:MAX_SIZES]), 2**53)
    types = tuple(one_line(each, MAX_NAME) for each in entry.input_dtypes[:4])
    return replace(call, elements=elements, types=types)
