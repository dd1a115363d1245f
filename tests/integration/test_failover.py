"""Two controllers on one PostgreSQL and a real Slurm, with AGENTS more agents than the cluster has nodes: both are killed
in turn while two jobs hang, the first in the middle of a requeue: `make failover`.

Two minutes: no part of `make test`, where simulation/pair.py has the same ten thousand times.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from typing import Any

import pytest
import sqlalchemy as sa

from lab.bench.controller_service import FleetProcess
from tests.builders.postgresql import postgresql_server
from tests.integration.training_job import ended_action, inject, submit, training
from tests.rig.cluster import Cluster
from tests.rig.rights import AGENT_UID
from tests.rig.stack import COMES_UP_S, COMMAND, PORT, Watchdog

TAKES_OVER_S = 10.0
"""Promised by docs/operating.md, on a machine with nothing else to do."""
BUSY_S = 30.0
AGENTS = 1000
"""Simulated ones, of nodes without a job, which report every 5 s over a connection and a session by MUNGE each."""
HEARD_S = 60.0
"""For all of them to be heard by the controller that took over: they begin their sessions one after the other."""
GATE = """
CREATE FUNCTION at_the_gate() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NEW; END';
CREATE TRIGGER gate BEFORE INSERT ON operations FOR EACH ROW WHEN (NEW.operation = 'release') EXECUTE FUNCTION at_the_gate();
"""
"""A release is not written down, and so not begun, while somebody holds lock 1: it may follow the requeue within 0.2 s."""


class Controller:
    """One of the two."""

    def __init__(self, watchdog: Watchdog, number: int):
        self.watchdog, self.number = watchdog, number
        self.socket = f"{watchdog.socket}{number or ''}"
        self.file = watchdog.config_file.with_name(f"config-{number}.yaml")
        config = json.loads(watchdog.config_file.read_text())
        config["expert"]["controller"] |= {
            "listen": f"{watchdog.cluster.controller_address}:{PORT + number}",
            "socket": self.socket,
            "state_directory": f"{watchdog.directory}/state-{number}",
        }
        self.file.write_text(json.dumps(config))

    def start(self) -> None:
        argv = ["setpriv", "--pdeathsig=KILL", str(COMMAND), "controller", "--config", str(self.file)]
        with (self.watchdog.directory / "controller.log").open("ab") as log:
            self.process = subprocess.Popen(
                argv, env=dict(self.watchdog.cluster.env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def refuses(self) -> bool:
        """Whether it says that it is the standby."""
        return self.answer().get("code") == "standby"

    def is_active(self) -> bool:
        return "nodes" in self.answer()

    def answer(self) -> Any:
        self.watchdog.socket = self.socket
        with suppress(OSError, HTTPException):
            return self.watchdog.status()
        return {}


@contextmanager
def simulated_agents(cluster: Cluster) -> Iterator[FleetProcess]:
    """They know both controllers."""
    munge = f"{cluster.directory}/munge/socket"
    options = (
        f"--address {cluster.controller_address} --port {PORT} --port {PORT + 1} --nodes {AGENTS} --jobs 0".split()
    )
    ahead = ("setpriv", f"--reuid={AGENT_UID}", "--clear-groups", "--pdeathsig=KILL")
    found = FleetProcess([*options, "--munge", munge, "--reader-uid", "0"], ahead=ahead)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def journal() -> Iterator[str]:
    with postgresql_server() as fresh:
        yield fresh()


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_both_controllers_are_killed_under_load_while_two_jobs_hang_and_each_is_restarted_once(
    cluster: Cluster, watch: Callable[..., Watchdog], journal: str, record_property: Callable[[str, object], None]
) -> None:
    engine = sa.create_engine(journal)

    def operations() -> list[tuple[str, str | None]]:
        with engine.connect() as sql:
            rows = sql.exec_driver_sql("SELECT operation, outcome FROM operations")
            return [(row.operation, row.outcome) for row in rows]

    def all_heard() -> float:
        """Seconds until all simulated agents are taken by who is active now."""
        fleet.ask("forget")
        return fleet.wait_for_all(AGENTS, HEARD_S)

    urls = [f"http://{cluster.controller_address}:{PORT + number}" for number in (0, 1)]
    settings = {"controller": {"journal_url": journal}, "agent": {"standby_urls": urls[1:]}}
    watchdog = watch(mode="act", settings=settings)
    assert watchdog.controller is not None
    one, other = Controller(watchdog, 0), Controller(watchdog, 1)
    one.process = watchdog.controller
    other.start()
    stack = ExitStack()
    try:
        watchdog.wait_for(other.refuses, COMES_UP_S, "the second to be the standby")
        watchdog.socket = one.socket
        with engine.begin() as sql:
            sql.exec_driver_sql(GATE)
        fleet = stack.enter_context(simulated_agents(cluster))
        heard_s = [all_heard()]
        jobs = [submit(cluster, nodes=2) for _ in range(2)]
        healthy = submit(cluster, nodes=1)
        for job in jobs:
            training(watchdog, job)
        fault = cluster.shared / "faults" / "dataloader_hang.rank3"
        with engine.connect() as gate:
            gate.exec_driver_sql("SELECT pg_advisory_lock(1)")
            for _ in jobs:  # the first of the two that meets it, and then the other; the healthy one has no rank 3
                inject(cluster, "dataloader_hang.rank3")
                watchdog.wait_for(lambda: not fault.exists(), 30, "a job to meet its fault")
            watchdog.wait_for(lambda: ("requeue_hold", "done") in operations(), 120, "a job to be requeued, held")
            one.kill()
            assert "release" not in {operation for operation, _ in operations()}
            gate.exec_driver_sql("SELECT pg_advisory_unlock(1)")
        took_s = [seconds_until(other.is_active)]
        heard_s.append(all_heard())
        one.start()
        watchdog.socket = other.socket
        done = watchdog.command("pause", "the storage is moved")
        assert done.returncode == 0, done.stderr
        watchdog.wait_for(one.refuses, COMES_UP_S, "the first to be the standby")

        other.kill()
        took_s.append(seconds_until(one.is_active))
        watchdog.socket = one.socket
        heard_s.append(all_heard())
        assert watchdog.status()["paused"]["reason"] == "the storage is moved"
        assert watchdog.command("resume").returncode == 0
        for job in jobs:
            (incident,) = [each for each in watchdog.incidents(job) if each["kind"] == "collective_hang"]
            action = ended_action(watchdog, incident["id"], 120)
            assert action["end"]["ok"], action
            training(watchdog, job)
            assert cluster.job(job)["Restarts"] == "1"
            done_once = [each["operation"] for each in action["operations"] if each["outcome"] == "done"]
            assert [done_once.count(each) for each in ("requeue_hold", "release")] == [1, 1], action
            assert len(watchdog.explain(incident["id"])["actions"]) == 1
        assert cluster.job(healthy)["Restarts"] == "0"
        record_property("takes_over_s", took_s)
        print(
            f"took over after {took_s[0]:.1f} s and {took_s[1]:.1f} s (promised on a quiet machine: {TAKES_OVER_S:g} s); "
            f"all {AGENTS} agents were heard after {', '.join(f'{each:.1f}' for each in heard_s)} s"
        )
        assert max(took_s) <= BUSY_S
    finally:
        stack.close()
        one.kill()
        other.kill()
        engine.dispose()


def seconds_until(holds: Callable[[], bool]) -> float:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < 2 * BUSY_S, "nobody takes over"
        time.sleep(0.05)
    return time.monotonic() - began
