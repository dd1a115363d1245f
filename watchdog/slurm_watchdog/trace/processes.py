"""Which processes there are on one node, from a trace that says who is there and never who is gone. Pure.

A process that is said to be dead (Z, X) is dead. One that is merely not listed any more is gone only if the
trace looks as if it listed everybody: REGULAR times in a row each rank of the job (RELIABLE times since one
came back that had not been listed), and then MISSED times not this one, or twice as often where the regular
listings were fewer than WHOLE or its GPU still lists it; once less where no line of PROVEN was missing
before. If the kernel says that it killed the process, or its GPU does not list it any more, or was emptied,
once is enough. In every other case it stays as it was said last: a trace with gaps makes no one dead. Where
the agent's own report says how many processes there are (recordings do), and so many were listed, the rest is
gone.

Measured on seven accuracy cases as plain traces (`--way trace`): without this inference `lingering_gone` is not
found, and `gpu_crash` is found without its dead rank; the replay takes a seventh less time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from slurm_watchdog.model.observations import Blocked, Process, Role
from slurm_watchdog.trace.records import ParseStats, Proc, with_more

REGULAR = 3
RELIABLE = 20
MISSED = 3
PROVEN = 1000
"""Lines about processes in a row of which none was missing: then fewer than three in a thousand are lost (95
% sure), and two of the same process in a row hardly ever are. Of one line in a hundred that is, they are
within minutes."""
WHOLE = 8  # A trace that lacks one line in ten hardly ever looks regular for so many listings.
SLACK = 1.5  # A process that was listed every ten seconds is missed after fifteen.
TICKS_PER_S = 100  # USER_HZ: /proc counts in hundredths of a second on every machine that trains models.
UNKNOWN_STATE = "?"
STOPPED = ("T", "t")
NO_DISK = ("", "dev", "proc", "sys", "run")

Key = tuple[str, int]  # (job, pid). A negative pid stands for one that the trace does not tell, and is not shown.


@dataclass
class ListedProcess:
    process: Process
    listed_at: float
    start: float | None = None  # As the trace tells it, once it does.
    every_s: float = 0.0  # The longest time between its last listings in a row.
    in_row: int = 1
    missed: int = 0
    missed_at: float = 0.0  # When it was not listed for the first time.
    counts: bool = False  # Its processor time was seen to rise: that it is the same again says something.
    call: tuple[object, ...] = ()  # The uninterruptible call of unknown age in its newest line, with its CPU time.
    call_since: float = 0.0  # When a line said so for the first time.

    def blocked_for_s(self, record: Proc, now: float) -> float | None:
        """How long it has been in the call of this line at least, where no line says so: it was listed in D, in the
        same call, with the same processor time, ever since. None where that is not known."""
        rose = record.cpu_s is not None and record.cpu_s > self.process.cpu_s > 0
        self.counts = self.counts or rose
        waits = record.cpu_s is not None and record.state_age_s is None and (record.state or "").startswith("D")
        call = (record.wchan, record.syscall, record.path, record.mount, record.cpu_s) if waits else ()
        if call != self.call or not call:
            self.call, self.call_since = call, now
        return now - self.call_since if call and self.counts else None

    def stopped_for_s(self, now: float) -> float:
        """Since it was first listed as stopped, where no line says since when it is."""
        before = self.process.state_age_s if self.process.state in STOPPED else None
        return 0.0 if before is None else before + now - self.listed_at


@dataclass
class Processes:
    """Those of one node."""

    tally: ParseStats
    known: dict[Key, ListedProcess] = field(default_factory=dict)
    _pid_of: dict[tuple[str, int], int] = field(default_factory=dict)  # (job, rank) -> pid.
    _job_of: dict[int, str] = field(default_factory=dict)
    _proven: int = 0  # Lines since one was missing about a process that was still there.
    _since_gap: int | None = None  # Listings since one that left someone out who was still there; None: never one.
    unplaced: bool = False  # The newest listing had a line whose job is not known.

    def forget(self, job_id: str) -> None:
        """The run is over: processes that are listed from now on belong to another one."""
        for key in [key for key in self.known if key[0] == job_id]:
            del self.known[key]
        for seat in [seat for seat in self._pid_of if seat[0] == job_id]:
            del self._pid_of[seat]

    def list(self, records: Iterable[Proc], now: float, restarts: dict[str, int], mounts: set[str]) -> set[Key]:
        """Takes over who is listed now, with `restarts` of the jobs and the trace's `mounts`. Returns who was."""
        listed: set[Key] = set()
        self.unplaced = False
        for record in records:
            key = self._key(record)
            if key is None:
                self.unplaced = True
                self.tally.ignore("a process without a job, or without pid and rank")
                continue
            old = self.known.get(key)
            if old is not None and None not in (old.start, record.start) and old.start != record.start:
                old = None  # the number was given to another process
            blocked_s = old.blocked_for_s(record, now) if old is not None else None
            if blocked_s is not None:
                record = replace(record, state_age_s=blocked_s)
            process = _process(record, key, old.process if old else None, restarts.get(key[0], 0), mounts, self.tally)
            if process is not None and process.state in STOPPED and process.state_age_s is None:
                process = replace(process, state_age_s=old.stopped_for_s(now) if old is not None else 0.0)
            if process is None:
                self.unplaced = True
                continue
            self._job_of[key[1]] = key[0]
            if process.rank is not None:
                self._pid_of[key[0], process.rank] = key[1]
            if old is None:
                self.known[key] = ListedProcess(process, now, record.start)
            else:
                old.process = process
                old.start = record.start if old.start is None else old.start
                if key not in listed:
                    if old.missed or not old.in_row:
                        self._since_gap = self._proven = 0
                    _listed_again(old, now)
            listed.add(key)
        return listed

    def _key(self, record: Proc) -> Key | None:
        job_id = str(record.job_id) if record.job_id is not None else None
        if job_id is None and record.pid is not None:
            job_id = self._job_of.get(record.pid)
        if job_id is None or (record.pid is None and record.rank is None):
            return None
        stand_in = -1 - record.rank if record.rank is not None else 0
        if record.pid is None:
            assert record.rank is not None
            return job_id, self._pid_of.get((job_id, record.rank), stand_in)
        if stand_in and (job_id, stand_in) in self.known:
            del self.known[job_id, stand_in]  # now it has a name
        return job_id, record.pid

    def all_listed(self, listed: set[Key]) -> None:
        """The report says that there were no others."""
        for key in [key for key in self.known if key not in listed]:
            del self.known[key]

    def miss(
        self, listed: set[Key], now: float, ended: Collection[int] = (), seen: Collection[int] = ()
    ) -> float | None:
        """Counts who was not listed, and forgets who is gone. Of the pids in `ended` something else says so,
        too; those in `seen` are seen elsewhere. Returns since when, None if no one is."""
        if self._since_gap is not None:
            self._since_gap += 1
        self._proven += len(listed)
        if len(listed) == len(self.known):
            return None  # everybody was
        for key, each in self.known.items():
            if key in listed or self.unplaced:
                continue
            if listed and each.process.state in STOPPED and now - each.listed_at > SLACK * each.every_s:
                each.process = replace(each.process, state=UNKNOWN_STATE, state_age_s=None)  # it may go on by now
            if each.in_row < REGULAR and key[1] not in ended:
                each.in_row = 0
                continue
            each.missed += 1
            if each.missed == 1:
                each.missed_at = now
        gone = [
            key
            for key, each in self.known.items()
            if each.missed
            and (key[1] in ended or (each.missed >= MISSED - 1 and self._is_gone(key, now, key[1] in seen)))
        ]
        since = min((self.known[key].missed_at for key in gone), default=None)
        for key in gone:
            del self.known[key]
        return since

    def _is_gone(self, key: Key, now: float, seen: bool) -> bool:
        each = self.known[key]
        if now - each.listed_at < SLACK * each.every_s:
            return False
        if each.process.rank is None:
            return each.missed >= MISSED
        ranks = [k for other, k in self.known.items() if other[0] == key[0] and k.process.rank is not None]
        if each.missed < 2 * MISSED and (seen or any(k.in_row < WHOLE for k in ranks)):
            return False
        if each.missed < MISSED and (self._since_gap is not None or self._proven < PROVEN):
            return False
        doubtful = self._since_gap is not None and self._since_gap < RELIABLE
        if doubtful or any(k.in_row < REGULAR for k in ranks):
            return False  # not everybody is listed every time
        missing = sum(1 for k in ranks if k.missed)
        # Most of a node at once, and not all of it: the trace has begun to tell of the interesting ones only.
        return missing == len(ranks) or 2 * missing <= len(ranks)

    def present(self) -> tuple[Process, ...]:
        return tuple(each.process for each in self.known.values())

    def listed_since(self, at: float) -> tuple[Process, ...]:
        """Those that were listed at `at` or later."""
        return tuple(each.process for each in self.known.values() if each.listed_at >= at)


