"""`slurm-watchdog save-all`: has many jobs save, before a maintenance."""

from __future__ import annotations

import re
import sys
from datetime import datetime, timedelta

import click

from slurm_watchdog.base import clock
from slurm_watchdog.base.python310 import read_iso_time
from slurm_watchdog.cli.batch import Row, ask_many, named_jobs, print_rows
from slurm_watchdog.cli.find_controller import Asked, asks_controller
from slurm_watchdog.cli.options import EXIT_FINE, EXIT_FOUND, job_arguments, no_selectors
from slurm_watchdog.cli.terminal import count, sentence
from slurm_watchdog.model.actions import Wish
from slurm_watchdog.model.documents import SaveRequest


def date_of(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """A callback of an option: see `parse_date`. Raises click.BadParameter."""
    try:
        return None if value is None else parse_date(value, clock.wall())
    except ValueError:
        raise click.BadParameter(f"{value!r} is no time; 14:00, 2026-11-24T06:00 and 2h are") from None


def parse_date(value: str, at: float) -> float:
    """The date that `14:00` (the next one after `at`, a date) or `2026-11-24T06:00` names, in this machine's time zone;
    or `2h` from then. Raises ValueError."""
    from slurm_watchdog.config.types import parse_duration

    now = datetime.fromtimestamp(at).astimezone()
    if re.fullmatch(r"\d\d:\d\d", value):
        time = datetime.strptime(value, "%H:%M").time()  # noqa: DTZ007 - its zone is the machine's
        days = (now.date(), now.date() + timedelta(days=1))  # of 23 or 25 hours where clocks are changed
        return next(found for day in days if (found := datetime.combine(day, time).astimezone()) > now).timestamp()
    if value[:4].isdigit() and "-" in value:
        return read_iso_time(value).astimezone().timestamp()
    return at + parse_duration(value)


@click.command()
@job_arguments
@no_selectors
@click.option("--all", "everything", is_flag=True, help="All running jobs that are watched.")
@click.option("--hold", is_flag=True, help="A job that has saved waits in the queue, held, until `scontrol release`.")
@click.option("--before", "before_at", metavar="TIME", callback=date_of,
              help="For a checkpoint: 14:00, 2026-11-24T06:00, 2h. [default: as ladder.checkpoint_limit]")  # fmt: skip
@click.option("--reason", default="", metavar="TEXT", help="Kept in the journal of each.")
@click.option("--dry-run", is_flag=True, help="Only list them, those first that cannot be asked.")
@click.option("--no-wait", is_flag=True, help="Ask and leave; otherwise all are followed to their end.")
@asks_controller(refused=EXIT_FOUND)
def save_all(
    asked: Asked,
    job_ids: tuple[str, ...],
    everything: bool,
    hold: bool,
    before_at: float | None,
    reason: str,
    dry_run: bool,
    no_wait: bool,
) -> None:
    """Writes the kill switch of every JOB that can see it, and waits for a complete checkpoint of each.

    The table has those first that cannot be asked (they hang, no agent answers, their owner wants them left alone)
    or did not save. What a job does after it has saved is its own affair; with --hold it is put back into the queue
    and held there. Nothing is ended that has not saved. Exit code 0 if all have saved, else 1, also where no job
    runs. With --no-wait nothing is known to have been saved: exit code 1.

    \b
    Examples:
      slurm-watchdog save-all 4711 4712 --before 06:00 --hold --reason "storage moves"
      slurm-watchdog save-all --dry-run $(squeue -h -t R -w 'n[17-20]' -o %i)
      slurm-watchdog save-all --all
    """
    if bool(job_ids) == everything:
        raise click.UsageError("name the jobs, or --all alone")
    client = asked.client()
    jobs = named_jobs(client, job_ids)
    if dry_run:
        print_rows([Row(job, why="would be asked") for job in jobs], asked)
        sys.exit(EXIT_FOUND if not jobs or any(job.why_not for job in jobs) else EXIT_FINE)
    if jobs and not asked.as_json:
        deaf = sum(bool(job.why_not) for job in jobs)
        sentence(f"{count(len(jobs), 'job')}, {deaf or 'none'} of them cannot be asked.")
    body = SaveRequest(job_ids=(), wish=Wish.HOLD if hold else Wish.SAVE, before=before_at, reason=reason)
    sys.exit(ask_many(client, jobs, body, asked, wait=not no_wait))
