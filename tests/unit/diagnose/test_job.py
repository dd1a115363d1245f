"""One sentence about one job: what is said in which order, and when no rank is identified."""

from __future__ import annotations

import pytest

from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.detect.filesystem_stall import FilesystemStall
from slurm_watchdog.diagnose.job import Diagnosis, JobEvidence, diagnose
from slurm_watchdog.model.cluster_view import (
    FilesystemView,
    JobView,
    MountAnswer,
    ProcessView,
    Progress,
    StackSnapshot,
)
from slurm_watchdog.model.evidence import LockWait
from tests.builders.logged_runs import errors
from tests.builders.views import (
    COMPUTE,
    LOADER,
    RECV,
    SAVE,
    blocked,
    cluster,
    job,
    progress,
    seen,
    snapshot,
    stack,
    still,
)

LATE = progress(90.0, steps_seen=50, step_s=2.0, intervals_s=(2.0, 2.0, 2.5))
HANG = still(RECV, RECV, RECV, LOADER)


def said(
    view: JobView,
    gathered: JobEvidence | None = None,
    filesystems: tuple[FilesystemView, ...] = (),
    limit_s: float | None = None,
    blocked_for_s: float = FilesystemStall().blocked_for,
) -> Diagnosis:
    return diagnose(
        cluster(view, filesystems=filesystems),
        view,
        gathered or JobEvidence(snapshots=HANG),
        blocked_for_s=blocked_for_s,
        limits=CollectiveHang(),
        limit_s=limit_s,
    )


def ranks(**odd: object) -> tuple[ProcessView, ...]:
    """Four ranks, of which rank 3 differs by `odd`."""
    return tuple(seen(rank, **(odd if rank == 3 else {})) for rank in range(4))  # type: ignore[arg-type]


def stuck(seconds: float, syscall: str = "write", **answers: bool) -> tuple[JobView, tuple[FilesystemView, ...]]:
    """Rank 3 on n2 has been in one call for so long; nodes that answered a probe, or did not."""
    processes = ranks(blocked=blocked(seconds, syscall=syscall), state="D")
    given = tuple((node, MountAnswer(responding=ok, age_s=3.0, seconds=0.1)) for node, ok in sorted(answers.items()))
    filesystem = FilesystemView(
        key="/shared", mount="/shared", blocked=(processes[3],), known_nodes=("n2",), answers=given
    )
    return job(processes=processes, progress=LATE), (filesystem,)


@pytest.mark.parametrize(
    ("step_age_s", "kind"), [(29.0, "lingering_job"), (35.0, "lingering_job"), (2.0, "progressing")]
)
def test_a_step_that_was_read_a_moment_after_the_death_was_made_before_it(step_age_s: float, kind: str) -> None:
    """That a rank has ended is reported at once, its last line with the next look at the log."""
    processes = tuple(seen(rank, gone_s=30.0 if rank == 1 else None) for rank in range(4))
    known = progress(step_age_s, step_s=2.0, intervals_s=(2.0, 2.0, 2.5))
    found = said(
        job(processes=processes, progress=known),
        JobEvidence(snapshots=still(COMPUTE, COMPUTE, COMPUTE, COMPUTE)),
    )
    assert found.kind == kind
    assert [c.rank for c in found.culprits] == ([1] if kind == "lingering_job" else [])


LAST = progress(90.0, step=60, total_steps=60)
SHUTDOWN = ("_shutdown (threading.py)",)


@pytest.mark.parametrize(("known", "where"), [(LAST, SHUTDOWN), (LATE, SHUTDOWN), (LAST, COMPUTE)])
def test_diagnosis_after_the_last_step_names_the_ranks_that_stay_and_not_those_that_left(
    known: Progress, where: tuple[str, ...]
) -> None:
    processes = tuple(seen(rank, gone_s=None if rank == 1 else 100.0) for rank in range(4))
    left = tuple(snapshot(age_s, [stack(1, where)]) for age_s in (30, 20, 10))
    found = said(job(processes=processes, progress=known), JobEvidence(snapshots=left))
    assert (found.is_hang, found.kind, [c.rank for c in found.culprits]) == (True, "wedged_teardown", [1])
    saves = tuple(snapshot(age_s, [stack(1, SAVE)]) for age_s in (30, 20, 10))
    busy = said(job(processes=processes, progress=LAST), JobEvidence(snapshots=saves))
    assert (busy.is_hang, busy.kind, busy.culprits) == (False, "busy", ())
    unseen = said(job(processes=processes, progress=LAST), JobEvidence())
    assert (unseen.is_hang, unseen.culprits) == (None, ())