def _listed_again(known: ListedProcess, now: float) -> None:
    gap_s = now - known.listed_at
    if known.missed or not known.in_row:
        known.in_row, known.missed, known.every_s = 1, 0, gap_s
    else:
        known.in_row += 1
        known.every_s = gap_s if known.in_row <= REGULAR else max(gap_s, 0.5 * known.every_s)
    known.listed_at = now


def _process(
    record: Proc, key: Key, old: Process | None, restarts: int, mounts: set[str], tally: ParseStats
) -> Process | None:
    """The process as this line has it; what the line leaves out, other than what it is doing, is as before."""
    rank, cpu_s = record.rank, record.cpu_s
    if old is not None:  # it is the same process, even if its start is given only now
        start = old.start_ticks
        rank = old.rank if rank is None else rank
        cpu_s = old.cpu_s if cpu_s is None else cpu_s
    else:
        start = restarts if record.start is None else round(record.start * TICKS_PER_S)
    state = record.state[0].replace(" ", UNKNOWN_STATE) if record.state else UNKNOWN_STATE
    process = Process(
        pid=key[1],
        start_ticks=start,
        job_id=key[0],
        role=Role.HELPER if rank is None else Role.RANK,
        comm="process",
        state=state,
        state_age_s=record.state_age_s,
        uid=-1,
        rank=rank,
        cpu_s=cpu_s or 0.0,
        blocked=_blocked(record, key[1], state, mounts),
    )
    return with_more(process, record.more, tally)


def _blocked(record: Proc, pid: int, state: str, mounts: set[str]) -> Blocked | None:
    """The call it stands in, if the line says since when, and which call or which file."""
    storage = record.path is not None or record.mount is not None
    waits = state in ("D", "S", UNKNOWN_STATE)
    if record.state_age_s is None or not waits or not (storage or (state == "D" and record.syscall)):
        return None
    return Blocked(
        thread_id=max(0, pid),
        seconds=record.state_age_s,
        state=state,
        wchan=record.wchan,
        syscall=record.syscall,
        path=record.path,
        mount=record.mount or _mount_of(record.path, mounts) or _top_of(record.path),
    )


def _mount_of(path: str | None, mounts: set[str]) -> str | None:
    """The longest mount point that the trace names and that the path lies below."""
    found = [m for m in mounts if path and (path == m or path.startswith(m.rstrip("/") + "/"))]
    return max(found, key=len, default=None)


def _top_of(path: str | None) -> str | None:
    """The topmost directory of a file without a mount: /gpfs of /gpfs/run/log.txt; None: on no disk."""
    parts = (path or "").split("/")
    return f"/{parts[1]}" if len(parts) > 2 and not parts[0] and parts[1] not in NO_DISK else None
