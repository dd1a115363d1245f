"""The demo's simulated cards are in step with real processes, and agents would read them so."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm_watchdog.base import clock
from tests.integration.gpu_node import Node, read
from tests.rig import cards as demo_cards
from tests.rig.cards import SimulatedCards, describe, show, simulated_cards
from tests.rig.standin_nvml import standin
from tests.rig.standin_nvml.standin import TWO

pytestmark = pytest.mark.skipif(not standin.can_build(), reason="needs a C compiler: apt-get install gcc libc6-dev")


@dataclass
class Machine:
    """As much of a cluster as the cards want."""

    directory: Path
    nodes: tuple[str, ...] = ("n1", "n2")


@pytest.fixture
def cards(tmp_path: Path) -> Iterator[SimulatedCards]:
    with SimulatedCards(Machine(tmp_path)) as cards:  # type: ignore[arg-type]
        yield cards


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like rank 3 of a job: the second of node n2; it has a worker, as trainers do."""
    trainer = tmp_path / "trainer.py"
    trainer.write_text("import os, time\nos.fork()\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, str(trainer)],
        env={"SLURMD_NODENAME": "n2", "SLURM_LOCALID": "1", "SLURM_PROCID": "3"},
        start_new_session=True,
    )
    yield process
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def until(condition: Callable[[], bool]) -> None:
    end = clock.monotonic() + 15
    while not condition():
        assert clock.monotonic() < end
        time.sleep(0.05)


def looks(cards: SimulatedCards) -> dict[tuple[str, int], str]:
    return {(node, index): describe(card) for node, index, card in cards.cards()}


IDLE, BUSY = "52 W, 0 %, 210 MHz, 28 °C", "86 W, 100 %, 1410 MHz, 35 °C"


def test_a_card_is_busy_while_its_rank_lives(cards: SimulatedCards, rank: subprocess.Popen[bytes]) -> None:
    until(lambda: looks(cards)["n2", 1] == BUSY)
    assert set(looks(cards).values()) == {IDLE, BUSY}
    assert [card.processes[0][0] for _, _, card in cards.cards() if card.processes] == [rank.pid]
    rank.kill()
    rank.wait(10)
    until(lambda: set(looks(cards).values()) == {IDLE})


def test_a_rank_that_is_stuck_has_the_card_of_the_case_book() -> None:
    rank = demo_cards.Rank("n1", 0, 4711, 27)
    assert describe(show(TWO[0], rank, stuck=True)) == "68 W, 0 %, 1155 MHz, 28 °C"
    assert describe(show(TWO[0], rank, stuck=False)) == BUSY
    assert show(TWO[0], rank, stuck=True).processes[0][0] == 27, "by the number that its node knows"
    assert show(TWO[0], None, stuck=False).processes == ()


def test_each_nodes_agent_sees_its_own_cards(cards: SimulatedCards, tmp_path: Path) -> None:
    seen: dict[str, list[str]] = {}
    for name in ("n1", "n2"):
        scenario = cards.scenario(name)
        node = Node(tmp_path / "simulated-cards" / "libnvidia-ml.so.1", scenario)
        try:
            seen[name] = [row.uuid for row in node.until(read)]
        finally:
            node.probes.close()
        assert seen[name] == [cards.uuid(name, 0), cards.uuid(name, 1)]
        assert cards.environment(name)[standin.SCENARIO] == str(scenario.path)
    assert not set(seen["n1"]) & set(seen["n2"])


def test_without_a_compiler_there_are_no_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert simulated_cards(Machine(tmp_path)) is None  # type: ignore[arg-type]
