"""`slurm-watchdog restart`: asks for a graceful restart of one job and follows it, operation by operation."""

from __future__ import annotations

import sys
from typing import Any, Final

import click

from slurm_watchdog.base import clock
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.cli.batch import ask_many, named_jobs
from slurm_watchdog.cli.client import Client, ClientError
from slurm_watchdog.cli.explain import ENDS, describe_end
from slurm_watchdog.cli.find_controller import choose
from slurm_watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    EXIT_UNKNOWN,
    expand_nodes,
    fail,
    job_arguments,
    no_selectors,
    operator_options,
    print_json,
)
from slurm_watchdog.cli.terminal import clean, moment, sentence
from slurm_watchdog.model.documents import Accepted, ActionRun, Operation

FOLLOW_INTERVAL_S: Final = 1.0
RECONNECT_LIMIT_S: Final = 120.0
"""Wait for a controller that is itself restarted; it then continues the action."""
UNSEEN_ANSWERS: Final = 3
"""Answers in a row without the action, after which it is not waited for: an older controller hides it."""


@click.command(short_help="Moves a job gracefully, off a node if you say so.")
@job_arguments
@no_selectors
@click.option(
    "--exclude",
    multiple=True,
    metavar="NODE",
    callback=expand_nodes,
    help="Restart without this node; repeatable.",
)
@click.option("--reason", default="", metavar="TEXT", help="Kept in the journal and shown by `explain`.")
@click.option(
    "--now",
    "how",
    flag_value="now",
    help="Without waiting for a checkpoint: requeue at once, from the last complete one. For a job that hangs.",
)
@click.option(
    "--cancel",
    "how",
    flag_value="cancel",
    help="End a restart that still waits for the job to save; nothing is done to the job.",
)
@click.option("--no-wait", is_flag=True, help="Ask and leave; otherwise it is followed to its end.")
@operator_options
def restart(
    job_ids: tuple[str, ...],
    exclude: list[str],
    reason: str,
    how: str | None,
    no_wait: bool,
    socket_path: str | None,
    config_file: str | None,
    as_json: bool,
) -> None:
    """Moves a job gracefully: kill switch, complete checkpoint, requeue without the excluded nodes, first new step.

    Several jobs are moved at once, and listed as by `save-all`.

    A job with a supervisor (slurm-watchdog run) is started again in its allocation, and requeued only where that
    cannot be. A job that is known to hang cannot see a kill switch: it is restarted at once, if you confirm it or
    give --now.

    The guards that protect the job hold here, too (paused, Slurm not answering, storage unavailable, job not
    requeueable); cooldown, budget and mode don't. Exit code 0 when the job trains again (with --no-wait: when
    it was allowed), 1 when it was refused or failed, 3 when its end is not known.

    \b
    Examples:
      slurm-watchdog restart 4711 --exclude n7 --reason "slow GPU"
      slurm-watchdog restart 4711 --now
      slurm-watchdog restart 4711 --cancel
      slurm-watchdog restart 4711 --exclude 'n[7-8]' --no-wait --json
      slurm-watchdog restart --exclude n7 $(squeue -h -t R -w n7 -o %i)
    """
    if not job_ids or (len(job_ids) > 1 and how):
        raise click.UsageError("name one JOB, or, without --now and --cancel, several")
    client = choose(socket_path, config_file)
    try:
        if len(job_ids) > 1:
            body = {"wish": "restart", "exclude": exclude, "reason": reason}
            sys.exit(ask_many(client, named_jobs(client, job_ids), body, as_json, wait=not no_wait))
        (job_id,) = job_ids
        if how == "cancel":
            sys.exit(_cancel(client, job_id, as_json))
        accepted, document = _ask(client, job_id, exclude, reason, how == "now", as_json)
    except ClientError as error:
        refused = error.http_status is not None and error.http_status < 500
        fail(error, as_json, EXIT_FOUND if refused else EXIT_UNKNOWN)
    if not as_json:
        _print_verdict(job_id, accepted)
    allowed = accepted.verdict == "allowed"
    if not allowed or no_wait:
        if as_json:
            print_json(document)
        sys.exit(EXIT_FINE if allowed else EXIT_FOUND)
    sys.exit(_follow(client, accepted, document, as_json))


