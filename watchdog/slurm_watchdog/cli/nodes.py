"""`slurm-watchdog nodes`: which nodes have failed before, how often and why."""

from __future__ import annotations

import sys
import uuid

import click

from slurm_watchdog.base import clock
from slurm_watchdog.cli.find_controller import Asked, asks_controller
from slurm_watchdog.cli.options import EXIT_FINE, EXIT_FOUND
from slurm_watchdog.cli.show import print_node
from slurm_watchdog.cli.terminal import show
from slurm_watchdog.model.node_documents import NodeEventRequest, NodeHistory, NodeTable


@click.command()
@click.argument("node", required=False)
@click.option(
    "--mended", metavar="WHY", help="Mark NODE as mended, and say how: earlier events no longer count. For operators."
)
@asks_controller()
def nodes(asked: Asked, node: str | None, mended: str | None) -> None:
    """List suspect nodes and why. With NODE: its whole history.

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
    client = asked.client()
    if node is not None and mended is not None:
        event = NodeEventRequest(kind="mended", id=uuid.uuid4().hex[:12], what=mended)
        client.post(dict, "/v1/nodes/{}/events", node, body=event)
    if node is not None:
        print_node(asked, client.get(NodeHistory, "/v1/nodes/{}", node))
    found = client.get(NodeTable, "/v1/nodes")
    asked.answer(found, lambda: show("nodes", found=found, now=clock.wall()))
    sys.exit(EXIT_FOUND if found.suspects else EXIT_FINE)
