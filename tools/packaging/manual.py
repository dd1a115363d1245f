"""The manual page, from the same words as `--help`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import click

NAME = "slurm-watchdog"
SEE_ALSO = "squeue(1), scontrol(1), sbatch(1), py-spy(1)"
FILES = (
    ("/etc/slurm-watchdog/config.yaml", "The configuration, the same on all nodes; see doctor --config."),
    ("/run/slurm-watchdog/controller.sock", "Where the controller answers the commands."),
    ("/var/lib/slurm-watchdog/", "Its journal: incidents, evidence, decisions, actions."),
    (
        "/opt/slurm-watchdog/share/docs/",
        "Pages on installing, acting, detectors, options, metrics, security.",
    ),
)
VARIABLES = (
    ("SLURM_WATCHDOG_SOCKET", "The socket to ask, if --socket is not given."),
    ("NO_COLOR", "If it is set, nothing is coloured."),
)


def page(group: click.Group, context: click.Context) -> str:
    """The whole page in roff's man macros, ASCII only: what `man -l` and `groff -man` read."""
    lines = [f'.TH {roff(NAME.upper())} 1 "" {roff(NAME)} "User Commands"', ".SH NAME"]
    summary, _, description = inspect.cleandoc(group.help or "").partition("\n\n")
    lines += [f"{roff(NAME)} \\- {roff(summary.rstrip('.'))}", ".SH SYNOPSIS"]
    lines += [f".B {roff(NAME)}", "[OPTIONS] COMMAND [ARGUMENTS]"]
    lines += [
        ".SH DESCRIPTION",
        *_text(description),
        ".SH OPTIONS",
        *_options(group, context),
        ".SH COMMANDS",
    ]
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is not None and not command.hidden:
            lines += _command(name, command, context)
    lines += [".SH EXIT STATUS", *_text(group.epilog or "")]
    lines += [".SH ENVIRONMENT", *_list(VARIABLES), ".SH FILES", *_list(FILES)]
    lines += [".SH SEE ALSO", roff(SEE_ALSO)]
    return "\n".join(lines) + "\n"


def roff(text: str) -> str:
    """One line of text as roff reads it: no escapes, no requests, no character beyond ASCII."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    text = "".join(each if each.isascii() else f"\\[u{ord(each):04X}]" for each in text)
    return f"\\&{text}" if text.startswith((".", "\\(aq")) else text


def _command(name: str, command: click.Command, above: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=above)
    usage = " ".join((name, *command.collect_usage_pieces(context)))
    yield f'.SS "{roff(usage)}"'
    yield from _text(inspect.cleandoc(command.help or ""))
    yield from _options(command, context)
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            if found is not None and not found.hidden:
                yield from _command(f"{name} {below}", found, above)


def _options(command: click.Command, context: click.Context) -> Iterator[str]:
    options = [each for each in command.get_params(context) if isinstance(each, click.Option)]
    records = [each.get_help_record(context) for each in options]
    yield from _list([record for record in records if record is not None])


def _list(
    pairs: Iterator[tuple[str, str]] | list[tuple[str, str]] | tuple[tuple[str, str], ...],
) -> Iterator[str]:
    for term, words in pairs:
        yield from (".TP", f".B {roff(term)}", roff(" ".join(words.split())) or "\\&")


def _text(text: str) -> Iterator[str]:
    """Paragraphs; one that begins with click's sign for "as it is" keeps its lines."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        lines = paragraph.splitlines()
        if lines and lines[0].strip() == "\b":
            yield from (".PP", ".nf", *(roff(line) or "\\&" for line in lines[1:]), ".fi")
        else:
            yield from (".PP", *(roff(line.strip()) for line in lines))
