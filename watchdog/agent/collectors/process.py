"""The processes of all jobs on this node, in every tick, from /proc.

In the loop only stat, status, cgroup, io, wchan, syscall and links of descriptors are read: none takes the memory's lock of
the process. Environment and command line, which do, are read once, at discovery, in the `identify` child.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from watchdog.agent.collectors.blocked import (
    FULL_SCAN_EVERY,
    BlockedThreads,
    Target,
    Track,
    describe_blocked,
    is_storage,
    parse_io_bytes,
)
from watchdog.agent.identify import describe_mount
from watchdog.agent.jobs import Key, Known, Member, Place, assign, parse_cgroup, parse_stepd
from watchdog.agent.mounts import Mount
from watchdog.agent.probe import Answer, Probes
from watchdog.knowledge.syscalls import PATH_ARGUMENT
from watchdog.model import Blocked, Process, Role

log = logging.getLogger(__name__)

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
KERNEL_THREAD = 0x00200000  # PF_KTHREAD, linux/sched.h
STRANGERS_EVERY = 12
"""Ticks between two looks at a process that belongs to no job: is it still the one that had this pid?"""
YOUNG_TICKS = 4
"""So long a new process is looked at in every tick: it may be about to become something else by exec."""
MAX_IDENTIFIED_AT_ONCE = 256
MAX_IDENTIFICATIONS = 20
"""Programs may rename themselves; after so many new names it is no longer news."""
SETTLE_S = 0.15
"""The loop gives its children this long for answers that improve the present report. It never waits for more."""
IDENTIFY, IDENTIFY_STUCK = "identify", "identify:stuck"


@dataclass(frozen=True)
class Stat:
    """What is used of /proc/PID/stat (see proc(5))."""

    comm: str
    state: str
    ppid: int
    flags: int
    cpu_ticks: int
    start_ticks: int


def parse_stat(text: bytes) -> Stat:
    """The fields of /proc/PID/stat. The name in it may hold anything, brackets and newlines included. Raises ValueError."""
    begin, end = text.index(b"("), text.rindex(b")")
    fields = text[end + 2 :].split(b" ", 21)
    try:
        return Stat(
            comm=text[begin + 1 : end].decode(errors="replace"),
            state=fields[0].decode(),
            ppid=int(fields[1]),
            flags=int(fields[6]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            start_ticks=int(fields[19]),
        )
    except IndexError as error:
        raise ValueError(f"this is no line of stat: {text[:80]!r}") from error


def parse_uid(status: bytes) -> int:
    """The effective user in /proc/PID/status, -1 where it is missing."""
    for line in status.splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[2])
    return -1


def read_file(path: str) -> bytes:
    """A small file of /proc, whole, without the cost of a file object. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 8192)
    finally:
        os.close(fd)


@dataclass
class Entry:
    """One process that was seen: what is known for good, and what it was like in the last tick."""

    known: Known
    stat: Stat
    ticks: int = 0
    identified: int = 0
    needs_identity: bool = True
    member: Member | None = None
    io_bytes: int | None = None


