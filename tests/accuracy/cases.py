"""Faults: one function for each row of the case book, and for each way in which it may come. Each builds one
`Scene`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from slurm_watchdog.model.observations import GpuHolder
from tests.accuracy import looks
from tests.accuracy.logs import stamp
from tests.accuracy.scene import (
    REPORT_S,
    TIMED_FORMATS,
    Expect,
    Scene,
    Setup,
    hang,
    hang_bound,
    hang_in,
    node_of,
)
from tests.accuracy.training import DIRECTORY, LOG, Job

HANG = ("collective_hang", "stalled_progress")


def frozen_filesystem(s: Setup) -> Scene:
    """Rank 0 writes its log to a filesystem that its node lost; all others wait in a barrier."""
    scene = s.scene(Expect(("filesystem_stall",), mount="/gpfs"))
    _block(scene, s.warm_s(scene.job.plan), [0], looks.WRITE_BLOCKED)
    return scene


def frozen_filesystem_asleep(s: Setup) -> Scene:
    """The same behind a client whose callers wait in state S."""
    scene = s.scene(Expect(("filesystem_stall",), mount="/gpfs"))
    look = replace(looks.WRITE_BLOCKED, state="S", wchan="request_wait_answer", undumpable=None)
    _block(scene, s.warm_s(scene.job.plan), [0], look)
    return scene


def filesystem_outage(s: Setup) -> Scene:
    """The filesystem itself stops: ranks of two or more nodes are blocked on it."""
    scene = s.scene(Expect(("filesystem_outage",), mount="/gpfs", exclude_nobody=True))
    ranks = [8 * place for place in range(min(s.nodes, 4))]
    _block(scene, s.warm_s(scene.job.plan), ranks, looks.WRITE_BLOCKED, everywhere=True)
    return scene


def _block(
    scene: Scene, at: float, numbers: list[int], look: looks.Look, *, everywhere: bool = False
) -> None:
    def begin(t: float) -> None:
        job, mount = scene.job, scene.world.mounts[0]
        stuck = replace(look, path=LOG, mount="/gpfs")
        job.freeze(t, looks.SPIN, dict.fromkeys(numbers, stuck))
        nodes = {job.ranks[number].node for number in numbers}
        for node in scene.world.nodes if everywhere else [n for n in scene.world.nodes if n.name in nodes]:
            mount.stuck[node.name] = t
        scene.fault(t, None if everywhere else job.ranks[numbers[0]].node)
        if not everywhere:
            scene.expect.nodes, scene.expect.ranks = frozenset(nodes), frozenset(numbers)

    scene.world.at(at, begin)


def hang_at_evaluation(s: Setup) -> Scene:
    """One rank waits for its DataLoader in an evaluation, its peers in a broadcast. The log has a PULSE an hour."""
    scene = s.scene(Expect(HANG), eval_every=20, eval_s=45.0, pulse_s=3600.0)
    told = bool(scene.job.format.evaluating(1, 0.0))
    floor_s = (
        1800.0 + 2 * REPORT_S if told else 0.0
    )  # the configured floor of an evaluation that the log speaks of
    scene.expect.within_s = lambda: max(floor_s, hang_bound(scene.job)())
    hang_in(scene, s, "evaluate", s.warm_s(scene.job.plan), looks.SPIN_EVALUATION, looks.LOADER)
    scene.until_s += 1200.0
    return scene


def hang_in_a_step(s: Setup) -> Scene:
    """One rank waits for a lock, its peers in an all_reduce."""
    scene = s.scene(Expect(HANG))
    scene.expect.within_s = hang_bound(scene.job)
    hang(
        scene,
        s,
        s.warm_s(scene.job.plan),
        looks.SPIN_REDUCE,
        s.rng.choice((looks.LOCKED, looks.ELSEWHERE, looks.LOADER)),
    )
    return scene


def hang_of_everybody(s: Setup) -> Scene:
    """All ranks wait in one collective and none is outside it: the fabric. Nobody may be named."""
    scene = s.scene(Expect(HANG, nobody=True))
    scene.expect.within_s = hang_bound(scene.job)

    def begin(t: float) -> None:
        scene.job.freeze(t, looks.SPIN_REDUCE)
        scene.fault(t)

    scene.world.at(s.warm_s(scene.job.plan), begin)
    return scene


def hang_with_heartbeats(s: Setup) -> Scene:
    """A hang under a status reporter that keeps writing: a PULSE, pings, a bar that is redrawn."""
    scene = s.scene(Expect(HANG), pulse_s=45.0)
    scene.expect.within_s = hang_bound(scene.job)
    at = s.warm_s(scene.job.plan)
    hang(scene, s, at, looks.SPIN_REDUCE, looks.LOADER)

    def ping(t: float) -> None:
        job = scene.job
        job.say(
            t, f"[{stamp(t)}] heartbeat: 8 of 8 processes alive, uptime {t:.0f}", "waiting to be scheduled"
        )
        if t < at + 900:
            scene.world.at(t + 20.0, ping)

    scene.world.at(at + 10.0, ping)
    return scene


XID = "NVRM: Xid (PCI:0000:{slot:02x}:00): {number}, pid={pid}, name=python, {text}"


def gpu_crash(s: Setup) -> Scene:
    """A GPU faults: an error in the log, the rank gone, then all; Slurm requeues the job two steps before its
    next checkpoint."""
    scene = s.scene(
        Expect(("gpu_fault",), also=("log_error", "dead_rank", "lingering_job"), within_s=REPORT_S),
        save_every=12,
    )

    def begin(t: float) -> None:
        job, rank = scene.job, s.some_rank(scene.job)
        node = node_of(scene, rank)
        text = XID.format(slot=0x10 + rank.local, number=79, pid=rank.pid, text="GPU has fallen off the bus.")
        node.kernel.append((t, text))
        node.gpu_changes[rank.local] = {
            "error": "NVML_ERROR_GPU_IS_LOST: GPU is lost",
            "utilization_ratio": None,
            "sm_clock_hz": None,
        }
        _crash(job, t, rank.number, "RuntimeError: CUDA error: unspecified launch failure")
        scene.expect.nodes, scene.expect.gpu = frozenset({node.name}), node.uuid(rank.local)
        scene.fault(t, node.name)
        scene.world.at(t + 25.0, job.requeue)
        scene.world.at(t + 145.0, job.start)

    scene.world.at(s.warm_s(scene.job.plan) + 8.0, begin)
    scene.until_s = s.warm_s(scene.job.plan) + 700.0
    return scene


def gpu_error_in_log(s: Setup) -> Scene:
    """`CUDA error` in the log with the rank's prefix, and nothing from the kernel."""
    scene = s.scene(
        Expect(("log_error",), also=("dead_rank", "lingering_job"), within_s=3 * REPORT_S), save_every=12
    )

    def begin(t: float) -> None:
        job, rank = scene.job, s.some_rank(scene.job)
        _crash(job, t, rank.number, "RuntimeError: CUDA error: an illegal memory access was encountered")
        scene.expect.ranks, scene.expect.first_only = frozenset({rank.number}), True
        scene.fault(t)
        scene.world.at(t + 20.0, job.requeue)
        scene.world.at(t + 140.0, job.start)

    scene.world.at(s.warm_s(scene.job.plan) + 8.0, begin)
    scene.until_s = s.warm_s(scene.job.plan) + 700.0
    return scene


