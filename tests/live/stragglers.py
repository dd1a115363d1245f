"""A rank that is late in every step, live: real trainings on gloo at the shipped thresholds and the shipped interval.

    tests/own_namespaces.sh .venv/bin/python -m tests.live.stragglers [work|quota]        (root, 13 minutes each)

`work`: three trainings side by side; in one a rank works longer from some moment on, in one the ranks do so by turns, in
one nothing happens. `quota`: one training on four nodes, of which one gets less of its processor. A line of JSON a
figure; 1 if anything is missed.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

from tests.bench.figures import Figures, take_standard_output
from tests.live.run import tell
from tests.live.stage import Job, Stage, python_with_torch, typical
from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog
from tests.rig.throttle import before_others, cpu_quota

WARM_S, BEFORE_S, WITHIN_S = 30.0, 300.0, 480.0
WORK = ("--work=0.04", "--step-seconds=0.3", "--slower=3.5", "--save-interval=100000")
"""A step of 0.37 s, of which a late rank makes 0.47 s."""


def speak(job: Job) -> list[str]:
    """What fires about a job, with the facts."""
    return [f"{each['kind']}: {each['summary']} {each.get('facts', '')}" for each in job.incidents()]


def named(job: Job) -> list[tuple[str, int]]:
    """(node, rank) of those that `straggler` names."""
    return [
        (each["node"], each["rank"])
        for incident in job.incidents()
        if incident["kind"] == "straggler"
        for each in incident["culprits"]
    ]


def watch(jobs: dict[str, Job], wanted: dict[str, list[tuple[str, int]]], at: float, figures: Figures) -> None:
    """Looks on until those who are to be named are, and for as long at others."""
    found: dict[str, float] = {}
    told: set[str] = set()
    while time.time() < at + WITHIN_S:
        for name, job in jobs.items():
            for text in speak(job):
                if text not in told:
                    told.add(text)
                    tell(f"{name} after {time.time() - at:.0f} s: {text}")
            if named(job) and name not in found:
                found[name] = time.time() - at
        time.sleep(2)
    for name, job in jobs.items():
        steps = job.steps()
        tell(
            f"{name}: {typical(steps[20:300]):.4f} s a step, {typical(steps[-300:]):.4f} s at the end; named {named(job)}"
        )
        if wanted[name]:
            figures.add(f"live.straggler.{name}.named_s", found.get(name, 1e9), "s", at_most=WITHIN_S)
        figures.add(f"live.straggler.{name}.right", float(named(job) == wanted[name]), "", at_least=1)


def work(stage: Stage, figures: Figures) -> None:
    """One late rank, late ranks by turns, nobody."""
    jobs = {name: stage.submit(name, *WORK) for name in ("late", "turns", "healthy")}
    for job in jobs.values():
        stage.training(job)
    time.sleep(WARM_S + BEFORE_S)
    for rank in range(4):
        jobs["turns"].do("turns", rank)
    at = jobs["late"].do("slower", 3)
    where = jobs["late"].rank(3)["node"]
    watch(jobs, {"late": [(where, 3)], "turns": [], "healthy": []}, at, figures)


def quota(stage: Stage, figures: Figures) -> None:
    """One node of four has less of its processor."""
    nodes = ("n1", "n2", "n3", "n4")
    job = stage.submit("quota", *WORK, nodes=nodes)
    stage.training(job)
    time.sleep(WARM_S + BEFORE_S)
    with cpu_quota(stage.cluster, "n3", 0.2):
        here = [("n3", rank) for rank in range(8) if job.rank(rank)["node"] == "n3"]
        watch({"quota": job}, {"quota": here}, time.time(), figures)


def main() -> int:
    """Returns 0 if every bound holds."""
    which = sys.argv[1] if len(sys.argv) > 1 else "work"
    figures, python = Figures(take_standard_output()), python_with_torch()
    if python is None:
        tell("skipped: no torch")
        return 2
    with (
        Cluster(nodes=4 if which == "quota" else 2, cpus=16) as cluster,
        before_others(cluster) if which == "work" else nullcontext(),
        Watchdog(cluster, shipped=True) as watchdog,
    ):
        (quota if which == "quota" else work)(Stage(cluster, watchdog, python), figures)
    return 1 if figures.missed else 0


if __name__ == "__main__":
    sys.exit(main())
