"""Everything hangs at once, dies, runs out, and the agent reports on: the real command, real filesystems, a
real memory lock."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from slurm_watchdog.model.report import Report
from tests.agent_tree import (
    ANOTHER_USER,
    AgentProcess,
    Receiver,
    alone,
    descriptors_and_threads,
    settles_at,
    tree_of,
    until,
    watched,
)
from tests.memory_lock import MemoryLockHolder
from tests.rig.filesystems import set_frozen
from tests.rig.rights import Place, bind_parts, furnish, parts_of_a_place
from tests.rig.standin_nvml.standin import Scenario, build

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root: loop devices, fsfreeze, other users' processes, namespaces"
)

INTERVAL_S = 1.0
APART_S = 2 * INTERVAL_S
"""No report comes later after another one: an agent that waited for a child that hangs would be later."""
HELD_S = 45.0
JOB, HIDDEN_JOB = "990001", "990002"
WRITER = (
    "import os, sys, time\n"
    "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
    "step = 0\n"
    "while True:\n"
    "    step += 1\n"
    "    os.write(fd, b'iteration %8d/ 100000 | lm loss: 2.0\\n' % step)\n"
    "    time.sleep(0.2)\n"
)


def as_rank(job: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}


@pytest.fixture
def filesystems(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two of their own, mounted; both answer again when the test is over."""
    points = []
    for name in ("log", "memory"):
        image, point = tmp_path / f"{name}.ext4", Path(tempfile.mkdtemp(prefix=f"slurm-watchdog-{name}-"))
        with open(image, "wb") as file:
            file.truncate(32 * 1024**2)
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, timeout=60)
        subprocess.run(["mount", "-o", "loop", str(image), str(point)], check=True, timeout=60)
        points.append(point)
    yield points[0], points[1]
    for point in points:
        set_frozen(point, False)
        for _ in range(100):
            if subprocess.run(["umount", str(point)], capture_output=True, timeout=60).returncode == 0:
                break
            time.sleep(0.1)
        point.rmdir()


