"""`python -m tests.simulation --seeds 0-1000`: the deterministic simulator and its history checker, at length.

A line a violation, with the command that shows it again, and a line of figures at the end. Exit code 1 if anything was violated.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from tests.simulation.checker import check, history_of
from tests.simulation.crash_points import crash_point
from tests.simulation.recipe import recipe_of
from tests.simulation.sim import simulation


@dataclass(frozen=True)
class Told:
    """What is told of one run."""

    option: str
    number: int
    digest: str
    job_hours: float
    lives: int
    faults: int
    actions: int
    succeeded: int
    violations: tuple[str, ...]
    cpu_s: float

    def line(self) -> str:
        return (
            f"{self.option} {self.number}: {self.digest[:16]} {self.job_hours:.1f} job-hours, {self.lives} lives of the controller, "
            f"{self.faults} faults, {self.actions} actions ({self.succeeded} succeeded), {len(self.violations)} violations"
        )


def run_one(option: str, number: int) -> Told:
    """One seed, or one crash point."""
    began = time.process_time()
    recipe, script = (recipe_of(number), None) if option == "seeds" else crash_point(number)
    with simulation(recipe, script) as sim:
        sim.run()
        history = history_of(sim)
        return Told(
            option, number, sim.digest(), sim.job_hours, sim.lives, len(history.faults), len(history.actions),
            sum(run.end is not None and run.end.ok for run in history.actions), tuple(check(history)),
            time.process_time() - began,
        )  # fmt: skip


def numbers(text: str) -> range:
    """`0-1000` (the end is not in it), or one number."""
    first, dash, last = text.partition("-")
    try:
        return range(int(first), int(last) if dash else int(first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number or a range like 0-1000 is wanted, got {text!r}") from None


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument(
        "--seeds", type=numbers, default=range(0), help="bad days of whole clusters: 0-1000, or one"
    )
    parser.add_argument(
        "--crash-points",
        type=numbers,
        default=range(0),
        help="one action and a controller that dies in it: 0-10000, or one",
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--verbose", action="store_true", help="a line a run")
    options = parser.parse_args()
    work = [("seeds", each) for each in options.seeds] + [
        ("crash-points", each) for each in options.crash_points
    ]
    if not work:
        parser.error("give --seeds or --crash-points")
    began = time.monotonic()
    if options.processes == 1 or len(work) == 1:
        found = report((run_one(*each) for each in work), options.verbose or len(work) == 1)
    else:
        with ProcessPoolExecutor(options.processes) as pool:
            found = report(pool.map(run_one, *zip(*work, strict=True), chunksize=1), options.verbose)
    summary(found, time.monotonic() - began)
    return 1 if any(each.violations for each in found) else 0


def report(runs: Iterable[Told], verbose: bool) -> list[Told]:
    found = []
    for told in runs:
        found.append(told)
        if verbose or told.violations:
            print(told.line(), flush=True)
        for each in told.violations:
            print(f"  {each}  [python -m tests.simulation --{told.option} {told.number}]", flush=True)
    return found


def summary(found: list[Told], seconds: float) -> None:
    hours, cpu_s = sum(each.job_hours for each in found), sum(each.cpu_s for each in found)
    actions, good = sum(each.actions for each in found), sum(each.succeeded for each in found)
    print(f"runs: {len(found)}")
    print(
        f"job-hours simulated: {hours:.0f} in {seconds:.0f} s ({60 * hours / seconds:.0f} a minute, {60 * hours / cpu_s:.0f} a minute of one core)"
    )
    print(
        f"lives of the controller: {sum(each.lives for each in found)}; faults: {sum(each.faults for each in found)}"
    )
    print(f"actions: {actions}, {good} succeeded")
    print(
        f"violations: {sum(len(each.violations) for each in found)} in {sum(bool(each.violations) for each in found)} runs"
    )


if __name__ == "__main__":
    sys.exit(main())
