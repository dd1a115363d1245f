"""Identities of processes, from children: environment, program, command line; file and mount of a blocked call.

One child, `identify`, is asked about many processes at once and sends each answer when it has it. If it hangs,
the first process without an answer is the one it hangs on: the child is set aside as `identify:PID`
(`identify:PID:file` if it was about files and mounts), nothing more is asked about that process until the child
answers or the process has ended, and the others are asked about again in a fresh child. What is in state D goes
to a child of its own, so that the others need not wait for the deadline.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from slurm_watchdog.agent.proc.entry import Entry, ProcessFacts, parse_status, parse_stepd
from slurm_watchdog.agent.proc.files import owner_of, read_file, read_stat
from slurm_watchdog.agent.proc.system_call import BlockedCallHistory
from slurm_watchdog.agent.proc.table import NEW_AT_ONCE, ProcessTable
from slurm_watchdog.agent.workers.answer_types import IdentifiedProcess, ResolvedCall
from slurm_watchdog.agent.workers.pool import WorkerPool
from slurm_watchdog.agent.workers.request_types import BlockedCall, IdentifyProcesses, Request, ResolveCalls
from slurm_watchdog.agent.workers.worker import Answer
from slurm_watchdog.knowledge.syscalls import PAGE_FAULT, PATH_ARGUMENT

log = logging.getLogger(__name__)

IDENTIFY, IDENTIFY_SUSPECTS, IDENTIFY_DISTRUSTED = "identify", "identify:in D", "identify:apart"
MAX_SET_ASIDE_OF_USER = 3  # Of these for the processes of one user.
MAX_DISTRUSTED = 64
MAX_AT_ONCE = 256
MAX_DIRECTORIES = 8  # For checkpoints, of one job.
MAX_IDENTIFICATIONS = 20  # Programs may rename themselves; after so many new names it is no longer news.
MAX_SET_ASIDE = 6  # Children that hang on one process each; then nothing new is asked about a process in D.

ThreadKey = tuple[int, int, int]  # (pid, start of the process, thread).
Question = tuple[int, int | None]  # (pid, start of the process unless that is not known).


@dataclass(frozen=True)
class UnidentifiedProcess:
    """A process on which a child hangs."""

    key: str  # Name of the child that hangs on it.
    anything: bool  # Even links and mounts of it did not come: nothing at all is asked. Otherwise its memory only.


class Identities(msgspec.Struct):
    """Asks the children for what `table` wants to know and the loop must not read."""

    probes: WorkerPool
    table: ProcessTable
    stuck: dict[int, UnidentifiedProcess] = {}  # By pid: processes on which a child hangs.
    distrusted: dict[int, int] = {}
    """User -> a process of his on which a child hung or spent its time: his processes have a child of their own."""
    waiting: Counter[int] = msgspec.field(default_factory=Counter)
    """How many processes of each user were to be identified in the last tick."""
    _resolving: set[tuple[ThreadKey, bytes]] = set()
    _asking: set[str] = set()

    def ask(self, now: float, deadline_s: float) -> list[int]:
        """Asks about processes that are new or have become something else; returns the numbers of the requests."""
        self._release()
        table = self.table
        calm: list[Question] = []
        distrusted: list[Question] = []
        in_d: list[Question] = [(pid, None) for pid in table.suspects if pid not in self.stuck]
        for pid in self._first_of_each_user():
            entry = table.entries[pid]
            if pid not in self.stuck:
                apart = distrusted if entry.known.uid in self.distrusted else calm
                group = in_d if entry.stat.state == "D" else apart
                group.append((pid, entry.known.start_ticks))
        if len(self.stuck) >= MAX_SET_ASIDE:
            in_d = []
        in_d = [each for each in in_d if self._stuck_of(self._uid_of(each[0])) < MAX_SET_ASIDE_OF_USER]
        self.waiting += Counter(owner_of(pid) for pid in table.suspects if pid not in self.stuck)
        requests = []
        for key, every in ((IDENTIFY, calm), (IDENTIFY_SUSPECTS, in_d), (IDENTIFY_DISTRUSTED, distrusted)):
            group = self._in_turn(every)
            if group and (request := self._ask_identify(key, group, now, deadline_s)) is not None:
                requests.append(request)
        return requests

    def _first_of_each_user(self) -> list[int]:
        """Those to be identified, of each user no more, in D and otherwise, than can be asked now; counts all."""
        entries, found = self.table.entries, list[int]()
        counts: Counter[tuple[int, bool]] = Counter()
        for pid in sorted(self.table.to_identify):
            entry = entries[pid]
            kind = (entry.known.uid, entry.stat.state == "D")
            counts[kind] += 1
            if counts[kind] <= MAX_AT_ONCE + MAX_SET_ASIDE:
                found.append(pid)
        self.waiting = Counter()
        for (uid, _), count in counts.items():
            self.waiting[uid] += count
        return found

    def problems(self) -> list[str]:
        """Users with more processes than can be asked about at once, and those for whose processes a child has hung."""
        waiting = self.waiting if self.waiting.total() > MAX_AT_ONCE else Counter[int]()
        found = [
            f"{count} new processes of {self._user(uid)} {wait}: {at_once} are in a tick, in turn by user"
            for counts, wait, at_once in (
                (self.table.unmet, "are not looked at yet", NEW_AT_ONCE),
                (waiting, "wait to be identified", MAX_AT_ONCE),
            )
            for uid, count in counts.most_common(1)
        ]
        for uid, pid in self.distrusted.items():
            found.append(
                f"process {pid} of {self._user(uid)} held up who identifies it: this user's processes are asked "
                "about apart"
            )
        return found

    def _user(self, uid: int) -> str:
        """Who it is, for an administrator: the user, and the job with most of his processes here."""
        job_id = self.table.job_of(uid)
        return f"uid {uid}" if job_id is None else f"uid {uid} (job {job_id})"

    def _in_turn(self, rows: list[Question]) -> list[Question]:
        """At most MAX_AT_ONCE, the users in turn and interleaved: one user's thousands cost another none of his few."""
        seen: Counter[int] = Counter()
        turns: list[tuple[int, int, Question]] = []
        for row in rows:
            uid = self._uid_of(row[0])
            turns.append((seen[uid], len(turns), row))
            seen[uid] += 1
        return [row for _, _, row in sorted(turns, key=lambda turn: turn[:2])[:MAX_AT_ONCE]]

    def _uid_of(self, pid: int) -> int:
        entry = self.table.entries.get(pid)
        return entry.known.uid if entry is not None else owner_of(pid)

    def _stuck_of(self, uid: int) -> int:
        return sum(self._uid_of(pid) == uid for pid in self.stuck)

    def _distrust(self, pid: int) -> None:
        uid = self._uid_of(pid)
        if uid != 0 and len(self.distrusted) < MAX_DISTRUSTED:
            self.distrusted.setdefault(uid, pid)

    def resolve(self, tracks: dict[ThreadKey, BlockedCallHistory], now: float, deadline_s: float) -> int | None:
        """Asks for the file and mount of each blocked call that has none yet; returns the number of the request."""
        wanted = [
            (key, track)
            for key, track in tracks.items()
            if track.target is None
            and (track.call.number >= 0 or track.syscall == PAGE_FAULT)
            and (key, track.line) not in self._resolving
            and not self._hangs_on(key[0], track)
        ][:MAX_AT_ONCE]
        if not wanted:
            return None
        calls = [BlockedCall(key[0], key[2], track.syscall, list(track.call.args)) for key, track in wanted]
        asked = [(key, track.line) for key, track in wanted]
        answered: set[int] = set()

        def apply(found: ResolvedCall) -> None:
            answered.add(found.index)
            key, line = asked[found.index]
            track = tracks.get(key)
            if track is not None and track.line == line:
                track.target = found.target

        def then(answer: Answer[None]) -> None:
            for item in asked:
                self._resolving.discard(item)
            if answer.timed_out:
                pids = [key[0] for key, _ in asked]
                self._blame(answer.key, pids, answered, anything=True)

        request = self._ask(IDENTIFY, ResolveCalls(calls), deadline_s, now, then, apply)
        if request is not None:
            self._resolving |= set(asked)
        return request

    # -- asking ------------------------------------------------------------------------------------------------

    def _ask(
        self, key: str, request: Request[None], deadline_s: float, now: float,
        then: Callable[[Answer[None]], None], apply: Callable[[Any], None],
    ) -> int | None:  # fmt: skip
        def done(answer: Answer[None]) -> None:
            self._asking.discard(key)
            then(answer)

        number = self.probes.ask(key, request, deadline_s, now, done, on_part=apply)
        if number is not None:
            self._asking.add(key)
        return number

    def _ask_identify(self, key: str, group: list[Question], now: float, deadline_s: float) -> int | None:
        answered: set[int] = set()

        def apply(found: IdentifiedProcess) -> None:
            answered.add(found.index)
            self._apply_identity(found, now)

        then = partial(self._end_identify, group=group, answered=answered)
        request = self._ask(key, IdentifyProcesses(group), deadline_s, now, then, apply)
        if request is not None:
            self.table.to_identify -= {pid for pid, _ in group}
        return request

    def _end_identify(self, answer: Answer[None], group: list[Question], answered: set[int]) -> None:
        for index, (pid, start) in enumerate(group):
            if index in answered or start is None:
                continue
            entry = self.table.by_key(pid, start)
            if entry is not None and entry.identified < MAX_IDENTIFICATIONS:
                self.table.to_identify.add(pid)
                entry.identified += not answer.timed_out
        pids = [pid for pid, _ in group]
        if answer.timed_out:
            self._blame(answer.key, pids, answered, anything=False)
        elif answer.error is not None:  # its time was spent, or it was ended, on the first that is missing
            held = next((pid for index, pid in enumerate(pids) if index not in answered), None)
            entry = self.table.entries.get(held) if held is not None else None
            if entry is not None:
                self._distrust(entry.known.pid)
                entry.identified += MAX_IDENTIFICATIONS // 4

    def _blame(self, key: str, pids: list[int], answered: set[int], *, anything: bool) -> None:
        culprit = next((pid for index, pid in enumerate(pids) if index not in answered), None)
        if culprit is None:
            return
        new_key = f"{IDENTIFY}:{culprit}" + (":file" if anything else "")
        if self._stuck_of(self._uid_of(culprit)):
            self._distrust(culprit)  # one that hangs may be a server's fault; the second of a user is his
        aside = len(self.stuck) < MAX_SET_ASIDE and self.probes.rename(key, new_key)
        self.stuck[culprit] = UnidentifiedProcess(new_key if aside else key, anything)
        log.warning("nothing can be learnt about process %d: its memory's lock is held, or it is in execve", culprit)

    def _release(self) -> None:
        """A process whose child answered, or that ended, may be asked about again."""
        for pid, stuck in list(self.stuck.items()):
            gone = pid not in self.table.entries and pid not in self.table.suspects
            if self.probes.is_free(stuck.key) or gone:
                del self.stuck[pid]
        known = {entry.known.uid for entry in self.table.entries.values()} if self.distrusted else set()
        self.distrusted = {uid: pid for uid, pid in self.distrusted.items() if uid in known}
        ours = IDENTIFY in self._asking or any(stuck.key == IDENTIFY for stuck in self.stuck.values())
        if not ours and self.probes.rename(IDENTIFY, f"{IDENTIFY}:logs"):
            log.warning("the child that lists the open logs hangs; another one identifies processes")

    def _hangs_on(self, pid: int, track: BlockedCallHistory) -> bool:
        stuck = self.stuck.get(pid)
        return stuck is not None and (stuck.anything or track.syscall in PATH_ARGUMENT)

    # -- the answers -------------------------------------------------------------------------------------------

    def _apply_identity(self, found: IdentifiedProcess, now: float) -> None:
        pid, start = found.pid, found.start_ticks
        entry = self.table.by_key(pid, start) if start is not None else None
        if entry is None and pid in self.table.suspects and start is not None:
            entry = self._meet_suspect(pid, start, now)
        if entry is None:
            return
        self.table.to_identify.discard(pid)
        entry.identified += 1
        self.table.leave_crowd(entry)
        facts = merge_identity(entry.known, found)
        if facts is not entry.known:
            entry.known, self.table.changed = facts, True

    def _meet_suspect(self, pid: int, start: int, now: float) -> Entry | None:
        """A process that has been in D since it was first seen, and that a child has just read without harm."""
        try:
            status, stat = parse_status(read_file(f"/proc/{pid}/status")), read_stat(pid)
        except (OSError, ValueError):
            return None
        return self.table.add(pid, stat, status, now) if stat.start_ticks == start else None


