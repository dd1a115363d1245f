"""srun's arguments on the nodes of a start: what is replaced, what is added, and what stays as it was."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from slurm_watchdog.supervisor.srun import CALLS, PLAN, Plan, parse, program, rewrite

ON_A_SPARE = Plan(
    job_id="7", srun="/usr/bin/srun", directory="/tmp/x", nodes=("n1", "n3", "n4"), left_out=("n2", "n5"), tasks=6,
    all_tasks=10, overlap=False, all_gpus=40,
)  # fmt: skip
"""Five nodes with two tasks each, of which three are used: n2 is avoided, n5 is a spare."""
ADDED = "--exclude=n2,n5"


def placed(line: str, plan: Plan = ON_A_SPARE) -> str:
    return shlex.join(rewrite(shlex.split(line), plan).arguments)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("python train.py", f"{ADDED} --nodes=3 python train.py"),
        ("-N5 -n10 python train.py -N 5", f"{ADDED} --nodes=3 --ntasks=6 python train.py -N 5"),
        ("-N 5 --ntasks=10 -u x", f"{ADDED} --nodes=3 --ntasks=6 -u x"),
        ("--nodes=3 --ntasks 6 x", f"{ADDED} --nodes=3 --ntasks 6 x"),
        ("--ntask=10 x", f"{ADDED} --nodes=3 --ntasks=6 x"),
        ("--gpus=40 x", f"{ADDED} --nodes=3 --gpus=24 x"),
        ("-Ga100:40 -n10 x", f"{ADDED} --nodes=3 --ntasks=6 --gpus=a100:24 x"),
        ("-G a100:10,h100:30 x", f"{ADDED} --nodes=3 --gpus=a100:6,h100:18 x"),
        ("-n5 --ntasks-per-node=1 x", f"{ADDED} --nodes=3 --ntasks=3 --ntasks-per-node=1 x"),
        ("-N5 -n5 x", f"{ADDED} --nodes=3 --ntasks=3 x"),
        ("--gpus=24 x", f"{ADDED} --nodes=3 --gpus=24 x"),
        ("-lN5 x", f"{ADDED} --nodes=3 -l x"),
        ("--nodes=2-5 x", f"{ADDED} --nodes=2-3 x"),
        ("-n10 x", f"{ADDED} --nodes=3 --ntasks=6 x"),
        ("-K -x n9 x", "--exclude=n9,n2,n5 --nodes=3 -K x"),
        (
            "--kill-on-bad-exit=1 --wait 60 --label x",
            f"{ADDED} --nodes=3 --kill-on-bad-exit=1 --wait 60 --label x",
        ),
        ("-- -x", f"{ADDED} --nodes=3 -- -x"),
    ],
)
def test_srun_over_the_whole_job_goes_to_the_nodes_of_the_start(line: str, expected: str) -> None:
    assert placed(line) == expected


@pytest.mark.parametrize(
    ("line", "nodes"),
    [("-N1 -n1 python prepare.py", "n1"), ("-n1 python prepare.py", "n1"), ("--nodes=2 --ntasks=4 x", "n1,n3")],
)
def test_srun_that_asks_for_less_keeps_its_numbers(line: str, nodes: str) -> None:
    assert placed(line) == f"{ADDED} --nodelist={nodes} {line}"


def test_small_steps_side_by_side_get_nodes_of_their_own_while_there_are_any() -> None:
    assert rewrite(["-N1", "x"], ON_A_SPARE, {"n1"}).nodes == ("n3",)
    assert "--nodelist=n3,n4" in rewrite(["-N2", "x"], ON_A_SPARE, {"n1"}).arguments
    assert rewrite(["-N2", "x"], ON_A_SPARE, {"n1", "n3"}).arguments == (ADDED, "-N2", "x")
    assert rewrite(["x"], ON_A_SPARE, {"n1"}).nodes == ON_A_SPARE.nodes


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-w n[1-5] x", f"{ADDED} --nodelist=n1,n3,n4 x"),
        ("-w n1,n2,n3 -N3 x", f"{ADDED} --nodelist=n1,n3,n4 --nodes=3 x"),
        ("-w n1 -N1 x", f"{ADDED} -w n1 -N1 x"),
        ("--nodelist=n1,n2 x", f"{ADDED} --nodelist=n1 x"),
    ],
)
def test_srun_with_a_list_of_nodes_has_those_of_the_start_in_it(line: str, expected: str) -> None:
    assert placed(line) == expected


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("-N4 x", "this start has 3"),
        ("-w n2 x", "none of these"),
        ("-w ./hosts x", "a file of nodes"),
        ("-F hosts x", "a file of nodes"),
        ("-m arbitrary -w n1,n1,n2 x", "arbitrary"),
        ("--distrib=arbitrary:block -n6 x", "arbitrary"),
        ("-x /etc/hosts x", "names a file"),
        ("-r1 -N1 x", "--relative"),
        ("-N1 a : -N1 b", "several parts"),
        ("-N many x", "not a number"),
    ],
)
def test_srun_whose_wish_cannot_be_met_stays_as_it_is_and_says_so(line: str, why: str) -> None:
    rewritten = rewrite(shlex.split(line), ON_A_SPARE)
    assert rewritten.arguments == tuple(shlex.split(line))
    assert why in rewritten.unmet


@pytest.mark.parametrize("line", ["--help", "-V", "", "--jobid=8 hostname", "--test-only x"])
def test_srun_that_starts_nothing_here_stays_as_it_is(line: str) -> None:
    assert rewrite(shlex.split(line), ON_A_SPARE) == (tuple(shlex.split(line)), "", ())


def test_srun_beside_an_older_step_overlaps_it_unless_it_wants_to_be_alone() -> None:
    again = ON_A_SPARE._replace(overlap=True)
    assert "--overlap" in rewrite(["x"], again).arguments
    assert rewrite(["--overlap", "x"], again).arguments.count("--overlap") == 1
    assert "--overlap" not in rewrite(["--exclusive", "x"], again).arguments


def test_srun_on_all_nodes_of_a_job_stays_as_it_is() -> None:
    everywhere = ON_A_SPARE._replace(nodes=("n1", "n2"), left_out=())
    assert placed("-N2 --relative=1 x", everywhere) == "-N2 --relative=1 x"


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("--pty bash", "bash"),
        (
            "--container-image=nvcr.io#nvidia/pytorch:24.01-py3 --container-writable --container-mounts /a:/b python x",
            "python x",
        ),
        ("--exact --mpi pmix --cpu-bind=cores -c8 ./x -n 3", "./x -n 3"),
        ("--export ALL,A=b -vv x", "x"),
        ("-k -K0 x", "x"),
        ("-J name -t 5 x", "x"),
        ("--kill-on-bad --unbuf python -N 5 t.py", "python -N 5 t.py"),
        ("--wait 60 --container /b x -n 3", "x -n 3"),
    ],
)
def test_options_of_srun_end_where_its_command_begins(line: str, command: str) -> None:
    assert shlex.join(parse(shlex.split(line))[1]) == command


def test_options_of_a_container_reach_srun_as_they_are() -> None:
    line = "--container-image=/images/torch.sqsh --container-mounts=/data:/data --no-container-mount-home python x"
    assert placed(line) == f"{ADDED} --nodes=3 {line}"


def test_gpus_of_a_smaller_step_and_of_a_job_without_a_number_stay() -> None:
    assert placed("-N1 -n1 --gpus=8 x").endswith("-N1 -n1 --gpus=8 x")
    assert placed("-N1 -n5 x").endswith("-N1 -n5 x")
    assert placed("--gpus=40 x", ON_A_SPARE._replace(all_gpus=0)).endswith("--gpus=40 x")


def test_variables_that_place_tasks_count_as_the_options_do() -> None:
    assert "arbitrary" in rewrite(["-n6", "x"], ON_A_SPARE, environ={"SLURM_DISTRIBUTION": "arbitrary"}).unmet
    assert "file of nodes" in rewrite(["-n6", "x"], ON_A_SPARE, environ={"SLURM_HOSTFILE": "hosts"}).unmet
    everywhere = ON_A_SPARE._replace(nodes=("n1", "n2"), left_out=())
    assert rewrite(["x"], everywhere, environ={"SLURM_HOSTFILE": "hosts"}).arguments == ("x",)


@pytest.mark.parametrize(
    ("line", "expected"), [("-n10 x", f"{ADDED} --nodes=3 --ntasks=6 x"), ("-w ./hosts x", "-w ./hosts x")]
)
def test_our_srun_becomes_the_real_one(tmp_path: Path, line: str, expected: str) -> None:
    (tmp_path / CALLS).mkdir()
    real, ours = tmp_path / "real", tmp_path / "srun"
    real.write_text('#!/bin/sh\necho "$@"\n')
    ours.write_text(program())
    for each in (real, ours):
        each.chmod(0o700)
    (tmp_path / PLAN).write_text(json.dumps(ON_A_SPARE._replace(srun=str(real), directory=str(tmp_path))._asdict()))
    environ = {**os.environ, "SLURM_JOB_ID": "7"}
    done = subprocess.run([ours, *shlex.split(line)], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == f"{expected}\n"
    assert ("srun is called as it is written, for a file of nodes" in done.stderr) is (line == expected)
