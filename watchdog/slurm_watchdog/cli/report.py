"""`slurm-watchdog report`: what the jobs' time went to."""

from __future__ import annotations

from itertools import groupby
from typing import Final

import click

from slurm_watchdog.analysis.lost_time import checkpoint_interval
from slurm_watchdog.base import clock
from slurm_watchdog.base.python310 import read_iso_time
from slurm_watchdog.cli.find_controller import Asked, asks_controller
from slurm_watchdog.cli.options import check_job, removed_option, seconds_of
from slurm_watchdog.cli.terminal import count, duration, show
from slurm_watchdog.model.lost_time import Report

WEEK_S: Final = 7 * 86400.0
HOUR_S: Final = 3600.0
ENOUGH_FAILURES: Final = 10  # the mean of fewer is known to a third at best: 1 / sqrt(n)
SHOWN_SIZES: Final = 4
"""The largest numbers of nodes, for which an interval between checkpoints is advised."""


def _date(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """A callback of an option: a local date, such as 2026-11-01 or 2026-11-01T06:00. Raises click.BadParameter."""
    try:
        return None if value is None else read_iso_time(value).astimezone().timestamp()
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{value!r} is not a date such as 2026-11-01 or 2026-11-01T06:00") from None


@click.command()
@click.option("--week", is_flag=True, help="The last seven days. [default]")
@click.option("--from", "since", callback=_date, metavar="DATE", help="From this local date on.")
@click.option("--to", "until", callback=_date, metavar="DATE", help="Up to this local date. [default: now]")
@click.option("--user", metavar="USER", help="Jobs of these users alone, names or globs with commas.")
@click.option("--account", metavar="ACCOUNT", help="Jobs of these accounts alone.")
@click.option("--partition", metavar="PARTITION", help="Jobs of these partitions alone.")
@click.option(
    "--job",
    metavar="J",
    callback=check_job,
    help="This job alone. See also: slurm-watchdog show.",
)
@click.option("--save-time", "save_s", default="60s", show_default=True, metavar="TIME", callback=seconds_of,
              help="How long a checkpoint holds the training up, for the advice on its interval.")  # fmt: skip
@removed_option("--html", "use --json, and Grafana for plots")
@asks_controller(or_journal=True)
def report(
    asked: Asked, week: bool, since: float | None, until: float | None, save_s: float, **query: str | None
) -> None:
    """What the time of the jobs went to: steps that were kept, and what was lost to which cause.

    Effective is the time of the steps that were kept, by the usual time of a step: those that a restart made again
    count as lost. Operators see all jobs, others their own. docs/report.md says how each hour is counted.

    \b
    Examples:
      slurm-watchdog report
      slurm-watchdog report --from 2026-11-01 --to 2026-12-01 --account vision
      slurm-watchdog report --json | jq .share
    """
    if week and since is not None:
        raise click.UsageError("--week and --from exclude each other")
    now = clock.wall()
    query |= {"from": str(now - WEEK_S if since is None else since), "to": str(now if until is None else until)}
    found = asked.client().get(Report, "/v1/report", **query)
    asked.answer(found, lambda: print_report(found, save_s))


def print_report(found: Report, save_s: float) -> None:
    """One sentence, what was lost to what, the jobs that lost most, advice."""
    advised = intervals(found, save_s) if found.failures >= ENOUGH_FAILURES else ""
    show("report", found=found, before_h=dict(found.to_be_noticed_h), save_s=save_s, intervals=advised)


def intervals(found: Report, save_s: float) -> str:
    """How often to save: on each size of job, with the formula's name."""
    between_h = found.node_hours_between_failures or 0.0
    sizes = sorted({job.nodes for job in found.jobs})[-SHOWN_SIZES:]
    advised = [(checkpoint_interval(between_h * HOUR_S / size, save_s), size) for size in sizes]
    parts = []
    for formula, same in groupby(advised, key=lambda each: each[0].formula):
        of_sizes = (f"{duration(interval.seconds)} on {count(size, 'node')}" for interval, size in same)
        parts.append(f"{', '.join(of_sizes)} ({formula})")
    return ", ".join(parts)
