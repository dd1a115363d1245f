"""What the controller believes after reports and listings: progress, runs, the dead, filesystems, grace."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.filesystems import filesystem_key
from slurm_watchdog.model.actions import Fence
from slurm_watchdog.model.collective_records import RecordSet
from slurm_watchdog.model.evidence import OwnWords
from slurm_watchdog.model.observations import Blocked, Checkpoint, Event, EventKind, LogFile, MountProbe
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from slurm_watchdog.model.supervisor import BATCH_STEP, PROTOCOL, JobSupervisor, SupervisorState, SupervisorStatus
from tests.builders.reported_cluster import Cluster, progress_event
from tests.builders.views import COMPUTE, RECV, blocked, process, slurm_job, stack


def test_only_a_count_that_rises_is_progress_and_repeats_are_none() -> None:
    cluster = Cluster()
    for number in (1, 2, 3):
        cluster.step(number)
    for _ in range(4):
        cluster.step(3, wait=3600)  # PULSE: the log grows, the step does not
    progress = cluster.job.progress
    assert progress is not None
    assert (progress.step, progress.age_s, progress.steps_seen, progress.stride) == (3, 4 * 3600, 3, 1)
    assert progress.intervals_s == (5.0,)


def test_lines_that_were_read_in_one_go_make_no_intervals_of_nothing() -> None:
    cluster = Cluster()
    cluster.step(1)
    for burst in (10, 20, 30):
        cluster.report(wait=60, events=tuple(progress_event(burst + n) for n in range(5)))
    assert cluster.job.progress is not None
    assert max(cluster.job.progress.intervals_s) == 60.0
    assert min(cluster.job.progress.intervals_s) == 60.0


def test_the_time_of_a_step_is_that_of_one_step_however_many_a_report_brings() -> None:
    cluster = Cluster()
    assert cluster.job.progress is None
    for number in range(0, 25, 5):
        cluster.report(wait=10, events=tuple(progress_event(number + n) for n in range(5)))
    assert cluster.job.progress is not None
    assert (cluster.job.progress.step, cluster.job.progress.step_s) == (24, 2.0)


def test_a_lower_step_is_no_progress_until_it_rises_again_by_itself() -> None:
    cluster = Cluster()
    for number in (100, 101, 102):
        cluster.step(number)
    cluster.step(50, wait=100)
    assert cluster.job.progress is not None and cluster.job.progress.step == 102
    cluster.step(50, wait=100)
    assert cluster.job.progress.age_s == 200
    cluster.step(51, wait=100)
    assert (cluster.job.progress.step, cluster.job.progress.age_s, cluster.job.progress.first_step) == (
        51,
        0,
        50,
    )


def test_lines_that_stood_in_the_log_already_count_from_when_they_were_written_and_teach_nothing() -> None:
    cluster = Cluster()
    for number in (1, 2):
        cluster.step(number)
    cluster.report(wait=50, events=(progress_event(2, backlog=True), progress_event(99, backlog=True, age_s=30)))
    progress = cluster.job.progress
    assert progress is not None
    assert (progress.step, progress.age_s, progress.steps_seen, progress.intervals_s) == (99, 30, 2, ())


def test_a_step_clears_the_stacks_and_the_phase() -> None:
    cluster = Cluster()
    cluster.step(1)
    cluster.report(events=(Event(kind=EventKind.PHASE, job_id="7", age_s=0, source="log", phase="evaluating"),))
    cluster.state.runs.add_snapshot("7", 0, (stack(0, RECV),), (), cluster.now)
    assert cluster.job.progress is not None and cluster.job.progress.phase == "evaluating"
    assert len(cluster.job.snapshots) == 1
    cluster.step(2)
    assert (cluster.job.progress.phase, cluster.job.snapshots) == (None, ())


def test_records_of_collectives_count_until_a_step_or_a_rank_that_moves_and_only_of_this_run() -> None:
    found = (RecordSet(source="the Flight Recorder", records=()),)
    cluster = Cluster()
    cluster.step(1)
    runs, asked_at = cluster.state.runs, cluster.now
    runs.add_records("7", 1, found, asked_at)
    assert cluster.job.collectives == ()  # of another run
    runs.add_records("7", 0, found, asked_at)
    assert cluster.job.collectives == found
    cluster.now += 30
    for at, lines in enumerate((RECV, COMPUTE)):
        runs.add_snapshot("7", 0, (stack(0, lines, cpu_s=20.0 * at),), (), cluster.now + 10.0 * at)
    assert cluster.job.collectives == ()
    runs.add_records("7", 0, found, asked_at + 40)
    assert cluster.job.collectives == found
    words = OwnWords(node="n1", rank=0, age_s=4.0, text="ValueError: x")
    runs.add_records("7", 0, found, asked_at + 40, (words,), cluster.now - 6.0)
    runs.add_records("7", 0, found, asked_at + 40)
    assert cluster.job.own_words == (replace(words, age_s=10.0),), (
        "they grow older, and stay if the next answer has none"
    )
    cluster.step(2)
    assert (cluster.job.collectives, cluster.job.own_words) == ((), ())
    runs.add_records("7", 0, found, asked_at)
    assert cluster.job.collectives == ()  # asked before that step


def test_a_dump_that_was_asked_for_before_the_restart_is_dropped() -> None:
    cluster = Cluster()
    cluster.slurm(restarts=1)
    cluster.state.runs.add_snapshot("7", 0, (stack(0, RECV),), (), cluster.now)
    assert cluster.job.snapshots == ()


def test_a_new_run_begins_with_nothing_and_what_is_left_over_of_the_old_one_is_not_its_own() -> None:
    cluster = Cluster()
    cluster.report(process(0), events=(progress_event(1),))
    cluster.step(2)
    cluster.slurm(restarts=1)
    assert (cluster.job.progress, cluster.job.processes) == (None, ())
    cluster.report(process(0), process(1, pid=500))
    assert [p.process.pid for p in cluster.job.processes] == [500]
    cluster.report(process(1, pid=500), events=(progress_event(90, age_s=3600),))
    assert cluster.job.progress is None


def test_a_rank_that_is_not_in_the_report_is_gone_since_then_and_a_silent_node_loses_none() -> None:
    cluster = Cluster()
    cluster.report(process(0), process(1))
    cluster.report(process(2), node="n2")
    cluster.report(process(0))
    cluster.report(process(0))
    assert [(p.process.rank, p.gone_s) for p in cluster.job.ranks] == [(0, None), (1, 5.0), (2, None)]
    cluster.report(process(0), wait=60)
    assert cluster.job.silent_nodes == ("n2",)
    assert cluster.job.ranks[2].gone_s is None


def test_a_zombie_is_dead_since_it_became_one_however_often_it_is_reported() -> None:
    cluster = Cluster()
    cluster.report(process(0), process(1))
    for _ in range(4):
        cluster.report(process(0), process(1, state="Z"))
    assert [(p.alive, p.gone_s) for p in cluster.job.ranks] == [(True, None), (False, 15.0)]
    cluster.report(process(0))
    assert cluster.job.ranks[1].gone_s == 20.0


def test_a_zombie_with_a_thread_in_a_call_is_in_it_as_long_as_its_node_reports_so() -> None:
    cluster = Cluster()
    call = Blocked(thread_id=101, seconds=5.0, state="D", syscall="ioctl", path="/dev/nvidia0")
    cluster.report(process(0), process(1))
    cluster.report(process(0), process(1, state="Z", threads=2, blocked=call))
    assert (cluster.job.ranks[1].alive, cluster.job.ranks[1].unending) == (False, call)
    cluster.report(process(0))
    assert (cluster.job.ranks[1].gone_s, cluster.job.ranks[1].unending) == (5.0, None)


def test_a_report_seen_before_and_one_too_old_say_nothing_about_now() -> None:
    cluster = Cluster()
    assert cluster.report(process(0)) == "accepted"
    assert cluster.report(sequence=1) == "duplicate"
    assert cluster.report(age_s=61.0) == "expired"
    assert cluster.job.ranks[0].alive
    assert cluster.report(agent_id="new", sequence=1) == "accepted"


def test_the_next_run_reads_on_where_the_last_one_ended() -> None:
    cluster = Cluster()
    cluster.report(logs=(LogFile(job_id="7", path="/log", offset=70), LogFile(job_id="7", path="/cut", offset=90)))
    cluster.report(node="n2", logs=(LogFile(job_id="7", path="/log", offset=50),))
    cluster.report(logs=(LogFile(job_id="7", path="/log", offset=70), LogFile(job_id="7", path="/cut", offset=10)))
    cluster.slurm(restarts=1)
    ((_, starts),) = [(job, starts) for job, starts in cluster.state.jobs_on("n1", cluster.now)]
    assert starts == {"/log": 70, "/cut": 10}


@pytest.mark.parametrize("state", ["SUSPENDED", "PENDING"])
def test_a_job_that_runs_again_after_a_rest_has_its_time_again(state: str) -> None:
    cluster = Cluster()
    for number in (1, 2):
        cluster.step(number)
    cluster.slurm(state=state)
    cluster.now += 7200
    cluster.slurm()
    assert cluster.job.progress is not None
    assert (cluster.job.progress.age_s, cluster.job.run_age_s) == (0, 0)
    assert cluster.job.progress.last_increase_age_s == 7200


def test_a_grace_starts_the_clock_anew_and_leaves_the_age_of_the_last_step() -> None:
    cluster = Cluster()
    for number in (1, 2):
        cluster.step(number)
    cluster.now += 500
    cluster.state.runs.grant_grace(cluster.now)
    cluster.now += 30
    assert cluster.job.progress is not None
    assert (cluster.job.progress.age_s, cluster.job.progress.last_increase_age_s) == (30, 530)


def test_after_its_own_sleep_the_controller_takes_nobody_for_silent() -> None:
    cluster = Cluster()
    cluster.report()
    cluster.now += 3600
    assert cluster.state.agents.reporting(cluster.now) == ()
    cluster.state.forget_silence(cluster.now)
    assert cluster.state.agents.reporting(cluster.now) == ("n1",)


def test_a_job_that_slurm_forgot_is_forgotten_and_a_job_that_ended_is_not_judged() -> None:
    cluster = Cluster()
    cluster.slurm(state="COMPLETED")
    assert cluster.state.view(cluster.now).jobs == ()
    cluster.state.apply_slurm(SlurmView(jobs=(), nodes=()), cluster.now)
    assert cluster.state.job_view("7", cluster.now) is None


def test_a_network_export_is_one_filesystem_and_a_local_disk_is_one_for_each_kernel() -> None:
    assert filesystem_key("/s", "server:/export", "nfs4", "boot1") == filesystem_key(
        "/s", "server:/export", "nfs4", "boot2"
    )
    assert filesystem_key("/s", "/dev/sda1", "ext4", "boot1") != filesystem_key("/s", "/dev/sda1", "ext4", "boot2")
    assert filesystem_key("/s", "/dev/sda1", "ext4", "boot1") == filesystem_key("/s", "/dev/sda1", "ext4", "boot1")


def test_a_blocked_process_makes_a_filesystem_view_and_probes_answer_for_it() -> None:
    cluster = Cluster()
    call = blocked(70.0, device="server:/export", fs_type="nfs4")
    cluster.report(process(0, blocked=call))
    look = MountProbe(mount="/shared", responding=True, seconds=0.1, device="server:/export")
    cluster.state.apply_probe("n2", look, cluster.now)
    assert cluster.state.view(cluster.now).filesystems[0].answers == (), "a frozen filesystem answers a mere look, too"
    cluster.state.apply_probe("n2", replace(look, responding=False), cluster.now)
    assert [node for node, _ in cluster.state.view(cluster.now).filesystems[0].answers] == ["n2"]
    cluster.state.apply_probe("n2", look, cluster.now)
    assert cluster.state.view(cluster.now).filesystems[0].answers == (), "a look that came back is not out any more"
    probe = replace(look, wrote=True)
    cluster.state.apply_probe("n2", probe, cluster.now)
    cluster.now += 3
    (filesystem,) = cluster.state.view(cluster.now).filesystems
    assert [p.process.rank for p in filesystem.blocked] == [0]
    assert filesystem.known_nodes == ("n1",)
    assert [(node, answer.responding, answer.age_s) for node, answer in filesystem.answers] == [("n2", True, 3.0)]
    cluster.state.filesystems.end(f"mount:{filesystem.key}")
    cluster.report(process(0))
    (filesystem,) = cluster.state.view(cluster.now).filesystems
    assert (filesystem.blocked, filesystem.answers) == ((), ())


def test_a_step_that_is_over_is_not_the_training_however_many_ranks_it_had() -> None:
    cluster = Cluster()
    data = [process(n, step_id="0", pid=10 + n) for n in range(8)]
    cluster.report(*data)
    cluster.report(process(0, step_id="1"), process(1, step_id="1"))
    assert [(r.process.step_id, r.alive) for r in cluster.job.ranks] == [("1", True), ("1", True)]


def test_ranks_that_mpirun_starts_in_the_batch_step_and_in_a_step_are_of_one_training() -> None:
    """Open MPI under Slurm: the batch host's ranks are children of mpirun, the others of its daemon in a step."""
    cluster = Cluster()
    cluster.slurm(nodes=("n1", "n2"))
    head = [process(n, step_id="batch", pid=10 + n, world_size=4) for n in range(2)]
    rest = [process(n, step_id="0", pid=20 + n, world_size=4) for n in (2, 3)]
    shell = process(0, step_id="1", pid=50, world_size=1)
    for number in range(3):
        cluster.report(*head, shell, events=(progress_event(number),))
        cluster.report(*rest, node="n2", wait=0.0)
    assert [(r.process.rank, r.process.step_id) for r in cluster.job.ranks] == [
        (0, "batch"), (1, "batch"), (2, "0"), (3, "0"),
    ]  # fmt: skip
    assert (cluster.job.step_id, cluster.job.run_age_s) == ("0", 15)
    cluster.report(node="n2")
    assert [(r.process.rank, r.alive) for r in cluster.job.ranks] == [(0, True), (1, True), (2, False), (3, False)]
    assert cluster.job.progress is not None, "it is the same training, though a step has lost all of its ranks"
    again = [process(n, step_id="batch", pid=30 + n, world_size=4) for n in range(2)]
    cluster.report(*again)
    assert {r.process.step_id for r in cluster.job.ranks} == {"batch"}, "what is gone of step 0 is of the start before"
    new = [process(n, step_id="2", pid=40 + n, world_size=4) for n in (2, 3)]
    cluster.report(*new, node="n2")
    assert [r.process.rank for r in cluster.job.ranks if r.alive] == [0, 1, 2, 3]
    assert (cluster.job.step_id, cluster.job.progress) == ("2", None)