def merge_identity(known: ProcessFacts, found: IdentifiedProcess) -> ProcessFacts:
    """What is known of a process after an answer about it; `known` itself where that says nothing new."""
    if found.foreign:
        uid = known.uid if found.uid is None else found.uid
        return replace(
            known, uid=uid, foreign=True, environ={}, exe="", stepd=parse_stepd(found.title), denied=False,
            cwd="", checkpoint_directories=(), settings=(), collective_timeout=None,
        )  # fmt: skip
    if found.environ is None or (not found.environ and known.environ):
        if found.denied and not known.denied:
            return replace(known, denied=True, stepd=parse_stepd(found.title))
        return known  # it is ending: what was known before is better
    stepd = parse_stepd(found.title) if found.title else None
    return replace(
        known, uid=known.uid if found.uid is None else found.uid, foreign=False, environ=found.environ,
        exe=found.exe, stepd=stepd or known.stepd, denied=False, cwd=found.cwd or known.cwd,
        checkpoint_directories=(found.checkpoint_directories or known.checkpoint_directories)[:MAX_DIRECTORIES],
        settings=_interned(found.settings) or known.settings, collective_timeout=found.collective_timeout,
    )  # fmt: skip


def _interned(settings: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """The same words are kept once, however many ranks have them."""
    return tuple((sys.intern(name), sys.intern(value)) for name, value in settings.items())
