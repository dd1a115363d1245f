"""The stack vote, on the dumps of real hangs and on dumps of jobs that are well."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.diagnose.stacks.places import locate, native_place_of, place_of
from slurm_watchdog.diagnose.stacks.vote import vote
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.cluster_view import StackSnapshot
from slurm_watchdog.model.evidence import ThreadStack
from tests.builders.views import (
    BACKWARD,
    BARRIER,
    COMPUTE,
    LOADER,
    RECV,
    SAVE,
    captured,
    frames,
    seen,
    snapshot,
    stack,
    still,
)

EVALUATE = (
    "eval_batch (deepspeed/runtime/pipe/engine.py)",
    "evaluate (megatron/training.py)",
    "main (pretrain_gpt.py)",
)
BLOOM = {
    "broadcast": (
        "broadcast (torch/distributed/distributed_c10d.py)",
        "_bcast_pipe_scalar (deepspeed/runtime/pipe/engine.py)",
    ),
    "loader": (
        "wait (threading.py)",
        "get (queue.py)",
        "_try_get_data (torch/utils/data/dataloader.py)",
        "_next_batch (deepspeed/runtime/pipe/engine.py)",
    ),
    "data": ("broadcast (torch/distributed/distributed_c10d.py)", "broadcast_data (megatron/mpu/data.py)"),
    "reduce": (
        "all_reduce (torch/distributed/distributed_c10d.py)",
        "_reduce_outputs (deepspeed/runtime/pipe/engine.py)",
    ),
    "recv": ("recv (torch/distributed/distributed_c10d.py)", "recv (deepspeed/runtime/pipe/p2p.py)"),
}


def outside(snapshots) -> list[int | None]:
    return [culprit.rank for culprit in vote(snapshots).outside]


def test_bloom_of_16_ranks_in_five_places_the_one_in_its_data_loader_is_named() -> None:
    places = ["broadcast"] * 4 + ["loader"] + ["data"] * 3 + ["reduce"] * 4 + ["recv"] * 4
    voted = vote(still(*((*BLOOM[place], *EVALUATE) for place in places)))
    assert [c.rank for c in voted.outside] == [4]
    assert "data loader" in voted.outside[0].reason
    assert (voted.waiting, voted.elsewhere, voted.moving) == (15, 1, False)
    assert sorted(len(group.ranks) for group in voted.groups) == [1, 3, 4, 4, 4]


def test_frozen_filesystem_all_but_one_are_in_barrier_and_that_one_cannot_be_dumped() -> None:
    barrier = (
        "barrier (torch/distributed/distributed_c10d.py)",
        "wait_for_everyone (accelerate/utils/other.py)",
    )

    def dump(age: float):
        return snapshot(age, [stack(0, (), error="EPERM", state="D"), *(stack(r, barrier) for r in range(1, 64))])

    voted = vote((dump(30), dump(10)))
    assert voted.outside == ()
    assert [(c.rank, "EPERM" in c.reason) for c in voted.undumped] == [(0, True)]
    assert (voted.waiting, voted.moving) == (63, False)


@pytest.mark.parametrize(
    "name",
    [
        "ddp_gloo_data_loader_worker",
        "ddp_gloo_data_loader_in_process",
        "ddp_gloo_lock",
        "ddp_gloo_sleep",
        "ddp_gloo_sleep_with_all_reduce",
    ],
)
def test_with_ddp_the_ranks_wait_in_the_backward_pass_and_the_culprit_is_rank_2(name: str) -> None:
    voted = vote(captured(name))
    assert ([c.rank for c in voted.outside], voted.waiting, voted.moving) == ([2], 3, False)


@pytest.mark.parametrize(
    ("function", "file", "place"),
    [
        ("ProcessGroup.recv", "trainer.py", Place.OTHER),
        ("all_reduce", "trainer.py", Place.COLLECTIVE),
        ("acquire", "portalocker/utils.py", Place.LOCK),
        ("acquire", "fasteners/process_lock.py", Place.LOCK),
        ("DataLoader._try_get_data", "trainer.py", Place.DATALOADER),
        ("wrapper", "torch/distributed/c10d_logger.py", Place.COLLECTIVE),
        ("wrapper", "torch/distributed/elastic/multiprocessing/errors/__init__.py", Place.OTHER),
        ("_engine_run_backward", "torch/autograd/graph.py", Place.BACKWARD),
        ("synchronize", "torch/cuda/__init__.py", Place.DEVICE),
        ("send", "requests/adapters.py", Place.NETWORK),
        ("wait", "subprocess.py", Place.SUBPROCESS),
        ("reduce", "functools.py", Place.OTHER),
        ("_wait_for_tstate_lock", "threading.py", Place.LOCK),
        ("Pdb.interaction", "pdb.py", Place.DEBUGGER),
        ("destroy_process_group", "torch/distributed/distributed_c10d.py", Place.TEARDOWN),
        ("_save", "torch/serialization.py", Place.CHECKPOINT),
        ("_MapDatasetFetcher.fetch", "torch/utils/data/_utils/fetch.py", Place.DATALOADER),
    ],
)
def test_a_frame_means_a_place(function: str, file: str, place: Place) -> None:
    assert place_of(function, file) is place


def test_the_collective_below_a_checkpoint_function_is_a_collective_and_the_checkpoint_is_seen() -> None:
    inside = (*BARRIER[:2], "save_checkpoint (t.py)", "train (t.py)")
    assert locate(stack(0, inside)).place is Place.COLLECTIVE
    assert vote(still(SAVE, inside, inside, inside)).checkpointing
    assert not vote(still(LOADER, RECV, RECV, RECV)).checkpointing


def test_ranks_that_all_compute_convict_nobody() -> None:
    assert vote(still(COMPUTE, COMPUTE, COMPUTE, COMPUTE)).waiting == 0
    assert vote(still(COMPUTE, SAVE, LOADER, BACKWARD)).waiting == 0


def test_vote_without_a_clear_majority_names_no_rank() -> None:
    assert outside(still(BACKWARD, BACKWARD, LOADER, LOADER)) == []
    assert outside(still(COMPUTE, COMPUTE, LOADER, SAVE)) == []
    assert outside(still(RECV, LOADER, LOADER, LOADER)) == []


@pytest.mark.parametrize("own", [LOADER, SAVE], ids=["loader", "save"])
def test_of_two_ranks_the_idle_one_in_its_backward_pass_waits_for_the_one_in_something_of_its_own(
    own: Any,
) -> None:
    assert outside(still(BACKWARD, own)) == [1]
    assert outside(still(own, BACKWARD)) == [0]
    assert outside(still(BACKWARD, COMPUTE)) == []  # unknown code may be work
    busy = [snapshot(age, [stack(0, BACKWARD, cpu_s=100 - age), stack(1, own)]) for age in (30, 10)]
    assert outside(busy) == []  # it computes
    moves = [
        snapshot(30, [stack(0, BACKWARD), stack(1, COMPUTE)]),
        snapshot(10, [stack(0, BACKWARD), stack(1, own)]),
    ]
    assert outside(moves) == []


def test_a_rank_that_computes_moves_also_where_nobody_is_known_to_wait() -> None:
    spins = [snapshot(age, [stack(0, BACKWARD), stack(1, COMPUTE, cpu_s=100 - age)]) for age in (30, 10)]
    assert vote(spins).moving is True


def test_unknown_code_counts_as_waiting_only_if_a_large_majority_stands_idle_in_the_same_frames() -> None:
    assert outside(still(COMPUTE, COMPUTE, COMPUTE, LOADER)) == [3]
    busy = [
        snapshot(age, [*(stack(r, COMPUTE, cpu_s=100 - age) for r in range(3)), stack(3, LOADER)]) for age in (30, 10)
    ]
    assert vote(busy).waiting == 0


def test_a_backward_pass_that_computes_is_not_waiting() -> None:
    dumps = [
        snapshot(age, [*(stack(r, BACKWARD, cpu_s=100 - age) for r in range(3)), stack(3, LOADER)]) for age in (30, 10)
    ]
    assert outside(dumps) == []


def test_one_rank_in_the_barrier_does_not_make_culprits_of_those_in_the_backward_pass() -> None:
    voted = vote(still(BACKWARD, BACKWARD, BACKWARD, BARRIER))
    assert [c.rank for c in voted.outside] == [3]  # its data ended sooner, perhaps: a mismatch
    assert voted.waiting == 3


def test_all_in_the_same_collective_names_nobody_even_if_it_is_called_from_two_places() -> None:
    other_way = (*BARRIER[:2], "log_on_rank_0 (t.py)", "train (t.py)")
    voted = vote(still(other_way, BARRIER, BARRIER, BARRIER))
    assert (voted.outside, voted.waiting, voted.elsewhere) == ((), 4, 0)


@pytest.mark.parametrize(
    ("call", "place"),
    [
        ("futex", "waits for a lock"),
        ("clock_nanosleep", "sleeps"),
        ("poll", "runs elsewhere"),
        (None, "runs elsewhere"),
    ],
)
def test_of_frames_that_say_nothing_the_system_call_tells_what_the_odd_one_waits_for(
    call: str | None, place: str
) -> None:
    """`with lock:` is C code: py-spy shows the function that has it and no more."""
    cached = ("wait_for_the_cache (train.py)", "train (t.py)")
    dumps = [
        snapshot(age_s, [*(stack(r, RECV) for r in range(3)), stack(3, cached, syscall=call)]) for age_s in (30, 20, 10)
    ]
    voted = vote(dumps)
    assert [(c.rank, c.reason.split(",")[0]) for c in voted.outside] == [(3, place)]
    assert {group.ranks: group.place for group in voted.groups}[(3,)] == place


EVALUATE = ("evaluate (t.py)", "train (t.py)")


@pytest.mark.parametrize(
    ("where", "call", "patient"),
    [
        (EVALUATE, "clock_nanosleep", True),
        (EVALUATE, None, True),
        (EVALUATE, "futex", False),
        ((*LOADER[:3], *EVALUATE), "poll", False),
        (("_compile_kernel (triton/runtime/jit.py)", "train (t.py)"), None, True),
        (("wait_for_the_cache (t.py)", "train (t.py)"), None, False),
    ],
)  # fmt: skip
def test_a_rank_that_evaluates_or_compiles_takes_its_time_and_one_that_is_stuck_there_does_not(
    where: tuple[str, ...], call: str | None, patient: bool
) -> None:
    """Rank 3 alone, with the others in a barrier."""
    dumps = [
        snapshot(age_s, [*(stack(r, BARRIER) for r in range(3)), stack(3, where, syscall=call)])
        for age_s in (30, 20, 10)
    ]
    voted = vote(dumps)
    assert ([c.rank for c in voted.outside], voted.patient) == ([3], patient)
    assert not vote(still(BARRIER, BARRIER, BARRIER, BARRIER)).patient


def test_a_system_call_convicts_nobody_and_clears_nobody() -> None:
    """Three of four in code that nobody knows wait together, whatever call that is."""
    own = ("wait_for_peers (our_own_library.py)", "train (t.py)")
    dumps = [
        snapshot(age_s, [*(stack(r, own, syscall="futex") for r in range(3)), stack(3, LOADER)])
        for age_s in (30, 20, 10)
    ]
    assert [c.rank for c in vote(dumps).outside] == [3]


def test_the_only_one_in_another_collective_is_named() -> None:
    gather = ("all_gather (torch/distributed/distributed_c10d.py)", "train (t.py)")
    assert outside(still(BARRIER, BARRIER, gather, BARRIER)) == [2]
    assert outside(still(BARRIER, BARRIER, gather, gather)) == []


def test_the_only_one_in_another_collective_than_the_backward_pass_is_named_and_one_that_is_behind_as_well() -> None:
    """The gradients are reduced in the backward pass: a rank that calls a broadcast meanwhile will never meet
    the others."""
    mismatch = vote(still(BACKWARD, BACKWARD, BARRIER, BACKWARD))
    assert [(c.rank, "another collective" in c.reason) for c in mismatch.outside] == [(2, True)]
    assert mismatch.moving is False
    behind = vote(still(BARRIER, BARRIER, BACKWARD, BARRIER))
    assert [c.rank for c in behind.outside] == [2]
    assert vote(still(BACKWARD, BACKWARD, BARRIER, BARRIER)).outside == ()


def test_the_only_one_that_makes_a_group_while_all_others_reduce_is_named() -> None:
    new_group = ("new_group (torch/distributed/distributed_c10d.py)", "train (t.py)")
    for usual in (BACKWARD, BARRIER):
        found = vote(still(usual, usual, new_group, usual)).outside
        assert [(c.rank, "another collective: new_group" in c.reason) for c in found] == [(2, True)]
        assert vote(still(usual, usual, new_group, new_group)).outside == ()
    assert vote(still(new_group, new_group, new_group, new_group)).outside == ()


def test_a_rank_that_moved_in_the_middle_and_came_back_moves() -> None:
    def at(age: float, lines):
        return snapshot(age, [*(stack(r, RECV) for r in range(3)), stack(3, lines)])

    assert vote((at(30, LOADER), at(20, COMPUTE), at(10, LOADER))).moving is True


def test_equal_pids_on_two_nodes_are_two_processes() -> None:
    """A rank that spins in a collective uses a whole core; it does not compute because another node's pid does."""

    def at(age: float):
        spinning = stack(0, RECV, node="n1", pid=55, cpu_s=100 - age)
        return snapshot(age, [spinning, stack(1, RECV), stack(2, RECV), stack(3, LOADER, node="n2", pid=55)])

    assert vote((at(30), at(10))).moving is False


