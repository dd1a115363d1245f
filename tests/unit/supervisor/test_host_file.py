"""A file with the node of each task, for the nodes of a start."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from slurm_watchdog.supervisor.srun import CALLS, PLAN, Plan, file_named, hosts_in, moved, program

ON_A_SPARE = Plan(
    job_id="7", srun="", directory="", nodes=("n1", "n3", "n4"), left_out=("n2", "n5"), tasks=6, all_tasks=10,
    overlap=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("n1 n2 n3", "n1 n4 n3"),
        ("n3 n3 n2 n2 n1 n1", "n3 n3 n4 n4 n1 n1"),
        ("n1 n2 n3 n4 n5", "n1 n3 n4"),
        ("n4 n3", "n4 n3"),
        ("n2 n5", "n1 n3"),
        ("login n2", "login n1"),
    ],
)
def test_a_node_that_is_left_out_gives_its_tasks_to_one_that_has_none(hosts: str, expected: str) -> None:
    assert " ".join(moved(hosts.split(), ON_A_SPARE)) == expected


def test_only_a_plain_list_is_understood() -> None:
    assert hosts_in("# ranks\nn1\nn1 # the first\n\n") == ["n1", "n1"]
    for text in ("", "n[1-4]\n", "n1*8\n", "n1,n2\n", "n1 slots=8\n"):
        assert hosts_in(text) is None


def test_the_variable_counts_where_no_list_is_given() -> None:
    variable = {"SLURM_HOSTFILE": "hosts"}
    assert file_named({}, variable) == "hosts"
    assert file_named({"nodelist": "n1"}, variable) == ""
    assert file_named({"nodelist": "./h"}, variable) == "./h"
    assert file_named({"nodefile": "h", "nodelist": "n1"}, {}) == "h"


@pytest.mark.parametrize(
    ("line", "variable", "expected"),
    [
        ("-n10 x", True, "FILE n1 n1 n3 n3 n4 n4 --ntasks=6 --no-kill x"),
        ("-m arbitrary -N5 x", True, "FILE n1 n1 n3 n3 n4 n4 --nodes=3 --no-kill -m arbitrary x"),
        ("-w ./hosts -n10 x", False, "n1 n1 n3 n3 n4 n4 --nodelist=FILE --ntasks=6 --no-kill x"),
        ("-F ./hosts x", False, "n1 n1 n3 n3 n4 n4 --nodefile=FILE --no-kill x"),
        ("-w ./none x", False, "-w ./none x"),
    ],
)
def test_our_srun_calls_the_real_one_with_such_a_file(tmp_path: Path, line: str, variable: bool, expected: str) -> None:
    (tmp_path / CALLS).mkdir()
    real, ours = tmp_path / "real", tmp_path / "srun"
    real.write_text(
        '#!/bin/sh\nfor a in "$@"; do case $a in --node*=/*) cat "${a#*=}";; esac; done\n'
        '[ -z "$SLURM_HOSTFILE" ] || { echo FILE; cat "$SLURM_HOSTFILE"; }\necho "$@"\n'
    )
    ours.write_text(program())
    for each in (real, ours):
        each.chmod(0o700)
    (tmp_path / PLAN).write_text(json.dumps(ON_A_SPARE._replace(srun=str(real), directory=str(tmp_path))._asdict()))
    (tmp_path / "hosts").write_text("n1\nn1\nn2\nn2\nn3\nn3\nn4\nn4\nn5\nn5\n")
    environ = {**os.environ, "SLURM_JOB_ID": "7", **({"SLURM_HOSTFILE": "hosts"} if variable else {})}
    done = subprocess.run(
        [ours, *shlex.split(line)], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    words = [word.partition("=/")[0] + "=FILE" if "=/" in word else word for word in done.stdout.split()]
    assert " ".join(words) == expected
    assert ("cannot be read" in done.stderr) is (line == expected)
