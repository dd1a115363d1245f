"""Writes docs/cli.md, every command with its options, from the same words as `--help`: `python -m tools.docs cli`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click

from slurm_watchdog.cli.main import main as group

FILE = Path(__file__).parents[2] / "docs/cli.md"
NAME = "slurm-watchdog"
HEAD = """# Commands

Generated from the program by `make docs`; `slurm-watchdog COMMAND --help` prints the same, and so does `man slurm-watchdog` where a package was
installed (elsewhere: `slurm-watchdog --man | man -l -`).

{commands}

## What all commands share

{epilog}

**Where they ask.** They ask the controller's socket, on its node: `--socket`, `$SLURM_WATCHDOG_SOCKET`, what the configuration names, or, where no
controller answers, your own `run` or `attach`.

**For programs.** Commands that answer something take `--json`; `agent --json` prints its reports, one a line. Every object has `schema_version`.
`incidents`, `replay`, `notify test` and `status` of several own runs print a list for `--json`; with `--json-object` each command prints an object, and such a list is its `items`.

**Completion.** Shells complete commands, options, files, and the jobs, incidents and nodes that the controller knows; the packages install that,
too. Elsewhere: `eval "$(_SLURM_WATCHDOG_COMPLETE=bash_source slurm-watchdog)"` in `~/.bashrc` (`zsh_source` in `~/.zshrc`; fish:
`_SLURM_WATCHDOG_COMPLETE=fish_source slurm-watchdog > ~/.config/fish/completions/slurm-watchdog.fish`).
"""


def write() -> str:
    """The whole page."""
    context = click.Context(group, info_name=NAME)
    commands = [(name, group.commands[name]) for name in group.list_commands(context)]
    listed = ["| command | does |", "|---|---|"]
    listed += [f"| [`{NAME} {name}`](#{name}) | {command.get_short_help_str(200)} |" for name,
        command in commands]  # fmt: skip
    head = HEAD.format(
        commands="\n".join(listed),
        epilog=" ".join((group.epilog or "").split()).replace("Exit codes:", "**Exit codes:**", 1),
    )
    return "\n".join([head, *(part for name, command in commands for part in section(name, command, context))])


def section(name: str, command: click.Command, above: click.Context) -> Iterator[str]:
    """One command, and the commands below it."""
    context = click.Context(command, info_name=name, parent=above)
    usage = " ".join((NAME, name, *command.collect_usage_pieces(context)))
    parts = [f"## {name}", f"```\n{usage}\n```", *paragraphs(command.help or "")]
    if rows := list(options(command, context)):
        parts.append("\n".join(["| option | meaning |", "|---|---|", *rows]))
    yield "\n\n".join(parts) + "\n"
    if isinstance(command, click.Group):
        for below, inner in sorted(command.commands.items()):
            yield from section(f"{name} {below}", inner, above)


def paragraphs(text: str) -> Iterator[str]:
    """Of a help text; one that click prints as it is, is a block."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        mark, _, lines = paragraph.partition("\n")
        if mark == "\b":
            title, _, block = lines.partition("\n")
            yield f"{title}\n\n```\n{inspect.cleandoc(block)}\n```" if block else title
        elif paragraph:
            yield " ".join(paragraph.split())


def options(command: click.Command, context: click.Context) -> Iterator[str]:
    """A row for each option that `--help` shows, but `--help` itself."""
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None and "--help" not in parameter.opts:
            term, meaning = (cell.replace("|", "\\|") for cell in record)
            yield f"| `{term}` | {' '.join(meaning.split())} |"
