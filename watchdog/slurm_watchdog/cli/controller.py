"""`slurm-watchdog controller`: the service on the management node."""

from __future__ import annotations

import sys

import click

from slurm_watchdog.cli.options import controller_packages, load_or_exit, service_options


@click.command(short_help="The service on the management node.")
@service_options
@click.option(
    "--record",
    metavar="FILE",
    type=click.Path(),
    help="Append every report and listing to FILE, for `slurm-watchdog replay`; it holds names, paths and "
    "log lines of users.",
)
def controller(config_file: str, once: bool, record: str | None) -> None:
    """The service on the management node: judges what agents report, decides, and acts where the mode allows it.

    At SIGHUP (systemctl reload) it reads its configuration again, and takes it whole or not at all.

    \b
    Examples:
      slurm-watchdog controller --config /etc/slurm-watchdog/config.yaml
      slurm-watchdog controller --once        one look at the cluster
      slurm-watchdog controller --record /var/tmp/today.jsonl
    """
    config = load_or_exit(config_file)
    from slurm_watchdog.base import log_setup

    with controller_packages("The controller"):
        from slurm_watchdog.controller.app import run_controller
        from slurm_watchdog.controller.reload import RESTART, restart_process
    log_setup.set_up()
    code = run_controller(config, once=once, record=record, config_file=config_file)
    if code == RESTART:
        restart_process()
    sys.exit(code)
