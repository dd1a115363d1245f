"""Who gets a signal and who never does: real processes with open files in place of GPUs, and everything that
may change in between."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.children.become_user import MIN_UID
from slurm_watchdog.agent.children.requests import SignalProcess
from slurm_watchdog.agent.commands import Commands
from slurm_watchdog.agent.proc.files import BOOT_ID, read_file, read_stat
from slurm_watchdog.agent.processes import terminate
from slurm_watchdog.agent.processes.terminate import NotEndedError, ProcessToEnd, end
from slurm_watchdog.model.protocol import EndProcess, ProcessEnd
from tests.builders.agent_context import context_of
from tests.builders.fake_children import FakeChildren

UID = 64985 if os.geteuid() == 0 else os.getuid()
JOB = "987654321"
"""No job of this machine."""

pytestmark = pytest.mark.skipif(UID < MIN_UID, reason="needs root or an ordinary user: nobody else is ended")

NAME_AND_SAY = """
import ctypes, os, signal, sys, threading, time
libc = ctypes.CDLL(None)
if os.getuid() == 0:
    os.setgroups([]); os.setresgid(*[int(os.environ["USER_ID"])] * 3); os.setresuid(*[int(os.environ["USER_ID"])] * 3)
def name(comm):
    libc.prctl(15, comm.encode())
def say():
    os.write(1, b"x")
"""
ORDINARY = NAME_AND_SAY + "name('train'); say(); time.sleep(600)"
DEAF = NAME_AND_SAY + "name('train'); signal.signal(signal.SIGTERM, signal.SIG_IGN); say(); time.sleep(600)"


class Orphans:
    """Processes that hold the file `gpu0`, or what a test wants."""

    def __init__(self, directory: Path) -> None:
        self.gpu = directory / "gpu0"
        self.gpu.touch()
        self.started: list[subprocess.Popen[bytes]] = []

    def start(
        self, program: str = ORDINARY, *words: str, title: str = "python", uid: int = UID, holds: bool = True,
        executable: str = sys.executable,
    ) -> int:  # fmt: skip
        """Its pid, when it is as far as `say`."""
        fd = os.open(self.gpu, os.O_RDONLY)
        process = subprocess.Popen(
            [title, "-c", program, *words], executable=executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/",
            pass_fds=[fd] if holds else [], env={"FD": str(fd), "USER_ID": str(uid), "PYTHONHOME": sys.base_prefix},
        )  # fmt: skip
        os.close(fd)
        self.started.append(process)
        assert process.stdout is not None
        assert process.stdout.read(1) == b"x"
        return int(process.pid)

    def stepd(self, *words: str, title: str, program: str = "", holds: bool = False) -> int:
        """A slurmstepd as it is: root's, and a program of that name."""
        executable = self.gpu.with_name("slurmstepd")
        if not executable.exists():
            shutil.copy(os.path.realpath(sys.executable), executable)
        return self.start(program or STEPD, *words, title=title, uid=0, holds=holds, executable=str(executable))

    def wanted(self, pid: int, comm: str = "train") -> ProcessToEnd:
        return ProcessToEnd(
            pid=pid, start_ticks=read_stat(pid).start_ticks, uid=UID, comm=comm, boot_id=read_file(BOOT_ID).decode().strip(),
            job_id=JOB, minors=(0,), devices=str(self.gpu.with_name("gpu")),
        )  # fmt: skip

    def lives(self, pid: int) -> bool:
        process = next(each for each in self.started if each.pid == pid)
        return process.poll() is None


@pytest.fixture
def orphans(tmp_path: Path) -> Iterator[Orphans]:
    orphans = Orphans(tmp_path)
    yield orphans
    for process in orphans.started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.close()
        process.stdin.close()


def refusal_of(orphans: Orphans, wanted: ProcessToEnd) -> str:
    """Why nothing is sent, by either signal; the process lives on."""
    term, kill = end(wanted, "term"), end(wanted, "kill")
    assert (term.sent, kill.sent, term.gone, kill.gone) == (False, False, False, False)
    assert term.refusal == kill.refusal != ""
    assert orphans.lives(wanted.pid)
    return term.refusal


# ------------------------------------------------------------------------------------------------ what is done


def test_an_orphan_ends_by_a_signal_and_a_look_sends_none(orphans: Orphans) -> None:
    pid = orphans.start()
    wanted = orphans.wanted(pid)
    seen = end(wanted, "look")
    assert (seen.gone, seen.released, seen.sent, seen.refusal) == (False, False, False, "")
    assert orphans.lives(pid)
    assert end(wanted, "term") == ProcessEnd(gone=True, sent=True)
    assert orphans.started[0].wait(30) == -15
    assert end(wanted, "kill") == ProcessEnd(gone=True), "a command that is told again finds nobody"


def test_one_that_does_not_hear_sigterm_is_there_afterwards_and_sigkill_ends_it(orphans: Orphans) -> None:
    wanted = orphans.wanted(orphans.start(DEAF))
    after = end(wanted, "term", wait_s=0.1)
    assert (after.sent, after.gone, after.released, after.state in "SR") == (True, False, False, True)
    assert end(wanted, "kill", wait_s=30.0) == ProcessEnd(gone=True, sent=True)
    assert orphans.started[0].wait(30) == -9


