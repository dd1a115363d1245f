"""One user is in everybody's way on a node: how soon other users' jobs there are judged meanwhile, and what
that costs whom.

Two jobs of another user, the agent as its unit starts it, and a controller as on a management
node. One job is looked at before the hostile user's job begins (`hostile_user.py`), the other one during it.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lab.bench import fleet_slurm
from lab.bench.controller_service import Service
from lab.bench.figures import Figures, quantile, say
from lab.bench.hostile_user import HostileUser, Size, numbers_for, room_for
from lab.bench.load import HERE, build
from lab.bench.peers import free_port
from lab.bench.process_tree import Target, started
from lab.bench.space import Space, opened
from tests import agent_place
from tests.munged import munged
from tests.rig.rights import AGENT_UID, USER, USER_UID, agent_command, ensure_user

HOSTILE, HOSTILE_UID = "swd-hostile", 60984
NODE, QUIET_JOB, LOUD_JOB, HOSTILE_JOB = "node1", "11", "12", "13"
RANKS, STEP_S = 4, 1.0
MIB = 1 << 20
MAX_RATIO = 2.0
MAX_AGENT_CPU_PERCENT = 5.0
AGENT_MIB, CONTROLLER_MIB = 640, 4096
"""What is promised of a node with such a user; the last line: MemoryMax of the units."""
LOOK_S = 0.25
START_S = 90.0
IDLE = 60


@dataclass(frozen=True)
class Options:
    size: Size = field(default_factory=Size)
    interval_s: float = 5.0
    seconds: float = 60.0
    """Of the look at each of the two jobs."""


@dataclass
class Node:
    """What is measured, and where it is."""

    directory: Path
    space: Space
    service: Service
    agent: Target
    ranks: dict[str, list[int]]
    """Job -> its ranks, as the space's own /proc knows them."""

    def ask(self, path: str) -> Any:
        """An answer of the controller's local interface, as root gets it. Raises OSError."""
        connection = http.client.HTTPConnection("controller", timeout=20)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(20)
        connection.sock.connect(str(self.directory / "controller.sock"))
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def step(self, job: str) -> int:
        """The newest step of a job that the controller knows; 0 before there is one."""
        return next((each["step"] or 0 for each in self.ask("/v1/status")["jobs"] if each["job_id"] == job), 0)


