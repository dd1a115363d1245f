"""Cases of what the machines say themselves: memory, limits, drivers, links, records of collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from msgspec.structs import replace as changed

from slurm_watchdog.analysis.ras_records import JobProcesses, ras_records
from slurm_watchdog.controller.evidence.collection import FLIGHT_RECORDER, RAS
from slurm_watchdog.model.collective_records import (
    Call,
    CollectiveRecord,
    Communicator,
    RasAnswer,
    RasCommunicator,
    RasRank,
    RecordSet,
)
from slurm_watchdog.model.observations import Link, Pressure, Resource, Usage
from tests.accuracy import looks
from tests.accuracy.looks import Look
from tests.accuracy.scene import HANG, REPORT_S, Expect, Scene, Setup, hang, hang_bound, node_of
from tests.accuracy.training import Job, Node

GIB = 2**30
LIMIT = 512 * GIB
USAGE_S, LINKS_S = 30.0, 60.0
"""Between two looks of an agent."""
KILL = (
    "oom-kill:constraint={kind},nodemask=(null),cpuset=/,mems_allowed=0-1,{group}task={comm},pid={pid},uid=1000",
    "{head}: Killed process {pid} ({comm}) total-vm:75228kB, anon-rss:16777216kB, file-rss:1024kB, shmem-rss:0kB, "
    "UID:1000 pgtables:184kB oom_score_adj:0",
)
"""As Linux 5.14 writes it."""


def kill_lines(pid: int, job_id: str | None, comm: str = "python") -> list[str]:
    """What the kernel writes when it kills a process: of the control group of a job, or, None, of the whole node."""
    place = f"/slurm/uid_1000/job_{job_id}"
    kind, head = ("CONSTRAINT_MEMCG", "Memory cgroup out of memory") if job_id else ("CONSTRAINT_NONE", "Out of memory")
    group = f"oom_memcg={place},task_memcg={place}/step_0/task_0," if job_id else "global_oom,task_memcg=/user.slice,"
    return [line.format(kind=kind, group=group, head=head, comm=comm, pid=pid) for line in KILL]


def memory_of(job: Job, used: float, kills: int | None = 0) -> Usage:
    """The job's control group, with this share of its limit in use."""
    return Usage(
        resource=Resource.MEMORY, used=int(used * LIMIT), limit=LIMIT, refused=kills, job_id=job.job_id
    )  # fmt: skip


def killed_for_memory(s: Setup) -> Scene:
    """The kernel kills a rank: its job has no memory left, or the node; or nobody can read the kernel's log, and a
    counter of the job's control group rises."""
    how = s.rng.choice(("job", "node", "counter"))
    scene = s.scene(Expect(("memory_kill",), also=("dead_rank", "lingering_job"), within_s=REPORT_S))
    scene.expect.within_s = REPORT_S + (USAGE_S if how == "counter" else 0.0)
    if how == "counter":  # read when lingering_job may have fired, which then has the kill in its sentence
        scene.expect.kinds += ("lingering_job",)

    def before(t: float) -> None:
        for node in scene.job.nodes:
            node.usages = (memory_of(scene.job, 0.9),)

    def begin(t: float) -> None:
        job, rank = scene.job, s.some_rank(scene.job)
        node = node_of(scene, rank)
        if how == "counter":
            scene.world.at(t + s.rng.uniform(1.0, USAGE_S), lambda now: counted(node))
        else:
            node.kernel += [(t, line) for line in kill_lines(rank.pid, job.job_id if how == "job" else None)]
        job.freeze(t, looks.SPIN_REDUCE)
        job.kill(t + 0.1, [rank.number])
        scene.expect.nodes, scene.expect.ranks = frozenset({node.name}), frozenset({rank.number})
        scene.fault(t, node.name)

    def counted(node: Node) -> None:
        node.usages = (memory_of(scene.job, 0.9, kills=1),)

    scene.world.at(60.0, before)
    scene.world.at(s.warm_s(scene.job.plan), begin)
    return scene


