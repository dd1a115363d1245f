"""`python -m tests.simulation --seeds 0-1000`: the deterministic simulator and its history checker, at length.

A line a violation, with the command that shows it again, and a line of figures at the end. Exit code 1 if
anything was violated.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from lab.bench.figures import Figures
from tests.simulation.checker import check
from tests.simulation.crash_points import crash_point, world_of
from tests.simulation.forks import by_story, run_story
from tests.simulation.history import history_of
from tests.simulation.recipe import recipe_of
from tests.simulation.sim import Simulation, simulation


@dataclass(frozen=True)
class Told:
    """The figures of one run."""

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
    recipe, script = (recipe_of(number), None) if option == "seeds" else crash_point(number, option)
    with simulation(recipe, script, world_of(option)) as sim:
        sim.run()
        return tell(sim, option, number, began)


def tell(sim: Simulation, option: str, number: int, began: float) -> Told:
    """Of a run that is over."""
    history = history_of(sim)
    return Told(
        option, number, sim.digest(), sim.job_hours, sim.lives, len(history.faults), len(history.actions),
        sum(run.end is not None and run.end.ok for run in history.actions), tuple(check(history)),
        time.process_time() - began,
    )  # fmt: skip


def run_crash_points(numbers: Sequence[int], option: str = "crash-points") -> list[Told]:
    """Those of one story, each a fork."""
    began = time.process_time()
    found = run_story(numbers, option, lambda sim, number: tell(sim, option, number, 0.0))
    forks_s = sum(each.cpu_s for each in found)
    return [replace(found[0], cpu_s=found[0].cpu_s + time.process_time() - began), *found[1:]] if forks_s else found


def numbers(text: str) -> range:
    """`0-1000` (the end is not in it), or one number."""
    first, dash, last = text.partition("-")
    try:
        return range(int(first), int(last) if dash else int(first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number or a range like 0-1000 is wanted, got {text!r}") from None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--seeds", type=numbers, default=range(0), help="bad days of whole clusters: 0-1000, or one")
    parser.add_argument(
        "--crash-points",
        type=numbers,
        default=range(0),
        help="one action and a controller that dies in it: 0-10000, or one",
    )
    parser.add_argument(
        "--cycles",
        type=numbers,
        default=range(0),
        help="one kill switch, deaths of the controller, and nodes that are cut off while it is out: 0-1000, or one",
    )
    parser.add_argument(
        "--ladders",
        type=numbers,
        default=range(0),
        help="crash points of other ladders than the shipped ones (signals, resubmission, cancel, drain): 0-1000, or one",
    )
    parser.add_argument(
        "--failovers",
        type=numbers,
        default=range(0),
        help="one action and two controllers that die, stop or are cut off in it, in turn: 0-10000, or one",
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--verbose", action="store_true", help="a line a run")
    options = parser.parse_args()
    work = [("seeds", [each]) for each in options.seeds]
    work += [("crash-points", each) for each in by_story(options.crash_points)]
    work += [("cycles", each) for each in by_story(options.cycles)]
    work += [("ladders", each) for each in by_story(options.ladders)]
    work += [("failovers", each) for each in by_story(options.failovers)]
    if not work:
        parser.error("give --seeds, --crash-points, --cycles, --ladders or --failovers")
    began = time.monotonic()
    alone = sum(len(some) for _, some in work) == 1
    with ProcessPoolExecutor(options.processes) as pool:
        found = report(pool.map(run_some, *zip(*work, strict=True), chunksize=1), options.verbose or alone)
    summary(found, time.monotonic() - began)
    return 1 if any(each.violations for each in found) else 0


def run_some(option: str, some: Sequence[int]) -> list[Told]:
    """One seed, or crash points of one story."""
    return run_crash_points(some, option) if len(some) > 1 else [run_one(option, each) for each in some]


def report(runs: Iterable[list[Told]], verbose: bool) -> list[Told]:
    found = []
    for told in (each for some in runs for each in some):
        found.append(told)
        if verbose or told.violations:
            print(told.line(), flush=True)
        for each in told.violations:
            print(f"  {each}  [python -m tests.simulation --{told.option} {told.number}]", flush=True)
    return found


def summary(found: list[Told], seconds: float) -> None:
    """A line of JSON a figure, as `make bench` has them."""
    figures = Figures(sys.stdout)
    hours, cpu_s = sum(each.job_hours for each in found), sum(each.cpu_s for each in found)
    name = (
        "simulation" if len({each.option for each in found}) > 1 else f"simulation.{found[0].option.replace('-', '_')}"
    )
    figures.add(f"{name}.runs", len(found), "1")
    figures.add(f"{name}.violations", sum(len(each.violations) for each in found), "1", at_most=0)
    figures.add(f"{name}.lives_of_the_controller", sum(each.lives for each in found), "1")
    figures.add(f"{name}.faults", sum(each.faults for each in found), "1")
    figures.add(f"{name}.actions", sum(each.actions for each in found), "1")
    figures.add(f"{name}.actions_succeeded", sum(each.succeeded for each in found), "1")
    figures.add(f"{name}.job_hours", hours, "h")
    figures.add(f"{name}.job_hours_per_minute_of_a_core", 60 * hours / cpu_s, "h")
    figures.add(f"{name}.seconds", seconds, "s")


if __name__ == "__main__":
    sys.exit(main())
