"""The stage: a real cluster with a real watchdog, and one training after the other on it."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.rig.cluster import Cluster, as_user
from tests.rig.commands import ClusterError, wait_until
from tests.rig.stack import Watchdog

TRAINER = Path(__file__).with_name("ddp.py")
RANKS_PER_NODE = 2
FIRST_PORT = 29000
START_S = 300.0
"""For a training to import torch and make its first steps, on a machine with other work."""
STEP = re.compile(r"^(?:\d+: )?step (\d+)\b.*step_time: ([\d.]+) s", re.MULTILINE)
"""With what `srun --label` puts before it."""


def python_with_torch() -> str | None:
    """The interpreter that has torch: LIVE_PYTHON, or the environment that `make live` made; None where there
    is none."""
    checkout = TRAINER.parents[2]
    for path in (os.environ.get("LIVE_PYTHON", ""), checkout / ".venv-live" / "bin" / "python"):
        if path and os.access(path, os.X_OK):
            return str(path)
    return None


def why_not_for_jobs(python: str) -> str | None:
    """Why the ordinary user as whom jobs run cannot import torch with this interpreter, a sentence; None if it can."""
    done = subprocess.run([*as_user("nobody"), python, "-c", "import torch"], capture_output=True, text=True, cwd="/")
    if done.returncode == 0:
        return None
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return f"jobs run as an ordinary user, who cannot import torch with {python}: {said}"


ENVIRONMENT = "GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1"


@dataclass(frozen=True)
class Room:
    """What a training has for itself."""

    name: str
    place: Path
    faults: Path
    output: Path
    port: int

    def words(self, trainer: Path) -> str:
        """The trainer, and where it finds this."""
        return f"{trainer} --place {self.place} --faults {self.faults}"


class Over(Exception):
    """Somebody has ended the whole run."""


@dataclass
class Job:
    """A training that runs. Times are dates, as the trainer's own notes are."""

    stage: Stage
    job_id: str
    place: Path
    faults: Path
    output: Path
    nodes: tuple[str, ...]

    def text(self) -> str:
        try:
            return self.output.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def steps(self) -> list[tuple[int, float]]:
        """(step, seconds) of every step that was logged."""
        return [(int(number), float(seconds)) for number, seconds in STEP.findall(self.text())]

    def rank(self, rank: int) -> dict[str, Any]:
        """Node and pid of a rank, as it saw itself: {at, rank, node, pid}."""
        row: dict[str, Any] = json.loads((self.place / f"rank{rank}.json").read_text())
        return row

    def do(self, kind: str, rank: int) -> float:
        """Tells a rank to break at its next step; returns when it did."""
        fault = self.faults / f"{kind}.rank{rank}"
        fault.touch()
        return self.done(kind, rank)

    def done(self, kind: str, rank: int, patience_s: float = 120.0) -> float:
        """When a rank did what it was told to."""
        done = self.faults / f"{kind}.rank{rank}.done"
        self.stage.until(done.exists, patience_s, f"{kind} of rank {rank}")
        return float(json.loads(done.read_text())["at"])

    def signal(self, name: str, rank: int) -> float:
        """Sends a rank a signal; returns when."""
        row = self.rank(rank)
        self.stage.cluster.node_run(row["node"], ["kill", f"-{name}", str(row["pid"])])
        return time.time()

    def incidents(self) -> list[dict[str, Any]]:
        """What fires about the job and is not explained by something else."""
        return [
            each
            for each in self.stage.watchdog.incidents(self.job_id)
            if each["state"] == "firing" and not each["inhibited_by"]
        ]

    def diagnosis(self) -> dict[str, Any] | None:
        """The diagnosis of this run: kept once, with the first of the job's incidents that asked for it."""
        watchdog = self.stage.watchdog
        for incident in watchdog.incidents(self.job_id):
            for part in watchdog.explain(incident["id"])["evidence"]:
                if part["kind"] == "diagnosis":
                    document: dict[str, Any] = part["document"]
                    return document
        return None

    def stopped(self) -> list[str]:
        """Processes of the job in state T, as `node pid`."""
        found = []
        for node in self.nodes:
            listed = self.stage.cluster.node_run(node, ["ps", "-eo", "pid=,stat=,args="]).stdout
            rows = [line.split(None, 2) for line in listed.splitlines()]
            found += [f"{node} {pid}" for pid, state, words in rows if state[0] in "Tt" and str(self.place) in words]
        return found

    def end(self) -> None:
        self.stage.cluster.slurm("scancel", self.job_id, check=False)


