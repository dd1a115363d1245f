"""Delta reports: computed by the agent, made whole by the controller. Pure.

Only lists of things that stay (processes, GPUs, logs, checkpoints, holders) are ever left out. What is said
once (events, probes of mounts, results, problems) is always there. Nothing is gone because it is missing:
what has gone is named. A report of changes builds on one report, by its number, and is of no use without it:
a receiver that lacks it asks for a full report.

Field by field: one function for both kinds of rows took 508 µs where this takes 54 (80 rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from sys import intern
from typing import Any, Final

from msgspec.structs import replace

from slurm_watchdog.model.observations import Gpu, Process
from slurm_watchdog.model.report import Changes, GpuNumbers, ProcessNumbers, Report

WHOLE_LISTS = ("logs", "checkpoints", "gpu_holders", "usages", "pressures", "links")
"""Lists that are sent whole when they change, and not at all while they do not."""


def changes_between(before: Report, after: Report) -> Report | None:
    """`after` as changes since `before`, a full report of the same agent; None if that cannot be exact."""
    if before.changes is not None or after.changes is not None or before.agent_id != after.agent_id:
        return None
    process_rows, processes = _changed_processes(before.processes, after.processes)
    whole = [name for name in WHOLE_LISTS if getattr(before, name) != getattr(after, name)]
    gpu_rows, gpus = _changed_gpus(before.gpus, after.gpus)
    if gpus is None:
        whole.append("gpus")
    there = {(process.pid, process.start_ticks) for process in after.processes}
    small = replace(
        after,
        processes=tuple(processes),
        gpus=after.gpus if gpus is None else tuple(gpus),
        changes=Changes(
            since=before.sequence,
            process_rows=tuple(process_rows),
            gpu_rows=tuple(gpu_rows),
            gone=tuple(key for process in before.processes if (key := (process.pid, process.start_ticks)) not in there),
            whole=tuple(whole),
        ),
        **{name: () for name in WHOLE_LISTS if name not in whole},
    )
    return small if make_whole(before, small) == after else None


def make_whole(before: Report, small: Report) -> Report | None:
    """The full report that `small` stands for, with `before` as what it builds on; None if it does not fit."""
    changes = small.changes
    if changes is None:
        return small
    if before.agent_id != small.agent_id or before.sequence != changes.since:
        return None
    processes = _processes_after(before.processes, small.processes, changes)
    gpus = small.gpus if "gpus" in changes.whole else _gpus_after(before.gpus, small.gpus, changes)
    if processes is None or gpus is None:
        return None
    return replace(
        small,
        node=before.node if before.node == small.node else small.node,
        boot_id=before.boot_id if before.boot_id == small.boot_id else small.boot_id,
        agent_id=before.agent_id,
        processes=processes,
        gpus=gpus,
        changes=None,
        **{name: getattr(before, name) for name in WHOLE_LISTS if name not in changes.whole},
    )


# ---------------------------------------------------------------------------------------- processes


def _numbers(at: int, process: Process) -> ProcessNumbers:
    return ProcessNumbers(
        at, process.state, process.cpu_s, process.io_bytes, process.threads, process.context_switches,
        process.runnable_s,
    )  # fmt: skip


def _with_numbers(process: Process, row: ProcessNumbers) -> Process:
    return replace(
        process,
        state=intern(row.state),
        cpu_s=row.cpu_s,
        io_bytes=row.io_bytes,
        threads=row.threads,
        context_switches=row.context_switches,
        runnable_s=row.runnable_s,
    )


def _changed_processes(
    before: tuple[Process, ...], after: tuple[Process, ...]
) -> tuple[list[ProcessNumbers], list[Process]]:
    """Rows of those of which numbers alone have changed, and whole those of which more has, or that are new."""
    places = {(process.pid, process.start_ticks): at for at, process in enumerate(before)}
    rows, whole = [], []
    for process in after:
        at = places.get((process.pid, process.start_ticks))
        if at is None:
            whole.append(process)
        elif before[at] != process:
            row = _numbers(at, process)
            if _with_numbers(before[at], row) == process:
                rows.append(row)
            else:
                whole.append(process)
    return rows, whole


def _processes_after(
    before: tuple[Process, ...], changed: Iterable[Process], changes: Changes
) -> tuple[Process, ...] | None:
    after: list[Process | None] = list(before)
    for row in changes.process_rows:
        if not 0 <= row.at < len(before):
            return None
        after[row.at] = _with_numbers(before[row.at], row)
    if not changed and not changes.gone:
        return tuple(after)  # type: ignore[arg-type]  # nothing was taken out of it
    places = {(process.pid, process.start_ticks): at for at, process in enumerate(before)}
    for key in changes.gone:
        if key not in places:
            return None
        after[places[key]] = None
    for process in changed:
        at = places.get((process.pid, process.start_ticks))
        if at is None:
            after.append(process)
        else:
            after[at] = process
    return tuple(process for process in after if process is not None)


# ---------------------------------------------------------------------------------------- GPUs


def _gpu_numbers(at: int, gpu: Gpu) -> GpuNumbers:
    return GpuNumbers(
        at, gpu.utilization_ratio, gpu.sm_clock_hz, gpu.memory_clock_hz, gpu.power_w, gpu.temperature_c,
        gpu.memory_used_bytes
    )  # fmt: skip


def _gpu_with_numbers(gpu: Gpu, row: GpuNumbers) -> Gpu:
    return replace(
        gpu,
        utilization_ratio=shared_number(row.utilization_ratio),
        sm_clock_hz=shared_number(row.sm_clock_hz),
        memory_clock_hz=shared_number(row.memory_clock_hz),
        power_w=row.power_w,
        temperature_c=shared_number(row.temperature_c),
        memory_used_bytes=row.memory_used_bytes,
    )


def _changed_gpus(before: tuple[Gpu, ...], after: tuple[Gpu, ...]) -> tuple[list[GpuNumbers], list[Gpu] | None]:
    """As of processes; None in place of the second if the list itself is another one."""
    if [gpu.uuid for gpu in before] != [gpu.uuid for gpu in after] or len({g.uuid for g in after}) < len(after):
        return [], None
    rows, whole = [], []
    for at, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new:
            row = _gpu_numbers(at, new)
            if _gpu_with_numbers(old, row) == new:
                rows.append(row)
            else:
                whole.append(new)
    return rows, whole


def _gpus_after(before: tuple[Gpu, ...], changed: Iterable[Gpu], changes: Changes) -> tuple[Gpu, ...] | None:
    after = list(before)
    for row in changes.gpu_rows:
        if not 0 <= row.at < len(before):
            return None
        after[row.at] = _gpu_with_numbers(before[row.at], row)
    places = {gpu.uuid: at for at, gpu in enumerate(before)} if changed else {}
    for gpu in changed:
        if gpu.uuid not in places:
            return None
        after[places[gpu.uuid]] = gpu
    return tuple(after)


def delta_base(report: Report) -> Report:
    """What the next report of changes can build on: without what is said once, which would only be kept."""
    if not (report.events or report.node_events or report.mounts or report.results):
        return report
    return replace(report, events=(), node_events=(), mounts=(), results=())


shared_number: Final[Callable[[Any], Any]] = lru_cache(maxsize=8192, typed=True)(lambda number: number)
"""Given a number, or None, the first one equal to it: of users, sizes, clocks, temperatures."""


def with_shared_values(report: Report) -> Report:
    """The same report."""
    return replace(
        report,
        node=intern(report.node),
        boot_id=intern(report.boot_id),
        agent_id=intern(report.agent_id),
        processes=tuple(map(_process, report.processes)),
        gpus=tuple(map(_gpu, report.gpus)),
    )


def _process(process: Process) -> Process:
    return replace(
        process,
        job_id=intern(process.job_id),
        uid=shared_number(process.uid),
        world_size=shared_number(process.world_size),
        comm=intern(process.comm),
        state=intern(process.state),
        step_id=None if process.step_id is None else intern(process.step_id),
    )


def _gpu(gpu: Gpu) -> Gpu:
    return replace(
        gpu,
        uuid=intern(gpu.uuid),
        pci_bus_id=None if gpu.pci_bus_id is None else intern(gpu.pci_bus_id),
        name=intern(gpu.name),
        memory_total_bytes=shared_number(gpu.memory_total_bytes),
    )
