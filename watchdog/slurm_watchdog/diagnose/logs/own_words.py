"""What ranks wrote of their own ends, held against who is seen to be gone. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.analysis.job_state import dead_for_s
from slurm_watchdog.knowledge.log_signatures import log_table
from slurm_watchdog.model.cluster_view import JobView, ProcessView
from slurm_watchdog.model.evidence import OwnWords
from slurm_watchdog.parse.training_log.line import parse_line

ABOUT_S = 60.0
"""A rank that raised an exception may take so long to end; what it wrote longer before is of another start."""
FIRST_S = 2.0  # Two reports of one moment differ by less: who wrote so much before all others was first.
SAID = 8


def words_of(job: JobView, rank: ProcessView) -> OwnWords | None:
    """What this rank, which is gone, wrote of its end; None where nothing is known."""
    for each in job.own_words:
        if (each.node, each.rank) == (rank.node, rank.process.rank):
            return each if abs(each.age_s - dead_for_s(rank)) <= ABOUT_S else None
    return None


def who_failed_first(job: JobView, dead: Sequence[ProcessView]) -> ProcessView | None:
    """Of those that are gone the one that wrote why before all others. None where none did, several at once, where it
    only says that it lost another one, or where a rank of another node was gone as early and said nothing."""
    wrote = [(words.age_s, rank) for rank in dead if (words := words_of(job, rank)) is not None]
    wrote.sort(key=lambda each: -each[0])
    if not wrote or (len(wrote) > 1 and wrote[0][0] - wrote[1][0] < FIRST_S):
        return None
    first = wrote[0][1]
    mute = [rank for rank in dead if rank.node != first.node and words_of(job, rank) is None]
    if any(dead_for_s(rank) >= dead_for_s(first) - FIRST_S for rank in mute):
        return None
    words = words_of(job, first)
    return None if words is None or _is_consequence(words.text) else first


def _is_consequence(text: str) -> bool:
    fact = parse_line(text)
    return fact is not None and fact.pattern in log_table().consequences


def facts_of_ends(job: JobView, dead: Sequence[ProcessView]) -> tuple[str, ...]:
    """A sentence for each of the first that wrote something."""
    wrote = [words for rank in dead if (words := words_of(job, rank)) is not None]
    wrote.sort(key=lambda each: -each.age_s)
    return tuple(f"rank {each.rank} on {each.node} wrote {each.age_s:.0f} s ago: {each.text}" for each in wrote[:SAID])
