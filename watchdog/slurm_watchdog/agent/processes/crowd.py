"""Which members of jobs are looked at in every tick, where there are too many: the others are a crowd, looked
at in turn. Pure.

Of 55,000 processes of one user a report names some dozens (report_rows), and a look at each of them in every
tick would cost a seventh of a core.
That one of the crowd is there is seen whenever /proc is listed; that it hangs, when its turn comes: then it
is watched like a rank.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Final

from slurm_watchdog.agent.proc.entry import HANGS, Entry
from slurm_watchdog.agent.processes.report_rows import ORDER
from slurm_watchdog.base.fair_share import fair_share
from slurm_watchdog.model.observations import Role

HELPERS_OF_JOB: Final = 256
"""Of one job on this node, looked at in every tick: four times what a report names (report_rows.HELPERS_OF_JOB)."""
WATCHED: Final = 4096
"""Of all jobs on this node: twice what a report names."""
RECONSIDER_EVERY: Final = 120
"""Ticks, ten minutes, after which the crowd is chosen again, for there may be room again. Who leaves it
sooner: one that hangs, or changes."""


def pick_crowd(mine: Iterable[Entry], before: Container[int] = ()) -> set[int]:
    """The members of jobs (`mine`) that are one of a crowd, by pid. `before`: those that were watched, who
    stay so where there is room."""
    rows = list(mine)
    if len(rows) <= HELPERS_OF_JOB:
        return set()

    def order(entry: Entry) -> tuple[bool, bool, int, int]:
        assert entry.member is not None
        pid, start_ticks = entry.key
        return (entry.stat.state not in HANGS, pid not in before, ORDER[entry.member.role], start_ticks)

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