@pytest.mark.parametrize("world", [2, None])
def test_two_trainings_side_by_side_are_never_taken_for_one(world: int | None) -> None:
    cluster = Cluster()
    first = [process(n, step_id="0", pid=10 + n, world_size=world) for n in range(2)]
    second = [process(n, step_id="1", pid=20 + n, world_size=world) for n in range(2)]
    cluster.report(*first, *second)
    assert {r.process.step_id for r in cluster.job.ranks} == {"1"}


def test_the_training_that_follows_another_step_has_its_own_clock_and_its_own_start() -> None:
    cluster = Cluster()
    for number in range(1, 9):  # the data is prepared: quick steps, all of them
        cluster.report(process(0, step_id="0"), events=(progress_event(number, total_steps=8, pattern="tqdm"),))
    last = (progress_event(8, total_steps=8, pattern="tqdm"), progress_event(8, total_steps=8))
    cluster.report(process(0, step_id="1", pid=900), events=last)
    assert cluster.job.progress is None
    assert cluster.job.run_age_s == 0
    cluster.report(process(0, step_id="1", pid=900), events=(progress_event(3),))
    view = cluster.state.view(cluster.now).jobs[0]
    assert view.progress is not None
    assert (view.progress.step, view.progress.total_steps) == (3, None)


