"""What runs on a node, as it runs there: sent as text to an interpreter of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.nodetest.plan import Wanted, node_job, pair_job
from slurm_watchdog.nodetest.probes import disk
from slurm_watchdog.nodetest.probes.pair import arriving, sending
from slurm_watchdog.nodetest.probes.repeat import figure, is_disturbed, parse_busy, repeated
from slurm_watchdog.nodetest.probes.state import parse_counters, risen
from slurm_watchdog.nodetest.program import command
from slurm_watchdog.nodetest.results import Line, measured, parse_line

MAX_ARG = 131_072
"""MAX_ARG_STRLEN of Linux: the longest word of a command line."""


def start(question: dict[str, Any], node: str = "n1") -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(sys.executable, question), env={"SLURMD_NODENAME": node, "SLURM_JOB_ID": "7", "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE, text=True, cwd="/",
    )  # fmt: skip


def lines_of(process: subprocess.Popen[str]) -> list[Line]:
    output, _ = process.communicate(timeout=60)
    return [found for text in output.splitlines() if (found := parse_line(text)) is not None]


def test_a_node_measures_itself_without_a_package_of_ours_and_leaves_no_file(tmp_path: Path) -> None:
    wanted = Wanted(seconds=0.2, local_directories=(str(tmp_path),), shared_directories=(str(tmp_path),))
    job = node_job("n1", wanted)
    assert max(map(len, command(sys.executable, job.question))) < MAX_ARG
    found = measured("n1", lines_of(start(dict(job.question))))
    assert found.problems == ()
    # How busy this machine is decides whether a figure counts: it is there in any case.
    names = set(found.figures) | set(found.disturbed)
    assert {"cpu_core", "memory_core", f"disk_write {tmp_path}", f"mount_metadata {tmp_path}"} <= names
    assert all(value > 0 for value in found.figures.values())
    assert found.model
    assert list(tmp_path.iterdir()) == []


def test_a_phase_that_hangs_is_late_and_the_next_one_is_done(tmp_path: Path) -> None:
    hangs = {"phase": "site_check", "limit_s": 0.3, "command": "sleep 60"}
    absent = {"phase": "disk", "limit_s": 5, "seconds": 0.2, "subject": "/x", "directory": str(tmp_path / "no")}
    found = measured("n1", lines_of(start({"phases": [hangs, absent, {"phase": "state", "limit_s": 5}]})))
    assert [(each.phase, each.state) for each in found.problems] == [("site_check", "late"), ("disk", "failed")]
    assert "No such file" in found.problems[1].said
    assert found.model


def test_two_nodes_measure_latency_bandwidth_and_clocks_between_them() -> None:
    question = pair_job(("n1", "n2"), "127.0.0.1", "0123456789abcdef", Wanted(seconds=0.2)).question
    listener, caller = start(dict(question), "n1"), start(dict(question), "n2")
    found = measured("n1 n2", [*lines_of(caller), *lines_of(listener)])
    assert found.problems == ()
    assert {"pair_latency", "pair_out", "pair_in"} <= set(found.figures)
    assert abs(float(found.facts["pair"]["clock_ahead_s"])) < 1.0  # type: ignore[arg-type]


def test_a_connection_that_carries_nothing_ends_its_measurement_in_time() -> None:
    near, far = socket.socketpair()
    began = time.monotonic()
    with sending([near], 0.2):  # the other end takes nothing
        assert arriving([socket.socketpair()[0]], 0.4)[0] < 1e-6
    assert time.monotonic() - began < 5.0
    assert not far.recv(1 << 22).rstrip(b"\0")


def test_a_pair_whose_tokens_differ_measures_nothing() -> None:
    questions = [
        pair_job(("n1", "n2"), "127.0.0.1", token, Wanted(seconds=0.2)).question for token in ("a" * 32, "b" * 32)
    ]
    for question in questions:
        question["phases"][0]["limit_s"] = 3.0
    started = [start(dict(question), node) for question, node in zip(questions, ("n1", "n2"), strict=True)]
    found = measured("n1 n2", [each for process in started for each in lines_of(process)])
    assert found.figures == {}
    assert len(found.problems) == 2


STAT = "cpu  100 5 50 800 10 3 2 7 0 0\ncpu0 50 5 25 400 5 3 2 0 0 0\ncpu1 50 0 25 400 5 0 0 7 0 0\nintr 5\n"


def test_busy_time_leaves_out_idle_interrupts_and_what_the_host_took() -> None:
    assert parse_busy(STAT) == (1.55, 2)


@pytest.mark.parametrize(
    ("others", "lost", "shares", "disturbed"),
    [
        (0.0, 0.5, False, False),  # a quota, or the host of a virtual machine
        (0.5, 0.5, False, True),
        (1.5, 0.0, False, False),  # on other cores
        (1.5, 0.0, True, True),
        (0.05, 0.0, True, False),  # daemons
    ],
)
def test_a_repetition_is_disturbed_by_what_others_took(
    others: float, lost: float, shares: bool, disturbed: bool
) -> None:
    assert is_disturbed(others, lost, 2, 1, shares=shares) is disturbed


def test_a_rate_is_the_upper_quartile_of_its_repetitions_and_any_other_figure_the_median() -> None:
    values = iter([10.0, 40.0, 20.0, 30.0])
    found, _ = repeated(lambda: (next(values), 1.0, 1.0), 4, workers=1)
    assert found[0] == 30.0
    assert figure([10.0, 40.0, 20.0])[:3] == [20.0, 0.5, 3]


NET = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     100       1    9    9    0     0          0         0      100       1    0    0    0     0       0          0
  eth0: 5000000    4000    2    7    0     0          0         0  6000000    4500    1    3    0     0       0          0
"""