def test_a_rank_outside_the_collective_that_computes_is_moving() -> None:
    dumps = [
        snapshot(age, [*(stack(r, RECV) for r in range(3)), stack(3, COMPUTE, cpu_s=100 - age)]) for age in (30, 10)
    ]
    assert vote(dumps).moving is True


def test_an_undumped_rank_that_computes_is_moving() -> None:
    dumps = [
        snapshot(age, [*(stack(r, RECV) for r in range(3)), stack(3, (), error="timed out", cpu_s=100 - age)])
        for age in (30, 10)
    ]
    assert vote(dumps).moving is True


@pytest.mark.parametrize("snapshots", [still(LOADER, RECV, RECV, RECV)[-1:], ()])
def test_one_dump_or_none_says_nothing_about_movement(snapshots) -> None:
    assert vote(snapshots).moving is None


def test_two_dumps_too_close_together_say_nothing_about_movement() -> None:
    dumps = [snapshot(age, [stack(0, LOADER), *(stack(r, RECV) for r in (1, 2, 3))]) for age in (11, 10)]
    assert vote(dumps).moving is None


def test_a_rank_that_was_dumped_once_only_leaves_the_movement_unknown() -> None:
    first = snapshot(30, [stack(r, RECV) for r in range(3)])
    last = snapshot(10, [*(stack(r, RECV) for r in range(3)), stack(3, LOADER)])
    assert vote((first, last)).moving is None


