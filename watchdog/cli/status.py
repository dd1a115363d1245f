"""`slurm-watchdog status`: what is watched, and whether all is well; a monitoring plugin by its exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import click

from watchdog import clock
from watchdog.cli.answers import ControllerState, IncidentCounts, Job, Nodes, SlurmState, Status
from watchdog.cli.client import Client, ClientError
from watchdog.cli.options import EXIT_UNKNOWN, failures_told, open_client, operator_options, print_json
from watchdog.cli.text import count, duration, fold_nodes, screen, sentence, table

if TYPE_CHECKING:
    from rich.console import RenderableType

OK: Final = 0
WARNING: Final = 1
CRITICAL: Final = 2
WORDS: Final = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
STYLES: Final = ("green", "yellow", "bold red", "magenta")

TICK_LATE_S: Final = 30.0
"""A controller whose last whole tick is older than this sees nothing; its default cadence is 1 s."""
SLURM_LATE_S: Final = 60.0
"""The default poll interval of 10 s, with room for a Slurm that answers slowly."""

HEADINGS = ("JOB", "NAME", "USER", "STATE", "NODES", "RANKS", "STEP", "STEP TIME", "LAST STEP", "LIMIT", "PHASE",
            "CHECKPOINT", "RESTARTS")  # fmt: skip

SHOWN_LEFT_OUT: Final = 5

NOTHING: Final = Status(
    mode="", controller=ControllerState(), slurm=SlurmState(), nodes=Nodes(), incidents=IncidentCounts()
)
"""What is known before the first answer."""


@click.command()
@click.option("-w", "--watch", "watching", is_flag=True, help="Draw it anew every few seconds, until Ctrl-C.")
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(0.2, 3600.0),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often, with --watch.",
)
@operator_options
def status(
    watching: bool, every_s: float, socket_path: str | None, config_file: str | None, as_json: bool
) -> None:
    """What is watched and whether all is well.

    With --watch a screen: what fires, the jobs with their phase, step, the times of their newest steps and how much of their
    limit has passed without a step, those in trouble first. Piped, the same text as without it, again and again; with --json
    one document a line.

    Exit code 0 OK, 1 warning, 2 critical (an incident is firing), 3 unknown (the controller gives no answer, or
    sees nothing). With --watch that of the last look.

    \b
    Examples:
      slurm-watchdog status
      slurm-watchdog status --watch
      slurm-watchdog status --json | jq .incidents
    """
    client = open_client(socket_path, config_file)
    if watching:
        sys.exit(_watch(client, every_s, as_json))
    with failures_told(as_json):
        answer, document = client.status()
    code, reasons = judge(answer)
    if as_json:
        print_json(document)
    else:
        _print(answer, code, reasons)
    sys.exit(code)


def _print(answer: Status, code: int, reasons: list[str]) -> None:
    sentence(_headline(answer, code, reasons), STYLES[code])
    table(HEADINGS, [_row(job) for job in answer.jobs], [_style(job) for job in answer.jobs])
    for each in answer.left_out[:SHOWN_LEFT_OUT]:
        who = f", most of them of uid {each.uid}" if each.uid is not None else ""
        sentence(f"Not looked at: {each.count} of {each.whose}{who} ({each.meaning})")
    if answer.incidents.firing or answer.incidents.pending:
        sentence("More: slurm-watchdog incidents")


def _watch(client: Client, every_s: float, as_json: bool) -> int:
    """Looks until Ctrl-C; returns the exit code of the last look."""
    from watchdog.cli import live
    from watchdog.runner import sleep

    history, last, code = live.History(), NOTHING, EXIT_UNKNOWN
    console = screen()

    def look() -> RenderableType:
        nonlocal last, code
        note = f"every {every_s:g} s, Ctrl-C ends it"
        try:
            last, _ = client.status()
        except ClientError as error:
            code = EXIT_UNKNOWN
            headline = f"{WORDS[code]}: {error.what} Below is what was seen last."
            return live.frame(
                last, headline, STYLES[code], history, clock.wall(), console.height, note, width=console.width
            )
        history.note(last.jobs)
        code, reasons = judge(last)
        headline = _headline(last, code, reasons)
        return live.frame(
            last, headline, STYLES[code], history, clock.wall(), console.height, note, width=console.width
        )

    if console.is_terminal and not as_json:
        live.watch(look, every_s)
        return code
    try:
        while True:
            code, lines = _look_plainly(client, as_json)
            lines()
            sleep(every_s)
    except KeyboardInterrupt:
        return code
    except BrokenPipeError:  # `status --watch | head`
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # what is still to be flushed goes nowhere
        return code


def _look_plainly(client: Client, as_json: bool) -> tuple[int, Callable[[], None]]:
    """One look: its exit code, and what prints it as text or as one line of JSON."""
    try:
        answer, document = client.status()
    except ClientError as error:
        failure = {"error": error.what, "next": error.todo}
        said = f"{WORDS[EXIT_UNKNOWN]}: {error.what}"
        return EXIT_UNKNOWN, (lambda: click.echo(json.dumps(failure))) if as_json else (
            lambda: sentence(said)
        )
    code, reasons = judge(answer)
    if as_json:
        return code, lambda: click.echo(json.dumps(document, ensure_ascii=True))

    def print_text() -> None:
        _print(answer, code, reasons)
        click.echo()

    return code, print_text


def judge(status: Status) -> tuple[int, list[str]]:
    """The exit code, and every reason why it is not 0. An incident outranks blindness, blindness a warning."""
    critical, unknown, warning = [], [], []
    if status.incidents.firing:
        critical.append(f"{count(status.incidents.firing, 'incident')} firing")
    tick_age_s = status.controller.last_tick_age_s
    if tick_age_s is None:
        unknown.append("the controller has not completed a tick yet")
    elif tick_age_s > TICK_LATE_S:
        unknown.append(f"the controller's last complete tick was {duration(tick_age_s)} ago")
    if status.controller.journal_error:
        unknown.append(
            f"the journal cannot be written, so nothing is done ({status.controller.journal_error})"
        )
    because = f" ({status.slurm.error})" if status.slurm.error else ""
    if status.slurm.age_s is None:
        unknown.append(f"Slurm has not answered yet{because}")
    elif status.slurm.age_s > SLURM_LATE_S:
        unknown.append(f"Slurm last answered {duration(status.slurm.age_s)} ago{because}")
    elif status.slurm.error:
        warning.append(f"Slurm's last answer was an error{because}")
    if status.jobs and not status.nodes.reporting:
        unknown.append("no node reports")
    elif status.nodes.silent:
        silent = fold_nodes(status.nodes.silent)
        warning.append(f"{count(len(status.nodes.silent), 'node')} silent: {silent}")
    if status.paused is not None:
        who = f" by {status.paused.by}" if status.paused.by else ""
        why = f": {status.paused.reason}" if status.paused.reason else ""
        warning.append(f"actions are paused{who}{why}")
    warning += status.slurm.notes
    warning += [f"job {job_id}: {why}" for job_id, why in sorted(status.waiting.items())]
    if status.incidents.pending:
        warning.append(f"{count(status.incidents.pending, 'incident')} pending")
    if status.controller.warming_up:
        warning.append("the controller has just started and only looks on")
    if status.mode == "off":
        warning.append("the mode is off, nothing is judged")
    code = CRITICAL if critical else EXIT_UNKNOWN if unknown else WARNING if warning else OK
    return code, [*critical, *unknown, *warning]


def _headline(status: Status, code: int, reasons: list[str]) -> str:
    watched = (
        f"{count(len(status.jobs), 'job')} watched, {count(len(status.nodes.reporting), 'node')} reporting, "
        f"mode {status.mode}"
    )
    return f"{WORDS[code]}: {'; '.join([*reasons, watched])}."


def _row(job: Job) -> tuple[str, ...]:
    return (
        job.job_id,
        job.name,
        job.user,
        job.state,
        fold_nodes(job.nodes),
        f"{_number(job.ranks_alive)}/{_number(job.ranks)}",
        _number(job.step) + (f"/{job.total_steps}" if job.total_steps is not None else ""),
        duration(job.step_s),
        f"{duration(job.progress_age_s)} ago" if job.progress_age_s is not None else "-",
        duration(job.limit_s),
        job.phase or "-",
        _number(job.checkpoint_step),
        str(job.restarts),
    )


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _style(job: Job) -> str:
    """Red for a job that is past its limit or has lost a rank."""
    late = job.progress_age_s is not None and job.limit_s is not None and job.progress_age_s > job.limit_s
    lost = job.ranks is not None and job.ranks_alive is not None and job.ranks_alive < job.ranks
    return "red" if late or lost else ""
