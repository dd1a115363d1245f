"""`slurm-watchdog report`: what the jobs' time went to."""

from __future__ import annotations

from datetime import datetime
from itertools import groupby
from typing import Any, Final

import click

from slurm_watchdog.analysis.checkpoint_interval import checkpoint_interval
from slurm_watchdog.base import clock
from slurm_watchdog.cli.find_controller import choose_or_journal
from slurm_watchdog.cli.options import (
    check_job,
    journal_option,
    operator_options,
    print_json,
    removed_option,
    reported_errors,
    seconds_of,
)
from slurm_watchdog.cli.terminal import count, duration, show
from slurm_watchdog.model.lost_time import Report

WEEK_S: Final = 7 * 86400.0
HOUR_S: Final = 3600.0
DATES: Final = ("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S")
ENOUGH_FAILURES: Final = 10  # the mean of fewer is known to a third at best: 1 / sqrt(n)
SHOWN_SIZES: Final = 4
"""The largest numbers of nodes, for which an interval between checkpoints is advised."""


class Date(click.DateTime):
    """A local date, such as 2026-11-01 or 2026-11-01T06:00."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            date = super().convert(value, param, ctx)
            date.timestamp()  # the year 1 has none
        except (click.BadParameter, ValueError, OverflowError):
            self.fail(f"{value!r} is no date such as 2026-11-01 or 2026-11-01T06:00", param, ctx)
        return date


@click.command(short_help="Where the jobs' time went: kept steps, restarts, hangs, steps made again.")
@click.option("--week", is_flag=True, help="The last seven days. [default]")
@click.option("--from", "since", type=Date(DATES), metavar="DATE", help="From this local date on.")
@click.option("--to", "until", type=Date(DATES), metavar="DATE", help="Up to this local date. [default: now]")
@click.option("--user", metavar="USER", help="Jobs of these users alone, names or globs with commas.")
@click.option("--account", metavar="ACCOUNT", help="Jobs of these accounts alone.")
@click.option("--partition", metavar="PARTITION", help="Jobs of these partitions alone.")
@click.option(
    "--job",
    metavar="J",
    callback=check_job,
    help="This job alone. See also: slurm-watchdog story.",
)
@click.option("--save-time", "save_s", default="60s", show_default=True, metavar="TIME", callback=seconds_of,
              help="How long a checkpoint holds the training up, for the advice on its interval.")  # fmt: skip
@removed_option("--html", "use --json, and Grafana for plots")
@journal_option
@operator_options
def report(  # noqa: PLR0913 - click hands each option over by itself
    week: bool,
    since: datetime | None,
    until: datetime | None,
    user: str | None,
    account: str | None,
    partition: str | None,
    job: str | None,
    save_s: float,
    journal: str | None,
    socket_path: str | None,
    config_file: str | None,
    as_json: bool,
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
    asked = {"user": user, "account": account, "partition": partition, "job": job}
    dates = {
        "from": str(since.timestamp() if since is not None else now - WEEK_S),
        "to": str(now if until is None else until.timestamp()),
    }
    with reported_errors(as_json):
        client = choose_or_journal(socket_path, config_file, journal)
        found, document = client.report(dates | {name: value for name, value in asked.items() if value})
        if as_json:
            print_json(document)
        else:
            print_report(found, save_s)


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