def _crash(job: Job, t: float, number: int, error: str) -> None:
    """One rank writes its traceback and dies; the others wait."""
    head = f"[rank{number}]:"
    job.say(
        t,
        f"{head} Traceback (most recent call last):",
        f'{head}   File "/gpfs/m4/pretrain_gpt.py", line 210, in <module>',
        f"{head}     pretrain(train_valid_test_datasets_provider, model_provider)",
        f"{head} {error}",
    )
    job.freeze(t, looks.SPIN_REDUCE)
    job.kill(t, [number])


def checkpoint_overdue(s: Setup) -> Scene:
    """The job makes steps and does not save any more: what the next crash costs grows."""
    scene = s.scene(
        Expect(("checkpoint_overdue",)),
        ("bloom", "megatron", "maxtext"),
        step_s=10.0,
        save_every=20,
        save_s=20.0,
    )
    at = s.warm_s(scene.job.plan, 70)

    def begin(t: float) -> None:
        saved_at = scene.job.saved[1] if scene.job.saved else t
        scene.job.saves = False
        scene.fault(t)
        scene.expect.within_s = 1800.0 + saved_at - t + 2 * 250.0

    scene.world.at(at, begin)
    scene.until_s = at + 3000.0
    return scene


def lingering_gone(s: Setup, *, zombie: bool = False) -> Scene:
    """One rank dies without a word, the others wait for it, Slurm says RUNNING."""
    scene = s.scene(Expect(("lingering_job", "dead_rank"), within_s=REPORT_S))

    def begin(t: float) -> None:
        job, rank = scene.job, s.some_rank(scene.job)
        job.freeze(t, looks.SPIN_REDUCE)
        job.kill(t, [rank.number], zombie=zombie)
        scene.expect.nodes, scene.expect.ranks = frozenset({rank.node}), frozenset({rank.number})
        scene.fault(t, rank.node)

    scene.world.at(s.warm_s(scene.job.plan), begin)
    return scene


