"""Stories of a training job, told line by line: what each rank and its GPU do, second by second, with
consistent counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from slurm_watchdog.replay.player import Outcome
from tests.builders.told import Line, play
from tests.replay.scenes import JOB

TRAINS = {"state": "R", "cpu": 1.0, "gpu": {"util": 98, "power_w": 330.0}}
SPINS = {"state": "R", "cpu": 1.0, "gpu": {"util": 100, "power_w": 105.0}}
"""In a collective: 100 % busy at a third of the power."""
WAITS = {"state": "S", "cpu": 0.01, "gpu": {"util": 0, "power_w": 68.0, "sm_clock_mhz": 1155}}
"""For its data loader, in a destructor: nothing happens."""
SAVES = {
    "state": "D", "state_age_s": 1.0, "syscall": "write", "path": "/gpfs/m4/ckpt/part", "mount": "/gpfs", "cpu": 0.15,
    "gpu": {"util": 0, "power_w": 70.0, "sm_clock_mhz": 1155},
}  # fmt: skip
COMPUTES = {"state": "R", "cpu": 0.9, "gpu": {"util": 0, "power_w": 70.0, "sm_clock_mhz": 1155}}
"""On the CPU alone: builds an index, compiles, serialises."""

Doing = dict[str, Any] | None
"""None: the process is not there."""


@dataclass
class Story:
    """One job on `nodes` x `per_node` ranks; `every_s` between reports."""

    nodes: int = 2
    per_node: int = 4
    every_s: float = 5.0
    step_s: float = 10.0
    total: int = 100_000
    seed: int = 1
    t: float = 0.0
    step: int = 0
    lines: list[Line] = field(default_factory=list)
    power: bool = True

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.cpu_s = [1000.0 + rank for rank in range(self.ranks)]
        names = [f"n{n}" for n in range(self.nodes)]
        self.say({"kind": "job", "job_id": JOB, "state": "RUNNING", "nodes": names, "restarts": 0, "name": "m4", "user": "u", "batch_host": "n0"})  # fmt: skip

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node

    def say(self, line: Line) -> None:
        self.lines.append({"t": round(self.t, 3), **line})

    def log(self, text: str) -> None:
        self.say({"kind": "log", "node": "n0", "job_id": JOB, "stream": "stdout", "line": text})

    def fault(self, name: str, rank: int | None = None) -> None:
        node = {} if rank is None else {"node": f"n{rank // self.per_node}"}
        self.say({"kind": "fault", "name": name, "job_id": JOB, **node})

    def go_on(
        self, seconds: float, doing: Callable[[int, float], Doing], between: Callable[[], None] | None = None
    ) -> None:
        """Reports for so long, in which `doing(rank, seconds since the beginning of this)` happens."""
        begin = self.t
        while self.t < begin + seconds:
            self.t += self.every_s * self.random.uniform(0.9, 1.1)
            for node in range(self.nodes):
                self.say({"kind": "report", "node": f"n{node}"})
            for rank in range(self.ranks):
                self._rank(rank, doing(rank, self.t - begin))
            if between is not None:
                between()

    def _rank(self, rank: int, doing: Doing) -> None:
        if doing is None:
            return
        node, pid = f"n{rank // self.per_node}", 280058 + rank
        told = {k: v for k, v in doing.items() if k not in ("gpu", "cpu")}
        self.cpu_s[rank] += doing["cpu"] * self.every_s
        self.say({"kind": "proc", "node": node, "job_id": JOB, "rank": rank, "pid": pid, "start": 123.0 + rank, "cpu_s": round(self.cpu_s[rank], 2), **told})  # fmt: skip
        card = {"sm_clock_mhz": 1410, "temp_c": 50, "mem_used_mib": 22377, "throttle": [], **doing["gpu"]}
        card["power_w"] = round(card["power_w"] * self.random.uniform(0.95, 1.05), 1)
        if not self.power:
            del card["power_w"]
        self.say({"kind": "gpu", "node": node, "job_id": JOB, "gpu": rank % self.per_node, "uuid": f"GPU-{rank}", "pids": [pid], **card})  # fmt: skip

    def play(self, config: str = "") -> Outcome:
        """What is found in it."""
        return play(sorted(self.lines, key=lambda line: line["t"]), config, self.every_s)

    def train(self, steps: int, slower: float = 1.0, batch: int = 512) -> None:
        for _ in range(steps):
            self.go_on(self.step_s * slower * self.random.uniform(0.98, 1.02), lambda rank, s: TRAINS)
            self.step += 1
            self.log(
                f" iteration {self.step:8d}/{self.total:8d} | elapsed time per iteration (ms): "
                f"{1000 * self.step_s * slower:.1f} | global batch size: {batch:5d} | lm loss: 2.5E+00 |"
            )


def few(odd: dict[int, Doing], others: Doing) -> Callable[[int, float], Doing]:
    """Some ranks do something else than all others."""
    return lambda rank, s: odd.get(rank, others)
