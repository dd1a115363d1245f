"""One report as tables, for a person at a terminal: `slurm-watchdog agent --once`. Only what is there is shown."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import psutil
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slurm_watchdog.base import clock
from slurm_watchdog.model.observations import Blocked, FaultSeverity, Gpu, GpuHolder, Process
from slurm_watchdog.model.report import Report

PIPE_WIDTH = 200
WHOLE = frozenset({"job", "rank", "pid", "age", "when", "GPU", "minor", "busy"})
"""Columns that are never folded."""
_STYLES = {FaultSeverity.CRITICAL: "bold red", FaultSeverity.ERROR: "red", FaultSeverity.WARNING: "yellow"}


def show_report(report: Report, console: Console | None = None) -> None:
    """Prints the tables to `console` (standard output by default): processes first, what is wrong last, where the eye rests."""
    if console is None:
        # A pipe has no width of its own, and a table that was cut to 80 columns helps nobody.
        console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    tables = (
        _processes(report), _logs(report), _gpus(report), _gpu_memory(report), _mounts(report), _checkpoints(report),
        _holders(report), _node_events(report),
    )  # fmt: skip
    console.print(_node_line(report), markup=False)
    for table in tables:
        if table.row_count:
            console.print(table)
    if not report.processes:
        console.print(f"No process of a Slurm job is seen on {report.node}.", markup=False)
    for hung in report.hung_probes:
        console.print(f"hung: {hung.probe} for {hung.seconds:.0f} s", style="bold red", markup=False)
    for problem in report.problems:
        console.print(f"problem: {problem}", style="bold red", markup=False)


def _node_line(report: Report) -> str:
    """How the node itself fares, in one line. It is this machine that is asked, so only for a report of its own."""
    memory = psutil.virtual_memory()
    load = ", ".join(f"{each:.1f}" for each in psutil.getloadavg())
    up_s = max(0.0, clock.wall() - psutil.boot_time())
    return (
        f"{report.node}: {psutil.cpu_count()} CPUs, load {load}; {memory.used / 2**30:.0f} of {memory.total / 2**30:.0f} GiB "
        f"memory in use; up {_seconds(up_s)}"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", expand=False, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        # A number that was cut is another number; what is long is folded.
        table.add_column(column, no_wrap=column in WHOLE, overflow="fold")
    return table


def _add(table: Table, cells: Iterable[object], style: str = "") -> None:
    """A row of anything: None is a question mark, and nothing in it is taken for markup."""
    table.add_row(*("?" if cell is None else escape(str(cell)) for cell in cells), style=style)


def _processes(report: Report) -> Table:
    table = _table(
        f"processes of jobs on {report.node}",
        "job", "role", "rank", "pid", "command", "threads", "state", "CPU", "blocked",
    )  # fmt: skip
    for process in sorted(report.processes, key=lambda p: (p.job_id, p.role, p.rank or 0, p.pid)):
        job = process.job_id if process.step_id is None else f"{process.job_id}.{process.step_id}"
        _add(
            table,
            (
                job, process.role, _rank(process), _pid(process), process.comm,
                "" if process.threads is None else process.threads, _state(process), _seconds(process.cpu_s),
                _blocked(process.blocked),
            ),
            "bold red" if process.blocked else "",
        )  # fmt: skip
    return table


def _rank(process: Process) -> str:
    """`3 of 8 (local 1)`, as far as it is known."""
    if process.rank is None:
        return ""
    world = "" if process.world_size is None else f" of {process.world_size}"
    local = "" if process.local_rank is None else f" (local {process.local_rank})"
    return f"{process.rank}{world}{local}"


def _pid(process: Process) -> str:
    inside = process.container_pid
    return str(process.pid) if inside is None else f"{process.pid} (inside {inside})"


def _state(process: Process) -> str:
    return (
        process.state
        if process.state_age_s is None
        else f"{process.state} for {_seconds(process.state_age_s)}"
    )


def _blocked(blocked: Blocked | None) -> str:
    if blocked is None:
        return ""
    where = f" on {blocked.path} ({blocked.mount})" if blocked.path else ""
    return f"{blocked.seconds:.0f} s in {blocked.syscall or blocked.wchan or '?'}{where}"


def _logs(report: Report) -> Table:
    table = _table("logs", "job", "log", "last grown", "newest fact")
    newest = {(event.job_id, event.source): event.line for event in report.events}
    for row in report.logs:
        age = "" if row.growth_age_s is None else f"{_seconds(row.growth_age_s)} ago"
        if row.lag_bytes or row.skipped_bytes:
            age += (
                f", {row.lag_bytes / 2**20:.1f} MiB not read yet, {row.skipped_bytes / 2**20:.1f} MiB skipped"
            )
        cells = (row.job_id, row.path, row.error or age, newest.get((row.job_id, row.path), "")[:100])
        _add(table, cells, "bold red" if row.error else "")
    return table


def _gpus(report: Report) -> Table:
    table = _table(
        "GPUs", "GPU", "UUID", "PCI", "minor", "busy", "SM clock", "power", "heat", "memory", "throttled by", "pids"
    )  # fmt: skip
    for gpu in report.gpus:
        used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
        cells = (
            gpu.index,
            gpu.uuid,
            gpu.pci_bus_id,
            gpu.minor,
            _unit(gpu.utilization_ratio, "{:.0%}"),
            _unit(gpu.sm_clock_hz and gpu.sm_clock_hz / 1e6, "{:.0f} MHz"),
            _unit(gpu.power_w, "{:.0f} W"),
            _unit(gpu.temperature_c, "{:.0f} °C"),
            None if used is None or total is None else f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB",
            None if gpu.throttle is None else ", ".join(gpu.throttle),
            None if gpu.pids is None else ", ".join(map(str, gpu.pids)),
        )
        _add(table, cells)
        if gpu.error:
            _add(table, ("", gpu.error), "bold red")
        for slice_ in gpu.mig or ():
            _add(table, ("MIG", slice_.uuid))
    return table


def _gpu_memory(report: Report) -> Table:
    """What changes slowly: errors of memory and links."""
    table = _table("GPU health", "GPU", "ECC errors", "rows remapped", "pages retired", "PCIe", "NVLink")
    for gpu in report.gpus:
        cells = (_ecc(gpu), _remapped(gpu), _retired(gpu), _pcie(gpu), _nvlink(gpu))
        if any(cells):
            _add(table, (gpu.index, *cells))
    return table


def _ecc(gpu: Gpu) -> str:
    if gpu.ecc_corrected is None and gpu.ecc_uncorrected is None:
        return ""
    return f"{_number(gpu.ecc_corrected)} corrected, {_number(gpu.ecc_uncorrected)} not"


def _remapped(gpu: Gpu) -> str:
    if gpu.remapped_rows_uncorrected is None:
        return ""
    notes = (", pending" if gpu.remap_pending else "") + (", FAILED" if gpu.remap_failed else "")
    return f"{_number(gpu.remapped_rows_corrected)} + {gpu.remapped_rows_uncorrected}{notes}"


def _retired(gpu: Gpu) -> str:
    if gpu.retired_pages is None:
        return ""
    return f"{gpu.retired_pages}{', pending' if gpu.retired_pages_pending else ''}"


def _pcie(gpu: Gpu) -> str:
    if gpu.pcie_link_width is None:
        return ""
    generation = (
        ""
        if gpu.pcie_link_generation is None
        else f"gen {gpu.pcie_link_generation} of {_number(gpu.pcie_link_generation_max)}, "
    )
    return f"{generation}x{gpu.pcie_link_width} of x{_number(gpu.pcie_link_width_max)}, {_number(gpu.pcie_replays)} replays"


def _nvlink(gpu: Gpu) -> str:
    if gpu.nvlinks_active is None:
        return ""
    return f"{gpu.nvlinks_active} up, {_number(gpu.nvlinks_down)} down, {_number(gpu.nvlink_errors)} errors"


def _mounts(report: Report) -> Table:
    table = _table("filesystems", "mount", "type", "device", "answers", "probe")
    for mount in report.mounts:
        answer = mount.error or ("yes" if mount.responding else "NO")
        probe = f"{'wrote' if mount.wrote else 'read'}, {mount.seconds:.3f} s"
        cells = (mount.mount, mount.fs_type or "", mount.device or "", answer, probe)
        _add(table, cells, "" if mount.responding else "bold red")
    return table


def _checkpoints(report: Report) -> Table:
    table = _table("checkpoints", "job", "directory", "layout", "complete", "age", "size", "being written")
    for each in report.checkpoints:
        if each.error:
            _add(table, (each.job_id, each.directory, each.error), "bold red")
            continue
        writing = "" if each.writing_step is None else f"step {each.writing_step}"
        size = "" if each.size_bytes is None else _size(each.size_bytes)
        cells = (
            each.job_id, each.directory, each.layout or "none yet", "" if each.step is None else f"step {each.step}",
            "" if each.age_s is None else _seconds(each.age_s), size,
            writing if each.writing or not writing else f"{writing}, left behind",
        )  # fmt: skip
        _add(table, cells)
    return table


def _holders(report: Report) -> Table:
    table = _table(
        "GPUs held outside of running jobs", "pid", "command", "user", "state", "came from job", "GPUs", "memory", "orphan"
    )  # fmt: skip
    for holder in report.gpu_holders:
        _add(
            table,
            (
                holder.pid, holder.comm, holder.user, holder.state, holder.job_id or "", _held(holder),
                "not listed by NVML" if holder.memory_bytes is None else f"{holder.memory_bytes / 2**20:.0f} MiB",
                "not known" if holder.orphan_for_s is None else f"for {_seconds(holder.orphan_for_s)}",
            ),
            "bold red" if holder.orphan_for_s is not None else "",
        )  # fmt: skip
    return table


def _held(holder: GpuHolder) -> str:
    return ", ".join(holder.gpu_uuids) or ", ".join(f"/dev/nvidia{minor}" for minor in holder.minors)


def _node_events(report: Report) -> Table:
    table = _table("kernel and driver", "when", "severity", "what", "line")
    for event in report.node_events:
        again = f" (and {event.repeats} more)" if event.repeats else ""
        cells = (
            f"{_seconds(event.age_s)} ago",
            event.severity,
            event.name,
            f"{event.line or f'Xid {event.xid}'}{again}",
        )
        _add(table, cells, _STYLES.get(event.severity, ""))
    return table


def _unit(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def _number(value: float | None) -> str:
    return "?" if value is None else str(value)


def _size(value: float) -> str:
    """`732 B`, `3.4 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _seconds(value: float) -> str:
    """`7 s`, `12 min`, `3.4 h`, `2.1 d`: as exact as a glance needs."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if value < limit:
            return f"{value / unit:.1f} {name}" if unit == 3600 else f"{value / unit:.0f} {name}"
    return f"{value / 86_400:.1f} d"
