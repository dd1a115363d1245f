"""The process that ended first, as launchers, shells and Slurm say it in their tables and last words. Pure.

A launcher's own word of who was first counts, but for a rank that says itself that it had lost another one, and where
all ended alike: then none is named for being printed first. What was ended in order, after that, does not count.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence

import msgspec
from msgspec.structs import replace

from slurm_watchdog.diagnose.logs.ranks import Ranks
from slurm_watchdog.knowledge.launcher_exits import Ending

ALIKE_SHARE = 0.5  # Where so many of the ranks ended in the same way, none of them is the one.
WATCHED_EVERY_S = 6.0
"""torchelastic looked at a node's workers every 5 s before torch 2.3: a failure seen so much earlier was earlier."""
SAME_S = 1.0  # The tables have whole seconds.
IN_ORDER = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
"""With which launchers, Slurm and people end a process."""


class FirstToEnd(msgspec.Struct, frozen=True):
    """Who ended first: one, or several of which none can be told from the others."""

    ends: tuple[Ending, ...]
    number: int  # Processes.
    host: str | None = None  # Where all of them ran, if others ran elsewhere.

    @property
    def one(self) -> Ending | None:
        return self.ends[0] if self.number == 1 and len(self.ends) == 1 else None


def first_to_end(
    ranks: Ranks, felt: Collection[int], codes: Collection[int], cut: int | None, survived: Collection[int]
) -> FirstToEnd | None:
    """Who ended first, before the line `cut` with which the run was ended from outside. `felt`: ranks that say they
    lost another one; `codes`: how those end whose rank is not known; `survived`: lines that are of an earlier end."""
    said = [*_of_launchers(ranks), *_of_slurm(ranks, bool(felt or codes))]
    said = [end for end in said if end.line not in survived]
    ends = _not_in_order(_by_whom(said if cut is None else [end for end in said if end.line < cut]))
    first = _by_themselves(ends)
    by_itself = [end for end in first if end.first_hand]
    victims = [end for end in first if end not in by_itself and (end.rank in felt or end.code in codes)]
    lost_at = min((end.at for end in victims if end.at is not None), default=None)
    lost_s = float("inf") if lost_at is None else lost_at + SAME_S
    known = [e for e in first if e in by_itself or (e not in victims and (e.at is None or e.at <= lost_s))]
    roots = [end for end in known if end.root]
    of_roots = {end.code for end in first if end.root}
    alike = _number([end for end in first if end.code in of_roots])
    if roots and (len(of_roots) > 1 or alike < max(2, ALIKE_SHARE * _world(ranks, said))):
        known = _earliest(roots)
    elif not roots and _differs(known):
        known = known[:1]
    return FirstToEnd(tuple(known), _number(known), _host_of(known, said)) if known else None


def _by_themselves(ends: Sequence[Ending]) -> list[Ending]:
    """Those that no lost peer brought about, if there are any. Beside another signal SIGKILL is the launcher's, for
    those that do not end by themselves."""
    others = [end for end in ends if end.signal != signal.SIGKILL]
    kills = [end for end in ends if end.signal == signal.SIGKILL and (end.root or end.alone)]
    aborted = [end for end in others if end.signal == signal.SIGABRT]
    if len(kills) > 1 and len(aborted) == 1:
        return aborted
    return [end for end in others if end.first_hand] or kills or others or list(ends)


def _differs(ends: Sequence[Ending]) -> bool:
    """Whether one ended before all others and in another way: theirs are alike, as of those that lost it."""
    others = {end.code for end in ends[1:]}
    alone = len(ends) > 1 and ends[0].number == 1 and ends[0].code not in others
    return alone and len(others) == 1 and _number(ends[1:]) > 1


def _of_launchers(ranks: Ranks) -> list[Ending]:
    rows = [row for row in ranks.failures if row.code != 0]
    rows = [row for row in rows if row.code is not None] or rows  # of some only the line with the name was reported
    any_root = any(row.root for row in rows)
    return [replace(row, alone=not any_root) for row in rows]


def _of_slurm(ranks: Ranks, lost: bool) -> list[Ending]:
    """Its tasks, without those that it killed for another one. `lost`: ranks lost another one; of a task that is alone
    on its node it is then not known whether it is a launcher that leaves because its ranks did."""
    sure = ranks.several_a_host or not lost
    found: list[Ending] = []
    for task in ranks.tasks:
        killed = task.code == -signal.SIGKILL and not task.out_of_memory
        if not task.code or (killed and any(end.code != task.code for end in found)):
            continue
        is_rank = ranks.tasks_are_ranks and (sure or not task.what.startswith("Exited"))
        found.append(replace(task, rank=task.task if is_rank else None, alone=True))
    return found


def _by_whom(ends: Sequence[Ending]) -> list[Ending]:
    """Each process once: what a launcher says of its ranks before what Slurm says of the launcher; where a shell or
    a launcher only says how, the one that ended for it."""
    launchers, tasks = [end for end in ends if not end.what], [end for end in ends if end.what]
    named = [end for end in launchers if end.named] or tasks
    nameless = [end for end in launchers if not end.named]
    if nameless and len(named) == 1 and named[0].number == 1:
        how = nameless[0] if nameless[0].first_hand or not named[0].first_hand else named[0]
        return [replace(named[0], code=how.code)]
    kept: dict[tuple[object, ...], Ending] = {}
    for end in named or nameless:
        who = (end.rank,) if end.rank is not None else (end.host, end.local, end.pid, end.line * (end.number > 1))
        old = kept.get(who)
        kept[who] = end if old is None else replace(old, root=old.root or end.root)
    ends = list(kept.values())
    with_pid = {end.local for end in ends if end.pid is not None} - {None}
    return [end for end in ends if end.pid is not None or end.local not in with_pid]


def _not_in_order(ends: Sequence[Ending]) -> list[Ending]:
    """Those that were not told to end. A signal that ends a process in order counts where it was sent to one alone."""
    own = [end for end in ends if end.signal not in IN_ORDER]
    if own:
        return own
    told = [end for end in ends if end.root] or list(ends)
    return told if _number(told) == 1 else []


def _earliest(roots: list[Ending]) -> list[Ending]:
    """Of the first failures of several nodes the one that was long before the others."""
    if len(roots) < 2 or any(end.at is None for end in roots):
        return roots
    by_time = sorted(roots, key=lambda end: end.at or 0.0)
    early = (by_time[1].at or 0.0) - (by_time[0].at or 0.0) >= WATCHED_EVERY_S
    return by_time[:1] if early else roots


def _world(ranks: Ranks, ends: Sequence[Ending]) -> int:
    highest = max([*ranks.seen, *(end.rank for end in ends if end.rank is not None)], default=-1)
    return ranks.world or max(highest + 1, len(ranks.closed) + _number(_by_whom(ends)))


def _number(ends: Sequence[Ending]) -> int:
    return sum(end.number for end in ends)


def _host_of(chosen: Sequence[Ending], ends: Sequence[Ending]) -> str | None:
    hosts = {end.host for end in chosen}
    return next(iter(hosts)) if len(hosts) == 1 and (len(chosen) == 1 or {e.host for e in ends} - hosts) else None
