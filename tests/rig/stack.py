"""The watchdog on a demo cluster: real agents on its nodes, a real controller, a receiver that stands in for Slack.

    with Cluster(nodes=4) as cluster, Watchdog(cluster, mode="act") as watchdog:
        job = cluster.sbatch(...)
        watchdog.wait_for(lambda: watchdog.incidents(job), 30)

With SLURM_WATCHDOG_TEST_PYSLURM, an interpreter that has pyslurm of this Slurm's release, controllers list by that.
Used by the demo and by the integration tests. Everything of the watchdog lies below the cluster's own directory, on a
filesystem that nobody freezes. Standard library only; the programs are started as an administrator would start them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.rig.cluster import Cluster
from tests.rig.patience import Patience, busyness
from tests.rig.rights import AGENT_UID, agent_command
from tests.rig.slack_receiver import SlackReceiver

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / "tests" / "rig" / "trainer.py"
COMMAND = Path(sys.executable).with_name("slurm-watchdog")
PORT = 9765
START_GRACE_S = 60
COMES_UP_S = 120.0
"""For a controller or an agent to come up on a machine with much else to do: an interpreter alone may take
ten seconds there."""

QUICK: dict[str, dict[str, Any]] = {
    "agent": {
        "interval": "1s",
        "probe_deadline": "2s",
        "checkpoint_interval": "1s",
        "mount_probe_interval": "5s",
    },
    "controller": {
        "tick": "500ms",
        "agent_silent_after": "6s",
        "warm_up": "3s",
    },
    "slurm": {"poll_interval": "1s", "deadline": "8s"},
    "detectors": {
        "filesystem_stall": {"blocked_for": "6s"},
        "collective_hang": {"floor": "8s", "startup_grace": f"{START_GRACE_S}s", "warmup_steps": 3},
        "lingering_job": {"grace": "6s"},
    },
    "policy": {"cooldown": "1s", "budget": 20, "budget_percent": 100, "attempts": 10, "storm_cooldown": "3s"},
    "ladder": {"exit_limit": "10s", "step_limit": "30s", "confirm_limit": "120s"},
}
"""Steps here take half a second, not 105: every time of the shipped configuration, scaled to that."""


PEOPLE = ("cluster_name", "restart", "restarts_per_hour", "patience", "except", "notify", "detectors")
"""The sections at the top of a configuration; all others are below `expert`."""


def in_its_places(sections: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of sections, where each is in the file that people write."""
    expert = {name: dict(section) for name, section in sections.items() if name not in (*PEOPLE, "mode")}
    config = {name: section for name, section in sections.items() if name in PEOPLE}
    config["controller"] = expert["agent"].pop("controller_url")
    config["restart"] = {"observe": "never", "act": "all"}[sections["mode"]]
    if budget := expert.get("policy", {}).pop("budget", None):
        config["restarts_per_hour"] = budget
    return config | {"expert": expert}


class WatchdogError(Exception):
    """The watchdog did not come up, or did not do in time what was waited for. Holds the tails of its logs."""


