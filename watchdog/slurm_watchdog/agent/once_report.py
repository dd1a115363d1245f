"""One report as tables, for a person at a terminal: `slurm-watchdog agent --once`. Only what is there is shown."""

from __future__ import annotations

import sys

import psutil

from slurm_watchdog.agent.collectors.presentation import Table, seconds
from slurm_watchdog.agent.collectors.registry import COLLECTORS
from slurm_watchdog.base import clock
from slurm_watchdog.base.text import columns, one_line
from slurm_watchdog.model.report import Report

MAX_CELL = 500
"""Characters of a cell: a path, a line of the kernel's log."""


def show_report(report: Report) -> None:
    """Prints the tables of all collectors: processes first, what is wrong last. Plain text, nothing is cut."""
    lines = [_node_line(report)]
    for spec in COLLECTORS:
        for table in spec.tables(report):
            if table.rows:
                lines += ["", *_drawn(table)]
    if not report.processes:
        lines.append(f"No process of a Slurm job is seen on {report.node}.")
    lines += [f"hung: {hung.probe} for {hung.seconds:.0f} s" for hung in report.hung_probes]
    lines += [f"problem: {problem}" for problem in report.problems]
    for line in lines:
        sys.stdout.write(f"{line}\n")


def _node_line(report: Report) -> str:
    """How the node itself fares, in one line. It is this machine that is asked, so only for a report of its own."""
    memory = psutil.virtual_memory()
    load = ", ".join(f"{each:.1f}" for each in psutil.getloadavg())
    up_s = max(0.0, clock.wall() - psutil.boot_time())
    return (
        f"{report.node}: {psutil.cpu_count()} CPUs, load {load}; "
        f"{memory.used / 2**30:.0f} of {memory.total / 2**30:.0f} GiB memory in use; up {seconds(up_s)}"
    )


def _drawn(table: Table) -> list[str]:
    """None is a question mark; `!` marks a row that shows something wrong."""
    rows = []
    for row in table.rows:
        cells = ["?" if cell is None else one_line(str(cell), MAX_CELL) for cell in row.cells]
        rows.append(["!" if row.style else " ", *cells, *[""] * (len(table.columns) - len(cells))])
    return [table.title, *columns([[" ", *table.columns], *rows]).splitlines()]
