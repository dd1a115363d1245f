"""All processes of this node, as the loop may look at them: which there are, since when, and their parents.

What blocks. `cmdline`, `environ`, `mem`, `smaps` take the lock of the process's memory, which a thread in a page fault
on a dead filesystem can hold through another one that waits for it. Since Linux 6.18 (seen there; not in 6.1) `stat`,
`wchan`, `syscall`, `io` and the links of descriptors block, too, while a process is in execve and waits for the memory
that it still shares with its parent (vfork): they all check who may look under the lock that execve holds. `status`,
`statm`, `comm` and `cgroup` take neither. So a process that is new is asked for its `status` first. If that says D,
nothing else of it is read in the loop until a child has read it and come back.
"""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice

from slurm_watchdog.agent.proc.entry import (
    HANGS,
    KERNEL_THREAD,
    Entry,
    ProcessFacts,
    Stat,
    Status,
    parse_last_pid,
    parse_stat,
    parse_status,
)
from slurm_watchdog.agent.proc.files import (
    _reads_own_namespace,
    is_the_kernels,
    owner_of,
    read_cgroup,
    read_file,
    read_stat,
)
from slurm_watchdog.base.fair_share import fair_share
from slurm_watchdog.model.observations import BY_SLURM

STRANGERS_AT_ONCE = 8
"""Processes of no job that are looked at again in one tick: is it still the one that had this pid, and still called the
same? Kernel threads never: one that is gone is missed when /proc is listed."""
CROWD_AT_ONCE = 512  # Members of a crowd looked at in one tick: 5 ms; a turn of 55,000 takes nine minutes.
YOUNG_TICKS = 4  # So long a new process is looked at in every tick: it may be about to become something else by exec.
LIST_AT_LEAST_EVERY = 6  # Ticks after which /proc is listed although the kernel says that no process was started.
NEW_AT_ONCE = 256
"""New processes that are looked at in one tick, the users in turn: at 60 us each, a user who starts 55,000 would take
the loop for three seconds. The first look takes all, for what an agent does not name looks gone to the controller."""
SAMPLED = 8192  # Processes among which a user's largest job is looked for, in every tick of a crowd.


