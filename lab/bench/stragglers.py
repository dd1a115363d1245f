"""Which ranks `straggler` names in jobs that become slower while no rank is late, and how soon it names one that is.
Simulated: ranks that work and wait, seen by agents every 5 s through the real tally; dumps that would confirm anybody."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import median
from typing import Any

from msgspec import field

from lab.bench.figures import Figures, say
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.detect.slow_job import SlowJob
from slurm_watchdog.detect.straggler import detect
from slurm_watchdog.model.cluster_view import ClusterView, ProcessView
from slurm_watchdog.model.incidents import Finding, Truth
from tests.builders.stragglers import Training, Work, late, turns
from tests.builders.views import cluster, job, process, slurm_job

BEFORE_S, AFTER_S, LOOK_S = 1800.0, 7200.0, 300.0
LOCKED = (2.5, 5.0, 10.0)
"""Steps that keep pace with looks every 5 s."""
GPUS = {"gpus": True, "spins": True, "host_share": 0.02}
DUMPS = 12


class Case(Struct, kw_only=False):
    """Jobs that become slower in one way. `named`: who is to be named, nobody without."""

    name: str
    named: tuple[int, ...] = ()
    by: float = 0.15
    kind: str = "late"
    """`late`: those of `ranks`; `turns`; `stages`: all, of which four have always done more or less."""
    ranks: tuple[int, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)
    within_min: float = 15.0
    share: float = 0.95
    """Of the jobs in which they have to be named."""

    def work(self) -> Work:
        if self.kind == "turns":
            return turns(16, self.by)
        if self.kind == "stages":
            return lambda rank, step, changed: (0.6 + 0.1 * (rank // 4 + 1)) * (1 + self.by * changed)
        return late(set(self.ranks), self.by)


EVERYBODY, HALF, EACH_NODE = tuple(range(16)), tuple(range(8)), (0, 4, 8, 12)
HEALTHY = (
    *(Case(f"all_{s:g}s", ranks=EVERYBODY, more={"step_s": s}) for s in (0.4, 1.3, 30.0, *LOCKED)),
    *(Case(f"all_{s:g}s_jitter_0.001", ranks=EVERYBODY, more={"step_s": s, "jitter": 0.001}) for s in LOCKED),
    *(Case(f"turns_{s:g}s", kind="turns", by=0.3, more={"step_s": s}) for s in (1.3, *LOCKED)),
    Case("uneven_data", ranks=EVERYBODY, more={"jitter": 0.3}),
    Case("rank_0", ranks=(0,)),
    Case("half", ranks=HALF),
    Case("one_of_each_node", ranks=EACH_NODE),
    Case("stages", kind="stages"),
    *(Case(f"gpu_all_{s:g}s", ranks=EVERYBODY, more={**GPUS, "step_s": s}) for s in (0.4, 1.3, 30.0, *LOCKED)),
    *(Case(f"gpu_turns_{s:g}s", kind="turns", by=0.3, more={**GPUS, "step_s": s}) for s in (1.3, *LOCKED)),
    Case("gpu_uneven_data", ranks=EVERYBODY, more={**GPUS, "jitter": 0.3, "host_share": 0.2}),
    Case("gpu_rank_0", ranks=(0,), more=GPUS),
    Case("gpu_host_bound", ranks=EVERYBODY, more={**GPUS, "host_share": 0.5}),
)
LATE = (
    Case("one_10_percent", (5,), 0.15, ranks=(5,)),
    Case("one_30_percent", (5,), 0.35, ranks=(5,)),
    Case("one_10_percent_5s", (5,), 0.15, ranks=(5,), more={"step_s": 5.0}),
    Case("one_10_percent_30s", (5,), 0.15, ranks=(5,), more={"step_s": 30.0}, within_min=30.0),
    Case("a_node_10_percent", (4, 5, 6, 7), 0.15, ranks=(4, 5, 6, 7)),
    Case("gpu_one_10_percent", (5,), 0.2, ranks=(5,), more=GPUS, within_min=60.0),
    Case("gpu_one_25_percent", (5,), 0.35, ranks=(5,), more=GPUS, within_min=30.0),
)


def run(figures: Figures, hours: float) -> None:
    """False names in so many hours after each kind of change; who is late, in 20 jobs of each kind."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for case in HEALTHY:
            seeds = range(max(1, round(hours * 3600 / AFTER_S)))
            names = [each for each in pool.map(partial(first_name, case), seeds) if each is not None]
            say(f"{case.name}: {len(names)} names in {len(seeds) * AFTER_S / 3600:g} h")
            figures.add(f"straggler.{case.name}.false_names", float(len(names)), "", at_most=0)
        for case in LATE:
            found = list(pool.map(partial(first_name, case), range(20)))
            right = [each[0] / 60 for each in found if each is not None and each[1] == case.named]
            wrong = sum(each is not None and each[1] != case.named for each in found)
            figures.add(f"straggler.{case.name}.named", len(right) / len(found), "", at_least=case.share)
            figures.add(f"straggler.{case.name}.wrong", float(wrong), "", at_most=0)
            if right:
                figures.add(f"straggler.{case.name}.minutes", median(right), "min", at_most=case.within_min)


def first_name(case: Case, seed: int) -> tuple[float, tuple[int, ...]] | None:
    """(seconds after the change, ranks) of the first time that anybody is named."""
    training = Training(seed, case.work(), **case.more)
    training.run(BEFORE_S, AFTER_S)
    for at, finding in looks(training):
        if finding.truth is Truth.BAD:
            return at - BEFORE_S, tuple(each.rank for each in finding.culprits if each.rank is not None)
    return None


def looks(training: Training) -> Iterator[tuple[float, Finding]]:
    """What the detector says every few minutes after the change."""
    at = BEFORE_S + LOOK_S
    while at <= BEFORE_S + AFTER_S:
        (finding,) = detect(view(training, at), SlowJob())
        yield at, finding
        at += LOOK_S


def view(training: Training, at: float) -> ClusterView:
    """The cluster as it was at that moment."""
    keys = [training.key(rank) for rank in range(training.ranks)]
    seen = tuple(
        ProcessView(
            node=key.node, seen_age_s=1.0,
            process=process(key.rank, pid=key.pid, start_ticks=key.start_ticks, world_size=training.ranks),
        )
        for key in keys
    )  # fmt: skip
    times = tuple(each for each in training.times if each.at <= at)
    return cluster(
        job(
            job=slurm_job(nodes=tuple(dict.fromkeys(key.node for key in keys))), processes=seen,
            step_times=times[-600:], step_history=training.history(at),
            waits=tuple(each for each in training.blocks() if each.end_at <= at),
            wait_dumps=training.dumps(BEFORE_S + 30.0, DUMPS),
        ),
        now=at,
    )  # fmt: skip
