"""Nodes of the next start, and the environment and arguments of the command there."""

from __future__ import annotations

import shlex

import pytest

from slurm_watchdog.supervisor.placement import (
    Allocation,
    NoSpare,
    arguments,
    choose,
    environment,
    is_in_job,
    least_nodes,
    read_allocation,
    repeated,
)

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
            gpus=32, end_at=1.8e9,
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
    with pytest.raises(ValueError, match="not a batch script"):
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
        ("n1-ib0", "n2-ib0"),
        ("n1ib0", "n2ib0"),
        ("n1-ib0.cluster.example", "n2-ib0.cluster.example"),
        ("n10-ib0", "n10-ib0"),
        ("n3-ib0", "n3-ib0"),
        ("n1-2", "n1-2"),
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


FIVE = read_allocation({
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-5]", "SLURM_TASKS_PER_NODE": "1(x5)", "SLURM_GPUS_PER_NODE": "8",
})  # fmt: skip
EIGHT = read_allocation({
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-5]", "SLURM_TASKS_PER_NODE": "8(x5)", "SLURM_GPUS": "a100:40",
})  # fmt: skip


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("srun torchrun --nnodes=5 --nproc-per-node 8 t.py", "srun torchrun --nnodes=4 --nproc-per-node 8 t.py"),
        ("srun torchrun --nnodes 5:5 t.py --layers 5", "srun torchrun --nnodes 4:4 t.py --layers 5"),
        ("srun accelerate launch --num_machines 5 --num_processes 40 t.py",
         "srun accelerate launch --num_machines 4 --num_processes 32 t.py"),
        ("srun deepspeed --num-nodes=5 t.py", "srun deepspeed --num-nodes=4 t.py"),
        ("srun python t.py --world-size 40", "srun python t.py --world-size 32"),
        ("srun python t.py --trainer.num_nodes 5", "srun python t.py --trainer.num_nodes 4"),
        ("srun python t.py trainer.num_nodes=5 ++trainer.num_nodes=5", "srun python t.py trainer.num_nodes=4 "
         "++trainer.num_nodes=4"),
        ("env WORLD_SIZE=40 MASTER_ADDR=n1 python t.py", "env WORLD_SIZE=32 MASTER_ADDR=n2 python t.py"),
        ("mpirun -n 40 t -n 40", "mpirun -n 32 t -n 40"),
        ("mpirun -np 40 t", "mpirun -np 32 t"),
        ("t data.np=40", "t data.np=40"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("allocation", [FIVE, EIGHT])
def test_options_with_the_allocations_nodes_or_processes_have_those_of_the_start(
    given: str, expected: str, allocation: Allocation
) -> None:
    placement = choose(allocation, 4, avoided={"n1"})
    assert arguments(given.split(), allocation, placement) == tuple(expected.split())
    assert arguments(given.split(), allocation, choose(allocation, 5)) == tuple(given.split())


def test_a_task_a_node_is_a_process_too() -> None:
    assert arguments(["--num_processes", "5"], FIVE, choose(FIVE, 4)) == ("--num_processes", "4")


@pytest.mark.parametrize(
    "word",
    [
        "--nnodes=4", "--nnodes=1:5", "--nnodes=$SLURM_NNODES", "--nodes=5", "--num_layers=5", "--num_processes=10",
        "--data.nodes=5", "nnodes", "--nnodes", "5", "--num_processes=0", "--world-size=\u0665", "num_nodes=50",
        "python -m x --nnodes 5",
    ],
)  # fmt: skip
def test_other_numbers_and_other_options_stay(word: str) -> None:
    unknown = Allocation(job_id="1", nodes=FIVE.nodes)
    for allocation in (FIVE, EIGHT, unknown):
        assert arguments(["srun", word], allocation, choose(allocation, 4)) == ("srun", word)


def test_a_line_for_a_shell_follows_as_words_do() -> None:
    line = (
        "RANK=$SLURM_PROCID WORLD_SIZE=40 torchrun --nnodes 5 --nproc-per-node=8 --rdzv_endpoint 'n1:29500' "
        '--master_addr="n1-ib0" t.py --layers 5 trainer.num_nodes=5; echo n1 5 --nnodes=55 --my-nnodes 5'
    )
    expected = (
        "RANK=$SLURM_PROCID WORLD_SIZE=32 torchrun --nnodes 4 --nproc-per-node=8 --rdzv_endpoint 'n2:29500' "
        '--master_addr="n2-ib0" t.py --layers 5 trainer.num_nodes=4; echo n1 5 --nnodes=55 --my-nnodes 5'
    )
    placement = choose(FIVE, 4, avoided={"n1"})
    for shell in (["bash", "-c"], ["/bin/sh", "-lc"], ["bash", "--login", "-c"]):
        assert arguments(["srun", *shell, line], FIVE, placement) == ("srun", *shell, expected)
    for other in (["python", "-c"], ["bash", "-x"], ["-c"]):
        assert arguments([*other, line], FIVE, placement) == (*other, line)


def test_variables_of_these_names_follow_where_the_script_has_set_them() -> None:
    own = {"WORLD_SIZE": "40", "NNODES": "5", "NUM_PROCESSES": "7", "MAIN_PROCESS_IP": "n1", "nnodes": "5"}
    changed = environment(EIGHT, choose(EIGHT, 4, avoided={"n1"}), own)
    assert changed == {"WORLD_SIZE": "32", "NNODES": "4", "MAIN_PROCESS_IP": "n2"}


@pytest.mark.parametrize(
    ("given", "expected"), [("40", "32"), ("a100:40", "a100:32"), ("a100:10,h100:30", "a100:8,h100:24"),
        ("a100:37", None), ("a100", None)],
)  # fmt: skip
def test_gpus_of_the_job_are_scaled_with_their_type(given: str, expected: str | None) -> None:
    placement = choose(EIGHT, 4)
    assert environment(EIGHT, placement, {"SLURM_GPUS": given}).get("SLURM_GPUS") == expected


@pytest.mark.parametrize(
    ("given", "gpus"),
    [
        ({"SLURM_GPUS": "a100:40"}, 40),
        ({"SLURM_GPUS_PER_NODE": "a100:8"}, 40),
        ({"SLURM_GPUS_ON_NODE": "8"}, 40),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_TASK": "1"}, 40),
        ({"SLURM_GPUS_ON_NODE": "2", "SLURM_GPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "2(x4),1"}, 0),
        ({"SLURM_GPUS": "many"}, 0),
        ({}, 0),
    ],
)
def test_gpus_of_all_nodes_are_read_from_the_environment(given: dict[str, str], gpus: int) -> None:
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[1-5]", "SLURM_TASKS_PER_NODE": "8(x5)"}
    assert read_allocation(job | given).gpus == gpus


FIRST = {"10.0.0.1", "10.1.0.1", "fd00::1"}  # Of n1.


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("10.0.0.1", "n2"),
        ("10.1.0.1:29500", "n2:29500"),
        ("fd00::1", "n2"),
        ("[fd00:0::1]:29500", "n2:29500"),
        ("10.0.0.9", "10.0.0.9"),
        ("10.0.0.2:29500", "10.0.0.2:29500"),
    ],
)
def test_an_ip_address_of_rank_0s_node_becomes_the_name_of_the_new_one(given: str, expected: str) -> None:
    placement = choose(FIVE, 4, avoided={"n1"})
    assert arguments(["--rdzv-endpoint", given], FIVE, placement, FIRST)[1] == expected
    assert environment(FIVE, placement, {"MASTER_ADDR": given}, FIRST).get("MASTER_ADDR", given) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            "srun --export=ALL,MASTER_ADDR=n1,WORLD_SIZE=40,X=n1 t",
            "srun --export=ALL,MASTER_ADDR=n2,WORLD_SIZE=32,X=n1 t",
        ),
        ("srun --export ALL,MASTER_ADDR=n1-ib0 t", "srun --export ALL,MASTER_ADDR=n2-ib0 t"),
        ("srun apptainer exec --env=MASTER_ADDR=n1 t", "srun apptainer exec --env=MASTER_ADDR=n2 t"),
        ("mpiexec -genv MASTER_ADDR n1 -n 40 t", "mpiexec -genv MASTER_ADDR n2 -n 40 t"),
        ("mpirun -x MASTER_ADDR=n1 t", "mpirun -x MASTER_ADDR=n2 t"),
        ("srun t --dist-url tcp://n1:29500", "srun t --dist-url tcp://n2:29500"),
        ("srun t --init_method=tcp://n1-ib0:29500/x", "srun t --init_method=tcp://n2-ib0:29500/x"),
        ("srun t --init_method=env:// --dist-url file:///n1/x", "srun t --init_method=env:// --dist-url file:///n1/x"),
        ("srun t --coordinator_address n1:1234", "srun t --coordinator_address n2:1234"),
        ("srun t --env CartPole-v1 n1", "srun t --env CartPole-v1 n1"),
        (
            "srun bash -c 'srun --export=ALL,MASTER_ADDR=n1,A=1 t'",
            "srun bash -c 'srun --export=ALL,MASTER_ADDR=n2,A=1 t'",
        ),
    ],
)
def test_rank_0s_host_is_found_in_urls_and_in_variables_that_options_hold(given: str, expected: str) -> None:
    placement = choose(FIVE, 4, avoided={"n1"})
    assert arguments(shlex.split(given), FIVE, placement) == tuple(shlex.split(expected))


def test_an_ip_address_in_a_url_follows_it() -> None:
    placement = choose(FIVE, 4, avoided={"n1"})
    words = ["--dist-url=tcp://10.0.0.1:29500", "--init_method", "tcp://[fd00::1]:29500"]
    assert arguments(words, FIVE, placement, FIRST) == ("--dist-url=tcp://n2:29500", "--init_method", "tcp://n2:29500")
    assert environment(FIVE, placement, {"DIST_URL": "tcp://n1:29500"}) == {"DIST_URL": "tcp://n2:29500"}


@pytest.mark.parametrize(
    ("command", "least"),
    [
        ("srun torchrun --nnodes=2:4 train.py", 2),
        ("srun torchrun --nnodes 1:8 train.py", 1),
        ("srun bash -c 'torchrun --nnodes=2:4 train.py'", 2),
        ("srun torchrun --nnodes=4:4 train.py", 4),
        ("srun torchrun --nnodes=4 train.py", 4),
        ("srun python train.py --time 1:30", 4),
    ],
)
def test_how_few_nodes_a_command_can_run_on_is_its_own_word(command: str, least: int) -> None:
    assert least_nodes(command.split(), 4) == least
