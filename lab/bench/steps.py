"""How often `slow_job` cries wolf on the step times of healthy jobs, and how soon it finds a real change. Simulated."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import median

from lab.bench.figures import Figures, say
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.detect.slow_job import SlowJob
from slurm_watchdog.model.cluster_view import StepTime
from tests.builders.step_noise import KINDS, first_alarm, steps_of

JOB_HOURS = 20.0
LOOK_EVERY = 7
"""Steps between two looks: the detector may be asked after each, and one in seven takes a seventh of the time."""
SLOWER_AT_S = 4 * 3600.0


class Healthy(Struct, kw_only=False):
    """Jobs that must raise no alarm."""

    kind: str
    step_s: float = 10.0
    quantum_s: float = 0.0
    ramp: bool = False

    @property
    def name(self) -> str:
        digits = f"_rounded_to_{self.quantum_s:g}s" if self.quantum_s else ""
        return f"{self.kind}_{self.step_s:g}s{digits}{'_batch_ramp' if self.ramp else ''}"

    def steps(self, seed: int, hours: float) -> Iterator[StepTime]:
        return steps_of(self.kind, seed, hours, self.step_s, self.quantum_s, ramp=self.ramp)


class Slower(Struct, kw_only=False):
    """A job that becomes slower, by which share, and within how many minutes nine of ten have to be found."""

    kind: str
    slower: float
    within_min: float
    step_s: float = 10.0


HEALTHY = (
    *(Healthy(kind) for kind in KINDS),
    *(Healthy(kind, 60.0) for kind in ("normal_0.02", "lognormal_0.4", "day_3_percent", "ar1_0.9_of_0.02")),
    *(Healthy(kind, 1.0) for kind in ("bursts_1_to_5_min", "day_3_percent")),
    Healthy("day_3_percent", 1.49, 1.0),
    Healthy("day_3_percent", 10.5, 1.0),
    Healthy("normal_0.02", 10.5, 1.0),
    Healthy("day_3_percent", 1.05, 0.1),
    Healthy("lognormal_0.2", 2.0, 0.1),
    Healthy("normal_0.02", ramp=True),
    Healthy("lognormal_0.2", ramp=True),
)
SLOWER = (
    Slower("normal_0.02", 0.05, 20.0),
    Slower("normal_0.02", 0.05, 60.0, step_s=60.0),
    Slower("normal_0.02", 0.05, 25.0, step_s=1.0),
    Slower("lognormal_0.1", 0.10, 60.0),
    Slower("lognormal_0.2", 0.20, 90.0),
    Slower("lognormal_0.4", 0.20, 240.0),
    Slower("every_10th_3x", 0.05, 25.0),
    Slower("a_third_1.2x", 0.10, 120.0),
    Slower("ar1_0.9_of_0.02", 0.10, 120.0),
    Slower("bursts_1_to_5_min", 0.10, 180.0),
)


def run(figures: Figures, hours: float = 1000.0, jobs: int = 60) -> None:
    """False alarms in so many hours of each kind of noise; the delay of the alarm in so many jobs of each change."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for case in HEALTHY:
            seeds = range(max(1, round(hours / JOB_HOURS)))
            alarms = [each for each in pool.map(partial(_alarm, case), seeds, chunksize=4) if each]
            for each in alarms[:3]:
                say(f"{case.name}: {each}")
            figures.add(f"slow_job.false_alarms.{case.name}", len(alarms), "alarms", at_most=0)
        for change in SLOWER:
            delays = sorted(pool.map(partial(_delay_min, change), range(jobs), chunksize=4))
            name = f"slow_job.found.{change.kind}_{change.step_s:g}s_{change.slower * 100:g}_percent"
            figures.add(f"{name}.median", median(delays), "min")
            figures.add(f"{name}.nine_of_ten", delays[round(jobs * 0.9) - 1], "min", at_most=change.within_min)


def _alarm(case: Healthy, seed: int) -> str | None:
    found = first_alarm(case.steps(seed, JOB_HOURS), LOOK_EVERY, SlowJob())
    return None if found is None else f"seed {seed} after {found[0] / 3600:.1f} h: {found[1].summary}"


def _delay_min(change: Slower, seed: int) -> float:
    steps = steps_of(
        change.kind, seed, 12.0, change.step_s, slower=change.slower, slower_from_s=SLOWER_AT_S
    )  # fmt: skip
    found = first_alarm(steps, LOOK_EVERY, SlowJob())
    return float("inf") if found is None else (found[0] - SLOWER_AT_S) / 60
