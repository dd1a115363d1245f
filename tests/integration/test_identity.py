"""MUNGE on a real cluster: nodes with addresses of their own, the munged that Slurm uses, and no secret of ours anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.demo.cluster import Cluster
from deploy.demo.stack import Watchdog

DEADLINE_S = 300.0


@pytest.fixture
def watchdog(cluster: Cluster) -> Iterator[Watchdog]:
    munge = str(Path(cluster.directory) / "munge" / "socket")
    security = {
        "mode": "munge",
        "token_file": "",
        "controller_user": "0",
        "agent_user": "0",
        "munge_socket": munge,
    }
    with Watchdog(cluster, settings={"security": security}) as watchdog:
        yield watchdog


def counted(watchdog: Watchdog, outcome: str) -> float:
    found = re.search(
        rf'slurm_watchdog_reports_total\{{outcome="{outcome}"\}} ([0-9.e+]+)', watchdog.metrics()
    )
    return float(found[1]) if found else 0.0


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

    watchdog.kill_controller()
    watchdog.start_controller()
    watchdog.wait_for(
        lambda: set(watchdog.status()["nodes"]["reporting"]) >= {"n1", "n2", "n3"},
        DEADLINE_S,
        "all agents to begin new sessions",
    )
    assert counted(watchdog, "accepted") >= 3
