"""`slurm-watchdog pause` and `resume`: no action anywhere, and its end."""

from __future__ import annotations

import click

from slurm_watchdog.cli.find_controller import choose
from slurm_watchdog.cli.options import operator_options, print_json, reported_errors
from slurm_watchdog.cli.terminal import sentence


@click.command()
@click.argument("reason", default="", metavar="[REASON]")
@operator_options
def pause(reason: str, socket_path: str | None, config_file: str | None, as_json: bool) -> None:
    """No action anywhere until `resume`. Watching and alerts continue; the pause outlasts restarts of the controller.

    \b
    Example:
      slurm-watchdog pause "storage maintenance until Monday"
    """
    client = choose(socket_path, config_file)
    with reported_errors(as_json):
        answer, document = client.pause(reason)
    if as_json:
        print_json(document)
        return
    why = f" ({answer.paused.reason})" if answer.paused and answer.paused.reason else ""
    sentence(f"Paused{why}: nothing is acted on until `slurm-watchdog resume`. Watching and alerts continue.")


@click.command(short_help="Ends a pause.")
@operator_options
def resume(socket_path: str | None, config_file: str | None, as_json: bool) -> None:
    """Ends a pause: the mode of each detector decides again what is acted on.

    \b
    Example:
      slurm-watchdog resume
    """
    client = choose(socket_path, config_file)
    with reported_errors(as_json):
        _, document = client.resume()
    if as_json:
        print_json(document)
        return
    sentence("Resumed: the mode of each detector decides again what is acted on.")
