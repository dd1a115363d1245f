"""What is remembered of runs and jobs that are over: whose last words, quick deaths, links of a chain,
incidents that do not flap."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from slurm_watchdog.controller.state.run import KEPT_ERRORS, new_run, past_run
from slurm_watchdog.controller.state.run_updates import note_absent, note_process
from slurm_watchdog.diagnose.logs.reported_run import attributed_errors
from slurm_watchdog.model.incidents import Culprit, IncidentKind, Truth
from slurm_watchdog.model.observations import Checkpoint, Event, LogFile
from slurm_watchdog.model.past_runs import RankLocation
from slurm_watchdog.model.slurm import SlurmJob, SlurmView
from tests.builders.incident_story import FIRING, PENDING, RESOLVED, Story, says
from tests.builders.logged_runs import event
from tests.builders.reported_cluster import Cluster, progress_event
from tests.builders.views import process, slurm_job

ERROR = "[rank1]: KeyError: 'text'"


def said(line: str, age_s: float = 0.0) -> Event:
    return replace(event(line), age_s=age_s)


def test_a_run_that_is_over_keeps_its_errors_with_their_ranks_and_its_last_checkpoint() -> None:
    cluster = Cluster()
    for number in (10, 11, 12):
        cluster.report(
            process(0), process(1), events=(progress_event(number),),
            checkpoints=(Checkpoint(job_id="7", directory="/c", step=10), Checkpoint(job_id="7", directory="/old", step=99)),
        )  # fmt: skip
    cluster.report(process(0), events=(said(ERROR),))
    cluster.slurm(restarts=1)
    (run,) = cluster.job.past
    assert (run.restarts, run.first_step, run.last_step, run.checkpoint_step, run.ranks) == (
        0,
        10,
        12,
        10,
        4,
    ), "two ranks were seen, and they know of four"
    assert [(each.rank, each.node, each.pid, each.error.line) for each in attributed_errors(run)] == [
        (1, "n1", 101, ERROR)
    ]


def test_last_words_that_come_after_the_listing_belong_to_the_run_before() -> None:
    cluster = Cluster()
    cluster.report(process(0), process(1), events=(progress_event(1),))
    cluster.slurm(state="PENDING", restarts=1)
    cluster.report(wait=1.0, events=(said(ERROR),))
    assert [each.rank for each in attributed_errors(cluster.job.past[0])] == [1]
    cluster.slurm(restarts=1)
    assert cluster.job.errors == ()


def test_steps_that_a_run_makes_while_it_is_ended_are_its_own() -> None:
    cluster = Cluster()
    for number in (84, 85, 86):
        cluster.report(process(0), process(1), events=(progress_event(number),))
    cluster.slurm(state="COMPLETING", restarts=1)
    for number in (87, 130):
        cluster.report(wait=1.0, events=(progress_event(number),))
    assert cluster.job.past[0].last_step == 130
    cluster.slurm(restarts=1)
    for number in (121, 122, 140):
        cluster.report(process(0), process(1), events=(progress_event(number),))
    assert (cluster.job.past[0].last_step, cluster.job.progress.first_step) == (130, 121)


def test_a_run_that_began_and_ended_between_two_listings_is_known_by_its_words() -> None:
    cluster = Cluster()
    cluster.report(process(0), process(1), logs=(LogFile(job_id="7", path="/log", offset=70),))
    cluster.slurm(state="PENDING", restarts=1)
    cluster.report(wait=20.0, events=(said(ERROR),))
    cluster.slurm(state="PENDING", restarts=2)
    first, second = cluster.job.past
    assert (first.restarts, [e.line for e in first.errors]) == (0, [])
    assert (second.restarts, [e.line for e in second.errors]) == (1, [ERROR])
    cluster.report(wait=20.0, events=(said(ERROR),))
    cluster.slurm(state="FAILED", restarts=2)
    (over,) = cluster.state.view(cluster.now).ended
    assert over.run is not None
    assert [e.line for e in over.run.errors] == [ERROR]
    assert len(over.past) == 2


def test_a_job_whose_first_run_was_too_short_to_be_seen_is_known_from_its_requeue_on() -> None:
    cluster = Cluster()
    other = {"job_id": "9", "raw_id": "9"}
    for number in (1, 2, 3):
        cluster.now += 10
        cluster.slurm(state="PENDING", restarts=number, **other)
    cluster.slurm(state="FAILED", restarts=3, **other)
    (over,) = cluster.state.view(cluster.now).ended
    assert over.run is not None and over.run.unseen
    assert [(run.restarts, run.unseen, run.log_read) for run in over.past] == [
        (1, True, False),
        (2, True, False),
    ]


def test_of_many_errors_the_first_since_the_last_step_and_the_last_ones_stay() -> None:
    cluster = Cluster()
    cluster.step(1)
    cluster.step(2)
    for number in range(200):
        cluster.report(wait=1.0, events=(said(f"[rank{number}]: ValueError: {number}"),))
    lines = [e.event.line for e in cluster.job.errors]
    assert len(lines) == KEPT_ERRORS
    assert lines[0] == "[rank0]: ValueError: 0" and lines[-1] == "[rank199]: ValueError: 199"
    assert dict(cluster.job.error_ranks)["python_exception"] == tuple(range(200))
    cluster.step(3)
    cluster.report(wait=1.0, events=(said("[rank7]: ValueError: 7"),))
    assert dict(cluster.job.error_ranks)["python_exception"] == (7,)


class Queue:
    """A queue with several jobs of one name, which the test moves on."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.jobs: dict[str, SlurmJob] = {}
        self.set()

    def set(self, **states: str) -> None:
        for job_id, state in states.items():
            self.jobs[job_id[1:]] = slurm_job(job_id=job_id[1:], state=state, name="m4", user="u")
        self.cluster.now += 5
        self.cluster.state.apply_slurm(SlurmView(jobs=tuple(self.jobs.values()), nodes=()), self.cluster.now)

    def steps(self, job_id: str, *numbers: int) -> None:
        for number in numbers:
            self.cluster.report(events=(replace(progress_event(number), job_id=job_id),))

    def ended(self) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        view = self.cluster.state.view(self.cluster.now)
        return {each.job.job_id: (each.preceded_by, each.succeeded_by) for each in view.ended}


