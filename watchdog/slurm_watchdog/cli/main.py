"""`slurm-watchdog`: the list of commands. Each one is a module of its own beside this one."""

from __future__ import annotations

import errno
import importlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import takewhile
from typing import Any, Final

import click

from slurm_watchdog import __version__
from slurm_watchdog.cli import options
from slurm_watchdog.cli.options import DEFAULT_CONFIG, EXIT_UNKNOWN, EXIT_USAGE, JOB_ID, ON_TOP, TYPED, Refusal

OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a full or broken disk answers to what is written into a file that is open already."""


REMOVED: Final[Mapping[str, str]] = {
    "ack": "use: slurm-watchdog silence --kind KIND --job JOB",
    "ca": "use certificates of your site's own authority, or the openssl lines of docs/authentication.md",
    "demo": "use, in a clone of the repository: make demo",
    "drain": "use: scontrol update NodeName=NODE State=DRAIN Reason=TEXT",
    "undrain": "use: scontrol update NodeName=NODE State=RESUME",
}
"""Commands that releases before this one had, with what to use instead, a clause. A row stays for one release; so does
one of an option, whose help begins with `ignored:` or `removed:`."""
COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "run": ("run", "Run a command under the watchdog, or watch a job of yours."),
    "status": ("status", "What is watched and whether all is well."),
    "incidents": ("ask.incidents", "What happened: pending, firing and resolved incidents."),
    "show": ("show", "One incident, job or node: who, why, what was done, what to do."),
    "diagnose": ("diagnose", "Find the rank that blocks a job, or the cause in logs and dumps."),
    "restart": ("restart", "Restart jobs gracefully, without some nodes, or have them save."),
    "pause": ("ask.pause", "Pause all automatic actions."),
    "resume": ("ask.resume", "Resume automatic actions."),
    "silence": ("ask.silence", "Stop messages about a kind, job or node for a while."),
    "nodes": ("ask.nodes", "List suspect nodes and why."),
    "test-nodes": ("test_nodes", "Measure nodes and the links between them; name the slow one."),
    "report": ("ask.report", "Hours kept and lost: restarts, hangs, steps done again."),
    "doctor": ("doctor", "Check a cluster, node, job, script or configuration."),
    "agent": ("services.agent", "The service on a compute node."),
    "controller": ("services.controller", "The service on the management node."),
    "replay": ("replay", "Replay a recording offline: what would have been done."),
    "courier": ("services.courier", "Is the agent's network."),
    "scan-log": ("scan_log", "Find the root cause in job logs."),
    "group-stacks": ("group_stacks", "Group the stacks of all ranks: which one differs."),
}
"""A command: its module beside this one, with its name there where that is another one, and what it does, for the list
of all, which imports none of them."""
SERVICES = ("agent", "controller", "replay")
"""Those for services and development: the list has them under a heading of their own."""
HIDDEN = ("scan-log", "group-stacks", "courier")  # Commands that the list leaves out: what programs type.
RENAMED: Final[Mapping[str, tuple[str, ...]]] = {
    "explain": ("show", "--all"),
    "story": ("show", "--all"),
    "attach": ("run", "--job"),
    "check-config": ("doctor", "--config"),
    "notify": ("doctor", "--notify"),
    "save-all": ("restart", "--save-only"),
}
"""What releases before this one called it. A row stays for one release."""


class Commands(Mapping[str, click.Command]):
    """The commands that are installed: the package for nodes lacks most. Each is imported once it is asked for."""

    def __init__(self) -> None:
        here = {name.partition(".")[0] for name in os.listdir(os.path.dirname(__file__))}
        self._names = [name for name, (place, _) in COMMANDS.items() if place.partition(".")[0] in here]

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._names:
            raise KeyError(name)
        import slurm_watchdog.base.slim_imports  # noqa: F401 - a fortieth of a command's start

        place, does = COMMANDS[name]
        module, _, attribute = place.partition(".")
        found: click.Command = getattr(importlib.import_module(f"slurm_watchdog.cli.{module}"), attribute or module)
        found.short_help, found.hidden = does, name in HIDDEN
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def renamed(old: str, *words: str) -> list[str]:
    """A command line of the release before with today's names. The argument of `attach JOB` and `check-config [F]` is
    an option's value; `notify` had one command, `test`."""
    new, given = RENAMED[old], list(words)
    if old == "notify" and given[:1] == ["test"]:
        given.pop(0)
    if old in ("attach", "check-config"):
        values = [word for word in given if (JOB_ID.fullmatch(word) if old == "attach" else word[:1] != "-")]
        values = values or ([DEFAULT_CONFIG] if old == "check-config" else [])
        if not values:
            return [new[0], *given]
        given = [values[0], *(word for word in given if word != values[0])]
    return [*new, *given]


