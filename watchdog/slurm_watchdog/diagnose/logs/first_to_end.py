"""The process that ended first, as launchers, shells and Slurm say it in their tables and last words. Pure.

A launcher's own word of who was first counts, but for a rank that says itself that it had lost another one, and where
all ended alike: then none is named for being printed first. What was ended in order, after that, does not count.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct, picked
from slurm_watchdog.diagnose.logs.ranks import Failure, Ranks
from slurm_watchdog.knowledge.launcher_exits import Ending

ALIKE_SHARE = 0.5  # Where so many of the ranks ended in the same way, none of them is the one.
WATCHED_EVERY_S = 6.0
"""torchelastic looked at a node's workers every 5 s before torch 2.3: a failure seen so much earlier was earlier."""
SAME_S = 1.0  # The tables have whole seconds.
IN_ORDER = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
"""With which launchers, Slurm and people end a process."""


class End(Struct, kw_only=False):
    """One process that ended, or several of which Slurm says so together."""

    line: int
    how: Ending
    root: bool = False  # Its launcher says that it was the first one that failed.
    alone: bool = False  # No launcher says who was the first one.
    at: float | None = None
    number: int = 1
    out_of_memory: bool = False
    slurms: str = ""  # Slurm's words, where it is Slurm that says so.

    @property
    def named(self) -> bool:
        """Whether anything tells one process from another."""
        return self.how.rank is not None or self.how.local is not None or self.how.host is not None

    @property
    def row(self) -> str:
        """The row of the signatures that says how it ended."""
        other = "task_exit" if self.slurms else "launcher"
        return "oom_kill" if self.out_of_memory else self.how.row or other

    @property
    def words(self) -> str:
        return "was killed: out of memory" if self.out_of_memory else self.how.words

    @property
    def explains(self) -> bool:
        """Whether how it ended is a cause by itself, and nothing that a lost peer brings about."""
        return self.how.first_hand or self.row == "abort"


class FirstToEnd(msgspec.Struct, frozen=True):
    """Who ended first: one, or several of which none can be told from the others."""

    ends: tuple[End, ...]
    number: int  # Processes.
    host: str | None = None  # Where all of them ran, if others ran elsewhere.

    @property
    def one(self) -> End | None:
        return self.ends[0] if self.number == 1 and len(self.ends) == 1 else None


class Felt(Struct, kw_only=False):
    """Who says that it lost another one."""

    ranks: frozenset[int] = frozenset()
    codes: frozenset[int] = frozenset()
    """How those end whose rank is not known: after an exception of Python with code 1."""


NOBODY_FELT = Felt()


def first_to_end(ranks: Ranks, felt: Felt, cut: int | None, survived: Collection[int]) -> FirstToEnd | None:
    """Who ended first, before the line `cut` with which the run was ended from outside. `survived`: lines that are of
    an earlier end."""
    said = [end for end in (*_of_launchers(ranks), *_of_slurm(ranks, felt != NOBODY_FELT)) if end.line not in survived]
    ends = _not_in_order(_by_whom(said if cut is None else [end for end in said if end.line < cut]))
    first = _by_themselves(ends)
    by_itself = [end for end in first if end.how.first_hand]
    victims = [e for e in first if e not in by_itself and (e.how.rank in felt.ranks or e.how.code in felt.codes)]
    lost_at = min((end.at for end in victims if end.at is not None), default=None)
    lost_s = float("inf") if lost_at is None else lost_at + SAME_S
    known = [e for e in first if e in by_itself or (e not in victims and (e.at is None or e.at <= lost_s))]
    roots = [end for end in known if end.root]
    of_roots = {end.how.code for end in first if end.root}
    alike = _number([end for end in first if end.how.code in of_roots])
    if roots and (len(of_roots) > 1 or alike < max(2, ALIKE_SHARE * _world(ranks, said))):
        known = _earliest(roots)
    elif not roots and _differs(known):
        known = known[:1]
    return FirstToEnd(tuple(known), _number(known), _host_of(known, said)) if known else None


def _by_themselves(ends: Sequence[End]) -> list[End]:
    """Those that no lost peer brought about, if there are any. Beside another signal SIGKILL is the launcher's, for
    those that do not end by themselves."""
    others = [end for end in ends if end.how.signal != signal.SIGKILL]
    kills = [end for end in ends if end.how.signal == signal.SIGKILL and (end.root or end.alone)]
    aborted = [end for end in others if end.how.signal == signal.SIGABRT]
    if len(kills) > 1 and len(aborted) == 1:
        return aborted
    return [end for end in others if end.how.first_hand] or kills or others or list(ends)


