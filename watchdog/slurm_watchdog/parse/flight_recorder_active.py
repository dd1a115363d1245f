"""Dumps of the Flight Recorder from which finished entries are left out (`onlyActive=True`, as Megatron and NVRx ask
for them). Pure.

A gap in their numbers hides what has finished, and nothing else (FlightRecorder.hpp, `getCollectiveTrace`): whoever is
in no entry has finished what it entered. How far that was, the status of each group says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from slurm_watchdog.parse.flight_recorder_format import Dump, Entry, Status

UNUSED = Status()


def is_active_only(dump: Dump) -> bool:
    """Whether finished entries are left out of it. Without a gap it may be a whole ring as well, or the end of one: the
    status of each group tells that newer ones are not in it, or that nothing older is unfinished."""
    entries = dump.entries
    if any(each.finished for each in entries):
        return False
    return _has_gaps(entries) or _lacks_newest(dump) or (entries[:1] != [] and _begins_late(dump))


def _begins_late(dump: Dump) -> bool:
    return dump.entries[0].record_id > 0 and bool(dump.pg_status) and not loses_unfinished(dump)


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


def has_gaps(dump: Dump) -> bool:
    return _has_gaps(dump.entries)


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
