"""`slurm-watchdog demo`: the story of a frozen filesystem, a hang and a move, on a real Slurm on this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

import slurm_watchdog
from slurm_watchdog.cli.options import EXIT_USAGE


@click.command(short_help="A real Slurm on this machine, a job that hangs, and what is done about it.")
@click.option(
    "--keep",
    is_flag=True,
    help="Leave everything up after the story until Ctrl-C: status, metrics, the page.",
)
def demo(keep: bool) -> None:
    """Starts a Slurm of four nodes on this machine, freezes a filesystem, lets a rank hang, moves a job;
    about a minute.

    It needs root (namespaces), Debian's packages of Slurm, and the source tree of this program: the cluster
    is not part of what is installed. Everything is taken down again.

    \b
    Examples:
      slurm-watchdog demo
      slurm-watchdog demo --keep
    """
    tree = Path(slurm_watchdog.__file__).resolve().parents[2]
    if not (tree / "deploy" / "demo" / "__main__.py").exists():
        click.echo("The demo is in the source tree, not in the installed package.", err=True)
        click.echo("Clone the repository, then in it: make demo   (KEEP=1 leaves it running)", err=True)
        sys.exit(EXIT_USAGE)
    environment = {**os.environ, **({"KEEP": "1"} if keep else {})}
    os.chdir(tree)
    os.execve(sys.executable, [sys.executable, "-m", "deploy.demo"], environment)  # noqa: S606  a list
