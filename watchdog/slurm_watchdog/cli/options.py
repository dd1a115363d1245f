"""How a command declares its options, a row each, what it answers with, and how it fails: a sentence, what to do next,
a code."""

from __future__ import annotations

import json
import math
import os
import pwd
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import click

from slurm_watchdog.base.commit import JSON_SCHEMA_VERSION
from slurm_watchdog.cli.terminal import NO_HEADER, clean, sentence

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config

EXIT_FINE = 0
EXIT_FOUND = 1
EXIT_USAGE = 2
EXIT_UNKNOWN = 3
TYPED = "slurm_watchdog.typed"  # In the meta of click's context: the words of the command line.
DEFAULT_CONFIG = "/etc/slurm-watchdog/config.yaml"
DEFAULT_SOCKET = "/run/slurm-watchdog/controller.sock"
JOB_ID = re.compile(r"\d+(_\d+)?", re.ASCII)
NODE_SET = re.compile(r"[\w.\-\[\],]+", re.ASCII)
INSTALL = "Install it with: pip install 'slurm-training-watchdog[controller]'"
ON_TOP = "Type it on the management or a login node, or install the package slurm-watchdog-controller here, too."

JSON = "--json, --json-object  For programs: one JSON document; with --json-object an object also where that is a list."
ROWS_ONLY = "--noheader  Only the rows of tables, for scripts."
KNOWLEDGE = (
    "--knowledge DIR  Directory of *.conf files with your own rows, as knowledge.directory in the configuration."
)
JOURNAL = """--journal PATH  Ask the journal of a `run` that has ended, in this directory.
 [default: your newest one, where no controller answers and none is configured]"""
ASKS = f"""--socket PATH  Socket of the controller, or munge://HOST:PORT of one on another machine; of two, with a comma
 between them. [default: what the configuration says, else {DEFAULT_SOCKET}] [$SLURM_WATCHDOG_SOCKET]
--config F  Configuration file that names the socket. [default: {DEFAULT_CONFIG}, where it can be read]
{JSON}"""
SERVICE = f"--config F={DEFAULT_CONFIG}  Configuration file.\n--once  Look once, print what was seen, and exit."
ROW = re.compile(
    r"(?P<names>-[^\s,]+(?:, -[^\s,]+)*|\w+)"
    r"(?: (?P<metavar>[^\s<=…]+)(?:<(?P<low>[\d.]+?)\.\.(?P<high>[\d.]*)>)?(?:=(?P<default>\S+?))?(?P<many>…)?)?"
    r"(?:  (?P<help>.*))?"
)
"""An option or, without a dash, an argument: its names, what its value is called, the range of a number, its default,
`…` where it can be given again, its help, after two spaces, in which `[$NAME]` is a variable of the environment. One of
the release before is `ignored: ` with a warning, or `removed: `, with what to use instead, and in no list."""


class Value(click.ParamType[Any]):
    """What `parse` makes of a word. It raises ValueError with a sentence for what is none."""

    def __init__(self, name: str, parse: Callable[[str], Any]):
        self.name, self.parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.parse(value) if isinstance(value, str) else value
        except (ValueError, OverflowError) as error:
            self.fail(str(error), param, ctx)


