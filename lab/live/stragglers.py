"""A rank that is late in every step, live: real trainings on gloo at the shipped thresholds and the shipped interval.

    tests/own_namespaces.sh .venv/bin/python -m lab.live.stragglers        (root, 25 min)

Three trainings side by side, whose ranks compute all the time, each node with a share of the processor of its own: in one
a rank works longer from some moment on, in one the ranks do so by turns, and of the largest one a node gets less of its
processor. Before that they are well for some minutes. A line of JSON a figure; 1 if a bound is missed.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

from lab.bench.figures import Figures, take_standard_output
from lab.live.run import tell
from lab.live.stage import Job, Stage, python_with_torch, typical
from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog
from tests.rig.throttle import CGROUPS, PERIOD_US, cpu_quota

BEFORE_S, WITHIN_S = 430.0, 700.0
"""`straggler` needs four whole minutes of each rank before the change; its first blocks have none, for a reading needs one before."""
WORK = ("--work=0.1", "--step-seconds=0", "--slower=1.5", "--save-interval=100000", "--workers=0")
CORES, SLOW_NODE, SLOW_CORES = 0.2, "n3", 0.16
"""Two ranks of a node need 0.2 s of it in a step: a second. A late rank makes 1.25 s of it, and so does a slow node."""


def named(job: Job) -> list[tuple[str, int]]:
    """(node, rank) of those that `straggler` names."""
    return [
        (each["node"], each["rank"])
        for incident in job.incidents()
        if incident["kind"] == "straggler"
        for each in incident["culprits"]
    ]


def watch(jobs: dict[str, Job], wanted: dict[str, list[tuple[str, int]]], until: float, figures: Figures) -> None:
    """Looks on until then: who is named, and when."""
    began, found, said = time.time(), dict[str, float](), set[str]()
    while time.time() < until and any(wanted[name] and name not in found for name in jobs):
        for name, job in jobs.items():
            for each in job.incidents():
                text = f"{name}: {each['kind']}: {each['summary']} {each.get('facts', '')}"
                if each["id"] + each["kind"] not in said:
                    said.add(each["id"] + each["kind"])
                    tell(f"after {time.time() - began:.0f} s, {text}")
            if named(job):
                found.setdefault(name, time.time() - began)
        time.sleep(2)
    for name, job in jobs.items():
        steps = job.steps()
        tell(f"{name}: {typical(steps[20:220]):.4f} s a step, {typical(steps[-300:]):.4f} s at the end: {named(job)}")
        if wanted[name]:
            figures.add(f"live.straggler.{name}.named_s", found.get(name, 1e9), "s", at_most=WITHIN_S)
        figures.add(f"live.straggler.{name}.right", float(named(job) == wanted[name]), "", at_least=1)


def run(stage: Stage, figures: Figures) -> None:
    """All of it."""
    where = {"quota": ("n1", "n2", "n3", "n4"), "late": ("n5", "n6"), "turns": ("n7", "n8")}
    with ExitStack() as nodes:
        for node in stage.cluster.nodes:
            nodes.enter_context(cpu_quota(stage.cluster, node, CORES))
        jobs = {name: stage.submit(name, *WORK, nodes=where[name]) for name in where}
        for job in jobs.values():
            stage.training(job, 5)
        tell("all train")
        time.sleep(BEFORE_S)
        before = {name: [each["kind"] for each in job.incidents()] for name, job in jobs.items()}
        tell(f"before: {before}")
        false = sum(kinds.count("straggler") for kinds in before.values())
        figures.add("live.straggler.healthy.false", float(false), "", at_most=0)
        for rank in range(4):
            jobs["turns"].do("turns", rank)
        jobs["late"].do("slower", 3)
        slow_down(stage, SLOW_NODE)
        wanted = {
            "late": [(jobs["late"].rank(3)["node"], 3)],
            "turns": [],
            "quota": [(SLOW_NODE, rank) for rank in range(8) if jobs["quota"].rank(rank)["node"] == SLOW_NODE],
        }
        watch(jobs, wanted, time.time() + WITHIN_S, figures)


def slow_down(stage: Stage, node: str) -> None:
    """The node gets less of the processor."""
    group = CGROUPS / "cpu" / f"{stage.cluster.directory.name}-{node}-throttled"
    (group / "cpu.cfs_quota_us").write_text(str(int(SLOW_CORES * PERIOD_US)))


def main() -> int:
    """Returns 0 if every bound holds."""
    figures, python = Figures(take_standard_output()), python_with_torch()
    if python is None:
        tell("skipped: no torch")
        return 2
    with Cluster(nodes=8, cpus=16) as cluster, Watchdog(cluster, shipped=True) as watchdog:
        run(Stage(cluster, watchdog, python), figures)
    return 1 if figures.missed else 0


if __name__ == "__main__":
    sys.exit(main())