@dataclass
class Stage:
    """Cluster, watchdog, and the interpreter with torch."""

    cluster: Cluster
    watchdog: Watchdog | None
    """None: the training is watched by somebody else, or by nobody."""
    python: str
    closing: bool = False
    scratch: threading.Lock = field(default_factory=threading.Lock)
    """Held by the training that freezes the nodes' own filesystems: other processes that write there would hang as well."""
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))
    """Trainings are started from several threads."""

    def submit(
        self,
        name: str,
        *options: str,
        launcher: str = "srun",
        nodes: tuple[str, ...] = ("n1", "n2"),
        steps: int = 100000,
    ) -> Job:
        """Starts a training of two ranks a node; `launcher` is srun (a task a rank) or torchrun (a launcher a node)."""
        room = self.room(name)
        words = f"{room.words(TRAINER)} --steps {steps} {' '.join(options)}"
        if launcher == "srun":
            tasks, command = RANKS_PER_NODE, f"{self.python} {words}"
        else:
            tasks = 1
            command = (
                f"{self.python} -m torch.distributed.run --nnodes={len(nodes)} --nproc-per-node={RANKS_PER_NODE} "
                f"--node-rank=$SLURM_NODEID --master-addr={nodes[0]} --master-port={room.port} {words}"
            )
        script = (
            "#!/bin/bash\n#SBATCH --requeue --open-mode=append\n"
            f"export MASTER_ADDR={nodes[0]} MASTER_PORT={room.port} {ENVIRONMENT}\n"
            f"export TORCH_NCCL_DEBUG_INFO_TEMP_FILE={room.place}/fr_ TORCH_NCCL_DEBUG_INFO_PIPE_FILE={room.place}/ask_\n"
            f"srun --ntasks-per-node={tasks} bash -c '{command}'\n"
        )
        where = (f"-N{len(nodes)}", f"--ntasks-per-node={tasks}", f"--nodelist={','.join(nodes)}")
        return self.start(room, script, *where, nodes=nodes)

    def room(self, name: str) -> Room:
        """Directories, a log and a port of its own for a training."""
        number = next(self._numbers)
        base = Path(self.cluster.directory) / "trainings"
        room = Room(
            name, base / f"{number}-{name}", base / f"{number}-{name}-faults", base / f"{number}-{name}.out",
            FIRST_PORT + number,
        )  # fmt: skip
        for directory in (base, room.place, room.faults):
            directory.mkdir(exist_ok=True)
            directory.chmod(0o1777)  # jobs run as an ordinary user
        return room

    def start(self, room: Room, script: str, *where: str, nodes: tuple[str, ...] = ()) -> Job:
        """Submits the script of a training; `nodes` are those that it has, as far as they are known."""
        job_id = self.cluster.sbatch(script, *where, f"--output={room.output}", f"--job-name={room.name}")
        return Job(self, job_id, room.place, room.faults, room.output, nodes)

    def training(self, job: Job, at_least: int = 15) -> None:
        """Waits until the watchdog knows of so many steps of a job."""
        self.until(
            lambda: self.watchdog.step(job.job_id) >= at_least,
            START_S,
            f"job {job.job_id} to reach step {at_least}; its log: {job.text()[-1500:]}",
        )

    def until(self, condition: Callable[[], Any], patience_s: float, what: str = "") -> Any:
        """The first true value of `condition`. Raises WatchdogError or ClusterError if there is none in time, Over
        if the stage is closed."""

        def look() -> Any:
            if self.closing:
                raise Over(what)
            return condition()

        if self.watchdog is not None:
            return self.watchdog.wait_for(look, patience_s, what)
        if not wait_until(look, patience_s, 0.2):
            raise ClusterError(f"waited {patience_s:g} s for {what}")
        return look()

    def pause(self, seconds: float) -> None:
        """Between two looks."""
        if self.closing:
            raise Over
        time.sleep(seconds)


def typical(steps: list[tuple[int, float]]) -> float:
    """The median of the seconds of some steps."""
    return statistics.median(seconds for _, seconds in steps)


ACTING: Mapping[str, Mapping[str, Any]] = {
    "policy": {
        "cooldown": "1s",
        "budget": 50,
        "budget_percent": 100,
        "budget_window": "10s",
        "attempts": 10,
        "storm_jobs": 20,
    },
    "ladder": {"exit_limit": "20s"},
}
"""What is not as shipped where the watchdog acts: so many jobs are broken here within an hour that its
budgets would keep it still."""