def test_one_that_waits_for_its_parent_has_ended(orphans: Orphans) -> None:
    wanted = orphans.wanted(orphans.start())
    orphans.started[0].kill()
    os.waitid(os.P_PID, wanted.pid, os.WEXITED | os.WNOWAIT)
    assert end(wanted, "term") == ProcessEnd(gone=True)


def test_one_whose_main_thread_has_ended_holds_its_gpu_by_another_and_can_be_ended(orphans: Orphans) -> None:
    program = NAME_AND_SAY + (
        "name('train')\n"
        "def rest():\n    name('train')\n    while open(f'/proc/{os.getpid()}/stat').read().rpartition(')')[2].split()[0] != 'Z': time.sleep(0.01)\n"
        "    say(); time.sleep(600)\n"
        "threading.Thread(target=rest).start()\nlibc.pthread_exit(None)"
    )
    pid = orphans.start(program)
    wanted = orphans.wanted(pid)
    assert read_stat(pid).state == "Z"
    assert not end(wanted, "look").released
    assert end(wanted, "kill") == ProcessEnd(gone=True, sent=True)


def test_one_that_has_let_go_of_its_gpu_gets_no_signal(orphans: Orphans) -> None:
    pid = orphans.start(NAME_AND_SAY + "name('train'); os.close(int(os.environ['FD'])); say(); time.sleep(600)")
    assert end(orphans.wanted(pid), "term").released
    assert not end(orphans.wanted(pid), "kill").sent
    assert orphans.lives(pid)


# ------------------------------------------------------------------------------------------------ races


def test_another_process_under_the_same_number_gets_no_signal(orphans: Orphans) -> None:
    pid = orphans.start()
    before = replace(orphans.wanted(pid), start_ticks=orphans.wanted(pid).start_ticks - 1)
    assert end(before, "kill") == ProcessEnd(gone=True)
    assert orphans.lives(pid)


def test_a_process_of_another_boot_is_none_of_ours(orphans: Orphans) -> None:
    pid = orphans.start()
    assert end(replace(orphans.wanted(pid), boot_id="before"), "kill") == ProcessEnd(gone=True)
    assert orphans.lives(pid)


def test_one_that_became_another_program_by_exec_is_left_alone(orphans: Orphans) -> None:
    program = NAME_AND_SAY + "name('train'); os.execv('/bin/sh', ['sh', '-c', 'printf x; read line'])"
    pid = orphans.start(program)
    assert "another program now" in refusal_of(orphans, orphans.wanted(pid))