def test_ranks_of_which_nothing_came_are_missing_and_side_steps_do_not_count() -> None:
    shell = stack(0, ("main (notebook.py)",), pid=999, node="n1")
    dumps = [snapshot(age, [shell, *(stack(r, RECV) for r in range(3))]) for age in (30, 10)]
    voted = vote(dumps, [seen(r) for r in range(4)])
    assert voted.missing == (3,)
    assert voted.outside == ()
    assert voted.waiting == 3


def test_a_rank_that_always_runs_and_gets_little_of_a_core_computes() -> None:
    """On a machine with too few cores: twelve processes on two of them."""

    def dumps(state: str, used: float, number: int = 3) -> tuple[StackSnapshot, ...]:
        return tuple(
            snapshot(
                age,
                [
                    *(stack(r, RECV, state="S") for r in range(3)),
                    stack(3, COMPUTE, state=state, cpu_s=used * (30 - age)),
                ],
            )
            for age in (30, 20, 10)[-number:]
        )

    assert vote(dumps("R", 0.1)).moving
    assert vote(dumps("S", 0.1)).moving is False
    assert vote(dumps("R", 0.0)).moving is False
    assert vote(dumps("R", 0.1, number=2)).moving is False


@pytest.mark.parametrize(
    ("frame", "place"),
    [
        ("FSDPParamGroup.wait_for_unshard (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py)", Place.COLLECTIVE),
        ("foreach_all_gather_copy_out (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)", Place.COLLECTIVE),
        ("Buffer.low_latency_dispatch (deep_ep/buffer.py)", Place.COLLECTIVE),
        ("EventOverlap.current_stream_wait (deep_ep/utils.py)", Place.COLLECTIVE),
        ("gather_along_first_dim (transformer_engine/pytorch/distributed.py)", Place.COLLECTIVE),
        ("Manager.wait_quorum (torchft/manager.py)", Place.COLLECTIVE),
        ("PartitionedParameterCoordinator.fetch_sub_module "
            "(deepspeed/runtime/zero/partitioned_param_coordinator.py)", Place.COLLECTIVE),
        ("synchronize (horovod/torch/mpi_ops.py)", Place.COLLECTIVE),
        ("PipelineP2PCommunication.recv_forward (colossalai/pipeline/p2p.py)", Place.P2P),
        ("MessageQueue.acquire_read (vllm/distributed/device_communicators/shm_broadcast.py)", Place.COLLECTIVE),
        ("allreduce (ray/util/collective/collective.py)", Place.COLLECTIVE),
        ("_wait (jax/_src/array.py)", Place.DEVICE),
        ("dispatch (app/router.py)", Place.OTHER),
        ("wait (user/futures.py)", Place.OTHER),
        ("combine (model/layers.py)", Place.OTHER),
    ],
)  # fmt: skip
def test_place_of_a_librarys_own_wait_is_the_collective_that_it_wraps(frame: str, place: Place) -> None:
    function, _, file = frame.partition(" (")
    assert place_of(function, file.rstrip(")")) is place


