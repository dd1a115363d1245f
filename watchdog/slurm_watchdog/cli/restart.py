"""`slurm-watchdog restart`: has one job or many restart, or save before a maintenance, and follows it to its end."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import click
from msgspec import structs

from slurm_watchdog.base import clock
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.base.python310 import read_iso_time
from slurm_watchdog.base.text import plural
from slurm_watchdog.cli import options
from slurm_watchdog.cli.client import Client, find
from slurm_watchdog.cli.options import ASKS, EXIT_FOUND, EXIT_UNKNOWN, Answer, Asked, ClientError, command, warn
from slurm_watchdog.cli.terminal import clean, drawn_columns, print_lines, render, sentence, show
from slurm_watchdog.model import documents
from slurm_watchdog.model.actions import Wish
from slurm_watchdog.model.documents import ActionRun, Answered, Cancelled, JobRequest, SaveRequest, SelectedJob
from slurm_watchdog.report.story import Row

LOOK_EVERY_S = 1.0
RECONNECT_LIMIT_S = 120.0  # Wait for a controller that is itself restarted; it then continues what it has begun.
ORDER = ("cannot be asked", "failed", "under way", "not needed", "done")
SELECTORS = ("partition", "account", "node", "reservation", "user")  # Of the release before.


def parse_date(value: str, at: float) -> float:
    """The date that `14:00` (the next one after `at`, a date) or `2026-11-24T06:00` names, in this machine's time zone;
    or `2h` from then. Raises ValueError."""
    from slurm_watchdog.config.types import parse_duration

    now = datetime.fromtimestamp(at).astimezone()
    try:
        if re.fullmatch(r"\d\d:\d\d", value):
            time = datetime.strptime(value, "%H:%M").time()  # noqa: DTZ007 - its zone is the machine's
            days = (now.date(), now.date() + timedelta(days=1))  # of 23 or 25 hours where clocks are changed
            return next(found for day in days if (found := datetime.combine(day, time).astimezone()) > now).timestamp()
        if value[:4].isdigit() and "-" in value:
            return read_iso_time(value).astimezone().timestamp()
        return at + parse_duration(value)
    except (ValueError, OverflowError):
        raise ValueError(f"{value!r} is not a time; 14:00, 2026-11-24T06:00 and 2h are") from None


options.TYPES["WHEN"] = options.Value("WHEN", lambda text: parse_date(text, clock.wall()))


@command(
    """
    job_ids [JOB]…
    -x, --exclude NODE…  Restart without it; repeatable.
    --reason TEXT  Kept in the journal of each and shown by `show`.
    --now  Requeue at once, from the last complete checkpoint: if it hangs.
    --cancel  End a restart that still waits for the job to save.
    --save-only  Ask the jobs to save before maintenance; end none.
    --all  With --save-only: all running jobs that are watched.
    --hold  With --save-only: a job that has saved is requeued and held until `scontrol release`.
    --before WHEN  With --save-only: 14:00, 2026-11-24T06:00, 2h. [default: as ladder.checkpoint_limit]
    --dry-run  With --save-only: only list them, those first that cannot be asked.
    --no-wait  Do not wait for the end.
    """,
    *(f"--{name} X  removed: name the jobs: $(squeue -h -t R -w NODES -o %i)" for name in SELECTORS),
    ASKS,
    refused=EXIT_FOUND,
)
def restart(
    asked: Asked, job_ids: tuple[str, ...], exclude: tuple[str, ...], reason: str | None, no_wait: bool, **how: Any
) -> Answer:
    """Restarts a job gracefully: kill switch, complete checkpoint, requeue without the excluded nodes, first new step.

    A job with a supervisor (slurm-watchdog run) is started again in its allocation, and requeued only where that
    cannot be. A job that is known to hang cannot see a kill switch: it is restarted at once, if you confirm it or
    give --now. Of several jobs a table says what became of each. The guards that protect the job hold here, too
    (paused, Slurm not answering, storage unavailable, job not requeueable); cooldown, budget and mode don't.
    Exit code 0 when the job trains again (--no-wait: when it was allowed), 1 refused or failed, 3 its end is not known.

    With --save-only every JOB that can see its kill switch is asked to save, and a complete checkpoint of each is
    waited for; the table has those first that cannot be asked or did not save. With --hold a job that has saved is put
    back into the queue and held there. Exit code 0 if all have saved, else 1: also if no job runs, or with --no-wait.

    \b
    Examples:
      slurm-watchdog restart 4711 --exclude n7 --reason "slow GPU"
      slurm-watchdog restart --exclude n7 $(squeue -h -t R -w n7 -o %i)
      slurm-watchdog restart --save-only 4711 4712 --before 06:00 --hold --reason "storage moves"
      slurm-watchdog restart --save-only --all --dry-run
    """
    saves, wish = how["save_only"], Wish.HOLD if how["hold"] else Wish.SAVE if how["save_only"] else Wish.RESTART
    if sum(how[name] for name in ("now", "cancel", "save_only")) > 1:
        raise click.UsageError("--now, --cancel and --save-only exclude each other")
    if not saves and (how["all"] or how["hold"] or how["before"] or how["dry_run"]):
        raise click.UsageError("--all, --hold, --before and --dry-run go with --save-only")
    if saves and exclude:
        raise click.UsageError("--exclude goes without --save-only")
    if saves and bool(job_ids) == how["all"]:
        raise click.UsageError("name the jobs, or --all alone")
    if not saves and (not job_ids or (len(job_ids) > 1 and (how["now"] or how["cancel"]))):
        raise click.UsageError("name one JOB, or, without --now and --cancel, several")
    client = find(asked)
    if saves or len(job_ids) > 1:
        rows = [Row(job) for job in named_jobs(client, job_ids)]
        if how["dry_run"]:
            for row in rows:
                row.why = row.why or "would be asked"
            return _table(rows, not rows or any(row.job.why_not for row in rows))
        if rows and saves and not asked.json:
            deaf = sum(bool(row.job.why_not) for row in rows)
            sentence(f"{plural(len(rows), 'job')}, {deaf or 'none'} of them cannot be asked.")
        body = SaveRequest(job_ids=(), wish=wish, before=how["before"], reason=reason or "", exclude=exclude)
        return _ask_many(client, rows, body, asked, wait=not no_wait)
    (job_id,) = job_ids
    if how["cancel"]:
        cancelled = client.post(Cancelled, "/v1/restart/cancel", body=JobRequest(job_id=job_id))
        return Answer(cancelled, [f"The restart of job {job_id} is cancelled; the job is left as it is."])
    body_of_one = documents.RestartRequest(job_id=job_id, exclude=exclude, reason=reason or "", now=how["now"])
    accepted = _ask_one(client, asked, body_of_one)
    if not asked.json:
        show("restart", job_id=job_id, accepted=accepted)
    row = Row(SelectedJob(job_id=job_id))
    row.take(accepted)
    is_fine = row.state == "under way"
    document = structs.asdict(accepted)
    if is_fine and not no_wait:
        follow(client, [row], asked, lambda: render("following", drawn_columns(), action=row.action))
        if row.is_followed:  # Ctrl-C
            sys.exit(EXIT_UNKNOWN)
        if row.action is None or row.action.end is None:
            raise ClientError(
                f"The restart is under way, incident {accepted.incident_id}; the controller does not show you how far "
                "it is.",
                "The owner of the job may see it, and those named in security.operators: slurm-watchdog status has its "
                "state.",
            )
        document |= {"operations": row.action.operations, "end": row.action.end}
        is_fine = row.action.end.ok
    return Answer(document, (), not is_fine)


def _ask_one(client: Client, asked: Asked, body: documents.RestartRequest) -> Answered:
    """Asks for the restart; of a job that hangs a person at a terminal is asked whether it may be requeued at once."""
    try:
        return client.post(Answered, "/v1/restart", body=body)
    except ClientError as error:
        if error.code != "hangs" or asked.json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        sentence(f"{clean(error.what[:1].upper() + error.what[1:].removesuffix(': ask with --now'))}.")
        if not click.confirm("Requeue it now?", err=True):
            raise
    return client.post(Answered, "/v1/restart", body=structs.replace(body, now=True))


def named_jobs(client: Client, job_ids: Sequence[str]) -> list[SelectedJob]:
    """These jobs; all that run if none is named. Raises ClientError."""
    running = {job.job_id: job for job in client.get(list[SelectedJob], "/v1/requests/jobs")}
    if not job_ids:
        return list(running.values())
    gone = "it does not run, or is not watched"
    return [running.get(each) or SelectedJob(job_id=each, why_not=gone) for each in dict.fromkeys(job_ids)]


def _ask_many(client: Client, rows: Sequence[Row], body: SaveRequest, asked: Asked, *, wait: bool) -> Answer:
    """Asks for the same of all jobs that can be asked, follows it to its end unless not to `wait`, and says what became
    of each; code 1 if it was not done to all, or no job was selected. Raises ClientError."""
    able = {row.job.job_id: row for row in rows if row.state == "under way"}
    for at in range(0, len(able), documents.MAX_AT_ONCE):
        some = structs.replace(body, job_ids=tuple(able)[at : at + documents.MAX_AT_ONCE])
        for answered in client.post(list[Answered], "/v1/requests", body=some):
            able[answered.job_id].take(answered)
    if wait:
        follow(client, rows, asked, lambda: _news(rows))
    fine = {"done", "not needed"} | ({"under way"} if body.wish is Wish.RESTART and not wait else set())
    return _table(rows, not rows or any(row.state not in fine for row in rows))


def follow(client: Client, rows: Sequence[Row], asked: Asked, news: Callable[[], list[str]]) -> None:
    """Until the action of each has ended; prints every line of `news` once."""
    answered_at, printed = clock.monotonic(), set[str]()
    try:
        while left := {row.incident_id: row for row in rows if row.is_followed}:
            found: dict[str, ActionRun] = {}
            try:
                for at in range(0, len(left), documents.MAX_FOLLOWED):
                    body = documents.FollowRequest(incident_ids=tuple(left)[at : at + documents.MAX_FOLLOWED])
                    found |= client.post(dict[str, ActionRun], "/v1/requests/progress", body=body)
            except ClientError as error:
                if error.is_final or clock.monotonic() - answered_at > RECONNECT_LIMIT_S:
                    raise ClientError(error.what, error.todo) from error
            else:
                answered_at = clock.monotonic()
                for incident_id, row in left.items():
                    row.follow(found.get(incident_id))
                if not asked.json:
                    lines = [line for line in news() if line not in printed]
                    printed.update(lines)
                    print_lines(lines)
                    sys.stdout.flush()
            if any(row.is_followed for row in rows):
                wait_readable((), LOOK_EVERY_S)
    except KeyboardInterrupt:
        warn("No longer following; what was begun continues: slurm-watchdog status")


def _news(rows: Sequence[Row]) -> list[str]:
    """A line for each job whose action has ended, and how many have not."""
    ended = [row for row in rows if row.action is not None and row.action.end is not None]
    waiting = [row for row in rows if row.state == "under way"]
    saved = sum(row.has_saved for row in waiting)
    return render("asked", drawn_columns(), ended=ended, jobs=len(rows), waits=len(waiting), saved=saved)


def _table(rows: Sequence[Row], code: bool) -> Answer:
    """Those first that need a decision of yours."""
    ranked = sorted(rows, key=lambda row: ORDER.index(row.state))
    return Answer({"jobs": [row.as_json() for row in ranked]}, partial(show, "asked_jobs", rows=ranked), code)
