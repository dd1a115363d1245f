"""`slurm-watchdog restart`: asks for a graceful restart of one job and follows it, rung by rung."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

import click

from watchdog import clock
from watchdog.cli.answers import Accepted, ActionRun, Rung
from watchdog.cli.client import Client, ClientError
from watchdog.cli.explain import describe_end
from watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    EXIT_UNKNOWN,
    fail,
    open_client,
    operator_options,
    print_json,
)
from watchdog.cli.text import clean, moment, sentence
from watchdog.runner import wait_readable

FOLLOW_INTERVAL_S: Final = 1.0
PATIENCE_S: Final = 120.0
"""A controller that is being restarted itself is waited for this long; it goes on where it stopped."""
JOB_ID = re.compile(r"\d+(_\d+)?", re.ASCII)
NODE_SET = re.compile(r"[\w.\-\[\],]+", re.ASCII)


def _check_job_id(context: click.Context, parameter: click.Parameter, value: str) -> str:
    if not JOB_ID.fullmatch(value):
        raise click.BadParameter(
            f"{value!r} is no job id; 4711 and 4711_3 (an array element) are. See: squeue"
        )
    return value


def _expand_nodes(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> list[str]:
    from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

    nodes: list[str] = []
    for each in value:
        if not NODE_SET.fullmatch(each):
            raise click.BadParameter(f"{each!r} names no nodes; n7 and n[1-3,7] do")
        try:
            nodes.extend(str(node) for node in NodeSet(each, resolver=RESOLVER_NOGROUP))
        except NodeSetException as error:
            raise click.BadParameter(f"{each!r} names no nodes: {error}") from error
    return list(dict.fromkeys(nodes))


@click.command(short_help="Moves a job gracefully, off a node if you say so.")
@click.argument("job_id", metavar="JOB", callback=_check_job_id)
@click.option(
    "--exclude",
    multiple=True,
    metavar="NODE",
    callback=_expand_nodes,
    help="Restart without this node; repeatable.",
)
@click.option("--reason", default="", metavar="TEXT", help="Kept in the journal and shown by `explain`.")
@click.option("--no-wait", is_flag=True, help="Ask and leave; otherwise it is followed to its end.")
@operator_options
def restart(
    job_id: str,
    exclude: list[str],
    reason: str,
    no_wait: bool,
    socket_path: str | None,
    config_file: str | None,
    as_json: bool,
) -> None:
    """Moves a job gracefully: kill switch, complete checkpoint, requeue without the excluded nodes, first new step.

    The guards that protect the job hold here, too (paused, Slurm not answering, storage away, job not requeueable);
    cooldown, budget and mode don't. Exit code 0 when the job trains again (with --no-wait: when it was allowed),
    1 when it was refused or failed.

    \b
    Examples:
      slurm-watchdog restart 4711 --exclude n7 --reason "slow GPU"
      slurm-watchdog restart 4711 --exclude 'n[7-8]' --no-wait --json
    """
    client = open_client(socket_path, config_file)
    try:
        accepted, document = client.restart(job_id, exclude, reason)
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


def _print_verdict(job_id: str, accepted: Accepted) -> None:
    if accepted.verdict == "allowed":
        sentence(f"Restart of job {job_id} is under way (incident {accepted.incident_id}).")
        return
    why = "was not done, only noted" if accepted.verdict == "observed" else "was refused"
    sentence(f"Restart of job {job_id} {why} (guard: {accepted.by}): {accepted.reason}", "bold red")


def _follow(client: Client, accepted: Accepted, document: Any, as_json: bool) -> int:
    """Shows every rung as it happens, until the action has an end. Returns the exit code."""
    shown: set[tuple[str, int, str | None]] = set()
    answered_at = clock.monotonic()
    try:
        while True:
            try:
                found, whole = client.incident(accepted.incident_id)
            except ClientError as error:
                if clock.monotonic() - answered_at > PATIENCE_S or error.http_status == 404:
                    fail(error, as_json, EXIT_UNKNOWN)
            else:
                answered_at = clock.monotonic()
                action = next((a for a in found.actions if a.decision_id == accepted.decision_id), None)
                if action is not None and not as_json:
                    _print_news(action, shown)
                if action is not None and action.end is not None:
                    if as_json:
                        actions = [
                            a for a in whole["actions"] if a.get("decision_id") == accepted.decision_id
                        ]
                        print_json(
                            {**document, "rungs": actions[0].get("rungs", []), "end": actions[0]["end"]}
                        )
                    else:
                        sentence(describe_end(action), "green" if action.end.ok else "bold red")
                    return EXIT_FINE if action.end.ok else EXIT_FOUND
            wait_readable((), FOLLOW_INTERVAL_S)
    except KeyboardInterrupt:
        click.echo(
            f"No longer following; the restart goes on: slurm-watchdog explain {clean(accepted.incident_id)}",
            err=True,
        )
        return EXIT_UNKNOWN


def _print_news(action: ActionRun, shown: set[tuple[str, int, str | None]]) -> None:
    for rung in action.rungs:
        news = (rung.rung, rung.attempt, rung.outcome)
        if news not in shown:
            shown.add(news)
            sentence(_rung_line(rung))
            sys.stdout.flush()


def _rung_line(rung: Rung) -> str:
    at = rung.outcome_at if rung.outcome is not None else rung.intent_at
    when = f"{moment(at)}  " if at is not None else ""
    again = f" (attempt {rung.attempt})" if rung.attempt > 1 else ""
    return f"{when}{rung.rung}{again}: {rung.outcome or 'begun'}{f', {rung.detail}' if rung.detail else ''}"