def two_jobs(first_of_second: int) -> Queue:
    queue = Queue()
    queue.set(j1="RUNNING", j2="PENDING")
    queue.steps("1", 1, 2, 3)
    queue.set(j1="TIMEOUT", j2="PENDING")
    assert queue.ended() == {"1": ((), ("2",))}
    queue.set(j1="TIMEOUT", j2="RUNNING")
    queue.steps("2", first_of_second, first_of_second + 1)
    queue.set(j1="TIMEOUT", j2="FAILED")
    return queue


def test_a_job_whose_steps_go_on_from_one_that_ended_before_it_began_is_a_link_of_a_chain() -> None:
    assert two_jobs(4).ended()["2"] == (("1",), ())


def test_jobs_that_begin_at_the_same_step_are_a_sweep() -> None:
    assert two_jobs(1).ended()["2"] == ((), ())


def test_jobs_that_ran_at_the_same_time_are_no_chain() -> None:
    queue = Queue()
    queue.set(j1="RUNNING", j2="RUNNING")
    queue.steps("1", 1, 2, 3)
    queue.cluster.now += 100
    queue.steps("2", 4, 5)
    queue.set(j1="TIMEOUT")
    queue.ended()
    queue.set(j2="FAILED")
    assert queue.ended()["2"] == ((), ())


def test_a_job_that_slurm_forgot_is_over_for_an_hour() -> None:
    queue = two_jobs(4)
    queue.ended()
    queue.jobs.clear()
    queue.set()
    assert queue.ended()["2"] == (("1",), ())
    queue.cluster.now += 3600
    queue.set()
    assert queue.ended() == {}


