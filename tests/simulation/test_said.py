"""One cause is one story, from its verdict over the evidence to the outcome: every message of each bad day is read.

`python -m tests.simulation.test_said NAME` prints the messages of a day.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from msgspec.structs import replace as replaced

from slurm_watchdog.model.incidents import Culprit, Severity
from slurm_watchdog.notify.notification import Message, Notice, Topic
from tests.accuracy import looks
from tests.accuracy.looks import Look
from tests.accuracy.training import Worker
from tests.builders.notices import INCIDENT
from tests.simulation.cluster import SimJob
from tests.simulation.recipe import RUN_SWITCH, Rates, Recipe
from tests.simulation.said import Said, contradictions, listen
from tests.simulation.sim import Simulation

AT_S = 200.0
"""When it goes wrong: seventy steps are made by then."""
CRASH = "RuntimeError: Error(s) in loading state_dict for GPTModel: size mismatch for embedding"
SHARD = "OSError: [Errno 5] Input/output error: '/gpfs/data/shard-004.bin'"
OF_A_THREAD = (
    "Exception in thread Thread-5 (reader):", "Traceback (most recent call last):",
    '  File "/usr/lib/python3.11/threading.py", line 1038, in _bootstrap_inner', "    self.run()",
    '  File "/home/ann/data.py", line 12, in read', "    return file.read(size)",
)  # fmt: skip
QUEUE = replace(
    looks.STARVED, frames=(("wait (threading.py)", "get (queue.py)", "batches (train.py)", *looks._LOOP),), worker=None
)
LATER = 40.0


def day(minutes: float, mode: str = "act") -> Recipe:
    """One job of three nodes, and a site that also acts on a job that lingers and holds one that crash-loops."""
    return Recipe(
        3, hours=(AT_S + 60.0 * minutes) / 3600.0, calm_s=0.0, nodes=6, jobs=1, interval_s=5.0, tick_s=1.0,
        step_s=(2.0,), sizes=(3,), kill_switch=RUN_SWITCH, rates=Rates(*([0.0] * 12)), totals=(100_000,), mode=mode,
        kinds={"crash_loop": {"ladder": ["hold"]}},
    )  # fmt: skip


def job_of(sim: Simulation) -> SimJob:
    sim.cluster.catch_up()
    return next(iter(sim.cluster.sim_jobs.values()))


Happens = Callable[[Simulation, SimJob, float], None]


def fault(kind: str) -> Happens:
    return lambda sim, job, t: sim.begin_fault(job, kind) and None  # type: ignore[return-value]


def hangs(look: Look, *lines: str) -> Happens:
    """Rank 1 stands there, the others wait for it; `lines` were written at that moment."""

    def happens(sim: Simulation, job: SimJob, t: float) -> None:
        job.say(t, *lines)
        job.freeze(t, looks.SPIN_REDUCE, {1: look})

    return happens


def dies(*lines: str, kernel: str = "", ends_after_s: float | None = None) -> Happens:
    """Rank 1 writes these lines and dies, the others wait for it; Slurm ends the job after some seconds, or never."""

    def happens(sim: Simulation, job: SimJob, t: float) -> None:
        job.say(t, *lines)
        job.freeze(t, looks.SPIN_REDUCE)
        if kernel:
            job.nodes[1].kernel.append((t, kernel.format(pid=job.ranks[1].pid)))
        job.kill(t, [1])
        if ends_after_s is not None:
            sim.timeline.after(ends_after_s, lambda: sim.cluster.stop(job, "FAILED", "job"))

    return happens


def crash_loops(sim: Simulation, job: SimJob, t: float) -> None:
    """Every run dies half a minute after it began, and Slurm requeues it."""
    if job.state == "RUNNING" and t - job.started_at > 20.0:
        job.say(t, "[rank1]: Traceback (most recent call last):", f"[rank1]: {CRASH}")
        sim.timeline.after(
            3.0, lambda: sim.cluster.requeue(job, "slurm", held=False) if job.state == "RUNNING" else None
        )
    sim.timeline.after(5.0, lambda: crash_loops(sim, job_of(sim), sim.timeline.now))


def loses_node(sim: Simulation, job: SimJob, t: float) -> None:
    """Power is cut: Slurm notices later, and requeues the job."""
    job.freeze(t, looks.SPIN_REDUCE)
    name = job.nodes[1].name
    sim.agents[name].kill()
    sim.timeline.after(LATER, lambda: sim.node_fails(name, 300.0))


def storage_fails_everywhere(sim: Simulation, job: SimJob, t: float) -> None:
    sim.begin_fault(job, "storage")
    sim.cluster.mounts[0].stuck |= dict.fromkeys((node.name for node in sim.cluster.nodes), t)


def reader_dies_before_the_queue_is_empty(sim: Simulation, job: SimJob, t: float) -> None:
    job.say(t, *OF_A_THREAD, SHARD)
    sim.timeline.after(15.0, lambda: hangs(QUEUE)(sim, job_of(sim), sim.timeline.now))


OOM = (
    "Memory cgroup out of memory: Killed process {pid} (python) total-vm:98765432kB, anon-rss:67000000kB, file-rss:0kB, "
    "shmem-rss:0kB, UID:1000 pgtables:1000kB oom_score_adj:0"
)


def has_workers(sim: Simulation) -> None:
    for rank in job_of(sim).ranks:
        rank.workers = [Worker(rank.pid + 9000 + n, rank.start_ticks + 100, 0.0) for n in range(2)]


def worker_is_killed(sim: Simulation, job: SimJob, t: float) -> None:
    """The kernel kills a worker of rank 1's data loader, and the rank waits for it."""
    rank = job.ranks[1]
    worker = rank.workers.pop()
    job.nodes[1].kernel.append((t, OOM.format(pid=worker.pid).replace("(python)", "(pt_data_worker)")))
    job.freeze(t, looks.SPIN_REDUCE, {1: looks.STARVED})


