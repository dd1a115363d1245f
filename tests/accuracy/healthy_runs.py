"""Healthy things that Slurm, an administrator or the end of a training does to jobs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tests.accuracy import looks
from tests.accuracy.healthy_scene import SHORT_DAY_S, H, scene_with
from tests.accuracy.logs import stamp
from tests.accuracy.scene import Scene, Setup
from tests.accuracy.training import Job, Span


def requeue(s: Setup) -> Scene:
    """Slurm requeues the job now and then: it resumes from its checkpoint, on other nodes or fewer of them.
    The log is appended."""
    scene = scene_with(s, SHORT_DAY_S, step_s=s.rng.choice((10.0, 45.0)), save_every=40, start_s=120.0)
    job = scene.job

    def again(t: float) -> None:
        if job.state == "RUNNING":
            job.say(
                t,
                f"slurmstepd: error: *** JOB {job.job_id} ON {job.host.name} CANCELLED AT {stamp(t).replace(' ', 'T')} DUE TO JOB REQUEUE ***",
            )
            job.requeue(t)
            kept = max(1, s.nodes // 2) if s.rng.random() < 0.5 else s.nodes
            scene.world.at(t + s.rng.uniform(120.0, 1500.0), lambda now: job.start(now, scene.world.nodes[:kept]))
        scene.world.at(t + s.rng.uniform(3000.0, 7000.0), again)

    scene.world.at(3000.0, again)
    return scene


def maintenance(s: Setup) -> Scene:
    """The job ends as it should, its nodes are drained and switched off for an hour, and a new job starts there."""
    scene = scene_with(s, SHORT_DAY_S, step_s=20.0, total=int(s.rng.uniform(100, 300)), save_every=50)
    world, job = scene.world, scene.job

    def off(t: float) -> None:
        for node in world.nodes:
            node.state, node.silent = s.rng.choice(("IDLE+DRAIN", "MAINT", "DOWN+POWERED_DOWN")), True
        world.at(t + H, on)

    def on(t: float) -> None:
        for node in world.nodes:
            node.state, node.silent = "", False
            node.boot_id += "'"
            node.agent, node.sequence = node.agent + 1, 0
        world.add_job(replace(job.plan, total=100_000, name="after"), t + 120.0, list(world.nodes))

    world.at(s.warm_s(job.plan, job.plan.total) * 1.2 + 600.0, off)
    return scene


def chain(s: Setup) -> Scene:
    """Jobs of one name follow each other: one reaches its time limit or is preempted, the next one waits already."""
    scene = scene_with(s, SHORT_DAY_S, step_s=s.rng.choice((10.0, 60.0)), save_every=30, save_s=30.0)
    world = scene.world
    limit_s = s.rng.uniform(4000.0, 7000.0)

    def over(t: float) -> None:
        old = world.jobs[-2] if world.jobs[-1].state == "PENDING" else world.jobs[-1]
        why, state = s.rng.choice((("TIME LIMIT", "TIMEOUT"), ("PREEMPTION", "PREEMPTED")))
        old.say(
            t - 1.0,
            f"slurmstepd: error: *** JOB {old.job_id} ON {old.host.name} CANCELLED AT {stamp(t).replace(' ', 'T')} DUE TO {why} ***",
        )
        old.end(t, state)
        if t + 60.0 + limit_s < scene.until_s:
            follow(t, t + 60.0, old.saved[0] if old.saved else 0)

    def follow(t: float, at: float, step: int) -> None:
        waiting = [job for job in world.jobs if job.state == "PENDING" and not job.ranks]
        if waiting:
            waiting[0].plan = replace(waiting[0].plan, first=step)
            world.at(at, waiting[0].start)
        queue(t)
        world.at(at + limit_s, over)

    def queue(t: float) -> None:
        world.submit(replace(scene.job.plan), t, list(world.nodes))

    world.at(60.0, queue)
    world.at(limit_s, over)
    return scene


def _leave(job: Job, number: int, t: float) -> None:
    job.kill(t, [number])


def end_of_training(s: Setup) -> Scene:
    """The last step, a last checkpoint of minutes, ranks that leave one after the other."""
    scene = scene_with(s, 1.2 * H, step_s=s.rng.choice((5.0, 20.0)), total=int(s.rng.uniform(40, 110)), save_every=30)
    job = scene.job

    def begins(span: Span, t: float) -> None:
        if span.doing != "end":
            return
        job.on_begin = None
        span.seconds = s.rng.uniform(60.0, 400.0)
        job.stretch(span, t)
        job.overrides[0] = looks.SAVE
        job.look_again(t)
        others = [rank.number for rank in job.ranks if rank.number]
        s.rng.shuffle(others)
        for place, number in enumerate(others):
            leaves_at = t + span.seconds * (0.3 + 0.6 * place / len(others))
            scene.world.at(leaves_at, partial(_leave, job, number))

    job.on_begin = begins
    return scene


def agent_restart(s: Setup) -> Scene:
    """The agents are updated one after the other while a job trains; each is away for some seconds."""
    scene = scene_with(s, 2 * H, step_s=20.0, save_every=100)

    def update(t: float) -> None:
        node = scene.world.nodes[s.rng.randrange(len(scene.world.nodes))]
        node.silent = True

        def back(now: float) -> None:
            node.silent = False
            node.agent, node.sequence = node.agent + 1, 0

        scene.world.at(t + s.rng.uniform(3.0, 20.0), back)
        scene.world.at(t + s.rng.uniform(300.0, 1200.0), update)

    scene.world.at(500.0, update)
    return scene
