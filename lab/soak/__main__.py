"""`python -m lab.soak --minutes 120`: random faults on a real Slurm with a watchdog that acts, and the
history checker (root).

A line of JSON a figure on standard output, all else on standard error; exit code 1 if anything was violated.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from lab.bench.figures import Figures, take_standard_output
from lab.soak.stage import Stage, say
from lab.soak.story import Told, crash_points, soak
from tests.rig.debian_packages import ensure_packages, why_impossible


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.soak", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="how long things go wrong (default 30)")
    parser.add_argument(
        "--crash-points",
        type=int,
        metavar="N",
        help="instead: the controller is killed N times in the middle of an action",
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="what is drawn; the machine's own timing is not part of it"
    )
    options = parser.parse_args()
    figures = Figures(take_standard_output())
    ensure_packages()
    if (reason := why_impossible()) is not None:
        say(f"no cluster can be made here: {reason}")
        return 2
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    say(f"seed {seed}")
    began = time.monotonic()
    with Stage(random.Random(seed)) as stage:
        told = crash_points(stage, options.crash_points) if options.crash_points else soak(stage, options.minutes)
        if told.violations:
            _tell_more(stage, told)
    report(figures, told, seed, time.monotonic() - began)
    return 1 if figures.missed else 0


def report(figures: Figures, told: Told, seed: int, seconds: float) -> None:
    history = told.history
    figures.add("soak.seed", seed, "1")
    figures.add("soak.seconds", seconds, "s")
    for name, count in sorted(told.faults.items()):
        figures.add(f"soak.faults.{name}", count, "1")
    figures.add("soak.controller_deaths", sum(deed.what == "controller killed" for deed in history.deeds), "1")
    figures.add(
        "soak.controller_deaths_in_actions",
        sum(deed.what == "controller killed" and deed.detail != "0" for deed in history.deeds), "1",
    )  # fmt: skip
    figures.add("soak.runs_of_jobs", len(history.runs), "1")
    figures.add("soak.actions", len(history.actions), "1")
    figures.add("soak.actions_succeeded", sum(run.end is not None and run.end.ok for run in history.actions), "1")
    figures.add("soak.requests_that_changed_something", len(history.requests), "1")
    if history.memory:
        figures.add("soak.controller_rss_max_mib", max(m for _, m in history.memory) / 2**20, "MiB")
    figures.add("soak.violations", len(told.violations), "1", at_most=0)


def _tell_more(stage: Stage, told: Told) -> None:
    for each in told.violations:
        say(f"VIOLATION {each}")
    for deed in stage.deeds[-400:]:
        say(f"{deed.t:.1f} {deed.what} {deed.job_id} {deed.restarts} {deed.detail}")
    for request in told.history.requests:
        say(
            f"{request.done:.1f} request {request.words} {request.fate} {request.code} {request.before} -> {request.after}"
        )
    for run in told.history.actions:
        say(
            f"{run.decision.decided_at:.1f} {run.decision.id} {run.decision.by} {run.decision.fence} -> {run.end and run.end.detail}"
        )


if __name__ == "__main__":
    sys.exit(main())
