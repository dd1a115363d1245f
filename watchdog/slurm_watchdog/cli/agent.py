"""`slurm-watchdog agent`: the service on a compute node."""

from __future__ import annotations

import logging
import os
import sys

import click

from slurm_watchdog.cli.options import EXIT_USAGE, load_or_exit, service_options


@click.command(short_help="The service on a compute node.")
@service_options
@click.option(
    "--json", "as_json", is_flag=True, help="Reports as JSON on standard output, one a line; with --once one document."
)
def agent(config_file: str, once: bool, as_json: bool) -> None:
    """The service on a compute node: observes the jobs there and reports to the controller.

    At SIGHUP (systemctl reload) it reads its configuration again, and takes it whole or not at all.

    With --once it looks twice, a second apart, and prints what it sees: processes, logs, GPUs, filesystems,
    checkpoints, what the kernel said, what hangs. Nothing is sent or kept, and an agent that runs beside it
    is not disturbed. Exit code 1 if it could not see which processes there are.

    \b
    Examples:
      slurm-watchdog agent --config /etc/slurm-watchdog/config.yaml
      slurm-watchdog agent --once             as tables, for a person
      slurm-watchdog agent --once --json      the report that would be sent
    """
    config = load_or_exit(config_file)
    from slurm_watchdog.config.agent_settings import NO_CONTROLLER, become_agent, settings_of

    settings = settings_of(config)
    if not once and not settings.agent.controller_url:
        click.echo(f"{config_file}: {NO_CONTROLLER}", err=True)
        sys.exit(EXIT_USAGE)
    try:
        become_agent(settings, once=once, as_json=as_json, file=config_file)
    except OSError as error:
        from slurm_watchdog.agent.service import run_agent
        from slurm_watchdog.base import log_setup

        log_setup.set_up()
        logging.getLogger(__name__).warning(
            "%s can't be started again (%s): the agent keeps the memory that reading its configuration took",
            sys.executable,
            error,
        )
        sys.exit(run_agent(settings, once=once, as_json=as_json, file=os.path.abspath(config_file)))
