"""Events of nodes, and a ledger with a journal, a clock and jobs of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.controller.node_history.ledger import NodeLedger
from slurm_watchdog.controller.node_history.suspicion import DAY_S
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.model.node_events import NodeEvent
from slurm_watchdog.model.slurm import SlurmJob
from tests.builders.views import slurm_job

NOW = 1_700_000_000.0
GPU = "GPU-aaaa"


def event(days_ago: float = 0.0, node: str = "n1", kind: str = "gpu_fault", **more: Any) -> NodeEvent:
    """An event of `node`, so long before NOW."""
    at = NOW - days_ago * DAY_S
    return NodeEvent(
        **{"key": f"{kind}:{node}:{at}", "node": node, "kind": kind, "at": at, "what": f"{kind} of {node}"} | more
    )


def a_ledger(
    journal: Journal,
    jobs: Mapping[str, SlurmJob] | None = None,
    wall: Callable[[], float] = lambda: NOW,
    renamed: Mapping[str, str] | None = None,
) -> NodeLedger:
    """A ledger that knows these jobs; by default job 7 of user 1501, on two nodes."""
    known = jobs if jobs is not None else {"7": slurm_job(uid=1501, nodes=("n1", "n2"), name="train")}
    writer = JournalWriter(journal, LeftOut())
    return NodeLedger(journal, writer, known.get, wall=wall, renamed=renamed or {})
