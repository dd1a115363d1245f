"""Healthy machines that look ill: memory that is full of cache, links that come up, drivers that take their time."""

from __future__ import annotations

from msgspec.structs import replace as changed

from slurm_watchdog.agent.proc.control_groups import read_group
from slurm_watchdog.model.observations import Link, Resource, Usage
from tests.accuracy.cases_machine import LIMIT, fabric, in_driver, kill_lines, memory_of
from tests.accuracy.healthy_scene import H, scene_with
from tests.accuracy.scene import Scene, Setup
from tests.accuracy.training import Node

MANY_PROCESSES = 4_000_000
"""No pid of the simulated job."""
CORRECTED = (
    "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0 (channel:1 slot:0 page:0x123 offset:0x0 grain:32)",
    "nvme 0000:01:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
    "mce: [Hardware Error]: Machine check events logged",
)
"""Lines of a kernel about what was put right."""


def memory(s: Setup) -> Scene:
    """The job's group is full of cache of files, and for moments of memory; helpers of it are killed by the kernel and
    it trains on; data loader's workers are killed by their own parent; and others are killed for memory beside it.
    Errors of memory and of the bus are corrected now and then."""
    scene = scene_with(s, 2 * H, step_s=s.rng.choice((5.0, 15.0)), workers=2, save_every=60, save_s=30.0)
    job, rng = scene.job, s.rng

    def usage(node: Node, t: float) -> Usage:
        if job.doing == "save" and rng.random() < 0.3:
            return memory_of(job, 0.97)
        files = {
            "memory.current": int(0.995 * LIMIT), "memory.max": LIMIT, "memory.peak": LIMIT,
            "memory.events": f"max {int(t)}\noom 0\noom_kill 0",
            "memory.stat": f"active_file {int(0.3 * LIMIT)}\ninactive_file {int(0.3 * LIMIT)}\nanon {int(0.39 * LIMIT)}",
        }  # fmt: skip
        read = read_group("", Resource.MEMORY, True, lambda path: str(files[path.lstrip("/")]).encode())
        assert read is not None
        return changed(read, job_id=job.job_id)

    def look(t: float) -> None:
        for node in job.nodes:
            node.usages = (usage(node, t),) if job.state == "RUNNING" else ()
        scene.world.at(t + 30.0, look)

    def killed(t: float) -> None:
        node, pid = rng.choice(job.nodes), MANY_PROCESSES + int(t)
        whose = rng.choice((job.job_id, "77", None))
        node.kernel += [(t, line) for line in kill_lines(pid, whose, rng.choice(("python", "sshd", "git")))]
        node.kernel += [(t, line) for line in rng.sample(CORRECTED, rng.randrange(len(CORRECTED)))]
        if job.state == "RUNNING" and rng.random() < 0.5:  # their own parent ends them, at the end of an epoch
            for rank in job.ranks:
                for worker in rank.workers:
                    worker.pid, worker.start_ticks = worker.pid + 500, int(100 * t)
        scene.world.at(t + rng.uniform(300.0, 1200.0), killed)

    scene.world.at(20.0, look)
    scene.world.at(400.0, killed)
    return scene


def drivers(s: Setup) -> Scene:
    """All ranks are in their GPUs' driver while it is loaded and memory is registered, and one now and then for some
    seconds, while it waits for nothing that others wait for."""
    scene = scene_with(s, 2 * H, step_s=s.rng.choice((5.0, 30.0)), start_s=240.0, save_every=100)
    job, rng = scene.job, s.rng

    def busy(t: float, seconds: float, numbers: list[int]) -> None:
        path, wchan = rng.choice((("/dev/nvidia0", "nvidia_ioctl"), ("/dev/infiniband/uverbs0", "ib_umem_get")))
        job.overrides.update(dict.fromkeys(numbers, in_driver(path, wchan)))
        job.look_again(t)
        scene.world.at(t + seconds, over)

    def over(t: float) -> None:
        job.overrides.clear()
        job.look_again(t)

    def moment(t: float) -> None:
        if job.state == "RUNNING" and job.doing in ("step", "save"):
            busy(t, rng.uniform(2.0, 50.0), [rng.randrange(len(job.ranks))])
        scene.world.at(t + rng.uniform(100.0, 500.0), moment)

    for at in (20.0, 90.0, 160.0):
        scene.world.at(at, lambda t: busy(t, rng.uniform(5.0, 55.0), [rank.number for rank in job.ranks]))
    scene.world.at(400.0, moment)
    return scene


def links(s: Setup) -> Scene:
    """Links flap while the node starts, one is a port without a cable, one went down once; errors rise now and then, or
    on all nodes at once; and the network of one node is of another kind."""
    scene = scene_with(s, 3 * H, step_s=20.0, save_every=100)
    rng = s.rng
    shared = s.nodes > 1 and rng.random() < 0.5
    fell = {node.name: rng.uniform(600.0, 2 * H) for node in scene.job.nodes}

    def change(node: Node, link: Link, t: float) -> Link:
        if link.name == "mlx5_3/1":
            return changed(link, up=False, rate_bits_s=10_000_000_000, received_bytes_s=0.0, sent_bytes_s=0.0)
        if t < 240.0:  # before anything goes through it
            up = rng.random() < 0.5
            return changed(link, up=up, downs=int(t / 20.0), received_bytes_s=0.0, sent_bytes_s=0.0)
        errors = int(t) if shared else 7 + int(t // 1900)
        downs = 12 + (t > fell[node.name])
        if link.name == "eno1":
            return changed(
                link, kind="ethernet", rate_bits_s=1_000_000_000 * (1 + 9 * (node.index == 0)), errors=errors
            )
        return changed(link, errors=errors, downs=downs)

    fabric(scene, s, change, ("mlx5_0/1", "mlx5_3/1", "eno1"))
    return scene
