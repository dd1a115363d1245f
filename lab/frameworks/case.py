"""One case: a training under `slurm-watchdog run`, its fault, and what was said until it ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from lab.frameworks.catalogue import Fault, Framework
from lab.frameworks.outcome import Outcome, RankRun, read_truth, said_of

SCRIPTS = Path(__file__).parent / "scripts"
COMMAND = Path(sys.executable).with_name("slurm-watchdog")
LOOK_S = 0.5
START_S = 400.0
"""To the first step: imports of some GB on a busy machine."""
AFTER_RESTART_S = 300.0
GRACE_S = 60.0
FOREIGN = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "PYTHONPATH", "FAULT")

SHORT: dict[str, Any] = {
    "agent": {"interval": "2s"},
    "detectors": {
        "collective_hang": {
            "floor": "20s",
            "startup_grace": "150s",
            "evaluation_floor": "150s",
            "checkpoint_floor": "150s",
            "stepless_limit": "30s",
            "busy_limit": "120s",
        },
        "stalled_progress": {"busy_limit": "120s", "still_limit": "60s", "start_limit": "4min"},
        "filesystem_stall": {"blocked_for": "20s"},
        "lingering_job": {"grace": "15s"},
    },
}
"""Shipped: 5 s; 60 s, 1 h, 30 min, 30 min, 10 min, 30 min; 30 min, 10 min, 90 min; 60 s; 30 s."""


class Hearer:
    """Takes the webhook's events, those of each case by its name."""

    def __init__(self) -> None:
        self.events: dict[str, list[dict[str, Any]]] = {}
        hearer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                hearer.events.setdefault(self.path.strip("/"), []).extend(body["events"])
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def address(self, name: str) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{name}"

    def of(self, name: str) -> list[dict[str, Any]]:
        """In the order they were sent, each once."""
        return list({event["id"]: event for event in self.events.get(name, [])}.values())


@dataclass
class Case:
    """`directory`: new, for this case alone. `python` has the framework. `patience_s`: from a fault to the
    next run's first step."""

    framework: Framework
    fault: Fault
    directory: Path
    python: str
    hearer: Hearer
    limits: dict[str, Any] = field(default_factory=lambda: SHORT)
    patience_s: float = 300.0
    phase_s: float = 60.0
    """How long the long save and the long evaluation last."""
    fault_at: float | None = None

    @property
    def name(self) -> str:
        bar = "".join(f"-{value}" for value in self.framework.environ.values())
        return f"{self.framework.script}{bar}.{self.fault.name}"

    @property
    def rank(self) -> int:
        """The last one has the fault: where there are two, not the one that logs and saves."""
        return self.framework.ranks - 1

    def run(self) -> Outcome:
        """Returns when the training has ended, or when nothing more is to be expected of it."""
        began = time.time()
        for part in ("work", "truth"):
            (self.directory / part).mkdir(parents=True)
        (self.directory / "webhook").write_text(self.hearer.address(self.name))
        config = self.limits | {"notify": {"webhook": {"url_file": str(self.directory / "webhook")}}}
        (self.directory / "config.yaml").write_text(yaml.safe_dump(config))
        with (self.directory / "shown.log").open("wb") as shown:
            process = subprocess.Popen(
                self.command(), cwd=self.directory / "work", env=self.environ(), stdin=subprocess.DEVNULL,
                stdout=shown, stderr=shown, start_new_session=True,
            )  # fmt: skip
            broke = ""
            try:
                broke = self.follow(process, began)
            finally:
                code = process.poll()
                end(process)
        return Outcome(
            framework=self.framework.name,
            fault=self.fault.name,
            rank=self.rank,
            total=self.framework.total,
            fault_at=self.fault_at,
            runs=tuple(self.truth()),
            said=tuple(said_of(self.hearer.of(self.name))),
            exit_code=code,
            seconds=round(time.time() - began, 1),
            broke=broke,
        )

    def command(self) -> list[str]:
        """`slurm-watchdog run … -- the training`, as a person types it."""
        script = str(SCRIPTS / f"{self.framework.script}.py")
        training = [self.python, script]
        if self.framework.launcher == "torchrun":
            training[1:1] = [
                "-m",
                "torch.distributed.run",
                f"--nproc-per-node={self.framework.ranks}",
                f"--master-port={free_port()}",
            ]
        if self.framework.launcher == "spawn":
            training[1:1] = [str(SCRIPTS / "spawn.py"), str(self.framework.ranks)]
        return [
            str(COMMAND), "run", "--no-page", "--quiet", "--directory", str(self.directory / "watch"),
            "--config", str(self.directory / "config.yaml"), "--", *training,
        ]  # fmt: skip

    def environ(self) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
        mine = {
            "FAULT": self.fault.name,
            "FAULT_RANK": str(self.rank),
            "FAULT_STEP": str(self.framework.fault_step),
            "FAULT_STEPS": str(self.framework.total),
            "FAULT_SECONDS": str(self.phase_s),
            "FAULT_PLACE": str(self.directory / "truth"),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        return {**clean, **mine, **self.framework.environ}

    def truth(self) -> list[RankRun]:
        return read_truth(self.directory / "truth")

    def follow(self, process: subprocess.Popen[bytes], began: float) -> str:
        """Sends the signals, waits. Returns why this is no result, if the training itself is to blame."""
        while process.poll() is None:
            time.sleep(LOOK_S)
            now, truth = time.time(), self.truth()
            first = [each for each in truth if each.run == 0 and each.first > 0]
            again = [each for each in truth if each.run == 1 and each.first > 0]
            self.send_signal(truth)
            self.note_fault(truth)
            if not first and now - began > START_S:
                return f"no step within {START_S:.0f} s"
            if again:
                if now - min(each.first_at for each in again) > AFTER_RESTART_S:
                    return ""
            elif self.fault_at is not None:
                if now - self.fault_at > self.patience_s:
                    return ""
            elif first and now - min(each.first_at for each in first) > self.patience_s:
                return "the fault did not happen" if self.fault.name != "none" else "it does not end"
        self.note_fault(self.truth())
        if not any(each.first > 0 for each in self.truth()):
            return f"it ended with code {process.returncode} before its first step"
        if self.fault_at is None and self.fault.name != "none":
            return "it ended before the fault"
        return ""

    def send_signal(self, truth: list[RankRun]) -> None:
        if not self.fault.signal or self.fault_at is not None:
            return
        for each in truth:
            if each.run == 0 and each.rank == self.rank and each.last >= self.framework.fault_step:
                self.fault_at = time.time()
                os.kill(each.pid, signal.Signals[f"SIG{self.fault.signal}"])

    def note_fault(self, truth: list[RankRun]) -> None:
        if self.fault_at is None:
            begun = [each.fault_at for each in truth if each.run == 0 and each.fault_at]
            self.fault_at = min(begun, default=None)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends `slurm-watchdog run`, which ends its command; a process that does not end is killed."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
