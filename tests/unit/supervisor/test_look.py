"""What a node says of itself, by the real program: directories, the site's command, what hangs."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from slurm_watchdog.supervisor.preflight import LOOK_MARK, NodeLook, parse_look
from slurm_watchdog.supervisor.srun import own_program


def looked(*directories: str, command: str = "", **environ: str) -> NodeLook:
    question: dict[str, Any] = {"mark": LOOK_MARK, "directories": directories, "command": command}
    done = subprocess.run(
        [*own_program("look"), json.dumps(question)], capture_output=True, text=True,
        check=True, timeout=60, env={**os.environ, "SLURMD_NODENAME": "n1", **environ},
    )  # fmt: skip
    (look,) = (each for line in done.stdout.splitlines() if (each := parse_look(line)) is not None)
    return look


def test_a_directory_that_answers_and_one_that_is_gone(tmp_path: Path) -> None:
    look = looked(str(tmp_path), str(tmp_path / "gone"), SLURM_GPUS_ON_NODE="8")
    assert look.problems == {str(tmp_path / "gone"): "No such file or directory"}
    assert (look.node, look.expected, list(tmp_path.iterdir())) == ("n1", 8, [])


def test_the_sites_command_says_its_code_and_last_line_and_one_that_hangs_is_ended() -> None:
    def said(command: str) -> str:
        return looked(command=command).problems.get("the site's check", "")

    assert said("echo a; echo no cable >&2; exit 3") == "ended with 3: no cable"
    assert said("sleep 600") == "has no end within 3.5 s"
    assert said("echo fine") == ""
