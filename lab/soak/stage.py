"""The stage: a real cluster with training jobs, a real watchdog that acts, and the record of what was done to them."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from lab.soak.tools import Tools
from slurm_watchdog.journal.journal import Journal, JournalError
from slurm_watchdog.model.actions import ActionRun, Decision
from tests.rig.cluster import Cluster
from tests.rig.commands import ClusterError
from tests.rig.stack import Watchdog, WatchdogError, train_script

T = TypeVar("T")

SETTINGS: dict[str, dict[str, Any]] = {
    "controller": {"warm_up": "5s", "agent_silent_after": "10s", "page_listen": ""},
    "detectors": {
        "collective_hang": {"floor": "12s", "startup_grace": "120s", "warmup_steps": 3},
        "lingering_job": {"grace": "8s"},
    },
    "policy": {
        "cooldown": "5s",
        "budget": 1000,
        "budget_percent": 100,
        "budget_window": "5s",
        "attempts": 1000,
        "storm_jobs": 1000,
    },
    "ladder": {"exit_limit": "10s", "step_limit": "40s", "confirm_limit": "120s", "checkpoint_limit": "60s"},
}
"""Over the demo's: a busy machine may be slow. Attempts and budgets are the simulator's matter: here there is
to be much to do."""
WARM_UP_S = 5.0
BLIND_AFTER_S = 3 * 1.0 + 8.0
"""Three polls of Slurm and a deadline: from then on a controller whose Slurm does not answer must not act
(tests of judge.py)."""
STATE_MB = 64
"""Size of the filesystem under the journal, so that it can be full."""


@dataclass(frozen=True)
class Deed:
    """One thing that was done to the stage, by us who make the trouble. `t` is a date in seconds."""

    t: float
    what: str
    job_id: str = ""
    restarts: int = -1
    detail: str = ""


@dataclass
class Run:
    """One run of one job, as its batch script tells it."""

    job_id: str
    restarts: int
    began: float
    nodes: str


@dataclass
class Stage:
    """Everything of one soak. Use as a context."""

    rng: random.Random
    nodes: int = 4
    deeds: list[Deed] = field(default_factory=list)
    jobs: list[str] = field(default_factory=list)
    frozen: bool = False
    slurm_away: bool = False
    paused: bool = False
    """Whether the controller is stopped."""
    marks: list[tuple[float, int]] = field(default_factory=list)
    """(date, bytes) of the controller's memory."""

    def __enter__(self) -> Stage:
        self._stack = contextlib.ExitStack()
        try:
            self.cluster = self._stack.enter_context(Cluster(nodes=self.nodes, cpus=8, shared_mb=1024))
            self.tools = Tools(self.cluster.directory / "tools")
            settings = SETTINGS | {"slurm": {"bin_directory": str(self.tools.directory)}}
            self.watchdog = Watchdog(self.cluster, mode="act", settings=settings)
            self.state = self.watchdog.directory / "state"
            self._mount_state()
            self._stack.enter_context(self.watchdog)
        except BaseException:
            self._stack.close()
            raise
        self.runs_log = self.cluster.directory / "log" / "runs.log"
        self.runs_log.touch()
        self.runs_log.chmod(0o666)  # written by the jobs, which are an ordinary user's
        return self

    def __exit__(self, *exception: object) -> None:
        if self.paused:
            self.continue_controller()
        self._stack.close()

    def _mount_state(self) -> None:
        self.state.mkdir(mode=0o750)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={STATE_MB}m", "soak", str(self.state)], check=True)
        self._stack.callback(subprocess.run, ["umount", "--lazy", str(self.state)], check=False)

    def note(self, what: str, job_id: str = "", restarts: int = -1, detail: str = "") -> None:
        self.deeds.append(Deed(time.time(), what, job_id, restarts, detail))

    # ------------------------------------------------------------------------------------ jobs

    def submit(self, nodes: int, *, steps: int = 1_000_000) -> str:
        """A job of two ranks a node that saves every 20 steps of half a second."""
        faults = self.cluster.directory / "log" / f"faults-{len(self.jobs)}"
        faults.mkdir()
        faults.chmod(0o777)
        script = train_script(
            self.cluster, f"--steps {steps} --step-seconds 0.5 --save-interval 20 --fault-dir {faults}",
            "--rendezvous-timeout-seconds 120",
        )  # fmt: skip
        first = (
            f'echo "$SLURM_JOB_ID ${{SLURM_RESTART_COUNT:-0}} $(date +%s.%N) $SLURM_JOB_NODELIST" >>{self.runs_log}\n'
        )
        first += 'echo "RUN ${SLURM_RESTART_COUNT:-0}"\n'
        script = script.replace("(while sleep", first + "(while sleep", 1)
        job_id = self.cluster.sbatch(script, f"-N{nodes}", f"--output={self.log_of('%j')}")
        self.jobs.append(job_id)
        self.note("submit", job_id, 0, f"{steps} steps")
        return job_id

    def log_of(self, job_id: str) -> Path:
        return self.cluster.directory / "log" / f"job-{job_id}.out"

    def fault_file(self, job_id: str, name: str) -> Path:
        return self.cluster.directory / "log" / f"faults-{self.jobs.index(job_id)}" / name

    def job(self, job_id: str) -> dict[str, str]:
        """Slurm's own word on a job; empty if there is none now."""
        try:
            return self.cluster.job(job_id)
        except ClusterError:
            return {}

    def runs(self) -> list[Run]:
        """Every run of every job."""
        rows = [line.split() for line in self.runs_log.read_text().splitlines()]
        return [Run(row[0], int(row[1]), float(row[2]), row[3]) for row in rows if len(row) == 4]

    def steps_of(self, job_id: str) -> int:
        """Lines of steps in the newest run's log."""
        text = self.log_of(job_id).read_text(errors="replace") if self.log_of(job_id).exists() else ""
        return len(re.findall(r"iteration +\d+/", text.rpartition("\nRUN ")[2]))

    def turning(self) -> list[str]:
        """Jobs that run and have made some steps in this run, and nothing was done to that run."""
        hurt = set(self.hurt_runs())
        found = []
        for job_id in self.jobs:
            job = self.job(job_id)
            mine = (job_id, int(job.get("Restarts", -1)))
            if job.get("JobState") == "RUNNING" and mine not in hurt and self.steps_of(job_id) >= 8:
                found.append(job_id)
        return found

    def hurt_runs(self) -> list[tuple[str, int]]:
        """Runs that something was done to, oldest first."""
        return list(dict.fromkeys((d.job_id, d.restarts) for d in self.deeds if d.what.startswith("fault ")))

    def hurt(self, job_id: str, name: str, content: str = "") -> None:
        """Something in the job's newest run goes wrong at its next step."""
        restarts = int(self.job(job_id).get("Restarts", -1))
        self.note(f"fault {name}", job_id, restarts)
        self.fault_file(job_id, name).write_text(content)

    def ask_restart(self, job_id: str, exclude: tuple[str, ...] = ()) -> None:
        """As an operator does it, by kill switch. Nothing comes of it if nobody listens."""
        self.note("asked", job_id, int(self.job(job_id).get("Restarts", -1)))
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            self.watchdog.ask("POST", "/v1/restart", {"job_id": job_id, "exclude": list(exclude), "reason": "soak"})

    # ------------------------------------------------------------------------------------ the controller

    def open_actions(self) -> list[ActionRun]:
        """What the journal holds open, whether or not a controller lives. Empty while it cannot be read."""
        return self._read(lambda journal: journal.open_actions(), [])

    def decisions(self) -> list[Decision]:
        return self._read(lambda journal: journal.decisions(), [])

    def _read(self, work: Callable[[Journal], T], otherwise: T) -> T:
        file = self.state / "journal.sqlite"
        if not file.exists():
            return otherwise
        try:
            journal = Journal(f"sqlite:///{file}")
        except JournalError:
            return otherwise
        try:
            return work(journal)
        except JournalError:
            return otherwise
        finally:
            journal.close()

    @property
    def controller_lives(self) -> bool:
        process = self.watchdog.controller
        return process is not None and process.poll() is None

    def kill_controller(self) -> None:
        self.note("controller killed", detail=str(len(self.open_actions())))
        if self.paused:
            self.paused = False
        self.watchdog.kill_controller()

    def start_controller(self) -> bool:
        """As systemd does it: False if it did not come up, and is to be tried again."""
        try:
            self.watchdog.start_controller()
        except WatchdogError as error:
            self.note("controller did not start", detail=str(error)[:200])
            if self.controller_lives:
                self.watchdog.kill_controller()
            return False
        self.note("controller started")
        return True

    def pause_controller(self) -> None:
        assert self.watchdog.controller is not None
        self.paused = True
        self.note("controller stopped")
        os.kill(self.watchdog.controller.pid, signal.SIGSTOP)

    def continue_controller(self) -> None:
        self.paused = False
        if self.controller_lives:
            assert self.watchdog.controller is not None
            os.kill(self.watchdog.controller.pid, signal.SIGCONT)
            self.note("controller continued")

    def mark(self) -> None:
        """Notes how much memory the controller has."""
        process = self.watchdog.controller
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = Path(f"/proc/{process.pid if process else 0}/status").read_text()
            self.marks.append((time.time(), 1024 * int(text.split("VmRSS:")[1].split()[0])))

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 600.0) -> Any:
        """The first true value; the limit only ends a test that would never end. Raises AssertionError."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException, ClusterError):
                value = condition()
                if value:
                    return value
            time.sleep(0.5)
        raise AssertionError(f"waited {timeout_s:.0f} s for {what}\n{self.watchdog.log_tail('controller', 40)}")


def say(text: str) -> None:
    """Progress, for people."""
    sys.stderr.write(f"soak: {time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()
