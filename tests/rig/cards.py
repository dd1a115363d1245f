"""Simulated cards: what the demo's machine has instead of GPUs. The agents' NVML is the stand-in library of
tests/rig/standin_nvml.

Each node has its own scenario, kept in step with what really happens to its ranks: a rank that lives makes
its card busy (100 %, 1410 MHz, 86 W); one that waits in state D for a filesystem leaves it idle at its clock
(0 %, 1155 MHz, 68 W), as in case 1 of the case book. The process lists name the ranks by the numbers that
their node knows them by.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.rig.cluster import Cluster
from tests.rig.process_facts import all_pids, stat_fields
from tests.rig.standin_nvml import standin
from tests.rig.standin_nvml.standin import BUSY_CARD, FROZEN_CARD, HEALTHY, Gpu, Scenario

LOOK_EVERY_S = 0.25
USED_BYTES, IDLE_BYTES, TOTAL_BYTES = 72 * 1024**3, 512 * 1024**2, 80 * 1024**3
IDLE_CARD = {**FROZEN_CARD, "sm_clock": 210, "power": 52_000, "memory": (IDLE_BYTES, TOTAL_BYTES)}
"""A card without a process: an A100 goes down to 210 MHz then."""


@dataclass(frozen=True)
class Rank:
    """A process of the trainer that holds a rank."""

    node: str
    local_rank: int
    pid: int
    """As the host numbers it."""
    node_pid: int
    """As its node does, and so its agent."""


class SimulatedCards:
    """The cards of all nodes, from start to close. `environment` makes a node's agent see its own."""

    def __init__(self, cluster: Cluster, each: int = 2):
        """Builds the library. Raises OSError or subprocess.CalledProcessError where that is not possible."""
        directory = Path(cluster.directory) / "simulated-cards"
        directory.mkdir(mode=0o755, exist_ok=True)
        self._library = standin.build(directory)
        self._scenarios = {
            node: Scenario(directory / node, gpus=tuple(_card(node, index) for index in range(each)))
            for node in cluster.nodes
        }
        self._seen: dict[tuple[int, str, str], Rank | None] = {}
        self._waiting: set[Rank] = set()
        """Ranks that were in state D at the last look: a moment of it idles no card."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="simulated-cards", daemon=True)

    def __enter__(self) -> SimulatedCards:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    def environment(self, node: str) -> dict[str, str]:
        """What the agent of `node` needs in its environment."""
        return standin.environment_of(self._library, self._scenarios[node].path)

    def scenario(self, node: str) -> Scenario:
        """What the library answers on `node`."""
        return self._scenarios[node]

    def uuid(self, node: str, index: int) -> str:
        """UUID of one card, as agents and incidents call it."""
        return self._scenarios[node].gpus[index].uuid

    def cards(self) -> list[tuple[str, int, Gpu]]:
        """(node, index, what it says now) of every card."""
        return [(node, i, gpu) for node, it in self._scenarios.items() for i, gpu in enumerate(it.gpus)]

    # ------------------------------------------------------------------------------------ keeping step

    def _follow(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            with contextlib.suppress(OSError):  # a process, or the whole demo, is gone in between
                self._look()

    def _look(self) -> None:
        ranks, seen = {}, {}
        for pid in all_pids():
            fields = stat_fields(pid)
            if fields is None or fields[0] in "ZX":
                continue
            key = (pid, fields[19], _comm(pid))
            # Once a process: environment and command line are not to be read again when it is stuck.
            seen[key] = self._seen[key] if key in self._seen else read_rank(pid, int(fields[1]))
            rank = seen[key]
            if rank is not None:
                stuck = fields[0] == "D" and rank in self._waiting
                (self._waiting.add if fields[0] == "D" else self._waiting.discard)(rank)
                ranks[rank.node, rank.local_rank] = (rank, stuck)
        self._seen = seen
        self._waiting &= {rank for rank, _ in ranks.values()}
        for node, scenario in self._scenarios.items():
            gpus = tuple(show(gpu, *ranks.get((node, i), (None, False))) for i, gpu in enumerate(scenario.gpus))
            if gpus != scenario.gpus:
                scenario.only(gpus)


def show(card: Gpu, rank: Rank | None, stuck: bool) -> Gpu:
    """The card as it is with this rank, `stuck` in a filesystem or not; None: nobody uses it."""
    if rank is None:
        return replace(card, **IDLE_CARD, processes=())
    values: dict[str, Any] = dict(FROZEN_CARD if stuck else BUSY_CARD)
    return replace(
        card,
        **values,
        memory=(USED_BYTES, TOTAL_BYTES),
        processes=((rank.node_pid, USED_BYTES - IDLE_BYTES),),
    )


def read_rank(pid: int, parent: int) -> Rank | None:
    """Which rank this process is: by its environment and command line; None if it is none, or a worker of one."""
    if not _is_trainer(pid) or _is_trainer(parent):
        return None
    environ = dict(entry.split("=", 1) for entry in _read(pid, "environ").split("\0") if "=" in entry)
    node, local = environ.get("SLURMD_NODENAME"), environ.get("SLURM_LOCALID")
    numbers = [line.split() for line in _read(pid, "status").splitlines() if line.startswith("NSpid:")]
    if node is None or local is None or not numbers:
        return None
    return Rank(node, int(local), pid, int(numbers[0][-1]))


def _is_trainer(pid: int) -> bool:
    words = _read(pid, "cmdline").split("\0")
    return len(words) > 1 and "python" in words[0] and words[1].endswith("trainer.py")


def _comm(pid: int) -> str:
    return _read(pid, "comm").strip()


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def _card(node: str, index: int) -> Gpu:
    """A card of its own: name, slot, minor and place in NVML's list all differ, as they do on real nodes."""
    name = uuid.uuid5(uuid.NAMESPACE_DNS, f"{index}.{node}.demo.invalid")
    fields: dict[str, Any] = {**HEALTHY, **IDLE_CARD}
    return Gpu(
        uuid=f"GPU-{name}",
        bus=f"00000000:{(0x07, 0x0F, 0x47, 0x4E)[index % 4]:02X}:00.0",
        minor=(index + 2) % 4,
        **fields,
    )


def describe(card: Gpu) -> str:
    """What nvidia-smi would print of it, in the order of the case book."""
    return f"{card.power / 1000:.0f} W, {card.utilization} %, {card.sm_clock} MHz, {card.temperature} °C"


def simulated_cards(cluster: Cluster) -> SimulatedCards | None:
    """The cards, or None on a machine that cannot compile the library."""
    if not standin.can_build():
        return None
    try:
        return SimulatedCards(cluster)
    except (OSError, subprocess.SubprocessError):
        return None
