"""deploy/trainers without a framework: what is one text stays one, the switch is seen, a left-over is not, signals count."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.trainers.plain_pytorch import KillSwitch

FILES = ("plain_pytorch.py", "hf_trainer.py", "lightning_callback.py")
BATCH = Path(__file__).parents[2] / "deploy" / "trainers" / "batch.sh"


@pytest.fixture(autouse=True)
def inside_of_job_77(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_three_files_hold_the_very_same_switch(checkout: Path) -> None:
    found = set()
    for name in FILES:
        text = (checkout / "deploy/trainers" / name).read_text()
        found.add(text[text.index("\nclass KillSwitch:") :])
    assert len(found) == 1, "the class stands at the end of each file: change all three"


def test_each_file_runs_with_python_3_8_and_imports_nothing_of_ours(checkout: Path) -> None:

    for name in FILES:
        text = (checkout / "deploy/trainers" / name).read_text()
        tree = ast.parse(text, feature_version=(3, 8))
        modules = {
            (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name or "")
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        assert not any(str(module).startswith(("watchdog", "deploy")) for module in modules)


def test_a_file_that_appears_is_seen_and_tells_why(tmp_path: Path) -> None:
    switch = KillSwitch(str(tmp_path / "kill"), poll_seconds=0.01)
    assert not switch.agreed()
    (tmp_path / "kill").write_text('{"why": "n3 is slow"}\n')
    until(switch.agreed)
    assert "n3 is slow" in switch.reason
    switch.clear()
    switch.clear()
    assert not (tmp_path / "kill").exists()


def test_a_file_left_over_from_an_earlier_run_is_ignored_until_it_is_written_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kill").write_text("of last week\n")
    switch = KillSwitch(str(tmp_path / "kill"), poll_seconds=0.01)
    time.sleep(0.1)
    assert not switch.agreed()
    assert "is ignored" in capsys.readouterr().err
    (tmp_path / "kill").unlink()
    (tmp_path / "new").write_text("now\n")
    (tmp_path / "new").rename(tmp_path / "kill")
    until(switch.agreed)


def test_a_file_whose_path_names_this_very_run_counts_although_it_was_there_first(tmp_path: Path) -> None:
    place = tmp_path / "77.0"
    place.mkdir()
    (place / "kill").write_text("raised while the trainer was still importing\n")
    switch = KillSwitch(str(place / "kill"), poll_seconds=0.01)
    until(switch.agreed)


def test_a_signal_counts_like_the_file_and_a_handler_that_was_there_is_still_called() -> None:
    called = []
    signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    switch = KillSwitch("", poll_seconds=0.01)
    os.kill(os.getpid(), signal.SIGUSR1)
    until(switch.agreed)
    assert called == [signal.SIGUSR1]
    assert "signal" in switch.reason


class Collective:
    """What dist.all_reduce(async_op=True) gives: here `others` say what the peers saw."""

    def __init__(self, tensor: Any, others: int):
        self._tensor, self._others = tensor, others

    def wait(self) -> None:
        self._tensor.value = max(self._tensor.value, self._others)


def test_what_a_peer_saw_is_known_one_call_later_and_asking_never_waits_for_the_present_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter([0, 0, 1])
    asked: list[int] = []

    def all_reduce(tensor: Any, **_: Any) -> Collective:
        asked.append(tensor.value)
        return Collective(tensor, next(answers))

    distributed = types.SimpleNamespace(
        is_initialized=lambda: True,
        get_world_size=lambda: 2,
        get_backend=lambda: "gloo",
        group=types.SimpleNamespace(WORLD="world"),
        ReduceOp=types.SimpleNamespace(MAX="max"),
        all_reduce=all_reduce,
    )

    def tensor(values: list[int], dtype: object) -> Any:
        made = types.SimpleNamespace(value=values[0])
        made.item = lambda: made.value
        return made

    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(tensor=tensor, int32=None))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)  # type: ignore[arg-type]
    switch = KillSwitch("", signals=())
    assert [switch.agreed() for _ in range(4)] == [False, False, False, True]
    assert asked == [0, 0, 0], "nothing is asked any more once all have agreed"


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
