"""What a training loop on the same core feels of the agent: a fixed quantum of work, timed with and without it.

Rounds with the agent and rounds while its whole tree is stopped take turns, so that what else happens on the
machine hits both alike. The quanta of all rounds with the agent are compared with those of all rounds without
it, and how much chance there is in the result is a figure, too.
"""

from __future__ import annotations

import heapq
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.bench import agent, load
from lab.bench.figures import Figures, quantile, say
from lab.bench.process_tree import favoured

QUANTUM_S = 0.001
KEPT_SHARE = 0.02
REDRAWN = 200
MAX_CHANGE_PERCENT = 1.0
"""What the project promises at p99.9."""
SETTLE_S = 2.0


@dataclass(frozen=True)
class Options:
    """How many pairs of rounds, of how many quanta each."""

    pairs: int = 12
    quanta: int = 10_000
    interval_s: float = 5.0
    warm_up_s: float = 15.0


@dataclass(frozen=True)
class Round:
    """What is kept of one round, in seconds."""

    quanta: int
    mean: float
    p50: float
    worst: tuple[float, ...]
    """The longest KEPT_SHARE of all, the longest first: enough for any quantile above."""


def summarise(times_s: list[float]) -> Round:
    """One round from the times of its quanta."""
    kept = sorted(times_s, reverse=True)[: max(1, round(KEPT_SHARE * len(times_s)))]
    return Round(len(times_s), statistics.fmean(times_s), quantile(times_s, 0.5), tuple(kept))


def pooled(rounds: Sequence[Round], share: float) -> float:
    """The quantile `share`, above 1 - KEPT_SHARE, of the quanta of all rounds together."""
    above = int((1 - share) * sum(each.quanta for each in rounds) + 1e-9)
    return heapq.nlargest(above + 1, (time for each in rounds for time in each.worst))[-1]


def change_percent(pairs: Sequence[tuple[Round, Round]], share: float) -> float:
    """By how much the quantile of the second of each pair lies above that of the first."""
    first, second = ([pair[place] for pair in pairs] for place in (0, 1))
    return 100 * (pooled(second, share) / pooled(first, share) - 1)


def uncertainty_percent(pairs: Sequence[tuple[Round, Round]], share: float) -> float:
    """How far that change would vary if all were done again: the standard deviation over pairs drawn again
    (bootstrap)."""
    chance = random.Random(1)
    changes = [change_percent(chance.choices(pairs, k=len(pairs)), share) for _ in range(REDRAWN)]
    return statistics.pstdev(changes)


def run(figures: Figures, options: Options) -> None:
    """All figures of the noise."""
    cores = sorted(os.sched_getaffinity(0))
    core, others = cores[-1], set(cores[:-1]) or set(cores)
    os.sched_setaffinity(0, others)  # and with us the load: only the agent and the quanta are on that core
    try:
        with agent.scene(options.interval_s, cpus={core}) as here:
            program = load.build(load.HERE / "quantum.c", here.load.directory / "bin" / "quantum")
            rounds_of_work = Core(program, core, None).run("calibrate", str(QUANTUM_S))[0]
            time.sleep(options.warm_up_s)
            with favoured("noise", here.pids()) as group:
                if group is None:
                    say("no processor can be had for the agent and the quanta alone: others are felt, too")
                pairs = list(_measure_pairs(here, Core(program, core, group), rounds_of_work, options))
    finally:
        os.sched_setaffinity(0, set(cores))
    _report(figures, pairs)


@dataclass(frozen=True)
class Core:
    """Where quanta are worked off: with which program, on which processor, in which group."""

    program: Path
    number: int
    group: Path | None

    def run(self, *words: str) -> list[int]:
        """The numbers that the program prints."""
        command = ["taskset", "--cpu-list", str(self.number), str(self.program), *words]
        if self.group is not None:
            command = ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(self.group), *command]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        return [int(line) for line in done.stdout.split()]

    def round(self, rounds_of_work: int, quanta: int) -> Round:
        """So many quanta, one after the other."""
        return summarise([each / 1e9 for each in self.run(str(rounds_of_work), str(quanta))])


def _measure_pairs(
    here: agent.Scene, core: Core, rounds_of_work: int, options: Options
) -> Iterator[tuple[Round, Round]]:
    """(without, with) the agent, one pair after the other."""
    for number in range(options.pairs):
        rounds: dict[bool, Round] = {}
        # The order changes from pair to pair: what drifts (heat, a neighbour) drifts in both directions.
        for is_with in (True, False) if number % 2 else (False, True):
            if is_with:
                rounds[is_with] = core.round(rounds_of_work, options.quanta)
                continue
            with stopped(here.pids()):
                time.sleep(SETTLE_S)
                rounds[is_with] = core.round(rounds_of_work, options.quanta)
            here.controller.wait_for_report(agent.START_S)
            time.sleep(SETTLE_S)
        p999 = {is_with: pooled([each], 0.999) * 1e6 for is_with, each in rounds.items()}
        say(f"pair {number + 1} of {options.pairs}: p99.9 {p999[False]:.0f} us without, {p999[True]:.0f} us with")
        yield rounds[False], rounds[True]


def _report(figures: Figures, pairs: list[tuple[Round, Round]]) -> None:
    for place, word in enumerate(("without", "with")):
        rounds = [pair[place] for pair in pairs]
        middle = statistics.median(each.p50 for each in rounds)
        figures.add(f"noise.quantum_p50_us_{word}_agent", middle * 1e6, "us")
        figures.add(f"noise.quantum_p99_us_{word}_agent", pooled(rounds, 0.99) * 1e6, "us")
        figures.add(f"noise.quantum_p999_us_{word}_agent", pooled(rounds, 0.999) * 1e6, "us")
    mean = 100 * statistics.median(second.mean / first.mean - 1 for first, second in pairs)
    figures.add("noise.quantum_mean_change_percent", mean, "%")
    figures.add("noise.quantum_p99_change_percent", change_percent(pairs, 0.99), "%")
    change, doubt = change_percent(pairs, 0.999), uncertainty_percent(pairs, 0.999)
    figures.add("noise.quantum_p999_change_uncertainty_percent", doubt, "%")
    figures.add(
        "noise.quantum_p999_change_percent",
        change,
        "%",
        at_most=MAX_CHANGE_PERCENT,
        doubtful=abs(change - MAX_CHANGE_PERCENT) < doubt,
    )


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """The agent, with all its children, is stopped while the block runs."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in reversed(pids):
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                pass