def lingering_zombie(s: Setup) -> Scene:
    """The same; the dead rank stays as a zombie."""
    return lingering_gone(s, zombie=True)


SLOW_STEPS = 36
"""Thirty have to be slow (slow_job.LEAST_STEPS); the first one is dated some steps late where the noise is as
large as the change."""


def slower_by_six_percent(s: Setup) -> Scene:
    """Steps take 111 s instead of 105 s, and stay so; nothing else is seen."""
    scene = s.scene(Expect(("slow_job", "slow_node")), TIMED_FORMATS, every=1, step_s=105.0, jitter=0.02)
    plan = scene.job.plan
    at = s.warm_s(plan, 45)
    scene.expect.within_s = SLOW_STEPS * 111.0 * 1.1 + REPORT_S

    def begin(t: float) -> None:
        scene.job.slow = lambda step, now: 111.0 / 105.0
        scene.fault(t)

    scene.world.at(at, begin)
    scene.until_s = at + 4000.0
    return scene


def slower_by_five_percent(s: Setup) -> Scene:
    """Five per cent at a noise of two: found within thirty steps and what the date of the first one may be off."""
    scene = s.scene(Expect(("slow_job", "slow_node")), TIMED_FORMATS, every=1, step_s=10.0, jitter=0.02)
    at = s.warm_s(scene.job.plan, 150)
    scene.expect.within_s = SLOW_STEPS * 10.5 * 1.05 + REPORT_S

    def begin(t: float) -> None:
        scene.job.slow = lambda step, now: 1.05
        scene.fault(t)

    scene.world.at(at, begin)
    scene.until_s = at + 1200.0
    return scene


def slow_gpu(s: Setup) -> Scene:
    """One GPU is slowed down by its heat, and the whole job with it: signals name it."""
    scene = s.scene(
        Expect(("gpu_clock_low", "slow_node"), also=("slow_job",)), TIMED_FORMATS, every=1, step_s=10.0
    )
    at = s.warm_s(scene.job.plan, 40)
    scene.expect.within_s = 240.0

    def begin(t: float) -> None:
        job, rank = scene.job, s.some_rank(scene.job)
        job.slow = lambda step, now: 1.2
        job.overrides[rank.number] = replace(
            looks.WORK, clock_mhz=1095.0, temp_c=88.0, power_w=300.0, throttle=("hw_thermal_slowdown",)
        )
        job.look_again(t)
        scene.expect.nodes, scene.expect.gpu = frozenset({rank.node}), node_of(scene, rank).uuid(rank.local)
        scene.fault(t, rank.node)

    scene.world.at(at, begin)
    scene.until_s = at + 900.0
    return scene


