"""A training without anything but time: what its ranks do at each moment, and what agents see of it in their looks."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from msgspec import structs

from slurm_watchdog.controller.state.counter_clock import StepHistory
from slurm_watchdog.controller.state.wait_tally import WaitTally
from slurm_watchdog.model.cluster_view import StepTime
from slurm_watchdog.model.past_runs import DumpedRank, RankKey, WaitBlock, WaitDump

INTERVAL_S = 5.0
Work = Callable[[int, int, bool], float]
"""(rank, step, whether it is after the change) -> factor on the time that the rank works in this step."""


def late(ranks: Collection[int], by: float) -> Work:
    """These ranks work longer, in every step since the change."""
    return lambda rank, step, changed: 1 + by * (changed and rank in ranks)


def turns(ranks: int, by: float) -> Work:
    """Another rank does, in each step since."""
    return lambda rank, step, changed: 1 + by * (changed and step % ranks == rank)


@dataclass
class Training:
    """`ranks` that work in each step and then wait for the last of them."""

    seed: int
    work: Work
    ranks: int = 16
    per_node: int = 4
    step_s: float = 1.3
    jitter: float = 0.03
    """Of the work of one rank in one step."""
    shared_s: float = 0.1
    """Share of a step that the collective itself takes: every rank sleeps, or its GPU is busy."""
    gpus: bool = False
    host_share: float = 0.1
    """With GPUs: of the work so much is the host's, with an idle GPU; what makes it longer is, too."""
    spins: bool = False
    """Ranks that wait use the processor."""
    tally: WaitTally = field(default_factory=WaitTally)
    times: list[StepTime] = field(default_factory=list)
    ticks: dict[int, int] = field(default_factory=dict)
    ran: list[float] = field(init=False)
    """How long each rank has computed, up to the beginning of the step."""

    def run(self, before_s: float, after_s: float) -> None:
        """So long before the change, and since."""
        rng = random.Random(self.seed)
        self.ran = [0.0] * self.ranks
        now, step = 0.0, 0
        nodes = (self.ranks + self.per_node - 1) // self.per_node
        phases = [rng.random() * INTERVAL_S for _ in range(nodes)]
        looked = list(phases)
        while now < before_s + after_s:
            step += 1
            changed = now >= before_s
            base = [self.step_s * (1 - self.shared_s) * rng.lognormvariate(0, self.jitter) for _ in range(self.ranks)]
            works = [base[rank] * self.work(rank, step, changed) for rank in range(self.ranks)]
            end = now + max(works) + self.step_s * self.shared_s
            for node in range(nodes):
                while looked[node] < end:
                    self._look(node, looked[node], now, base, works)
                    looked[node] += INTERVAL_S + rng.gauss(0, 0.003)
            self.ran = [ran + work for ran, work in zip(self.ran, works, strict=True)]
            self.times.append(StepTime(step=step, seconds=end - now, at=end, logged=True))
            now = end

    def _look(self, node: int, at: float, began: float, base: list[float], works: list[float]) -> None:
        self.ticks[node] = self.ticks.get(node, 0) + 1
        for rank in range(node * self.per_node, min(self.ranks, (node + 1) * self.per_node)):
            into, work = at - began, works[rank]
            idle = float(into < work - base[rank] * (1 - self.host_share)) if self.gpus else None
            ran = at if self.spins else self.ran[rank] + min(into, work)
            due = (self.ticks[node] + rank) % 12 == 0
            _, *key = structs.astuple(self.key(rank))
            self.tally.note(tuple(key), rank, at, ran if due else None, 0.0, None if idle is None else (idle, 1))

    def key(self, rank: int) -> RankKey:
        return RankKey(rank, f"n{rank // self.per_node + 1}", 100 + rank, 5)

    def blocks(self) -> tuple[WaitBlock, ...]:
        return self.tally.blocks()

    def history(self, at: float) -> tuple[StepTime, ...]:
        """The blocks of the run's steps up to a moment."""
        history = StepHistory()
        for each in self.times:
            if each.at <= at:
                history.add(each)
        return history.blocks()

    def dumps(self, at: float, count: int = 12, *, others_wait: bool = True) -> tuple[WaitDump, ...]:
        """Dumps since `at` in which the others were found asleep now and then."""
        return tuple(
            WaitDump(
                at=at + 60 * number,
                ranks=tuple(
                    DumpedRank(
                        key=self.key(rank), asleep=(rank + number) % 6 == 0,
                        with_peers=others_wait and (rank + number) % 6 == 0, call="augment (data.py:31)",
                    )
                    for rank in range(self.ranks)
                ),
            )
            for number in range(count)
        )  # fmt: skip
