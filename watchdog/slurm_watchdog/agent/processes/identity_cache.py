"""Identities of processes, from the children of their users: environment, program, command line; file and mount of a
blocked call. What is in state D goes to a child of its own, so that the others need not wait for the deadline.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec

from slurm_watchdog.agent.children.answers import IdentifiedProcess, ResolvedCall
from slurm_watchdog.agent.children.child import GIVEN_UP
from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import BlockedCall, IdentifyProcesses, ReadTitles, ResolveCalls
from slurm_watchdog.agent.proc.entry import Entry, ProcessFacts, parse_stepd
from slurm_watchdog.agent.proc.system_call import BlockedCallHistory, parse_syscall
from slurm_watchdog.agent.proc.table import NEW_AT_ONCE, ProcessTable
from slurm_watchdog.agent.processes.user_looks import APART, UserLooks

STEPD = "slurmstepd"
MAX_AT_ONCE = 256  # Of one user, in a tick.
MAX_DIRECTORIES = 8  # For checkpoints, of one job.
MAX_IDENTIFICATIONS = 20  # Programs may rename themselves; after so many new names it is no longer news.

ThreadKey = tuple[int, int, int]  # (pid, start of the process, thread).
Mine = list[tuple[int, Entry]]  # Processes, by pid, as they were when they were asked about.


class Identities(msgspec.Struct):
    """Asks the children for what `looks.table` wants to know and the loop must not read."""

    looks: UserLooks
    waiting: Counter[int] = msgspec.field(default_factory=Counter)
    """How many processes of each user were not asked about in the last tick."""
    _now: float = 0.0  # Of the last `ask`.
    _resolving: set[tuple[ThreadKey, str]] = set()

    @property
    def table(self) -> ProcessTable:
        """The processes."""
        return self.looks.table

    def ask(self, now: float, deadline_s: float) -> list[int]:
        """Asks about processes that are new or have become something else; returns the numbers of the requests."""
        self.looks.release()
        self._now = now
        groups: dict[tuple[int, str], Mine] = {}
        self.waiting = Counter()
        for pid in sorted(self.table.to_identify):
            entry = self.table.entries[pid]
            if not self.looks.may_ask(pid):
                continue
            uid = self._as_whom(entry)
            if uid is None:
                self.table.to_identify.discard(pid)
                continue
            group = groups.setdefault((uid, APART if entry.stat.state == "D" else ""), [])
            if len(group) < MAX_AT_ONCE:
                group.append((pid, entry))
            else:
                self.waiting[entry.known.uid] += 1
        asked = (self._ask(uid, suffix, mine, now, deadline_s) for (uid, suffix), mine in groups.items())
        return [number for number in asked if number is not None]

    def _as_whom(self, entry: Entry) -> int | None:
        """Whose child is to identify a process; None: nothing of it is read."""
        uid = entry.known.uid
        refusal = self.looks.refusal(uid)
        if refusal is None:
            return uid
        if entry.known.environ is None:
            mighty = "is not an ordinary user" in refusal
            facts = replace(entry.known, foreign=mighty, denied=not mighty, environ={} if mighty else None)
            entry.known, self.table.changed = facts, True
        may_be_of_job = entry.known.comm == STEPD or entry.known.cgroup is not None or entry.member is not None
        return -1 if may_be_of_job else None

    def _ask(self, uid: int, suffix: str, mine: Mine, now: float, deadline_s: float) -> int | None:
        pids = [pid for pid, _ in mine]
        request = IdentifyProcesses(pids) if uid >= 0 else ReadTitles(pids)
        then = partial(self._apply, mine)
        number = self.looks.ask(uid, request, pids, deadline_s, now, then, suffix)
        if number is not None:
            self.table.to_identify.difference_update(pids)
        return number

    def _apply(self, mine: Mine, answer: Answer[list[IdentifiedProcess]]) -> None:
        found = answer.value or []
        for (pid, entry), each in zip(mine, found, strict=False):
            if self.table.entries.get(pid) is entry:
                self._apply_identity(entry, each)
        for index, (pid, entry) in enumerate(mine[len(found) :]):
            # Its time was spent, or it was ended, on this one.
            held = index == answer.place and (answer.error or "").startswith(GIVEN_UP)
            entry.identified += MAX_IDENTIFICATIONS // 4 if held else 0
            if self.table.entries.get(pid) is entry and entry.identified < MAX_IDENTIFICATIONS:
                self.table.to_identify.add(pid)

    def _apply_identity(self, entry: Entry, found: IdentifiedProcess) -> None:
        entry.identified += 1
        if found.start_ticks is not None and entry.known.start_ticks not in (0, found.start_ticks):
            # An agent before this one knew another process of this number.
            self.table.remove(entry.known.pid, self._now)
            return
        self.table.leave_crowd(entry)
        if entry.known.start_ticks == 0 and found.start_ticks is not None:
            entry.known = replace(entry.known, start_ticks=found.start_ticks)
            entry.stat = msgspec.structs.replace(entry.stat, start_ticks=found.start_ticks)
        facts = merge_identity(entry.known, found)
        if facts is not entry.known:
            entry.known, self.table.changed = facts, True

    def problems(self) -> list[str]:
        """Users with more processes than can be asked about at once."""
        return [
            f"{count} new processes of {self._user(uid)} {wait}: {at_once} are in a tick"
            for counts, wait, at_once in (
                (self.table.unmet, "are not looked at yet", NEW_AT_ONCE),
                (self.waiting, "wait to be identified", MAX_AT_ONCE),
            )
            for uid, count in counts.most_common(1)
        ]

    def _user(self, uid: int) -> str:
        """Who it is, for an administrator: the user, and the job with most of his processes here."""
        job_id = self.table.job_of(uid)
        return f"uid {uid}" if job_id is None else f"uid {uid} (job {job_id})"

    def resolve(self, tracks: dict[ThreadKey, BlockedCallHistory], now: float, deadline_s: float) -> list[int]:
        """Asks for the file and mount of each blocked call that has none yet; returns the numbers of the requests."""
        wanted: dict[int, list[tuple[ThreadKey, BlockedCallHistory]]] = {}
        for key, track in tracks.items():
            resolvable = track.target is None and track.seen.syscall is not None
            if resolvable and (key, track.seen.line) not in self._resolving and self.looks.may_ask(key[0]):
                wanted.setdefault(self.looks.uid_of(key[0]), []).append((key, track))
        requests = []
        for uid, mine in wanted.items():
            mine = mine[:MAX_AT_ONCE]
            calls = [_as_blocked_call(key, track) for key, track in mine]
            asked = [(key, track.seen.line) for key, track in mine]
            then = partial(self._apply_calls, tracks, asked)
            # In a child of its own: a path is read from memory whose lock may be held, as a blocked call may have it.
            number = self.looks.ask(uid, ResolveCalls(calls), [key[0] for key, _ in mine], deadline_s, now, then, APART)
            if number is not None:
                self._resolving |= set(asked)
                requests.append(number)
        return requests

    def _apply_calls(
        self, tracks: dict[ThreadKey, BlockedCallHistory], asked: Sequence[tuple[ThreadKey, str]],
        answer: Answer[list[ResolvedCall]],
    ) -> None:  # fmt: skip
        self._resolving.difference_update(asked)
        for (key, line), found in zip(asked, answer.value or (), strict=False):
            track = tracks.get(key)
            if track is not None and track.seen.line == line:
                track.target = found.target


def _as_blocked_call(key: ThreadKey, track: BlockedCallHistory) -> BlockedCall:
    call = parse_syscall(track.seen.line.encode("latin-1"))
    return BlockedCall(key[0], key[2], track.seen.syscall, list(call.args) if call is not None else [])


def merge_identity(known: ProcessFacts, found: IdentifiedProcess) -> ProcessFacts:
    """What is known of a process after an answer about it; `known` itself where that says nothing new."""
    if found.foreign:
        uid = known.uid if found.uid is None else found.uid
        return replace(
            known, uid=uid, foreign=True, environ={}, exe="", stepd=None, denied=False, cwd="",
            checkpoint_directories=(), settings=(), collective_timeout=None,
        )  # fmt: skip
    if found.environ is None or (not found.environ and known.environ):
        if found.title:
            return replace(known, stepd=parse_stepd(found.title))
        if found.denied and not known.denied:
            return replace(known, denied=True)
        return known  # it is ending: what was known before is better
    return replace(
        known, uid=known.uid if found.uid is None else found.uid, foreign=False, environ=found.environ,
        exe=found.exe, denied=False, cwd=found.cwd or known.cwd,
        checkpoint_directories=(found.checkpoint_directories or known.checkpoint_directories)[:MAX_DIRECTORIES],
        settings=_interned(found.settings) or known.settings, collective_timeout=found.collective_timeout,
    )  # fmt: skip


def _interned(settings: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """The same words are kept once, however many ranks have them."""
    return tuple((sys.intern(name), sys.intern(value)) for name, value in settings.items())