def loss_spike(s: Setup) -> Scene:
    """The loss jumps, as at step 31,214 of BLOOM, and recovers within thirty steps."""
    scene = s.scene(
        Expect(("loss_spike",)), ("bloom", "megatron", "json", "key_value", "maxtext"), every=1, step_s=8.0
    )
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
                scene.job.say(
                    t + 0.001 * rank.number, WATCHDOG_LINE.format(rank=rank.number, ms=s.rng.randrange(1000))
                )

    scene.world.at(at + 600.0, cascade)
    scene.settle_s = 700.0
    scene.until_s = at + 900.0
    return scene


def nccl_cascade_then_death(s: Setup) -> Scene:
    """The same, but the watchdog ends the processes, as by default; the log is what is left."""
    scene = s.scene(
        Expect((*HANG, "log_error"), also=("log_error", "dead_rank", "lingering_job")), step_s=6.0
    )
    scene.expect.within_s = hang_bound(scene.job)
    at = s.warm_s(scene.job.plan)
    hang(scene, s, at, looks.SPIN_REDUCE, looks.LOADER)

    def cascade(t: float) -> None:
        away = scene.expect.ranks or frozenset()
        for rank in scene.job.ranks:
            if rank.number not in away:
                scene.job.say(
                    t + 0.001 * rank.number, WATCHDOG_LINE.format(rank=rank.number, ms=s.rng.randrange(1000))
                )
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
    scene = s.scene(
        Expect(("log_error",), also=("dead_rank", "lingering_job"), within_s=3 * REPORT_S, first_only=True)
    )

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


def disk_full(s: Setup) -> Scene:
    """`No space left on device` when the checkpoint is written."""
    scene = s.scene(
        Expect(("disk_full",), also=("log_error", "dead_rank", "lingering_job"), within_s=3 * REPORT_S),
        save_every=10,
    )

    def begin(t: float) -> None:
        job = scene.job
        job.say(t, f"OSError: [Errno 28] No space left on device: '{DIRECTORY}/iter_0000020/mp_rank_00.pt'")
        job.freeze(t, looks.SPIN)
        job.kill(t, [0])
        scene.fault(t)
        scene.world.at(t + 20.0, lambda then: job.end(then, "FAILED"))

    scene.world.at(s.warm_s(scene.job.plan), begin)
    scene.until_s = s.warm_s(scene.job.plan) + 300.0
    return scene


def orphan(s: Setup) -> Scene:
    """The job is gone from squeue; on each of its nodes a process of it still holds 520 MiB of GPU 0: one incident."""
    scene = s.scene(Expect(("orphan_gpu_process",), within_s=REPORT_S + 5.0))
    at = s.warm_s(scene.job.plan)

    def begin(t: float) -> None:
        job = scene.job
        left = [(node_of(scene, rank), rank) for rank in job.ranks if rank.local == 0]
        job.end(t, "CANCELLED")
        scene.expect.nodes = frozenset(node.name for node, _ in left)
        scene.expect.gpu = left[0][0].uuid(0) if len(left) == 1 else None

        def hold(now: float, since: float) -> None:
            for node, rank in left:
                node.holders = [
                    GpuHolder(
                        pid=rank.pid,
                        start_ticks=rank.start_ticks,
                        uid=1000,
                        user="ura81os",
                        comm="python",
                        state="S",
                        job_id=job.job_id,
                        gpu_uuids=(node.uuid(0),),
                        minors=(0,),
                        memory_bytes=520 << 20,
                        listed_by_nvml=True,
                        age_s=now,
                        orphan_for_s=now - since,
                    )
                ]
            if now < since + 600:
                scene.world.at(now + 5.0, lambda then: hold(then, since))

        def after_grace(now: float) -> None:
            scene.fault(now, left[0][0].name)
            hold(now, t)

        scene.world.at(t + 60.0, after_grace)

    scene.world.at(at, begin)
    scene.until_s = at + 400.0
    return scene