@dataclass
class ProcessTable:
    """Lists /proc in every tick and remembers it. `to_identify` and `suspects` wait for the child `identify`."""

    read: Callable[[str], bytes] = read_file  # A file of /proc, whole. Raises OSError.
    entries: dict[int, Entry] = field(default_factory=dict)
    to_identify: set[int] = field(default_factory=set)  # Pids of entries of which the environment is wanted.
    suspects: set[int] = field(default_factory=set)  # Only a child may read more: in D from the first.
    spawner: int = -1
    """A process with this parent is a child of the agent's own. To ask about those, too, would start the child
    that is asked, which again would be someone new to be asked about."""
    changed: bool = True  # Something that decides who belongs where is not what it was.
    tick: int = 0
    unmet: Counter[int] = field(default_factory=Counter)  # New processes of each user that wait for a later tick.
    read_owner: Callable[[int], int] = owner_of
    _owners: dict[int, int] = field(default_factory=dict)  # Pid -> user, of those that wait.
    _strangers: list[int] = field(default_factory=list)
    _crowd: list[int] = field(default_factory=list)
    _last_pid: int = 0
    _listed: int = 0

    def __post_init__(self) -> None:
        # In another PID namespace than its /proc the kernel's word about the last pid is about other processes.
        self._trusts_last_pid = _reads_own_namespace() and is_the_kernels("/proc/loadavg")

    def look(self, now: float, max_names: int) -> None:
        """One look at all that may have changed. A process that took more than `max_names` names is asked no more."""
        self.tick += 1
        if self._may_be_new():
            self._list(now)
        due = [
            pid
            for pid, entry in self.entries.items()
            if (not entry.crowd if entry.member else entry.ticks < YOUNG_TICKS)
        ]
        strangers = self._next(self._strangers, STRANGERS_AT_ONCE, _is_stranger)
        crowd = self._next(self._crowd, CROWD_AT_ONCE, operator.attrgetter("crowd"))
        for pid in [*due, *strangers, *crowd]:
            entry = self.entries.get(pid)
            if entry is None:
                continue
            try:
                stat = parse_stat(self.read(f"/proc/{pid}/stat"))
            except (OSError, ValueError):  # it ended
                self._remove(pid)
                continue
            if entry.stat.start_ticks != stat.start_ticks:  # the pid is another's now: it is met like any new one
                self._remove(pid)
                self._meet(pid, now)
            else:
                self._see(entry, stat, now, max_names)

    def add(self, pid: int, stat: Stat, status: Status, now: float) -> Entry | None:
        """A process that is new; None if it ended meanwhile."""
        if stat.flags & KERNEL_THREAD:
            known = ProcessFacts(pid, stat.start_ticks, stat.ppid, stat.comm, 0)
        else:
            try:
                cgroup = read_cgroup(pid)
            except OSError:
                return None
            known = ProcessFacts(
                pid, stat.start_ticks, stat.ppid, stat.comm, status.real_uid, cgroup, own_pid=status.container_pid
            )
            if stat.ppid != self.spawner:
                self.to_identify.add(pid)
        entry = self.entries[pid] = Entry(known, stat, state_since=now)
        self.suspects.discard(pid)
        self.changed = True
        return entry

    def by_key(self, pid: int, start_ticks: int) -> Entry | None:
        """The process, unless it is gone."""
        entry = self.entries.get(pid)
        return entry if entry is not None and entry.known.start_ticks == start_ticks else None

    def below(self, pid: int) -> set[int]:
        """The process and all that descends from it."""
        children: dict[int, list[int]] = {}
        for each, entry in self.entries.items():
            if not entry.crowd:
                children.setdefault(entry.known.ppid, []).append(each)
        tree: set[int] = set()
        todo = [pid]
        while todo:
            each = todo.pop()
            if each not in tree:
                tree.add(each)
                todo += children.get(each, [])
        return tree

    def _may_be_new(self) -> bool:
        last = parse_last_pid(read_file("/proc/loadavg")) if self._trusts_last_pid else 0
        same = last != 0 and last == self._last_pid
        self._last_pid = last
        return not same or bool(self.suspects) or bool(self.unmet) or self.tick - self._listed >= LIST_AT_LEAST_EVERY

    def _list(self, now: float) -> None:
        self._listed = self.tick
        pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
        for pid in self.entries.keys() - pids:
            self._remove(pid)
        self.suspects &= pids
        for pid in self._next_new(pids - self.entries.keys()):
            self._meet(pid, now)

    def _next_new(self, pids: set[int]) -> Iterable[int]:
        """Those that are looked at in this tick: one user's thousands cost another none of his few."""
        if len(pids) <= NEW_AT_ONCE or not self.entries:
            self.unmet, self._owners = Counter(), {}
            return pids
        self._owners = {pid: self._owners[pid] if pid in self._owners else self.read_owner(pid) for pid in pids}
        taken, _ = fair_share(sorted(pids), NEW_AT_ONCE, self._owners.__getitem__)
        self.unmet = Counter(self._owners[pid] for pid in pids.difference(taken))
        return taken

    def job_of(self, uid: int) -> str | None:
        """The job with most of this user's processes here, of the first SAMPLED by Slurm's word; None without one."""
        jobs = Counter(
            entry.member.job_id
            for entry in islice(self.entries.values(), SAMPLED)
            if entry.known.uid == uid and entry.member is not None and entry.member.by == BY_SLURM
        )
        return jobs.most_common(1)[0][0] if jobs else None

    def _meet(self, pid: int, now: float) -> None:
        try:
            status = parse_status(read_file(f"/proc/{pid}/status"))
            if status.state == "D" and status.has_memory:
                self.suspects.add(pid)
                return
            self.add(pid, read_stat(pid), status, now)
        except (OSError, ValueError):  # it ended between listing and reading
            self.suspects.discard(pid)

    def _remove(self, pid: int) -> None:
        entry = self.entries.pop(pid)
        self.changed |= entry.member is not None and not entry.crowd
        self.to_identify.discard(pid)

    def _next(self, waiting: list[int], at_once: int, wanted: Callable[[Entry], bool]) -> list[int]:
        """The first of those that wait for their turn and still are `wanted`; when all had it, it begins again."""
        if not waiting:
            waiting += [pid for pid, entry in self.entries.items() if wanted(entry)]
        taken = waiting[:at_once]
        del waiting[:at_once]
        return [pid for pid in taken if (entry := self.entries.get(pid)) is not None and wanted(entry)]

    def leave_crowd(self, entry: Entry) -> None:
        """It is of interest by itself: where it belongs is decided again."""
        entry.crowd, self.changed = False, True

    def _see(self, entry: Entry, stat: Stat, now: float, max_names: int) -> None:
        old = entry.stat
        if old.comm != stat.comm and entry.identified < max_names and stat.ppid != self.spawner:
            self.to_identify.add(entry.known.pid)
        if (old.comm, old.ppid) != (stat.comm, stat.ppid):
            entry.known = replace(entry.known, comm=stat.comm, ppid=stat.ppid)
            self.leave_crowd(entry)
        elif entry.crowd and stat.state in HANGS:
            self.leave_crowd(entry)
        if entry.ticks == 1 and entry.known.cgroup is None and not entry.is_kernel_thread:
            # Seen in the moment between fork and being moved into its control group.
            try:
                entry.known = replace(entry.known, cgroup=read_cgroup(entry.known.pid))
            except OSError:
                return  # it ended: the next look will find that
            self.changed |= entry.known.cgroup is not None
        # It ran in between, whatever its letter is. A debugger may hold the main thread alone: see Entry.note_switches.
        if old.state != stat.state or (stat.state != "t" and old.cpu_ticks != stat.cpu_ticks):
            entry.state_since = now
        entry.stat = stat
        entry.ticks += 1


def _is_stranger(entry: Entry) -> bool:
    return not entry.member and entry.ticks >= YOUNG_TICKS and not entry.is_kernel_thread
