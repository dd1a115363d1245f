"""`slurm-watchdog helper`: the service that does for the agent what takes rights."""

from __future__ import annotations

import click

SOCKET = "/run/slurm-watchdog-helper/socket"
AGENT = "slurm-watchdog-agent"


@click.command(short_help="Does for an agent without rights what takes some.")
@click.option(
    "--socket",
    "path",
    default=SOCKET,
    show_default=True,
    help="Where to listen, unless systemd passes a socket.",
)
@click.option(
    "--agent-user",
    "agent",
    default=AGENT,
    show_default=True,
    help="The one user who is served, by name or number.",
)
def helper(path: str, agent: str) -> None:
    """Does for an agent without rights what takes some: a service beside it, with exactly the capabilities that this needs.

    It takes a closed list of requests from one user, on a local socket: what processes of other users do, their stacks, the kernel's
    log, and, as the owner of the files and never as root, a job's logs, checkpoints and kill switch. Whatever else is asked is
    refused, counted and logged.

    \b
    Examples:
      slurm-watchdog helper                     as slurm-watchdog-helper.service starts it
      slurm-watchdog helper --socket /run/test/socket --agent-user nobody
    """
    from watchdog.agent.helper_main import become_helper

    become_helper(path, agent)