def _differs(ends: Sequence[End]) -> bool:
    """Whether one ended before all others and in another way: theirs are alike, as of those that lost it."""
    others = {end.how.code for end in ends[1:]}
    return (
        len(ends) > 1 and ends[0].number == 1 and len(others) == 1 and ends[0].how.code not in others
        and _number(ends[1:]) > 1
    )  # fmt: skip


def _of_launchers(ranks: Ranks) -> list[End]:
    rows = [row for row in ranks.failures if row.code != 0]
    rows = [row for row in rows if row.code is not None] or rows  # of some only the line with the name was reported
    any_root = any(row.root for row in rows)
    return [_of_failure(row, alone=not any_root) for row in rows]


def _of_failure(row: Failure, alone: bool) -> End:
    pid = int(row.pid) if row.pid is not None else None
    how = picked(Ending, row, "rank", "local", "host", "code", pid=pid)
    return End(row.line, how, row.root, alone, row.stamp.seconds if row.stamp is not None else None)


def _of_slurm(ranks: Ranks, lost: bool) -> list[End]:
    """Its tasks, without those that it killed for another one. `lost`: ranks lost another one; of a task that is alone
    on its node it is then not known whether it is a launcher that leaves because its ranks did."""
    sure = ranks.several_a_host or not lost
    found: list[End] = []
    for task in ranks.tasks:
        if task.code is None or task.code == 0:
            continue
        killed = task.code == -signal.SIGKILL and not task.out_of_memory
        if killed and any(end.how.code != task.code for end in found):
            continue
        rank = task.task if ranks.tasks_are_ranks and (sure or not task.what.startswith("Exited")) else None
        how = Ending(rank=rank, host=task.host, code=task.code)
        found.append(
            End(task.line, how, alone=True, number=task.number, out_of_memory=task.out_of_memory, slurms=task.what)
        )
    return found


def _by_whom(ends: Sequence[End]) -> list[End]:
    """Each process once: what a launcher says of its ranks before what Slurm says of the launcher; where a shell or
    a launcher only says how, the one that ended for it."""
    launchers, tasks = [end for end in ends if not end.slurms], [end for end in ends if end.slurms]
    named = [end for end in launchers if end.named] or tasks
    nameless = [end for end in launchers if not end.named]
    if nameless and len(named) == 1 and named[0].number == 1:
        how = nameless[0].how if nameless[0].how.first_hand or not named[0].how.first_hand else named[0].how
        return [replace(named[0], how=replace(named[0].how, code=how.code))]
    kept: dict[tuple[object, ...], End] = {}
    for end in named or nameless:
        how = end.how
        who = (how.rank,) if how.rank is not None else (how.host, how.local, how.pid, end.line * (end.number > 1))
        old = kept.get(who)
        kept[who] = end if old is None else replace(old, root=old.root or end.root)
    ends = list(kept.values())
    with_pid = {end.how.local for end in ends if end.how.pid is not None} - {None}
    return [end for end in ends if end.how.pid is not None or end.how.local not in with_pid]


def _not_in_order(ends: Sequence[End]) -> list[End]:
    """Those that were not told to end. A signal that ends a process in order counts where it was sent to one alone."""
    own = [end for end in ends if end.how.signal not in IN_ORDER]
    if own:
        return own
    told = [end for end in ends if end.root] or list(ends)
    return told if _number(told) == 1 else []


def _earliest(roots: list[End]) -> list[End]:
    """Of the first failures of several nodes the one that was long before the others."""
    if len(roots) < 2 or any(end.at is None for end in roots):
        return roots
    by_time = sorted(roots, key=lambda end: end.at or 0.0)
    early = (by_time[1].at or 0.0) - (by_time[0].at or 0.0) >= WATCHED_EVERY_S
    return by_time[:1] if early else roots


def _world(ranks: Ranks, ends: Sequence[End]) -> int:
    highest = max([*ranks.seen, *(end.how.rank for end in ends if end.how.rank is not None)], default=-1)
    return ranks.world or max(highest + 1, ranks.closed + _number(_by_whom(ends)))


def _number(ends: Sequence[End]) -> int:
    return sum(end.number for end in ends)


def _host_of(chosen: Sequence[End], ends: Sequence[End]) -> str | None:
    hosts = {end.how.host for end in chosen}
    return next(iter(hosts)) if len(hosts) == 1 and (len(chosen) == 1 or {e.how.host for e in ends} - hosts) else None
