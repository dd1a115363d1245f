"""`slurm-watchdog restart`: asks for a graceful restart of one job and follows it, operation by operation."""

from __future__ import annotations

import sys

import click
from msgspec import structs

from slurm_watchdog.cli.batch import Row, ask_many, follow, named_jobs
from slurm_watchdog.cli.client import Client, ClientError
from slurm_watchdog.cli.find_controller import Asked, asks_controller
from slurm_watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    EXIT_UNKNOWN,
    expand_nodes,
    job_arguments,
    no_selectors,
    print_json,
)
from slurm_watchdog.cli.terminal import clean, drawn_columns, render, sentence, show
from slurm_watchdog.model.actions import Wish
from slurm_watchdog.model.documents import Answered, Cancelled, JobRequest, RestartRequest, SaveRequest, SelectedJob


@click.command()
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
@asks_controller(refused=EXIT_FOUND)
def restart(
    asked: Asked,
    job_ids: tuple[str, ...],
    exclude: list[str],
    reason: str,
    how: str | None,
    no_wait: bool,
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
