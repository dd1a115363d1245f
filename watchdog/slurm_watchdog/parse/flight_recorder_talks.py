"""Sends and receives in a dump of the Flight Recorder: which a rank has begun and not finished, and with whom. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from slurm_watchdog.parse.flight_recorder_format import Entry


class Talk(msgspec.Struct, gc=False):
    """One operation that sends or receives and has not finished."""

    peers: tuple[int, ...]
    """First as the communicator has them, then as the job does; empty: not known."""
    since: float | None
    number: int
    """Of its entry."""
    sure: bool = True
    """Whether it is known to be unfinished."""

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
            peers = dict.fromkeys(peer for part in ends[at] if (peer := entries[part].peer) is not None)
            open_ones.setdefault(("batch", None), []).append(
                Talk(tuple(peers) if whole else (), entry.since, entry.record_id)
            )
        elif entry.is_p2p and at not in batched:
            stream, to = (entry.direction, entry.peer), () if entry.peer is None else (entry.peer,)
            if entry.finished:
                open_ones.pop(stream, None)
            else:
                open_ones.setdefault(stream, []).append(Talk(to, entry.since, entry.record_id))
    return [talk for talks in open_ones.values() for talk in talks]
