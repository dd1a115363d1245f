"""Everything hangs at once, dies, runs out, and the agent reports on: the real command, real filesystems, a real memory lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.demo.cluster import set_frozen
from deploy.standin_nvml.standin import Scenario, build
from tests.agent_tree import AgentProcess, Receiver, alone, descriptors_and_threads, tree_of, until
from tests.memory_lock import MemoryLockHolder
from watchdog.model import Report

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root: loop devices, fsfreeze, other users' processes, namespaces"
)

INTERVAL_S = 1.0
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
    receiver = Receiver()
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
            more = f", log_patterns: ['{net}/{{job_id}}.log']"
            agent = AgentProcess(tmp_path, receiver.url, environment=scenario.environment, more=more)
            until(lambda: receiver.reports, 20, "a first report")
            identity = f"identify:{holder.pid}"
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
            files = f"files:{net}:0"
            until(lambda: {identity, "nvml", files} <= hung(receiver.last()), 20, "all of them hang")
            time.sleep(5)
            tree = tree_of(agent.pid)
            before, children = descriptors_and_threads(tree), set(tree)
            time.sleep(HELD_S - 5)

            assert receiver.longest_gap_s(began) <= 2 * INTERVAL_S
            report = receiver.last()
            assert descriptors_and_threads(tree_of(agent.pid)) == before
            stuck = {pid for pid in tree_of(agent.pid) if is_stuck(pid)}
            assert stuck <= children, "a second child was sent after the first"
            kinds = Counter(probe.probe.split(":")[0] for probe in report.hung_probes)
            assert kinds["identify"] == kinds["nvml"] == kinds["files"] == 1
            # The mount prober is a resource of its own: it asks another question of the same filesystem.
            assert hung(report) - {identity, "nvml", files} <= {f"probe:{net}"}
            assert all(
                probe.seconds > HELD_S - 10
                for probe in report.hung_probes
                if probe.probe in (identity, "nvml", files)
            )
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
            until(lambda: any(event.step for event in receiver.last().events), 20, "the log goes on")
            until(lambda: any(each.pid == holder.pid and each.job_id == HIDDEN_JOB for each in receiver.last().processes),
                  20, "the process whose memory was locked is known")  # fmt: skip
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
    """Whether this process is in a call that has not come back: in D, or in the stand-in's endless sleep."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"
    except OSError:
        return False
