"""deploy/trainers/batch.sh without Slurm: what is passed on, and when a next job is started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

BATCH = Path(__file__).parents[3] / "deploy" / "trainers" / "batch.sh"


@pytest.fixture(autouse=True)
def inside_of_job_77(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def run_batch(tmp_path: Path, *arguments: str, command: str, **environment: str) -> subprocess.Popen[str]:
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    for name in ("scontrol", "sbatch", "scancel"):
        (tools / name).write_text(
            f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/calls\n'
            f'[ {name} = scancel ] && kill -s "${{1#--signal=}}" "$(cat {tmp_path}/pid)"\nexit 0\n'
        )
        (tools / name).chmod(0o755)
    script = f"echo $$ > {tmp_path}/pid; {command}"
    return subprocess.Popen(
        ["bash", str(BATCH), *arguments, "--", "bash", "-c", script],
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


SAVES = 'trap "exit 0" USR1; trap "exit 143" TERM; echo up; while :; do sleep 0.05; done'


@pytest.mark.parametrize(
    ("arguments", "signal_number", "environment", "code", "calls"),
    [
        ((), signal.SIGUSR1, {}, 0, ["scancel --signal=USR1 77", "scontrol requeue 77"]),
        (("--next=none",), signal.SIGUSR1, {}, 0, ["scancel --signal=USR1 77"]),
        (("--next=submit", f"--script={BATCH}"), signal.SIGUSR1, {}, 0, ["scancel --signal=USR1 77", f"sbatch --export=ALL {BATCH}"]),
        (("--max-starts=3",), signal.SIGUSR1, {"SLURM_RESTART_COUNT": "2"}, 0, ["scancel --signal=USR1 77"]),
        ((), signal.SIGTERM, {}, 143, ["scancel --signal=TERM 77"]),
    ],
)  # fmt: skip
def test_the_batch_wrapper_starts_the_next_job_only_after_a_save_it_was_asked_for(
    arguments: tuple[str, ...],
    signal_number: int,
    environment: dict[str, str],
    code: int,
    calls: list[str],
    tmp_path: Path,
) -> None:
    wrapper = run_batch(tmp_path, *arguments, command=SAVES, **environment)
    assert wrapper.stdout is not None
    assert wrapper.stdout.readline() == "up\n"
    wrapper.send_signal(signal_number)
    assert wrapper.wait(10) == code
    print(wrapper.stdout.read())
    assert (tmp_path / "calls").read_text().splitlines() == calls


def test_the_batch_wrapper_ends_with_the_commands_own_code_and_starts_nothing(tmp_path: Path) -> None:
    for code in (0, 3, 130):
        wrapper = run_batch(tmp_path, command=f"exit {code}")
        assert wrapper.wait(10) == code
    assert not (tmp_path / "calls").exists()


def test_the_batch_wrapper_says_what_is_wrong_with_its_arguments(tmp_path: Path) -> None:
    for arguments in (("--next=submit",), ("--max-starts=x",), ("--what",)):
        wrapper = run_batch(tmp_path, *arguments, command="exit 0")
        said, _ = wrapper.communicate(timeout=180)
        assert (wrapper.returncode, bool(said)) == (2, True)


def test_the_batch_wrapper_tells_the_job_where_its_kill_switch_is(tmp_path: Path) -> None:
    wrapper = run_batch(tmp_path, command="echo $SLURM_WATCHDOG_KILL_SWITCH", SLURM_RESTART_COUNT="2")
    assert wrapper.communicate(timeout=180)[0] == "/run/slurm-watchdog/jobs/77.2/kill\n"
