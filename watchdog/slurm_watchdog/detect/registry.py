"""The list of detectors, and the settings that they take.

A new detector is one module here, one line in `DETECTORS`, one block in the configuration, one test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from slurm_watchdog.detect import (
    agent_silent,
    chain_broken,
    checkpoint_overdue,
    collective_hang,
    crash_loop,
    dead_rank,
    disk_full,
    filesystem_outage,
    filesystem_stall,
    gpu_clock_low,
    gpu_fault,
    gpu_idle_rank,
    lingering_job,
    log_error,
    loss_nan,
    loss_spike,
    node_down,
    orphan_gpu_process,
    partition_or_outage,
    rank_stopped,
    slow_job,
    slow_node,
    slurm_unreachable,
    stalled_progress,
    wedged_teardown,
)
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Finding, Kind


class FilesystemSettings(Protocol):
    @property
    def blocked_for(self) -> float: ...


class Settings(Protocol):
    """The configuration's block of detectors, as far as detectors know it."""

    @property
    def filesystem_stall(self) -> FilesystemSettings: ...
    @property
    def collective_hang(self) -> collective_hang.Settings: ...
    @property
    def stalled_progress(self) -> stalled_progress.Settings: ...
    @property
    def wedged_teardown(self) -> wedged_teardown.Settings: ...
    @property
    def checkpoint_overdue(self) -> checkpoint_overdue.Settings: ...
    @property
    def lingering_job(self) -> lingering_job.Settings: ...
    @property
    def partition_or_outage(self) -> partition_or_outage.Settings: ...
    @property
    def gpu_fault(self) -> gpu_fault.Settings: ...
    @property
    def gpu_clock_low(self) -> gpu_clock_low.Settings: ...
    @property
    def rank_stopped(self) -> rank_stopped.Settings: ...
    @property
    def dead_rank(self) -> dead_rank.Settings: ...
    @property
    def gpu_idle_rank(self) -> gpu_idle_rank.Settings: ...
    @property
    def slow_job(self) -> slow_job.Settings: ...
    @property
    def loss_spike(self) -> loss_spike.Settings: ...
    @property
    def loss_nan(self) -> loss_nan.Settings: ...
    @property
    def log_error(self) -> log_error.Settings: ...
    @property
    def disk_full(self) -> disk_full.Settings: ...
    @property
    def crash_loop(self) -> crash_loop.Settings: ...
    @property
    def chain_broken(self) -> chain_broken.Settings: ...
    @property
    def slurm_unreachable(self) -> slurm_unreachable.Settings: ...


Detector = Callable[[ClusterView, Settings], list[Finding]]

DETECTORS: tuple[tuple[Kind, Detector], ...] = (
    (
        Kind.FILESYSTEM_OUTAGE,
        lambda view, s: filesystem_outage.detect(view, blocked_for_s=s.filesystem_stall.blocked_for),
    ),
    (
        Kind.FILESYSTEM_STALL,
        lambda view, s: filesystem_stall.detect(view, blocked_for_s=s.filesystem_stall.blocked_for),
    ),
    (Kind.PARTITION_OR_OUTAGE, lambda view, s: partition_or_outage.detect(view, s.partition_or_outage)),
    (Kind.NODE_DOWN, lambda view, s: node_down.detect(view)),
    (Kind.AGENT_SILENT, lambda view, s: agent_silent.detect(view)),
    (Kind.SLURM_UNREACHABLE, lambda view, s: slurm_unreachable.detect(view, s.slurm_unreachable)),
    (Kind.GPU_FAULT, lambda view, s: gpu_fault.detect(view, s.gpu_fault)),
    (Kind.GPU_CLOCK_LOW, lambda view, s: gpu_clock_low.detect(view, s.gpu_clock_low)),
    (Kind.ORPHAN_GPU_PROCESS, lambda view, s: orphan_gpu_process.detect(view)),
    (Kind.DISK_FULL, lambda view, s: disk_full.detect(view, s.disk_full)),
    (Kind.CRASH_LOOP, lambda view, s: crash_loop.detect(view, s.crash_loop)),
    (Kind.CHAIN_BROKEN, lambda view, s: chain_broken.detect(view, s.chain_broken)),
    (Kind.LOG_ERROR, lambda view, s: log_error.detect(view, s.log_error, s.collective_hang)),
    (Kind.RANK_STOPPED, lambda view, s: rank_stopped.detect(view, s.rank_stopped, s.collective_hang)),
    (Kind.DEAD_RANK, lambda view, s: dead_rank.detect(view, s.dead_rank)),
    (Kind.GPU_IDLE_RANK, lambda view, s: gpu_idle_rank.detect(view, s.collective_hang, s.gpu_idle_rank)),
    (Kind.SLOW_NODE, lambda view, s: slow_node.detect(view, s.slow_job)),
    (Kind.SLOW_JOB, lambda view, s: slow_job.detect(view, s.slow_job)),
    (Kind.LOSS_SPIKE, lambda view, s: loss_spike.detect(view, s.loss_spike)),
    (Kind.LOSS_NAN, lambda view, s: loss_nan.detect(view, s.loss_nan)),
    (Kind.LINGERING_JOB, lambda view, s: lingering_job.detect(view, s.lingering_job, s.collective_hang)),
    (Kind.COLLECTIVE_HANG, lambda view, s: collective_hang.detect(view, s.collective_hang)),
    (
        Kind.WEDGED_TEARDOWN,
        lambda view, s: wedged_teardown.detect(view, s.collective_hang, s.wedged_teardown),
    ),
    (
        Kind.STALLED_PROGRESS,
        lambda view, s: stalled_progress.detect(view, s.collective_hang, s.stalled_progress),
    ),
    (Kind.CHECKPOINT_OVERDUE, lambda view, s: checkpoint_overdue.detect(view, s.checkpoint_overdue)),
)
"""Every detector, causes before their consequences."""

WITHOUT_SLURM: frozenset[Kind] = frozenset({Kind.SLURM_UNREACHABLE})
"""What can be judged while Slurm does not answer: nothing that is about a job or a node."""
