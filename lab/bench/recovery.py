"""From a fault to the first new step, on a real Slurm with its shipped times and a watchdog as it is shipped that acts: in
place (`slurm-watchdog run` in the batch script) and by requeue.

A real DistributedDataParallel training (lab/live/ddp.py): three nodes, a rank on each, a step of 0.5 s, a checkpoint every
20 steps; a fourth node is free, or waits in the job as its spare. Each figure has a cluster of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lab.bench.figures import Figures, say
from lab.live.again import next_run
from lab.live.stage import ENVIRONMENT, TRAINER, Job, Stage, python_with_torch, why_not_for_jobs
from tests.rig.cluster import Cluster
from tests.rig.commands import ClusterError, commit
from tests.rig.rights import own_program
from tests.rig.stack import Watchdog, WatchdogError

RESULTS = Path(__file__).parents[2] / "lab/results/recovery.json"
IN_PLACE, REQUEUE = "in_place", "requeue"
NODES, SPARES = 3, 1
STEP_S = 0.5
SAVE_INTERVAL = 20
"""Steps, as `ddp.py` saves: no restart may lose more."""
FEW_STEPS = 8 * SAVE_INTERVAL + 6
"""Before it is broken: between two checkpoints, and after more than the 10 reports with steps that `collective_hang` wants to
know of a run."""
PATIENCE_S = {IN_PLACE: 240.0, REQUEUE: 600.0}
"""By requeue Slurm waits itself: see `Case.slurm_waits_s`; all else has the rest."""
HELD_S = 120.0
"""So long Slurm holds a requeued job: until its credential is not valid any more (AuthInfo cred_expire, as shipped)."""
LOOK_EVERY_S = 0.2
NEVER = 1e9


@dataclass(frozen=True)
class Case:
    """A fault of the node or the rank 1."""

    name: str
    words: str
    kinds: tuple[str, ...]
    """What may be said of it first."""
    break_it: Callable[[Job, str], float]
    """Given the job and the node of rank 1: does it, and returns when it had happened."""
    goal_s: float
    """In place, from the fault to the first new step."""
    options: tuple[str, ...] = ()
    by_rank: bool = True
    """Whether a rank is to be named; else its node."""
    blames_node: bool = False
    """Whether the next run is right to avoid the node."""
    slurm_waits_s: float = HELD_S
    """So long Slurm itself waits, at least, before the requeued job may start."""


@dataclass
class Recovery:
    """What came of a fault."""

    case: str
    way: str
    verdict_s: float | None = None
    kind: str = ""
    said: str = ""
    right_rank: bool = False
    first_step_s: float | None = None
    steps_lost: int | None = None
    starts: int = 0
    """How often the training began after the fault."""
    left_out: list[str] = field(default_factory=list)
    """Nodes that the next run does not use, or may not."""
    healthy_left_out: list[str] = field(default_factory=list)
    rungs: list[str] = field(default_factory=list)
    problem: str = ""
    watched_s: float | None = None
    """So long a new step was waited for; None: it came."""
    date: str = ""
    """When it was measured, in timezone.utc."""


def _power(job: Job, node: str) -> float:
    job.stage.cluster.kill_node(node)
    return time.time()


def _freeze(job: Job, node: str) -> float:
    job.stage.cluster.freeze(node=node)
    return time.time()


CASES: tuple[Case, ...] = (
    Case("hang", "data loader hang", ("collective_hang",), lambda job, node: job.do("loader", 1), 40.0),
    Case(
        "killed", "rank killed, the job stays RUNNING", ("dead_rank",), lambda job, node: job.signal("KILL", 1),
        20.0, options=("--on-error=stay",),
    ),
    Case(
        "power", "node loses its power, one spare", ("node_down", "agent_silent", "collective_hang", "stalled_progress"),
        _power, 75.0, by_rank=False, blames_node=True, slurm_waits_s=300.0 + HELD_S,  # SlurmdTimeout, as shipped
    ),
    Case(
        "d_state", "D state on one node's filesystem, one spare", ("filesystem_stall", "collective_hang"), _freeze, 45.0,
        options=("--side-log={scratch}/side.txt", "--side-rank=1"), blames_node=True,
        slurm_waits_s=60.0 + HELD_S,  # UnkillableStepTimeout, as shipped: until then the job is COMPLETING
    ),
)  # fmt: skip


def run(figures: Figures, names: Sequence[str], *, write: bool) -> None:
    """Plays all cases, or those with one of `names` in `CASE.WAY`; with `write` keeps them for docs/evaluation.md."""
    python = python_with_torch()
    reason = "no torch: set LIVE_PYTHON=…/bin/python, or make live installs it" if python is None else None
    reason = reason or why_not_for_jobs(str(python))
    if reason is not None:
        say(f"recovery: skipped: {reason}")
        figures.missed.append("recovery")
        return
    for case in CASES:
        for way in (IN_PLACE, REQUEUE):
            if not names or any(name in f"{case.name}.{way}" for name in names):
                result = play(case, way, str(python))
                add(figures, case, result)
                if write:
                    keep([result])


def play(case: Case, way: str, python: str) -> Recovery:
    """One fault on a cluster of its own, followed to the first new step."""
    result = Recovery(case.name, way)
    with (
        Cluster(nodes=NODES + SPARES, cpus=4, shipped_times=True) as cluster,
        Watchdog(cluster, mode="act", shipped=True) as watchdog,
        mended(cluster),
    ):
        stage = Stage(cluster, watchdog, python)
        job = submit(stage, case, way)
        try:
            stage.training(job, FEW_STEPS)
            before = _nodes_used(job)
            node, pid = before[1], job.rank(1)["pid"]
            mark = len(job.text())
            at = case.break_it(job, node)
            follow(case, result, job, at, mark, (1, node, pid))
            result.left_out = sorted((set(before) - set(_nodes_used(job))) | set(_excluded(cluster, job)))
            result.healthy_left_out = [each for each in result.left_out if each != node or not case.blames_node]
        except (ClusterError, WatchdogError) as error:
            result.problem = str(error).splitlines()[0][:300]
        if result.first_step_s is None:
            say(f"{case.name} {way}: {result.problem or 'no new step'}; its log ends with {job.text()[-800:]}")
            say(watchdog.log_tail("controller"))
        job.end()
    say(f"{case.name} {way}: {asdict(result)}")
    return result


@contextmanager
def mended(cluster: Cluster) -> Iterator[None]:
    """Thaws at the end whatever was frozen."""
    try:
        yield
    finally:
        for node in cluster.nodes:
            cluster.thaw(node)


def submit(stage: Stage, case: Case, way: str) -> Job:
    """The training as its owner submits it: with the supervisor and a spare, or without both."""
    room = stage.room(f"{case.name}-{way}")
    options = [each.format(scratch=stage.cluster.scratch) for each in case.options]
    words = " ".join((room.words(TRAINER), f"--step-seconds {STEP_S}", f"--save-interval {SAVE_INTERVAL}", *options))
    in_place = way == IN_PLACE
    supervised = (
        f"{own_program(stage.cluster.place, stage.cluster.directory)} run --spares {SPARES} -- " if in_place else ""
    )
    no_kill = "#SBATCH --no-kill\n" if in_place else ""
    script = (
        f"#!/bin/bash\n#SBATCH --requeue --open-mode=append\n{no_kill}"
        'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1) '
        f"MASTER_PORT={room.port} {ENVIRONMENT}\n"
        f"{supervised}srun --ntasks-per-node=1 {stage.python} {words}\n"
    )
    return stage.start(room, script, f"-N{NODES + SPARES * in_place}", "--ntasks-per-node=1")


def follow(case: Case, result: Recovery, job: Job, at: float, mark: int, culprit: tuple[int, str, int]) -> None:
    """Waits for the verdict and for the first new step; fills `result`. Times are dates."""
    while (now := time.time()) < at + PATIENCE_S[result.way]:
        if result.verdict_s is None and (incident := _verdict(case, job, culprit[1])) is not None:
            result.verdict_s, result.kind = max(0.0, time.time() - at), incident["kind"]
            result.said = incident["summary"]
            result.right_rank = _is_right(case, incident["culprits"], culprit)
            say(f"{case.name} {result.way}: {result.kind} after {result.verdict_s:.1f} s: {result.said}")
        again = next_run(job.text(), mark)
        if again is not None:
            result.first_step_s, result.steps_lost, result.starts = now - at, again.steps_lost, again.starts
            break
        job.stage.pause(LOOK_EVERY_S)
    else:
        result.watched_s = PATIENCE_S[result.way]
    result.rungs = _rungs(job, at)


def _verdict(case: Case, job: Job, node: str) -> dict[str, Any] | None:
    """The first incident of a kind that is expected, about the job or about the node."""
    assert job.stage.watchdog is not None
    for incident in job.stage.watchdog.incidents():
        about = incident["job_id"] == job.job_id or any(each["node"] == node for each in incident["culprits"])
        if incident["kind"] in case.kinds and incident["state"] == "firing" and about:
            found: dict[str, Any] = incident
            return found
    return None


def _is_right(case: Case, culprits: list[dict[str, Any]], culprit: tuple[int, str, int]) -> bool:
    if case.by_rank:
        return [(each["rank"], each["node"], each["pid"]) for each in culprits] == [culprit]
    return {each["node"] for each in culprits} == {culprit[1]}


def _nodes_used(job: Job) -> list[str]:
    """By rank, of the newest run."""
    return [str(job.rank(rank)["node"]) for rank in range(NODES)]


def _excluded(cluster: Cluster, job: Job) -> list[str]:
    """What the job may not run on, by Slurm."""
    names = cluster.job(job.job_id).get("ExcNodeList", "(null)")
    return [] if names == "(null)" else cluster.slurm("scontrol", "show", "hostnames", names).stdout.split()


def _rungs(job: Job, at: float) -> list[str]:
    """What was done about the job, in its order, and between which seconds after the fault."""
    watchdog = job.stage.watchdog
    assert watchdog is not None
    actions = [action for each in watchdog.incidents(job.job_id) for action in watchdog.explain(each["id"])["actions"]]
    return [_rung(each, at) for action in actions for each in action["operations"]]


def _rung(operation: dict[str, Any], at: float) -> str:
    begin, end = (f"{when - at:.1f}" if when else "?" for when in (operation["intent_at"], operation["outcome_at"]))
    return f"{operation['operation']}: {operation['outcome']} ({begin} to {end} s)"


def add(figures: Figures, case: Case, result: Recovery) -> None:
    """The figures of one result; what never came is a very large number of seconds."""
    name = f"recovery.{result.case}.{result.way}"
    in_place = result.way == IN_PLACE

    def seconds(what: str, value: float | None, at_most: float | None = None) -> None:
        figures.add(f"{name}.{what}", NEVER if value is None else value, "s", at_most=at_most)

    seconds("verdict_s", result.verdict_s)
    seconds("first_step_s", result.first_step_s, case.goal_s if in_place else None)
    lost = NEVER if result.steps_lost is None else result.steps_lost
    figures.add(f"{name}.steps_lost", lost, "steps", at_most=SAVE_INTERVAL)
    figures.add(f"{name}.right_rank", float(result.right_rank), "", at_least=1)
    figures.add(f"{name}.starts", float(result.starts), "", at_most=1)
    figures.add(f"{name}.healthy_left_out", float(len(result.healthy_left_out)), "nodes", at_most=0)


def keep(results: Sequence[Recovery]) -> None:
    """Writes the results; those of cases that were not played now stay as they were kept."""
    kept = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else []
    rows = {(row["case"], row["way"]): row for row in kept}
    date = datetime.now(timezone.utc).date().isoformat()
    rows |= {(each.case, each.way): asdict(each) | {"date": date, "commit": commit()} for each in results}
    cases = {
        case.name: {"words": case.words, "goal_s": case.goal_s, "slurm_waits_s": case.slurm_waits_s} for case in CASES
    }
    document = {"cases": cases, "results": list(rows.values())}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
