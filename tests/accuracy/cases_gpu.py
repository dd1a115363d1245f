"""Cases of GPUs and drivers that fail."""

from __future__ import annotations

from dataclasses import replace

from tests.accuracy import looks
from tests.accuracy.scene import (
    REPORT_S,
    TIMED_FORMATS,
    Expect,
    Scene,
    Setup,
    node_of,
)
from tests.accuracy.training import Job, Span

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
    scene = s.scene(Expect(("log_error",), also=("dead_rank", "lingering_job"), within_s=3 * REPORT_S), save_every=12)

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


def slow_gpu(s: Setup) -> Scene:
    """One GPU is slowed down by its heat, and the whole job with it: signals name it."""
    scene = s.scene(Expect(("gpu_clock_low", "slow_node"), also=("slow_job",)), TIMED_FORMATS, every=1, step_s=10.0)
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


def late_rank(s: Setup) -> Scene:
    """A rank starts its collectives late in each step: its GPU idles for as long as a step has become longer."""
    by = s.rng.choice((0.1, 0.2, 0.3))
    scene = _later(s, Expect(("straggler",), also=("slow_job",)), by)
    rank = s.rng.randrange(1, s.ranks)

    def begins(span: Span, t: float) -> None:
        if scene.fault_at is not None:
            late = scene.job.ranks[rank]
            late.late = by / (1 + by)
            scene.expect.nodes, scene.expect.ranks = frozenset({late.node}), frozenset({rank})

    scene.job.on_begin = begins
    return scene


def late_by_turns(s: Setup) -> Scene:
    """The same, of another rank in each step: nobody may be named."""
    scene = _later(s, Expect(("slow_job",), nobody=True), 0.2)

    def begins(span: Span, t: float) -> None:
        if scene.fault_at is not None and span.doing == "step":
            for rank in scene.job.ranks:
                rank.late = 0.0
            s.rng.choice(scene.job.ranks).late = 0.2 / 1.2

    scene.job.on_begin = begins
    return scene


def _later(s: Setup, expect: Expect, by: float) -> Scene:
    """Steps take longer by this share from some moment on."""
    scene = s.scene(expect, TIMED_FORMATS, every=1, step_s=8.0, jitter=0.02)
    at = s.warm_s(scene.job.plan, 150)
    scene.expect.within_s = 3600.0

    def begin(t: float) -> None:
        scene.job.slow = lambda step, now: 1 + by
        scene.fault(t)

    scene.world.at(at, begin)
    scene.until_s = at + scene.expect.within_s + 60.0
    return scene


def gpu_off_the_bus(s: Setup) -> Scene:
    """Xid 79; the job hangs on it."""
    scene = s.scene(
        Expect(("gpu_fault",), also=("collective_hang", "stalled_progress", "gpu_idle_rank"), within_s=REPORT_S)
    )

    def begin(t: float) -> None:
        job, rank = scene.job, s.some_rank(scene.job)
        node = node_of(scene, rank)
        node.kernel.append(
            (
                t,
                XID.format(slot=0x10 + rank.local, number=79, pid=rank.pid, text="GPU has fallen off the bus."),
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