def test_counters_of_an_interface_are_its_errors_and_drops_and_a_rise_is_a_difference() -> None:
    found = parse_counters(NET)
    assert found == {"eth0": {"rx_errors": 2, "rx_drops": 7, "tx_errors": 1, "tx_drops": 3}}
    assert risen({"a": 2, "b": 3}, {"a": 2, "b": 5, "c": 1}) == {"b": 2}


def test_the_question_is_plain_json() -> None:
    job = node_job("n1", Wanted(gpu_python="/venv/bin/python", site_command="true"))
    asked = json.loads(json.dumps(job.question))["phases"]
    assert [each["phase"] for each in asked] == [
        "state", "gpu_health", "gpu_dcgm", "cpu", "memory", "disk", "fio", "gpu_rate", "gpu_nccl", "gpu_health",
        "site_check",
    ]  # fmt: skip
    assert sum(each["limit_s"] for each in asked) < 60 * job.minutes
    without = node_job("n1", Wanted(tools=False)).question["phases"]
    assert not {"fio", "gpu_dcgm", "gpu_nccl"} & {each["phase"] for each in without}


@pytest.mark.parametrize(("others_mb", "disturbed"), [(0, False), (1, False), (100_000, True)])
def test_figures_of_a_disk_on_which_others_move_much_meanwhile_are_disturbed(
    others_mb: int, disturbed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = iter((0, others_mb * 1_000_000))
    monkeypatch.setattr(disk, "_moved", lambda device: next(moved))
    found = disk.measure_local({"directory": str(tmp_path), "seconds": 0.05})["figures"]
    assert {name: each[3] for name, each in found.items()} == dict.fromkeys(
        ("disk_write", "disk_read", "disk_fsync"), disturbed
    )


def test_the_kernel_counts_what_a_whole_disk_moves_and_nothing_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("  446 9  20 1   7 0   30 5    0 9 9\n")
    assert disk._moved(str(tmp_path / "stat")) == 512 * (20 + 30)
    assert disk._moved("") == disk._moved(str(tmp_path / "none")) == 0
