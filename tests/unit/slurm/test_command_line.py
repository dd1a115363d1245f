"""The command-line client against small programs in the place of Slurm's: what only a misbehaving Slurm shows."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.slurm import commands
from slurm_watchdog.slurm.client import Refusal, SignalTo, SlurmRefused, SlurmUnavailable, Submission
from slurm_watchdog.slurm.command_line import CommandLineSlurm
from slurm_watchdog.slurm.commands import clean_environment
from slurm_watchdog.slurm.pyslurm_child import user_name

Client = Callable[..., CommandLineSlurm]


@pytest.fixture
def client(tmp_path: Path) -> Client:
    """Makes a client whose every command is `script`."""

    def make(script: str, deadline_s: float = 5.0, **more: Any) -> CommandLineSlurm:
        for command in ("squeue", "sinfo", "scontrol", "scancel", "sbatch"):
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


def test_a_command_that_hangs_is_killed_with_its_children_at_the_deadline(client: Client, tmp_path: Path) -> None:
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


def test_a_command_that_prints_more_than_the_limit_is_unavailable() -> None:
    assert "more than 1048576 bytes" in unavailable(commands.run(["yes"], os.environ, limit=2**20))


@pytest.mark.parametrize(
    "job_id", ["", "1,2", "-1", "--all", "1 2", "1;reboot", "٣", "1_[2-3%1]", "1_[2-3,...]", "16+1", "1\n"]
)
def test_client_given_no_job_id_refuses_without_calling_slurm(client: Client, tmp_path: Path, job_id: str) -> None:
    slurm = client('touch "$T/called"')

    async def ask_everything() -> None:
        calls = [
            lambda: slurm.read_job(job_id),
            lambda: slurm.requeue_hold(job_id, only_unfinished=True),
            lambda: slurm.set_excluded_nodes(job_id, ["n1"]),
            lambda: slurm.release(job_id),
            lambda: slurm.hold(job_id),
            lambda: slurm.cancel(job_id),
            lambda: slurm.read_script(job_id),
            lambda: slurm.send_signal(job_id, "USR1", SignalTo.FULL),
        ]
        for call in calls:
            with pytest.raises(SlurmRefused, match="not asked"):
                await call()

    asyncio.run(ask_everything())
    assert not (tmp_path / "called").exists()


def test_elements_of_an_array_that_wait_are_held_and_released_together_and_nothing_else_is_done_to_them(
    client: Client, tmp_path: Path
) -> None:
    slurm = client('echo "$@" >> "$T/called"')

    async def ask() -> None:
        await slurm.hold("1_[2-3,7]")
        await slurm.release("1_[2-3,7]")
        for call in (slurm.cancel, slurm.read_job):
            with pytest.raises(SlurmRefused, match="not asked"):
                await call("1_[2-3,7]")
        with pytest.raises(SlurmRefused, match="not asked"):
            await slurm.requeue_hold("1_[2-3,7]", only_unfinished=True)

    asyncio.run(ask())
    assert (tmp_path / "called").read_text() == "hold 1_[2-3,7]\nrelease 1_[2-3,7]\n"


def test_a_node_name_can_not_be_another_argument(client: Client) -> None:
    with pytest.raises(SlurmRefused, match="not a node's name"):
        asyncio.run(client("exit 0").set_excluded_nodes("1", ["n1", "n2 Nodelist=n3"]))


def test_nodes_are_reserved_for_our_user_and_a_reservation_s_name_can_not_be_another_argument(
    client: Client, tmp_path: Path
) -> None:
    slurm = client('echo "$@" >> "$T/called"')
    asyncio.run(slurm.reserve_nodes("slurm-watchdog-test-0a", ("n1", "n2")))
    asyncio.run(slurm.delete_reservation("slurm-watchdog-test-0a"))
    for name in ("", "theirs,mine", "a Nodes=ALL", "=x"):
        for call in (slurm.reserve_nodes(name, ("n1",)), slurm.delete_reservation(name)):
            with pytest.raises(SlurmRefused, match="not a reservation's name"):
                asyncio.run(call)
    assert (tmp_path / "called").read_text().splitlines() == [
        f"create reservation ReservationName=slurm-watchdog-test-0a Nodes=n1,n2 Users={user_name(os.geteuid())} "
        "StartTime=now Duration=1440 Flags=MAINT,IGNORE_JOBS",
        "delete reservation=slurm-watchdog-test-0a",
    ]


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
    slurm = client('printf "%s\\n" "$0 $*" >> "$T/arguments"; printf "%s\\n" "$SQUEUE_FORMAT2" >> "$T/formats"')
    unavailable(slurm.read_job("7"))
    arguments, formats = (tmp_path / "arguments").read_text(), (tmp_path / "formats").read_text()
    mark = formats.split("jobid:0")[1].split(",")[0]
    assert len(mark) > 16
    assert mark not in arguments


def refused(call: Coroutine[Any, Any, Any]) -> SlurmRefused:
    with pytest.raises(SlurmRefused) as caught:
        asyncio.run(call)
    return caught.value


@pytest.mark.parametrize("signal", ["", "-9", "USR1 5", "9", "usr1", "KILL;reboot"])
def test_client_given_no_signal_name_refuses_without_calling_slurm(client: Client, tmp_path: Path, signal: str) -> None:
    slurm = client('touch "$T/called"')
    assert refused(slurm.send_signal("5", signal, SignalTo.BATCH)).kind is Refusal.NOT_ASKED
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("option", ["n1", "-N1", "", "--", "--export=A\0B"])
def test_submit_with_anything_but_long_options_refuses_without_calling_sbatch(
    client: Client, tmp_path: Path, option: str
) -> None:
    slurm = client('touch "$T/called"')
    submission = Submission(script=b"#!/bin/sh\n", options=(option,), uid=os.geteuid(), workdir="/")
    assert refused(slurm.submit(submission)).kind is Refusal.NOT_ASKED
    assert not (tmp_path / "called").exists()


def test_a_job_is_submitted_with_its_script_options_and_directory_and_the_environment_of_a_login(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "x")
    monkeypatch.setenv("LD_PRELOAD", "")
    slurm = client(
        'd="${0%/*}"; printf "%s\\n" "$@" > "$d/arguments"; env > "$d/environment"; cat > "$d/script"; echo "17;east"'
    )
    script = b"#!/bin/sh\necho \xff\n" + b"# long\n" * 30000
    submission = Submission(
        script=script,
        options=("--exclude=n1,n2", "--comment=a; b"),
        uid=os.geteuid(),
        workdir="/w d",
    )
    assert asyncio.run(slurm.submit(submission)) == "17"
    assert (tmp_path / "script").read_bytes() == script
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments == ["--get-user-env", "--parsable", "--chdir=/w d", "--exclude=n1,n2", "--comment=a; b"]
    lines = (tmp_path / "environment").read_text().splitlines()
    assert f"USER={user_name(os.geteuid())}" in lines
    assert not [line for line in lines if line.startswith(("SLURM_JOB", "SBATCH", "LD_", "T="))]


def test_a_user_that_nobody_knows_submits_nothing(client: Client, tmp_path: Path) -> None:
    slurm = client('touch "$T/called"; echo 17')
    error = refused(slurm.submit(Submission(script=b"#!/bin/sh\n", uid=3_999_999, workdir="/")))
    assert error.kind is Refusal.NO_PERMISSION
    assert not (tmp_path / "called").exists()


def test_a_submission_that_was_cut_off_is_unknown(client: Client) -> None:
    submission = Submission(script=b"#!/bin/sh\n", uid=os.geteuid(), workdir="/")
    assert "named no job" in unavailable(client("exit 0").submit(submission))
    text = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    assert "Socket timed out" in unavailable(client(f"echo '{text}' >&2; exit 1").submit(submission))


def test_a_script_that_can_not_be_had_is_refused_although_scontrol_ends_well(client: Client) -> None:
    slurm = client("echo 'job script retrieval failed: Invalid job id specified' >&2; exit 0")
    assert refused(slurm.read_script("5")).kind is Refusal.NO_SUCH_JOB
    assert "printed nothing" in unavailable(client("exit 0").read_script("5"))


def test_a_script_is_handed_over_byte_by_byte(client: Client) -> None:
    assert asyncio.run(client("printf 'a\\377\\n\\n'").read_script("5")) == b"a\xff\n\n"


def test_a_drain_without_a_reason_is_not_asked_for_and_a_reason_is_one_line(client: Client, tmp_path: Path) -> None:
    slurm = client('printf "%s\\n" "$@" > "$T/arguments"')
    assert refused(slurm.drain_node("n1", " \n ")).kind is Refusal.NOT_ASKED
    asyncio.run(slurm.drain_node("n1", " watchdog:\n disk  State=RESUME" + "x" * 500))
    arguments = (tmp_path / "arguments").read_text().splitlines()
    assert arguments[:3] == ["update", "NodeName=n1", "State=DRAIN"]
    assert arguments[3].startswith("Reason=watchdog: disk State=RESUMExxx")
    assert len(arguments) == 4
    assert len(arguments[3]) < 420


def test_nothing_is_changed_once_another_controller_is_or_may_be_the_active_one(client: Client, tmp_path: Path) -> None:
    """The database is not asked before a question."""
    asked: list[str] = []

    def no() -> bool:
        asked.append("asked")
        return False

    slurm = client('touch "$T/called"; echo 1 RUNNING', right=commands.Right(lambda: True, no))
    script = Submission(script=b"#!/bin/sh\n", uid=os.getuid(), workdir="/tmp")
    for call in (
        slurm.release("1"), slurm.hold("1"), slurm.cancel("1"), slurm.requeue_hold("1", only_unfinished=True),
        slurm.set_excluded_nodes("1", ["n1"]), slurm.drain_node("n1", "why"), slurm.submit(script),
    ):  # fmt: skip
        assert "another controller" in unavailable(call)
    assert len(asked) == 7 and not (tmp_path / "called").exists()
    assert asyncio.run(slurm.read_script("1")) == b"1 RUNNING\n"
    assert len(asked) == 7
