"""`slurm-watchdog status`: what is watched, and whether all is well; a monitoring plugin by its exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from slurm_watchdog.base import clock
from slurm_watchdog.cli.client import Client, ClientError
from slurm_watchdog.cli.find_controller import choose, describe, own_instead
from slurm_watchdog.cli.options import (
    EXIT_UNKNOWN,
    FiniteRange,
    operator_options,
    print_json,
    reported_errors,
    versioned,
)
from slurm_watchdog.cli.silence import silence_words
from slurm_watchdog.cli.terminal import duration, fold_nodes, newest_checkpoint, screen, sentence, shown, table
from slurm_watchdog.model.documents import (
    ControllerState,
    IncidentCounts,
    Job,
    JobHealth,
    Nodes,
    OpenIncident,
    SlurmState,
    Status,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from slurm_watchdog.standalone.own_runs import OwnRun

OK: Final = 0
WARNING: Final = 1
CRITICAL: Final = 2
LEVEL_NAMES: Final = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
LEVEL_STYLES: Final = ("green", "yellow", "bold red", "magenta")

CODES: Final = {"ok": OK, "warning": WARNING, "critical": CRITICAL, "unknown": EXIT_UNKNOWN}

HEADINGS = ("JOB", "NAME", "USER", "STATE", "NODES", "RANKS", "STEP", "STEP TIME", "LAST STEP", "LIMIT", "CHECKPOINT",
            "RESTARTS")  # fmt: skip
COLUMN_PRIORITY: Final = (0, 3, 6, 8, 9, 2, 4, 5, 7, 1, 10, 11)
"""Columns in the order in which they are given room on a narrow terminal."""
MAX_JOB_REASONS: Final = 10
"""Jobs of which it is said why they are not simply training."""

MAX_LEFT_OUT: Final = 5
MAX_OPEN: Final = 5
FRESH_S: Final = 30.0
"""An incident that was judged so lately is as it is said to be: a look comes every few seconds."""
LEVEL_ORDER: Final = {"critical": 0, "warning": 1, "unknown": 2, "ok": 3}
JOB_STYLES: Final = {"critical": "red", "warning": "yellow", "unknown": "magenta"}

NO_STATUS: Final = Status(
    mode="", controller=ControllerState(), slurm=SlurmState(), nodes=Nodes(), incidents=IncidentCounts()
)
"""What is known before the first answer."""


@click.command()
@click.option("-w", "--watch", "watching", is_flag=True, help="Redraw it every few seconds, until Ctrl-C.")
@click.option(
    "--every",
    "every_s",
    type=FiniteRange(0.2, 3600.0),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often, with --watch.",
)
@click.option("--me", is_flag=True, help="Only your own jobs and incidents.")
@operator_options
def status(
    watching: bool, every_s: float, me: bool, socket_path: str | None, config_file: str | None, as_json: bool
) -> None:
    """What is watched and whether all is well.

    With --watch a screen: what fires, the jobs with their phase, step, the times of their newest steps and
    how much of their limit has passed without a step, those in trouble first. Piped, the same text as without
    it, again and again; with --json one document a line.

    From another machine: `--socket munge://HOST:PORT`, or $SLURM_WATCHDOG_SOCKET, where the site has set
    controller.user_listen. There users are shown only their own jobs.

    Without --socket it asks the controller of this machine; where none answers, your own `run` and `attach`:
    several are shown one after the other (with --json: a list).

    Exit code 0 OK, 1 warning (also a job that is restarting), 2 critical (an incident is firing), 3 unknown (the
    controller gives no answer, or sees nothing). With --watch that of the last look.

    \b
    Examples:
      slurm-watchdog status
      slurm-watchdog status --watch
      slurm-watchdog status --me --socket munge://mgmt1:9768
      slurm-watchdog status --json | jq .incidents
    """
    if me and watching:
        raise click.UsageError("--me goes without --watch")
    own = own_instead(socket_path, config_file)
    if len(own) > 1 and not watching:
        sys.exit(_print_each(own, as_json))
    client = choose(socket_path, config_file)
    if watching:
        sys.exit(_watch(client, every_s, as_json))
    with reported_errors(as_json):
        answer, document = client.status(me=me)
    if as_json:
        print_json(document)
    else:
        _print(answer)
    sys.exit(exit_code(answer))


def _as_of(found: OpenIncident) -> str:
    """` (as of 2 min ago)` where it was not judged since: without Slurm, or without reports, its figures are old."""
    age_s = 0.0 if found.summary_at is None else clock.wall() - found.summary_at
    return f" (as of {duration(age_s)} ago)" if age_s > FRESH_S else ""


def _print(answer: Status) -> None:
    sentence(_headline(answer), LEVEL_STYLES[exit_code(answer)])
    for found in answer.open[:MAX_OPEN]:
        if found.state == "firing":
            quiet = f" [{found.quiet}]" if found.quiet else ""
            sentence(f"- {found.summary}{_as_of(found)}{quiet} (slurm-watchdog explain {found.id})")
    for silence in answer.silences[:MAX_OPEN]:
        sentence(f"Silenced: {silence_words(silence)}.")
    ranked = sorted(answer.jobs, key=lambda job: LEVEL_ORDER.get(health_of(job).level, 0))
    table(HEADINGS, [_row(job) for job in ranked], [_style(job) for job in ranked], wanted=COLUMN_PRIORITY)
    for job in [job for job in ranked if health_of(job).reason][:MAX_JOB_REASONS]:
        todo = f" What to do: {health_of(job).todo}." if health_of(job).todo else ""
        sentence(f"Job {job.job_id}: {health_of(job).state}, {health_of(job).reason}.{todo}")
    for each in answer.left_out[:MAX_LEFT_OUT]:
        of_job = f" (job {each.job_id})" if each.job_id is not None else ""
        who = f", most of them of uid {each.uid}{of_job}" if each.uid is not None else ""
        sentence(f"Not looked at: {each.count} of {each.whose}{who} ({each.meaning})")
    if answer.incidents.firing or answer.incidents.pending:
        sentence("More: slurm-watchdog incidents")


def _print_each(own: Sequence[OwnRun], as_json: bool) -> int:
    """Several runs of one's own, one after the other; the exit code is the worst."""
    codes, documents = [], []
    for run in own:
        if not as_json:
            sentence(describe(run), "bold")
        try:
            answer, document = Client(run.socket).status()
        except ClientError as error:
            codes.append(EXIT_UNKNOWN)
            documents.append({"directory": run.directory, "error": error.what})
            if not as_json:
                sentence(f"{LEVEL_NAMES[EXIT_UNKNOWN]}: {error.what}")
            continue
        codes.append(exit_code(answer))
        documents.append({"directory": run.directory, "status": document})
        if not as_json:
            _print(answer)
    if as_json:
        print_json(documents)
    return max(codes, key=(OK, WARNING, EXIT_UNKNOWN, CRITICAL).index)


