"""Faults: one function for each row of the case book, and for each way in which it may come. Each builds one
`Scene`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.accuracy import looks
from tests.accuracy.cases_cluster import (
    agent_silent,
    chain_broken,
    crash_loop,
    node_down,
    orphan,
    partition,
    slurm_unreachable,
)
from tests.accuracy.cases_filesystem import (
    checkpoint_overdue,
    disk_full,
    filesystem_outage,
    frozen_filesystem,
    frozen_filesystem_asleep,
)
from tests.accuracy.cases_gpu import (
    driver_hangs,
    gpu_crash,
    gpu_ecc,
    gpu_error_in_log,
    gpu_off_the_bus,
    late_by_turns,
    late_rank,
    slow_gpu,
)
from tests.accuracy.cases_log import (
    error_class,
    interleaved_tracebacks,
    loss_nan,
    loss_spike,
    nccl_cascade,
    nccl_cascade_then_death,
)
from tests.accuracy.cases_machine import (
    driver_stall,
    host_fault,
    killed_for_memory,
    link_fault,
    near_a_limit,
    seen_with_the_others,
    without_one_record,
    worker_killed_for_memory,
)
from tests.accuracy.logs import stamp
from tests.accuracy.scene import (
    HANG,
    REPORT_S,
    TIMED_FORMATS,
    Expect,
    Scene,
    Setup,
    hang,
    hang_bound,
    hang_in,
)


def hang_at_evaluation(s: Setup) -> Scene:
    """One rank waits for its DataLoader in an evaluation, its peers in a broadcast. The log has a PULSE an hour."""
    scene = s.scene(Expect(HANG), eval_every=20, eval_s=EVALUATION_S, pulse_s=3600.0)
    floor_s = 1800.0 + 2 * REPORT_S if scene.job.format.evaluating(1, 0.0) else 0.0  # the configured one
    scene.expect.within_s = lambda: max(floor_s, hang_bound(scene.job)())
    hang_in(scene, s, "evaluate", s.warm_s(scene.job.plan), looks.SPIN_EVALUATION, looks.LOADER)
    scene.until_s += 1200.0
    return scene


def announced_evaluation(s: Setup) -> Scene:
    """The log announces an evaluation. One rank waits in a lock of its own, and nothing is at work, in the first of the
    run or in a later one, when the run has shown how long they take; or one waits for its DataLoader in a later one."""
    scene = s.scene(Expect(HANG), ("hf",), eval_every=20, eval_s=EVALUATION_S)
    plan, idle, later = scene.job.plan, s.rng.random() < 0.5, s.rng.random() < 0.5
    later = later or not idle
    a_step_s = (plan.every or scene.job.format.every) * plan.step_s
    own_s = 3.0 * (EVALUATION_S + 2 * a_step_s)
    limit_s = own_s if idle and later else 300.0 + EVALUATION_S
    scene.expect.within_s = lambda: max(limit_s + a_step_s + 2 * REPORT_S, hang_bound(scene.job)())
    after = s.warm_s(plan) + (5 * (20 * plan.step_s + EVALUATION_S) if later else 0.0)
    hang_in(
        scene, s, "evaluate", after, looks.SPIN_EVALUATION, looks.DEADLOCKED_IN_EVALUATION if idle else looks.LOADER
    )
    scene.until_s += after
    return scene


EVALUATION_S = 45.0


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


PROVEN_S = 20.0
"""Of a hang with steps of 2 s or less, that is proven before the limit of the job."""


def hang_that_is_proven(s: Setup) -> Scene:
    """Steps of 2 s or less. One rank waits for a lock of its own, or for data that no worker of its data loader makes
    any more, its peers in an all_reduce."""
    scene = s.scene(
        Expect(HANG, within_s=PROVEN_S),
        ("json", "key_value", "nanogpt", "torchtitan"),
        step_s=s.rng.choice((0.3, 0.5, 1.0, 2.0)),
        every=1,
        workers=2,
    )
    scene.world.dated_lines = False
    lost = replace(looks.STARVED, worker=looks.WORKER_WAITS, call="poll")
    locked = replace(looks.STARVED, worker=looks.WORKER_LOCKED)
    at = s.warm_s(scene.job.plan) + s.rng.uniform(100.0, 400.0)
    hang(scene, s, at, looks.SPIN_REDUCE, s.rng.choice((looks.DEADLOCKED, lost, locked)))
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
        job.say(t, f"[{stamp(t)}] heartbeat: 8 of 8 processes alive, uptime {t:.0f}", "waiting to be scheduled")
        if t < at + 900:
            scene.world.at(t + 20.0, ping)

    scene.world.at(at + 10.0, ping)
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
SLOW_S = 300.0
"""So long (slow_job.lasts), where steps are shorter."""


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
    scene.until_s = at + scene.expect.within_s + 60.0
    return scene


def slower_by_five_percent(s: Setup) -> Scene:
    """Five per cent at a noise of two: found in 36 steps or 5 minutes, and what the date of the first one may be off."""
    scene = s.scene(Expect(("slow_job", "slow_node")), TIMED_FORMATS, every=1, step_s=10.0, jitter=0.02)
    at = s.warm_s(scene.job.plan, 150)
    scene.expect.within_s = max(SLOW_STEPS * 10.5 * 1.05, 1.2 * SLOW_S) + REPORT_S

    def begin(t: float) -> None:
        scene.job.slow = lambda step, now: 1.05
        scene.fault(t)

    scene.world.at(at, begin)
    scene.until_s = at + 1500.0
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
    soon = hang_bound(scene.job)
    scene.expect.within_s = lambda: max(120.0 + REPORT_S, soon())
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
    by_frames: bool = True
    """Whether all that is known of it comes in frames and listings."""

    @property
    def key(self) -> str:
        return f"case_{self.row:02d}_{self.name}"


CASES: tuple[Case, ...] = (
    Case(1, "frozen_filesystem", frozen_filesystem),
    Case(1, "frozen_filesystem_asleep", frozen_filesystem_asleep),
    Case(1, "filesystem_outage", filesystem_outage, (2, 4, 8, 16, 48)),
    Case(2, "hang_at_evaluation", hang_at_evaluation),
    Case(2, "announced_evaluation", announced_evaluation, (1, 2, 8)),
    Case(2, "hang_in_a_step", hang_in_a_step),
    Case(2, "hang_that_is_proven", hang_that_is_proven, (1, 2, 4, 8)),
    Case(2, "hang_of_everybody", hang_of_everybody),
    Case(3, "hang_with_heartbeats", hang_with_heartbeats),
    Case(4, "gpu_crash", gpu_crash),
    Case(4, "gpu_error_in_log", gpu_error_in_log),
    Case(4, "checkpoint_overdue", checkpoint_overdue, (1, 2)),
    Case(5, "lingering_gone", lingering_gone),
    Case(5, "lingering_zombie", lingering_zombie),
    Case(6, "slower_by_six_percent", slower_by_six_percent, (1, 2)),
    Case(6, "slower_by_five_percent", slower_by_five_percent, (1, 2)),
    Case(6, "late_rank", late_rank, (1, 2, 8)),
    Case(6, "late_by_turns", late_by_turns, (1, 2, 8)),
    Case(6, "slow_gpu", slow_gpu),
    Case(7, "loss_spike", loss_spike, (1, 2)),
    Case(7, "loss_nan", loss_nan, (1, 2)),
    Case(8, "nccl_cascade", nccl_cascade),
    Case(8, "nccl_cascade_then_death", nccl_cascade_then_death),
    Case(9, "interleaved_tracebacks", interleaved_tracebacks),
    Case(10, "error_class", error_class, (1, 2, 8)),
    Case(10, "disk_full", disk_full, (1, 2, 8)),
    Case(11, "orphan", orphan, (1, 2, 8)),
    Case(12, "chain_broken", chain_broken, (1, 8)),
    Case(13, "gpu_off_the_bus", gpu_off_the_bus),
    Case(13, "gpu_ecc", gpu_ecc),
    Case(13, "driver_hangs", driver_hangs, (1, 8)),
    Case(14, "rank_that_cannot_be_dumped", rank_that_cannot_be_dumped),
    Case(14, "stopped_rank", stopped_rank),
    Case(15, "agent_silent", agent_silent),
    Case(15, "node_down", node_down),
    Case(15, "partition", partition, (2, 4, 8, 16, 48)),
    Case(15, "slurm_unreachable", slurm_unreachable, (1, 8)),
    Case(16, "crash_loop", crash_loop, (1, 2, 8)),
    Case(18, "wedged_teardown", wedged_teardown),
    Case(21, "hang_told_by_records", seen_with_the_others, (1, 2, 8), by_frames=False),
    Case(21, "hang_without_one_record", without_one_record, (1, 2, 8), by_frames=False),
    Case(22, "killed_for_memory", killed_for_memory),
    Case(22, "worker_killed_for_memory", worker_killed_for_memory),
    Case(22, "near_a_limit", near_a_limit, (1, 2, 8)),
    Case(23, "driver_stall", driver_stall),
    Case(24, "link_fault", link_fault, (1, 2, 8, 48)),
    Case(25, "host_fault", host_fault, (1, 2, 8)),
)
"""Rows 17 and 19 are about what the watchdog does, not what it sees (tests/unit/controller/test_ladder.py,
tests/simulation); 20 is healthy, and from 21 on the machines tell."""
