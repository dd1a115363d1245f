"""Healthy things that look ill: nothing may be said about any of them, ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from tests.accuracy import looks
from tests.accuracy.logs import FORMATS, HARMLESS, Step, overflow_skip, stamp
from tests.accuracy.scene import TIMED_FORMATS, Expect, Scene, Setup
from tests.accuracy.training import LOG, Job, Plan, Span
from tests.accuracy.world import World

NOTHING = Expect(())
H = 3600.0
SHORT_DAY_S = 6 * H


def _scene(s: Setup, until_s: float, formats: tuple[str, ...] = tuple(FORMATS), **plan: object) -> Scene:
    """A job without other company: `plan` beyond what is drawn from the seed."""
    rng = s.rng
    name = str(plan.pop("format", rng.choice(formats)))
    given = {
        "step_s": rng.choice((30.0, 60.0, 105.0)),
        "jitter": rng.choice((0.01, 0.02, 0.03)),
        "loss_noise": rng.choice((0.003, 0.01, 0.03)),
    }
    full = Plan(nodes=s.nodes, per_node=s.per_node, format=name, **{**given, **plan})  # type: ignore[arg-type]
    if full.every == 0 and FORMATS[name].every * full.step_s > 120:
        full = replace(full, every=max(1, int(120 / full.step_s)))
    world = World(s.seed, s.nodes)
    job = world.add_job(full, 5.0, world.nodes)
    return Scene(world, job, replace(NOTHING), until_s)


def day(s: Setup) -> Scene:
    """Hours of training: steps, checkpoints, evaluations, PULSE lines, pauses, harmless words, a moment in D."""
    rng = s.rng
    told = rng.random() < 0.5
    scene = _scene(
        s,
        SHORT_DAY_S,
        save_every=rng.choice((50, 100)),
        save_s=rng.choice((40.0, 90.0, 200.0)),
        save_told=told,
        save_on_disk=rng.random() < 0.8,
        eval_every=rng.choice((0, 100, 200)),
        eval_s=rng.choice((60.0, 240.0)),
        eval_told=told,
        pulse_s=rng.choice((0.0, H)),
        pause_s=rng.choice((0.0, 40.0)),
        start_s=rng.choice((60.0, 300.0, 900.0)),
    )
    _harmless_words(scene, s)
    return scene


def large_day(s: Setup) -> Scene:
    """The same on hundreds of GPUs, as in BLOOM: steps of 105 s, a checkpoint of 40 s every hundred, an
    evaluation of twelve minutes."""
    scene = _scene(
        s,
        2 * H,
        ("bloom",),
        step_s=105.0,
        save_every=20,
        save_s=40.0,
        eval_every=25,
        eval_s=720.0,
        pulse_s=H,
        start_s=600.0,
    )
    _harmless_words(scene, s)
    return scene


def _harmless_words(scene: Scene, s: Setup) -> None:
    scene.job.extra = lambda span, t: [s.rng.choice(HARMLESS)] if s.rng.random() < 0.05 else []


def fast_steps(s: Setup) -> Scene:
    """Steps of a second or less, a line for each."""
    return _scene(s, 1.5 * H, step_s=s.rng.choice((0.7, 1.5, 3.0)), save_every=1000, save_s=30.0)


def long_start(s: Setup) -> Scene:
    """Start-up and compilation of the first steps take up to almost an hour."""
    rng = s.rng
    return _scene(
        s,
        2 * H,
        start_s=rng.uniform(300.0, 1500.0),
        compile_s=rng.uniform(300.0, 1900.0),
        step_s=rng.choice((5.0, 30.0)),
    )


def index_build(s: Setup) -> Scene:
    """Rank 0 builds the index of the data for most of an hour; the others wait in a barrier, their GPUs at 100 %."""
    return _scene(
        s, 2 * H, ("bloom", "megatron", "nemo2"), prepare_s=s.rng.uniform(900.0, 2900.0), start_s=120.0
    )


def evaluation(s: Setup) -> Scene:
    """An evaluation of twelve minutes between steps of 105 s; half of the logs say so."""
    return _scene(s, SHORT_DAY_S, step_s=105.0, eval_every=40, eval_s=720.0, eval_told=s.rng.random() < 0.5)


def evaluation_between_short_steps(s: Setup) -> Scene:
    """The same between steps of seconds."""
    return _scene(
        s,
        4 * H,
        step_s=s.rng.choice((3.0, 8.0, 20.0)),
        eval_every=300,
        eval_s=s.rng.uniform(120.0, 720.0),
        eval_told=s.rng.random() < 0.5,
    )


def long_checkpoint(s: Setup) -> Scene:
    """A checkpoint of up to half an hour: rank 0 writes, the others wait in a barrier. Half of the logs say so."""
    told = s.rng.random() < 0.5
    return _scene(
        s,
        SHORT_DAY_S,
        save_every=s.rng.choice((30, 60)),
        save_s=s.rng.choice((300.0, 700.0, 1600.0)),
        save_told=told,
    )


def batch_ramp(s: Setup) -> Scene:
    """The batch grows, and with it the time of a step."""
    return _scene(
        s, 4 * H, ("bloom", "megatron", "nemo2"), step_s=60.0, ramp=s.rng.choice((60, 150)), every=1
    )


def drift(s: Setup) -> Scene:
    """Steps become one per cent slower within a thousand steps: too little to be told."""
    scene = _scene(s, 4 * H, TIMED_FORMATS, step_s=12.0, jitter=0.02, every=1)
    scene.job.slow = lambda step, t: 1.0 + 0.01 * step / 1000
    return scene


def overflow(s: Setup) -> Scene:
    """fp16 skips steps at the beginning and now and then."""
    scene = _scene(s, 3 * H, ("deepspeed", "bloom"), step_s=10.0, save_every=200)
    scene.job.extra = lambda span, t: (
        overflow_skip(span.step or 0, t) if s.rng.random() < (0.3 if t < 900 else 0.01) else []
    )
    return scene


RETRIES = (
    "botocore.exceptions.ReadTimeoutError: Read timeout on endpoint URL, will retry (attempt 1 of 5)",
    "WARNING: ConnectionResetError(104, 'Connection reset by peer'), retrying in 4 s",
    "wandb: Network error (ConnectionError), entering retry loop.",
    "huggingface_hub: HTTP Error 503 thrown while requesting HEAD, Retrying in 8s [Retry 4/5].",
    "[W socket.cpp:663] [c10d] The client socket has failed to connect to [n0]:29500 (errno: 111 - Connection refused), will retry.",
)


def retries(s: Setup) -> Scene:
    """Errors that are tried again, and then succeed."""
    scene = _scene(s, 3 * H, step_s=20.0)
    scene.job.extra = lambda span, t: [s.rng.choice(RETRIES)] if s.rng.random() < 0.06 else []
    return scene


def moments_in_d(s: Setup) -> Scene:
    """Rank 0 is in D for some seconds up to three quarters of a minute whenever it logs to a slow filesystem."""
    scene = _scene(s, 3 * H, step_s=s.rng.choice((5.0, 30.0)), save_every=100)
    job = scene.job

    def slow_write(t: float) -> None:
        if job.state == "RUNNING" and job.doing == "step":
            job.overrides[0] = replace(
                looks.WORK,
                state="D",
                wchan="cl_sync_io_wait",
                syscall="write",
                path=LOG,
                mount="/gpfs",
                cpu=0.0,
            )
            job.look_again(t)

            def over(now: float) -> None:
                job.overrides.pop(0, None)
                job.look_again(now)

            scene.world.at(t + s.rng.uniform(2.0, 45.0), over)
        scene.world.at(t + s.rng.uniform(60.0, 400.0), slow_write)

    scene.world.at(400.0, slow_write)
    return scene


def starved_gpus(s: Setup) -> Scene:
    """The data loader is slow now and then: all GPUs idle, and their clocks fall because of it."""
    scene = _scene(s, 3 * H, step_s=10.0)
    job = scene.job

    def starve(t: float) -> None:
        if job.state == "RUNNING" and job.doing == "step":
            job.others = replace(looks.LOADER, cpu=0.3, clock_mhz=1155.0)
            job.look_again(t)

            def over(now: float) -> None:
                job.others = None
                job.look_again(now)

            scene.world.at(t + s.rng.uniform(5.0, 25.0), over)
        scene.world.at(t + s.rng.uniform(100.0, 500.0), starve)

    scene.world.at(300.0, starve)
    return scene


def full_utilisation(s: Setup) -> Scene:
    """Now and then rank 0 does something alone for minutes, and all others wait for it at 100 % utilisation
    and little power."""
    scene = _scene(s, 3 * H, step_s=s.rng.choice((10.0, 30.0)), save_every=100)
    job = scene.job

    def begins(span: Span, t: float) -> None:
        waits = span.doing == "step" and s.rng.random() < 0.04
        job.others, job.overrides = (looks.SPIN_REDUCE, {0: looks.COMPILE}) if waits else (None, {})
        if waits:
            span.seconds += s.rng.uniform(20.0, 150.0)
            job.stretch(span, t)
        job.look_again(t)

    job.on_begin = begins
    return scene


def redrawn_bar(s: Setup) -> Scene:
    """A bar that is drawn again every few seconds, many times between two steps: its count rises when a step
    is done."""
    scene = _scene(
        s,
        3 * H,
        ("hf", "lightning", "nemo"),
        step_s=s.rng.choice((20.0, 60.0, 105.0)),
        eval_every=60,
        eval_s=300.0,
    )
    job = scene.job

    def again(t: float) -> None:
        draw = job.format.redraws
        if job.state == "RUNNING" and job.doing == "step" and job.step and draw is not None:
            plan = job.plan
            now = Step(job.step, plan.total, plan.step_s, plan.loss, plan.batch, len(job.ranks), t)
            job.say(t, "\r" + draw(now))
        scene.world.at(t + s.rng.uniform(2.0, 15.0), again)

    scene.world.at(200.0, again)
    return scene  # fmt: skip


def harmless_words(s: Setup) -> Scene:
    """Lines with words like error, fail or exception, at every other step, of which nothing is wrong."""
    scene = _scene(s, 3 * H, step_s=s.rng.choice((10.0, 30.0)), save_every=100)
    scene.job.extra = lambda span, t: [s.rng.choice(HARMLESS)] if s.rng.random() < 0.5 else []
    return scene


def rotated_log(s: Setup) -> Scene:
    """The log is rotated or truncated: lines come a second time, and the count continues."""
    scene = _scene(s, 3 * H, ("bloom", "megatron", "torchtitan", "json", "key_value"), step_s=15.0, every=1)
    job = scene.job
    recent: list[str] = []

    def keep(span: Span, t: float) -> list[str]:
        recent.extend(span.after)
        del recent[:-20]
        return []

    job.extra = keep

    def rotate(t: float) -> None:
        job.say(t, *recent)
        scene.world.at(t + s.rng.uniform(600.0, 2400.0), rotate)

    scene.world.at(900.0, rotate)
    return scene


def replayed_step(s: Setup) -> Scene:
    """Megatron goes back a few steps without a new run, and counts them again."""
    scene = _scene(s, 3 * H, ("bloom", "megatron"), step_s=20.0, every=1)
    job = scene.job

    def replay(t: float) -> None:
        if job.state == "RUNNING" and job.doing == "step":
            back = max(1, job.step - s.rng.randrange(1, 4))
            job.say(t, f"rolling back to iteration {back} and replaying the batch")
            job.rewind(back, t)
        scene.world.at(t + s.rng.uniform(900.0, 2500.0), replay)

    scene.world.at(900.0, replay)
    return scene


def requeue(s: Setup) -> Scene:
    """Slurm requeues the job now and then: it resumes from its checkpoint, on other nodes or fewer of them.
    The log is appended."""
    scene = _scene(s, SHORT_DAY_S, step_s=s.rng.choice((10.0, 45.0)), save_every=40, start_s=120.0)
    job = scene.job

    def again(t: float) -> None:
        if job.state == "RUNNING":
            job.say(
                t,
                f"slurmstepd: error: *** JOB {job.job_id} ON {job.host.name} CANCELLED AT {stamp(t).replace(' ', 'T')} DUE TO JOB REQUEUE ***",
            )
            job.requeue(t)
            kept = max(1, s.nodes // 2) if s.rng.random() < 0.5 else s.nodes
            scene.world.at(
                t + s.rng.uniform(120.0, 1500.0), lambda now: job.start(now, scene.world.nodes[:kept])
            )
        scene.world.at(t + s.rng.uniform(3000.0, 7000.0), again)

    scene.world.at(3000.0, again)
    return scene


def maintenance(s: Setup) -> Scene:
    """The job ends as it should, its nodes are drained and switched off for an hour, and a new job starts there."""
    scene = _scene(s, SHORT_DAY_S, step_s=20.0, total=int(s.rng.uniform(100, 300)), save_every=50)
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
    scene = _scene(s, SHORT_DAY_S, step_s=s.rng.choice((10.0, 60.0)), save_every=30, save_s=30.0)
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
    scene = _scene(
        s, 1.2 * H, step_s=s.rng.choice((5.0, 20.0)), total=int(s.rng.uniform(40, 110)), save_every=30
    )
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
    scene = _scene(s, 2 * H, step_s=20.0, save_every=100)

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


Builder = Callable[[Setup], Scene]


@dataclass(frozen=True)
class Thing:
    """One healthy thing, and how much of the simulated hours is spent on it."""

    name: str
    build: Builder
    share: float = 1.0
    sizes: tuple[tuple[int, int], ...] = ((1, 8), (1, 8), (1, 4), (2, 8), (1, 8), (4, 8))
    """(nodes, ranks a node): drawn in turn by the seed."""
    fine: bool = False
    """Reports every 5 s in every run: about how long an agent may be away."""

    @property
    def key(self) -> str:
        return f"healthy_{self.name}"

    def hours(self, seed: int) -> float:
        """How long this run will be."""
        nodes, per_node = self.sizes[seed % len(self.sizes)]
        return self.build(Setup(seed, nodes, per_node)).until_s / H


SMALL = ((1, 8), (1, 4), (1, 8))
THINGS: tuple[Thing, ...] = (
    Thing("day", day, 12.0, ((1, 8), (1, 4), (1, 8), (1, 8), (2, 8), (1, 8), (1, 4), (1, 8), (1, 4), (8, 8))),
    Thing("day_of_384_ranks", large_day, 0.06, ((48, 8), (24, 8))),
    Thing("fast_steps", fast_steps, 0.4, SMALL),
    Thing("long_start", long_start),
    Thing("index_build", index_build),
    Thing("evaluation", evaluation, 2.0),
    Thing("evaluation_between_short_steps", evaluation_between_short_steps, 0.6, SMALL),
    Thing("long_checkpoint", long_checkpoint, 1.5),
    Thing("batch_ramp", batch_ramp),
    Thing("drift_of_one_percent", drift, 0.8, SMALL),
    Thing("overflow", overflow, 0.6, SMALL),
    Thing("retries", retries, 0.6, SMALL),
    Thing("moments_in_d", moments_in_d, 0.8),
    Thing("starved_gpus", starved_gpus, 0.6),
    Thing("full_utilisation", full_utilisation, 0.8),
    Thing("redrawn_bar", redrawn_bar, 0.6, SMALL),
    Thing("harmless_words", harmless_words, 0.6, SMALL),
    Thing("rotated_log", rotated_log, 0.6, SMALL),
    Thing("replayed_step", replayed_step, 0.6, SMALL),
    Thing("requeue", requeue, 1.5),
    Thing("maintenance", maintenance),
    Thing("chain", chain),
    Thing("end_of_training", end_of_training),
    Thing("agent_restart", agent_restart, 0.4, fine=True),
)
