"""crash_loop: a job that dies before its first new step, three times; one that gets on, or that others end,
is in no loop."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.detect.crash_loop import detect
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import Finding, Truth
from slurm_watchdog.model.past_runs import EndedJob, PastRun
from tests.builders.crash_loops import DEAD, ERROR, STARTING, run
from tests.builders.logged_runs import NOW
from tests.builders.views import cluster, job, progress, slurm_job

PREEMPTED = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T10:00:00 DUE TO PREEMPTION ***"


LONG = run(0, ERROR, steps_seen=400, first_step=1, last_step=1006, ended_at=NOW - 950)


def judge(past: tuple[PastRun, ...], **changes: Any) -> Finding:
    (finding,) = detect(cluster(job(**{**STARTING, "past": past, **changes})))
    return finding


def test_three_deaths_before_the_first_step_are_a_loop_with_its_common_cause() -> None:
    finding = judge(DEAD)
    assert (finding.truth, finding.subject, finding.actionable) == (Truth.BAD, "loop:7", True)
    assert "each time a file is missing: " + ERROR in finding.summary
    assert [(c.node, c.rank) for c in finding.culprits] == [(None, 3)]
    assert "leave that node out" not in finding.summary


CUDA = "[rank3]: torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
HERE, ELSEWHERE = {"nodes": ("n1", "n2")}, {"nodes": ("n1", "n3")}


@pytest.mark.parametrize(
    ("lines", "before", "accused"),
    [
        ((CUDA, CUDA, CUDA), (), False),
        ((CUDA, CUDA.replace("rank3", "rank2"), CUDA), (), True),
        ((CUDA, CUDA, CUDA), (run(0, steps_seen=40, first_step=1, last_step=40, **ELSEWHERE),), True),
        ((CUDA, CUDA, CUDA), (run(0, steps_seen=40, first_step=1, last_step=40, **HERE),), False),
        ((ERROR, ERROR, ERROR), (run(0, steps_seen=40, first_step=1, last_step=40, **ELSEWHERE),), False),
    ],
    ids=["the same allocation", "two ranks of it", "lived without it", "lived with it", "Python's exception"],
)  # fmt: skip
def test_a_node_is_accused_only_by_contrast_and_of_what_a_node_can_cause(
    lines: tuple[str, ...], before: tuple[PastRun, ...], accused: bool
) -> None:
    loop = tuple(run(n + 1, line, **HERE, steps_seen=0) for n, line in enumerate(lines))
    finding = judge((*before, *loop))
    assert finding.truth is Truth.BAD
    assert ("leave that node out" in finding.summary) is accused
    assert [c.node for c in finding.culprits] == (["n2"] if accused else [None])


def test_each_time_is_said_of_the_same_error_and_not_of_the_same_class() -> None:
    paths = (ERROR, ERROR.replace("/data/train.idx", "/data/a.idx"), ERROR.replace("/data/train", "/tmp/b"))
    same = tuple(run(n, ERROR.replace("Errno 2", f"Errno {n}")) for n in range(3))
    assert "each time" in judge(same).summary
    assert (
        "in 3 of 3 runs a file is missing (3 different lines)"
        in judge(tuple(run(n, line) for n, line in enumerate(paths))).summary
    )


def test_a_run_that_we_ended_is_no_death_and_no_way_out_of_the_loop() -> None:
    ours = run(3, ERROR, touched_at=NOW - 670.0)
    assert judge((*DEAD[:2], ours)).truth is Truth.UNKNOWN
    assert judge((*DEAD, ours)).truth is Truth.BAD
    lived = run(3, ERROR, touched_at=NOW - 670.0, steps_seen=40, first_step=1, last_step=40)
    assert judge((*DEAD[:2], lived, run(4, ERROR))).truth is Truth.UNKNOWN


def test_steps_that_are_made_again_after_the_checkpoint_are_no_new_ones() -> None:
    again = tuple(run(n, ERROR, steps_seen=6, first_step=1001, last_step=1006) for n in (1, 2, 3))
    assert judge((LONG, *again)).truth is Truth.BAD
    assert judge((LONG, *again), progress=progress(5.0, step=1004, steps_seen=4)).truth is Truth.BAD
    assert judge((LONG, *again), progress=progress(5.0, step=1007, steps_seen=7)).truth is Truth.OK


def test_a_job_that_waits_to_be_started_again_is_still_in_its_loop() -> None:
    waiting = JobView(job=slurm_job(state="PENDING", restarts=3), run_age_s=0.0, past=DEAD)
    (finding,) = detect(cluster(waiting=(waiting,)))
    assert finding.truth is Truth.BAD


def test_a_job_that_ended_in_its_loop_is_told_of() -> None:
    over = EndedJob(job=slurm_job(state="FAILED"), ended_at=NOW, run=DEAD[2], past=DEAD[:2])
    (finding,) = detect(cluster(ended=(over,)))
    assert finding.truth is Truth.BAD


def test_a_death_without_a_word_counts_where_the_log_could_be_read() -> None:
    assert "no line of its log says why" in judge((run(0), run(1), run(2))).summary
    assert judge((run(0), run(1, log_read=False), run(2))).truth is Truth.UNKNOWN


def test_last_words_that_came_after_the_listing_with_the_next_run_show_that_the_log_was_read() -> None:
    late = run(1, ERROR, log_read=False)
    assert judge((DEAD[0], late, DEAD[2])).truth is Truth.BAD
    assert judge((DEAD[0], replace(late, errors=()), DEAD[2])).truth is Truth.UNKNOWN


def test_a_run_that_was_over_before_anybody_could_look_counts_if_another_ones_log_tells_the_cause() -> None:
    unseen = (run(0, log_read=False, unseen=True), run(1, log_read=False, unseen=True))
    finding = judge((*unseen, run(2, ERROR)))
    assert finding.truth is Truth.BAD
    assert "in 1 of 3 runs" in finding.summary
    assert finding.facts[0] == "run 0: over before it was seen, no step, said nothing"
    assert judge((*unseen, run(2, log_read=False, unseen=True))).truth is Truth.UNKNOWN


HEALTHY: dict[str, tuple[PastRun, ...]] = {
    "it restarted twice": DEAD[:2],
    "a run got further": (LONG, *DEAD[:2], run(3, ERROR, steps_seen=6, first_step=1001, last_step=1007)),
    "a run lasted long": (*DEAD[:2], run(3, ERROR, ended_at=NOW + 3000)),
    "a run made steps, and nothing is known of those before": (
        run(0, ERROR, steps_seen=3, last_step=3), *DEAD[:2],
    ),
    "it was preempted": (*DEAD[:2], run(2, PREEMPTED, ERROR)),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_no_loop_if(name: str) -> None:
    assert judge(HEALTHY[name]).truth is not Truth.BAD


def test_a_job_that_never_restarted_is_not_spoken_of() -> None:
    assert detect(cluster(job())) == []