class FiniteRange(click.FloatRange):
    """A number in a range: `nan` and `inf`, which Python reads as numbers, are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def _whole(text: str) -> str:
    """A component of a heterogeneous job, `4711+1`, stands for the job: it is watched as one."""
    return text.partition("+")[0] if re.fullmatch(r"\d+\+\d+", text, re.ASCII) else text


def _job(given: str) -> str:
    text = _whole(given)
    if text and not JOB_ID.fullmatch(text):  # a name has no incidents, which looks like health
        raise ValueError(f"{text!r} is not a job id; 4711 and 4711_3 (an array element) are. See: squeue")
    return text


def _uid(text: str) -> int:
    try:
        return int(text) if text.isdecimal() else pwd.getpwnam(text).pw_uid
    except KeyError:
        raise ValueError(f"no user {text!r} on this machine; give the uid: --user 1000") from None


def _seconds(text: str) -> float:
    from slurm_watchdog.config.types import parse_duration

    return parse_duration(text)


def _nodes(text: str) -> list[str]:
    from slurm_watchdog.slurm.node_names import expand_nodes

    if not NODE_SET.fullmatch(text):
        raise ValueError(f"{text!r} names no nodes; n7 and n[1-3,7] do")
    return list(expand_nodes(text))


def _kind(text: str) -> str:
    from slurm_watchdog.config.converting import did_you_mean
    from slurm_watchdog.detect.registry import KINDS

    if text not in KINDS:  # a misspelt one has no incidents, which looks like health
        raise ValueError(f"{text!r} is not a kind of incident{did_you_mean(text, tuple(KINDS))}")
    return text


def _date(text: str) -> float:
    from slurm_watchdog.base.python310 import read_iso_time

    try:
        return read_iso_time(text).astimezone().timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a date such as 2026-11-01 or 2026-11-01T06:00") from None


_PARSED = {"J": _job, "JOB": _job, "TIME": _seconds, "NODE": _nodes, "KIND": _kind, "DATE": _date, "UID": _uid}
_PARSED |= dict.fromkeys(("JOB|PATH", "INCIDENT|JOB|NODE"), _whole)
TYPES: dict[str, click.ParamType[Any]] = {name: Value(name, parse) for name, parse in _PARSED.items()}
TYPES |= dict.fromkeys(("F", "FILE", "TRACE", "F.tar.zst", "SCRIPT", "FILE|DIR"), click.Path(allow_dash=True))
TYPES["PATH"] = click.Path(readable=False, allow_dash=True)  # A socket may be one that only its owner may read.
TYPES["DIR"] = click.Path(file_okay=False)
"""What a value is, by what it is called."""


def _parameter(row: str) -> click.Parameter:
    """What click makes of one row."""
    found = ROW.fullmatch(row)
    assert found is not None, row
    names, metavar, low, high, default, many, text = found.groups()
    kind = TYPES.get((metavar or "").strip("[]"))
    if not names.startswith("-"):
        required, shown = not metavar.startswith("["), f"{metavar}{many or ''}"
        return click.Argument([names], type=kind, metavar=shown, nargs=-1 if many else 1, required=required)
    if text.startswith(("ignored: ", "removed: ")):
        gone: dict[str, Any] = {"callback": _gone, "expose_value": False, "hidden": True, "help": text}
        return click.Option([names], is_flag=metavar is None, **gone)
    if metavar is None:
        return click.Option(names.split(", "), is_flag=True, default="/" in names, help=text)
    if low and metavar in ("N", "K"):
        kind = click.IntRange(int(low), int(high) if high else None)
    elif low:
        kind = FiniteRange(float(low), float(high) if high else None)
    elif "|" in metavar:
        kind, metavar = click.Choice(metavar.split("|")), None
    variable = re.search(r"\[\$(\w+)\]", text)
    more: dict[str, Any] = {} if default is None else {"default": default, "show_default": True}
    more |= {"multiple": bool(many), "envvar": variable and variable[1], "help": text}
    if metavar == "NODE":  # each is a list
        more["callback"] = lambda _, __, given: tuple(dict.fromkeys(name for each in given for name in each))
    return click.Option(names.split(", "), type=kind, metavar=metavar, **more)


def _gone(context: click.Context, parameter: click.Parameter, given: object) -> None:
    """Of an option of the release before. Raises UsageError if without it the command would do something else."""
    row = parameter.to_info_dict()
    what, _, todo = row["help"].partition(": ")
    if given and what == "removed":
        context.fail(f"slurm-watchdog {context.info_name} {row['opts'][0]} was removed; {todo}")
    if given:
        warn(f"Warning: {row['opts'][0]} was removed and has no effect; {todo}")


def parameters(*specs: str) -> Iterator[click.Parameter]:
    """The options and arguments of some rows; a line that is further to the right continues the one before."""
    rows: list[str] = []
    for spec in specs:
        lines = [line for line in spec.split("\n") if line.strip()]
        margin = len(lines[0]) - len(lines[0].lstrip())
        for line in lines:
            if line[margin] == " ":
                rows[-1] += f" {line.strip()}"
            else:
                rows.append(line.strip())
    return map(_parameter, rows)


class ServicePaths(NamedTuple):
    """Where the service of this machine has its configuration and its socket, if no option says otherwise."""

    config: str = DEFAULT_CONFIG
    socket: str = DEFAULT_SOCKET


def service_paths() -> ServicePaths:
    """Those of the command that runs: what the program was given as click's `obj`, else the defaults."""
    context = click.get_current_context(silent=True)
    return (context and context.find_object(ServicePaths)) or ServicePaths()


def readable_config() -> str | None:
    """The service's configuration, where this user may read it."""
    file = service_paths().config
    return file if os.access(file, os.R_OK) else None


@dataclass(frozen=True)
class Asked:
    """What was asked for with the options that commands share; None and False without them."""

    socket: str | None = None
    config: str | None = None
    json: bool = False
    journal: str | None = None
    or_journal: bool = False  # A journal can answer, too.


@dataclass(frozen=True)
class Answer:
    """What a command says, and its exit code."""

    document: object  # For programs.
    show: Callable[[], None] | Sequence[str]  # Prints it for people; or sentences.
    code: int = EXIT_FINE
    then: Callable[[], None] = lambda: None  # What is done once it is printed.

    def tell(self) -> None:
        """Prints it for people."""
        if callable(self.show):
            self.show()
        else:
            for each in self.show:
                sentence(each)