@dataclass
class ProcessCollector:
    """Lists /proc in every tick and remembers what it learnt."""

    probes: Probes
    mounts: tuple[Mount, ...]
    """The agent's own, read at its start and renewed by a child: where a process's own table cannot be had in time."""
    machine: str = field(default_factory=lambda: os.uname().machine)
    entries: dict[int, Entry] = field(default_factory=dict)
    members: dict[Key, Member] = field(default_factory=dict)
    tick: int = 0
    _changed: bool = True
    _resolving: set[tuple[tuple[int, int, int], bytes]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.threads = BlockedThreads(self.machine, read_file)

    def collect(self, now: float, deadline_s: float) -> tuple[Process, ...]:
        """All processes of jobs on this node, as they are now."""
        self.tick += 1
        self._list()
        requests = self._ask_identities(now, deadline_s)
        if requests:
            self.probes.settle(SETTLE_S, requests)
        if self._changed:
            self._assign()
        mine = [entry for entry in self.entries.values() if entry.member is not None]
        for entry in mine:
            self._look(entry, now)
        self.threads.forget({(entry.known.pid, entry.known.start_ticks) for entry in mine})
        blocked = self._blocked(now, deadline_s)
        return tuple(self._describe(entry, blocked) for entry in mine)

    def environ_of(self, job_id: str) -> Mapping[str, str]:
        """What some process of the job has in its environment (the variables of jobs.ENVIRONMENT); empty if nothing is known."""
        for entry in self.entries.values():
            environ = entry.known.environ or {}
            if entry.member is not None and entry.member.job_id == job_id and "SLURM_JOB_ID" in environ:
                return environ
        return {}

    # -- who is there ------------------------------------------------------------------------------------------

    def _list(self) -> None:
        pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
        for pid in [pid for pid in self.entries if pid not in pids]:
            self._changed |= self.entries.pop(pid).member is not None
        for pid in pids:
            entry = self.entries.get(pid)
            if entry is not None and entry.member is None and entry.ticks >= YOUNG_TICKS:
                entry.ticks += 1
                if (pid + self.tick) % STRANGERS_EVERY:
                    continue
            try:
                self._see(pid, entry, parse_stat(read_file(f"/proc/{pid}/stat")))
            except (OSError, ValueError):  # it ended between listing and reading
                if entry is not None:
                    self._changed |= self.entries.pop(pid).member is not None

    def _see(self, pid: int, entry: Entry | None, stat: Stat) -> None:
        if entry is None or entry.stat.start_ticks != stat.start_ticks:
            self.entries[pid] = self._discover(pid, stat)
            self._changed = True
            return
        if entry.stat.comm != stat.comm and entry.identified < MAX_IDENTIFICATIONS:
            entry.needs_identity = True
        if (entry.stat.comm, entry.stat.ppid) != (stat.comm, stat.ppid):
            entry.known = replace(entry.known, comm=stat.comm, ppid=stat.ppid)
            self._changed = True
        if entry.ticks == 1 and entry.known.cgroup is None and not stat.flags & KERNEL_THREAD:
            # Seen in the moment between fork and being moved into its control group.
            entry.known = replace(entry.known, cgroup=_read_cgroup(pid))
            self._changed |= entry.known.cgroup is not None
        entry.stat = stat
        entry.ticks += 1

    def _discover(self, pid: int, stat: Stat) -> Entry:
        if stat.flags & KERNEL_THREAD:
            known = Known(pid, stat.start_ticks, stat.ppid, stat.comm, 0)
            return Entry(known, stat, needs_identity=False)
        uid = parse_uid(read_file(f"/proc/{pid}/status"))
        return Entry(Known(pid, stat.start_ticks, stat.ppid, stat.comm, uid, _read_cgroup(pid)), stat)

    def _assign(self) -> None:
        ours = self._own_tree()
        table = {pid: entry.known for pid, entry in self.entries.items() if pid not in ours}
        assigned = assign(table, self.members)
        for pid, entry in self.entries.items():
            entry.member = assigned.get(pid)
        self.members = {(pid, table[pid].start_ticks): member for pid, member in assigned.items()}
        self._changed = False

    def _own_tree(self) -> set[int]:
        """The agent, and all below the parent of its children: it may itself run inside a job, or have started one."""
        children: dict[int, list[int]] = {}
        for pid, entry in self.entries.items():
            children.setdefault(entry.known.ppid, []).append(pid)
        tree, todo = {os.getpid()}, [self.probes.spawner_pid]
        while todo:
            pid = todo.pop()
            if pid not in tree:
                tree.add(pid)
                todo += children.get(pid, [])
        return tree

    # -- identities --------------------------------------------------------------------------------------------

    def _ask_identities(self, now: float, deadline_s: float) -> list[int]:
        waiting = [entry for entry in self.entries.values() if entry.needs_identity]
        requests = []
        for key, group in (
            (IDENTIFY, [entry for entry in waiting if entry.stat.state != "D"]),
            (IDENTIFY_STUCK, [entry for entry in waiting if entry.stat.state == "D"]),
        ):
            group = group[:MAX_IDENTIFIED_AT_ONCE]
            keys = [(entry.known.pid, entry.known.start_ticks) for entry in group]
            then = partial(self._take_identities, keys=keys)
            request = self.probes.ask(key, "identify", keys, deadline_s, now, then) if keys else None
            if request is not None:
                requests.append(request)
                for entry in group:
                    entry.needs_identity = False
        return requests

    def _take_identities(self, answer: Answer, keys: list[Key]) -> None:
        for pid, start in keys if answer.error else []:
            if (entry := self._entry(pid, start)) and entry.identified < MAX_IDENTIFICATIONS:
                entry.needs_identity = True
                entry.identified += 1
        for each in answer.value or ():
            entry = self._entry(each["pid"], each["start"])
            if entry is None:
                continue
            entry.identified += 1
            environ = each["environ"]
            if environ is None or (not environ and entry.known.environ):
                continue  # it is ending: what was known before is better
            stepd: Place | None = parse_stepd(each["title"]) if each["title"] else None
            entry.known = replace(
                entry.known, environ=environ, exe=each["exe"], stepd=stepd or entry.known.stepd
            )
            self._changed = True

    def _entry(self, pid: int, start_ticks: int) -> Entry | None:
        entry = self.entries.get(pid)
        return entry if entry is not None and entry.known.start_ticks == start_ticks else None

    # -- what they do ------------------------------------------------------------------------------------------

    def _look(self, entry: Entry, now: float) -> None:
        known, member = entry.known, entry.member
        if entry.stat.state in ("Z", "X"):
            return
        if member is not None and member.role is not Role.HELPER:
            try:
                entry.io_bytes = parse_io_bytes(read_file(f"/proc/{known.pid}/io"))
            except (OSError, ValueError):
                entry.io_bytes = None
        full = entry.ticks < 2 or (known.pid + self.tick) % FULL_SCAN_EVERY == 0
        try:
            self.threads.look(known.pid, known.start_ticks, entry.stat.state, now, full)
        except OSError:
            pass  # it ended, or is another user's and we are not root: then nothing is said about its calls

    def _blocked(self, now: float, deadline_s: float) -> dict[Key, Blocked]:
        tracks = self.threads.blocked(now)
        self._resolve(tracks, now, deadline_s)
        longest: dict[Key, tuple[int, Track]] = {}
        for (pid, start, thread), track in self.threads.blocked(now).items():
            if track.state != "D" and track.syscall in PATH_ARGUMENT and track.target is None:
                continue
            best = longest.get((pid, start))
            if best is None or _rank_of(track) < _rank_of(best[1]):
                longest[pid, start] = (thread, track)
        return {key: describe_blocked(thread, track, now) for key, (thread, track) in longest.items()}

    def _resolve(self, tracks: dict[tuple[int, int, int], Track], now: float, deadline_s: float) -> None:
        """Path and mount of each blocked call: from the child, and until it has answered from what is known already."""
        wanted = [
            (key, track)
            for key, track in tracks.items()
            if track.target is None and track.call.number >= 0 and (key, track.line) not in self._resolving
        ]
        if wanted:
            questions = [
                {"pid": key[0], "syscall": track.syscall, "args": track.call.args} for key, track in wanted
            ]
            asked = [(key, track.line) for key, track in wanted]
            then = partial(self._take_targets, asked=asked)
            request = self.probes.ask(IDENTIFY, "resolve", questions, deadline_s, now, then)
            if request is not None:
                self._resolving |= set(asked)
                self.probes.settle(SETTLE_S, [request])
        for track in tracks.values():
            if track.guess is None and is_storage(track.path):
                track.guess = Target(**describe_mount(track.path or "", self.mounts))

    def _take_targets(self, answer: Answer, asked: list[tuple[tuple[int, int, int], bytes]]) -> None:
        self._resolving -= set(asked)
        for (key, line), each in zip(asked, answer.value or (), strict=False):
            track = self.threads.tracks.get(key)
            if track is not None and track.line == line:
                track.target = Target(
                    each.get("path"), each.get("mount"), each.get("fs_type"), each.get("device")
                )

    def _describe(self, entry: Entry, blocked: dict[Key, Blocked]) -> Process:
        known, member, stat = entry.known, entry.member, entry.stat
        assert member is not None
        return Process(
            pid=known.pid,
            start_ticks=known.start_ticks,
            job_id=member.job_id,
            role=member.role,
            comm=known.comm,
            state=stat.state,
            uid=known.uid,
            step_id=member.step_id,
            rank=member.rank,
            local_rank=member.local_rank,
            world_size=member.world_size,
            cpu_s=stat.cpu_ticks / CLOCK_TICKS,
            io_bytes=entry.io_bytes,
            blocked=blocked.get((known.pid, known.start_ticks)),
        )


def _rank_of(track: Track) -> tuple[bool, float]:
    """The thread to report of several: one whose mount is known before others, then the longest blocked."""
    known = track.target if track.target and track.target.mount else track.guess
    return (known is None or known.mount is None, track.first_at)


def _read_cgroup(pid: int) -> Place | None:
    return parse_cgroup(read_file(f"/proc/{pid}/cgroup").decode(errors="replace"))