def supervisor(starts: int, begun_ticks: int) -> tuple[JobSupervisor, ...]:
    status = SupervisorStatus(
        protocol=PROTOCOL, state=SupervisorState.RUNNING, step_id=BATCH_STEP, starts=starts, begun_ticks=begun_ticks
    )
    return (JobSupervisor(job_id="7", restarts=0, age_s=0.0, status=status),)


def test_a_command_that_is_started_again_in_the_batch_step_has_its_own_clock_and_only_its_own_ranks() -> None:
    cluster = Cluster()
    cluster.slurm(batch_host="n1")
    old, new = (process(0, step_id="batch", pid=pid, start_ticks=ticks) for pid, ticks in ((10, 100), (20, 500)))
    for number in range(50, 54):
        cluster.report(old, events=(progress_event(number),), supervisors=supervisor(1, 90))
    last = (progress_event(54),)
    cluster.report(old, supervisors=supervisor(2, 0))
    cluster.report(old, new, events=last, wait=1.0, supervisors=supervisor(2, 400))
    assert (cluster.job.progress, cluster.job.run_age_s) == (None, 1.0)
    assert [(rank.process.pid, rank.alive) for rank in cluster.job.ranks] == [(20, True)]
    cluster.report(old, new, events=(progress_event(51),), supervisors=supervisor(2, 400))
    assert [rank.process.pid for rank in cluster.job.ranks] == [20], "one that cannot be killed is not a rank any more"
    progress = cluster.job.progress
    assert progress is not None
    assert (progress.first_step, progress.step) == (51, 51)


