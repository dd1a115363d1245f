"""`slurm-watchdog drain` and `undrain`: takes nodes out of service, and gives those back that it has drained."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

from slurm_watchdog.cli.client import ClientError
from slurm_watchdog.cli.find_controller import choose
from slurm_watchdog.cli.node_types import NodeDrain
from slurm_watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    EXIT_UNKNOWN,
    expand_nodes,
    operator_options,
    print_json,
)
from slurm_watchdog.cli.terminal import clean, sentence

Ask = Callable[[str], tuple[NodeDrain, Any]]

nodes_argument = click.argument("nodes", metavar="NODE...", nargs=-1, required=True, callback=expand_nodes)


@click.command(short_help="Has nodes drained, with a reason that says who asked.")
@nodes_argument
@click.option("--reason", required=True, metavar="TEXT", help="Why; Slurm shows it (sinfo -R), behind your name.")
@click.option("--force", is_flag=True, help="Beyond the drain budget, and also the last node of a partition: for "
              "the people of security.may.force_drain.")  # fmt: skip
@operator_options
def drain(
    nodes: list[str], reason: str, force: bool, socket_path: str | None, config_file: str | None, as_json: bool
) -> None:
    """Has nodes drained: no new job starts there, and those that run continue. For the people of security.may.drain,
    who need not be administrators of Slurm.

    No more nodes than policy.max_drained_nodes and policy.drained_percent are out of service, and never the last one
    of a partition that starts jobs, unless --force is given. A node that is drained already keeps its reason. It is
    done in every mode, and not while actions are paused. The node stays drained until `undrain`; its history
    (`nodes NODE`) has who asked.

    Several nodes are asked for one after another, and one that is refused keeps no other from being drained. Exit code
    0 when all are drained, 1 when one was refused, 3 when the outcome of one is not known.

    \b
    Examples:
      slurm-watchdog drain n7 --reason "fan is loud"
      slurm-watchdog drain 'n[1-3]' --reason "new switch" --force
    """
    client = choose(socket_path, config_file)
    _ask_for_each(
        nodes, lambda node: client.drain_node(node, reason, force=force), "{0.node} is drained: {0.reason}", as_json
    )


@click.command(short_help="Gives nodes back that slurm-watchdog has drained.")
@nodes_argument
@operator_options
def undrain(nodes: list[str], socket_path: str | None, config_file: str | None, as_json: bool) -> None:
    """Gives nodes back that slurm-watchdog has drained, with `drain` or by its policy. A node that a person or Slurm
    has drained, or whose reason was changed since, stays as it is, and the answer says whose drain it is. Only the
    drain goes: a node that is down stays down.

    Exit code 0 when all are given back, 1 when one was refused, 3 when the outcome of one is not known.

    \b
    Examples:
      slurm-watchdog undrain n7
      slurm-watchdog undrain 'n[1-3]' --json
    """
    client = choose(socket_path, config_file)
    _ask_for_each(nodes, client.undrain_node, "{0.node} is given back (it was drained: {0.reason})", as_json)


def _ask_for_each(nodes: Sequence[str], ask: Ask, words: str, as_json: bool) -> NoReturn:
    """Asks for one node after another, prints what became of each, and ends the process. Where the controller gives no
    answer at all the others are not asked for."""
    answers: list[Any] = []
    code = EXIT_FINE
    for node in nodes:
        try:
            found, document = ask(node)
        except ClientError as error:
            refused = error.http_status is not None and error.http_status < 500
            code = max(code, EXIT_FOUND if refused else EXIT_UNKNOWN)
            answers.append({"node": node, "error": error.what, "next": error.todo})
            if not as_json:
                click.echo(clean(" ".join(filter(None, (f"{node}:", error.what, error.todo)))), err=True)
            if error.http_status is None:
                break
        else:
            answers.append(document)
            if not as_json:
                sentence(clean(words.format(found)))
    if as_json:
        print_json({"nodes": answers})
    sys.exit(code)