def chain_broken(s: Setup) -> Scene:
    """Two jobs of a chain: the first reaches its time limit, the second resumes from its checkpoint, fails,
    and nothing is queued behind it."""
    scene = s.scene(
        Expect(("chain_broken",), also=("log_error",), within_s=120.0 + 3 * REPORT_S),
        save_every=5,
        save_s=10.0,
    )
    world, first = scene.world, scene.job
    at = s.warm_s(first.plan)
    after = world.submit(first.plan, 30.0, first.nodes)

    def time_is_over(t: float) -> None:
        first.end(t, "TIMEOUT")
        after.plan = replace(after.plan, first=first.saved[0] if first.saved else 0)
        scene.job = after
        world.at(t + 30.0, after.start)
        world.at(t + at + 60.0, fails)

    def fails(t: float) -> None:
        scene.fault(t)
        after.end(t, "FAILED")

    world.at(at, time_is_over)
    scene.until_s = 2 * at + 800.0
    return scene


def gpu_off_the_bus(s: Setup) -> Scene:
    """Xid 79; the job hangs on it."""
    scene = s.scene(
        Expect(
            ("gpu_fault",), also=("collective_hang", "stalled_progress", "gpu_idle_rank"), within_s=REPORT_S
        )
    )

    def begin(t: float) -> None:
        job, rank = scene.job, s.some_rank(scene.job)
        node = node_of(scene, rank)
        node.kernel.append(
            (
                t,
                XID.format(
                    slot=0x10 + rank.local, number=79, pid=rank.pid, text="GPU has fallen off the bus."
                ),
            )
        )
        node.gpu_changes[rank.local] = {
            "error": "NVML_ERROR_GPU_IS_LOST: GPU is lost",
            "utilization_ratio": None,
            "sm_clock_hz": None,
        }
        job.freeze(t, looks.SPIN_REDUCE, {rank.number: looks.ELSEWHERE})
        scene.expect.nodes, scene.expect.gpu = frozenset({node.name}), node.uuid(rank.local)
        scene.fault(t, node.name)

    scene.world.at(s.warm_s(scene.job.plan), begin)
    return scene


def gpu_ecc(s: Setup) -> Scene:
    """Uncorrectable memory errors: the count rises, and Xid 48 in the kernel's log. The job continues for now."""
    scene = s.scene(Expect(("gpu_fault",), within_s=REPORT_S))

    def begin(t: float) -> None:
        rank = s.some_rank(scene.job)
        node = node_of(scene, rank)
        text = XID.format(
            slot=0x10 + rank.local,
            number=48,
            pid=rank.pid,
            text="An uncorrectable double bit error (DBE) has been detected on GPU in the framebuffer at partition 3, subpartition 0.",
        )
        node.kernel.append((t, text))
        node.gpu_changes[rank.local] = {"ecc_uncorrected": 2}
        scene.expect.nodes, scene.expect.gpu = frozenset({node.name}), node.uuid(rank.local)
        scene.fault(t, node.name)

    scene.world.at(s.warm_s(scene.job.plan), begin)
    scene.until_s = s.warm_s(scene.job.plan) + 400.0
    return scene


def driver_hangs(s: Setup) -> Scene:
    """NVML does not answer on one node any more: which GPU it is cannot be asked."""
    scene = s.scene(Expect(("gpu_fault",), within_s=60.0 + REPORT_S))

    def begin(t: float) -> None:
        node = scene.job.nodes[s.rng.randrange(len(scene.job.nodes))]
        node.hung["nvml"] = t
        mute: dict[str, object] = {
            "error": "NVML gave no answer",
            "utilization_ratio": None,
            "sm_clock_hz": None,
            "power_w": None,
        }
        node.gpu_changes = dict.fromkeys(range(node.gpus), mute)
        scene.expect.nodes = frozenset({node.name})
        scene.fault(t, node.name)

    scene.world.at(s.warm_s(scene.job.plan), begin)
    scene.until_s = s.warm_s(scene.job.plan) + 500.0
    return scene


def rank_that_cannot_be_dumped(s: Setup) -> Scene:
    """A hang in which the culprit's stack cannot be had: that is evidence."""
    scene = s.scene(Expect(HANG))
    scene.expect.within_s = hang_bound(scene.job)
    hang(scene, s, s.warm_s(scene.job.plan), looks.SPIN_REDUCE, looks.UNDUMPABLE)
    return scene


