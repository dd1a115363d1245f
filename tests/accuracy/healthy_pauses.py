"""Healthy pauses of trainings with short steps, some tens of seconds long and not a word in the log: what a hang looks
like to anybody who has only seconds to look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.accuracy import looks
from tests.accuracy.healthy_scene import H, scene_with
from tests.accuracy.looks import Look
from tests.accuracy.scene import Scene, Setup
from tests.accuracy.training import Job, Span

FORMATS_A_STEP = ("json", "key_value", "nanogpt", "torchtitan")
_LOOP = ("train (training.py)", "<module> (pretrain_gpt.py)")
_WAIT = ("wait (threading.py)", "result (concurrent/futures/_base.py)")
_FORK = replace(looks.DEADLOCKED, frames=(("spawn_pool (pool.py)", *_LOOP),), cpu=0.02)


def _idle(*frames: str, **changes: object) -> Look:
    return replace(looks.DEADLOCKED, frames=((*frames, *_LOOP),), **changes)  # type: ignore[arg-type]


READS_COLD_DATA = tuple(
    replace(looks.STARVED, worker=worker, others=others, call=call)
    for worker, others, call in (
        (looks.WORKER_READS, (), "futex"),
        (replace(looks.WORKER_READS, state="S", call="recvfrom"), (), "poll"),
        (replace(looks.WORKER_READS, state="S", call="read"), (), "futex"),
        (looks.WORKER_SLEEPS, (), "futex"),
        (looks.WORKER_FETCHES, (), "poll"),
        (replace(looks.WORKER_LOCKED, thread=("read (ssl.py)", "download (client.py)")), (), "futex"),
        (replace(looks.WORKER_LOCKED, cpu=0.6), (), "futex"),
        (looks.WORKER_WAITS, (looks.waiting("pread64"),), "futex"),
    )
)
"""One rank waits for its data loader: its workers, or a thread of its own, read from a disk, a filesystem that waits in
S, a server, or wait before they try again."""

ALONE = (
    looks.COMPILE,
    looks.EVALUATE,
    replace(looks.EVALUATE, frames=(("generate (sampling.py)", "show_samples (training.py)", *_LOOP),)),
    looks.ELSEWHERE,
    _idle("send (ssl.py)", "urlopen (urllib/request.py)", "notify (alerts.py)", call="sendto"),
    _idle("log_metrics (tracker.py)", others=(looks.waiting("sendto"),)),
    _idle(
        *_WAIT, "push (artifacts.py)", others=(looks.waiting("sendto"),), thread=("send (ssl.py)", "put (client.py)")
    ),
    _idle(*_WAIT, "push (artifacts.py)", others=(looks.waiting("recvfrom", name="s3-crt"),)),
    _idle(*_WAIT, "push (artifacts.py)", others=(looks.waiting("epoll_wait", name="AwsEventLoop 1"),)),
    _idle("join (threading.py)", "flush (tracker.py)", others=(looks.waiting("clock_nanosleep"),)),
    _idle("wait_for (helpers.py)", call="clock_nanosleep"),
    _idle("fetch_weights (hub.py)", call="recvfrom"),
    _idle("take_turn (state.py)", call="fcntl"),
    _idle("step (env.py)", call="read"),
    _idle("_async_write (store.py)", others=(looks.waiting("pwrite64", state="D"),)),
    _idle("barrier_of_writers (store.py)", io=4e5, others=(looks.waiting("pwrite64"),)),
    replace(looks.DEADLOCKED, state="R", cpu=1.0, call="", frames=(("step (optimizer.py)", *_LOOP),)),
    replace(looks.SAVE, io=5e3, cpu=0.0, state="D", call="write"),
    replace(looks.SAVE, io=2e4, cpu=0.01, state="S", call="write"),
    _FORK,
)
"""One rank does something alone, and says nothing of it: it compiles again, evaluates, samples, asks a program, sends,
uploads (itself, by a thread of Python, by threads of compiled code), tries again later, waits for a file lock or a
simulator, writes a checkpoint to a slow filesystem, collects garbage, starts a pool."""

BOUNDARY = (
    looks.STARVED,
    replace(looks.DEADLOCKED, frames=(("join (multiprocessing/process.py)", "_shutdown_workers (torch/utils/data/dataloader.py)", *_LOOP),), call="wait4"),
    replace(looks.DEADLOCKED, frames=(("start (multiprocessing/process.py)", "__init__ (torch/utils/data/dataloader.py)", *_LOOP),), cpu=0.4),
)  # fmt: skip
"""At the end of an epoch: new workers are started, old ones leave."""
BUSY_WORKERS = (
    looks.WORKER_READS,
    looks.WORKER_SLEEPS,
    looks.WORKER_FETCHES,
    looks.WORKER_WORKS,
    replace(looks.WORKER_LOCKED, others=(looks.waiting("epoll_wait", name="AwsEventLoop 1"),)),
    replace(looks.WORKER_LOCKED, others=(looks.waiting("pread64"),)),
)


def _pauses(s: Setup, begin: Callable[[Job, float], None], every_s: float, longest_s: float = 50.0) -> Scene:
    """A training with steps of 0.4 to 2 s, in which `begin` makes ranks look like something else now and then, for 15 s
    to `longest_s`."""
    step_s = s.rng.choice((0.4, 1.0, 2.0))
    scene = scene_with(s, 1.0 * H, FORMATS_A_STEP, step_s=step_s, every=1, workers=2, start_s=60.0)
    scene.world.dated_lines = False
    job, rng = scene.job, s.rng
    due = [180.0 + every_s * rng.random()]

    def begins(span: Span, t: float) -> None:
        pauses = span.doing == "step" and t >= due[0]
        job.others, job.overrides = None, {}
        for node in scene.world.nodes:
            node.silent = False
        if pauses:
            due[0] = t + every_s * (0.5 + rng.random())
            span.seconds += rng.uniform(15.0, longest_s)
            begin(job, t)
            job.stretch(span, t)
        job.look_again(t)

    job.on_begin = begins
    return scene


def _one(job: Job, s: Setup, look: Look, others: Look = looks.SPIN_REDUCE, number: int | None = None) -> None:
    rank = s.rng.randrange(len(job.ranks)) if number is None else number
    job.others, job.overrides = others, {rank: look}


def cold_cache(s: Setup) -> Scene:
    """The data loader of one rank pauses every few thousand steps."""
    return _pauses(s, lambda job, t: _one(job, s, s.rng.choice(READS_COLD_DATA)), s.rng.choice((300.0, 900.0, 1500.0)))


def something_alone(s: Setup) -> Scene:
    """Rank 0, or another one, does something alone; each pause is of another kind."""
    number = 0 if s.rng.random() < 0.6 else None
    return _pauses(s, lambda job, t: _one(job, s, s.rng.choice(ALONE), number=number), 500.0)


def epoch_boundary(s: Setup) -> Scene:
    """All ranks wait for new data loaders, some longer than others."""

    def begin(job: Job, t: float) -> None:
        look = s.rng.choice(BOUNDARY)
        done = s.rng.randrange(len(job.ranks))
        worker = s.rng.choice(BUSY_WORKERS)
        job.others = replace(look, worker=worker)
        job.overrides = dict.fromkeys(range(done), replace(looks.SPIN_REDUCE, worker=worker))

    return _pauses(s, begin, 700.0)


def uneven_steps(s: Setup) -> Scene:
    """Sequences of any length: most steps take a second, one in a hundred up to a minute."""
    scene = scene_with(s, 1.0 * H, FORMATS_A_STEP, step_s=1.0, jitter=0.25, every=1, pause_s=s.rng.choice((20.0, 50.0)))
    scene.world.dated_lines = False
    job = scene.job

    def begins(span: Span, t: float) -> None:
        alone = span.doing == "step" and span.seconds > 4.0 and s.rng.random() < 0.5
        job.others, job.overrides = (
            (looks.SPIN_REDUCE, {s.rng.randrange(len(job.ranks)): looks.WORK}) if alone else (None, {})
        )
        job.look_again(t)

    job.on_begin = begins
    return scene


def paused_node(s: Setup) -> Scene:
    """The hypervisor stops one node for a while; its agent stops with it, and the others wait."""

    def begin(job: Job, t: float) -> None:
        node = s.rng.choice(job.nodes)
        job.others = looks.SPIN_REDUCE
        job.overrides = {rank.number: looks.DEADLOCKED for rank in job.ranks if rank.node == node.name}
        node.silent = True

    return _pauses(s, begin, 500.0, longest_s=20.0)  # with a report that comes late: more is an agent that is silent


def network_pauses(s: Setup) -> Scene:
    """The network stops for a while, and comes back: all ranks are in one collective."""

    def begin(job: Job, t: float) -> None:
        job.others = looks.SPIN_REDUCE

    return _pauses(s, begin, 500.0)
