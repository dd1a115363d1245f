"""The agent as it runs on a node, for tests: the real command, a controller that writes down what comes, and
what its tree costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from slurm_watchdog.model.protocol import JobWatch, Reply
from slurm_watchdog.model.report import Report
from tests.munged import munged
from tests.proven_server import serving
from tests.rig.rights import Place

ALONE = "TEST_IS_ALONE"
ANOTHER_USER = 64998
"""As whom some tests run their agent."""
CHECKOUT = Path(__file__).resolve().parents[1]


def alone(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test in PID and mount namespaces of its own: no other process of the machine, and no mount, is
    there to be watched."""
    if os.environ.get(ALONE):
        return test

    def outer() -> None:
        name = f"{Path(test.__code__.co_filename).relative_to(CHECKOUT)}::{test.__name__}"
        without_journal = {name: value for name, value in os.environ.items() if name != "RETRIED_TESTS"}
        inner = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", name]
        done = subprocess.run(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", *inner],
            cwd=CHECKOUT, env={**without_journal, ALONE: "1"}, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    outer.__name__ = test.__name__
    return outer


PERSONAL = """
import sys, msgspec
from slurm_watchdog.agent.settings import become_agent, settings_of
from slurm_watchdog.config.loading import (load_config)
settings = msgspec.structs.replace(settings_of(load_config(sys.argv[1])), personal=True)
become_agent(settings, file=sys.argv[1])
"""
"""The agent as `slurm-watchdog run` starts it: for the one user whom it has, here root. Nobody else's is
looked at, and as nobody else."""


def watched(job: str, uid: int | None = None) -> JobWatch:
    """A job of this user, or of ours, as the controller tells of it."""
    return JobWatch(job_id=job, restarts=0, uid=os.getuid() if uid is None else uid)


class Receiver:
    """A controller that takes every report and notes when; unless its `reply` says otherwise, it wants each whole."""

    def __init__(self, *jobs: str) -> None:
        """`jobs`: those that Slurm has on this node, all of our own user; what claims to be of another one is none."""
        self.reports: list[tuple[float, Report]] = []
        self.reply = Reply(controller_id="test", watch=tuple(watched(job) for job in jobs), closely=True)
        self._open = ExitStack()
        self.munged = self._open.enter_context(munged())
        self.port = self._open.enter_context(serving(self.munged, self._take, frozenset({ANOTHER_USER})))
        self.url = f"http://127.0.0.1:{self.port.number}"

    def close(self) -> None:
        self._open.close()

    def _take(self, report: Report) -> Reply:
        self.reports.append((time.monotonic(), report))
        return self.reply

    def last(self) -> Report:
        return self.reports[-1][1]

    def longest_gap_s(self, since: float) -> float:
        """Between `since`, each report after it, and now."""
        times = [since, *(at for at, _ in self.reports if at >= since), time.monotonic()]
        return max(later - earlier for earlier, later in pairwise(times))


class AgentProcess:
    """The agent with a configuration of its own."""

    def __init__(
        self,
        directory: Path,
        receiver: Receiver,
        *,
        interval_s: float = 1.0,
        deadline_s: float = 2.0,
        environment: Mapping[str, str] | None = None,
        place: Place | None = None,
        state_directory: Path | None = None,
        more: str = "",
    ) -> None:
        """`more` is put into the section `agent`. With a `place` it is the agent of ANOTHER_USER, who runs
        our code there."""
        config = directory / "agent.yaml"
        config.write_text(
            f"agent: {{node_name: n1, controller_url: '{receiver.url}', interval: {interval_s * 1000:.0f}ms, metrics_directory: '', "
            f"probe_deadline: {deadline_s * 1000:.0f}ms, state_directory: '{state_directory or directory}'{more}}}\n"
            f"security: {json.dumps(receiver.munged.security())}\n"
        )
        self.errors = directory / "agent.err"
        command = [sys.executable, "-c", PERSONAL, str(config)]
        if place is not None:
            command = place.command(ANOTHER_USER, (), *command[1:])
            environment = dict(place.environment) | dict(environment or {})
            environment["LD_LIBRARY_PATH"] += f":{place.environment['LD_LIBRARY_PATH']}"
        with open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(
                command,
                stdout=errors,
                stderr=errors,
                cwd="/" if place is not None else CHECKOUT,
                env={**os.environ, **(environment or {})},
            )
        self.pid = self.process.pid

    def log(self) -> str:
        return self.errors.read_text(errors="replace")

    def end(self) -> int:
        """SIGTERM, as systemd sends it; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=20)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(timeout=20)


def tree_of(pid: int) -> list[int]:
    """`pid` and all its descendants."""
    pids = [pid]
    for each in pids:
        try:
            for task in os.listdir(f"/proc/{each}/task"):
                pids += [int(word) for word in Path(f"/proc/{each}/task/{task}/children").read_text().split()]
        except OSError:
            continue  # it ended meanwhile
    return pids


def descriptors_and_threads(pids: list[int]) -> tuple[int, int]:
    """Of all these processes together; one that ended meanwhile has none."""
    return (
        sum(_count(f"/proc/{pid}/fd") for pid in pids),
        sum(_count(f"/proc/{pid}/task") for pid in pids),
    )


def _count(directory: str) -> int:
    try:
        return len(os.listdir(directory))
    except (FileNotFoundError, ProcessLookupError):
        return 0


def settles_at(pid: int, before: tuple[int, int]) -> None:
    """Fails if the tree of `pid` keeps more descriptors or threads than `before`. A child of a moment is none kept."""

    def holds() -> bool:
        return all(now <= then for now, then in zip(descriptors_and_threads(tree_of(pid)), before, strict=True))

    until(holds, 15, f"no more descriptors and threads than {before}")


def until(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Fails the test if `condition` does not hold within so long."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)
