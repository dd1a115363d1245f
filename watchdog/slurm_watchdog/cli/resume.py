"""`slurm-watchdog resume`: ends a pause."""

from __future__ import annotations

import click

from slurm_watchdog.cli.find_controller import choose
from slurm_watchdog.cli.options import operator_options, print_json, reported_errors
from slurm_watchdog.cli.terminal import sentence


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