def test_a_controller_that_first_hears_of_a_supervisor_forgets_nothing() -> None:
    cluster = Cluster()
    cluster.slurm(batch_host="n1")
    cluster.report(process(0, step_id="batch"), events=(progress_event(5),))
    cluster.report(process(0, step_id="batch"), supervisors=supervisor(3, 90))
    assert cluster.job.progress is not None


def test_a_step_beside_the_training_changes_nothing_about_its_clock() -> None:
    cluster = Cluster()
    ranks = (process(0, step_id="0"), process(1, step_id="0"))
    beside = tuple(process(n, step_id="1", pid=50 + n) for n in range(3))
    for number, more in enumerate((ranks, ranks + beside, ranks, ranks + beside, ranks)):
        cluster.report(*more, events=(progress_event(number),))
    assert cluster.job.progress is not None
    assert (cluster.job.progress.step, cluster.job.progress.steps_seen) == (4, 5)
    assert cluster.job.run_age_s == 25


@pytest.mark.parametrize("first", ["0", "9"])
def test_a_monitor_with_as_many_tasks_as_the_training_is_none_whichever_was_there_first(first: str) -> None:
    """srun gives what is started beside a training as many tasks as the job has, in SLURM_NTASKS."""
    cluster = Cluster()
    for number in range(4):
        ranks = [process(n, step_id="5", cpu_s=4.0 * number) for n in range(2)]
        monitor = [process(n, step_id=first, pid=50 + n, cpu_s=0.1 * number) for n in range(2)]
        cluster.report(*monitor, *(ranks if number else ()), events=(progress_event(number),))
    assert {r.process.step_id for r in cluster.job.ranks} == {"5"}
    cluster.report(*monitor, *ranks, *(process(n, step_id="20", pid=70 + n, cpu_s=1.0) for n in range(4)))
    assert {r.process.step_id for r in cluster.job.ranks} == {"5"} == {cluster.job.step_id}


