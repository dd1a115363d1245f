"""One report as tables, for a person at a terminal: `slurm-watchdog agent --once`. Only what is there is shown."""

from __future__ import annotations

import sys

import psutil
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from slurm_watchdog.agent.collectors.presentation import BAD, Table, seconds
from slurm_watchdog.agent.collectors.registry import COLLECTORS
from slurm_watchdog.base import clock
from slurm_watchdog.model.report import Report

PIPE_WIDTH = 200
WHOLE = frozenset({"job", "rank", "pid", "age", "when", "GPU", "minor", "busy"})
"""Columns that are never folded."""


def show_report(report: Report, console: Console | None = None) -> None:
    """Prints the tables of all collectors to `console` (standard output by default): processes first, what is
    wrong last."""
    if console is None:
        # A pipe has no width of its own, and a table that was cut to 80 columns helps nobody.
        console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    console.print(_node_line(report), markup=False)
    for spec in COLLECTORS:
        for table in spec.tables(report):
            if table.rows:
                console.print(_drawn(table))
    if not report.processes:
        console.print(f"No process of a Slurm job is seen on {report.node}.", markup=False)
    for hung in report.hung_probes:
        console.print(f"hung: {hung.probe} for {hung.seconds:.0f} s", style=BAD, markup=False)
    for problem in report.problems:
        console.print(f"problem: {problem}", style=BAD, markup=False)


def _node_line(report: Report) -> str:
    """How the node itself fares, in one line. It is this machine that is asked, so only for a report of its own."""
    memory = psutil.virtual_memory()
    load = ", ".join(f"{each:.1f}" for each in psutil.getloadavg())
    up_s = max(0.0, clock.wall() - psutil.boot_time())
    return (
        f"{report.node}: {psutil.cpu_count()} CPUs, load {load}; "
        f"{memory.used / 2**30:.0f} of {memory.total / 2**30:.0f} GiB memory in use; up {seconds(up_s)}"
    )


def _drawn(table: Table) -> RichTable:
    """None is a question mark, and nothing in a cell is taken for markup."""
    drawn = RichTable(title=table.title, title_justify="left", expand=False, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in table.columns:
        # A number that was cut is another number; what is long is folded.
        drawn.add_column(column, no_wrap=column in WHOLE, overflow="fold")
    for row in table.rows:
        drawn.add_row(*("?" if cell is None else escape(str(cell)) for cell in row.cells), style=row.style)
    return drawn
