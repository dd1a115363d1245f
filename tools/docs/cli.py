"""Writes docs/cli.md, a table of all commands, from the same words as `--help`: `python -m tools.docs cli`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import click

from slurm_watchdog.cli.main import main as group

FILE = Path(__file__).parents[2] / "docs/cli.md"
NAME = "slurm-watchdog"
HEAD = """# Commands

Generated from the program by `make docs`. All options of a command: `slurm-watchdog COMMAND --help`, or `man slurm-watchdog` where a package was
installed.

| command | does | example |
|---|---|---|
{commands}

## What all commands share

{epilog}

**Where they ask.** The controller's socket on its node, or `--socket`, `$SLURM_WATCHDOG_SOCKET` (also `munge://HOST:PORT` from a login node, where
`controller.user_listen` is set), what the configuration names, or, where no controller answers, your own `run` or `attach`.

**For programs.** Commands that answer something take `--json`, and `--json-object` in place of it for an object with `items` where `--json` prints a
list. Every object has `schema_version`. [More](operating.md#for-programs).

**Completion.** The packages install it. Elsewhere: `eval "$(_SLURM_WATCHDOG_COMPLETE=bash_source slurm-watchdog)"` in `~/.bashrc` (`zsh_source`,
`fish_source` for other shells).
"""


def write() -> str:
    """The whole page."""
    context = click.Context(group, info_name=NAME)
    commands = [(name, group.commands[name]) for name in group.list_commands(context)]
    epilog = " ".join((group.epilog or "").split()).replace("Exit codes:", "**Exit codes:**", 1)
    return HEAD.format(commands="\n".join(row(name, command) for name, command in commands), epilog=epilog)


def row(name: str, command: click.Command) -> str:
    """A command: its name, its sentence, the first example of its help."""
    found = example(name, command)
    cells = (f"`{name}`", command.get_short_help_str(200), f"`{found}`" if found else "")
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def example(name: str, command: click.Command) -> str:
    """The first example in the help of a command that is about it, without `slurm-watchdog` and what is said beside it."""
    found = re.search(rf"^ *{NAME} ({name}\b.*)$", inspect.cleandoc(command.help or ""), re.MULTILINE)
    return re.split(r"\s{3,}", found[1])[0] if found else ""
