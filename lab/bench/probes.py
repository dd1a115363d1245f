"""What it costs to ask a child: the way there and back with real children, with nothing to do at the other end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lab.bench.figures import Figures, quantile
from slurm_watchdog.agent.children.children import Answer, Children
from slurm_watchdog.agent.children.requests import WorkerState
from slurm_watchdog.base import clock
from tests.builders.requests import plain, plain_request

TRIPS = 2000
COLD_TRIPS = 20
COLD_PAUSE_S = 0.2
DEADLINE_S = 10.0


def give_back(fields: Any, worker: WorkerState) -> Any:
    """The child's work: none."""
    return fields


def run(figures: Figures, trips: int = TRIPS) -> None:
    """Round trips one after the other, and with pauses in which the processor's caches forget us, as between
    two ticks."""
    probes = Children((plain(give_back),))
    try:
        walls = [_trip(probes) for _ in range(trips // 10)]  # the first one forks the child
        used, used_by_child = time.process_time(), _cpu_of_children(probes)
        walls = [_trip(probes) for _ in range(trips)]
        cpu_s = time.process_time() - used + _cpu_of_children(probes) - used_by_child
        cold = []
        for _ in range(COLD_TRIPS):
            time.sleep(COLD_PAUSE_S)
            cold.append(_trip(probes))
    finally:
        probes.close()
    figures.add("probe.round_trip_p50_us", 1e6 * quantile(walls, 0.5), "us")
    figures.add("probe.round_trip_p99_us", 1e6 * quantile(walls, 0.99), "us")
    figures.add("probe.round_trip_after_pause_p50_us", 1e6 * quantile(cold, 0.5), "us")
    figures.add("probe.round_trip_cpu_us", 1e6 * cpu_s / trips, "us")


def _trip(probes: Children) -> float:
    answers: list[Answer] = []
    began = time.perf_counter()
    request = probes.ask(
        "bench", plain_request("give_back", ["x" * 100]), DEADLINE_S, clock.monotonic(), answers.append
    )
    assert request is not None, "the child is busy, though it has nothing to do"
    probes.settle(DEADLINE_S, [request])
    took = time.perf_counter() - began
    assert answers and answers[0].error is None, answers
    return took


def _cpu_of_children(probes: Children) -> float:
    """CPU time so far of all children, from the scheduler's own nanoseconds."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in probes.pids()) / 1e9
