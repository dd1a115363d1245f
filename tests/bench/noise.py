"""What a training loop on the same core feels of the agent: a fixed quantum of work, timed with and without it.

Rounds with the agent and rounds while its whole tree is stopped take turns, so that what else happens on the machine
hits both alike; each pair of rounds gives one change, and the median of the pairs is the figure.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench import agent, load
from tests.bench.figures import Figures, quantile, say
from tests.bench.process_tree import Target, read_tree

QUANTUM_S = 0.001
SHARES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
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
    """Quantiles of one round, and its mean, in seconds."""

    p50: float
    p99: float
    p999: float
    mean: float


def summarise(times_s: list[float]) -> Round:
    """One round from the times of its quanta."""
    at = {name: quantile(times_s, share) for name, share in SHARES.items()}
    return Round(mean=statistics.fmean(times_s), **at)


def change_percent(pairs: list[tuple[Round, Round]], name: str) -> float:
    """By how much the second of each pair is longer than the first: the median over the pairs."""
    return 100 * statistics.median(
        getattr(second, name) / getattr(first, name) - 1 for first, second in pairs
    )


def spread_percent(rounds: list[Round], name: str) -> float:
    """How far rounds of the same kind lie apart: the median distance from their median. No change below it means anything."""
    values = [getattr(each, name) for each in rounds]
    middle = statistics.median(values)
    return 100 * statistics.median(abs(value - middle) for value in values) / middle


def run(figures: Figures, options: Options) -> None:
    """All figures of the noise."""
    cores = sorted(os.sched_getaffinity(0))
    core, others = cores[-1], set(cores[:-1]) or set(cores)
    os.sched_setaffinity(0, others)  # and with us the load: only the agent and the quanta are on that core
    try:
        with agent.scene(options.interval_s, cpus={core}) as here:
            program = load.build(load.HERE / "quantum.c", here.load.directory / "bin" / "quantum")
            rounds_of_work = _run_quantum(program, core, "calibrate", str(QUANTUM_S))[0]
            time.sleep(options.warm_up_s)
            pairs = []
            for number in range(options.pairs):
                # The order changes from pair to pair: what drifts (heat, a neighbour) drifts in both directions.
                first_with = bool(number % 2)
                with_agent, without = None, None
                for is_with in (first_with, not first_with):
                    if is_with:
                        with_agent = _round(program, core, rounds_of_work, options.quanta)
                    else:
                        with stopped(here.agent):
                            time.sleep(SETTLE_S)
                            without = _round(program, core, rounds_of_work, options.quanta)
                        here.controller.wait_for_report(agent.START_S)
                        time.sleep(SETTLE_S)
                assert with_agent is not None and without is not None
                pairs.append((without, with_agent))
                say(
                    f"pair {number + 1} of {options.pairs}: p99.9 {without.p999 * 1e6:.0f} us without, "
                    f"{with_agent.p999 * 1e6:.0f} us with the agent"
                )
    finally:
        os.sched_setaffinity(0, set(cores))
    _report(figures, pairs)


def _report(figures: Figures, pairs: list[tuple[Round, Round]]) -> None:
    for name in SHARES:
        for place, word in enumerate(("without", "with")):
            value = statistics.median(getattr(pair[place], name) for pair in pairs)
            figures.add(f"noise.quantum_{name}_us_{word}_agent", value * 1e6, "us")
    figures.add("noise.quantum_mean_change_percent", change_percent(pairs, "mean"), "%")
    figures.add("noise.quantum_p50_change_percent", change_percent(pairs, "p50"), "%")
    figures.add("noise.quantum_p99_change_percent", change_percent(pairs, "p99"), "%")
    without = [pair[0] for pair in pairs]
    figures.add("noise.quantum_p999_spread_without_percent", spread_percent(without, "p999"), "%")
    figures.add(
        "noise.quantum_p999_change_percent", change_percent(pairs, "p999"), "%", at_most=MAX_CHANGE_PERCENT
    )


def _round(program: Path, core: int, rounds_of_work: int, quanta: int) -> Round:
    times = _run_quantum(program, core, str(rounds_of_work), str(quanta))
    return summarise([nanoseconds / 1e9 for nanoseconds in times])


def _run_quantum(program: Path, core: int, *words: str) -> list[int]:
    command = ["taskset", "--cpu-list", str(core), str(program), *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return [int(line) for line in done.stdout.split()]


@contextmanager
def stopped(target: Target) -> Iterator[None]:
    """The whole tree stands still while the block runs."""
    pids = list(read_tree(target.pid))
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
