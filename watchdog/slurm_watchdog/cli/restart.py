"""`slurm-watchdog restart`: asks for a graceful restart of one job and follows it, operation by operation."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from slurm_watchdog.cli.batch import Row, ask_many, follow, named_jobs
from slurm_watchdog.cli.client import Client, ClientError
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
from slurm_watchdog.cli.terminal import clean, drawn_columns, render, sentence, show
from slurm_watchdog.model.documents import Accepted, SelectedJob


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
        show("restart", job_id=job_id, accepted=accepted)
    allowed = accepted.verdict == "allowed"
    if not allowed or no_wait:
        if as_json:
            print_json(document)
        sys.exit(EXIT_FINE if allowed else EXIT_FOUND)
    row = Row(SelectedJob(job_id=job_id), incident_id=accepted.incident_id)
    follow(
        client, [row], as_json, lambda: render("following", drawn_columns(), action=row.action) if row.action else []
    )
    action = row.action
    if action is None or action.end is None:
        if not row.is_followed:
            fail(_not_shown(accepted), as_json, EXIT_UNKNOWN)
        sys.exit(EXIT_UNKNOWN)
    if as_json:
        done = {"operations": action.operations, "end": action.end}
        print_json(document | msgspec.to_builtins(done))
    sys.exit(EXIT_FINE if action.end.ok else EXIT_FOUND)


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


def _not_shown(accepted: Accepted) -> ClientError:
    return ClientError(
        f"The restart is under way, incident {accepted.incident_id}; the controller does not show you how far it is.",
        "The owner of the job may see it, and those named in security.operators: slurm-watchdog status has its state.",
    )
