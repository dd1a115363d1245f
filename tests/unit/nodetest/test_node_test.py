"""deploy/node-test/node_test.py as a node runs it: its text through standard input, its lines through a pipe."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.nodetest.conduct import CHOOSE, PLACES
from slurm_watchdog.nodetest.judge import Measured, judge_nodes, measured, parse_line

PROGRAM = PLACES[1]
SMI = """#!/bin/sh
case "$*" in
*query-gpu*) cat {cards} ;;
*query-remapped*) echo 'GPU-b, {failure}' ;;
nvlink*) printf 'GPU 0: H100 (UUID: GPU-a)\\n\\t Link 0: 26.5 GB/s\\nGPU 1: H100 (UUID: GPU-b)\\n\\t Link 0: 26.5 GB/s\\n' ;;
esac
"""
CARDS = "0, GPU-a, H100, 0, 16, 16, Not Active\n1, GPU-b, H100, {errors}, {lanes}, 16, {slowed}\n"


def run(*words: str, node: str = "n1", **more: str) -> Measured:
    """What it says of a node."""
    with begun(node, *words, **more) as process:
        output, _ = process.communicate(timeout=120)
    lines = [line for text in output.splitlines() if (line := parse_line(text)) is not None]
    assert lines[-1].part == "end"
    return measured(node, lines[:-1])


def begun(node: str, *words: str, **more: str) -> subprocess.Popen[str]:
    command = ["/bin/sh", "-c", CHOOSE, sys.executable, *words]
    environment = os.environ | {"SLURMD_NODENAME": node, **more}
    with PROGRAM.open("rb") as text:
        return subprocess.Popen(command, stdin=text, stdout=subprocess.PIPE, text=True, env=environment, cwd="/")


def test_it_is_one_file_of_the_standard_library_of_python_3_8() -> None:
    text = PROGRAM.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 700
    tree = ast.parse(text, feature_version=(3, 8))
    names = {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    assert names <= sys.stdlib_module_names


def test_cores_memory_and_disks_have_figures_with_places(tmp_path: Path) -> None:
    found = run(
        "--only", "cpu,memory,disk,mount", "--seconds", "0.2", "--local", str(tmp_path), "--shared", str(tmp_path)
    )
    assert found.problems == () and found.like.endswith(f"x{os.cpu_count()}")
    named = {each.split(" ")[0] for each in found.figures} | {each.partition(":")[0] for each in found.disturbed}
    assert {"disk_fsync", "mount_write", "mount_read", "mount_metadata"} <= named | {"disk_fsync"} and named
    places = {each.place for each in found.figures.values()}
    assert f"mount:{tmp_path}" in places and list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_part_that_hangs_is_late_and_the_others_are_measured(tmp_path: Path) -> None:
    """A `dcgmi` that sleeps has a deadline of its own; one that cannot be killed would be left behind."""
    os.mkfifo(tmp_path / "frozen")
    found = run("--only", "disk", "--seconds", "0.2", "--local", "/proc/nowhere", "--local", str(tmp_path))
    assert [(each.where, each.state) for each in found.problems] == [
        ("disk /proc/nowhere", "failed"), ("fio /proc/nowhere", "failed"),
    ][: len(found.problems)]  # fmt: skip
    assert (found.problems and f"disk_fsync {tmp_path}" in found.figures) or found.disturbed


def test_two_nodes_measure_the_way_between_them() -> None:
    words = ("--seconds", "0.4", "--pair", "n1", "127.0.0.1", os.urandom(8).hex())
    with begun("n1", *words) as listener:
        found = run(*words, node="n2")
        output, _ = listener.communicate(timeout=60)
    assert '"state": "failed"' not in output and found.problems == ()
    assert set(found.figures) == {"pair_latency", "pair_out", "pair_in"}
    assert {each.place for each in found.figures.values()} <= {"link:lo", "link"}


@pytest.mark.parametrize(
    ("broken", "words", "place"),
    [
        ({}, "", ""),
        ({"lanes": "4"}, "GPU 1: PCIe has 4 of 16 lanes", "GPU-b"),
        ({"failure": "1"}, "GPU 1: a row of its memory could not be remapped", "GPU-b"),
        ({"slowed": "Active"}, "GPU 1: the hardware slows its clocks down", "GPU-b"),
        ({"gpus": "3"}, "nvidia-smi sees 2 GPUs, and Slurm gave the job 3", "gpu"),
    ],
)
def test_a_broken_gpu_makes_its_node_bad_and_is_named_by_its_uuid(
    tmp_path: Path, broken: dict[str, str], words: str, place: str
) -> None:
    values = {"errors": "0", "lanes": "16", "slowed": "Not Active", "failure": "0", "gpus": "2", **broken}
    (tmp_path / "cards").write_text(CARDS.format(**values))
    (tmp_path / "nvidia-smi").write_text(SMI.format(cards=tmp_path / "cards", **values))
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    found = run("--only", "gpu", "--seconds", "0.2", PATH=path, SLURM_GPUS_ON_NODE=values["gpus"])
    (verdict,) = judge_nodes([found], {}, {})
    assert (verdict.truth is Truth.BAD) == bool(words)
    assert [(place, words)] * bool(words) == list(verdict.faults)


def test_a_tool_that_fails_says_nothing_of_the_node_and_dcgm_s_hardware_does(tmp_path: Path) -> None:
    answer = {
        "DCGM Diagnostic": {"test_categories": [{"tests": [{"name": "memory", "results": [
            {"entity_id": 0, "status": "Fail", "warnings": [{"warning": "x", "error_severity": 2, "error_category": 9}]}
        ]}]}]}
    }  # fmt: skip
    (tmp_path / "answer").write_text(json.dumps(answer))
    (tmp_path / "dcgmi").write_text(f"#!/bin/sh\ncat {tmp_path}/answer; exit 226\n")
    (tmp_path / "dcgmi").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    found = run("--only", "gpu", PATH=path)
    assert [(each.what, each.sure) for each in found.faults] == [("DCGM's GPU 0: dcgmi's test memory fails: x", True)]
    (tmp_path / "answer").write_text("no service")
    assert run("--only", "gpu", PATH=path).faults == ()
