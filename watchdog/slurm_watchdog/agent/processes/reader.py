"""The processes of all jobs on this node, in every tick, from /proc.

In the loop only status, schedstat and cgroup are read, which nothing can hold up (proc.table). All else comes from the
children of the users whose processes they are (processes.user_looks).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

import msgspec

from slurm_watchdog.agent.children.become_user import may_become_others
from slurm_watchdog.agent.children.requests import ThreadFile
from slurm_watchdog.agent.proc.blocked_calls import BlockedThreads
from slurm_watchdog.agent.proc.entry import HANGS, LASTING_STATES, Entry, Key, ProcessFacts
from slurm_watchdog.agent.proc.files import parse_runnable_s
from slurm_watchdog.agent.proc.job_membership import assign
from slurm_watchdog.agent.proc.system_call import (
    BlockedCallHistory,
    describe_blocked,
    is_storage,
)
from slurm_watchdog.agent.proc.table import YOUNG_TICKS
from slurm_watchdog.agent.processes.identify import mount_target
from slurm_watchdog.agent.processes.identity_cache import (
    MAX_DIRECTORIES,
    MAX_IDENTIFICATIONS,
    Identities,
)
from slurm_watchdog.agent.processes.thread_reads import ThreadReads
from slurm_watchdog.agent.processes.user_looks import UserLooks
from slurm_watchdog.base.fair_share import fair_share
from slurm_watchdog.base.mounts import Mount
from slurm_watchdog.knowledge.launchers import HEARTBEAT_VARIABLE
from slurm_watchdog.knowledge.ray_train import WorkerRank
from slurm_watchdog.knowledge.syscalls import PATH_ARGUMENT
from slurm_watchdog.model.observations import BY_SLURM, Blocked, Process, Role
from slurm_watchdog.model.report import LeftOut

# Which members of jobs are looked at in every tick, and named in each report, where there are too many: the others are
# a crowd, counted, and looked at in turn. Helpers of a job (shells, compilers, the short programs of `xargs -P 128`)
# say little about a training, and come and go by the thousand; a look at each of 55,000 in every tick would cost a
# seventh of a core. That one of the crowd is there is seen whenever /proc is listed; that it hangs, when its turn
# comes: then it is watched like a rank.

HELPERS_OF_JOB = 64  # Of one job on this node, beside those that hang: shells, launchers and `tee` are a dozen.
WATCHED = 2048  # Of all jobs on this node. About 300 bytes each in a report; the controller takes 4,096 (state.door).
MAX_LEFT_OUT = 64  # Jobs and users for which it is reported how much was left out.
ORDER = {Role.RANK: 0, Role.WORKER: 1, Role.HELPER: 2}
RECONSIDER_EVERY = 120
"""Ticks, ten minutes, after which the crowd is chosen again, for there may be room again. Who leaves it
sooner: one that hangs, or changes."""


def pick_crowd(mine: Iterable[Entry], before: Container[int] = ()) -> set[int]:
    """Those of the members of jobs that are a crowd, by pid: ranks last. `before`: who was watched stays so if there is
    room."""
    rows = list(mine)
    if len(rows) <= HELPERS_OF_JOB:
        return set()

    def order(entry: Entry) -> tuple[bool, bool, bool, int, int]:
        assert entry.member is not None
        (pid, start_ticks), role = entry.key, entry.member.role
        return (role is not Role.RANK, entry.stat.state not in HANGS, pid not in before, ORDER[role], start_ticks)

    quiet: dict[str, list[Entry]] = {}
    kept: list[Entry] = []
    for entry in rows:
        assert entry.member is not None
        if entry.member.role is Role.HELPER and entry.stat.state not in HANGS:
            quiet.setdefault(entry.member.job_id, []).append(entry)
        else:
            kept.append(entry)
    for helpers in quiet.values():
        kept += helpers if len(helpers) <= HELPERS_OF_JOB else sorted(helpers, key=order)[:HELPERS_OF_JOB]
    chosen, _ = fair_share(kept, WATCHED, lambda entry: entry.known.uid, order)
    watched = {entry.known.pid for entry in chosen}
    return {entry.known.pid for entry in rows if entry.known.pid not in watched}


NEVER_SWITCHED_TO = frozenset("Dt")  # States without switches: those of a main thread are reported in every tick.
SETTLE_S = 0.15  # Children have this long for answers that improve the present report; the loop never waits for more.
OTHERS_EVERY = 3  # Ticks between two looks at the system call of a process that is no rank and not in D,
OTHERS_AT_ONCE = 12  # and at the CPU time of all that are none; more ticks where more than so many were due in one.
SWITCHES_EVERY = 12  # Ticks between two looks at the context switches of a rank, and at how long it has run.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
MAX_UNREAD = 4096  # As many as the controller takes (state.door).
MAX_ERROR_FILES = 256  # Of a job: a launcher that starts its ranks again names new ones.


@dataclass
class ProcessReader:
    """Who belongs to which job, and what they do."""

    looks: UserLooks
    read_mounts: Callable[[], tuple[Mount, ...]] = tuple
    """The agent's own, renewed by a child: where a process's own table does not come in time."""
    ours: frozenset[int] = frozenset()  # The agent and its children, by pid.
    read_helpers: Callable[[], frozenset[int]] = frozenset  # Children of this process that look at nothing, by pid.
    problem: str | None = None  # What this agent may not see, in a sentence.
    owners: Mapping[str, int] = field(default_factory=dict)  # The jobs that Slurm has here, and whose (JobsHere).
    read_seats: Callable[[], Mapping[str, Mapping[int, WorkerRank]]] = dict
    """Of each job whose log says it: pid, as the job sees it -> rank."""
    crowd: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Members of jobs that the last look left aside, by job and user: too many."""
    mine: list[Entry] = field(default_factory=list)  # Those that are looked at in every tick.
    _assigned_for: Mapping[str, int] = field(default_factory=dict)
    _seated: Mapping[str, Mapping[int, WorkerRank]] = field(default_factory=dict)
    _error_files: dict[str, dict[str, int | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.table = self.looks.table
        self.identities = Identities(self.looks)
        self.reads = ThreadReads(self.looks)
        self._may_look = may_become_others()
        self.threads = BlockedThreads()

    def collect(self, now: float, deadline_s: float) -> tuple[Process, ...]:
        """All processes of jobs on this node, as they are now; those that outlived their job, too, under its id."""
        self.table.ours = self.looks.children.pids() | self.read_helpers()
        self.table.look(now, MAX_IDENTIFICATIONS)
        requests = self.identities.ask(now, deadline_s)
        if requests:
            self.looks.children.settle(SETTLE_S, requests)
        seats = self.read_seats()
        all_again = seats != self._seated or (bool(self.crowd) and self.table.tick % RECONSIDER_EVERY == 0)
        if self.table.changed or all_again or self.owners != self._assigned_for:
            self._assign(all_again, seats)
            self.looks.retire({entry.known.uid for entry in self.mine})
        self.crowd = Counter(
            (entry.member.job_id, entry.known.uid)
            for entry in self.table.entries.values()
            if entry.crowd and entry.member is not None
        )
        known = [entry for entry in self.mine if entry.known.start_ticks]  # else a child has not read it yet
        living = [entry for entry in known if entry.has_living_thread]
        mains = [entry for entry in living if self._is_due(entry)]
        causes = {entry.key for entry in living if entry.stat.state in LASTING_STATES and now > entry.state_since}
        threads = self.threads.wanted(
            [(*entry.key, entry.stat.threads) for entry in living], [entry.key for entry in mains], causes
        )
        self.reads.begin()
        # One request of a user is as dear as many.
        self.reads.fetch([*self._counters(living), *(("call", pid, thread) for pid, _, thread in threads)])
        for entry in living:
            self._take_counters(entry)
        stuck = {entry.known.pid: entry.stat.state for entry in living if entry.known.pid in self.looks.stuck}
        self.threads.take(threads, self.reads.calls, now, stuck)
        blocked = self._blocked(now, deadline_s)
        return tuple(describe(entry, blocked.get(entry.key), now) for entry in known)

    def memory(self) -> ProcessMemory:
        """What `remember` of the next agent takes. Kernel threads are met again for next to nothing."""
        return ProcessMemory(
            entries=tuple(each for each in self.table.entries.values() if not each.is_kernel_thread),
            to_identify=tuple(sorted(self.table.to_identify)),
            stuck=dict(self.looks.stuck),
            tracks=tuple(self.threads.tracks.items()),
        )

    def remember(self, memory: ProcessMemory) -> None:
        """Before the first look: who has ended, or whose number is another's now, is found out by that."""
        for each in memory.entries:
            # Counters are read anew, and who is one of a crowd is chosen anew.
            entry = replace(each, io_bytes=None, switches=None, runnable_s=None, crowd=False, place=None)
            if self.table.reopen(entry):
                self.table.entries[entry.known.pid] = entry
                if self.looks.refusal(entry.known.uid) is None:
                    self.table.to_identify.add(entry.known.pid)  # is it the same?
        self.table.to_identify |= self.table.entries.keys() & set(memory.to_identify)
        self.looks.stuck |= memory.stuck
        self.threads.tracks |= dict(memory.tracks)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """How many of the crowd there are, of each job and user."""
        most = self.crowd.most_common(MAX_LEFT_OUT)
        return tuple(LeftOut(job_id=job, uid=uid, count=count) for (job, uid), count in most)

    @property
    def unread(self) -> tuple[int, ...]:
        """Processes of ordinary users that no child has read yet: what they are is not known."""
        unread = (
            pid
            for pid, entry in self.table.entries.items()
            if not (entry.known.start_ticks or entry.is_kernel_thread or pid in self.ours)
            and self.looks.refusal(entry.known.uid) is None
        )
        return tuple(islice(unread, MAX_UNREAD))

    @property
    def unseen(self) -> str | None:
        """Of whom it was not seen in the last look what threads do; None where it was."""
        if not self.reads.unseen:
            return None
        users = ", ".join(f"uid {uid}" for uid in sorted(self.reads.unseen)[:8])
        return f"no answer from the child that looks into processes of {users}: their system calls are unknown"

    def environ_of(self, job_id: str) -> Mapping[str, str]:
        """The known variables of some process of the job's owner; empty if nothing is known."""
        found = (entry.known.environ or {} for entry in self._speakers_of(job_id))
        return next((environ for environ in found if "SLURM_JOB_ID" in environ), {})

    def heartbeat_of(self, job_id: str) -> str:
        """Where a rank of the job says how far it is; empty if it has no such place."""
        ranks = self._speakers_of(job_id, ranks=True)
        return next((path for entry in ranks if (path := (entry.known.environ or {}).get(HEARTBEAT_VARIABLE))), "")

    def _speakers_of(self, job_id: str, ranks: bool = False) -> Iterator[Entry]:
        """Processes (or ranks alone) that speak for the job: the owner's, in no one else's program."""
        owner = self.owners.get(job_id)
        for entry in self.mine:
            member, known = entry.member, entry.known
            if member is None or member.job_id != job_id or known.foreign or (ranks and member.role is not Role.RANK):
                continue
            if known.uid == owner if owner is not None else member.by == BY_SLURM:
                yield entry

    def details_of(self, pid: int, start_ticks: int) -> ProcessFacts | None:
        """What was learnt of a process when it was met; None if it is gone."""
        entry = self.table.by_key(pid, start_ticks)
        return entry.known if entry is not None else None

    def checkpoint_directories_of(self, job_id: str) -> tuple[str, ...]:
        """Those that command lines of the job's ranks name, each once."""
        named = (path for entry in self._speakers_of(job_id, ranks=True) for path in entry.known.checkpoint_directories)
        return tuple(dict.fromkeys(named))[:MAX_DIRECTORIES]

    def working_directory_of(self, job_id: str) -> str | None:
        """Where the job's lowest rank on this node was started; None while that is not known."""
        ranks = [
            (entry.member.rank or 0, entry.known.cwd)
            for entry in self._speakers_of(job_id, ranks=True)
            if entry.member is not None and entry.known.cwd
        ]
        return min(ranks)[1] if ranks else None

    def _assign(self, all_again: bool, seats: Mapping[str, Mapping[int, WorkerRank]]) -> None:
        """Who belongs where. Of a crowd, that was decided before unless `all_again`, those with descendants aside."""
        entries = self.table.entries
        watched = {entry.known.pid for entry in self.mine if not entry.crowd}
        for entry in entries.values():
            if entry.crowd and (all_again or self._has_new_owner(entry)):
                entry.crowd = False
        # It may itself run inside a job, or have started one.
        self.ours = frozenset({os.getpid()}.union(*map(self.table.below, self.table.ours)))
        known = {pid: entry.known for pid, entry in entries.items() if not entry.crowd and pid not in self.ours}
        self._assigned_for, self._seated = dict(self.owners), dict(seats)
        whole = _with_ancestors(known, entries)
        before = {entries[pid].key: member for pid in whole if (member := entries[pid].member) is not None}
        assigned = assign(whole, before, self.owners, seats)
        for pid, entry in entries.items():
            if not entry.crowd:
                entry.member = assigned.get(pid)
        members = [entry for entry in entries.values() if entry.member is not None and not entry.crowd]
        for pid in pick_crowd(members, watched):
            entries[pid].crowd = True
        self.mine = [entry for entry in members if not entry.crowd]
        self.table.to_identify |= {entry.known.pid for entry in self.mine if not entry.known.start_ticks}
        self._note_error_files()
        self.problem = self._what_is_hidden()
        self.table.changed = False

    def _note_error_files(self) -> None:
        """Who is gone is asked about, too; of jobs that no one has here any more nothing is kept."""
        here = {entry.member.job_id for entry in self.mine if entry.member is not None}
        kept = here | self.owners.keys()
        self._error_files = {job: files for job, files in self._error_files.items() if job in kept}
        for job_id in here:
            for entry in self._speakers_of(job_id, ranks=True):
                path = dict(entry.known.settings).get(ERROR_FILE, "")
                files = self._error_files.setdefault(job_id, {})
                if (
                    entry.member is not None
                    and path.startswith("/")
                    and (len(files) < MAX_ERROR_FILES or path in files)
                ):
                    files[path] = entry.member.rank

    def error_files_of(self, job_id: str) -> Mapping[str, int | None]:
        """Into which files the ranks of this job here write why they end, or wrote: path -> rank."""
        return self._error_files.get(job_id, {})

    def _has_new_owner(self, entry: Entry) -> bool:
        """Whether Slurm has said something else about the job of this one since it was assigned."""
        job = entry.member.job_id if entry.member is not None else ""
        return self.owners.get(job) != self._assigned_for.get(job)

    def _what_is_hidden(self) -> str | None:
        if self._may_look:
            return None  # an exception (a security module's) is no blindness
        entries = self.table.entries
        if 1 not in entries:
            return (
                "/proc hides the processes of other users (hidepid): their jobs are not seen. Give the agent's unit "
                "the group that may see them (gid= of that mount): SupplementaryGroups="
            )
        hidden = [
            entry
            for entry in entries.values()
            if entry.known.denied
            and entry.known.environ is None
            and (entry.member is None or entry.member.rank is None)
        ]
        if not hidden:
            return None
        return (
            f"{len(hidden)} processes of other users may not be looked into (it takes CAP_SETUID and CAP_SYS_PTRACE): "
            "whether they belong to jobs, and which ranks they are, is not known"
        )

    # -- what they do ------------------------------------------------------------------------------------------

    def _counters(self, living: list[Entry]) -> Iterator[ThreadFile]:
        for entry in living:
            pid = entry.known.pid
            if self._reads_io(entry):
                yield ("io", pid, pid)
            elif self._is_turn_of(pid) or entry.ticks < YOUNG_TICKS:
                yield ("cpu", pid, pid)

    def _reads_io(self, entry: Entry) -> bool:
        if entry.member is None or entry.member.role is Role.HELPER:
            return False
        in_turn = (entry.known.pid + self.table.tick) % SWITCHES_EVERY == 0
        return entry.member.role is Role.RANK or entry.io_bytes is None or in_turn

    def _is_due(self, entry: Entry) -> bool:
        """Whether the main thread is looked at in this tick."""
        pid = entry.known.pid
        is_rank = entry.member is not None and entry.member.role is Role.RANK
        return is_rank or self._is_turn_of(pid) or entry.stat.state == "D"

    def _is_turn_of(self, pid: int) -> bool:
        return (pid + self.table.tick) % max(OTHERS_EVERY, len(self.mine) // OTHERS_AT_ONCE) == 0

    def _take_counters(self, entry: Entry) -> None:
        """CPU time and I/O, as far as they were read; context switches of ranks now and then."""
        pid, member = entry.known.pid, entry.member
        entry.switches = entry.runnable_s = None
        found = self.reads.counters_of(pid)
        if found is not None and found.cpu_ticks is not None:
            entry.stat = msgspec.structs.replace(entry.stat, cpu_ticks=found.cpu_ticks)
        if found is not None and found.io_bytes is not None:
            entry.io_bytes = found.io_bytes
        in_turn = (pid + self.table.tick) % SWITCHES_EVERY == 0
        if member is not None and member.role is Role.RANK and (in_turn or entry.stat.state in NEVER_SWITCHED_TO):
            entry.switches = entry.seen_switches if entry.seen_switches >= 0 else None
            if in_turn:
                with suppress(OSError, ValueError):  # it ended, or this kernel does not count that
                    entry.runnable_s = parse_runnable_s(self.table.read_of(entry, "schedstat"))

    def _blocked(self, now: float, deadline_s: float) -> dict[Key, Blocked]:
        if tracks := self.threads.blocked():
            self._resolve(tracks, now, deadline_s)
        longest: dict[Key, tuple[int, BlockedCallHistory]] = {}
        for (pid, start, thread), track in (self.threads.blocked() if tracks else {}).items():
            if track.seen.state != "D" and track.seen.syscall in PATH_ARGUMENT and track.target is None:
                continue
            best = longest.get((pid, start))
            if best is None or _rank_of(track) < _rank_of(best[1]):
                longest[pid, start] = (thread, track)
        return {key: describe_blocked(thread, track) for key, (thread, track) in longest.items()}

    def _resolve(self, tracks: dict[tuple[int, int, int], BlockedCallHistory], now: float, deadline_s: float) -> None:
        """Path and mount of each blocked call: from the child, and until it has answered from what is known already."""
        requests = self.identities.resolve(tracks, now, deadline_s)
        if requests:
            self.looks.children.settle(SETTLE_S, requests)
        for track in tracks.values():
            if track.guess is None and is_storage(track.seen.path):
                track.guess = mount_target(track.seen.path or "", self.read_mounts())


def _with_ancestors(known: dict[int, ProcessFacts], entries: Mapping[int, Entry]) -> dict[int, ProcessFacts]:
    """`known` and its ancestors in the crowd: a job is known by its ancestors."""
    whole = dict(known)
    for process in known.values():
        above = entries.get(process.ppid)
        while above is not None and above.crowd and above.known.pid not in whole:
            whole[above.known.pid] = above.known
            above = entries.get(above.known.ppid)
    return whole


def _rank_of(track: BlockedCallHistory) -> tuple[bool, float]:
    """The thread to report of several: one whose mount is known before others, then the longest blocked."""
    known = track.target if track.target and track.target.mount else track.guess
    return (known is None or known.mount is None, track.first_at)


class ProcessMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent knows of the processes of its node, for the one that this process becomes."""

    entries: tuple[Entry, ...] = ()
    to_identify: tuple[int, ...] = ()
    stuck: dict[int, str] = {}
    tracks: tuple[tuple[tuple[int, int, int], BlockedCallHistory], ...] = ()


CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def describe(entry: Entry, blocked: Blocked | None, now: float) -> Process:
    known, member, stat = entry.known, entry.member, entry.stat
    assert member is not None
    age_s = now - entry.state_since
    timeout = known.collective_timeout if member.role is Role.RANK else None
    return Process(
        pid=known.pid,
        start_ticks=known.start_ticks,
        job_id=member.job_id,
        role=member.role,
        comm=known.comm,
        state=stat.state,
        state_age_s=age_s if age_s > 0 and stat.state in LASTING_STATES else None,
        uid=known.uid,
        member_by=member.by,
        step_id=member.step_id,
        rank=member.rank,
        local_rank=member.local_rank,
        world_size=member.world_size,
        cpu_s=stat.cpu_ticks / CLOCK_TICKS,
        io_bytes=entry.io_bytes,
        threads=stat.threads,
        context_switches=entry.switches,
        runnable_s=entry.runnable_s,
        container_pid=known.own_pid,
        blocked=blocked,
        collective_timeout_s=None if timeout is None else timeout[0],
        collective_timeout_assumed=timeout is not None and timeout[1],
    )
