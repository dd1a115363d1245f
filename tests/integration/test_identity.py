"""MUNGE on a real cluster: nodes with addresses of their own, the munged that Slurm uses, and no secret of
ours anywhere."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rig.cluster import Cluster
from tests.rig.stack import PORT, ROOT, Watchdog

DEADLINE_S = 300.0


@pytest.fixture
def watchdog(cluster: Cluster) -> Iterator[Watchdog]:
    with Watchdog(cluster) as watchdog:
        yield watchdog


def counted(watchdog: Watchdog, outcome: str) -> float:
    found = re.search(rf'slurm_watchdog_reports_total\{{outcome="{outcome}"\}} ([0-9.e+]+)', watchdog.metrics())
    return float(found[1]) if found else 0.0


HEARD = """
import json, sys
from slurm_watchdog.agent.delivery.munge_connection import Munge, ProvenConnection
from slurm_watchdog.wire.http_client import Connection
from slurm_watchdog.model.report import (Report)
from slurm_watchdog.wire.codec import encode_report

url, munge, said = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

inner = Connection(url, 10**6)

class Tap:
    def post(self, path, body, headers, connect_s, answer_s):
        said.append((path, body.decode(), headers))
        return inner.post(path, body, headers, connect_s, answer_s)
    def post_kept(self, path, body, headers, answer_s):
        said.append((path, body.decode(), headers))
        return inner.post_kept(path, body, headers, answer_s)
    def close(self):
        return

if not said:
    report = encode_report(Report(node="n1", boot_id="b", agent_id="heard", sequence=1))
    assert ProvenConnection(Tap(), "n1", Munge("0", munge).encode).post("/v1/report", report, {}, 60.0, 120.0).status == 200
    said = [each for each in said if "Authorization" in each[2]]
answers = [Connection(url, 10**6).post(path, body.encode(), headers, 60.0, 120.0) for path, body, headers in said]
print(json.dumps([said, [(answer.status, answer.body.decode()) for answer in answers]]))
"""
"""An agent of n1 that is overheard: its session and its report are said again, on the node or, if they are
given, on another."""


def say_again(
    watchdog: Watchdog, node: str, heard: list[list[object]]
) -> tuple[list[list[object]], list[tuple[int, str]]]:
    """What was heard, and how it was answered when it was said again on `node`."""
    url = f"http://{watchdog.cluster.controller_address}:{PORT}"
    munge = str(Path(watchdog.cluster.directory) / "munge" / "socket")
    argv = [sys.executable, "-c", HEARD, url, munge, json.dumps(heard)]
    said, answers = json.loads(watchdog.cluster.node_run(node, argv, DEADLINE_S, cwd=ROOT).stdout)
    return said, [(status, body) for status, body in answers]


def test_nodes_prove_themselves_by_munge_and_their_address_and_again_to_a_controller_that_is_new(
    watchdog: Watchdog,
) -> None:
    # Every agent reports by now: that is what `with Watchdog` waits for.
    assert counted(watchdog, "accepted") >= 3
    assert counted(watchdog, "unauthorized") == 0

    watchdog.stop_agent("n3")
    watchdog._agent_env = lambda node: {"SLURMD_NODENAME": "n1"}
    watchdog.start_agent("n3")
    watchdog.wait_for(
        lambda: counted(watchdog, "wrong_node") >= 1,
        DEADLINE_S,
        "the agent of n3, which says that it is n1, to be refused",
    )
    assert "is not the address that Slurm has for n1" in watchdog.log_tail("agent-n3")
    watchdog.stop_agent("n3")
    watchdog._agent_env = None
    watchdog.start_agent("n3")

    watchdog.stop_agent(
        "n1"
    )  # a node has one session: its agent would begin another in the place of what is said again
    heard, answers = say_again(watchdog, "n1", [])
    assert [path for path, *_ in heard] == ["/v1/session", "/v1/report"]
    assert [status for status, _ in answers] == [401, 401], answers
    assert counted(watchdog, "replayed") == 2, "the credential and the report, from the node itself"
    _, answers = say_again(watchdog, "n2", heard[1:])
    assert answers[0][0] == 403 and "this session is not of" in answers[0][1], answers
    watchdog.start_agent("n1")

    watchdog.kill_controller()
    watchdog.start_controller()
    watchdog.wait_for(
        lambda: set(watchdog.status()["nodes"]["reporting"]) >= {"n1", "n2", "n3"},
        DEADLINE_S,
        "all agents to begin new sessions",
    )
    assert counted(watchdog, "accepted") >= 3
