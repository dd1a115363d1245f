"""Options that several commands share, and how a command fails: a sentence, what to do next, a code."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from slurm_watchdog.base.commit import JSON_SCHEMA_VERSION
from slurm_watchdog.cli.terminal import NO_HEADER, clean

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config

F = TypeVar("F", bound=Callable[..., Any])

EXIT_FINE = 0
EXIT_FOUND = 1
EXIT_USAGE = 2
EXIT_UNKNOWN = 3
AS_JSON = "as_json"  # The name of `--json` in a command's parameters.
TYPED = "slurm_watchdog.typed"  # In the meta of click's context: the words of the command line.

DEFAULT_CONFIG = "/etc/slurm-watchdog/config.yaml"
DEFAULT_SOCKET = "/run/slurm-watchdog/controller.sock"


JOB_ID = re.compile(r"\d+(_\d+)?", re.ASCII)
MAX_ERROR = 2000  # Characters of a sentence that a controller answers.
NODE_SET = re.compile(r"[\w.\-\[\],]+", re.ASCII)


class FiniteRange(click.FloatRange):
    """A number in a range: `nan` and `inf`, which Python reads as numbers, are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def flag(*names: str, help: str, **more: Any) -> Callable[[F], F]:
    """An option without a value."""
    return click.option(*names, is_flag=True, help=help, **more)


def value(*names: str, metavar: str, help: str, **more: Any) -> Callable[[F], F]:
    """An option with one; its default, if it has one, is in its help."""
    return click.option(*names, metavar=metavar, help=help, show_default=bool(more.get("default")), **more)


def json_option(command: F) -> F:
    """`--json`, or `--json-object`; either makes `as_json` true."""
    text = "For programs: one JSON document; with --json-object an object also where that is a list."
    return flag("--json", "--json-object", AS_JSON, help=text)(command)


def _no_header(context: click.Context, parameter: click.Parameter, given: bool) -> None:
    context.meta[NO_HEADER] = given


table_option = flag("--noheader", callback=_no_header, expose_value=False, help="Only the rows of tables, for scripts.")
"""For a command that prints tables; `terminal.render` looks for it."""
JOB, USER, PARTITION, NODE = ("-j", "--job"), ("-u", "--user"), ("-p", "--partition"), ("-w", "--node")
"""What many commands take, named as Slurm's users know it."""


def config_option(text: str, **more: Any) -> Callable[[F], F]:
    """`--config` with the help `text`."""
    return value("--config", "config_file", metavar="F", type=click.Path(), help=text, **more)


@dataclass(frozen=True)
class ServicePaths:
    """Where the service of this machine has its configuration and its socket, if no option says otherwise."""

    config: str = DEFAULT_CONFIG
    socket: str = DEFAULT_SOCKET


def service_paths() -> ServicePaths:
    """Those of the command that runs: what the program was given as click's `obj`, else the defaults."""
    context = click.get_current_context(silent=True)
    return (context and context.find_object(ServicePaths)) or ServicePaths()


default_config_option = config_option("Configuration file.", default=DEFAULT_CONFIG)


def service_options(command: F) -> F:
    """`--config` and `--once` of the two services."""
    return default_config_option(flag("--once", help="Look once, print what was seen, and exit.")(command))


def operator_options(command: F) -> F:
    """`--socket`, `--config` and `--json` of the commands that ask the controller."""
    names_socket = f"Configuration file that names the socket. [default: {DEFAULT_CONFIG}, where it can be read]"
    command = config_option(names_socket)(json_option(command))
    return value(
        "--socket",
        "socket_path",
        metavar="PATH",
        type=click.Path(),
        envvar="SLURM_WATCHDOG_SOCKET",
        help="Socket of the controller, or munge://HOST:PORT of one on another machine; of two, with a comma between "
        f"them. [default: $SLURM_WATCHDOG_SOCKET, else what the configuration says, else {DEFAULT_SOCKET}]",
    )(command)


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

    def __init__(
        self, what: str, todo: str = "", http_status: int | None = None, code: str = "", *, untaken: bool = False
    ):
        is_refused = http_status is not None and 400 <= http_status < 500
        super().__init__([what], todo, EXIT_USAGE if is_refused else EXIT_UNKNOWN)
        self.what = what
        self.http_status = http_status  # Set when the controller itself answered with an error.
        self.code = code  # The controller's word for programs, such as `hangs`.
        self.untaken = untaken  # No controller has taken the request, so that another one can be asked the same.

    @property
    def is_final(self) -> bool:
        """Whether the controller has refused the request itself: to ask again changes nothing. 429: ask later."""
        return self.http_status is not None and 400 <= self.http_status < 500 and self.http_status != 429