def _ask(
    client: Client, job_id: str, exclude: list[str], reason: str, now: bool, as_json: bool
) -> tuple[Accepted, Any]:
    """Asks for the restart; of a job that hangs a person at a terminal is asked whether it may be requeued at once."""
    try:
        return client.restart(job_id, exclude, reason, now)
    except ClientError as error:
        if error.code != "hangs" or as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        sentence(f"{clean(error.what[:1].upper() + error.what[1:].removesuffix(': ask with --now'))}.")
        if not click.confirm("Requeue it now?", err=True):
            raise
    return client.restart(job_id, exclude, reason, True)


def _cancel(client: Client, job_id: str, as_json: bool) -> int:
    document = client.cancel_restart(job_id)
    if as_json:
        print_json(document)
    else:
        sentence(f"The restart of job {job_id} is cancelled; the job is left as it is.")
    return EXIT_FINE


def _print_verdict(job_id: str, accepted: Accepted) -> None:
    if accepted.verdict == "allowed":
        sentence(f"Restart of job {job_id} is under way (incident {accepted.incident_id}).")
        return
    why = "was not done, only noted" if accepted.verdict == "observed" else "was refused"
    sentence(f"Restart of job {job_id} {why} (guard: {accepted.by}): {accepted.reason}", "bold red")


def _follow(client: Client, accepted: Accepted, document: Any, as_json: bool) -> int:
    """Shows every operation as it happens, until the action has an end. Returns the exit code."""
    shown: set[tuple[str, int, str | None]] = set()
    waits, unseen = "", 0
    answered_at = clock.monotonic()
    try:
        while True:
            try:
                found, whole = client.incident(accepted.incident_id)
            except ClientError as error:
                if error.is_final or clock.monotonic() - answered_at > RECONNECT_LIMIT_S:
                    fail(error, as_json, EXIT_UNKNOWN)
            else:
                answered_at = clock.monotonic()
                action = next((a for a in found.actions if a.decision_id == accepted.decision_id), None)
                unseen = unseen + 1 if action is None else 0
                if unseen >= UNSEEN_ANSWERS:
                    fail(_not_shown(accepted), as_json, EXIT_UNKNOWN)
                if action is not None and not as_json:
                    _print_news(action, shown)
                    waits = _print_waiting(action, waits)
                if action is not None and action.end is not None:
                    if as_json:
                        actions = [a for a in whole["actions"] if a.get("decision_id") == accepted.decision_id]
                        print_json(
                            {
                                **document,
                                "operations": actions[0].get("operations", []),
                                "end": actions[0]["end"],
                            }
                        )
                    else:
                        sentence(describe_end(action), ENDS[action.end.outcome][1])
                    return EXIT_FINE if action.end.ok else EXIT_FOUND
            wait_readable((), FOLLOW_INTERVAL_S)
    except KeyboardInterrupt:
        click.echo(
            f"No longer following; the restart continues: slurm-watchdog explain {clean(accepted.incident_id)}",
            err=True,
        )
        return EXIT_UNKNOWN


def _not_shown(accepted: Accepted) -> ClientError:
    return ClientError(
        f"The restart is under way, incident {accepted.incident_id}; the controller does not show you how far it is.",
        "The owner of the job may see it, and those named in security.operators: slurm-watchdog status has its state.",
    )


def _print_news(action: ActionRun, shown: set[tuple[str, int, str | None]]) -> None:
    for operation in action.operations:
        news = (operation.operation, operation.attempt, operation.outcome)
        if news not in shown:
            shown.add(news)
            sentence(_operation_line(operation))
            sys.stdout.flush()


def _print_waiting(action: ActionRun, before: str) -> str:
    """What the restart waits for now and until when, where that is another thing than `before`. Returns it."""
    waiting = action.waiting
    if waiting is None or action.end is not None or waiting.what == before:
        return before if waiting is None else waiting.what
    until = f", until {moment(waiting.until)} at the latest" if waiting.until is not None else ""
    sentence(f"Now: {waiting.what}{until}. Ctrl-C leaves it running; --cancel ends it while the job is asked to save.")
    sys.stdout.flush()
    return waiting.what


def _operation_line(operation: Operation) -> str:
    at = operation.outcome_at if operation.outcome is not None else operation.intent_at
    when = f"{moment(at)}  " if at is not None else ""
    again = f" (attempt {operation.attempt})" if operation.attempt > 1 else ""
    return (
        f"{when}{operation.operation}{again}: "
        f"{operation.outcome or 'begun'}{f', {operation.detail}' if operation.detail else ''}"
    )
