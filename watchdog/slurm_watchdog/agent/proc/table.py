"""All processes of this node, as the loop may look at them: which there are, since when, and their parents.

What blocks. `cmdline`, `environ`, `mem`, `smaps` take the lock of the process's memory, which a thread in a page fault
on a dead filesystem can hold through another one that waits for it. Since Linux 6.18 (seen there; not in 6.1) `stat`,
`wchan`, `syscall`, `io` and the links of descriptors block, too, while a process is in execve and waits for the memory
that it still shares with its parent (vfork): they all check who may look under the lock that execve holds. So the loop
reads `status`, `schedstat` and `cgroup` alone, which take neither, through an open descriptor of /proc/PID: it says
ESRCH once that process has ended, whoever has its number now. All else is read by a child that has become the user.
"""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

from slurm_watchdog.agent.proc.entry import (
    HANGS,
    KERNEL_THREAD,
    Entry,
    ProcessFacts,
    Stat,
    Status,
    parse_cgroup,
    parse_last_pid,
    parse_status,
)
from slurm_watchdog.agent.proc.files import _reads_own_namespace, is_the_kernels, owner_of, read_file
from slurm_watchdog.base.fair_share import fair_share
from slurm_watchdog.model.observations import BY_SLURM, Role

STRANGERS_AT_ONCE = 8
"""Processes of no job that are looked at again in one tick: is it still the one that had this pid, and still called the
same? Kernel threads never: one that is gone is missed when /proc is listed."""
CROWD_AT_ONCE = 512  # Members of a crowd looked at in one tick: 5 ms; a turn of 55,000 takes nine minutes.
HELPER_TICKS = 3  # Between two looks at a helper of a job that does not hang.
CROWD_TICKS = 6  # In so many ticks all of a smaller crowd are looked at.
YOUNG_TICKS = 4  # So long a new process is looked at in every tick: it may be about to become something else by exec.
LIST_AT_LEAST_EVERY = 6  # Ticks after which /proc is listed although the kernel says that no process was started.
NEW_AT_ONCE = 256
"""New processes that are looked at in one tick, the users in turn: at 60 us each, a user who starts 55,000 would take
the loop for three seconds. The first look takes all, for what an agent does not name looks gone to the controller."""
SAMPLED = 8192  # Processes among which a user's largest job is looked for, in every tick of a crowd.
MAX_PLACES = 8192  # Open directories of /proc/PID: a kilobyte of the kernel's memory each.
HERE_S = 3600.0  # So long after his last process a user is one of this node, for a job's last words.
KTHREADD = 2  # The parent of all other threads of the kernel.

Read = Callable[[str, int | None], bytes]  # A file of /proc, whole; relative to an open directory. Raises OSError.


