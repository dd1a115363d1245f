"""The faults of `make compare`, and what is healthy and looks like one."""

from __future__ import annotations

import time

from lab.compare.run import AFTER_SLOW_S, SLOW_S, Scene
from lab.live.stage import Job

HANG_PATIENCE_S = 2100.0
"""PyTorch's own time-out with gloo is 1,800 s, and the start of the next run comes on top."""
PATIENCE_S = 600.0
NODE = "n2"
"""Of every job: launchers that form the world by themselves give its rank any number."""
KILL_PATIENCE_S = 300.0


def _hang(jobs: list[Job]) -> list[float]:
    for job in jobs:
        (job.faults / "loader.rank1").touch()
    return [job.done("loader", 1) for job in jobs]


def _kill(jobs: list[Job]) -> list[float]:
    return [job.signal("KILL", 1) for job in jobs]


def _power(jobs: list[Job]) -> list[float]:
    jobs[0].stage.cluster.kill_node(NODE)
    return [time.time()] * len(jobs)


def _freeze(jobs: list[Job]) -> list[float]:
    jobs[0].stage.cluster.freeze(node=NODE)
    return [time.time()] * len(jobs)


def _slow(jobs: list[Job]) -> list[float]:
    """By itself, at the step that `--slow-at` says: that was just now."""
    return [time.time()] * len(jobs)


SCENES: tuple[Scene, ...] = (
    Scene("hang", "data loader hang of rank 1", _hang, HANG_PATIENCE_S, (1,)),
    Scene("killed", "rank 1 killed", _kill, KILL_PATIENCE_S, (1,), together=False),
    Scene("power", "node loses its power, one spare", _power, PATIENCE_S, node=NODE, spare=True),
    Scene(
        "d_state", "D state on one node's filesystem, one spare", _freeze, PATIENCE_S, node=NODE,
        options=("--side-log={scratch}/side.txt", f"--side-node={NODE}"), spare=True, mend=lambda cluster: cluster.thaw(NODE),
    ),
    Scene(
        "evaluation", f"evaluation of {SLOW_S:g} s by rank 0", _slow, SLOW_S + AFTER_SLOW_S,
        options=(f"--evaluate-seconds={SLOW_S:g}", "--evaluate-by=rank0", "--slow-at=26"),
    ),
    Scene(
        "checkpoint", f"checkpoint of {SLOW_S:g} s by rank 0", _slow, SLOW_S + AFTER_SLOW_S,
        options=(f"--save-seconds={SLOW_S:g}", "--slow-at=26"),
    ),
)  # fmt: skip
