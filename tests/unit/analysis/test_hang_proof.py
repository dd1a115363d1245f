"""A hang that is proven before the limit of its job, and all that is not proven: somebody may be at work."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.analysis.hang_proof import early_stacks, proof_of_hang
from slurm_watchdog.detect.collective_hang import CollectiveHang, hang_finding
from slurm_watchdog.model.cluster_view import JobView, StackSnapshot
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.incidents import Finding, StackRequest, Truth
from slurm_watchdog.model.observations import Checkpoint, Role
from tests.builders.proven_hangs import (
    AGES_S,
    DATA,
    MAKES_A_SAMPLE,
    STACKS,
    TURN,
    USUAL,
    WAITS_FOR_WORK,
    dumped,
    hung,
    late,
    process,
    row,
    starved,
    threads,
    worker,
    worker_dumped,
)
from tests.builders.rank_activity import card
from tests.builders.views import BACKWARD, BARRIER, blocked, seen, slurm_job

ALL_REDUCE = ("all_reduce (torch/distributed/distributed_c10d.py)", "train_step (train.py)", "main (train.py)")
UPLOAD = ("wait (threading.py)", "result (concurrent/futures/_base.py)", "push (artifacts.py)", "main (train.py)")


def judged(job: JobView) -> Finding:
    return hang_finding(job, 10_000.0, CollectiveHang())


def with_rank_2(changed: ProcessStack) -> JobView:
    return hung((*STACKS[:2], changed, STACKS[3]))


def test_a_rank_in_a_lock_that_nobody_gives_back_is_named_before_the_limit_and_acted_on_after_a_second_look() -> None:
    found = judged(hung())
    assert (found.truth, found.actionable, [each.rank for each in found.culprits]) == (Truth.BAD, False, [2])
    assert "no step for 14 s (late after 5.8 s; 3 dumps within 3 s show the same, and nothing at work)" in found.summary
    assert "3 ranks wait for it" in found.summary
    assert found.wanted == (StackRequest(job_id="7", apart_s=2.0, early=True),)
    second = judged(hung(row=row(*STACKS, dumps=5, ages_s=(11.5, 4.0, 0.1)), progress=late(22.0)))
    assert (second.truth, second.actionable, second.wanted) == (Truth.BAD, True, ())


@pytest.mark.parametrize("lines", [WAITS_FOR_WORK, MAKES_A_SAMPLE])
def test_a_rank_whose_data_loader_has_lost_its_batch_or_is_in_a_lock_is_named(lines: tuple[str, ...]) -> None:
    call = "poll" if lines is WAITS_FOR_WORK else "futex"
    found = judged(starved(lines=lines, syscall=call))
    assert (found.truth, [each.rank for each in found.culprits]) == (Truth.BAD, [2])


@pytest.mark.parametrize(("sleep_s", "named"), [(1e6, True), (60.0, False), (None, False)])
@pytest.mark.parametrize("sleeper", ["rank", "worker"])
def test_who_sleeps_for_longer_than_the_others_wait_is_named_and_who_may_try_again_is_not(
    sleeper: str, sleep_s: float | None, named: bool
) -> None:
    sleeps: dict[str, Any] = {"syscall": "clock_nanosleep", "sleep_s": sleep_s}
    tries_again = ("download (store.py)", *MAKES_A_SAMPLE)
    job = starved(lines=tries_again, **sleeps) if sleeper == "worker" else with_rank_2(dumped(2, TURN, **sleeps))
    proof = proof_of_hang(job)
    assert [each.rank for each in proof.culprits] == [2] if named and proof else (proof is None) is not named


def test_ranks_that_spin_while_they_wait_are_no_objection() -> None:
    spins = [replace(each, state="R", syscall=None) for each in STACKS]
    ages = zip(AGES_S, (90.0, 92.0, 93.1), strict=True)
    dumps = tuple(
        replace(row().snapshots[0], age_s=age_s, stacks=tuple(replace(s, cpu_s=cpu_s, main_cpu_s=cpu_s) for s in spins))
        for age_s, cpu_s in ages
    )
    alike = tuple(replace(dump, stacks=(*dump.stacks[:2], STACKS[2], dump.stacks[3])) for dump in dumps)
    assert proof_of_hang(hung(row=replace(row(), snapshots=alike))) is not None
    assert proof_of_hang(hung(row=replace(row(), snapshots=dumps))) is None


def test_ranks_in_the_backward_pass_wait_as_well() -> None:
    stacks = [dumped(rank, TURN if rank == 2 else BACKWARD) for rank in range(4)]
    assert proof_of_hang(hung(stacks)) is not None


def test_the_thread_of_the_store_that_rank_0_alone_has_is_none_that_works() -> None:
    first = dumped(0, TURN, others=(*USUAL, threads("epoll_wait", 1, "pt_tcpstore_uv")))
    assert proof_of_hang(hung((first, *(dumped(rank, BARRIER) for rank in (1, 2, 3))))) is not None
    unnamed = replace(first, others=(*USUAL, threads("poll")))
    assert proof_of_hang(hung((unnamed, *(dumped(rank, BARRIER) for rank in (1, 2, 3))))) is None


RANK_2_MAY_WORK = {
    "it sleeps": dumped(2, TURN, syscall="clock_nanosleep"),
    "it reads": dumped(2, TURN, syscall="read"),
    "it waits for a file lock": dumped(2, TURN, syscall="fcntl"),
    "it waits for a server": dumped(2, TURN, syscall="recvfrom"),
    "it polls, and nobody knows what": dumped(2, TURN, syscall="poll"),
    "its call is not known": dumped(2, TURN, syscall=None),
    "it is ready to run": dumped(2, TURN, state="R"),
    "it waits for a disk": dumped(2, TURN, state="D"),
    "its threads are not known": dumped(2, TURN, others=None),
    "a thread of it sends": dumped(2, TURN, others=(*USUAL, threads("sendto"))),
    "a thread of it waits for a disk": dumped(2, TURN, others=(*USUAL, threads("futex", state="D"))),
    "one thread more of it polls": dumped(2, TURN, others=(*USUAL, threads("epoll_wait"))),
    "one thread more of it sleeps": dumped(2, TURN, others=(*USUAL, threads("clock_nanosleep"))),
    "its bytes are not known": dumped(2, TURN, io_bytes=None),
    "its time is not known": dumped(2, TURN, main_cpu_s=None),
    "it computes a metric": dumped(2, ("acquire (lock.py)", "compute_metrics (train.py)", "main (train.py)")),
    "it evaluates": dumped(2, ("take_turn (state.py)", "evaluate (train.py)", "main (train.py)")),
    "it saves": dumped(2, ("take_turn (state.py)", "save_checkpoint (train.py)", "main (train.py)")),
    "it compiles": dumped(2, ("wait (threading.py)", "compile_fx (torch/_inductor/compile_fx.py)", "main (train.py)")),
    "it uploads": dumped(2, ("wait (threading.py)", "upload (hub.py)", "main (train.py)")),
    "it waits for a program": dumped(2, ("wait (subprocess.py)", "query (report.py)", "main (train.py)")),
    "it shuts workers down": dumped(2, ("join (p.py)", "_shutdown_workers (torch/utils/data/dataloader.py)", "main (t.py)")),
    "it sits at a prompt": dumped(2, ("interaction (/usr/lib/python3.12/pdb.py)", "main (train.py)")),
    "it could not be dumped": dumped(2, (), error="EPERM"),
    "its data loader has no worker that is known": dumped(2, DATA),
}  # fmt: skip


@pytest.mark.parametrize("name", RANK_2_MAY_WORK)
def test_nothing_is_proven_before_the_limit_if(name: str) -> None:
    job = with_rank_2(RANK_2_MAY_WORK[name])
    assert proof_of_hang(job) is None
    assert judged(job).truth is not Truth.BAD


def test_a_thread_of_python_that_the_waiting_ranks_do_not_have_has_to_rest_as_well() -> None:
    def beside(*lines: str) -> JobView:
        main = dumped(2, UPLOAD)
        other = replace(dumped(2, lines).threads[0], name="Thread-9", thread_id=900)
        return with_rank_2(replace(main, threads=(*main.threads, other)))

    assert proof_of_hang(beside("wait (threading.py)", "turn (state.py)")) is not None
    assert proof_of_hang(beside("send (ssl.py)", "put (client.py)")) is None
    assert proof_of_hang(beside("write_part (store.py)")) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"lines": MAKES_A_SAMPLE, "syscall": "clock_nanosleep"},
        {"lines": MAKES_A_SAMPLE, "syscall": "read", "state": "D"},
        {"lines": MAKES_A_SAMPLE, "syscall": "recvfrom"},
        {"lines": MAKES_A_SAMPLE, "syscall": "poll"},
        {"lines": MAKES_A_SAMPLE, "syscall": "futex", "others": (threads("recvfrom"),)},
        {"lines": MAKES_A_SAMPLE, "syscall": "futex", "others": None},
        {"lines": ("decode (corpus.py)", *MAKES_A_SAMPLE), "syscall": "futex"},
        {"state": "R"},
        {"error": "EPERM", "lines": ()},
        {"io_bytes": None},
    ],
)
def test_a_rank_whose_data_loader_may_be_at_work_is_not_named_before_the_limit(changes: dict[str, Any]) -> None:
    assert proof_of_hang(starved(**changes)) is None


def test_workers_that_all_stand_in_the_same_read_wait_for_no_work() -> None:
    reads = {"lines": MAKES_A_SAMPLE, "syscall": "poll"}
    stacks = [dumped(rank, DATA if rank == 2 else BARRIER) for rank in range(4)]
    workers = [worker_dumped(rank, reads["lines"], syscall="poll") for rank in range(4)]
    processes = tuple(each(rank) for rank in range(4) for each in (process, worker))
    assert proof_of_hang(hung((*stacks, *workers), processes=processes)) is None


@pytest.mark.parametrize("call", ["recvfrom", "pread64", "epoll_wait"])
def test_workers_that_all_wait_for_a_thread_of_theirs_that_fetches_are_not_in_a_lock(call: str) -> None:
    stacks = [dumped(rank, DATA if rank == 2 else BARRIER) for rank in range(4)]
    fetch = {"syscall": "futex", "others": (threads(call),)}
    workers = [worker_dumped(rank, MAKES_A_SAMPLE, **fetch) for rank in range(4)]
    processes = tuple(each(rank) for rank in range(4) for each in (process, worker))
    assert proof_of_hang(hung((*stacks, *workers), processes=processes)) is None


def test_a_rank_that_waits_for_a_thread_that_fetches_is_not_named_though_the_others_have_such_a_thread() -> None:
    def all_with(**changes: Any) -> Any:
        stacks = [dumped(rank, TURN if rank == 2 else BARRIER, **changes) for rank in range(4)]
        return hung(tuple(stacks))

    assert proof_of_hang(all_with()) is not None
    assert proof_of_hang(all_with(others=(*USUAL, threads("recvfrom")))) is None
    assert proof_of_hang(all_with(others=(*USUAL, threads("read", state="D")))) is None

    def all_beside(*lines: str) -> Any:
        stacks = [dumped(rank, TURN if rank == 2 else BARRIER) for rank in range(4)]
        beside = [replace(dumped(rank, lines).threads[0], name="Thread-9", thread_id=900) for rank in range(4)]
        both = [replace(each, threads=(*each.threads, more)) for each, more in zip(stacks, beside, strict=True)]
        return hung(tuple(both))

    assert proof_of_hang(all_beside("select (selectors.py)", "serve_forever (socketserver.py)")) is not None
    assert proof_of_hang(all_beside("recv_into (socket.py)", "prefetch (stream.py)")) is None
    at_work = ("read (ssl.py)", "handle (fetcher.py)", "serve_forever (socketserver.py)")
    assert proof_of_hang(all_beside(*at_work)) is None


helper = process(2, pid=300, role=Role.HELPER)
helper = replace(helper, process=replace(helper.process, rank=None))
OBJECTIONS: dict[str, dict[str, Any]] = {
    "two dumps are in": {"row": row(*STACKS, dumps=2)},
    "the dumps are too close": {"row": row(*STACKS, ages_s=(2.0, 1.0, 0.1))},
    "somebody has moved": {"row": row(*STACKS, over=True)},
    "a rank is missing": {"row": row(*STACKS[:3])},
    "the first dump was taken before it was late": {"progress": late(7.0)},
    "too few steps were seen": {"progress": late(paces_s=(5.0,) * 49)},
    "such a pause was seen before": {"progress": late(longest_pace_s=10.0)},
    "the log was not read since": {"progress": late(read_age_s=13.0)},
    "it is not known when the log was read": {"progress": late(read_age_s=None)},
    "two programs write the log": {"progress": late(shared=True)},
    "the log says that it evaluates": {"progress": late(phase="evaluating")},
    "the log said that it starts": {"phase": "starting"},
    "it has made its last step": {"progress": late(total_steps=500)},
    "files of a checkpoint have grown since the last step": {"growing_age_s": 5.0},
    "a rank was seen to save since the last step": {"saving_age_s": 5.0},
    "a checkpoint is being written": {"checkpoints_on_disk": (Checkpoint(job_id="7", directory="/c", layout="x", writing=True),)},
    "a node is silent": {"silent_nodes": ("n2",)},
    "a rank has exited": {"processes": (*(process(rank) for rank in range(3)), seen(3, gone_s=5.0))},
    "not all ranks are known": {"processes": tuple(process(rank, world_size=5) for rank in range(4))},
    "processes are not listed": {"unlisted": 3},
    "a node of the job has no rank": {"job": slurm_job(nodes=("n1", "n2", "n3"))},
    "a worker is blocked on a file": {"processes": (*(process(r) for r in range(4)), worker(1, blocked=blocked(40.0)))},
    "a helper beside it works": {"processes": (*(process(r) for r in range(4)), replace(helper, worked_age_s=1.0))},
    "a helper beside it may work": {"processes": (*(process(r) for r in range(4)), replace(helper, worked_age_s=None))},
    "its own worker is in a call on a file": {
        "processes": (*(process(r) for r in range(4)), worker(2, blocked=blocked(6.0)))
    },
    "a GPU computes": {"gpus": tuple(card(rank, "trains") for rank in range(4))},
}  # fmt: skip


def test_a_save_after_which_steps_were_made_is_no_objection() -> None:
    assert proof_of_hang(hung(growing_age_s=20.0, saving_age_s=20.0)) is not None


@pytest.mark.parametrize("name", OBJECTIONS)
def test_no_hang_is_proven_before_the_limit_while(name: str) -> None:
    assert proof_of_hang(hung(**OBJECTIONS[name])) is None


def test_a_helper_that_has_rested_as_long_is_no_objection() -> None:
    assert proof_of_hang(hung(processes=(*(process(rank) for rank in range(4)), helper))) is not None


def test_half_of_the_ranks_outside_are_too_many_to_be_named_before_the_limit() -> None:
    stacks = [dumped(rank, TURN if rank in (1, 2) else BARRIER) for rank in range(4)]
    assert proof_of_hang(hung(stacks)) is None


def test_ranks_in_two_collectives_prove_nothing_but_one_that_is_alone_in_idleness() -> None:
    stacks = [dumped(rank, ALL_REDUCE if rank == 2 else BARRIER) for rank in range(4)]
    proof = proof_of_hang(hung(stacks))
    assert proof is not None and [each.rank for each in proof.culprits] == [2]
    spins = [replace(each, state="R") for each in stacks]
    assert proof_of_hang(hung(spins)) is None, "data may be on its way"


def test_the_limit_alone_judges_where_the_floor_of_proven_hangs_is_the_floor() -> None:
    settings = CollectiveHang(proven_floor=60.0)
    found = hang_finding(hung(), 10_000.0, settings)
    assert (found.truth, found.wanted) == (Truth.OK, ())


def test_dumps_of_a_late_step_come_close_together_and_end_with_the_second_look() -> None:
    def wanted(**changes: Any) -> StackRequest | None:
        job = hung(**changes)
        return early_stacks(job, proof_of_hang(job))

    soon = StackRequest(job_id="7", apart_s=2.0, early=True)
    assert wanted(row=None) == soon
    assert wanted(row=row(*STACKS, dumps=2)) == soon
    assert wanted() == soon
    last = wanted(row=row(*STACKS, dumps=4, ages_s=(6.6, 2.1, 0.1)))
    assert last is not None and last.apart_s == pytest.approx(2.5), "so that the fifth is the last"
    assert wanted(row=row(*STACKS, over=True)) is None, "somebody moved: it is slow"
    assert wanted(row=row(*STACKS, dumps=5, ages_s=(12.0, 4.0, 0.1)), progress=late(20.0)) is None
    assert wanted(row=None, progress=late(5.5)) is None
    assert wanted(row=None, growing_age_s=5.0) is None
    sleeps = with_rank_2(RANK_2_MAY_WORK["it sleeps"])
    assert early_stacks(replace(sleeps, row=replace(row(*sleeps.row.snapshots[0].stacks), dumps=5)), None) is None  # type: ignore[union-attr]


def test_a_step_that_is_only_late_is_no_suspicion_that_holds_others_back() -> None:
    found = judged(hung(row=None))
    assert (found.truth, found.duration_s) == (Truth.UNKNOWN, 0.0)
    assert found.wanted == (StackRequest(job_id="7", apart_s=2.0, early=True),)


SAVE = ("wait (threading.py)", "save_checkpoint (train.py)", "main (train.py)", "<module> (train.py)")


def saving(age_s: float, *stacks: ProcessStack, **changes: Any) -> JobView:
    """Rank 2 stands in SAVE, dump after dump, in the middle of a job that has made its steps."""
    dumps = tuple(StackSnapshot(age_s=at, stacks=stacks) for at in (40.0, 20.0, 0.1))
    given: dict[str, Any] = {"progress": late(age_s), "row": None, "snapshots": dumps}
    return hung(stacks, **{**given, **changes})


@pytest.mark.parametrize(
    ("age_s", "changes", "said"),
    [
        (320.0, {}, Truth.BAD),
        (290.0, {}, Truth.UNKNOWN),
        (320.0, {"syscall": "clock_nanosleep", "sleep_s": 1e6}, Truth.BAD),
        (320.0, {"syscall": "clock_nanosleep", "sleep_s": 60.0}, Truth.UNKNOWN),
        (320.0, {"others": (*USUAL, threads("write"))}, Truth.UNKNOWN),
        (320.0, {"others": (*USUAL, threads("futex", state="D"))}, Truth.UNKNOWN),
        (320.0, {"others": (*USUAL, threads("recvfrom"))}, Truth.UNKNOWN),
        (320.0, {"others": None}, Truth.UNKNOWN),
        (320.0, {"syscall": "write"}, Truth.UNKNOWN),
        (320.0, {"state": "D"}, Truth.UNKNOWN),
    ],
)
def test_who_saves_in_a_lock_with_nothing_at_work_is_reported_after_five_minutes_and_acted_on_as_late_as_any_save(
    age_s: float, changes: dict[str, Any], said: Truth
) -> None:
    found = judged(saving(age_s, *STACKS[:2], dumped(2, SAVE, **changes), STACKS[3]))
    assert (found.truth, found.actionable) == (said, False), found.summary
    assert said is not Truth.BAD or [each.rank for each in found.culprits] == [2]


def test_a_save_by_a_process_beside_it_or_one_that_moves_bytes_is_given_its_time() -> None:
    stacks = (*STACKS[:2], dumped(2, SAVE), STACKS[3])
    ranks = tuple(process(rank) for rank in range(4))
    writer = worker(2)
    asleep = replace(writer, worked_age_s=200.0)
    assert judged(saving(320.0, *stacks, processes=(*ranks, writer))).truth is Truth.UNKNOWN
    assert judged(saving(320.0, *stacks, processes=(*ranks, asleep))).truth is Truth.BAD
    dumps = tuple(
        StackSnapshot(age_s=at, stacks=(*STACKS[:2], dumped(2, SAVE, io_bytes=int(1e6 * (99 - at))), STACKS[3]))
        for at in (40.0, 20.0, 0.1)
    )
    assert judged(saving(320.0, *stacks, snapshots=dumps)).truth is Truth.UNKNOWN


EVALUATION = ("wait (threading.py)", "take_turn (state.py)", "evaluate (train.py)", "main (train.py)")


def in_phase(phase: str, age_s: float, own_s: tuple[float, ...], **changes: Any) -> JobView:
    """Rank 2 stands in an evaluation that the log announces, or in what it calls a checkpoint."""
    announced = late(age_s, phase=phase, phase_intervals_s=own_s)
    return saving(age_s, *STACKS[:2], dumped(2, EVALUATION, **changes), STACKS[3], progress=announced, phase=phase)


@pytest.mark.parametrize(
    ("age_s", "own_s", "said", "acts"),
    [
        (310.0, (), Truth.BAD, True),
        (300.0, (), Truth.UNKNOWN, False),
        (310.0, (400.0, 400.0, 400.0), Truth.BAD, True),
        (310.0, (20.0, 25.0, 30.0), Truth.BAD, True),
        (92.0, (20.0, 25.0, 30.0), Truth.BAD, False),
        (88.0, (20.0, 25.0, 30.0), Truth.UNKNOWN, False),
        (62.0, (2.0, 2.0, 2.0), Truth.BAD, False),
        (92.0, (20.0, 30.0), Truth.OK, False),
    ],
)
def test_a_hang_in_an_evaluation_is_reported_by_the_runs_own_evaluations_or_after_five_minutes(
    age_s: float, own_s: tuple[float, ...], said: Truth, acts: bool
) -> None:
    found = judged(in_phase("evaluating", age_s, own_s))
    assert (found.truth, found.actionable) == (said, acts), found.summary
    assert said is not Truth.BAD or [each.rank for each in found.culprits] == [2]


@pytest.mark.parametrize(
    "changes", [{"others": (*USUAL, threads("recvfrom"))}, {"syscall": "read"}, {"others": None}, {"state": "D"}]
)
def test_an_evaluation_in_which_something_may_be_at_work_is_reported_by_those_of_its_run_and_acted_on_as_late_as_before(
    changes: dict[str, Any],
) -> None:
    assert judged(in_phase("evaluating", 1500.0, (20.0, 25.0), **changes)).truth is Truth.UNKNOWN
    assert judged(in_phase("evaluating", 299.0, (20.0, 25.0, 30.0), **changes)).truth is not Truth.BAD
    known = judged(in_phase("evaluating", 310.0, (20.0, 25.0, 30.0), **changes))
    assert (known.truth, known.actionable) == (Truth.BAD, False)
    assert judged(in_phase("evaluating", 1199.0, (400.0, 400.0, 400.0), **changes)).truth is not Truth.BAD
    assert judged(in_phase("evaluating", 1790.0, (400.0, 400.0, 400.0), **changes)).actionable is False
    assert judged(in_phase("evaluating", 1810.0, (400.0, 400.0, 400.0), **changes)).actionable is True


def test_an_evaluation_of_all_the_data_may_take_longer_than_those_of_a_part() -> None:
    at_work = ("forward (model.py)", "evaluate (train.py)", "main (train.py)")
    announced = late(900.0, phase="evaluating", phase_intervals_s=(20.0, 25.0, 30.0))
    stacks = (*STACKS[:2], dumped(2, at_work, state="R", syscall=None), STACKS[3])
    assert judged(saving(900.0, *stacks, progress=announced, phase="evaluating")).truth is Truth.UNKNOWN


def test_gpus_alone_shorten_no_evaluation_for_generating_draws_little_power() -> None:
    announced = late(900.0, phase="evaluating", phase_intervals_s=(20.0, 25.0, 30.0))
    gpus = tuple(card(rank, "spins") for rank in range(4))
    job = saving(900.0, *STACKS, progress=announced, phase="evaluating", snapshots=(), gpus=gpus)
    assert judged(job).truth is Truth.UNKNOWN


def test_a_checkpoint_that_the_log_tells_of_is_reported_after_five_minutes_and_acted_on_as_late_as_any() -> None:
    found = judged(in_phase("checkpointing", 310.0, ()))
    assert (found.truth, found.actionable) == (Truth.BAD, False), found.summary
    assert judged(in_phase("checkpointing", 92.0, (20.0, 25.0, 30.0))).truth is Truth.OK


def test_stacks_of_an_evaluation_are_there_by_the_time_that_they_decide() -> None:
    assert not judged(in_phase("evaluating", 44.0, (20.0, 25.0, 30.0))).wanted
    assert judged(in_phase("evaluating", 46.0, (20.0, 25.0, 30.0))).wanted
    assert not judged(in_phase("evaluating", 150.0, ())).wanted
    assert judged(in_phase("evaluating", 160.0, ())).wanted