def worker_killed_for_memory(s: Setup) -> Scene:
    """The kernel kills a data loader's worker, and the rank waits for it for ever."""
    scene = s.scene(Expect(("memory_kill", "collective_hang"), also=(*HANG, "gpu_idle_rank")), workers=2)
    scene.expect.within_s = hang_bound(scene.job)

    def begin(t: float) -> None:
        job, rank = scene.job, s.some_rank(scene.job)
        node, worker = node_of(scene, rank), rank.workers.pop()
        node.kernel += [(t, line) for line in kill_lines(worker.pid, job.job_id, "pt_data_worker")]
        job.freeze(t, looks.SPIN_REDUCE, {rank.number: looks.STARVED})
        scene.expect.nodes = frozenset({node.name})
        scene.fault(t, node.name)

    scene.world.at(s.warm_s(scene.job.plan), begin)
    return scene


def near_a_limit(s: Setup) -> Scene:
    """A job has nearly used up something that it, a rank of it or its node may have: nobody is accused."""
    scene = s.scene(Expect(("near_limit",), nobody=True, within_s=60.0 + REPORT_S))

    def begin(t: float) -> None:
        job, rank = scene.job, s.some_rank(scene.job)
        node = node_of(scene, rank)
        usual, full = memory_of(job, 0.5), round(0.97 * 65536)
        what: tuple[Usage | Pressure, ...] = (
            memory_of(job, 0.97),
            Usage(resource=Resource.PIDS, used=full, limit=65536, refused=0, job_id=job.job_id),
            Usage(resource=Resource.FILES, used=full, limit=65536, job_id=job.job_id, pid=rank.pid, rank=rank.number),
            Usage(resource=Resource.SHARED_MEMORY, used=int(0.98 * 64 * GIB), limit=64 * GIB),
            Pressure(resource="memory", some_ratio=0.6, full_ratio=0.4, job_id=job.job_id),
        )
        near = s.rng.choice(what)
        node.usages = (usual, near) if isinstance(near, Usage) and near.resource is not Resource.MEMORY else (usual,)
        if isinstance(near, Pressure):
            node.pressures = (near,)
        elif near.resource is Resource.MEMORY:
            node.usages = (near,)
        scene.fault(t, node.name)

    scene.world.at(s.warm_s(scene.job.plan), begin)
    scene.until_s = s.warm_s(scene.job.plan) + 400.0
    return scene


def in_driver(path: str | None, wchan: str) -> Look:
    """In uninterruptible sleep in a driver's call: no stack of it can be had."""
    return replace(
        looks.IDLE_GPU, state="D", cpu=0.0, io=0.0, wchan=wchan, syscall="ioctl", call="ioctl", path=path,
        undumpable="Operation not permitted (os error 1)",
    )  # fmt: skip


def driver_stall(s: Setup) -> Scene:
    """A rank sleeps in its GPU's driver, or in that of the network adapter, and does not come back; its peers wait in
    an all_reduce. Once 50 steps were read it is known that the next one is overdue."""
    known = s.rng.random() < 0.5
    every = {"every": 1, "step_s": s.rng.choice((3.0, 10.0))} if known else {}
    scene = s.scene(Expect(("driver_stall",), also=(*HANG, "gpu_idle_rank")), **every)
    scene.expect.within_s = hang_bound(scene.job) if known else 300.0 + 2 * REPORT_S

    def begin(t: float) -> None:
        rank = s.some_rank(scene.job)
        gpu = s.rng.random() < 0.6
        look = (
            in_driver(f"/dev/nvidia{rank.local}", "os_acquire_rwlock_write")
            if gpu
            else in_driver(s.rng.choice(("/dev/infiniband/uverbs0", None)), s.rng.choice(("wait_func", "cmd_exec")))
        )
        scene.job.freeze(t, looks.SPIN_REDUCE, {rank.number: look})
        scene.expect.nodes, scene.expect.ranks = frozenset({rank.node}), frozenset({rank.number})
        scene.expect.gpu = node_of(scene, rank).uuid(rank.local) if gpu else None
        scene.fault(t, rank.node)

    scene.world.at(s.warm_s(scene.job.plan, 70 if known else 14), begin)
    return scene


