"""A long run with everything that hurts, over and over: floods of the logs, a driver that hangs, checkpoints
that come and go.

Each flood begins with an error that nobody wrote before; the agent has to tell of it, every time. In the end
its memory, its descriptors and its threads have to be what they were after the first round.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from lab.bench import agent, logs
from lab.bench.figures import Figures, quantile, say
from slurm_watchdog.model.report import Report

INTERVAL_S = 1.0
ROUND_S = 30.0
FLOOD_LINES = 100_000
HANG_S = 8.0
MAX_GROWTH_MIB = 1.0
WARM_UP_ROUNDS = 2


@dataclass
class Watch:
    """What the reports have said since the last look."""

    taken: int = 0
    gaps_s: list[float] = field(default_factory=list)
    lines: set[str] = field(default_factory=set)


def run(figures: Figures, minutes: float) -> None:
    """Rounds until the minutes are over, at least one more than the warm-up."""
    found, floods, hangs_seen, rounds = 0, 0, 0, 0
    watch = Watch()
    marks: list[tuple[int, int, int]] = []
    with agent.scene(INTERVAL_S) as here:
        end = time.monotonic() + 60 * minutes
        kinds = list(logs.KINDS.values())
        while rounds <= WARM_UP_ROUNDS or time.monotonic() < end:
            began = time.monotonic()
            error = f"RuntimeError: CUDA error: an illegal memory access was encountered (soak {rounds})"
            _flood(here.load.directory / "logs" / "job.out", error, kinds[rounds % len(kinds)])
            floods += 1
            hung = _hang_for_a_while(here, watch)
            hangs_seen += hung
            while time.monotonic() - began < ROUND_S:
                _take(here, watch)
            told = any(f"(soak {rounds})" in line for line in watch.lines)
            found += told
            usages = [target.usage() for target in here.ours]
            pss_bytes = sum(usage.pss_bytes for usage in usages)
            descriptors, threads = (
                sum(usage.descriptors for usage in usages),
                sum(usage.threads for usage in usages),
            )
            marks.append((pss_bytes, descriptors, threads))
            rounds += 1
            say(
                f"round {rounds}: error {'told' if told else 'NOT told'}, hang {'seen' if hung else 'NOT seen'}, "
                f"PSS {pss_bytes / agent.MIB:.1f} MiB, {descriptors} descriptors, {threads} threads"
            )
            watch.lines.clear()
    _report(figures, marks[WARM_UP_ROUNDS:], watch)
    figures.add("soak.errors_told_ratio", found / floods, "1", at_least=1.0)
    figures.add("soak.hangs_seen_ratio", hangs_seen / floods, "1", at_least=1.0)


def _report(figures: Figures, marks: list[tuple[int, int, int]], watch: Watch) -> None:
    first, last = marks[0], marks[-1]
    figures.add("soak.rounds", len(marks), "1")
    figures.add("soak.pss_growth_mib", (last[0] - first[0]) / agent.MIB, "MiB", at_most=MAX_GROWTH_MIB)
    figures.add("soak.descriptors_growth", last[1] - first[1], "1", at_most=0)
    figures.add("soak.threads_growth", last[2] - first[2], "1", at_most=0)
    figures.add("soak.report_gap_p50_s", quantile(watch.gaps_s, 0.5), "s")
    figures.add("soak.report_gap_max_s", max(watch.gaps_s), "s", at_most=2 * INTERVAL_S)


def _flood(path: Path, error: str, kind: logs.Kind) -> None:
    """A hundred thousand lines at once behind one error. The file begins again, as when it is rotated, so that
    no disk fills."""
    lines = "".join(islice(kind(), FLOOD_LINES))
    if path.stat().st_size > 100 * agent.MIB:
        os.truncate(path, 0)
    with open(path, "a") as file:
        file.write(f"\n{error}\n{lines}\n")


def _hang_for_a_while(here: agent.Scene, watch: Watch) -> bool:
    """A call of NVML does not return for a while; whether the agent said that it could not see meanwhile, and
    saw again."""
    scenario = here.load.scenario
    before = scenario.rules
    scenario.rule(*before, "hang nvmlDeviceGetUtilizationRates")
    blind = False
    try:
        end = time.monotonic() + HANG_S
        while time.monotonic() < end:
            report = _take(here, watch)
            blind |= all(gpu.utilization_ratio is None for gpu in report.gpus)
    finally:
        scenario.rule(*before)
    for _ in range(round(ROUND_S / INTERVAL_S)):
        if blind and all(gpu.utilization_ratio is not None for gpu in _take(here, watch).gpus):
            return True
    return False


def _take(here: agent.Scene, watch: Watch) -> Report:
    report = here.controller.wait_for_report(agent.START_S)
    arrived = here.controller.arrived
    start = max(watch.taken, 1)
    watch.gaps_s += [later - earlier for earlier, later in zip(arrived[start - 1 :], arrived[start:], strict=False)]
    watch.taken = len(arrived)
    watch.lines |= {event.line for event in report.events}
    return report
