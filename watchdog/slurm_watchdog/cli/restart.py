"""`slurm-watchdog restart`: has one job or many restart, or save before a maintenance, and follows it to its end."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NoReturn

import click
from msgspec import structs

from slurm_watchdog.base import clock
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.base.python310 import read_iso_time
from slurm_watchdog.base.text import plural
from slurm_watchdog.cli.client import Client
from slurm_watchdog.cli.find_controller import Asked, asks_controller
from slurm_watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    EXIT_UNKNOWN,
    ClientError,
    expand_nodes,
    flag,
    job_arguments,
    parsed,
    print_json,
    value,
)
from slurm_watchdog.cli.terminal import clean, drawn_columns, print_lines, render, sentence, show
from slurm_watchdog.model.actions import Wish
from slurm_watchdog.model.documents import (
    MAX_AT_ONCE,
    MAX_FOLLOWED,
    ActionRun,
    Answered,
    Cancelled,
    FollowRequest,
    JobRequest,
    RestartRequest,
    SaveRequest,
    SelectedJob,
)

SAVED = ("wait_checkpoint", "done")
LOOK_EVERY_S = 1.0
RECONNECT_LIMIT_S = 120.0  # Wait for a controller that is itself restarted; it then continues what it has begun.
UNSEEN_ANSWERS = 3
"""Answers in a row without an action, after which it is not waited for: an older controller hides it."""
ORDER = ("cannot be asked", "failed", "under way", "not needed", "done")
ENDS = {"ok": "done", "needless": "not needed", "failed": "failed"}


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
@value("-x", "--exclude", metavar="NODE", multiple=True, callback=expand_nodes, help="Restart without it; repeatable.")
@value("--reason", metavar="TEXT", default="", help="Kept in the journal of each and shown by `show`.")
@click.option("--now", "how", flag_value="now", help="Requeue at once, from the last complete checkpoint: if it hangs.")
@click.option("--cancel", "how", flag_value="cancel", help="End a restart that still waits for the job to save.")
@click.option("--save-only", "how", flag_value="save", help="Ask the jobs to save before maintenance; end none.")
@flag("--all", "everything", help="With --save-only: all running jobs that are watched.")
@flag("--hold", help="With --save-only: a job that has saved is requeued and held until `scontrol release`.")
@value(
    "--before",
    "before_at",
    metavar="TIME",
    callback=parsed(lambda value: parse_date(value, clock.wall()), "is not a time; 14:00, 2026-11-24T06:00 and 2h are"),
    help="With --save-only: 14:00, 2026-11-24T06:00, 2h. [default: as ladder.checkpoint_limit]",
)
@flag("--dry-run", help="With --save-only: only list them, those first that cannot be asked.")
@flag("--no-wait", help="Do not wait for the end.")
@asks_controller(refused=EXIT_FOUND)
def restart(
    asked: Asked,
    job_ids: tuple[str, ...],
    exclude: list[str],
    reason: str,
    how: str | None,
    no_wait: bool,
    **saving: Any,
) -> None:
    """Restarts a job gracefully: kill switch, complete checkpoint, requeue without the excluded nodes, first new step.

    A job with a supervisor (slurm-watchdog run) is started again in its allocation, and requeued only where that
    cannot be. A job that is known to hang cannot see a kill switch: it is restarted at once, if you confirm it or
    give --now. Several jobs are restarted at once; a table says what became of each.

    The guards that protect the job hold here, too (paused, Slurm not answering, storage unavailable, job not
    requeueable); cooldown, budget and mode don't. Exit code 0 when the job trains again (with --no-wait: when
    it was allowed), 1 when it was refused or failed, 3 when its end is not known.

    With --save-only every JOB that can see its kill switch is asked to save, and a complete checkpoint of each is
    waited for; the table has those first that cannot be asked or did not save. With --hold a job that has saved is put
    back into the queue and held there. Exit code 0 if all have saved, else 1: also if no job runs, or with --no-wait.

    \b
    Examples:
      slurm-watchdog restart 4711 --exclude n7 --reason "slow GPU"
      slurm-watchdog restart 4711 --now
      slurm-watchdog restart 4711 --cancel
      slurm-watchdog restart --exclude n7 $(squeue -h -t R -w n7 -o %i)
      slurm-watchdog restart --save-only 4711 4712 --before 06:00 --hold --reason "storage moves"
      slurm-watchdog restart --save-only --dry-run $(squeue -h -t R -w 'n[17-20]' -o %i)
      slurm-watchdog restart --save-only --all
    """
    if how == "save":
        if exclude:
            raise click.UsageError("--exclude goes without --save-only")
        if bool(job_ids) == saving["everything"]:
            raise click.UsageError("name the jobs, or --all alone")
        wish = Wish.HOLD if saving["hold"] else Wish.SAVE
        body = SaveRequest(job_ids=(), wish=wish, before=saving["before_at"], reason=reason)
        _save(asked.client(), job_ids, body, asked, dry_run=saving["dry_run"], wait=not no_wait)
    if any(saving.values()):
        raise click.UsageError("--all, --hold, --before and --dry-run go with --save-only")
    if not job_ids or (len(job_ids) > 1 and how):
        raise click.UsageError("name one JOB, or, without --now and --cancel, several")
    client = asked.client()
    if len(job_ids) > 1:
        body = SaveRequest(job_ids=(), wish=Wish.RESTART, exclude=tuple(exclude), reason=reason)
        sys.exit(ask_many(client, named_jobs(client, job_ids), body, asked, wait=not no_wait))
    (job_id,) = job_ids
    if how == "cancel":
        said = f"The restart of job {job_id} is cancelled; the job is left as it is."
        cancelled = client.post(Cancelled, "/v1/restart/cancel", body=JobRequest(job_id=job_id))
        asked.answer(cancelled, lambda: sentence(said))
        return
    accepted = _ask(client, asked, job_id, exclude, reason, how == "now")
    if not asked.as_json:
        show("restart", job_id=job_id, accepted=accepted)
    row = Row(SelectedJob(job_id=job_id), incident_id=accepted.incident_id)
    is_over = accepted.verdict != "allowed" or no_wait
    if not is_over:
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
    if asked.as_json:
        end = {} if row.action is None else {"operations": row.action.operations, "end": row.action.end}
        print_json(structs.asdict(accepted) | end)
    is_fine = accepted.verdict == "allowed" and (row.action is None or row.action.end is None or row.action.end.ok)
    sys.exit(EXIT_FINE if is_fine else EXIT_FOUND)


def _ask(client: Client, asked: Asked, job_id: str, exclude: list[str], reason: str, now: bool) -> Answered:
    """Asks for the restart; of a job that hangs a person at a terminal is asked whether it may be requeued at once."""
    body = RestartRequest(job_id=job_id, exclude=tuple(exclude), reason=reason, now=now)
    try:
        return client.post(Answered, "/v1/restart", body=body)
    except ClientError as error:
        if error.code != "hangs" or asked.as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        sentence(f"{clean(error.what[:1].upper() + error.what[1:].removesuffix(': ask with --now'))}.")
        if not click.confirm("Requeue it now?", err=True):
            raise
    return client.post(Answered, "/v1/restart", body=structs.replace(body, now=True))


def _save(
    client: Client, job_ids: Sequence[str], body: SaveRequest, asked: Asked, *, dry_run: bool, wait: bool
) -> NoReturn:
    """Has jobs save, all that run if none is named; ends the process."""
    jobs = named_jobs(client, job_ids)
    if dry_run:
        print_rows([Row(job, why="would be asked") for job in jobs], asked)
        sys.exit(EXIT_FOUND if not jobs or any(job.why_not for job in jobs) else EXIT_FINE)
    if jobs and not asked.as_json:
        deaf = sum(bool(job.why_not) for job in jobs)
        sentence(f"{plural(len(jobs), 'job')}, {deaf or 'none'} of them cannot be asked.")
    sys.exit(ask_many(client, jobs, body, asked, wait=wait))


# ----------------------------------------------------------------------------------------------- many jobs


def named_jobs(client: Client, job_ids: Sequence[str]) -> list[SelectedJob]:
    """These jobs; all that run if none is named. Raises ClientError."""
    running = {job.job_id: job for job in client.get(list[SelectedJob], "/v1/requests/jobs")}
    if not job_ids:
        return list(running.values())
    gone = "it does not run, or is not watched"
    return [running.get(each) or SelectedJob(job_id=each, why_not=gone) for each in dict.fromkeys(job_ids)]


@dataclass
class Row:
    """One job, and what became of it."""

    job: SelectedJob
    state: str = "under way"
    why: str = ""
    incident_id: str = ""
    action: ActionRun | None = None  # As it was seen last.
    unseen: int = 0  # Answers in a row that did not show it.

    def __post_init__(self) -> None:
        if self.job.why_not:
            self.state, self.why = "cannot be asked", self.job.why_not

    @property
    def has_saved(self) -> bool:
        """A complete checkpoint has come since it was asked: it may end by itself still."""
        return self.action is not None and any(
            (each.operation, each.outcome) == SAVED for each in self.action.operations
        )

    @property
    def is_followed(self) -> bool:
        """Whether its action may still be seen to end."""
        return self.state == "under way" and bool(self.incident_id) and self.unseen < UNSEEN_ANSWERS

    def take(self, answered: Answered) -> None:
        """What the controller says to the request."""
        self.incident_id = answered.incident_id or ""
        if answered.verdict != "allowed":
            self.state, self.why = "cannot be asked", answered.reason

    def follow(self, action: ActionRun | None) -> None:
        """How far the action is; None: the controller does not show it."""
        if action is None:
            self.unseen += 1
            self.why = self.why if self.is_followed else "its progress is for its owner and operators to see"
            return
        self.action, self.unseen = action, 0
        if action.end is not None:
            self.state, self.why = ENDS.get(action.end.outcome, "failed"), action.end.detail or ""
        elif action.waiting is not None:
            self.why = action.waiting.what
        elif action.operations:
            self.why = action.operations[-1].operation.replace("_", " ")


def ask_many(client: Client, jobs: Sequence[SelectedJob], body: SaveRequest, asked: Asked, *, wait: bool) -> int:
    """Asks for the same of all jobs that can be asked, follows it to its end unless not to `wait`, and prints what
    became of each. Returns the exit code: 1 if it was not done to all, or no job was selected. Raises ClientError."""
    rows = {job.job_id: Row(job) for job in jobs}
    able = [job_id for job_id, row in rows.items() if row.state == "under way"]
    for start in range(0, len(able), MAX_AT_ONCE):
        some = structs.replace(body, job_ids=tuple(able[start : start + MAX_AT_ONCE]))
        for answered in client.post(list[Answered], "/v1/requests", body=some):
            rows[answered.job_id].take(answered)
    if wait:
        follow(client, list(rows.values()), asked, lambda: _news(list(rows.values())))
    print_rows(list(rows.values()), asked)
    fine = {"done", "not needed"} | ({"under way"} if body.wish is Wish.RESTART and not wait else set())
    good = bool(rows) and all(row.state in fine for row in rows.values())
    return EXIT_FINE if good else EXIT_FOUND


def follow(client: Client, rows: Sequence[Row], asked: Asked, news: Callable[[], list[str]]) -> None:
    """Until the action of each has ended; prints every line of `news` once."""
    answered_at, printed = clock.monotonic(), set[str]()
    try:
        while left := {row.incident_id: row for row in rows if row.is_followed}:
            try:
                found = _progress(client, tuple(left))
            except ClientError as error:
                if error.is_final or clock.monotonic() - answered_at > RECONNECT_LIMIT_S:
                    raise ClientError(error.what, error.todo) from error
            else:
                answered_at = clock.monotonic()
                for incident_id, row in left.items():
                    row.follow(found.get(incident_id))
                if not asked.as_json:
                    lines = [line for line in news() if line not in printed]
                    printed.update(lines)
                    print_lines(lines)
                    sys.stdout.flush()
            if any(row.is_followed for row in rows):
                wait_readable((), LOOK_EVERY_S)
    except KeyboardInterrupt:
        click.echo("No longer following; what was begun continues: slurm-watchdog status", err=True)


def _progress(client: Client, incident_ids: tuple[str, ...]) -> dict[str, ActionRun]:
    found: dict[str, ActionRun] = {}
    for start in range(0, len(incident_ids), MAX_FOLLOWED):
        some = FollowRequest(incident_ids=incident_ids[start : start + MAX_FOLLOWED])
        found |= client.post(dict[str, ActionRun], "/v1/requests/progress", body=some)
    return found


def _news(rows: Sequence[Row]) -> list[str]:
    """A line for each job whose action has ended, and how many have not."""
    ended = [row for row in rows if row.action is not None and row.action.end is not None]
    waiting = [row for row in rows if row.state == "under way"]
    saved = sum(row.has_saved for row in waiting)
    return render("asked", drawn_columns(), ended=ended, jobs=len(rows), waits=len(waiting), saved=saved)


def print_rows(rows: Sequence[Row], asked: Asked) -> None:
    """The table, those first that need a decision of yours."""
    ranked = sorted(rows, key=lambda row: ORDER.index(row.state))
    names = ("job_id", "user", "nodes", "step")
    jobs = [
        {name: getattr(row.job, name) for name in names}
        | {"state": row.state, "why": row.why, "incident_id": row.incident_id}
        for row in ranked
    ]
    asked.answer({"jobs": jobs}, lambda: show("asked_jobs", rows=ranked))
