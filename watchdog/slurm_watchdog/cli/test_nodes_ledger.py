"""What `test-nodes` found, told to the controller, where one runs: it keeps it as events of the nodes."""

from __future__ import annotations

import contextlib
import os
import secrets

import click

from slurm_watchdog.cli.client import Client, ClientError
from slurm_watchdog.cli.node_types import NodeEventRequest
from slurm_watchdog.cli.options import find_socket
from slurm_watchdog.cli.terminal import clean
from slurm_watchdog.cli.test_nodes_text import summary
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.nodetest.comparison import comparison_of
from slurm_watchdog.nodetest.conduct import Report
from slurm_watchdog.nodetest.judge import Verdict
from slurm_watchdog.nodetest.select import Chosen

DEADLINE_S = 10.0
MOST_PASSED = 200
"""Healthy nodes that are reported to the controller: it takes 2,000 events a day."""


def events_of(verdict: Verdict, run: str) -> list[NodeEventRequest]:
    """A failed test for each part that is bad, all that is wrong with it in one sentence; a passed one of a node that
    is well; nothing of one that was not judged."""
    if verdict.truth is Truth.OK:
        return [NodeEventRequest(kind="test_passed", id=run, what=f"test-nodes: well, beside {verdict.peers} peers")]
    found: dict[str, list[str]] = {}
    for fault in verdict.faults:
        found.setdefault(fault.place, []).append(fault.what)
    return [
        NodeEventRequest(kind="test_failed", id=run, place=place, what="; ".join(what)) for place, what in found.items()
    ]


def tell_controller(report: Report, config_file: str | None) -> int:
    """How many events it has taken. What it refuses is said on standard error; that none runs is not."""
    path = find_socket(None, config_file)
    if not os.path.exists(path):
        return 0
    client, run, taken = Client(path, DEADLINE_S), f"test-nodes-{secrets.token_hex(8)}", 0
    bad = [each for each in report.verdicts if each.truth is Truth.BAD]
    well = [each for each in report.verdicts if each.truth is Truth.OK]
    try:
        for verdict in (*bad, *well[:MOST_PASSED]):
            for event in events_of(verdict, run):
                client.add_node_event(verdict.node, event)
                taken += 1
    except ClientError as error:
        click.echo(f"The controller does not remember all of it: {clean(error.what)}", err=True)
    _show(client, report)
    return taken


def _show(client: Client, report: Report) -> None:
    """For the page; it takes none from people who are no operators, nor does an older controller. That is no error."""
    comparison = comparison_of(report, summary(report, Chosen()))
    with contextlib.suppress(ClientError):
        client.show_comparison(comparison)