def command(
    *specs: str, refused: int = EXIT_USAGE, **settings: Any
) -> Callable[[Callable[..., Answer]], click.Command]:
    """Makes a command of a function of an `Asked` and of its own options and arguments, which answers. Its docstring is
    its help, `specs` are rows of options. Where the controller has refused the request it ends with `refused`."""

    def decorate(function: Callable[..., Answer]) -> click.Command:
        def callback(*, noheader: bool = False, knowledge: str | None = None, **given: Any) -> None:
            click.get_current_context().meta[NO_HEADER] = noheader
            if knowledge is not None:
                _use_knowledge(knowledge)
            shared = {name: given.pop(name) for name in ("socket", "config", "json", "journal") if name in given}
            asked = Asked(**shared, or_journal="journal" in shared)
            try:
                answer = function(asked, **given)
            except ClientError as error:
                if error.exit_code == EXIT_USAGE:
                    error.end_with(refused)
                raise
            print_json(answer.document) if asked.json else answer.tell()
            answer.then()
            sys.exit(int(answer.code))

        name = function.__name__.replace("_", "-")
        return click.Command(name, callback=callback, params=[*parameters(*specs)], help=function.__doc__, **settings)

    return decorate


class Refusal(click.ClickException):
    """What ends a command: lines for people, at last what to do next, and its exit code: wrong usage. `Program` prints
    it for a program, where that asked for JSON."""

    exit_code = EXIT_USAGE

    def __init__(self, lines: Iterable[str], todo: str = "", exit_code: int | None = None):
        self.lines, self.todo = [clean(line) for line in lines], clean(todo)
        self.ctx = click.get_current_context(silent=True)  # As of click's own errors: of the command that refuses.
        super().__init__("; ".join(self.lines))
        self.end_with(self.exit_code if exit_code is None else exit_code)

    def end_with(self, code: int) -> None:
        """Changes its exit code, which click has in the class."""
        vars(self)["exit_code"] = code

    def show(self, file: IO[Any] | None = None) -> None:
        """As click's, without its `Error:`."""
        for line in filter(None, (*self.lines, self.todo)):
            click.echo(line, err=True)


class ClientError(Refusal):
    """A request that got no good answer: `what` failed, and what `todo` next, each a sentence. Its exit code is wrong
    usage where the controller has refused the request, otherwise unknown."""

    def __init__(self, what: str, todo: str = "", http_status: int | None = None, code: str = ""):
        is_refused = http_status is not None and 400 <= http_status < 500
        super().__init__([what], todo, EXIT_USAGE if is_refused else EXIT_UNKNOWN)
        self.what = what
        self.http_status = http_status  # Set when the controller itself answered with an error.
        self.code = code  # The controller's word for programs, such as `hangs`.
        self.is_final = is_refused and http_status != 429  # To ask again changes nothing. 429: ask later.


def needs_package(error: ModuleNotFoundError) -> str:
    """The sentence about what is not installed: a package of the extra `controller`, or, on a node, a part of ours."""
    if (error.name or "").partition(".")[0] == "slurm_watchdog":
        return f"This is not in the package for nodes. {ON_TOP}"
    return f"This needs the Python package {error.name}, which is not installed here.\n{INSTALL}"


def load_or_exit(config_file: str, *, with_knowledge: bool = True) -> Config:
    """The configuration. Raises Refusal, which ends the process with code 2, with every error in the file."""
    from slurm_watchdog.config.loading import ConfigError, load_config

    try:
        config = load_config(config_file, with_knowledge=with_knowledge)
    except ConfigError as error:
        todo = f"Nothing was done. Correct it, then: slurm-watchdog doctor --config {config_file}"
        raise Refusal(error.lines(), todo) from error
    for line in config.warnings:
        warn(f"Warning: {line}")
    return config


def configured(config_file: str | None) -> Config | None:
    """A configuration, with its rows of knowledge in force; None without one. Raises Refusal if the file is wrong."""
    if config_file is None:
        return None
    from slurm_watchdog.config.knowledge_files import put_in_force

    config = load_or_exit(config_file)
    put_in_force(config.site_texts)
    return config


def _use_knowledge(directory: str) -> None:
    """Puts a site's rows in force before the command runs."""
    from slurm_watchdog.config.knowledge_files import check_texts, put_in_force, read_texts

    texts, problems = read_texts(directory)
    problems += check_texts(texts)
    if not texts and not problems:
        problems = [f"{directory} has no *.conf files"]
    if problems:
        raise Refusal(problems)
    put_in_force(texts)


def warn(text: object) -> None:
    """A line on standard error."""
    click.echo(clean(text), err=True)


def print_json(document: object) -> None:
    """One JSON document on standard output. ASCII only, so that no control character reaches a terminal."""
    click.echo(json.dumps(versioned(document), indent=2, ensure_ascii=True))


def versioned(document: object) -> object:
    """An object with `schema_version` as its first key; a list as it is, or as `items` where `--json-object` was given.

    The version rises when a key is taken away or changes its meaning, not when one is added.
    """
    from msgspec import to_builtins

    document, context = to_builtins(document), click.get_current_context(silent=True)
    if isinstance(document, list) and context is not None and "--json-object" in context.meta.get(TYPED, ()):
        document = {"items": document}
    return {"schema_version": JSON_SCHEMA_VERSION, **document} if isinstance(document, dict) else document
