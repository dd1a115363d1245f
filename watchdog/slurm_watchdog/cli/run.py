"""`slurm-watchdog run`: one command, watched and restarted, without Slurm and without root."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from slurm_watchdog.cli.options import EXIT_USAGE, config_option, controller_packages, load_or_exit


@click.command(
    short_help="A command, watched and restarted: no Slurm, no root.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option(
    "--observe",
    is_flag=True,
    help="Report what is wrong and what would be done; restart only a command that failed.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0, 1000),
    default=3,
    show_default=True,
    metavar="N",
    help="Restarts in all, after failures and after hangs.",
)
@click.option(
    "--checkpoint-dir",
    "checkpoints",
    multiple=True,
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Where the command saves, if its own options do not say so. May be given several times.",
)
@config_option("Thresholds, detectors, Slack, as for the services; places are this run's own.")
@click.option(
    "--directory",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="For the log, the journal and the kill switch. [default: below ~/.local/state/slurm-watchdog]",
)
@click.option("--no-page", is_flag=True, help="Serve no page.")
@click.option("--quiet", is_flag=True, help="Show none of the command's lines; they are in DIR/output.log.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND…")
def run(
    observe: bool, max_restarts: int, checkpoints: tuple[str, ...], config_file: str | None, directory: str | None,
    no_page: bool, quiet: bool, command: tuple[str, ...],
) -> None:  # fmt: skip
    """Starts COMMAND (torchrun, deepspeed, python …) and watches it as a cluster's job is watched: the same
    detectors, incidents, page.

    One that hangs is ended and started again; one that fails likewise. COMMAND has to continue from its
    newest checkpoint by itself, and finds in $SLURM_WATCHDOG_KILL_SWITCH the file to look for at each step:
    if it is there, save and exit. What COMMAND prints goes to DIR/output.log, and is shown. Exit code: that
    of COMMAND's last run, 128 + N if signal N ended it.

    \b
    Examples:
      slurm-watchdog run -- torchrun --nproc-per-node 8 train.py --save-dir ckpt
      slurm-watchdog run --checkpoint-dir ckpt --max-restarts 10 -- python train.py
      slurm-watchdog run --observe -- bash train.sh
      slurm-watchdog status --socket DIR/controller.sock       from another terminal
    """
    from slurm_watchdog.base import log_setup
    from slurm_watchdog.config.schema import Config

    with controller_packages():
        from slurm_watchdog.journal.journal import JournalError
        from slurm_watchdog.standalone import run as service
    words = command[1:] if command[0] == "--" else command
    if not words or shutil.which(words[0]) is None:
        click.echo(f"There is no program {words[0] if words else ''!r} to be started.", err=True)
        sys.exit(EXIT_USAGE)
    base = load_or_exit(config_file) if config_file else Config()
    place = Path(directory) if directory else service.directory_for(Path.home(), words, os.environ)
    wanted = service.RunRequest(
        command=tuple(words),
        directory=place.absolute(),
        mode="observe" if observe else "act",
        max_restarts=max_restarts,
        checkpoint_directories=tuple(os.path.abspath(each) for each in checkpoints),
        page=not no_page,
        quiet=quiet,
    )
    log_setup.set_up("WARNING", for_person=True)
    try:
        code = service.run(base, wanted)
    except (OSError, JournalError, ValueError) as error:
        click.echo(f"The command was not started: {error}", err=True)
        sys.exit(EXIT_USAGE)
    sys.exit(code)
