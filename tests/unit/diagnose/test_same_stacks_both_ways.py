"""The same stacks give the same verdict with `group-stacks`, with `diagnose` and in a live incident, by the same limits:
whoever is named here is named there.

What still differs, to be unified when the judge is rebuilt as one table:

| situation | incident | `diagnose` | `group-stacks` |
|---|---|---|---|
| before the limit, later than 15 s and twice the slowest recent step | nothing, or a hang that is *proven* (`proven_floor`) | names who stands out, exit code 1, and says from when on it is an incident | no hang |
| nothing at work in a save or an evaluation | reported after 5 min | as an incident for a server that does not answer; otherwise `checkpoint_floor`, `evaluation_floor` | `checkpoint_floor`, `evaluation_floor` |
| a rank outside computes, or moves data | nothing before `busy_limit` | "still moves or computes" | a hang after the limit |
| the log says that the job saves or evaluates | the limit of that phase | the same | not known: `--since-last-step` counts as in training |
| before 5 steps were seen | `startup_grace` | the same limit; before two steps the stacks alone | only below functions that start a training |
| slowest recent step | from the log | the same | `--typical-step` |
| nobody is in a collective | `stalled_progress` tells much later | "nothing moves", nobody named | all in one place that does not end, or nobody |
| most ranks end | `wedged_teardown` | `wedged_teardown` once ranks are gone | names who is behind |
| a flush on a file that answers | after 30 min (`FLUSH_PATIENCE_S`, fixed) | the same | by its place alone |
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_watchdog.analysis.progress_limit import progress_limit
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.collective_hang import hang_finding as judge_live
from slurm_watchdog.diagnose.job import Diagnosis, JobEvidence, diagnose
from slurm_watchdog.diagnose.stacks.case import Options
from slurm_watchdog.diagnose.stacks.verdict import diagnose_dumps
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import Truth
from tests.builders import stacks as at
from tests.builders.views import cluster, job, progress, seen, slurm_job, snapshot, stack

WAITING = (at.REDUCE, at.BARRIER, at.RECV, at.BACKWARD)
PLACES = (
    *WAITING, at.BROADCAST, at.LOADER, at.FORWARD, at.SAVE, at.LOCK, at.PDB, at.DESTROY, at.COMPILE, at.UPLOAD, at.DEVICE, at.STAT, at.LOG,
    at.EVALUATE,
)  # fmt: skip
STEP_S = 3.0
SHIPPED = CollectiveHang()
Named = tuple[int | None, ...] | None
"""The ranks that are named; None: no hang."""


def node_of(rank: int) -> str:
    return f"n{rank // 2}"


def view_of(places: Sequence[Sequence[str]], since_s: float) -> JobView:
    """Three dumps of a job, ten seconds apart, in which every rank stands where it stood and uses no processor time."""
    ranks = range(len(places))
    lines = [[f"{frame.rpartition(':')[0]})" for frame in place] for place in places]
    return job(
        job=slurm_job(nodes=tuple(dict.fromkeys(map(node_of, ranks)))),
        processes=tuple(seen(rank, node=node_of(rank), world_size=len(places)) for rank in ranks),
        progress=progress(since_s, intervals_s=(STEP_S,) * 20),
        snapshots=tuple(
            snapshot(age_s, [stack(rank, lines[rank], node=node_of(rank)) for rank in ranks]) for age_s in (30, 20, 10)
        ),
        run_age_s=1e6,
    )


def live(places: Sequence[Sequence[str]], since_s: float, limits: CollectiveHang = SHIPPED) -> Named:
    finding = judge_live(view_of(places, since_s), 10_000.0, limits)
    return tuple(sorted(culprit.rank or 0 for culprit in finding.culprits)) if finding.truth is Truth.BAD else None


def asked(places: Sequence[Sequence[str]], since_s: float, limits: CollectiveHang) -> tuple[Diagnosis, float]:
    """What `diagnose` says, and the limit of the job."""
    view = view_of(places, since_s)
    limit_s = progress_limit(view, limits).seconds
    gathered = JobEvidence(snapshots=view.snapshots)
    return diagnose(cluster(view), view, gathered, blocked_for_s=60.0, limits=limits, limit_s=limit_s), limit_s


def sent(places: Sequence[Sequence[str]], since_s: float, limits: CollectiveHang = SHIPPED) -> Named:
    options = Options(since_last_step_s=since_s, typical_step_s=STEP_S, limits=limits)
    found = diagnose_dumps(at.dumps_of(places), options)
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


ODD = {
    "broadcast": at.BROADCAST, "loader": at.LOADER, "forward": at.FORWARD, "save": at.SAVE, "lock": at.LOCK,
    "prompt": at.PDB, "teardown": at.DESTROY, "compile": at.COMPILE, "upload": at.UPLOAD, "device": at.DEVICE,
    "file": at.STAT, "log": at.LOG, "evaluate": at.EVALUATE, "join": at.INIT, "import": at.IMPORT,
    "backward": at.BACKWARD,
}  # fmt: skip
AGES = (20, 59, 61, 121, 299, 301, 604, 1799, 1804, 3604, 7100, 7204, 8000, 36_000)
SITE = CollectiveHang(floor=120.0, checkpoint_floor=7200.0, evaluation_floor=600.0, startup_grace=900.0)


@pytest.mark.parametrize("limits", [CollectiveHang(), SITE], ids=["shipped", "site"])
@pytest.mark.parametrize("place", ODD.values(), ids=ODD)
def test_one_question_has_one_answer_at_every_age(place: Sequence[str], limits: CollectiveHang) -> None:
    """One of eight ranks stands there, and the others wait. `diagnose` says before the limit what it sees, with the
    limit: the head of this file."""
    places = [place if rank == 3 else at.REDUCE for rank in range(8)]
    for since_s in AGES:
        incident = live(places, since_s, limits)
        assert sent(places, since_s, limits) == incident, since_s
        found, limit_s = asked(places, since_s, limits)
        named = tuple(sorted(culprit.rank or 0 for culprit in found.culprits)) if found.is_hang else None
        before = since_s < limit_s and f"no incident before {limit_s:.0f} s" in found.summary
        assert named == incident or before, since_s


def test_a_rank_that_saves_for_8000_seconds_hangs_for_each_of_them() -> None:
    places = [at.SAVE if rank == 3 else at.REDUCE for rank in range(8)]
    assert live(places, 8000.0) == sent(places, 8000.0) == (3,)
    assert [each.rank for each in asked(places, 8000.0, CollectiveHang())[0].culprits] == [3]
