"""The ledger of nodes after two years of a cluster of 10,000: its size on disk, and the processor's time for each question.

Every node fails 6.5 times in 1,000 days (as in tests/simulation/lemons.py); what is older than two years is dropped.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lab.bench.figures import Figures, say
from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.controller.node_history.ledger import KEPT_S, NodeLedger
from slurm_watchdog.controller.node_history.suspicion import DAY_S
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.model.node_events import NodeEvent

NODES, RATE_PER_DAY, NOW = 10_000, 6.5 / 1000, 1_700_000_000.0
KINDS = ("gpu_fault", "node_down", "collective_hang", "dead_rank", "drained", "link_down")


def run(figures: Figures) -> None:
    """All figures."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal.sqlite"
        journal = Journal(f"sqlite:///{path}")
        empty = path.stat().st_size
        events = list(_events())
        with journal.together():
            for event in events:
                journal.node_events.save(event)
        journal.close()
        figures.add("ledger.events", len(events), "events")
        figures.add("ledger.bytes_an_event", (path.stat().st_size - empty) / len(events), "B", at_most=1000.0)
        figures.add("ledger.size", (path.stat().st_size - empty) / 2**20, "MiB", at_most=100.0)
        _ask(figures, Journal(f"sqlite:///{path}"))


def _ask(figures: Figures, journal: Journal) -> None:
    opened: list[NodeLedger] = []

    def start() -> None:
        opened.append(
            NodeLedger(
                journal,
                JournalWriter(journal, LeftOut()),
                lambda job_id: None,
                wall=lambda: NOW,
                our_reason="x",
                renamed={},
            )
        )

    figures.add("ledger.start", _took(start), "s", at_most=2.0)
    ledger = opened[0]
    node = max(ledger.suspicions(), key=lambda each: each.score).node
    one = NodeEvent(key="new", node=node, kind="gpu_fault", at=NOW, what="one more")
    figures.add("ledger.record", _took(lambda: ledger.record(one)), "s", at_most=0.1)
    figures.add("ledger.suspicions_after_an_event", _took(ledger.suspicions), "s", at_most=0.5)
    figures.add("ledger.suspicions", min(_took(ledger.suspicions) for _ in range(5)), "s", at_most=0.2)
    figures.add("ledger.suspects_of_a_tick", min(_took(ledger.suspects) for _ in range(5)), "s", at_most=0.001)
    figures.add("ledger.history_of_a_node", _took(lambda: ledger.history(node)), "s", at_most=0.1)
    figures.add("ledger.in_memory", len(list(ledger.events())), "events")
    say(f"{node} is the most suspicious of {NODES}")
    journal.close()


def _took(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _events() -> list[NodeEvent]:
    chance = random.Random(1)
    days = KEPT_S / DAY_S
    found = []
    for number in range(round(NODES * days * RATE_PER_DAY)):
        node, kind = f"n{chance.randrange(NODES):05d}", chance.choice(KINDS)
        found.append(
            NodeEvent(
                key=f"incident:{number:012x}:{node}", node=node, kind=kind, at=NOW - chance.random() * KEPT_S,
                what=f"GPU {number % 8} of {node}: its memory had an error that could not be corrected " * 2,
                place=f"GPU-{node}-{number % 8}" if kind == "gpu_fault" else "", job_id=str(number),
                chain=f"{1000 + number % 50}/train-{number % 7}", incident_id=f"{number:012x}",
            )
        )  # fmt: skip
    return found