@dataclass
class Ages:
    """How old the controller's knowledge of a job is, looked at all the time."""

    node: Node
    job: str
    ages_s: list[float] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Until stopped. A step's time is that of its line in the log."""
        log, written = self.node.directory / "logs" / f"{self.job}.out", dict[int, float]()
        while not self._stop.wait(LOOK_S):
            lines = log.read_text(errors="replace").splitlines()[-3:]
            for line in lines:
                if "iteration" in line:
                    written.setdefault(int(line.split("iteration")[1].split("/")[0]), time.monotonic())
            known = self.node.step(self.job)
            if known in written:
                self.ages_s.append(time.monotonic() - written[known])

    @contextmanager
    def looking(self) -> Iterator[None]:
        thread = threading.Thread(target=self.run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(30)


@dataclass(frozen=True)
class Look:
    """What one of the jobs has had of its watchdog, and what that cost meanwhile."""

    age_s: float
    """So old the knowledge of its newest step was at most, one look in twenty aside."""
    finding_s: float
    """From the moment when a rank was stopped to the incident."""
    agent_percent: float
    controller_percent: float


def size_of(processes: int) -> Size:
    """Everything in proportion to the processes, of which the whole has 55,000."""
    whole = Size()
    share = min(1.0, processes / whole.processes)
    return Size(
        processes,
        max(64, int(whole.threads * share)),
        max(4, int(whole.mounts * share)),
        whole.log_bytes_per_s * max(0.1, share),
    )


def run(figures: Figures, options: Options) -> None:
    """All figures of one run. Needs root: processes of several users."""
    if os.geteuid() != 0:
        say("hostile-load needs root: processes of several users")
        return
    wanted = room_for(options.size.processes)
    with numbers_for(wanted) as processes, ExitStack() as stack:
        size = Size(processes, options.size.threads, options.size.mounts, options.size.log_bytes_per_s)
        node = stack.enter_context(_node(options.interval_s))
        _settle(node, options.interval_s)
        usual = _look(node, QUIET_JOB, options.seconds)
        hostile = HostileUser(
            node.space,
            node.directory,
            node.directory / "bin" / "crowd",
            HOSTILE_UID,
            HOSTILE_JOB,
            size,
            node.directory / "logs" / f"{HOSTILE_JOB}.out",
        )
        stack.callback(hostile.close)
        hostile.start()
        say(f"{hostile.count()} processes of uid {HOSTILE_UID} are there; settling")
        time.sleep(6 * options.interval_s)
        loaded = _look(node, LOUD_JOB, options.seconds)
        figures.add("hostile.processes", hostile.count(), "1")
        _report(figures, node, usual, loaded)


def _look(node: Node, job: str, seconds: float) -> Look:
    ages = Ages(node, job)
    before = _cpu_s(node)
    began = time.monotonic()
    with ages.looking():
        time.sleep(seconds)
    spent = [100 * (now - then) / (time.monotonic() - began) for now, then in zip(_cpu_s(node), before, strict=True)]
    return Look(quantile(ages.ages_s, 0.95) if ages.ages_s else seconds, _time_to_finding_s(node, job), *spent)


def _cpu_s(node: Node) -> tuple[float, float]:
    return node.agent.cpu_s(), node.service.cpu_s()


def _time_to_finding_s(node: Node, job: str) -> float:
    """A rank of the job is stopped; seconds until there is an incident about it, START_S if there is none by then."""
    pid = node.ranks[job][RANKS - 1]
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        while time.monotonic() - began < START_S:
            told = node.ask(f"/v1/incidents?job={job}")
            if any(each["kind"] == "rank_stopped" and each["state"] == "firing" for each in told):
                return time.monotonic() - began
            time.sleep(LOOK_S)
        return START_S
    finally:
        os.kill(pid, signal.SIGCONT)


def _report(figures: Figures, node: Node, usual: Look, loaded: Look) -> None:
    for name in ("age_s", "finding_s"):
        before, during = getattr(usual, name), getattr(loaded, name)
        figures.add(f"hostile.{name.removesuffix('_s')}_usual_s", before, "s")
        figures.add(f"hostile.{name.removesuffix('_s')}_loaded_s", during, "s")
        figures.add(f"hostile.{name.removesuffix('_s')}_ratio", during / before, "1", at_most=MAX_RATIO)
    for name, bound in (("agent", MAX_AGENT_CPU_PERCENT), ("controller", None)):
        figures.add(f"hostile.{name}_cpu_usual_percent_of_core", getattr(usual, f"{name}_percent"), "%")
        figures.add(f"hostile.{name}_cpu_percent_of_core", getattr(loaded, f"{name}_percent"), "%", at_most=bound)
    usage = node.agent.usage()
    figures.add("hostile.agent_pss_mib", usage.pss_bytes / MIB, "MiB", at_most=AGENT_MIB)
    figures.add("hostile.agent_processes", usage.processes, "1")
    figures.add("hostile.controller_rss_mib", node.service.rss_bytes() / MIB, "MiB", at_most=CONTROLLER_MIB)
    said = node.ask("/v1/status")["left_out"]
    named = [each for each in said if each["uid"] == HOSTILE_UID and each["job_id"] == HOSTILE_JOB]
    figures.add("hostile.culprit_named", bool(named), "1", at_least=1)
    series = f'slurm_watchdog_processes_left_out{{job_id="{HOSTILE_JOB}",uid="{HOSTILE_UID}"}}'
    metrics = node.service.get("/metrics", 20.0).decode()
    figures.add("hostile.culprit_in_metrics", series in metrics, "1", at_least=1)
    for name in ("agent", "controller"):
        for line in (node.directory / f"{name}.log").read_text(errors="replace").splitlines()[-6:]:
            say(f"{name}: {line[:300]}")
    figures.add("load_average", os.getloadavg()[0], "1")
    for each in said:
        say(f"status says: {each}")


# -- the node ------------------------------------------------------------------------------------------------------


@contextmanager
def _node(interval_s: float) -> Iterator[Node]:
    """Everything but the hostile user."""
    ensure_user(USER, USER_UID)
    ensure_user(HOSTILE, HOSTILE_UID)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-watchdog-bench-")))
        directory.chmod(0o755)
        for name in ("bin", "logs", "state", "agent-state"):
            (directory / name).mkdir()
        build(HERE / "load.c", directory / "bin" / "python3")
        build(HERE / "crowd.c", directory / "bin" / "crowd")
        space = stack.enter_context(opened([str(directory / "bin" / "python3"), "idle", str(IDLE)]))
        munge = stack.enter_context(munged())
        port = free_port()
        security = {**munge.security(), "agent_user": str(AGENT_UID)}
        config = directory / "config.yaml"
        config.write_text(
            f"mode: observe\ncluster_name: bench\nsecurity: {json.dumps(security)}\n"
            f"controller:\n  listen: 127.0.0.1:{port}\n  socket: {directory}/controller.sock\n"
            f"  state_directory: {directory}/state\n  warm_up: 1s\n"
            f"slurm:\n  bin_directory: {_slurm(directory)}\n"
            f"agent:\n  node_name: {NODE}\n  interval: {round(interval_s * 1000)}ms\n"
            f"  controller_url: http://127.0.0.1:{port}\n  metrics_directory: ''\n  state_directory: {directory}/agent-state\n"
        )
        config.chmod(0o644)
        ranks = {
            job: [_start_rank(stack, space, directory, job, rank) for rank in range(RANKS)]
            for job in (QUIET_JOB, LOUD_JOB)
        }
        service = Service(config, port, directory, -15)
        stack.callback(service.kill)
        service.start()
        agent = _start_agent(stack, space, directory, config)
        yield Node(directory, space, service, agent, ranks)


def _start_agent(stack: ExitStack, space: Space, directory: Path, config: Path) -> Target:
    place = stack.enter_context(agent_place.place(partial(_run_in, space)))
    environment = {"PATH": os.environ["PATH"], "HOME": "/", **place.environment}
    os.chown(directory / "agent-state", AGENT_UID, -1)
    command = agent_command(place, "--config", str(config))
    return stack.enter_context(started("agent", command, directory / "agent.log", environment, space))


def _run_in(space: Space, *words: object) -> None:
    subprocess.run(space.words([str(word) for word in words]), check=True)


def _start_rank(stack: ExitStack, space: Space, directory: Path, job: str, rank: int) -> int:
    """Its number, as this process knows it."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "SLURM_JOB_ID": job,
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(RANKS),
    }
    words = [str(directory / "bin" / "python3"), "rank", str(rank), "8", "16", str(STEP_S)]
    with open(directory / "logs" / (f"{job}.out" if rank == 0 else f"{job}.{rank}.out"), "ab") as out:
        os.fchown(out.fileno(), USER_UID, -1)
        process = subprocess.Popen(
            space.words(words, USER_UID),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    stack.callback(process.wait, 30)
    stack.callback(process.kill)
    return space.find(process.pid)


def _slurm(directory: Path) -> Path:
    """A Slurm that has these jobs on this node."""
    users = {QUIET_JOB: (USER, USER_UID), LOUD_JOB: (USER, USER_UID), HOSTILE_JOB: (HOSTILE, HOSTILE_UID)}
    jobs = [
        fleet_slurm.job_row(
            job, [NODE], uid=uid, user=user, stdout=f"{directory}/logs/{job}.out", workdir=str(directory)
        )
        for job, (user, uid) in users.items()
    ]
    return fleet_slurm.write(directory, jobs, [fleet_slurm.node_row(NODE, "127.0.0.1")])


def _settle(node: Node, interval_s: float) -> None:
    """Until the controller knows a step of both jobs. Raises TimeoutError."""
    end = time.monotonic() + START_S
    while not all(node.step(job) > 1 for job in (QUIET_JOB, LOUD_JOB)):
        if time.monotonic() > end:
            logs = "".join(
                (node.directory / f"{name}.log").read_text(errors="replace")[-2000:] for name in ("agent", "controller")
            )
            raise TimeoutError(f"the controller knows no step of the jobs: {logs}")
        time.sleep(0.2)
    time.sleep(2 * interval_s)