@pytest.fixture
def silent_server(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A network filesystem, so to speak: its mount point, and the process to stop when its server is to be silent."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("needs /dev/fuse")
    point = tmp_path / "net"
    point.mkdir()
    command = [sys.executable, str(Path(__file__).with_name("fuse_server.py")), str(point)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline()
    yield point, server.pid
    server.send_signal(signal.SIGCONT)
    subprocess.run(["umount", "-l", str(point)], check=True, timeout=20)
    server.kill()
    server.wait(20)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver(JOB, HIDDEN_JOB)
    yield receiver
    receiver.close()


@pytest.fixture
def scenario(tmp_path: Path) -> Iterator[Scenario]:
    (tmp_path / "lib").mkdir()
    build(tmp_path / "lib")
    scenario = Scenario(tmp_path / "scenario")
    scenario.environment["LD_LIBRARY_PATH"] = str(tmp_path / "lib")
    yield scenario
    scenario.rule()  # whatever hangs in it, hangs no longer


def hung(report: Report) -> set[str]:
    return {probe.probe for probe in report.hung_probes}


@alone
def test_what_hangs_at_once_is_told_as_what_it_is_and_the_agent_reports_on(
    filesystems: tuple[Path, Path],
    silent_server: tuple[Path, int],
    receiver: Receiver,
    scenario: Scenario,
    tmp_path: Path,
) -> None:
    frozen, memory = filesystems
    net, server = silent_server
    log = frozen / "train.log"
    rank = subprocess.Popen([sys.executable, "-c", WRITER, str(log)], env={**os.environ, **as_rank(JOB)})
    with MemoryLockHolder(memory / "mapped", env=as_rank(HIDDEN_JOB)) as holder:
        set_frozen(memory, True)
        agent = None
        try:
            holder.take()
            more = f", log_patterns: ['{net}/{{job_id}}.log'], mount_probe_interval: 2s"
            agent = AgentProcess(tmp_path, receiver, environment=scenario.environment, more=more)
            until(lambda: receiver.reports, 20, "a first report")
            identity = f"look:0:{holder.pid}"
            until(lambda: identity in hung(receiver.last()), 30, f"{identity} hangs")
            until(
                lambda: any(event.step for _, each in receiver.reports for event in each.events),
                20,
                "a step of the log",
            )
            assert [gpu.error for gpu in receiver.last().gpus] == [None, None]
            began = time.monotonic()
            set_frozen(frozen, True)
            scenario.rule("hang nvmlDeviceGetUtilizationRates")
            os.kill(server, signal.SIGSTOP)
            files = f"files:{net}:self"
            everything = {identity, "nvml", files, f"probe:{net}"}
            until(lambda: everything <= hung(receiver.last()), 20, "all of them hang")
            time.sleep(5)
            tree = tree_of(agent.pid)
            before, children = descriptors_and_threads(tree), set(tree)
            time.sleep(HELD_S - 5)

            assert receiver.longest_gap_s(began) <= APART_S
            report = receiver.last()
            settles_at(agent.pid, before)
            stuck = {pid for pid in tree_of(agent.pid) if is_stuck(pid)}
            assert stuck <= children, "a second child was sent after the first"
            kinds = Counter(probe.probe.split(":")[0] for probe in report.hung_probes)
            assert kinds["look"] == kinds["nvml"] == kinds["files"] == 1
            # The mount prober is a resource of its own: it asks another question of the same filesystem.
            assert hung(report) - {identity, "nvml", files} <= {f"probe:{net}"}
            waited_s = {each.probe: each.seconds for each in report.hung_probes}
            assert min(waited_s[name] for name in (identity, "nvml", files)) > HELD_S - 10, waited_s
            (row,) = [each for each in report.logs if each.path == f"{net}/{JOB}.log"]
            assert "has not answered for" in (row.error or "")
            assert [gpu.uuid for gpu in report.gpus] == ["GPU-aaaa", "GPU-bbbb"]
            assert all("NVML has not answered for" in (gpu.error or "") for gpu in report.gpus)
            (process,) = [each for each in report.processes if each.pid == rank.pid]
            assert process.blocked is not None
            assert (process.blocked.mount, process.blocked.path) == (str(frozen), str(log))
            assert process.blocked.seconds > HELD_S - 10
            assert report.problems == ()
            assert agent.process.poll() is None

            scenario.rule()
            os.kill(server, signal.SIGCONT)
            set_frozen(frozen, False)
            set_frozen(memory, False)
            until(lambda: hung(receiver.last()) == set(), 20, "nothing hangs any more")
            until(lambda: [gpu.error for gpu in receiver.last().gpus] == [None, None], 20, "the GPUs answer")
            until(lambda: any(event.step for event in receiver.last().events), 20, "the log to continue")
            until(
                lambda: any(each.pid == holder.pid and each.job_id == HIDDEN_JOB for each in receiver.last().processes),
                20,
                "the process whose memory was locked is known",
            )
            assert all(each.blocked is None for each in receiver.last().processes if each.pid == rank.pid)
            assert agent.end() == 0
        finally:
            os.kill(server, signal.SIGCONT)
            set_frozen(frozen, False)
            set_frozen(memory, False)
            scenario.rule()
            rank.kill()
            rank.wait(20)
            if agent is not None:
                agent.close()


def is_stuck(pid: int) -> bool:
    """Whether this process is in a call that has not returned: in D, or in the stand-in's endless sleep."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"
    except OSError:
        return False


def ranks(report: Report) -> set[int]:
    return {process.pid for process in report.processes if process.job_id == JOB}


def workers_of(agent: AgentProcess) -> list[int]:
    """The children that do the work; the courier, the network of an agent without systemd, is none of them."""
    return [pid for pid in tree_of(agent.pid)[1:] if alive(pid) and not is_courier(pid)]


def is_courier(pid: int) -> bool:
    try:
        return b"courier" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like rank 0 of a job and writes its log."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "train.log")], env={**os.environ, **as_rank(JOB)}
    )
    yield process
    process.kill()
    process.wait(20)


@pytest.fixture
def agent(
    tmp_path: Path, receiver: Receiver, scenario: Scenario, rank: subprocess.Popen[bytes]
) -> Iterator[AgentProcess]:
    """An agent that watches `rank`, has followed its log and read the GPUs."""
    agent = AgentProcess(tmp_path, receiver, interval_s=0.5, environment=scenario.environment)
    until(lambda: receiver.reports, 20, "a first report")
    until(lambda: sees_everything(receiver, rank.pid), 20, "the rank, a step of its log, and the GPUs")
    yield agent
    agent.close()


def sees_everything(receiver: Receiver, pid: int) -> bool:
    report = receiver.last()
    gpus = [gpu.error for gpu in report.gpus] == [None, None]
    return pid in ranks(report) and any(event.step for event in report.events) and gpus and not report.problems


@alone
def test_children_that_are_killed_or_stopped_are_replaced_and_accuse_nothing(
    agent: AgentProcess, receiver: Receiver, rank: subprocess.Popen[bytes]
) -> None:
    began = time.monotonic()
    for _ in range(3):
        for pid in workers_of(agent):
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.kill(pid, signal.SIGKILL)
        time.sleep(1.2)
        until(lambda: sees_everything(receiver, rank.pid), 60, "all is seen again")
    stopped = workers_of(agent)
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    until(lambda: "its child was stopped" in agent.log(), 60, "it is said")
    until(
        lambda: hung(receiver.last()) == set() and sees_everything(receiver, rank.pid),
        60,
        "all is seen again",
    )
    assert [row for _, report in receiver.reports for row in report.mounts if not row.responding] == []
    assert receiver.longest_gap_s(began) <= APART_S
    assert agent.end() == 0


@alone
def test_an_agent_that_was_stopped_itself_accuses_nobody(agent: AgentProcess, receiver: Receiver) -> None:
    tree = tree_of(agent.pid)
    for pid in tree:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(9)  # longer than the deadline of its children and what a loop may be late
    began = time.monotonic()
    for pid in tree:
        os.kill(pid, signal.SIGCONT)
    time.sleep(2.5)
    reports = [report for at, report in receiver.reports if at >= began]
    assert reports
    assert all(not report.hung_probes for report in reports)


@alone
def test_an_agent_without_descriptors_says_that_it_is_blind_and_never_that_the_ranks_are_gone(
    agent: AgentProcess, receiver: Receiver, rank: subprocess.Popen[bytes]
) -> None:
    before = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)
    began = time.monotonic()
    in_use = max(int(fd) for fd in os.listdir(f"/proc/{agent.pid}/fd"))
    for limit in (in_use + 1, 12, 3, in_use + 2, in_use + 3):
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
        time.sleep(1.5)
        assert agent.process.poll() is None
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, before)
    until(lambda: sees_everything(receiver, rank.pid), 15, "all is seen again")
    meanwhile = [report for at, report in receiver.reports if at >= began]
    assert [report for report in meanwhile if rank.pid not in ranks(report)] == []
    assert "Too many open files" in agent.log() or any(
        "EMFILE" in each for report in meanwhile for each in report.problems
    )


NOBODY = ("setpriv", "--reuid", "64998", "--regid", "64998", "--clear-groups")


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that every user can write into."""
    place = Path(tempfile.mkdtemp(prefix="slurm-watchdog-open-"))
    place.chmod(0o777)
    yield place
    shutil.rmtree(place)


@pytest.fixture
def place() -> Iterator[Place]:
    """Where another user may run our code."""
    directory = Path(tempfile.mkdtemp(prefix="slurm-watchdog-place-"))
    directory.chmod(0o755)
    place = furnish(directory)
    bind_parts(directory)
    yield place
    for name in parts_of_a_place():
        subprocess.run(["umount", "--lazy", str(directory / name)], check=True, timeout=20)
        (directory / name).rmdir()
    shutil.rmtree(directory)


@alone
def test_where_no_child_can_be_forked_the_report_says_so(
    open_place: Path, place: Place, receiver: Receiver, scenario: Scenario
) -> None:
    agent = AgentProcess(open_place, receiver, interval_s=0.5, environment=scenario.environment, place=place)
    try:
        until(lambda: receiver.reports and workers_of(agent), 20, "a report, and children")
        me = agent.pid
        limit = [*NOBODY, "prlimit", "--pid", str(me)]
        subprocess.run([*limit, "--nproc=1:"], check=True, timeout=20)
        for pid in workers_of(agent):
            os.kill(pid, signal.SIGKILL)
        stranger = subprocess.Popen([*NOBODY, "sleep", "600"])  # somebody new, who is to be identified
        until(
            lambda: any("none can be started: EAGAIN" in each for each in receiver.last().problems),
            15,
            "the problem",
        )
        began = time.monotonic()
        time.sleep(4)
        assert receiver.longest_gap_s(began) <= APART_S
        subprocess.run([*limit, "--nproc=1000:"], check=True, timeout=20)
        another = subprocess.Popen([*NOBODY, "sleep", "600"])
        until(lambda: not any("none can be started" in each for each in receiver.last().problems), 30, "children again")
        for each in (stranger, another):
            each.kill()
            each.wait(20)
    finally:
        agent.close()


@alone
def test_a_full_disk_and_a_state_directory_that_is_missing_stop_nothing(
    tmp_path: Path, receiver: Receiver, rank: subprocess.Popen[bytes], scenario: Scenario
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(full)], check=True, timeout=20)
    ballast = os.open(full / "ballast", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="No space left"):
        while True:
            os.write(ballast, b"x" * 4096)
    os.close(ballast)
    place = tmp_path / "agent"
    for number, state in enumerate((full, full / "missing" / "too")):
        place.mkdir(exist_ok=True)
        agent = AgentProcess(place, receiver, interval_s=0.5, environment=scenario.environment, state_directory=state)
        count = len(receiver.reports)
        try:
            until(lambda count=count: len(receiver.reports) > count, 20, f"a report, {number}")
            until(lambda: rank.pid in ranks(receiver.last()), 20, "the rank")
            began = time.monotonic()
            time.sleep(3)
            assert receiver.longest_gap_s(began) <= APART_S
            assert agent.end() == 0
        finally:
            agent.close()
    subprocess.run(["umount", str(full)], check=True, timeout=20)


@alone
def test_where_proc_hides_other_users_processes_the_agent_sees_its_own(
    open_place: Path, place: Place, receiver: Receiver, rank: subprocess.Popen[bytes], scenario: Scenario
) -> None:
    receiver.reply = replace(receiver.reply, watch=(watched(JOB, ANOTHER_USER),))
    mine = subprocess.Popen(["sleep", "600"], env={**os.environ, **as_rank(JOB)}, user=ANOTHER_USER, group=ANOTHER_USER)
    subprocess.run(["mount", "-o", "remount,hidepid=2", "/proc"], check=True, timeout=20)
    agent = AgentProcess(open_place, receiver, interval_s=0.5, environment=scenario.environment, place=place)
    try:
        until(lambda: receiver.reports and mine.pid in ranks(receiver.last()), 20, "the process of its user")
        began = time.monotonic()
        time.sleep(3)
        assert rank.pid not in ranks(receiver.last())
        assert receiver.longest_gap_s(began) <= APART_S
        assert agent.end() == 0
    finally:
        subprocess.run(["mount", "-o", "remount,hidepid=0", "/proc"], check=True, timeout=20)
        agent.close()
        mine.kill()
        mine.wait(20)


MANY = r"""
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>
int main(int argc, char **argv) {
    int count = atoi(argv[1]), made = 0;
    for (; made < count; made++) {
        pid_t pid = fork();
        if (pid < 0) break;
        if (pid == 0) { prctl(PR_SET_PDEATHSIG, 9); pause(); _exit(0); }
    }
    printf("%d\n", made);
    fflush(stdout);
    pause();
    return 0;
}
"""


@pytest.mark.thorough
@pytest.mark.exclusive
@alone
def test_ten_thousand_processes_on_a_node_make_no_report_late(
    tmp_path: Path, agent: AgentProcess, receiver: Receiver, rank: subprocess.Popen[bytes]
) -> None:
    (tmp_path / "many.c").write_text(MANY)
    subprocess.run(
        ["cc", "-static", "-O1", "-o", str(tmp_path / "many"), str(tmp_path / "many.c")],
        check=True,
        timeout=60,
    )
    many = subprocess.Popen([str(tmp_path / "many"), "10000"], stdout=subprocess.PIPE)
    try:
        assert many.stdout is not None
        if int(many.stdout.readline()) < 10_000:
            pytest.skip("this machine allows fewer processes")
        began = time.monotonic()
        time.sleep(15)
        assert receiver.longest_gap_s(began) <= APART_S
        assert rank.pid in ranks(receiver.last())
        # So many new ones are identified in turn, 256 in a tick, and the report says how many wait.
        until(lambda: receiver.last().problems == (), 90, "all are identified")
        assert receiver.longest_gap_s(began) <= APART_S
    finally:
        many.kill()
        many.wait(60)
    until(lambda: sees_everything(receiver, rank.pid), 20, "all is as before")
    assert agent.end() == 0