# ------------------------------------------------------------------------------------ links

Change = Callable[[Node, Link, float], Link]


def fabric(scene: Scene, s: Setup, change: Change, names: tuple[str, ...] = ("mlx5_0/1", "mlx5_1/1")) -> None:
    """Every node of the job has these links, looked at each minute; `change` says what is not as usual."""

    def look(t: float) -> None:
        for node in scene.job.nodes:
            moved = 4e9 * s.rng.uniform(0.9, 1.1)
            usual = [
                Link(
                    name=name, kind="infiniband", up=True, rate_bits_s=400_000_000_000, downs=1, errors=7,
                    received_bytes_s=moved, sent_bytes_s=moved, waits_s=0.0,
                )
                for name in names
            ]  # fmt: skip
            node.links = tuple(change(node, link, t) for link in usual)
        scene.world.at(t + LINKS_S, look)

    scene.world.at(1.0, look)


LINK_FAULTS: dict[str, tuple[Callable[[Link, float], Link], float]] = {
    "down": (lambda link, s: changed(link, up=False, downs=2, received_bytes_s=0.0, sent_bytes_s=0.0), 60.0 + LINKS_S),
    "flaps": (lambda link, s: changed(link, downs=2 if s < 5 * LINKS_S else 3), 6 * LINKS_S),
    "slow": (lambda link, s: changed(link, rate_bits_s=100_000_000_000), LINKS_S),
    "errors": (lambda link, s: changed(link, errors=8 + int(s)), 12 * LINKS_S),
}
"""What becomes of a link with the seconds since the fault, and how soon that is to be found."""


def link_fault(s: Setup) -> Scene:
    """A link of one node goes down, flaps, runs below its rate or has errors that rise, or its adapter does not answer;
    the job trains on."""
    how = s.rng.choice((*LINK_FAULTS, "mute"))
    become, within_s = LINK_FAULTS.get(how, (lambda link, s: link, 60.0))
    scene = s.scene(Expect(("link_fault",), within_s=within_s + REPORT_S))
    at = s.warm_s(scene.job.plan) + 300.0
    bad = scene.job.nodes[s.rng.randrange(len(scene.job.nodes))]
    fabric(
        scene, s,
        lambda node, link, t: become(link, t - at) if t >= at and node is bad and link.name == "mlx5_1/1" else link,
    )  # fmt: skip

    def begin(t: float) -> None:
        if how == "mute":
            bad.hung["links"] = t
        scene.expect.nodes = frozenset({bad.name})
        scene.fault(t, bad.name)

    scene.world.at(at, begin)
    scene.until_s = at + 1000.0
    return scene


HOST_LINES = {
    "memory": (
        "mce: Uncorrected hardware memory error in user-access at 1cf600800",
        "EDAC MC3: 1 UE memory read error on CPU_SrcID#1_MC#1_Chan#2_DIMM#0 (channel:2 slot:0 page:0xb757589 offset:0xdc0)",
    ),
    "cpu": ("mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000800400",),
    "nic": ("mlx5_core 0000:5e:00.0: poll_health:738:(pid 0): device's health compromised - reached miss count",),
    "pcie": (
        "mlx5_core 0000:5e:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)",
    ),
    "disk": ("nvme nvme4: Disabling device after reset failure: -19",),
    "heat": ("thermal thermal_zone0: critical temperature reached (105 C), shutting down",),
}
"""Of a part of a machine that is broken for certain."""