def munge_of(cluster: Cluster) -> dict[str, str]:
    """The section `security` of a watchdog on this cluster: the munged that its Slurm has; the controller is root's."""
    socket_of_munged = str(Path(cluster.directory) / "munge" / "socket")
    return {
        "mode": "munge",
        "controller_user": "0",
        "agent_user": str(AGENT_UID),
        "munge_socket": socket_of_munged,
    }


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=10 * busyness())
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Watchdog:
    """Agents and controller of one cluster. `settings` override QUICK, section by section; with `shipped`
    they override the configuration as it is shipped.

    `agent_env`: what the agent of a node has in its environment besides. `pace`: all those times are so many times
    longer, for a machine that is busy.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        mode: str = "observe",
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        nodes: Sequence[str] | None = None,
        controller_env: Mapping[str, str] | None = None,
        agent_env: Callable[[str], Mapping[str, str]] | None = None,
        shipped: bool = False,
        pace: float = 1.0,
    ):
        self.cluster = cluster
        self.nodes = tuple(nodes if nodes is not None else cluster.nodes)
        self.directory = Path(cluster.directory) / f"watchdog-{secrets.token_hex(3)}"
        self.slack = SlackReceiver()
        self.config_file = self.directory / "config.yaml"
        self.socket = str(self.directory / "controller.sock")
        self.controller: subprocess.Popen[bytes] | None = None
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self._env = dict(cluster.env) | dict(controller_env or {})
        self._agent_env, self.pace = agent_env, pace
        base: Mapping[str, Mapping[str, Any]] = {} if shipped else QUICK
        self._write_configuration(mode, [slower(layer, pace) for layer in (base, settings or {})])

    def _write_configuration(self, mode: str, layers: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
        self.directory.mkdir(mode=0o755)
        webhook = self.directory / "slack-webhook"
        webhook.touch(mode=0o600)
        webhook.write_text(self.slack.url + "\n")
        address = self.cluster.controller_address
        config: dict[str, Any] = {
            "cluster_name": "demo",
            "mode": mode,
            # One file for all nodes: none of them remembers how far it has read the log of the one kernel
            # that they share.
            "agent": {
                "controller_url": f"http://{address}:{PORT}",
                "state_directory": "",
            },
            "jobs": {"kill_switch_prefixes": [str(self.cluster.shared)]},
            "controller": {
                "listen": f"{address}:{PORT}",
                "socket": self.socket,
                "state_directory": str(self.directory / "state"),
                "page_listen": "",  # as shipped it is one port of this machine, on which there may be other clusters
            },
            "security": munge_of(self.cluster),
            "notify": {"slack": {"webhook_url_file": str(webhook), "messages_per_minute": 60}},
        }
        if python := os.environ.get("SLURM_WATCHDOG_TEST_PYSLURM"):
            config["slurm"] = {"client": "pyslurm", "pyslurm_python": python}
        for layer in layers:
            _merge(config, layer)
        # JSON is YAML, and needs no library here.
        self.config_file.write_text(json.dumps(in_its_places(config), indent=2))

    # ------------------------------------------------------------------------------------ life

    def __enter__(self) -> Watchdog:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def start(self) -> None:
        """Starts everything, and waits until every agent has reported; leaves it up where that takes too long."""
        self.start_controller()
        for node in self.nodes:
            self.start_agent(node)
        self.wait_for(
            lambda: set(self.status()["nodes"]["reporting"]) >= set(self.nodes),
            COMES_UP_S,
            "every agent to report",
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops everything, frozen or not; idempotent."""
        self.cluster.thaw()
        controller = [self.controller] if self.controller else []
        for process in [*self.agents.values(), *controller]:
            _stop(process)
        self.agents.clear()
        self.controller = None
        self.slack.close()

    def start_controller(self) -> None:
        # It must not outlive us: a test that is killed leaves nothing behind.
        argv = ["setpriv", "--pdeathsig=KILL", str(COMMAND), "controller", "--config", str(self.config_file)]
        with self._log("controller").open("ab") as log:
            self.controller = subprocess.Popen(
                argv, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )
        self.wait_for(self._answers, COMES_UP_S, "the controller to answer")

    def kill_controller(self) -> None:
        """As the machine's OOM killer would: kill -9."""
        assert self.controller is not None
        self.controller.kill()
        self.controller.wait(timeout=10)

    def start_agent(self, node: str, *words: str, stdout: IO[bytes] | None = None) -> None:
        """As its unit starts it: nobody in particular with a few capabilities."""
        own = self._agent_env(node) if self._agent_env is not None else {}
        environment = dict(self.cluster.env) | dict(self.cluster.place.environment) | {"SLURMD_NODENAME": node}
        with self._log(f"agent-{node}").open("ab") as log:
            self.agents[node] = self.cluster.node_popen(
                node,
                agent_command(self.cluster.place, "--config", str(self.config_file), *words),
                cwd="/",
                env=environment | dict(own),
                stdin=subprocess.DEVNULL,
                stdout=log if stdout is None else stdout,
                stderr=log,
            )

    def stop_agent(self, node: str, signal_number: int = signal.SIGTERM) -> None:
        process = self.agents.pop(node)
        process.send_signal(signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        _stop(process)

    def _answers(self) -> bool:
        if self.controller is not None and self.controller.poll() is not None:
            raise WatchdogError(
                f"the controller ended with {self.controller.returncode}\n{self.log_tail('controller')}"
            )
        try:
            self.status()
        except (OSError, http.client.HTTPException):
            return False
        return True

    # ------------------------------------------------------------------------------------ asking

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def log_tail(self, name: str, lines: int = 25) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self._log(name).read_text(errors="replace").splitlines()[-lines:])
        return f"no log of {name}"

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """One request to the controller's local socket; returns its JSON. Raises OSError."""
        connection = _UnixConnection(self.socket)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def status(self) -> Any:
        return self.ask("GET", "/v1/status")

    def incidents(self, job_id: str | None = None) -> list[Any]:
        return list(self.ask("GET", f"/v1/incidents?job={job_id}" if job_id else "/v1/incidents"))

    def firing(self, job_id: str, kind: str) -> Any:
        """The firing incident of this kind that nothing else explains, or None."""
        for incident in self.incidents(job_id):
            if incident["kind"] == kind and incident["state"] == "firing" and not incident["inhibited_by"]:
                return incident
        return None

    def explain(self, incident_id: str) -> Any:
        return self.ask("GET", f"/v1/incidents/{incident_id}")

    def step(self, job_id: str) -> int:
        """Newest step that the controller knows of; -1 before the first."""
        for job in self.status()["jobs"]:
            if job["job_id"] == job_id and job["step"] is not None:
                return int(job["step"])
        return -1

    def command(self, *words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """The command line as a person uses it."""
        return subprocess.run(
            [str(COMMAND), *words, "--socket", self.socket],
            env=self._env,
            capture_output=True,
            text=True,
            timeout=timeout_s * busyness(),
            check=False,
        )

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://{self.cluster.controller_address}:{PORT}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    def wait_for(self, condition: Callable[[], Any], timeout_s: float, what: str = "") -> Any:
        """The first true value of `condition`. Raises WatchdogError with the logs when there is none in `timeout_s` of
        an idle machine; of `pace` times as long."""
        patience = Patience(timeout_s, self.pace)
        while patience.lasts():
            with contextlib.suppress(OSError, http.client.HTTPException):
                value = condition()
                if value:
                    return value
            time.sleep(0.2)
        logs = "\n".join(
            f"--- {name}\n{self.log_tail(name)}" for name in ("controller", *(f"agent-{n}" for n in self.nodes))
        )
        raise WatchdogError(f"waited {timeout_s:g} s for {what or condition}\n{logs}")


def slower(layer: Mapping[str, Any], pace: float) -> dict[str, Any]:
    """Settings with each time in them `pace` times as long."""
    longer: dict[str, Any] = {}
    for key, value in layer.items():
        if isinstance(value, Mapping):
            longer[key] = slower(value, pace)
        elif isinstance(value, str) and (time_of := re.fullmatch(r"(\d+)(ms|s)", value)):
            longer[key] = f"{round(int(time_of[1]) * pace)}{time_of[2]}"
        else:
            longer[key] = value
    return longer


def _merge(into: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, Mapping):
            inner = into.setdefault(key, {})
            _merge(inner, value)
        else:
            into[key] = value


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)


