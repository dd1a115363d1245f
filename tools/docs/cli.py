"""Writes docs/cli.md, a table of all commands, from the same words as `--help`: `python -m tools.docs cli`."""

from __future__ import annotations

from pathlib import Path

import click

from slurm_watchdog.cli.main import main as group

FILE = Path(__file__).parents[2] / "docs/cli.md"
HEAD = """# Commands

Generated from the program by `make docs`. `slurm-watchdog COMMAND --help` (or `man slurm-watchdog` of a package) has all options, with examples.

| command | does |
|---|---|
{commands}

{epilog}

**Where they ask.** `--socket`, else `$SLURM_WATCHDOG_SOCKET` (`munge://HOST:PORT` from a login node), else the configuration's socket; where no
controller answers, your own `run`. **For programs.** [`--json`](operating.md#for-programs); every object has `schema_version`. **Completion.** The
packages install it; elsewhere: `eval "$(_SLURM_WATCHDOG_COMPLETE=bash_source slurm-watchdog)"` in `~/.bashrc` (`zsh_source`, `fish_source`).
"""


def write() -> str:
    """The whole page."""
    commands = ((name, group.commands[name]) for name in group.list_commands(click.Context(group)))
    rows = (
        f"| `{name}` | {command.get_short_help_str(200).replace('|', chr(92) + '|')} |" for name, command in commands
    )
    epilog = " ".join((group.epilog or "").split()).replace("Exit codes:", "**Exit codes:**", 1)
    return HEAD.format(commands="\n".join(rows), epilog=epilog)
