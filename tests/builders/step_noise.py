"""Series of step times with noise, and the kinds of noise that training jobs have."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from slurm_watchdog.controller.state.counter_clock import KEPT_TIMES, StepHistory
from slurm_watchdog.detect.slow_job import SlowJob, detect
from slurm_watchdog.model.cluster_view import StepTime
from slurm_watchdog.model.incidents import Finding, Truth
from tests.builders.views import cluster, job


def noisy(levels: Sequence[float], seed: int, noise: float = 0.02) -> list[float]:
    chance = random.Random(seed)
    return [level * (1 + chance.gauss(0, noise)) for level in levels]


Kind = Callable[[random.Random], Callable[[int, float], float]]
"""Given a source of chance: by which factor step N, at so many seconds of the run, takes longer than its usual time."""


def _lognormal(sigma: float) -> Kind:
    return lambda chance: lambda step, at: chance.lognormvariate(0.0, sigma)


def _pareto(alpha: float, scale: float) -> Kind:
    """A tail without variance below alpha 2: one step in a thousand takes many times as long."""
    return lambda chance: lambda step, at: 1.0 + scale * (chance.paretovariate(alpha) - 1.0)


def _every(steps: int, times: float) -> Kind:
    """Evaluation, save, logging: nobody announces them."""
    return lambda chance: lambda step, at: (times if step % steps == 0 else 1.0) * (1 + chance.gauss(0, 0.02))


def _now_and_then(share: float, times: float) -> Kind:
    return lambda chance: lambda step, at: (times if chance.random() < share else 1.0) * (1 + chance.gauss(0, 0.02))


def _day(swing: float) -> Kind:
    def begin(chance: random.Random) -> Callable[[int, float], float]:
        phase = chance.random()
        wave = lambda at: 1 + swing * math.sin(2 * math.pi * (at / 86400 + phase))  # noqa: E731
        return lambda step, at: wave(at) * (1 + chance.gauss(0, 0.02))

    return begin


def _bursts(chance: random.Random) -> Callable[[int, float], float]:
    """Ten a day, of 1 to 5 minutes, ten minutes apart at least: a filesystem that others use."""
    begin, end, factor = chance.expovariate(1 / 7200.0), 0.0, 1.0

    def of(step: int, at: float) -> float:
        nonlocal begin, end, factor
        if at >= begin and end < begin:
            end, factor = begin + chance.uniform(60, 300), chance.uniform(1.1, 2.0)
        if begin <= at < end:
            return factor * (1 + chance.gauss(0, 0.02))
        if at >= end > begin:
            begin = end + 600 + chance.expovariate(1 / 7200.0)
        return 1 + chance.gauss(0, 0.02)

    return of


def _remembering(rho: float, sigma: float) -> Kind:
    def begin(chance: random.Random) -> Callable[[int, float], float]:
        value = chance.gauss(0, sigma)

        def of(step: int, at: float) -> float:
            nonlocal value
            value = rho * value + math.sqrt(1 - rho * rho) * chance.gauss(0, sigma)
            return math.exp(value)

        return of

    return begin


KINDS: dict[str, Kind] = {
    "normal_0.02": lambda chance: lambda step, at: 1 + chance.gauss(0, 0.02),
    "lognormal_0.1": _lognormal(0.1),
    "lognormal_0.2": _lognormal(0.2),
    "lognormal_0.4": _lognormal(0.4),
    "lognormal_0.8": _lognormal(0.8),
    "pareto_1.5": _pareto(1.5, 0.05),
    "pareto_3": _pareto(3.0, 0.3),
    "every_10th_3x": _every(10, 3.0),
    "every_50th_3x": _every(50, 3.0),
    "every_100th_3x": _every(100, 3.0),
    "every_third_1.3x": _every(3, 1.3),
    "a_third_1.2x": _now_and_then(0.35, 1.2),
    "half_1.2x": _now_and_then(0.5, 1.2),
    "day_3_percent": _day(0.03),
    "bursts_1_to_5_min": _bursts,
    "ar1_0.9_of_0.02": _remembering(0.9, 0.02),
    "ar1_0.9_of_0.05": _remembering(0.9, 0.05),
    "ar1_0.6_of_0.1": _remembering(0.6, 0.1),
}
"""What healthy jobs do."""


def steps_of(
    kind: str, seed: int, hours: float, step_s: float = 10.0, quantum_s: float = 0.0, slower: float = 0.0,
    slower_from_s: float = math.inf, ramp: bool = False,
) -> Iterator[StepTime]:  # fmt: skip
    """The steps of one job of that kind as its log says them, to `quantum_s`; `slower` by so much from a time on.
    `ramp`: the batch size doubles every hour for three hours, and the log says it."""
    chance = random.Random(f"{kind}/{seed}")
    factor = KINDS[kind](chance)
    at, step = 0.0, 0
    while at < hours * 3600:
        doubled = min(3, int(at / 3600)) if ramp else 0
        seconds = step_s * factor(step, at) * (1 + slower * (at >= slower_from_s)) * 2**doubled
        at, step = at + seconds, step + 1
        shown = round(seconds / quantum_s) * quantum_s if quantum_s else seconds
        yield StepTime(
            step=step, seconds=shown, at=at, logged=True, batch=256.0 * 2**doubled if ramp else None
        )  # fmt: skip


@dataclass
class SimulatedJob:
    """What the controller keeps of the steps of a job, and what slow_job says of them."""

    _history: StepHistory = field(default_factory=StepHistory)
    _times: deque[StepTime] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))

    def add(self, time: StepTime) -> None:
        self._history.add(time)
        self._times.append(time)

    def judged(self, settings: SlowJob) -> Finding:
        view = job(step_times=tuple(self._times), step_history=self._history.blocks())
        (found,) = detect(cluster(view, now=self._times[-1].at), settings)
        return found


def first_alarm(steps: Iterable[StepTime], every: int, settings: SlowJob) -> tuple[float, Finding] | None:
    """When slow_job first says that these steps have become slower, and what; it looks after each `every` of them."""
    simulated = SimulatedJob()
    for number, time in enumerate(steps, 1):
        simulated.add(time)
        if number % every == 0 and (found := simulated.judged(settings)).truth is Truth.BAD:
            return time.at, found
    return None
