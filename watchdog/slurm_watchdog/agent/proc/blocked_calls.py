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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from slurm_watchdog.agent.proc.entry import parse_stat
from slurm_watchdog.agent.proc.system_call import (
    BlockedCallHistory,
    faults,
    int32,
    is_storage,
    is_waiting_for_storage,
    parse_finished_calls,
    parse_switches,
    parse_syscall,
)
from slurm_watchdog.knowledge.syscalls import (
    COUNTED,
    FD_ARGUMENT,
    NOT_A_FILESYSTEM_WAIT,
    PAGE_FAULT,
    PATH_ARGUMENT,
    idle_numbers,
    name_of,
)

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
ReadFile = Callable[[str], bytes]  # Reads a file of /proc in one go. Raises OSError: processes end while one looks.


class NotSeenError(OSError):
    """No one could look: it may be there or not."""


def _list_threads(pid: int) -> list[int]:
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


@dataclass
class BlockedThreads:
    """Follows the threads of all processes of jobs over the ticks."""

    machine: str
    read: ReadFile
    read_calls: Callable[[int, Sequence[int]], Iterable[tuple[int, bytes]]]
    """Lines of `syscall` of many threads of one process; those that ended are left out."""
    file_of: Callable[[int, int, int], str | None]
    """Given a pid, a thread and the number of a descriptor: the open file's name, None if there is none."""
    list_threads: Callable[[int], list[int]] = _list_threads  # Given a pid. Raises OSError.
    tracks: dict[tuple[int, int, int], BlockedCallHistory] = field(default_factory=dict)
    """By (pid, start of the process, thread)."""
    tick: int = 0
    _round: list[Key] = field(default_factory=list)  # Processes whose threads have not had their turn in this round.
    _rest: list[int] = field(default_factory=list)  # Threads of `_turn` that have not.
    _turn: Key = (0, 0)
    _caused: dict[Key, int] = field(default_factory=dict)  # Tick of the last look at all its threads.

    def __post_init__(self) -> None:
        self._idle = idle_numbers(self.machine)

    def look(self, mains: Sequence[tuple[int, int, str]], now: float) -> None:
        """Looks at the main threads of these (pid, start, state as in /proc/PID/stat), and at all that is followed."""
        self.tick += 1
        seen = set()
        for pid, start, state in mains:
            key = (pid, start, pid)
            seen.add(key)
            if state in ("D", "S"):
                self._look_at(key, now, state)
            else:
                self.tracks.pop(key, None)
        for key in [key for key in self.tracks if key not in seen]:
            self._look_at(key, now)

    def scan(
        self,
        processes: Sequence[tuple[int, int, int]],
        causes: set[Key],
        now: float,
        turn: Sequence[tuple[Key, Sequence[int]]],
    ) -> None:
        """Threads other than the main ones, of these (pid, start, number of threads): those of `take_turn`, or all
        where there is cause. A main thread that is blocked is cause by itself."""
        causes = causes | {key[:2] for key, track in self.tracks.items() if key[0] == key[2] and track.sightings >= 2}
        self._caused = {key: tick for key, tick in self._caused.items() if key in causes}
        many = {(pid, start) for pid, start, threads in processes if threads > 1}
        for key in causes & many:
            if self.tick - self._caused.get(key, -AGAIN_EVERY) >= AGAIN_EVERY:
                self._caused[key] = self.tick
                self._look_at_all(key, self._threads_of(key), now)
        for process, threads in turn:
            self._look_at_all(process, threads, now)

    def take_turn(self, processes: Sequence[tuple[int, int, int]]) -> list[tuple[Key, list[int]]]:
        """The threads whose turn it is in this tick, by process: to be called once a tick."""
        many = {(pid, start) for pid, start, threads in processes if threads > 1}
        chosen: list[tuple[Key, list[int]]] = []
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
            chosen.append((self._turn, taken))
        return chosen

    def _threads_of(self, key: Key) -> list[int]:
        try:
            return [thread for thread in self.list_threads(key[0])[:MAX_THREADS] if thread != key[0]]
        except OSError:  # it ended
            return []

    def _look_at_all(self, process: Key, threads: Sequence[int], now: float) -> None:
        wanted = [
            thread for thread in threads if (*process, thread) not in self.tracks
        ]  # else it was looked at already
        for thread, line in self.read_calls(process[0], wanted):
            if line.split(b" ", 1)[0] not in self._idle:
                self._take_look((*process, thread), now, line)

    def forget(self, alive: set[tuple[int, int]]) -> None:
        """Drops what is about processes other than these (pid, start)."""
        for key in [key for key in self.tracks if key[:2] not in alive]:
            del self.tracks[key]

    def blocked(self, now: float) -> dict[tuple[int, int, int], BlockedCallHistory]:
        """Threads that were in the same call in two looks at least, and may wait for storage."""
        return {
            key: track for key, track in self.tracks.items() if track.sightings >= 2 and is_waiting_for_storage(track)
        }

    def _look_at(self, key: tuple[int, int, int], now: float, state: str | None = None) -> None:
        """`state` is the thread's, where it is known."""
        try:
            line = self.read(f"/proc/{key[0]}/task/{key[2]}/syscall")
        except NotSeenError:
            self._drop_if_unseen(key, now)
            return
        except OSError:  # the thread ended, or is another user's
            line = b""
        if state != "D" and line.split(b" ", 1)[0] in self._idle:
            line = b""
        self._take_look(key, now, line)

    def _take_look(self, key: tuple[int, int, int], now: float, line: bytes) -> None:
        try:
            track = self._read_track(key[0], key[2], line, self.tracks.get(key), now)
        except NotSeenError:
            self._drop_if_unseen(key, now)
            return
        except (OSError, ValueError, IndexError):
            track = None
        if track is not None:
            self.tracks[key] = track
        elif key in self.tracks:
            del self.tracks[key]

    def _drop_if_unseen(self, key: tuple[int, int, int], now: float) -> None:
        track = self.tracks.get(key)
        if track is not None and now - (track.seen_at or now) > UNSEEN_S:
            del self.tracks[key]

    def _read_track(
        self, pid: int, thread: int, line: bytes, old: BlockedCallHistory | None, now: float
    ) -> BlockedCallHistory | None:
        call = parse_syscall(line)
        if call is None:
            return None
        task = f"/proc/{pid}/task/{thread}"
        stat = parse_stat(self.read(f"{task}/stat"))
        state = stat.state
        if state not in ("D", "S"):
            return None
        name = name_of(call.number, self.machine) if call.number >= 0 else None
        concerns_a_file = name in FD_ARGUMENT or name in PATH_ARGUMENT
        if state == "S" and call.number >= 0 and (not concerns_a_file or name in NOT_A_FILESYSTEM_WAIT):
            return None
        path = None
        if name in FD_ARGUMENT:
            path = self.file_of(pid, thread, int32(call.args[FD_ARGUMENT[name]]))
            if state == "S" and not is_storage(path):
                return None
        where = self.read(f"{task}/wchan").decode(errors="replace")
        wchan = where if where not in ("", "0") else None
        if faults(call, name, path, state, wchan):
            name, path = PAGE_FAULT, None
        elif state == "S" and call.number < 0:
            return None
        switches = parse_switches(self.read(f"{task}/status"))
        calls = parse_finished_calls(self.read(f"{task}/io")) if name in COUNTED else None
        new = BlockedCallHistory(
            line, call, state, wchan, name, stat.cpu_ticks, switches, calls, now, path=path, seen_at=now
        )
        if old is not None and _is_same_call(old, new, now):
            new.first_at, new.sightings, new.target = old.first_at, old.sightings + 1, old.target
            new.guess = old.guess
            new.cpu_ticks = old.cpu_ticks  # what it used is counted from the first sighting on
        # A pipe or a lock is followed no further; a call seen for the first time costs one look, no more.
        return new if is_waiting_for_storage(new) else None


def _is_same_call(old: BlockedCallHistory, new: BlockedCallHistory, now: float) -> bool:
    if old.line != new.line:
        return False
    stayed = old.switches == new.switches or (old.calls is not None and old.calls == new.calls)
    idle_ticks = 1 + IDLE_SHARE * (now - old.first_at) * os.sysconf("SC_CLK_TCK")
    return stayed and new.cpu_ticks - old.cpu_ticks <= idle_ticks