def host_fault(s: Setup) -> Scene:
    """A part of one node that is no GPU breaks, as its kernel says; the job trains on."""
    scene = s.scene(Expect(("host_fault",), within_s=10.0 + 2 * REPORT_S))

    def begin(t: float) -> None:
        node = scene.job.nodes[s.rng.randrange(len(scene.job.nodes))]
        node.kernel += [(t, line) for line in HOST_LINES[s.rng.choice(tuple(HOST_LINES))]]
        scene.expect.nodes = frozenset({node.name})
        scene.fault(t, node.name)

    scene.world.at(s.warm_s(scene.job.plan), begin)
    scene.until_s = s.warm_s(scene.job.plan) + 300.0
    return scene


# ------------------------------------------------------------------------------------ records of collectives


def records_of(scene: Scene, *, absent: bool, without: int = 0) -> Callable[[], tuple[RecordSet, ...]]:
    """What ranks recorded of a hang. `absent`: whoever is expected to be named has not entered the collective.
    `without`: so many of the first ranks wrote nothing."""

    def records() -> tuple[RecordSet, ...]:
        ranks = [(rank.number, rank.pid) for rank in scene.job.ranks][without:]
        processes = JobProcesses({number: ("", pid) for number, pid in ranks}, {})
        everybody = tuple(rank.number for rank in scene.job.ranks)
        missing = (scene.expect.ranks or frozenset()) if absent else frozenset()
        calls = (Call(seq=100, name="all_reduce", elements=1, types=("Float",)),)
        dumps = tuple(
            CollectiveRecord(
                rank=number,
                communicators=(
                    Communicator(
                        key="0", label="default_pg", entered=100 - (number in missing),
                        waits=() if number in missing else calls, members=() if number in missing else everybody,
                    ),
                ),
            )
            for number, _ in ranks
        )  # fmt: skip
        counted = tuple(
            RasRank(rank=number, pid=pid, counts=(("AllReduce", 100 - (number in missing)),)) for number, pid in ranks
        )
        answer = RasAnswer(release="2.28.9", communicators=(RasCommunicator(key="ab", size=len(ranks), ranks=counted),))
        return (
            RecordSet(source=FLIGHT_RECORDER, records=dumps),
            RecordSet(source=RAS, records=ras_records(answer, processes)),
        )

    return records


def seen_with_the_others(s: Setup) -> Scene:
    """One rank waits for its GPU, which has not finished what came before: its stack is that of the others, who are in
    the next all_reduce. Only records tell them apart."""
    scene = s.scene(Expect(HANG))
    scene.expect.within_s = hang_bound(scene.job)
    hang(scene, s, s.warm_s(scene.job.plan), looks.SPIN_REDUCE, looks.SPIN_REDUCE)
    scene.world.records = records_of(scene, absent=True)
    return scene


def seen_elsewhere(s: Setup) -> Scene:
    """The fabric is down. All ranks have begun the all_reduce, and one does something else until it needs the result:
    nobody may be named once the records are there."""
    scene = s.scene(Expect(HANG))
    scene.expect.within_s = hang_bound(scene.job)
    hang(
        scene,
        s,
        s.warm_s(scene.job.plan),
        looks.SPIN_REDUCE,
        replace(looks.LOCKED, util=1.0, power_w=90.0, clock_mhz=1410.0),
    )
    scene.world.records = records_of(scene, absent=False)
    return scene


def without_one_record(s: Setup) -> Scene:
    """The fabric is down, and one rank wrote no record: that is no reason to name it."""
    scene = s.scene(Expect(HANG, nobody=True))
    scene.expect.within_s = hang_bound(scene.job)

    def begin(t: float) -> None:
        scene.job.freeze(t, looks.SPIN_REDUCE)
        scene.fault(t)

    scene.world.at(s.warm_s(scene.job.plan), begin)
    scene.world.records = records_of(scene, absent=False, without=1)
    return scene
