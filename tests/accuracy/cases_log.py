"""Cases whose cause is in the job's log: errors of a class, cascades, losses."""

from __future__ import annotations

import math

from tests.accuracy import looks
from tests.accuracy.scene import (
    HANG,
    REPORT_S,
    Expect,
    Scene,
    Setup,
    hang,
    hang_bound,
)


def loss_spike(s: Setup) -> Scene:
    """The loss jumps, as at step 31,214 of BLOOM, and recovers within thirty steps."""
    scene = s.scene(Expect(("loss_spike",)), ("bloom", "megatron", "json", "key_value", "maxtext"), every=1, step_s=8.0)
    at = s.warm_s(scene.job.plan, 60)
    scene.expect.within_s = 10 * 8.0 + REPORT_S

    def begin(t: float) -> None:
        first = scene.job.step + 2
        scene.job.loss_at = lambda step, loss: (
            loss + 2.7 * math.exp(-(step - first) / 10) if first <= step < first + 30 else loss
        )
        scene.fault(t)

    scene.world.at(at, begin)
    scene.until_s = at + 700.0
    return scene


def loss_nan(s: Setup) -> Scene:
    """The loss becomes NaN and stays so."""
    scene = s.scene(
        Expect(("loss_nan",)),
        ("bloom", "megatron", "json", "key_value", "maxtext", "lightning", "nemo2"),
        every=1,
        step_s=8.0,
    )
    at = s.warm_s(scene.job.plan, 30)
    scene.expect.within_s = 6 * 8.0 + REPORT_S

    def begin(t: float) -> None:
        scene.job.loss_at = lambda step, loss: math.nan
        scene.fault(t)

    scene.world.at(at, begin)
    scene.until_s = at + 500.0
    return scene


WATCHDOG_LINE = (
    "[rank{rank}]:[E ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=40512, "
    "OpType=ALLREDUCE, NumelIn=26214400, NumelOut=26214400, Timeout(ms)=600000) ran for 600{ms:03d} milliseconds before timing out."
)


def nccl_cascade(s: Setup) -> Scene:
    """A rank stays away; after ten minutes every other rank's NCCL watchdog writes its line. One incident,
    and the silent one named."""
    scene = s.scene(Expect((*HANG, "log_error"), also=("log_error",)), step_s=6.0)
    scene.expect.within_s = hang_bound(scene.job)
    at = s.warm_s(scene.job.plan)
    hang(scene, s, at, looks.SPIN_REDUCE, looks.ELSEWHERE)

    def cascade(t: float) -> None:
        away = scene.expect.ranks or frozenset()
        for rank in scene.job.ranks:
            if rank.number not in away:
                scene.job.say(t + 0.001 * rank.number, WATCHDOG_LINE.format(rank=rank.number, ms=s.rng.randrange(1000)))

    scene.world.at(at + 600.0, cascade)
    scene.settle_s = 700.0
    scene.until_s = at + 900.0
    return scene


def nccl_cascade_then_death(s: Setup) -> Scene:
    """The same, but the watchdog ends the processes, as by default; the log is what is left."""
    scene = s.scene(Expect((*HANG, "log_error"), also=("log_error", "dead_rank", "lingering_job")), step_s=6.0)
    scene.expect.within_s = hang_bound(scene.job)
    at = s.warm_s(scene.job.plan)
    hang(scene, s, at, looks.SPIN_REDUCE, looks.LOADER)

    def cascade(t: float) -> None:
        away = scene.expect.ranks or frozenset()
        for rank in scene.job.ranks:
            if rank.number not in away:
                scene.job.say(t + 0.001 * rank.number, WATCHDOG_LINE.format(rank=rank.number, ms=s.rng.randrange(1000)))
        scene.world.at(
            t + 6.0,
            lambda then: scene.job.kill(then, [r.number for r in scene.job.ranks if r.number not in away]),
        )
        scene.world.at(t + 20.0, lambda then: scene.job.end(then, "FAILED"))

    scene.world.at(at + 300.0, cascade)
    scene.settle_s = 400.0
    scene.until_s = at + 700.0
    return scene


def interleaved_tracebacks(s: Setup) -> Scene:
    """One rank fails first, the others fail for it, and all print over each other. The first is named."""
    scene = s.scene(Expect(("log_error",), also=("dead_rank", "lingering_job"), within_s=3 * REPORT_S, first_only=True))

    def begin(t: float) -> None:
        job = scene.job
        first = s.some_rank(job)
        lines = []
        for rank in [
            first,
            *s.rng.sample([r for r in job.ranks if r is not first], min(23, len(job.ranks) - 1)),
        ]:
            error = (
                "ValueError: token id 250880 is out of range"
                if rank is first
                else "RuntimeError: Connection reset by peer"
            )
            head = f"{rank.node}: [default{rank.local}]:" if s.seed % 2 else f"[rank{rank.number}]: "
            lines.append(
                [
                    f"{head}Traceback (most recent call last):",
                    f'{head}  File "train.py", line {100 + rank.number}, in step',
                    f"{head}{error}",
                ]
            )
        for depth in range(3):
            for place, own in enumerate(lines):
                job.say(t + (0.05 * depth if place == 0 else 0.6 + 0.05 * depth), own[depth])
        job.lines.sort(key=lambda each: each[0])
        if not s.seed % 2:
            scene.expect.ranks = frozenset({first.number})
        job.freeze(t, looks.SPIN_REDUCE)
        job.kill(t, [rank.number for rank in job.ranks])
        scene.fault(t)
        scene.world.at(t + 12.0, lambda then: job.end(then, "FAILED"))

    scene.world.at(s.warm_s(scene.job.plan), begin)
    scene.until_s = s.warm_s(scene.job.plan) + 300.0
    return scene


ERRORS: tuple[tuple[str, str], ...] = (
    (
        "cuda_oom",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.15 GiB",
    ),
    (
        "port_in_use",
        "[E socket.cpp:922] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
    ),
    (
        "infiniband",
        "node7:2187:2301 [2] transport/net_ib.cc:1278 NCCL WARN NET/IB : Got completion from peer 10.0.0.7<55012> with error 12, opcode 0, len 0, vendor err 129",
    ),
    ("stale", "OSError: [Errno 116] Stale file handle: '/gpfs/data/shard_0412.bin'"),
    ("segfault", "Fatal Python error: Segmentation fault"),
    ("loader", "RuntimeError: DataLoader worker (pid 23121) is killed by signal: Killed."),
)


def error_class(s: Setup) -> Scene:
    """One class of error each: out of memory, port in use, InfiniBand, stale file handle, core dump, a killed
    DataLoader worker."""
    name, line = ERRORS[s.seed % len(ERRORS)]
    scene = s.scene(Expect(("log_error",), also=("dead_rank", "lingering_job"), within_s=3 * REPORT_S))

    def begin(t: float) -> None:
        job, rank = scene.job, s.some_rank(scene.job)
        job.say(t, f"[rank{rank.number}]: {line}" if name != "infiniband" else line)
        job.freeze(t, looks.SPIN_REDUCE)
        job.kill(t, [each.number for each in job.ranks])
        scene.fault(t)
        scene.world.at(t + 8.0, lambda then: job.end(then, "FAILED"))

    scene.world.at(s.warm_s(scene.job.plan), begin)
    scene.until_s = s.warm_s(scene.job.plan) + 300.0
    return scene