def stopped_rank(s: Setup) -> Scene:
    """A debugger or a signal has left a rank stopped."""
    scene = s.scene(Expect(("rank_stopped",), also=("collective_hang",), within_s=15.0 + REPORT_S))
    hang(scene, s, s.warm_s(scene.job.plan), looks.SPIN_REDUCE, looks.STOPPED)
    return scene


def agent_silent(s: Setup) -> Scene:
    """The agent of one node falls silent; the job continues."""
    scene = s.scene(Expect(("agent_silent",), within_s=45.0))

    def begin(t: float) -> None:
        node = scene.job.nodes[s.rng.randrange(len(scene.job.nodes))]
        node.silent = True
        scene.expect.nodes = frozenset({node.name})
        scene.fault(t, node.name)

    scene.world.at(s.warm_s(scene.job.plan), begin)
    scene.until_s = s.warm_s(scene.job.plan) + 700.0
    scene.settle_s = 600.0
    return scene


def node_down(s: Setup) -> Scene:
    """A node dies: no report, and some time later Slurm says so."""
    scene = s.scene(Expect(("node_down",), also=("agent_silent",) if s.nodes else (), within_s=75.0))

    def begin(t: float) -> None:
        job = scene.job
        node = job.nodes[s.rng.randrange(len(job.nodes))]
        node.silent = True
        job.freeze(t, looks.SPIN_REDUCE)
        scene.expect.nodes = frozenset({node.name})
        scene.fault(t, node.name)

        def slurm_sees(now: float) -> None:
            node.state = "DOWN*"
            job.requeue(now)

        scene.world.at(t + 40.0, slurm_sees)

    scene.world.at(s.warm_s(scene.job.plan), begin)
    scene.until_s = s.warm_s(scene.job.plan) + 400.0
    return scene


def partition(s: Setup) -> Scene:
    """Many agents fall silent at once: the network. No job is touched, no node accused by name alone."""
    scene = s.scene(Expect(("partition_or_outage",), within_s=45.0 + 10.0, exclude_nobody=True))

    def begin(t: float) -> None:
        for node in scene.world.nodes:
            node.silent = True
        scene.fault(t)

    scene.world.at(s.warm_s(scene.job.plan), begin)
    scene.until_s = s.warm_s(scene.job.plan) + 700.0
    scene.settle_s = 500.0
    return scene


def slurm_unreachable(s: Setup) -> Scene:
    """Slurm does not answer any more; the job trains on."""
    scene = s.scene(Expect(("slurm_unreachable",), within_s=60.0 + REPORT_S + 2.0))

    def begin(t: float) -> None:
        scene.world.slurm_answers = False
        scene.fault(t)

    scene.world.at(s.warm_s(scene.job.plan), begin)
    scene.until_s = s.warm_s(scene.job.plan) + 700.0
    scene.settle_s = 500.0
    return scene


def crash_loop(s: Setup) -> Scene:
    """The job restarts and dies before its first new step, again and again."""
    scene = s.scene(Expect(("crash_loop",), also=("log_error",)), save_every=5, start_s=40.0, compile_s=5.0)
    at = s.warm_s(scene.job.plan)
    words = "RuntimeError: Error(s) in loading state_dict for GPTModel: size mismatch for embedding"

    def die(t: float, left: int) -> None:
        job = scene.job
        if scene.fault_at is None:
            scene.fault(t)
        job.say(t, "[rank3]: Traceback (most recent call last):", f"[rank3]: {words}")
        job.freeze(t, None)
        job.kill(t, [rank.number for rank in job.ranks])
        scene.world.at(t + 6.0, job.requeue)
        if left:
            scene.world.at(t + 25.0, job.start)
            scene.world.at(t + 60.0, lambda now: die(now, left - 1))

    scene.world.at(at, lambda t: die(t, 5))
    scene.expect.within_s = (
        3 * 60.0 + 2 * REPORT_S + 15.0
    )  # it dies for the third time without a step, and Slurm says so
    scene.until_s = at + 700.0
    return scene


