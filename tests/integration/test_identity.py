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
import json, socket, sys
from slurm_watchdog.agent.courier.munge import Munge, MungeController
from slurm_watchdog.model.report import (Report)
from slurm_watchdog.wire.codec import encode_report
from slurm_watchdog.wire.frames import REPORT

url, munge, said = sys.argv[1], sys.argv[2], [bytes.fromhex(each) for each in json.loads(sys.argv[3])]

class Tap:
    def __init__(self, inner):
        self.inner = inner
    def sendall(self, data):
        said.append(data)
        self.inner.sendall(data)
    def __getattr__(self, name):
        return getattr(self.inner, name)

class Overheard(MungeController):
    def connect(self):
        return Tap(super().connect())

controller = Overheard(url, "n1", Munge("0", munge).encode)
if not said:
    stream = controller.open(120.0)
    stream.send(REPORT, encode_report(Report(node="n1", boot_id="b", agent_id="heard", sequence=1)))
    stream.receive()
    stream.close()
again = MungeController(url, "n1", lambda payload: "").connect()
again.settimeout(120.0)
again.sendall(b"".join(said))
answer = b"".join(iter(lambda: again.recv(4096), b""))
print(json.dumps([[each.hex() for each in said], answer.decode(errors="replace")]))
"""
"""An agent of n1 that is overheard: all that it has said is said again, on the node or, if it is given, on another."""


def say_again(watchdog: Watchdog, node: str, heard: list[str]) -> tuple[list[str], str]:
    """What was heard, and how it was answered when it was said again on `node`."""
    url = f"http://{watchdog.cluster.controller_address}:{PORT}"
    munge = str(Path(watchdog.cluster.directory) / "munge" / "socket")
    argv = [sys.executable, "-c", HEARD, url, munge, json.dumps(heard)]
    said, answer = json.loads(watchdog.cluster.node_run(node, argv, DEADLINE_S, cwd=ROOT).stdout)
    return said, answer


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

    watchdog.stop_agent("n1")  # a node has one stream: its agent would begin another in the place of what is said again
    heard, answer = say_again(watchdog, "n1", [])
    assert len(heard) == 3 and "replayed" in answer, "hello, credential and report, from the node itself"
    assert counted(watchdog, "replayed") == 1
    _, answer = say_again(watchdog, "n2", heard)
    assert "replayed" in answer, answer
    watchdog.start_agent("n1")

    watchdog.kill_controller()
    watchdog.start_controller()
    watchdog.wait_for(
        lambda: set(watchdog.status()["nodes"]["reporting"]) >= {"n1", "n2", "n3"},
        DEADLINE_S,
        "all agents to begin new sessions",
    )
    assert counted(watchdog, "accepted") >= 3
