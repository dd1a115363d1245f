"""`python -m lab.live`: real PyTorch jobs on a real Slurm, broken and healthy. Figures as JSON lines on
standard output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

from lab.bench.figures import Figures, take_standard_output
from lab.live.cases import DIAGNOSIS_S, FAULTS, HEALTHY, SAVE_INTERVAL
from lab.live.nodes import run_nodes
from lab.live.run import HARM, Result, run_fault, run_healthy, tell
from lab.live.stage import ACTING, Stage, python_with_torch, why_not_for_jobs
from tests.rig.cluster import Cluster
from tests.rig.debian_packages import why_impossible
from tests.rig.stack import Watchdog

AT_ONCE = 3
"""Trainings at the same time: their ranks mostly sleep."""
CPUS = 16
NEVER = 1e9

Work = tuple[str, Callable[[Stage], Result]]


def plan(names: list[str], *, act: bool) -> list[Work]:
    """What is to be done on one stage: (name, work), those with one of `names` in their name."""
    found: list[Work] = []
    for fault in FAULTS:
        if fault.acts or not act:
            for launcher in fault.launchers:
                name = f"{'act.' if act else ''}{fault.name}.{launcher}"
                found.append((name, lambda stage, f=fault, by=launcher: run_fault(stage, f, by, act=act)))
    if not act:
        for thing in HEALTHY:
            for launcher in thing.launchers:
                name = f"healthy.{thing.name}.{launcher}"
                found.append((name, lambda stage, t=thing, by=launcher: run_healthy(stage, t, by)))
    return [(name, work) for name, work in found if not names or any(each in name for each in names)]


def perform(works: list[Work], python: str, mode: str, at_once: int, done: Callable[[Result], None]) -> None:
    """Does them on a stage of their own, some at a time; `done` gets each result as it comes, also of a case
    that broke down."""
    if not works:
        return
    with (
        Cluster(nodes=2, cpus=CPUS) as cluster,
        Watchdog(cluster, mode=mode, shipped=True, settings=ACTING if mode == "act" else None) as watchdog,
    ):
        for node in cluster.nodes:
            cluster.node_local(node).chmod(0o1777)
        stage = Stage(cluster, watchdog, python)

        def one(work: Work) -> Result:
            try:
                return work[1](stage)
            except Exception as error:
                tell(f"{work[0]}: broke down: {error}")
                return Result(work[0], bound_s=0.0, false_incidents=[f"broke down: {type(error).__name__}"])

        with ThreadPoolExecutor(at_once) as pool:
            futures = [pool.submit(one, work) for work in works]
            try:
                for future in as_completed(futures):
                    done(future.result())
            except BaseException:  # Ctrl-C, SIGTERM: nobody waits for the end of what runs
                stage.closing = True
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def write(figures: Figures, result: Result) -> None:
    """The figures of one result, with their bounds. What was never said is a very large number of seconds."""
    name = f"live.{result.name}"

    def seconds(what: str, value: float | None, at_most: float) -> None:
        figures.add(f"{name}.{what}", NEVER if value is None else value, "s", at_most=at_most)

    if result.bound_s is not None:
        seconds("verdict_s", result.verdict_s, result.bound_s)
        figures.add(f"{name}.culprit_right", float(result.culprit_right), "", at_least=1)
        if result.asks_ranks:
            seconds("diagnosis_s", result.diagnosis_s, DIAGNOSIS_S)
            figures.add(f"{name}.diagnosis_right", float(result.diagnosis_right), "", at_least=1)
    if result.step_ratio is not None:
        figures.add(f"{name}.step_time_ratio", result.step_ratio, "", at_most=HARM)
    if result.resumed is not None:
        figures.add(f"{name}.resumed", float(result.resumed), "", at_least=1)
        lost = NEVER if result.steps_lost is None else result.steps_lost
        figures.add(f"{name}.steps_lost", lost, "steps", at_most=SAVE_INTERVAL)
    elif not result.name.startswith("act."):
        figures.add(f"{name}.acted", float(result.acted), "", at_most=0)
    figures.add(f"{name}.false_incidents", float(len(result.false_incidents)), "", at_most=0)
    if result.asks_ranks:
        figures.add(f"{name}.left_stopped", float(len(result.stopped)), "", at_most=0)


def main() -> int:
    """Returns 0 if every bound holds, 1 if not, 2 where nothing could be tried."""
    parser = argparse.ArgumentParser(prog="make live", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names of cases, such as lock.srun or healthy (default: all)")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="trainings at the same time (default %(default)s)")
    options = parser.parse_args()
    python = python_with_torch()
    reason = why_impossible() or (
        why_not_for_jobs(python) if python else "no torch: make live installs it, or set LIVE_PYTHON=…/bin/python"
    )
    if reason is not None or python is None:
        tell(f"skipped: {reason}")
        return 2
    figures = Figures(take_standard_output())
    count = 0

    def done(result: Result) -> None:
        nonlocal count
        count += 1
        write(figures, result)

    perform(plan(options.names, act=False), python, "observe", options.at_once, done)
    perform(plan(options.names, act=True), python, "act", options.at_once, done)
    if not options.names or any("node" in name for name in options.names):
        for result in run_nodes():
            done(result)
    tell(f"{count} cases, {len(figures.missed)} bounds are missed: {', '.join(figures.missed) or 'none'}")
    return 1 if figures.missed else 0


if __name__ == "__main__":
    sys.exit(main())