class Program(click.Group):
    """The commands, and what holds for the output of each."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's; keeps what was typed, for `invoke`. `help COMMAND` is `COMMAND --help`."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        if args and args[0] in RENAMED:
            args = renamed(*args)
        ctx.meta[TYPED] = tuple(args)
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click's, from the table of commands, under two headings."""
        listed = [name for name in self.commands if name not in HIDDEN]
        for heading, is_service in (("Commands", False), ("Services and development", True)):
            rows = [(name, COMMANDS[name][1]) for name in listed if (name in SERVICES) == is_service]
            with formatter.section(heading):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's. Raises UsageError that names the alternative for a command that was removed."""
        if args[0] in REMOVED:
            ctx.fail(f"slurm-watchdog {args[0]} was removed; {REMOVED[args[0]]}")
        if args[0] in COMMANDS and args[0] not in list(self.commands):
            raise Refusal([f"slurm-watchdog {args[0]} is not in the package for nodes."], ON_TOP)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """As click's. Where JSON was asked for, wrong usage is a document, too, as every other failure is."""
        typed = takewhile(lambda word: word != "--", ctx.meta[TYPED])
        as_json = not {"--json", "--json-object"}.isdisjoint(typed)
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            at = getattr(error, "ctx", None) or ctx
            has_json = isinstance(at.command, click.Group) or any(each.name == "json" for each in at.command.params)
            if as_json and has_json:
                todo = error.todo if isinstance(error, Refusal) else f"See: {at.command_path} --help"
                options.print_json({"error": error.format_message(), "next": todo})
            raise
        except ModuleNotFoundError as error:
            click.echo(options.needs_package(error), err=True)
            sys.exit(EXIT_USAGE)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """As click's. A character that the terminal's encoding lacks is printed as `?`; output that cannot be written
        ends with a sentence and code 3."""
        _open_streams()
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.errno not in OUTPUT_ERRORS or error.filename is not None:
                raise
            click.echo(f"The output cannot be written: {error.strerror}.", err=True)
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed
            sys.exit(EXIT_UNKNOWN)


def _print_version(context: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if asked:
        from slurm_watchdog.base.commit import read_commit

        commit = read_commit()
        click.echo(f"slurm-watchdog {__version__}" + (f" (commit {commit})" if commit else ""))
        context.exit()


def _open_streams() -> None:
    """Standard streams that print every character; one that was closed (`>&-`) is /dev/null, and not None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@click.group(
    cls=Program,
    commands=Commands(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 fine, 1 something found, 2 wrong usage or configuration, 3 unknown (the controller gave no "
    "answer). `status` and `doctor` are monitoring plugins: 0 OK, 1 warning, 2 critical, 3 unknown.",
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Version and commit."
)
def main() -> None:
    """Watches training jobs on Slurm: says which rank on which node stopped and why, and can restart the job.

    \b
    Examples:
      slurm-watchdog status
      slurm-watchdog show 7f3a             one incident, job or node
      slurm-watchdog diagnose 4711         who keeps the others waiting, now
      slurm-watchdog diagnose stacks/      the same, from files: stacks, logs, dumps, kernel logs
      slurm-watchdog doctor train.sbatch   what a job script lacks to be protected
      slurm-watchdog test-nodes n[1-8]     measure nodes and the links between them, name the slow one
      slurm-watchdog pause "moving the storage"
      slurm-watchdog agent --once          what the agent sees on this node
    """


if __name__ == "__main__":
    main()