def test_how_a_job_ended_is_heard_afterwards_if_an_action_on_it_was_left_open() -> None:
    saved = Event(kind=EventKind.CHECKPOINT, job_id="7", age_s=5, source="log", step=40)
    for remembered in (False, True):
        cluster = Cluster()
        cluster.state = ClusterState(silent_after_s=15, report_lifetime_s=60)
        if remembered:
            cluster.state.remember_action(Fence(job_id="7", restarts=0, start_at=None))
        cluster.slurm(state="COMPLETED")
        cluster.report(events=(progress_event(40, total_steps=100), saved))
        view = cluster.state.job_view("7", cluster.now)
        assert (view is not None) == remembered
        if view is not None:
            assert view.checkpoint is not None and view.checkpoint.step == 40
            assert view.progress is not None and view.progress.total_steps == 100
    assert cluster.state.view(cluster.now).jobs == ()


def test_steps_that_were_made_before_the_trouble_teach_although_they_are_told_while_it_lasts() -> None:
    """A controller that starts has its open incidents first, and hears of the steps before them then."""
    cluster = Cluster()
    cluster.state.runs.note_trouble(["7"], cluster.now)
    cluster.report(wait=1.0, events=tuple(progress_event(n, age_s=60.0 - 10 * n) for n in range(5)))
    progress = cluster.job.progress
    assert progress is not None
    assert progress.intervals_s == (10.0,) * 3