def test_the_rank_outside_the_collective_is_named_in_the_sentence() -> None:
    found = said(job(progress=LATE))
    assert (found.is_hang, found.kind, [c.rank for c in found.culprits]) == (True, "collective_hang", [3])
    assert found.summary.startswith("Job 7 hangs after step ")
    assert "3 ranks wait for it" in found.summary


def test_the_one_rank_that_works_while_the_others_wait_is_told_and_not_accused() -> None:
    def dump(age_s: float, line: int) -> StackSnapshot:
        places = (RECV, RECV, RECV, (f"count (train.py:{line})",))
        return snapshot(age_s, [stack(rank, lines) for rank, lines in enumerate(places)])

    found = said(job(progress=LATE), JobEvidence(snapshots=(dump(30, 10), dump(20, 14), dump(10, 12))))
    assert (found.is_hang, found.kind, found.culprits) == (False, "busy", ())
    assert "rank 3" in found.summary and "3 ranks wait for it" in found.summary


def test_a_job_that_makes_steps_is_well_whatever_its_stacks_look_like() -> None:
    found = said(job(progress=progress(4.0, steps_seen=50, step_s=2.0, intervals_s=(2.0,))))
    assert (found.is_hang, found.kind, found.culprits) == (False, "progressing", ())


def test_a_grace_that_the_job_was_granted_is_no_step_of_it() -> None:
    """As when the controller was stalled, or a filesystem answers again: no hang is told before the limit, and what the
    stacks show is no progress."""
    known = progress(7.0, ungranted_age_s=75.0, steps_seen=50, step_s=2.0, intervals_s=(2.0,))
    found = said(job(progress=known), limit_s=60.0)
    assert (found.kind, [c.rank for c in found.culprits]) == ("collective_hang", [3])
    assert "75 s ago" in found.summary and "no incident before" not in found.summary


def test_a_job_of_which_no_rank_is_left_makes_no_progress_a_moment_after_its_last_step() -> None:
    gone = tuple(seen(rank, gone_s=3.0) for rank in range(4))
    found = said(job(processes=gone, progress=progress(8.0, steps_seen=50, step_s=2.0, intervals_s=(2.0,))))
    assert (found.is_hang, found.kind) == (None, "unknown")
    assert "none of its ranks is alive" in found.summary and "progress" not in found.summary


def test_slow_steps_have_their_time_and_the_detectors_limit_ends_it() -> None:
    slow = progress(90.0, steps_seen=50, step_s=105.0, intervals_s=(105.0, 111.0))
    assert said(job(progress=slow)).kind == "progressing"
    assert said(job(progress=slow), limit_s=60.0).kind == "collective_hang"


def test_an_evaluation_that_its_log_announces_is_no_hang_before_its_limit() -> None:
    view = job(progress=progress(90.0, steps_seen=50, step_s=2.0, intervals_s=(2.0,), phase="evaluation"))
    assert said(view, limit_s=1800.0).kind == "progressing"
    assert said(view, limit_s=60.0).kind == "collective_hang"


def test_an_evaluation_that_takes_longer_than_those_of_the_run_before_is_looked_at() -> None:
    known = {"phase": "evaluating", "phase_intervals_s": (20.0, 25.0, 30.0)}
    for age_s, kind in ((50.0, "progressing"), (90.0, "collective_hang")):
        view = job(progress=progress(age_s, steps_seen=50, step_s=2.0, intervals_s=(2.0,), **known))
        assert said(view, limit_s=1800.0).kind == kind


def test_a_rank_that_is_gone_comes_before_the_stacks_of_the_others() -> None:
    found = said(job(processes=ranks(gone_s=20.0), progress=LATE))
    assert (found.kind, [c.rank for c in found.culprits]) == ("lingering_job", [3])
    assert "3 ranks live on" in found.summary


def test_a_job_that_made_steps_since_a_rank_was_lost_goes_on_without_it() -> None:
    view = job(processes=ranks(gone_s=20.0), progress=progress(4.0, steps_seen=50, step_s=2.0, intervals_s=(2.0,)))
    assert said(view).kind == "progressing"


def test_a_stopped_rank_is_named_as_such() -> None:
    found = said(job(processes=ranks(state="T"), progress=LATE))
    assert (found.kind, [c.rank for c in found.culprits]) == ("rank_stopped", [3])


def test_a_stopped_rank_stands_in_a_group_that_is_stopped_and_not_one_that_runs() -> None:
    found = said(job(processes=ranks(state="T"), progress=LATE), JobEvidence(snapshots=still(RECV, RECV, RECV, RECV)))
    assert [(str(group.place), group.ranks) for group in found.groups] == [
        ("waits in a collective", (0, 1, 2)),
        ("is stopped", (3,)),
    ]


