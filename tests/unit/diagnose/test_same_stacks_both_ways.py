"""The same stacks give the same verdict with `group-stacks` and in a live incident: whoever is named here is
named there."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.collective_hang import hang_finding as judge_live
from slurm_watchdog.diagnose.stacks.case import Options
from slurm_watchdog.diagnose.stacks.verdict import diagnose_dumps
from slurm_watchdog.model.incidents import Truth
from tests.builders import stacks as at
from tests.builders.views import job, progress, seen, slurm_job, snapshot, stack

WAITING = (at.REDUCE, at.BARRIER, at.RECV, at.BACKWARD)
PLACES = (
    *WAITING, at.BROADCAST, at.LOADER, at.FORWARD, at.SAVE, at.LOCK, at.PDB, at.DESTROY, at.COMPILE, at.UPLOAD, at.DEVICE, at.STAT, at.LOG,
    at.EVALUATE,
)  # fmt: skip
STEP_S = 3.0
Named = tuple[int | None, ...] | None
"""The ranks that are named; None: no hang."""


def node_of(rank: int) -> str:
    return f"n{rank // 2}"


def live(places: Sequence[Sequence[str]], since_s: float) -> Named:
    """Three dumps of a job, ten seconds apart, in which every rank stands where it stood and uses no processor time."""
    ranks = range(len(places))
    lines = [[f"{frame.rpartition(':')[0]})" for frame in place] for place in places]
    view = job(
        job=slurm_job(nodes=tuple(dict.fromkeys(map(node_of, ranks)))),
        processes=tuple(seen(rank, node=node_of(rank), world_size=len(places)) for rank in ranks),
        progress=progress(since_s, intervals_s=(STEP_S,) * 20),
        snapshots=tuple(
            snapshot(age_s, [stack(rank, lines[rank], node=node_of(rank)) for rank in ranks]) for age_s in (30, 20, 10)
        ),
        run_age_s=1e6,
    )
    finding = judge_live(view, 10_000.0, CollectiveHang())
    return tuple(sorted(culprit.rank or 0 for culprit in finding.culprits)) if finding.truth is Truth.BAD else None


def sent(places: Sequence[Sequence[str]], since_s: float) -> Named:
    found = diagnose_dumps(at.dumps_of(places), Options(since_last_step_s=since_s, typical_step_s=STEP_S))
    return tuple(sorted(culprit.rank or 0 for culprit in found.culprits)) if found.is_hang else None


@st.composite
def jobs(draw: st.DrawFn) -> list[Sequence[str]]:
    """Most ranks wait in one place, and some stand anywhere."""
    waiting, ranks = draw(st.sampled_from(WAITING)), draw(st.sampled_from((2, 4, 8)))
    odd = draw(st.dictionaries(st.integers(0, ranks - 1), st.sampled_from(PLACES), max_size=3))
    return [odd.get(rank, waiting) for rank in range(ranks)]


@settings(max_examples=300, deadline=None)
@given(jobs(), st.sampled_from([400.0, 3600.0, 36000.0]))
def test_ranks_that_stand_still_are_judged_alike_live_and_from_dumps_that_somebody_sends(
    places: list[Sequence[str]], since_s: float
) -> None:
    found, expected = live(places, since_s), sent(places, since_s)
    # Without anybody in a collective a live incident is another detector's. And it names no majority: it may
    # act on whom it names.
    nobody_waits = found is None and not any(place in (*WAITING[:3], at.BROADCAST) for place in places)
    # Of a job most of whose ranks end, `wedged_teardown` says who is behind.
    most_end = found == () and 2 * sum(place is at.DESTROY for place in places) > len(places)
    a_majority = found == () and expected is not None and 2 * len(expected) > len(places)
    assert found == expected or nobody_waits or most_end or a_majority
