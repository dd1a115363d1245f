"""Cases of filesystems and checkpoints that fail."""

from __future__ import annotations

from dataclasses import replace

from tests.accuracy import looks
from tests.accuracy.scene import (
    REPORT_S,
    Expect,
    Scene,
    Setup,
)
from tests.accuracy.training import DIRECTORY, LOG


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


def _block(scene: Scene, at: float, numbers: list[int], look: looks.Look, *, everywhere: bool = False) -> None:
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
