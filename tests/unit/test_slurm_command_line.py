"""The command-line client against small programs in the place of Slurm's: what only a misbehaving Slurm shows."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from watchdog.slurm.client import SlurmRefused, SlurmUnavailable
from watchdog.slurm.command_line import CommandLineSlurm, clean_environment

Client = Callable[..., CommandLineSlurm]


@pytest.fixture
def client(tmp_path: Path) -> Client:
    """Makes a client whose every command is `script`."""

    def make(script: str, deadline_s: float = 5.0, **more: Any) -> CommandLineSlurm:
        for command in ("squeue", "sinfo", "scontrol", "scancel"):
            path = tmp_path / command
            path.write_text(f"#!/bin/bash\n{script}\n")
            path.chmod(0o755)
        return CommandLineSlurm(
            str(tmp_path), deadline_s, environ={"PATH": os.environ["PATH"], "T": str(tmp_path)}, **more
        )

    return make


def unavailable(call: Coroutine[Any, Any, Any]) -> str:
    with pytest.raises(SlurmUnavailable) as caught:
        asyncio.run(call)
    return caught.value.reason


def test_no_output_is_never_an_empty_queue(client: Client) -> None:
    assert "header" in unavailable(client("exit 0").read_view())


def test_an_exit_code_makes_a_listing_unavailable(client: Client) -> None:
    slurm = client("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    assert "Unable to contact" in unavailable(slurm.read_view())
    assert "Unable to contact" in unavailable(slurm.read_job("1"))
    assert "Unable to contact" in unavailable(slurm.release("1"))


def test_a_command_that_hangs_is_killed_with_its_children_at_the_deadline(
    client: Client, tmp_path: Path
) -> None:
    slurm = client('sleep 300 & echo $! >> "$T/children"; wait', deadline_s=0.5)
    start = time.monotonic()
    assert "within 0.5 s" in unavailable(slurm.read_view())
    assert time.monotonic() - start < 3
    pids = [int(line) for line in (tmp_path / "children").read_text().split()]
    assert pids
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_missing_command_says_which_setting_to_look_at() -> None:
    slurm = CommandLineSlurm("/nonexistent", 5, environ={})
    assert "slurm.bin_directory" in unavailable(slurm.read_view())


def test_output_without_end_is_cut_off(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("watchdog.slurm.command_line.OUTPUT_LIMIT", 2**20)
    assert "more than 1048576 bytes" in unavailable(client("exec yes").read_view())


@pytest.mark.parametrize(
    "job_id", ["", "1,2", "-1", "--all", "1 2", "1;reboot", "٣", "1_[2-3]", "16+1", "1\n"]
)
def test_what_is_no_job_id_is_not_even_asked(client: Client, tmp_path: Path, job_id: str) -> None:
    slurm = client('touch "$T/called"')

    async def ask_everything() -> None:
        calls = [
            lambda: slurm.read_job(job_id),
            lambda: slurm.requeue_hold(job_id, only_unfinished=True),
            lambda: slurm.set_excluded_nodes(job_id, ["n1"]),
            lambda: slurm.release(job_id),
            lambda: slurm.hold(job_id),
            lambda: slurm.cancel(job_id),
        ]
        for call in calls:
            with pytest.raises(SlurmRefused, match="not asked"):
                await call()

    asyncio.run(ask_everything())
    assert not (tmp_path / "called").exists()


def test_a_node_name_can_not_be_another_argument(client: Client) -> None:
    with pytest.raises(SlurmRefused, match="no name of a node"):
        asyncio.run(client("exit 0").set_excluded_nodes("1", ["n1", "n2 Nodelist=n3"]))


def test_the_outcome_of_each_request_is_counted(client: Client) -> None:
    seen: list[tuple[str, str]] = []
    slurm = client(
        '[ "$1" = hold ] && exit 0; echo "Invalid job id specified for job 1" >&2; [ "$1" = release ]; exit 1',
        observe=lambda call, outcome: seen.append((call, outcome)),
    )
    asyncio.run(slurm.hold("1"))
    with pytest.raises(SlurmRefused, match="Invalid job id"):
        asyncio.run(slurm.release("1"))
    unavailable(slurm.read_view())
    assert seen == [("hold", "ok"), ("release", "refused"), ("read_view", "unavailable")]


def test_the_environment_can_not_narrow_a_listing() -> None:
    given = {
        "SLURM_CONF": "/c",
        "PATH": "/bin",
        "SQUEUE_USERS": "ann",
        "SLURM_CLUSTERS": "x",
        "SINFO_ALL": "0",
        "LC_ALL": "de",
    }
    assert clean_environment(given) == {
        "SLURM_CONF": "/c",
        "PATH": "/bin",
        "LC_ALL": "C",
        "SLURM_TIME_FORMAT": "%s",
    }


def test_the_marks_are_in_no_argument(client: Client, tmp_path: Path) -> None:
    slurm = client(
        'printf "%s\\n" "$0 $*" >> "$T/arguments"; printf "%s\\n" "$SQUEUE_FORMAT2" >> "$T/formats"'
    )
    unavailable(slurm.read_job("7"))
    arguments, formats = (tmp_path / "arguments").read_text(), (tmp_path / "formats").read_text()
    mark = formats.split("jobid:0")[1].split(",")[0]
    assert len(mark) > 16
    assert mark not in arguments