@dataclass
class ProcessTable:
    """Lists /proc in every tick and remembers it. `to_identify` waits for the users' children."""

    read: Read = read_file
    entries: dict[int, Entry] = field(default_factory=dict)
    to_identify: set[int] = field(default_factory=set)  # Pids of entries of which the environment is wanted.
    ours: frozenset[int] = frozenset()
    """The agent's children. To ask about those, too, would start the child that is asked, which again would be someone
    new to be asked about."""
    changed: bool = True  # Something that decides who belongs where is not what it was.
    tick: int = 0
    unmet: Counter[int] = field(default_factory=Counter)  # New processes of each user that wait for a later tick.
    read_owner: Callable[[int], int] = owner_of
    _owners: dict[int, int] = field(default_factory=dict)  # Pid -> user, of those that wait.
    _strangers: list[int] = field(default_factory=list)
    _crowd: list[int] = field(default_factory=list)
    _crowd_at_once: int = 0
    _seen_here: dict[int, float] = field(default_factory=dict)  # User -> when a process of his ended last.
    _places: int = 0
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
        due = [pid for pid, entry in self.entries.items() if self._is_due(pid, entry)]
        strangers = self._next(self._strangers, STRANGERS_AT_ONCE, _is_stranger)
        if not self._crowd:
            crowd_size = sum(entry.crowd for entry in self.entries.values())
            self._crowd_at_once = min(CROWD_AT_ONCE, -(-crowd_size // CROWD_TICKS))
        crowd = self._next(self._crowd, self._crowd_at_once, operator.attrgetter("crowd"))
        for pid in [*due, *strangers, *crowd]:
            entry = self.entries.get(pid)
            if entry is None:
                continue
            try:
                status = parse_status(self.read_of(entry, "status"))
            except (OSError, ValueError):  # it ended
                self.remove(pid, now)
                continue
            if entry.place is None and _is_another(entry, status):  # it is met like any new one
                self.remove(pid, now)
                self._meet(pid, now)
            else:
                self._see(entry, status, now, max_names)

    def _is_due(self, pid: int, entry: Entry) -> bool:
        if entry.member is None or entry.crowd or entry.ticks < YOUNG_TICKS:
            return not entry.crowd and entry.ticks < YOUNG_TICKS
        sleeps = entry.member.role is Role.HELPER and entry.stat.state not in HANGS
        return not sleeps or (pid + self.tick) % HELPER_TICKS == 0

    def read_of(self, entry: Entry, name: str) -> bytes:
        """`status`, `schedstat` or `cgroup` of a process. Raises OSError once it has ended."""
        pid = entry.known.pid
        return self.read(f"/proc/{pid}/{name}" if entry.place is None else name, entry.place)

    def is_here(self, uid: int, now: float) -> bool:
        """Whether a user has a process on this node, our children aside, or had one within HERE_S."""
        mine = (each for each in self.entries.values() if each.known.uid == uid)
        here = any(not self._is_ours(each.known.pid, each.stat.ppid) for each in mine)
        return here or now - self._seen_here.get(uid, float("-inf")) <= HERE_S

    def _is_ours(self, pid: int, ppid: int) -> bool:
        return pid in self.ours or ppid in self.ours

    def is_there(self, pid: int, start_ticks: int) -> bool:
        """Whether this process has this number now, for certain."""
        entry = self.by_key(pid, start_ticks)
        try:
            return entry is not None and entry.place is not None and bool(self.read_of(entry, "status"))
        except OSError:
            return False

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
        return not same or bool(self.unmet) or self.tick - self._listed >= LIST_AT_LEAST_EVERY

    def _list(self, now: float) -> None:
        self._listed = self.tick
        pids = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
        for pid in self.entries.keys() - pids:
            self.remove(pid, now)
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
        place = None
        try:
            if self._places < MAX_PLACES:
                with suppress(OSError):  # no more descriptors, or it ended
                    place = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            base = "" if place is not None else f"/proc/{pid}/"
            status = parse_status(self.read(f"{base}status", place))
            flags = KERNEL_THREAD if not status.has_memory and KTHREADD in (pid, status.ppid) else 0
            cgroup = None if flags else parse_cgroup(self.read(f"{base}cgroup", place).decode(errors="replace"))
        except (OSError, ValueError):  # it ended between listing and reading
            if place is not None:
                os.close(place)
            return
        uid = 0 if flags else status.real_uid
        facts = ProcessFacts(pid, 0, status.ppid, status.comm, uid, cgroup, own_pid=status.container_pid)
        stat = Stat(status.comm, status.state, status.ppid, flags, 0, 0, status.threads)
        if flags and place is not None:
            os.close(place)
            place = None
        self._places += place is not None
        self.entries[pid] = Entry(facts, stat, state_since=now, place=place, seen_switches=status.switches)
        if not flags and not self._is_ours(pid, status.ppid):
            self.to_identify.add(pid)
        self.changed = True

    def reopen(self, entry: Entry) -> bool:
        """Opens the place of a process that the agent before this one knew. False: it has ended."""
        with suppress(OSError):
            place = os.open(f"/proc/{entry.known.pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if not _is_another(entry, parse_status(self.read("status", place))):
                entry.place, self._places = place, self._places + 1
                return True
            os.close(place)
        return False

    def remove(self, pid: int, now: float) -> None:
        """The process has ended."""
        entry = self.entries.pop(pid)
        if entry.place is not None:
            os.close(entry.place)
            self._places -= 1
        if not entry.is_kernel_thread and not self._is_ours(pid, entry.stat.ppid):
            self._seen_here = {uid: at for uid, at in self._seen_here.items() if now - at <= HERE_S}
            self._seen_here[entry.known.uid] = now
        self.changed |= entry.member is not None and not entry.crowd
        self.to_identify.discard(pid)

    def close(self) -> None:
        """The agent ends."""
        for entry in self.entries.values():
            if entry.place is not None:
                os.close(entry.place)
                entry.place = None

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

    def _see(self, entry: Entry, status: Status, now: float, max_names: int) -> None:
        old, known = entry.stat, entry.known
        is_ours = self._is_ours(known.pid, status.ppid)
        other_user = status.real_uid != known.uid and not entry.is_kernel_thread
        if (old.comm != status.comm or other_user) and entry.identified < max_names and not is_ours:
            self.to_identify.add(known.pid)
        if (old.comm, old.ppid) != (status.comm, status.ppid) or other_user:
            entry.known = replace(known, comm=status.comm, ppid=status.ppid, uid=status.real_uid)
            self.leave_crowd(entry)
        elif entry.crowd and status.state in HANGS:
            self.leave_crowd(entry)
        if entry.ticks == 1 and entry.known.cgroup is None and not entry.is_kernel_thread:
            # Seen in the moment between fork and being moved into its control group.
            try:
                cgroup = parse_cgroup(self.read_of(entry, "cgroup").decode(errors="replace"))
            except OSError:
                return  # it ended: the next look will find that
            entry.known = replace(entry.known, cgroup=cgroup)
            self.changed |= cgroup is not None
        # It ran in between, whatever its letter is.
        if old.state != status.state or entry.seen_switches != status.switches:
            entry.state_since = now
        entry.seen_switches = status.switches
        seen = (status.comm, status.state, status.ppid, status.threads)
        if seen != (old.comm, old.state, old.ppid, old.threads):
            entry.stat = Stat(*seen[:3], old.flags, old.cpu_ticks, old.start_ticks, status.threads)
        entry.ticks += 1


def _is_stranger(entry: Entry) -> bool:
    return not entry.member and entry.ticks >= YOUNG_TICKS and not entry.is_kernel_thread


def _is_another(entry: Entry, status: Status) -> bool:
    """Whether these can't be words of the same process: it has another user, or a parent that it cannot have got."""
    known = entry.known
    return status.real_uid != known.uid or (status.ppid != known.ppid and status.comm != known.comm)