def hangs_on_a_busy_node(sim: Simulation, job: SimJob, t: float) -> None:
    """The dumps for the verdict come in time, those of the evidence do not."""
    for agent in sim.agents.values():
        agent.cannot_dump = "py-spy did not end within 8 s"
    hangs(looks.DEADLOCKED)(sim, job, t)


def is_released(sim: Simulation, job: SimJob, t: float) -> None:
    """It crash-loops, is held, and somebody releases it a minute later without having mended anything."""
    crash_loops(sim, job, t)

    def release(seen_at: float | None) -> None:
        now, held = sim.timeline.now, job_of(sim).held_by is not None
        seen_at = (now if seen_at is None else seen_at) if held else seen_at
        if seen_at is not None and now - seen_at > 60.0:
            sim.people("release", job_of(sim))
        else:
            sim.timeline.after(10.0, lambda: release(seen_at))

    release(None)


ASSERT = (
    "[rank1]: Traceback (most recent call last):",
    "[rank1]: RuntimeError: CUDA error: device-side assert triggered",
)


@dataclass(frozen=True)
class Scene:
    """What happens, and what people read of it."""

    happens: Happens
    critical: tuple[str, ...]
    """Kinds of the critical incidents that were announced."""
    says: tuple[str, ...] = ()
    """In this order, in sentences."""
    never: tuple[str, ...] = ()
    minutes: float = 5.0
    begin: Callable[[Simulation], object] = job_of
    """Before the job starts."""


SCENES: dict[str, Scene] = {
    "a hang": Scene(fault("hang"), ("collective_hang",), ("hangs after", "is being requeued", "first new step")),
    "a hang that is proven before its limit": Scene(
        hangs(looks.DEADLOCKED), ("collective_hang",), ("within", "rank 1", "is being requeued", "first new step")
    ),
    "a hang of which no later dump comes": Scene(
        hangs_on_a_busy_node, ("collective_hang",), ("rank 1", "evidence: Job", "rank 1", "first new step")
    ),
    "a hang of everybody": Scene(
        fault("hang_of_everybody"), ("collective_hang",), ("hangs after", "is being requeued")
    ),
    "a rank is stopped": Scene(fault("stopped"), ("rank_stopped",)),
    "a mount fails on one node": Scene(fault("storage"), ("filesystem_stall",), ("is being requeued", "without n0")),
    "a filesystem fails everywhere": Scene(storage_fails_everywhere, ("filesystem_outage",)),
    "a rank has exited": Scene(
        fault("dead_rank"), ("lingering_job",), ("ended", "cannot continue", "is being requeued")
    ),
    "the kernel kills a rank for memory": Scene(
        dies(kernel=OOM), ("memory_kill", "lingering_job"), ("killed by the kernel", "is being requeued"), minutes=12.0
    ),
    "a rank raises and the job stays": Scene(
        dies(*ASSERT, "srun: error: n1: task 1: Exited with exit code 1"),
        ("log_error", "lingering_job"),
        ("device-side assert", "cannot continue", "exited with code 1", "is being requeued"),
    ),
    "a rank raises and Slurm ends the job": Scene(
        dies(*ASSERT, ends_after_s=12.0), ("log_error",), ("device-side assert",), minutes=12.0
    ),
    "a crash loop is held": Scene(
        crash_loops,
        ("crash_loop",),
        ("restarts and dies again", "is being held", "was held: slurm-watchdog keeps it in the queue"),
        never=("job_changed", "was not held"),
        minutes=16.0,
    ),
    "a loop that is released is judged again by the runs since": Scene(
        is_released,
        ("crash_loop", "crash_loop"),
        (
            "was held: slurm-watchdog keeps it in the queue",
            "restarts and dies again and again: 3 runs",
            "(guard: cooldown)",
        ),
        minutes=20.0,
    ),
    "a worker is killed for memory": Scene(
        worker_is_killed,
        ("collective_hang",),
        ("hangs after", "A worker of rank 1", "was killed by the kernel for memory", "is being requeued"),
        begin=has_workers,
    ),
    "a node is lost": Scene(loses_node, (), ("Slurm has lost n1",), minutes=8.0),
    "a reader dies of its file": Scene(
        hangs(QUEUE, *OF_A_THREAD, SHARD),
        ("collective_hang",),
        ("shard-004.bin",),
        never=("waits for a lock", "fork()"),
    ),
    "a reader dies before its queue is empty": Scene(
        reader_dies_before_the_queue_is_empty, ("collective_hang",), ("shard-004.bin",)
    ),
}