def wedged_teardown(s: Setup) -> Scene:
    """The last step is done; the ranks hang in destroy_process_group."""
    scene = s.scene(Expect(("wedged_teardown",)), total=24, save_every=12, every=1)

    def begins(span: object, t: float) -> None:
        if scene.job.doing == "end":
            scene.job.on_begin = None
            scene.world.at(t + 2.0, wedge)

    def wedge(t: float) -> None:
        scene.job.freeze(t, looks.TEARDOWN)
        scene.fault(t)

    scene.job.on_begin = begins
    said = scene.job.format.name in ("bloom", "megatron", "hf", "lightning", "json")
    soon = hang_bound(scene.job)
    scene.expect.within_s = lambda: max(120.0 + REPORT_S, soon())
    scene.expect.without_stacks_s = 480.0 if said else 1740.0
    if not said:  # without stacks nothing tells the last step from any other one
        scene.expect.without_stacks = ("stalled_progress",)
    scene.until_s = s.warm_s(scene.job.plan, 30) + 2300.0
    return scene


Builder = Callable[[Setup], Scene]
ALL = (1, 2, 4, 8, 16, 48)


@dataclass(frozen=True)
class Case:
    """One way in which a row of the case book comes true."""

    row: int
    name: str
    build: Builder
    sizes: tuple[int, ...] = ALL
    by_trace: bool = True
    """Whether a plain trace, without anybody who answers questions, holds enough for the verdict."""

    @property
    def key(self) -> str:
        return f"case_{self.row:02d}_{self.name}"


CASES: tuple[Case, ...] = (
    Case(1, "frozen_filesystem", frozen_filesystem),
    Case(1, "frozen_filesystem_asleep", frozen_filesystem_asleep),
    Case(1, "filesystem_outage", filesystem_outage, (2, 4, 8, 16, 48)),
    Case(2, "hang_at_evaluation", hang_at_evaluation),
    Case(2, "hang_in_a_step", hang_in_a_step),
    Case(2, "hang_of_everybody", hang_of_everybody),
    Case(3, "hang_with_heartbeats", hang_with_heartbeats),
    Case(4, "gpu_crash", gpu_crash),
    Case(4, "gpu_error_in_log", gpu_error_in_log),
    Case(4, "checkpoint_overdue", checkpoint_overdue, (1, 2)),
    Case(5, "lingering_gone", lingering_gone),
    Case(5, "lingering_zombie", lingering_zombie),
    Case(6, "slower_by_six_percent", slower_by_six_percent, (1, 2)),
    Case(6, "slower_by_five_percent", slower_by_five_percent, (1, 2)),
    Case(6, "slow_gpu", slow_gpu),
    Case(7, "loss_spike", loss_spike, (1, 2)),
    Case(7, "loss_nan", loss_nan, (1, 2)),
    Case(8, "nccl_cascade", nccl_cascade),
    Case(8, "nccl_cascade_then_death", nccl_cascade_then_death),
    Case(9, "interleaved_tracebacks", interleaved_tracebacks),
    Case(10, "error_class", error_class, (1, 2, 8)),
    Case(10, "disk_full", disk_full, (1, 2, 8)),
    Case(11, "orphan", orphan, (1, 2, 8), by_trace=False),
    Case(12, "chain_broken", chain_broken, (1, 8)),
    Case(13, "gpu_off_the_bus", gpu_off_the_bus),
    Case(13, "gpu_ecc", gpu_ecc),
    Case(13, "driver_hangs", driver_hangs, (1, 8), by_trace=False),
    Case(14, "rank_that_cannot_be_dumped", rank_that_cannot_be_dumped),
    Case(14, "stopped_rank", stopped_rank),
    Case(15, "agent_silent", agent_silent),
    Case(15, "node_down", node_down),
    Case(15, "partition", partition, (2, 4, 8, 16, 48)),
    Case(15, "slurm_unreachable", slurm_unreachable, (1, 8), by_trace=False),
    Case(16, "crash_loop", crash_loop, (1, 2, 8)),
    Case(18, "wedged_teardown", wedged_teardown),
)
"""Rows 17 and 19 are about what the watchdog does, not what it sees (tests/unit/controller/test_ladder.py,
tests/simulation); 20 is healthy."""