def test_a_step_that_took_so_long_because_of_trouble_teaches_nothing() -> None:
    cluster = Cluster()
    for number in range(4):
        cluster.step(number)
    cluster.state.runs.note_trouble(["7"], cluster.now + 100)
    cluster.step(4, wait=500)
    cluster.step(5)
    progress = cluster.job.progress
    assert progress is not None
    assert progress.intervals_s == (5.0, 5.0, 5.0)


def test_a_new_checkpoint_starts_the_clock_of_the_step_after_it_and_the_same_one_does_not() -> None:
    cluster = Cluster()
    for number in range(4):
        cluster.step(number)
    cluster.report(wait=900, events=(progress_event(3, kind=EventKind.CHECKPOINT),))
    assert cluster.job.progress is not None
    assert cluster.job.progress.age_s == 0
    cluster.report(wait=900, events=(progress_event(3, kind=EventKind.CHECKPOINT),))
    assert cluster.job.progress is not None
    assert cluster.job.progress.age_s == 900


def test_a_checkpoint_that_is_complete_ends_its_phase_where_no_step_is_told() -> None:
    """Ray's workers and torchtitan name none: the training after it had the patience of a checkpoint until
    its next line."""

    def says(kind: EventKind, phase: str | None = None) -> Event:
        return Event(kind=kind, job_id="7", age_s=0.0, source="log", pattern="p", phase=phase)

    cluster = Cluster()
    cluster.step(1)
    cluster.step(2)
    cluster.report(events=(says(EventKind.PHASE, "checkpointing"),))
    assert cluster.job.phase == "checkpointing"
    cluster.report(wait=900, events=(says(EventKind.CHECKPOINT),))
    assert cluster.job.phase is None
    assert cluster.job.progress is not None and cluster.job.progress.age_s < 1
    cluster.report(wait=10, events=(says(EventKind.PHASE, "evaluating"), says(EventKind.CHECKPOINT)))
    assert cluster.job.phase == "evaluating"


def test_a_checkpoint_that_only_the_disk_tells_of_starts_the_clock_of_the_step_after_it() -> None:
    cluster = Cluster()

    def look(step: int, *, writing: bool = False) -> None:
        disk = Checkpoint(job_id="7", directory="/c", step=step, writing=writing)
        cluster.report(wait=100, checkpoints=(disk,))

    for number in (60, 61, 62):
        cluster.step(number)
    look(60, writing=True)
    assert (cluster.job.growing_age_s, cluster.job.progress and cluster.job.progress.age_s) == (0.0, 100.0)
    look(60)
    assert (cluster.job.growing_age_s, cluster.job.progress and cluster.job.progress.age_s) == (100.0, 200.0)
    look(62)
    assert cluster.job.progress is not None
    assert (cluster.job.progress.age_s, cluster.job.progress.last_increase_age_s) == (0.0, 300.0)
    look(900)  # somebody else's
    assert cluster.job.progress is not None
    assert cluster.job.progress.age_s == 100.0


def test_a_dump_that_shows_a_rank_saving_is_remembered_when_the_next_one_does_not() -> None:
    saves = ("write (torch/serialization.py)", "save_checkpoint (checkpointing.py)")
    cluster = Cluster()
    for frames, seconds in ((saves, 0), (RECV, 30)):
        cluster.now += seconds
        cluster.state.runs.add_snapshot("7", 0, (stack(0, frames),), (), cluster.now)
    assert cluster.job.saving_age_s == 30.0