def story_of(name: str, mode: str) -> list[Said]:
    scene = SCENES[name]

    def script(sim: Simulation) -> None:
        scene.begin(sim)
        sim.timeline.at(AT_S, lambda: scene.happens(sim, job_of(sim), sim.timeline.now))

    return listen(day(scene.minutes, mode), script)


OBSERVED = ("a hang of everybody", "a rank raises and the job stays", "the kernel kills a rank for memory")


ALWAYS = (
    ("a hang", "act"),
    ("a rank has exited", "act"),
    ("a mount fails on one node", "act"),
    (OBSERVED[1], "observe"),
)
"""One scene of each kind of culprit."""
STORIES = [*((each, "act") for each in SCENES), *((each, "observe") for each in OBSERVED)]


@pytest.mark.parametrize(
    ("name", "mode"),
    [each if each in ALWAYS else pytest.param(*each, marks=pytest.mark.thorough) for each in STORIES],
)
def test_one_cause_is_one_story(name: str, mode: str) -> None:
    scene, story = SCENES[name], story_of(name, mode)
    read = "\n".join(each.line for each in story)
    assert not contradictions(story), read
    opened = [each.notice.incident for each in story if each.topic is Topic.OPENED]
    assert tuple(each.kind for each in opened if each.severity == "critical") == scene.critical, read
    at = 0
    for words in scene.says if mode == "act" else ():
        at = read.find(words, at)
        assert at >= 0, f"{words!r} is not said, or too early:\n{read}"
    whole = "\n".join([read, *(line for each in story for line in each.message.evidence)])
    assert not [words for words in scene.never if words in whole], whole


def told(at: float, topic: Topic, sentence: str, **changes: Any) -> Said:
    incident = replaced(INCIDENT, **{"kind": "collective_hang", "id": "a", "culprits": (RANK_3,), **changes})
    return Said(at, Notice(topic=topic, at=at, incident=incident), Message(sentence=sentence))


RANK_3 = Culprit(node="n3", rank=3, pid=33, reason="waits for its data loader")
HANGS = told(0.0, Topic.OPENED, "CRITICAL: Job 7 hangs after step 20: no step for 60 s; rank 3 waits")
NOT_A_STORY: dict[str, tuple[Said, ...]] = {
    "the evidence takes the verdict back": (
        HANGS,
        told(9.0, Topic.DIAGNOSED, "evidence: Job 7: the dumps do not show whether its ranks move, so no rank is identified"),
    ),
    "old evidence before a new verdict": (told(0.0, Topic.DIAGNOSED, "evidence: Job 7 lost rank 3"), HANGS),
    "the evidence has the ages of another time": (
        HANGS, told(30.0, Topic.DIAGNOSED, "evidence: Job 7 hangs after step 20, 61 s ago: rank 3 waits"),
    ),
    "refused, and done": (
        HANGS,
        told(1.0, Topic.DECIDED, "job 7 was not held (guard: job_changed): its run was not known"),
        told(3.0, Topic.DECIDED, "job 7 is being held: the evidence is clear"),
    ),
    "advised against, and done": (
        told(0.0, Topic.OPENED, "CRITICAL: Job 7 has made no step since an error", id="b", kind="log_error"),
        told(1.0, Topic.DECIDED, "job 7: alert only: a restart does not mend a program", id="b", kind="log_error"),
        told(27.0, Topic.OPENED, "warning: Job 7 cannot continue", severity=Severity.WARNING),
        told(28.0, Topic.DECIDED, "job 7 would have been requeued: the mode is observe", severity=Severity.WARNING),
    ),
    "two critical ones": (HANGS, told(27.0, Topic.OPENED, "CRITICAL: Job 7 cannot continue", id="b")),
    "opened by the action that ended the first": (
        HANGS,
        told(9.0, Topic.ENDED, "job 7 was held"),
        told(9.0, Topic.RESOLVED, "over"),
        told(10.0, Topic.OPENED, "CRITICAL: Job 7 hangs after step 20", id="b"),
    ),
    "over twice": (HANGS, told(9.0, Topic.RESOLVED, "over"), told(20.0, Topic.RESOLVED, "over")),
    "opened twice": (HANGS, HANGS),
    "the kernel's kill denied": (
        told(0.0, Topic.OPENED, "CRITICAL: Rank 3 was killed by the kernel for memory"),
        told(90.0, Topic.RESOLVED, "over: the kernel killed no process of job 7"),
    ),
    "a value in the place of a word": (told(0.0, Topic.OPENED, "CRITICAL: rank None of job 7 ended -3 s ago"),),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_A_STORY)
def test_a_sequence_of_messages_that_contradicts_itself_is_found(name: str) -> None:
    assert contradictions(NOT_A_STORY[name])


if __name__ == "__main__":
    for each in story_of(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "act"):
        print("\n    . ".join((each.line, *each.message.evidence)))