def _watch(client: Client, every_s: float, as_json: bool) -> int:
    """Looks until Ctrl-C; returns the exit code of the last look."""
    from slurm_watchdog.base.loop import sleep
    from slurm_watchdog.cli import status_screen

    history, last, code = status_screen.History(), NO_STATUS, EXIT_UNKNOWN
    console = screen()

    def next_screen() -> RenderableType:
        nonlocal last, code
        try:
            last, _ = client.status()
            history.record(last.jobs)
            code, headline = exit_code(last), _headline(last)
        except ClientError as error:
            code = EXIT_UNKNOWN
            headline = f"{LEVEL_NAMES[code]}: {error.what} Below is what was seen last."
        return status_screen.frame(
            last, headline, LEVEL_STYLES[code], history, clock.wall(), console.height,
            f"every {every_s:g} s, Ctrl-C ends it", width=console.width,
        )  # fmt: skip

    if console.is_terminal and not as_json:
        status_screen.watch(next_screen, every_s)
        return code
    try:
        while True:
            answer, document = _look(client)
            code = EXIT_UNKNOWN if answer is None else exit_code(answer)  # before it is printed: then comes Ctrl-C
            _print_look(answer, document, as_json)
            sleep(every_s)
    except KeyboardInterrupt:
        return code
    except BrokenPipeError:  # `status --watch | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed goes nowhere
        return code


def _look(client: Client) -> tuple[Status | None, Any]:
    """The status, and the document that says it or why there is none."""
    try:
        return client.status()
    except ClientError as error:
        return None, {"error": error.what, "next": error.todo}


def _print_look(answer: Status | None, document: Any, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(versioned(document)))
    elif answer is None:
        sentence(f"{LEVEL_NAMES[EXIT_UNKNOWN]}: {document['error']}")
    else:
        _print(answer)
        click.echo()


def exit_code(answer: Status) -> int:
    """As a monitoring plugin's; a level that is not known is unknown."""
    return CODES.get(answer.level, EXIT_UNKNOWN)


def _headline(answer: Status) -> str:
    return f"{LEVEL_NAMES[exit_code(answer)]}: {answer.headline}"


def _row(job: Job) -> tuple[str, ...]:
    return (
        job.job_id,
        job.name,
        job.user,
        health_of(job).state,
        fold_nodes(job.nodes),
        f"{shown(job.ranks_alive)}/{shown(job.ranks)}",
        shown(job.step) + (f"/{job.total_steps}" if job.total_steps is not None else ""),
        duration(job.step_s),
        f"{duration(round(job.progress_age_s))} ago" if job.progress_age_s is not None else "-",
        duration(job.limit_s),
        newest_checkpoint(job.checkpoint_step, job.saved_age_s),
        str(job.restarts + job.restarts_in_place),
    )


def health_of(job: Job) -> JobHealth:
    """How the job is; of one of which the controller says nothing, that it is not judged."""
    return job.health or JobHealth()


def _style(job: Job) -> str:
    """Red for a job that is in trouble or has lost a rank."""
    return "red" if job.has_lost_rank else JOB_STYLES.get(health_of(job).level, "")