def test_who_ends_between_the_look_and_the_signal_is_gone_and_not_refused(
    orphans: Orphans, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, parent = orphans.wanted(orphans.start()), os.getppid()

    def ends_now() -> int:
        """In the middle of the look: what is read after this is refused."""
        orphans.started[0].kill()
        orphans.started[0].wait()
        return parent

    monkeypatch.setattr(os, "getppid", ends_now)
    assert end(wanted, "term") == ProcessEnd(gone=True)


# ------------------------------------------------------------------------------------------------ who never gets one


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"uid": 0}, "not an ordinary user"),
        ({"uid": 999 if MIN_UID > 999 else MIN_UID - 1}, "not an ordinary user"),
        ({"uid": UID + 1}, "it runs as uid"),
        ({"comm": "other"}, "another program now: train, not other"),
        ({"minors": frozenset({7})}, "does not hold the GPU any more that it held"),
    ],
)
def test_one_that_is_not_as_it_was_told_of_gets_no_signal(
    orphans: Orphans, change: dict[str, object], why: str
) -> None:
    wanted = orphans.wanted(orphans.start())
    assert why in refusal_of(orphans, replace(wanted, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["nvidia-cuda-mps-server", "nvidia-persistenced", "Xorg", "nv-hostengine", "slurmd"])
def test_a_daemon_that_holds_gpus_by_right_is_never_ended_whoever_runs_it(orphans: Orphans, name: str) -> None:
    pid = orphans.start(NAME_AND_SAY + f"name({name!r}); say(); time.sleep(600)")
    assert "a daemon that holds GPUs by right" in refusal_of(orphans, orphans.wanted(pid, name[:15]))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a process of root's")
def test_a_process_of_root_is_never_ended(orphans: Orphans) -> None:
    pid = orphans.start(uid=0)
    assert "it runs as uid 0" in refusal_of(orphans, orphans.wanted(pid))


def test_we_never_end_ourselves(orphans: Orphans) -> None:
    mine = replace(orphans.wanted(os.getpid()), uid=UID, comm=read_stat(os.getpid()).comm)
    with pytest.raises(NotEndedError):
        terminate.check(mine)


@pytest.mark.parametrize(
    ("cgroup", "why"),
    [
        ("0::/system.slice/nvidia-dcgm.service\n", "a service of the system"),
        ("0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n", "the control group of job 12"),
        ("4:devices:/slurm/uid_4242/job_12/step_0\n0::/\n", "the control group of job 12"),
    ],
)
def test_a_place_in_the_system_or_in_another_job_protects(orphans: Orphans, cgroup: str, why: str) -> None:
    with pytest.raises(NotEndedError, match=why):
        terminate._check_place(orphans.wanted(os.getpid()), cgroup)


ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a slurmstepd is root's")
STEPD = NAME_AND_SAY + "name('slurmstepd'); say(); time.sleep(600)"


@ROOT
def test_while_its_job_has_a_slurmstepd_here_a_process_is_no_orphan(orphans: Orphans) -> None:
    wanted = orphans.wanted(orphans.start())
    orphans.stepd(title=f"slurmstepd: [{JOB}.0]")
    assert f"job {JOB} has a slurmstepd here" in refusal_of(orphans, wanted)


@ROOT
def test_a_process_below_a_slurmstepd_is_part_of_a_job_whatever_its_environment_says(
    orphans: Orphans,
) -> None:
    program = NAME_AND_SAY + (
        "name('slurmstepd')\n"
        f"if os.fork() == 0:\n    os.setresuid({UID}, {UID}, {UID}); name('train')\n"
        "    os.write(1, f'x{os.getpid()}.'.encode()); time.sleep(600)\n"
        "time.sleep(600)"
    )
    above = orphans.stepd(title="slurmstepd: [987654300.0]", program=program, holds=True)
    process = orphans.started[0]
    assert process.stdout is not None
    digits = b""
    while not digits.endswith(b"."):
        digits += process.stdout.read(1)
    below = int(digits[:-1])
    try:
        wanted = orphans.wanted(below)
        assert "a slurmstepd is above it" in end(wanted, "kill").refusal
        # ... and its user's other processes, of whom only an environment says where they came from, may be in
        # use by it.
        other = orphans.wanted(orphans.start())
        assert "its user has job 987654300 here now" in refusal_of(orphans, other)
        # What stands in the control group of a job that is over is of that job.
        with pytest.raises(NotEndedError, match="its user has job"):
            terminate._check_place(other, "0::/user.slice/user-64985.slice\n")
        terminate._check_place(other, f"0::/system.slice/slurmstepd.scope/job_{JOB}/step_0/user/task_0\n")
    finally:
        os.kill(below, 9)
    assert orphans.lives(above)


@ROOT
def test_a_slurmstepd_that_does_not_say_its_job_makes_everybody_wait_and_the_keeper_of_the_scope_does_not(
    orphans: Orphans,
) -> None:
    wanted = orphans.wanted(orphans.start())
    orphans.stepd(title="/usr/sbin/slurmstepd")
    assert "does not say for which job it is" in refusal_of(orphans, wanted)
    orphans.started[1].kill()
    orphans.started[1].wait()
    orphans.stepd("infinity", title="/usr/sbin/slurmstepd")
    assert end(wanted, "term") == ProcessEnd(gone=True, sent=True)


@ROOT
@pytest.mark.parametrize("uid", [UID, 0])
@pytest.mark.parametrize("title", [f"slurmstepd: [{JOB}.0]", "slurmstepd: [987654300.0]", "of no job"])
def test_who_only_calls_himself_slurmstepd_keeps_no_orphan_from_being_ended(
    orphans: Orphans, uid: int, title: str
) -> None:
    """The user's own, and a program of root's that he has started under that name."""
    wanted = orphans.wanted(orphans.start())
    orphans.start(STEPD, title=title, holds=False, uid=uid)
    assert end(wanted, "term") == ProcessEnd(gone=True, sent=True)


# ------------------------------------------------------------------------------------------------ what may be asked

ASKED = {
    "pid": 4711, "start_ticks": 9, "uid": 64985, "comm": "train", "boot_id": "b", "job_id": "77", "minors": [0], "how": "term",
}  # fmt: skip


def test_a_request_names_one_process_of_one_user_and_job() -> None:
    assert msgspec.convert(ASKED, SignalProcess).uid == 64985


@pytest.mark.parametrize(
    "change",
    [
        {"how": "stop"}, {"how": 9}, {"pid": 0}, {"pid": -1}, {"job_id": ""}, {"job_id": "77\n"}, {"job_id": "*"},
        {"minors": []}, {"devices": "/etc/passwd"}, {"start_ticks": None},
    ],
)  # fmt: skip
def test_what_is_no_such_request_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(ASKED | change, SignalProcess)


@pytest.mark.parametrize("uid", [0, 99, MIN_UID - 1])
def test_no_process_of_roots_or_the_systems_is_ended_and_no_child_is_asked(uid: int) -> None:
    children, logs = FakeChildren(), SimpleNamespace(become_owner=True, watch={})
    fine = SimpleNamespace(objection=lambda *asked: None)
    jobs = SimpleNamespace(running=lambda now: frozenset())
    here = Commands(context_of(children, logs, orphan_gpu_processes=fine, jobs=jobs))
    here.accept((EndProcess(id="e", **{**ASKED, "uid": uid, "boot_id": "now", "minors": (0,)}),), 0.0)  # type: ignore[arg-type]
    (result,) = here.take_results()
    assert not result.ok and "is not an ordinary user" in (result.error or "") and children.asked == []