def error_text(data: bytes, key: str) -> str:
    """One text of an error's document: its sentence, or its word for programs."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    return str(document.get(key) or "")[:MAX_ERROR] if isinstance(document, dict) else ""


def load_or_exit(config_file: str, *, with_knowledge: bool = True) -> Config:
    """The configuration. Raises Refusal, which ends the process with code 2, with every error in the file."""
    from slurm_watchdog.config.loading import ConfigError, load_config

    try:
        config = load_config(config_file, with_knowledge=with_knowledge)
    except ConfigError as error:
        todo = f"Nothing was done. Correct it, then: slurm-watchdog doctor --config {config_file}"
        raise Refusal(error.lines(), todo) from error
    for line in config.warnings:
        click.echo(f"Warning: {clean(line)}", err=True)
    return config


def _use_knowledge(context: click.Context, parameter: click.Parameter, directory: str | None) -> None:
    """Puts a site's rows in force before the command runs."""
    if directory is None:
        return
    from slurm_watchdog.config.knowledge_files import check_texts, put_in_force, read_texts

    texts, problems = read_texts(directory)
    problems += check_texts(texts)
    if not texts and not problems:
        problems = [f"{directory} has no *.conf files"]
    if problems:
        raise Refusal(problems)
    put_in_force(texts)


knowledge_option = value(
    "--knowledge",
    metavar="DIR",
    type=click.Path(),
    callback=_use_knowledge,
    expose_value=False,
    help="Directory of *.conf files with rows of your own, as knowledge.directory in the configuration.",
)
journal_option = value(
    "--journal",
    metavar="DIR",
    type=click.Path(),
    help="Ask the journal of a `run` that has ended, in DIR. [default: your newest one, "
    "where no controller answers and none is configured]",
)


def needs_package(error: ModuleNotFoundError) -> str:
    """The sentence about what is not installed: a package of the extra `controller`, or, on a node, a part of ours."""
    if (error.name or "").partition(".")[0] == "slurm_watchdog":
        return f"This is not in the package for nodes. {ON_TOP}"
    return f"This needs the Python package {error.name}, which is not installed here.\n{INSTALL}"


INSTALL = "Install it with: pip install 'slurm-training-watchdog[controller]'"
ON_TOP = "Type it on the management or a login node, or install the package slurm-watchdog-controller here, too."


def parsed(parse: Callable[[str], float], wrong: str = "") -> Callable[..., float | None]:
    """A callback of an option: what `parse` makes of it. The error is that of `parse`, or `wrong`."""

    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
        try:
            return None if value is None else parse(value)
        except (ValueError, OverflowError) as error:
            raise click.BadParameter(f"{value!r} {wrong}" if wrong else str(error)) from None

    return callback


def _seconds(value: str) -> float:
    from slurm_watchdog.config.types import parse_duration

    return parse_duration(value)


seconds_of = parsed(_seconds)


def expand_nodes(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> list[str]:
    """A callback of an option: the names in `n7` and `n[1-3,7]`. Raises click.BadParameter."""
    from slurm_watchdog.slurm import node_names
    from slurm_watchdog.slurm.node_names import ParseError

    nodes: list[str] = []
    for each in value:
        if not NODE_SET.fullmatch(each):
            raise click.BadParameter(f"{each!r} names no nodes; n7 and n[1-3,7] do")
        try:
            nodes += node_names.expand_nodes(each)
        except ParseError as error:
            raise click.BadParameter(str(error)) from error
    return list(dict.fromkeys(nodes))


def check_job(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """A callback: one id of a job, several, or none. Raises click.BadParameter: a name has no incidents, which looks
    like health."""
    for each in value if isinstance(value, tuple) else () if value is None else (value,):
        if (each or parameter.required) and not JOB_ID.fullmatch(str(each)):
            raise click.BadParameter(f"{each!r} is not a job id; 4711 and 4711_3 (an array element) are. See: squeue")
    return value


job_arguments = click.argument("job_ids", metavar="JOB...", nargs=-1, callback=check_job)


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
