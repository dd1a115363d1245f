"""Cases of nodes, agents, Slurm, and jobs in a row that fail."""

from __future__ import annotations

from dataclasses import replace

from slurm_watchdog.model.observations import GpuHolder
from tests.accuracy import looks
from tests.accuracy.scene import (
    REPORT_S,
    Expect,
    Scene,
    Setup,
    node_of,
)


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
