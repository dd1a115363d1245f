"""Who stands in one system call on one file. `Blocked` is about the call, its file and the time, not about the letter
D.

A thread is followed from the moment it is first seen in a call that concerns a file (or in state D). It is still the
same call if the line of /proc/PID/task/TID/syscall is the same to the letter and one of two things proves that the
thread did not leave it in between: it was never switched out again (voluntary switches unchanged), or its count of
finished reads and writes is unchanged. The second holds where a filesystem's client wakes up by a timer to look again.
A thread that uses the CPU meanwhile is not blocked: it may copy gigabytes in one call.

The main thread of a rank is looked at in every tick, and so is every thread that is followed. All other threads have
their turn, a share of them in each tick, so that each is seen once in ROUND_TICKS; those of a process that gives cause
come at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from slurm_watchdog.agent.proc.system_call import BlockedCallHistory, SeenCall

MAX_THREADS = 1024  # Threads of one process that are looked at: a rank has 50 to 300.
ROUND_TICKS = 12
"""Ticks in which every thread of every process is looked at once: a minute at the usual interval. This was
the agent's dearest habit: a look costs 11 us, and a node of 8 ranks has 512 threads. Main threads, and all of
a process that gives cause, do not wait."""
MIN_AT_ONCE, MAX_AT_ONCE = 32, 192  # Threads that are looked at in one tick for no cause.
AGAIN_EVERY = 3  # Ticks between two looks at all threads of a process that gives cause.
IDLE_SHARE = 0.002  # CPU time, as a share of the time blocked, that polling in a wait may cost; one clock tick on top.
UNSEEN_S = 30.0  # So long a thread that could not be looked at stays where it was: a replaced child ends no stall.

Key = tuple[int, int]  # Process and its start, in clock ticks after boot.
ThreadKey = tuple[int, int, int]  # The same, and a thread.


def _list_threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


@dataclass
class BlockedThreads:
    """Follows the threads of all processes of jobs over the ticks."""

    list_threads: Callable[[int], list[int]] = _list_threads  # Given a pid. Raises OSError.
    tracks: dict[ThreadKey, BlockedCallHistory] = field(default_factory=dict)
    tick: int = 0
    _round: list[Key] = field(default_factory=list)  # Processes whose threads have not had their turn in this round.
    _rest: list[int] = field(default_factory=list)  # Threads of `_turn` that have not.
    _turn: Key = (0, 0)
    _caused: dict[Key, int] = field(default_factory=dict)  # Tick of the last look at all its threads.

    def wanted(
        self, processes: Sequence[tuple[int, int, int]], mains: Collection[Key], causes: Collection[Key]
    ) -> list[ThreadKey]:
        """The threads to look at in this tick, of these (pid, start, number of threads): the main ones of `mains`,
        those that are followed, those whose turn it is, and all of a process where there is cause. A main thread that
        is followed is cause by itself. To be called once a tick; what is about other processes is dropped."""
        self.tick += 1
        alive = {(pid, start) for pid, start, _ in processes}
        self.tracks = {key: track for key, track in self.tracks.items() if key[:2] in alive}
        found = dict.fromkeys([*((pid, start, pid) for pid, start in mains), *self.tracks])
        many = {(pid, start) for pid, start, threads in processes if threads > 1}
        causes = {*causes, *(key[:2] for key in self.tracks if key[0] == key[2])} & many
        self._caused = {key: tick for key, tick in self._caused.items() if key in causes}
        for key in causes:
            if self.tick - self._caused.get(key, -AGAIN_EVERY) >= AGAIN_EVERY:
                self._caused[key] = self.tick
                found |= dict.fromkeys((*key, thread) for thread in self._threads_of(key))
        return list(found | dict.fromkeys(self._take_turn(processes, many)))

    def take(
        self,
        asked: Sequence[ThreadKey],
        seen: Mapping[tuple[int, int], SeenCall | None],
        now: float,
        stuck: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """What was seen of the threads that were `asked` about, by pid and thread: their calls, None where one is in
        none that matters, or has ended. Of one that is not there nothing is known: no one could look. `stuck`: the
        processes on which a child hangs, and the state of their main threads, which needs no child. Their threads stay
        where they were, and grow by nothing, unless that state shows that the main one has left its call."""
        for key in asked:
            old, found = self.tracks.get(key), seen.get((key[0], key[2]))
            if found is not None:
                if old is not None and _is_same_call(old, found, now):
                    self.tracks[key] = replace(old, seen=found, seen_at=now, sightings=old.sightings + 1)
                else:
                    self.tracks[key] = BlockedCallHistory(found, now, now, found.cpu_ticks)
            elif old is not None and (key[0], key[2]) in seen:
                del self.tracks[key]
            elif old is not None and key[0] in stuck and (key[0] != key[2] or stuck[key[0]] == old.seen.state):
                self.tracks[key] = replace(old, held_at=now)
            elif old is not None and now - max(old.seen_at, old.held_at) > UNSEEN_S:
                del self.tracks[key]

    def blocked(self) -> dict[ThreadKey, BlockedCallHistory]:
        """Threads that were in the same call in two looks at least, and may wait for storage."""
        return {key: track for key, track in self.tracks.items() if track.sightings >= 2 and track.may_wait}

    def _take_turn(self, processes: Sequence[tuple[int, int, int]], many: Collection[Key]) -> list[ThreadKey]:
        chosen: list[ThreadKey] = []
        total = sum(threads - 1 for _, _, threads in processes if threads > 1)
        budget = min(max(-(-total // ROUND_TICKS), MIN_AT_ONCE), MAX_AT_ONCE)
        renewed = False
        if self._turn not in many:
            self._rest = []
        while budget > 0:
            if not self._rest:
                if not self._round:
                    if renewed:
                        break  # all have been looked at in this tick
                    self._round, renewed = sorted(many), True
                if not self._round:
                    break
                self._turn = self._round.pop()
                self._rest = self._threads_of(self._turn) if self._turn in many else []
                budget -= 1
            taken, self._rest = self._rest[:budget], self._rest[budget:]
            budget -= len(taken)
            chosen += [(*self._turn, thread) for thread in taken]
        return chosen

    def _threads_of(self, key: Key) -> list[int]:
        try:
            return [thread for thread in self.list_threads(key[0])[:MAX_THREADS] if thread != key[0]]
        except OSError:  # it ended
            return []


def _is_same_call(old: BlockedCallHistory, new: SeenCall, now: float) -> bool:
    seen = old.seen
    if seen.line != new.line:
        return False
    stayed = seen.switches == new.switches or (seen.calls is not None and seen.calls == new.calls)
    idle_ticks = 1 + IDLE_SHARE * (now - old.first_at) * os.sysconf("SC_CLK_TCK")
    return stayed and new.cpu_ticks - old.first_ticks <= idle_ticks
