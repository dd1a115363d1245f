"""Nodes of the next start, and the environment and arguments of the command there."""

from __future__ import annotations

import pytest

from slurm_watchdog.supervisor.allocation import Allocation, is_in_job, read_allocation, repeated
from slurm_watchdog.supervisor.placement import NoSpare, arguments, choose, environment

JOB = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_NODELIST": "n[1-4]", "SLURM_NNODES": "4",
    "SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS": "7", "SLURM_NPROCS": "7", "SLURM_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_CPUS_PER_NODE": "8(x4)", "SLURM_GPUS": "32", "MASTER_ADDR": "n1", "SLURM_RESTART_COUNT": "2",
    "SLURM_JOB_END_TIME": "1800000000",
}  # fmt: skip
ALLOCATION = read_allocation(JOB)


def test_allocation_is_read_from_the_environment() -> None:
    assert (
        Allocation(
            job_id="4711", restarts=2, nodes=("n1", "n2", "n3", "n4"), tasks=(2, 2, 2, 1), cpus=(8, 8, 8, 8),
            end_at=1.8e9,
        )
        == ALLOCATION
    )  # fmt: skip
    assert repeated((2, 2, 2, 1)) == "2(x3),1"


def test_numbers_that_do_not_fit_the_nodes_are_unknown() -> None:
    for text in ("2", "2(x9)", "", "two(x4)", "2(x999999)"):
        assert read_allocation({**JOB, "SLURM_TASKS_PER_NODE": text}).tasks == ()


def test_a_heterogeneous_job_and_no_job_at_all_are_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match="heterogeneous"):
        read_allocation({**JOB, "SLURM_HET_SIZE": "2"})
    with pytest.raises(ValueError, match="no batch script"):
        read_allocation({})
    assert not is_in_job({"SLURM_JOB_ID": "4711"})


@pytest.mark.parametrize(("step", "expected"), [("0", False), ("4294967290", True), ("", True)])
def test_a_task_of_a_step_is_no_batch_script(step: str, expected: bool) -> None:
    assert is_in_job({**JOB, "SLURM_STEP_ID": step}) is expected


def test_first_start_leaves_the_last_nodes_as_spares() -> None:
    placement = choose(ALLOCATION, 3)
    assert (placement.nodes, placement.spares, placement.avoided) == (("n1", "n2", "n3"), ("n4",), ())


def test_the_spare_takes_the_place_of_an_avoided_node_and_the_others_stay() -> None:
    placement = choose(ALLOCATION, 2, avoided={"n2"}, previous=("n2", "n4"))
    assert (placement.nodes, placement.spares, placement.avoided) == (("n1", "n4"), ("n3",), ("n2",))
    assert choose(ALLOCATION, 3, avoided={"n1"}).nodes == ("n2", "n3", "n4")


def test_a_suspect_is_used_only_where_nothing_else_is_left() -> None:
    assert choose(ALLOCATION, 3, suspects={"n1"}, previous=("n1", "n2", "n3")).nodes == ("n2", "n3", "n4")
    assert choose(ALLOCATION, 3, suspects={"n1", "n2"}, previous=("n1", "n2", "n3")).nodes == ("n1", "n3", "n4")
    assert choose(ALLOCATION, 4, suspects={"n1"}).nodes == ("n1", "n2", "n3", "n4")


def test_too_few_nodes_are_no_placement() -> None:
    with pytest.raises(NoSpare, match="no spare is left: 3 nodes are needed, and of the 4 of the job 2 may be used"):
        choose(ALLOCATION, 3, avoided={"n1", "n2"})


def test_environment_on_a_spare_is_that_of_a_job_with_these_nodes() -> None:
    placement = choose(ALLOCATION, 3, avoided={"n1"})
    assert environment(ALLOCATION, placement, JOB) == {
        "SLURM_JOB_NODELIST": "n[2-4]", "SLURM_NODELIST": "n[2-4]", "SLURM_NNODES": "3", "SLURM_JOB_NUM_NODES": "3",
        "SLURM_NTASKS": "5", "SLURM_NPROCS": "5", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_JOB_CPUS_PER_NODE": "8(x3)",
        "SLURM_GPUS": "24", "MASTER_ADDR": "n2",
    }  # fmt: skip


def test_environment_names_nothing_that_the_script_has_not_got_and_on_all_nodes_nothing() -> None:
    few = {name: JOB[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES")}
    allocation = read_allocation(few)
    assert environment(allocation, choose(allocation, 3), few) == {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_NNODES": "3"}
    assert environment(ALLOCATION, choose(ALLOCATION, 4), JOB) == {}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("n1", "n2"),
        ("n1.cluster.example", "n2.cluster.example"),
        ("n3", "n3"),
        ("10.0.0.1", "10.0.0.1"),
        ("login", "login"),
    ],
)
def test_master_addr_follows_rank_0_where_it_named_its_node(given: str, expected: str) -> None:
    placement = choose(ALLOCATION, 3, avoided={"n1"})
    changed = environment(ALLOCATION, placement, {**JOB, "MASTER_ADDR": given})
    assert changed.get("MASTER_ADDR", given) == expected


def test_arguments_that_hold_rank_0s_node_follow_it_and_others_stay() -> None:
    command = ("srun", "torchrun", "--rdzv-endpoint=n1:29500", "--master_addr", "n1", "train.py", "--data=n1", "n1")
    assert arguments(command, ALLOCATION, choose(ALLOCATION, 3, avoided={"n1"})) == (
        "srun", "torchrun", "--rdzv-endpoint=n2:29500", "--master_addr", "n2", "train.py", "--data=n1", "n1",
    )  # fmt: skip
    assert arguments(command, ALLOCATION, choose(ALLOCATION, 4)) == command