def test_a_rank_blocked_on_one_nodes_filesystem_is_named_with_its_file() -> None:
    view, filesystems = stuck(80.0, n1=True, n2=False)
    found = said(view, filesystems=filesystems)
    assert (found.kind, found.filesystems[0].scope) == ("filesystem_stall", "one_node")
    assert (found.culprits[0].rank, found.culprits[0].path) == (3, "/shared/log.txt")
    assert "it is this node" in found.summary


def test_a_filesystem_that_fails_on_several_nodes_is_nobodys_fault() -> None:
    view, filesystems = stuck(80.0, n1=False, n2=False, n3=False)
    found = said(view, filesystems=filesystems)
    assert (found.kind, found.filesystems[0].scope) == ("filesystem_outage", "outage")
    assert "no node's fault" in found.summary


def test_one_file_on_a_filesystem_that_answers_is_this_file_and_a_flush_has_its_time() -> None:
    view, filesystems = stuck(80.0, n2=True)
    assert said(view, filesystems=filesystems).filesystems[0].scope == "one_file"
    assert said(view, filesystems=filesystems).kind == "filesystem_stall"
    view, filesystems = stuck(80.0, "fsync", n2=True)
    flushing = said(view, JobEvidence(snapshots=still(RECV, RECV, RECV, SAVE)), filesystems)
    assert flushing.culprits == ()


def test_a_short_wait_for_a_disk_is_shown_and_accuses_nobody() -> None:
    view, filesystems = stuck(20.0, n1=True, n2=False)
    found = said(view, JobEvidence(snapshots=still(RECV, RECV, RECV, SAVE)), filesystems)
    assert found.filesystems[0].scope == "one_node"
    assert found.culprits == ()


def test_diagnosis_shows_a_wait_for_a_file_lock_with_its_holder_and_names_no_culprit_for_it() -> None:
    lock = LockWait(kind="FLOCK WRITE", file="08:02:77", holder_pid=55, holder="python")
    gathered = JobEvidence(snapshots=still(COMPUTE, COMPUTE, COMPUTE, COMPUTE), locks={("n2", 103): lock})
    found = said(job(progress=LATE), gathered)
    assert [each.scope for each in found.filesystems] == ["lock"]
    assert "held by python (pid 55)" in found.filesystems[0].summary
    assert found.culprits == ()


def test_without_stacks_nothing_is_said_and_a_silent_node_is_named_with_its_reason() -> None:
    found = said(job(progress=LATE), JobEvidence(silent={"n2": "the agent on n2 does not report"}))
    assert (found.is_hang, found.kind, found.culprits) == (None, "unknown", ())
    assert {each.rank: each.reason for each in found.undumped} == {
        2: "the agent on n2 does not report", 3: "the agent on n2 does not report",
    }  # fmt: skip


def test_the_culprit_in_a_node_that_gave_nothing_leaves_the_others_unaccused() -> None:
    snapshots = tuple(
        type(each)(age_s=each.age_s, stacks=each.stacks[:2], silent_nodes=("n2",))
        for each in still(RECV, LOADER, RECV, RECV)
    )
    found = said(job(progress=LATE), JobEvidence(snapshots=snapshots, silent={"n2": "no answer"}))
    assert (found.is_hang, found.culprits, found.missing) == (None, (), (2, 3))


@pytest.mark.parametrize("places", [(COMPUTE,) * 4, (RECV,) * 4])
def test_ranks_that_all_stand_alike_accuse_nobody(places: tuple[tuple[str, ...], ...]) -> None:
    assert said(job(progress=LATE), JobEvidence(snapshots=still(*places))).culprits == ()


def test_a_job_without_ranks_is_unknown() -> None:
    assert said(job(processes=()), JobEvidence()).is_hang is None


def test_of_several_that_are_gone_the_one_that_failed_first_by_the_log_is_identified() -> None:
    """srun ended the step because rank 2 had raised: rank 0, the first of the list, is as long gone."""
    processes = (*(seen(rank, gone_s=20.0) for rank in (0, 1, 2)), seen(3))
    raised = errors((22.0, "[rank2]: Traceback (most recent call last):"), (22.0, "[rank2]: KeyError: 'text'"))
    for known, named in ((raised, [2]), ((), [0, 1, 2])):
        found = said(job(processes=processes, progress=LATE, errors=known))
        assert (found.kind, [c.rank for c in found.culprits]) == ("lingering_job", named)
    assert "lost rank 2 (" in said(job(processes=processes, progress=LATE, errors=raised)).summary
