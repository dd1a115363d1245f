"""Healthy things that look ill: nothing may be said about any of them, ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.accuracy import healthy_machine, looks
from tests.accuracy.healthy_pauses import (
    cold_cache,
    epoch_boundary,
    network_pauses,
    paused_node,
    something_alone,
    uneven_steps,
)
from tests.accuracy.healthy_runs import agent_restart, chain, end_of_training, maintenance, requeue
from tests.accuracy.healthy_scene import SHORT_DAY_S, H, scene_with
from tests.accuracy.logs import HARMLESS, Step, overflow_skip
from tests.accuracy.scene import TIMED_FORMATS, Scene, Setup
from tests.accuracy.training import LOG, Span


def day(s: Setup) -> Scene:
    """Hours of training: steps, checkpoints, evaluations, PULSE lines, pauses, harmless words, a moment in D."""
    rng = s.rng
    told = rng.random() < 0.5
    scene = scene_with(
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
    scene = scene_with(
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
    return scene_with(s, 1.5 * H, step_s=s.rng.choice((0.7, 1.5, 3.0)), save_every=1000, save_s=30.0)


def long_start(s: Setup) -> Scene:
    """Start-up and compilation of the first steps take up to almost an hour."""
    rng = s.rng
    return scene_with(
        s,
        2 * H,
        start_s=rng.uniform(300.0, 1500.0),
        compile_s=rng.uniform(300.0, 1900.0),
        step_s=rng.choice((5.0, 30.0)),
    )


def index_build(s: Setup) -> Scene:
    """Rank 0 builds the index of the data for most of an hour; the others wait in a barrier, their GPUs at 100 %."""
    return scene_with(s, 2 * H, ("bloom", "megatron", "nemo2"), prepare_s=s.rng.uniform(900.0, 2900.0), start_s=120.0)


def evaluation(s: Setup) -> Scene:
    """An evaluation of twelve minutes between steps of 105 s; half of the logs say so."""
    return scene_with(s, SHORT_DAY_S, step_s=105.0, eval_every=40, eval_s=720.0, eval_told=s.rng.random() < 0.5)


def evaluation_between_short_steps(s: Setup) -> Scene:
    """The same between steps of seconds."""
    return scene_with(
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
    return scene_with(
        s,
        SHORT_DAY_S,
        save_every=s.rng.choice((30, 60)),
        save_s=s.rng.choice((300.0, 700.0, 1600.0)),
        save_told=told,
    )


def batch_ramp(s: Setup) -> Scene:
    """The batch grows, and with it the time of a step."""
    return scene_with(s, 4 * H, ("bloom", "megatron", "nemo2"), step_s=60.0, ramp=s.rng.choice((60, 150)), every=1)


def drift(s: Setup) -> Scene:
    """Steps become one per cent slower within a thousand steps: too little to be told."""
    scene = scene_with(s, 4 * H, TIMED_FORMATS, step_s=12.0, jitter=0.02, every=1)
    scene.job.slow = lambda step, t: 1.0 + 0.01 * step / 1000
    return scene


def overflow(s: Setup) -> Scene:
    """fp16 skips steps at the beginning and now and then."""
    scene = scene_with(s, 3 * H, ("deepspeed", "bloom"), step_s=10.0, save_every=200)
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
    scene = scene_with(s, 3 * H, step_s=20.0)
    scene.job.extra = lambda span, t: [s.rng.choice(RETRIES)] if s.rng.random() < 0.06 else []
    return scene


def moments_in_d(s: Setup) -> Scene:
    """Rank 0 is in D for some seconds up to three quarters of a minute whenever it logs to a slow filesystem."""
    scene = scene_with(s, 3 * H, step_s=s.rng.choice((5.0, 30.0)), save_every=100)
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
    scene = scene_with(s, 3 * H, step_s=10.0)
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
    scene = scene_with(s, 3 * H, step_s=s.rng.choice((10.0, 30.0)), save_every=100)
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
    scene = scene_with(
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
    scene = scene_with(s, 3 * H, step_s=s.rng.choice((10.0, 30.0)), save_every=100)
    scene.job.extra = lambda span, t: [s.rng.choice(HARMLESS)] if s.rng.random() < 0.5 else []
    return scene


def rotated_log(s: Setup) -> Scene:
    """The log is rotated or truncated: lines come a second time, and the count continues."""
    scene = scene_with(s, 3 * H, ("bloom", "megatron", "torchtitan", "json", "key_value"), step_s=15.0, every=1)
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
    scene = scene_with(s, 3 * H, ("bloom", "megatron"), step_s=20.0, every=1)
    job = scene.job

    def replay(t: float) -> None:
        if job.state == "RUNNING" and job.doing == "step":
            back = max(1, job.step - s.rng.randrange(1, 4))
            job.say(t, f"rolling back to iteration {back} and replaying the batch")
            job.rewind(back, t)
        scene.world.at(t + s.rng.uniform(900.0, 2500.0), replay)

    scene.world.at(900.0, replay)
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
    """Reports every 5 s in every run: about what lasts for seconds."""

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
    Thing("cold_cache", cold_cache, 0.2, SMALL, fine=True),
    Thing("something_alone", something_alone, 0.2, SMALL, fine=True),
    Thing("epoch_boundary", epoch_boundary, 0.1, SMALL, fine=True),
    Thing("uneven_steps", uneven_steps, 0.1, SMALL, fine=True),
    Thing("paused_node", paused_node, 0.1, ((2, 4), (3, 2)), fine=True),
    Thing("network_pauses", network_pauses, 0.1, SMALL, fine=True),
    Thing("memory_full_of_cache", healthy_machine.memory, 0.2),
    Thing("moments_in_a_driver", healthy_machine.drivers, 0.2),
    Thing("links_that_come_up", healthy_machine.links, 0.2, ((4, 8), (1, 8), (2, 8))),
)
