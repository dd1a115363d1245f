"""What a report says in words, in a terminal and a file alike. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.base.text import duration, plural
from slurm_watchdog.model.lost_time import Savings

LEAST_H = 0.05  # what is less is not worth a sentence


def node_time(hours: float) -> str:
    """`127.5 node-hours`, below one hour `24 node-minutes`."""
    return f"{hours:,.1f} node-hours" if hours >= 1 else plural(round(hours * 60), "node-minute")


def head(when: str, jobs: int, allocated_h: float, measured_h: float, effective_h: float) -> str:
    """What the jobs had, and how much of it counted; hours are node-hours."""
    had = f"{when} {plural(jobs, 'job')} had {node_time(allocated_h)}"
    if measured_h <= 0:
        return f"{had}; no job's steps could be read."
    return (
        f"{had}: of the {node_time(measured_h)} whose steps could be read {effective_h / measured_h:.1%} went into "
        f"steps that were kept, and {node_time(measured_h - effective_h)} were lost."
    )


def to_be_noticed(hours: Sequence[tuple[str, float]], shown: int = 4) -> str:
    """How much of what was lost came before its incident was reported; empty if nothing that shows."""
    if (whole_h := sum(each for _, each in hours)) < LEAST_H:
        return ""
    kinds = ", ".join(f"{kind} {each:,.1f}" for kind, each in hours[:shown] if each >= LEAST_H)
    of = f" ({kinds})" if kinds else ""
    return f"Of what was lost {node_time(whole_h)} were spent waiting to be noticed, before a report{of}."


def would_have_saved(found: Savings) -> str:
    """What the decisions that were only observed would have saved; empty if there was none."""
    for_nothing = f"{plural(found.recovered, 'run')} trained again without it" if found.recovered else ""
    if not found.observed:
        return f"Mode act would have restarted for nothing: {for_nothing}." if for_nothing else ""
    return (
        f"In mode act {node_time(found.would_save_h)} more would have been saved, in "
        f"{plural(found.observed, 'run')}: from each decision that was only observed until the run, which made no step "
        "any more, ended"
        f"{f'; {for_nothing}' if for_nothing else ''}."
    )


def saved(found: Savings) -> str:
    """What restarts saved, and of how many that is not known; empty if there was none."""
    if not found.compared:
        ended = plural(found.unknown, "incident")
        why = "no incident of the same kind and user ended without one before"
        return f"What actions saved in {ended} is unknown: {why}." if found.unknown else ""
    of = f"; unknown for {found.unknown:,} without one to compare with" if found.unknown else ""
    return (
        f"Actions saved {node_time(found.saved_h)} in {plural(found.compared, 'incident')}, against "
        f"{duration(found.usual_wait_s or 0.0)} that such incidents of the same jobs took without one (median){of}."
    )
