"""A story of one job of eight ranks of which little is said, some of it between two reports."""

from __future__ import annotations

from random import Random
from typing import Any

from slurm_watchdog.model.incidents import Incident
from tests.builders.told import play

JOB = "771204"


NODES = ("gpu001", "gpu002")


PER_NODE = 4


LOOKS: dict[str, tuple[str, float, int, int, int]] = {
    "trains": ("R", 1.0, 97, 380, 1410), "spins": ("R", 1.0, 100, 95, 1410), "sleeps": ("S", 0.0, 0, 68, 1155),
    "computes": ("R", 1.0, 0, 68, 1155), "saves": ("R", 0.7, 0, 80, 1410),
}  # fmt: skip
"""State, cores, utilisation, watts and clock of a rank."""


class Trace:
    """A step every ten seconds; `gpus`: whether any is reported."""

    def __init__(self, log: str = "step {step} loss {loss} time {s:.2f}s", *, gpus: bool = True):
        self.log_line, self.gpus = log, gpus
        self.random, self.t, self.step, self.loss = Random(3), 0.0, 100, "2.41"
        self.lines: list[dict[str, Any]] = []
        self.doing: dict[int, str] = dict.fromkeys(range(8), "trains")
        self.gone: set[int] = set()
        self.freed: set[int] = set()
        """Ranks whose GPU is empty."""
        self.states: dict[int, str] = {}
        """Of ranks, where they are not those of what they do."""
        self.slower, self.every = 1.0, 5.0
        self.next_step_at = 10.0
        self.job("RUNNING")

    def say(self, kind: str, **fields: Any) -> None:
        self.lines.append({"t": round(self.t, 2), "kind": kind, **fields})

    def job(self, state: str) -> None:
        self.say("job", job_id=JOB, state=state, nodes=list(NODES), restarts=0, name="llama", user="ada")

    def log(self, text: str) -> None:
        self.say("log", node=NODES[0], job_id=JOB, stream="stdout", line=text)

    def go_on(self, seconds: float, *, steps: bool = False) -> None:
        until = self.t + seconds
        while self.t < until:
            now = self.t + self.every
            self.next_step_at = max(self.next_step_at, self.t)
            while steps and self.next_step_at < now:
                self.t, took_s = self.next_step_at, 10 * self.slower * self.random.uniform(0.99, 1.01)
                self.step, self.next_step_at = self.step + 1, self.t + took_s
                self.log(self.log_line.format(step=self.step, loss=self.loss, s=took_s))
            self.t = now
            for node in NODES:
                self.say("report", node=node)
            for rank in range(8):
                self._rank(rank)

    def _rank(self, rank: int) -> None:
        state, cores, util, watts, clock = LOOKS[self.doing[rank]]
        node, pid = NODES[rank // PER_NODE], 41000 + rank
        if rank not in self.gone:
            self.say(
                "proc",
                node=node,
                job_id=JOB,
                rank=rank,
                pid=pid,
                state=self.states.get(rank, state),
                cpu_s=round(cores * self.t + 50, 1),
            )
        if not self.gpus:
            return
        held = rank not in self.freed
        self.say(
            "gpu", node=node, gpu=rank % PER_NODE, uuid=f"GPU-{rank}", util=util if held else 0, sm_clock_mhz=clock,
            power_w=watts + self.random.randint(-6, 6), mem_used_mib=520 if held else 2, pids=[pid] if held else [],
        )  # fmt: skip

    def told(self) -> list[Incident]:
        found = play(self.lines, every_s=self.every).incidents
        return [each for each in found if each.fired_at is not None and each.inhibited_by is None]