def test_a_process_that_uses_no_time_ever_is_one_of_which_that_is_not_known() -> None:
    cluster = Cluster()
    for _ in range(8):
        cluster.report(process(0), process(1, cpu_s=7.0), process(2, state="D"))
    zero, one, two = cluster.job.ranks
    assert (zero.process.cpu_ratio, one.process.cpu_ratio) == (None, 0.0)
    assert (one.storage_age_s, two.storage_age_s) == (None, 0.0)


def _failed_at_once(before: str | None, state: str, source: str = "/home/u/slurm-9.out") -> ClusterState:
    """Job 9 is `state` in a listing; it was `before` in the one before that, or not there."""
    cluster = Cluster()
    old = () if before is None else (slurm_job(job_id="9", state=before, nodes=()),)
    cluster.state.apply_slurm(SlurmView(jobs=(slurm_job(), *old), nodes=()), cluster.now)
    cluster.now += 15
    both = (slurm_job(), slurm_job(job_id="9", state=state))
    cluster.state.apply_slurm(SlurmView(jobs=both, nodes=()), cluster.now)
    error = Event(
        kind=EventKind.ERROR, job_id="9", age_s=0, source=source, pattern="traceback", line="Traceback", backlog=True
    )  # fmt: skip
    cluster.report(events=(error,))
    return cluster.state


@pytest.mark.parametrize("before", [None, "PENDING", "REQUEUED"])
def test_a_job_that_began_and_failed_between_two_listings_is_told_with_the_words_of_its_own_log(
    before: str | None,
) -> None:
    (ended,) = _failed_at_once(before, "FAILED").view(2000.0).ended
    assert (ended.job.job_id, ended.run.unseen if ended.run else None) == ("9", True)
    assert [error.line for error in (ended.run.errors if ended.run else ())] == ["Traceback"]


def test_words_in_a_file_that_others_may_have_written_are_not_its_own() -> None:
    (ended,) = _failed_at_once(None, "OUT_OF_MEMORY", "/home/u/train-79.out").view(2000.0).ended
    assert ended.run is not None
    assert ended.run.errors == ()


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "TIMEOUT", "PREEMPTED"])
def test_a_short_job_that_ended_otherwise_is_no_matter(state: str) -> None:
    assert _failed_at_once(None, state).view(2000.0).ended == ()


def test_what_was_over_when_the_controller_was_started_is_not_told() -> None:
    cluster = ClusterState(silent_after_s=15, report_lifetime_s=60)
    cluster.apply_slurm(SlurmView(jobs=(slurm_job(state="FAILED"),), nodes=()), 1000.0)
    cluster.apply_slurm(SlurmView(jobs=(slurm_job(state="FAILED"),), nodes=()), 1015.0)
    assert cluster.view(1020.0).ended == ()


def test_what_an_action_touched_is_known_of_the_run_and_afterwards_of_the_past_one() -> None:
    cluster = Cluster()
    cluster.step(1)
    cluster.state.runs.note_action("7", 0, cluster.now)
    cluster.state.runs.note_action("7", 0, cluster.now + 9.0)  # a second operation: the first one counts
    assert cluster.job.touched_age_s == 0.0
    cluster.slurm(restarts=1)
    assert cluster.job.touched_age_s is None
    assert [run.touched_at for run in cluster.job.past] == [cluster.now]
    cluster.state.runs.note_action(
        "7", 0, cluster.now - 50.0
    )  # a controller that takes the action up reads of it in the journal
    assert [run.touched_at for run in cluster.job.past] == [cluster.now - 50.0]
    cluster.state.runs.note_action("7", 1, cluster.now)
    cluster.state.runs.note_action("7", 1, None)  # it was given up
    assert cluster.job.touched_age_s is None


def test_listings_in_a_row_that_say_a_node_is_lost_are_counted() -> None:
    cluster = Cluster()

    def lost(state: str) -> int | None:
        node = SlurmNode(name="n1", address="n1", state=state)
        cluster.state.apply_slurm(SlurmView(jobs=(slurm_job(),), nodes=(node,)), cluster.now)
        return cluster.state.view(cluster.now).slurm_nodes[0].lost_listings

    assert [lost(state) for state in ("DOWN*", "DOWN*", "IDLE", "MIXED+NOT_RESPONDING")] == [1, 2, 0, 1]
