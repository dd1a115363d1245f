"""`slurm-watchdog nodes`: which nodes have failed before, how often and why."""

from __future__ import annotations

import sys
import uuid
from typing import NoReturn

import click

from slurm_watchdog.base import clock
from slurm_watchdog.cli.client import Client
from slurm_watchdog.cli.find_controller import choose
from slurm_watchdog.cli.options import EXIT_FINE, EXIT_FOUND, operator_options, print_json, reported_errors
from slurm_watchdog.cli.terminal import count, duration, moment, sentence, table
from slurm_watchdog.model.node_documents import NodeEventRequest, NodeHistory, NodeTable, PastEvent

HEADINGS = ("NODE", "SUSPICION", "14 DAYS", "IN ALL", "LAST", "PART", "REASONS")
WANTED = [HEADINGS.index(name) for name in ("NODE", "SUSPICION", "REASONS", "14 DAYS", "LAST", "PART", "IN ALL")]
HISTORY = ("WHEN", "WEIGHT", "KIND", "PART", "JOB", "INCIDENT", "WHAT")
HISTORY_WANTED = [HISTORY.index(name) for name in ("WHEN", "WHAT", "WEIGHT", "INCIDENT", "PART", "KIND", "JOB")]


@click.command()
@click.argument("node", required=False)
@click.option(
    "--mended", metavar="WHY", help="Mark NODE as mended, and say how: earlier events no longer count. For operators."
)
@operator_options
def nodes(
    node: str | None, mended: str | None, socket_path: str | None, config_file: str | None, as_json: bool
) -> None:
    """Nodes by suspicion: what each did before, with dates, jobs and incidents. With NODE: its whole history.

    The weight of an event depends on its kind and its age (half after 28 days); a bad node fails in the same part
    again. Exit code 1 while a node (with NODE: this one) is suspect.

    \b
    Examples:
      slurm-watchdog nodes
      slurm-watchdog nodes n17
      slurm-watchdog nodes n17 --mended "GPU 3 exchanged"
    """
    if mended is not None and node is None:
        raise click.UsageError("--mended needs a NODE")
    with reported_errors(as_json):
        client = choose(socket_path, config_file)
        if node is None:
            _show_all(client, as_json)
        if mended is not None:
            client.add_node_event(node, NodeEventRequest(kind="mended", id=uuid.uuid4().hex[:12], what=mended))
        _show_one(client, node, as_json)


def _show_all(client: Client, as_json: bool) -> NoReturn:
    found, document = client.nodes()
    if as_json:
        print_json(document)
    else:
        _print_table(found)
    sys.exit(EXIT_FOUND if found.suspects else EXIT_FINE)


def _show_one(client: Client, node: str, as_json: bool) -> NoReturn:
    found, document = client.node(node)
    if as_json:
        print_json(document)
    else:
        _print_history(found)
    sys.exit(EXIT_FOUND if found.suspect else EXIT_FINE)


def _print_table(found: NodeTable) -> None:
    if not found.nodes:
        sentence("No event is known of any node.")
        return
    suspects = f"{found.suspects or 'none'} of them suspect (from {found.suspect_from:g} on)"
    sentence(f"{count(found.known, 'node')} with events, {suspects}.")
    now = clock.wall()
    rows = [
        (
            each.node, f"{each.score:.2f}", str(each.recent), str(each.events),
            "-" if each.last_at is None else f"{duration(now - each.last_at)} ago", each.place or "-", each.reasons,
        )
        for each in found.nodes
    ]  # fmt: skip
    styles = ["bold red" if each.suspect else "" for each in found.nodes]
    table(HEADINGS, rows, styles, wanted=WANTED, wraps=HEADINGS.index("REASONS"))
    if found.known > len(found.nodes):
        sentence(f"{found.known - len(found.nodes)} more are less suspicious than these.")
    sentence("More: slurm-watchdog nodes NODE")


def _print_history(found: NodeHistory) -> None:
    if not found.history:
        sentence(f"No event is known of {found.node}.")
        return
    verdict = "suspect" if found.suspect else "not suspect"
    sentence(
        f"{found.node}: suspicion {found.score:.2f}, {verdict} (from {found.suspect_from:g} on); "
        f"{count(found.recent, 'event')} that count{'s' if found.recent == 1 else ''} within 14 days."
    )
    styles = ["dim" if each.why_not else "" for each in found.history]
    rows = [_row(each, found.node) for each in found.history]
    table(HISTORY, rows, styles, wanted=HISTORY_WANTED, wraps=HISTORY.index("WHAT"))


def _row(each: PastEvent, node: str) -> tuple[str, ...]:
    elsewhere = f" [in {each.node}]" if each.node != node else ""
    moved = f" [counts for {each.counts_for}]" if each.counts_for != node else ""
    what = each.what + elsewhere + moved + (f" (does not count: {each.why_not})" if each.why_not else "")
    weight = "-" if each.why_not or each.counts_for != node else f"{each.weight:.2f}"
    return moment(each.at), weight, each.kind, each.place or "-", each.job_id or "-", each.incident_id or "-", what