@pytest.mark.parametrize(
    "function", ["mscclpp::Communicator::wait", "ucc_collective_test", "ncclAllReduce", "nvshmem_barrier_all", "gloo::Context::wait", "ccl::barrier"]
)  # fmt: skip
def test_native_place_of_a_transport_is_a_collective(function: str) -> None:
    assert native_place_of(function) is Place.COLLECTIVE


RAY_MAIN = (
    "main_loop (ray/_private/worker.py)",
    "<module> (ray/_private/workers/default_worker.py)",
)
RAY_OWN = (
    "wait (threading.py)",
    "PythonGCThread.run (ray/_private/gc_collect_manager.py)",
    "_bootstrap (threading.py)",
)
TRAINS = (
    "all_reduce (torch/distributed/distributed_c10d.py)",
    "train_func (train.py)",
    "_bootstrap (threading.py)",
)


@pytest.mark.parametrize("name", ["TrainingThread(train_func)", "TrainingThread(train_and_monitor)", "Thread-3 (loop)"])
def test_in_a_worker_of_ray_the_thread_that_trains_counts_and_no_thread_of_rays_own(name: str) -> None:
    main = stack(1, RAY_MAIN)
    threads = (
        *main.threads,
        ThreadStack(thread_id=7, name="PythonGCThread", active=False, frames=frames(RAY_OWN)),
        ThreadStack(thread_id=8, name="MonitoringThread(train_func)", active=False, frames=frames(RAY_OWN)),
        ThreadStack(thread_id=6, name=name, active=False, frames=frames(TRAINS)),
    )
    assert locate(replace(main, threads=threads)).place is Place.COLLECTIVE
    alone = replace(main, threads=(*threads[:3], replace(threads[3], frames=frames(TRAINS[1:]))))
    assert locate(alone).frames[0].function == "train_func"