# ---------------------------------------------------------------------------------------- incidents about a run


def past(truth: Truth, **changes: Any) -> Any:
    return says(truth, IncidentKind.LOG_ERROR, subject="run:7.0", actionable=False, **changes)


def test_an_incident_about_a_run_stays_one_through_its_end_and_the_next_run() -> None:
    story = Story()
    assert story.after(0, past(Truth.BAD)) == [(IncidentKind.LOG_ERROR, FIRING)]
    story.world = {"restarts": {}, "over": frozenset({"7"})}
    assert story.after(1, past(Truth.UNKNOWN)) == [(IncidentKind.LOG_ERROR, FIRING)]
    assert story.after(1, past(Truth.BAD)) == [(IncidentKind.LOG_ERROR, FIRING)]
    story.world = {"restarts": {"7": 1}}
    assert story.after(300, past(Truth.BAD)) == [(IncidentKind.LOG_ERROR, FIRING)]
    story.after(300, past(Truth.OK))
    assert story.after(10, past(Truth.OK)) == [(IncidentKind.LOG_ERROR, RESOLVED)]


def test_an_incident_about_a_run_of_which_nobody_speaks_any_more_ends_with_it() -> None:
    story = Story()
    story.world = {"restarts": {"7": 1}}
    story.after(0, past(Truth.BAD))
    assert story.open[0].runs == (("7", 0),)
    assert story.after(1) == [(IncidentKind.LOG_ERROR, RESOLVED)]


def test_what_happened_in_one_run_explains_nothing_about_another() -> None:
    story = Story()
    story.world = {"restarts": {"7": 1}}
    dead = says(Truth.BAD, IncidentKind.DEAD_RANK)
    assert story.after(0, past(Truth.BAD), dead) == [
        (IncidentKind.LOG_ERROR, FIRING),
        (IncidentKind.DEAD_RANK, FIRING),
    ]
    story = Story()
    assert story.after(0, past(Truth.BAD), dead) == [
        (IncidentKind.LOG_ERROR, FIRING),
        (IncidentKind.DEAD_RANK, PENDING),
    ]


def test_a_broken_gpu_explains_the_error_of_the_rank_on_it_and_of_no_other() -> None:
    fault = says(
        Truth.BAD, IncidentKind.GPU_FAULT, subject="gpu:n1/GPU-1", job_ids=(), actionable=False,
        culprits=(Culprit(node="n1", gpu_uuid="GPU-1"),),
    )  # fmt: skip
    for uuid, state in (("GPU-1", PENDING), (None, PENDING), ("GPU-2", FIRING)):
        error = past(Truth.BAD, culprits=(Culprit(node="n1", rank=0, gpu_uuid=uuid),))
        assert Story().after(0, fault, error)[1] == (IncidentKind.LOG_ERROR, state)
    elsewhere = past(Truth.BAD, culprits=(Culprit(node="n2", rank=0),))
    assert Story().after(0, fault, elsewhere)[1] == (IncidentKind.LOG_ERROR, FIRING)
    assert Story().after(0, fault, past(Truth.BAD))[1] == (IncidentKind.LOG_ERROR, FIRING)


def test_of_a_rank_that_was_started_again_the_last_process_counts_and_when_it_ended() -> None:
    run = new_run(slurm_job(start_at=None), 0.0, None, None)
    for pid, at in ((900, 10.0), (100, 50.0)):
        note_process(run, ("n1", pid, 5), process(0, pid=pid), at)
        note_absent(run, "n1", set(), at + 5.0)
    note_process(run, ("n1", 101, 5), process(1, pid=101), 60.0)
    assert past_run(run, 70.0).seats == (RankLocation(0, "n1", 100, 55.0), RankLocation(1, "n1", 101, None))
