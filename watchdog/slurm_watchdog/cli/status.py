"""`slurm-watchdog status`: what is watched, and whether all is well; a monitoring plugin by its exit code."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from msgspec import structs

from slurm_watchdog.base import clock
from slurm_watchdog.base.capped import CAPS
from slurm_watchdog.cli.client import Client, describe, find, own_instead
from slurm_watchdog.cli.options import ASKS, EXIT_UNKNOWN, ROWS_ONLY, Answer, Asked, ClientError, command, versioned
from slurm_watchdog.cli.terminal import LEVELS, drawn_columns, print_lines, redraw, render, sentence
from slurm_watchdog.model.documents import ControllerState, IncidentCounts, Job, JobHealth, Nodes, SlurmState, Status

if TYPE_CHECKING:
    from slurm_watchdog.standalone.own_runs import OwnRun

GRAVEST = (0, 1, EXIT_UNKNOWN, 2)  # Exit codes, the gravest last.
JOB_STYLES = {"critical": "red", "warning": "yellow", "unknown": "magenta", "ok": ""}
STYLE_ORDER = ("red", "magenta", "yellow", "")
LATE_RATIO = 0.8  # Share of its limit from which on a job's progress is yellow.
MAX_SHOWN = 5  # Incidents, silences, and what was left out.
MAX_JOB_REASONS = 10  # Jobs of which it is printed why they are not simply training.
FRESH_S = 30.0  # An older sentence of an incident shows its age: one that is judged is renewed every few seconds.
BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_STEPS = 24
LINES_AROUND_JOBS = 8
WRAPPED_LINES = 3  # Of one sentence, with --watch.
NO_STATUS = Status(mode="", controller=ControllerState(), slurm=SlurmState(), nodes=Nodes(), incidents=IncidentCounts())
"""What is known before the first answer."""


@command(
    """
    --watch  Redraw it every few seconds, until Ctrl-C.
    --every S<0.2..3600>=2  Interval of --watch in seconds.
    --me  Only your own jobs and incidents.
    """,
    ROWS_ONLY,
    ASKS,
)
def status(asked: Asked, watch: bool, every: float, me: bool) -> Answer:
    """What is watched and whether all is well.

    With --watch a screen: what fires, the jobs with phase, step, the times of their newest steps and how much of their
    limit has passed, those in trouble first; piped, the same text again and again; with --json one document a line.
    From another machine: munge://HOST:PORT, where the site has set controller.user_listen; users see their own jobs.
    Where no controller answers: your own `run`, several one after the other (with --json: `runs`).

    Exit code 0 OK, 1 warning (also a job that is restarting), 2 critical (an incident is firing), 3 unknown (the
    controller gives no answer, or sees nothing). With --watch that of the last look.

    \b
    Examples:
      slurm-watchdog status --watch
      slurm-watchdog status --me --socket munge://mgmt1:9768
      slurm-watchdog status --json | jq .incidents
    """
    if me and watch:
        raise click.UsageError("--me goes without --watch")
    own = own_instead(asked)
    if len(own) > 1 and not watch:
        return _each(own)
    client = find(asked)
    if watch:
        sys.exit(_watch(client, every, asked.json))
    found = client.get(Status, "/v1/status", me=1 if me else None)
    return Answer(found, lambda: print_lines(screen(found, drawn_columns())), exit_code(found))


def screen(found: Status, columns: int | None, **changes: Any) -> list[str]:
    """The lines of a status, its jobs in trouble first; `changes` are values of the template."""
    ranked = sorted(found.jobs, key=lambda job: (STYLE_ORDER.index(style_of(job)), -_used(job), job.job_id))
    jobs = [(job, job.health or JobHealth(), style_of(job)) for job in ranked]
    name, style = LEVELS[exit_code(found)]
    values: dict[str, Any] = {"found": found, "jobs": jobs, "rows": len(jobs), "watched": False, "shown": MAX_SHOWN}
    values |= {"headline": f"{name}: {found.headline}", "style": style, "fresh_s": FRESH_S, "meanings": CAPS}
    values |= {"reasons": [each for each in jobs if each[1].reason][:MAX_JOB_REASONS]}
    return render("status", columns, now=clock.wall(), sparkline=sparkline, **values | changes)


def frame(found: Status, columns: int, height: int, note: str) -> list[str]:
    """One screen of at most `height` lines, with `note` as the last one, and as many jobs as there is room for."""
    shown = min(MAX_SHOWN, max(1, (height - LINES_AROUND_JOBS) // 2))
    rows, lines = height, [""] * (height - 2)
    for _ in range(2):
        rows = max(1, rows - (len(lines) - (height - 2)))
        lines = screen(found, columns, watched=True, shown=shown, rows=rows, most=WRAPPED_LINES)
    return [*lines[: height - 1], note[:columns]]


def _each(own: Sequence[OwnRun]) -> Answer:
    """Several runs of one's own, one after the other; the exit code is the worst."""
    found = [(run, _look(Client(run.socket))) for run in own]

    def print_all() -> None:
        for run, answer in found:
            sentence(describe(run), "bold")
            print_lines(screen(answer, drawn_columns()))

    rows = [{"directory": run.directory, "status": answer} for run, answer in found]
    return Answer({"runs": rows}, print_all, max((exit_code(answer) for _, answer in found), key=GRAVEST.index))


def _watch(client: Client, every_s: float, as_json: bool) -> int:
    """Looks until Ctrl-C; returns the exit code of the last look."""
    from slurm_watchdog.base.loop import sleep

    last = NO_STATUS

    def look(columns: int, height: int) -> list[str]:
        nonlocal last
        found = _look(client)
        lost = f"{found.headline} Below is what was seen last."
        last = found if found.mode else structs.replace(last, level=found.level, headline=lost)
        return frame(last, columns, height, f"every {every_s:g} s, Ctrl-C ends it")

    if drawn_columns() is not None and not as_json:
        redraw(look, every_s)
        return exit_code(last)
    try:
        while True:
            last = _look(client)
            if as_json:
                click.echo(json.dumps(versioned(last)))
            else:
                print_lines([*screen(last, None), ""])
            sleep(every_s)
    except KeyboardInterrupt:
        return exit_code(last)
    except BrokenPipeError:  # `status --watch | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed
        return exit_code(last)


def _look(client: Client) -> Status:
    """What the controller answers; without an answer an unknown status with the reason."""
    try:
        return client.get(Status, "/v1/status")
    except ClientError as error:
        return structs.replace(NO_STATUS, headline=error.what)


def exit_code(answer: Status) -> int:
    """As a monitoring plugin's."""
    return [name.lower() for name, _ in LEVELS].index(answer.level)


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value between the smallest and the largest; one that is flat within 5 % is drawn flat."""
    known = [value for value in values[-SPARKLINE_STEPS:] if math.isfinite(value)]
    if not known:
        return ""
    low, high = min(known), max(known)
    if high - low <= 0.05 * abs(high):
        return BARS[0] * len(known)
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / (high - low) * len(BARS)))] for value in known)


def style_of(job: Job) -> str:
    """Red: in trouble, past its limit, or a rank is lost. Yellow: a warning, or near its limit."""
    if _used(job) > 1 or job.has_lost_rank:
        return "red"
    return JOB_STYLES.get((job.health or JobHealth()).level, "") or ("yellow" if _used(job) > LATE_RATIO else "")


def _used(job: Job) -> float:
    return (job.progress_age_s or 0.0) / job.limit_s if job.limit_s else 0.0