def train_script(
    cluster: Cluster,
    *options: str,
    ranks_per_node: int = 2,
    pulse_s: float = 2.0,
    trainer: str = "",
    ahead: str = "",
    launch: str = "",
) -> str:
    """A batch script as the BLOOM team had it: srun of the trainer, and a PULSE line beside it, into the same log.

    `trainer`: another interpreter and file than our own, which the job's user reads in the cluster's Place.
    `ahead`: words before srun, or before `launch`, which takes its place.
    """
    words = " ".join(
        [
            trainer or f"{cluster.place.python} {cluster.place.directory}/checkout/tests/rig/trainer.py",
            f"--checkpoint-dir {cluster.shared}/checkpoints-$SLURM_JOB_ID",
            f"--rendezvous-dir {cluster.shared}",
            *options,
        ]
    )
    srun = f"srun --ntasks-per-node={ranks_per_node}"
    return f"""#!/bin/bash
#SBATCH --open-mode=append --requeue --ntasks-per-node={ranks_per_node}
(while sleep {pulse_s}; do echo "[$(date '+%F %T')] PULSE: demo is running ($SLURM_JOB_ID on $SLURM_JOB_NODELIST)"; done) &
pulse=$!
mkdir -p {cluster.shared}/checkpoints-$SLURM_JOB_ID
{f"{ahead} {launch or srun}".strip()} {words}
code=$?
kill $pulse
exit $code
"""
