"""A batch script: what it asks of Slurm, and its simple commands. Pure.

No shell: what a `source`d file or a substitution sets is not known, and stays as written (`$NAME`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import PurePath

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.srun_options import FLAGS, LETTERS, OPTIONAL

MAX_CHARS = 1 << 20
MAX_VALUE = 16 * 1024
MAX_COMMANDS = 5000
MAX_WORDS = 20_000
WITHOUT_VALUE = FLAGS | OPTIONAL | {"requeue", "no-requeue", "ignore-pbs"}
"""Of srun, and what sbatch has beside them."""
ON = frozenset({"1", "yes", "true", "y", "on"})
"""Values of a variable that switch something on."""
KEYWORDS = frozenset("if then else elif do while until time ! { ( exec eval nohup command env".split())  # noqa: SIM905
DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset", "set"})
LAUNCHERS = re.compile(r"(?:.*/)?(?:torchrun|accelerate|deepspeed)|torch\.distributed\.(?:run|launch)")
TRAINS = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed)|.*\.(?:py|sh)|\$.*", re.DOTALL)
"""A word of an srun that may run for long: a program in a variable may, too."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^{}]*))?\}|([A-Za-z_]\w*))")


class Command(Struct, frozen=True, kw_only=True):
    """One simple command."""

    line: int
    words: tuple[str, ...]
    """Quotes removed, variables filled in as far as they are known."""
    environment: Mapping[str, str] = {}
    """Assignments before it: `NAME=value command`."""


class Srun(Struct, frozen=True, kw_only=True):
    """One `srun` of the script."""

    line: int
    options: Mapping[str, str]
    """By their long names; a flag's value is empty."""
    words: tuple[str, ...]
    """What it starts."""
    environment: Mapping[str, str] = {}

    @property
    def is_training(self) -> bool:
        """Whether it may run for long."""
        return any(TRAINS.fullmatch(part) for word in self.words for part in word.split())

    @property
    def launcher(self) -> str | None:
        """torchrun, or what uses it."""
        return next((part for word in self.words for part in word.split() if LAUNCHERS.fullmatch(part)), None)


class Script(Struct, frozen=True, kw_only=True):
    """A batch script."""

    path: str = ""
    directives: Mapping[str, tuple[str, int]] = {}
    """Long name to (value, line) of #SBATCH lines that Slurm reads; the last one of a name holds."""
    components: int = 1
    """Of a heterogeneous job."""
    sruns: tuple[Srun, ...] = ()
    commands: tuple[Command, ...] = ()
    variables: Mapping[str, str] = {}
    text: str = ""

    def directive(self, name: str) -> str | None:
        """Value of the directive of that name; empty for a flag, None if there is none."""
        return self.directives[name][0] if name in self.directives else None

    def value_of(self, name: str) -> str | None:
        """What a variable is set to, for one command or from then on."""
        own = (each.environment[name] for each in self.commands if name in each.environment)
        return next(own, self.variables.get(name))

    @property
    def nodes(self) -> int | None:
        """Of the job, where the script says one number."""
        low, _, high = (self.directive("nodes") or "").partition("-")
        return int(low) if low.isdecimal() and high in ("", low) else None

    def has_one_task(self, srun: Srun) -> bool:
        """Whether the step is known to have one."""
        options = {name: value for name, (value, _) in self.directives.items() if self.components == 1}
        options |= srun.options
        a_node = options.get("ntasks-per-node", options.get("ntasks"))
        return options.get("ntasks") == "1" or (options.get("nodes") in ("1", "1-1") and a_node == "1")

    @property
    def programs(self) -> tuple[str, ...]:
        """Python files that the script starts, as they are named in it."""
        parts = (part for command in self.commands for word in command.words for part in word.split())
        return tuple(dict.fromkeys(part for part in parts if part.endswith(".py") and not part.startswith("-")))


def parse_script(text: str, path: str = "", *, given: Sequence[str] = ()) -> Script:
    """The facts of a script; `given` are options from sbatch's command line, which outrank it."""
    text = text[:MAX_CHARS]
    directives, components = _directives(text)
    directives |= {name: (value, 0) for name, value in parse_options(given)[0].items()}
    commands, variables = _parse_shell(text)
    return Script(
        path=path,
        directives=directives,
        components=components,
        sruns=tuple(srun for command in commands for srun in _sruns(command)),
        commands=commands,
        variables=variables,
        text=text,
    )


def _directives(text: str) -> tuple[dict[str, tuple[str, int]], int]:
    directives: dict[str, tuple[str, int]] = {}
    components = 1
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            break  # Slurm reads none behind the first command
        if line.startswith("#SBATCH"):
            try:
                words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError:
                words = line.split()[1:]
            components += words[:1] in (["hetjob"], ["packjob"])
            directives |= {name: (value, number) for name, value in parse_options(words)[0].items()}
    return directives, components


def parse_options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(options by their long names, the words after them)."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0][:1] in ("-", "$"):
        word = rest.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        else:
            name, value = LETTERS.get(word[1:2], word[1:2]), word[2:].removeprefix("=")
            equals = value
        if word.startswith("$"):
            name = word
        elif not equals and name not in WITHOUT_VALUE and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        found[name] = value
    return found, rest


def _sruns(command: Command) -> Iterator[Srun]:
    """The srun of a command, also behind `exec ./batch.sh --`, `timeout 3h` or `nohup`."""
    names = [PurePath(word).name for word in command.words]
    if "srun" in names:
        options, rest = parse_options(command.words[names.index("srun") + 1 :])
        yield Srun(line=command.line, options=options, words=tuple(rest), environment=command.environment)


def _parse_shell(text: str) -> tuple[tuple[Command, ...], dict[str, str]]:
    """(simple commands in their order, variables that are assigned, with their last value)."""
    commands: list[Command] = []
    variables: dict[str, str] = {}
    for line, words in islice(_simple_commands(text), MAX_COMMANDS):
        while words and words[0] in KEYWORDS:
            words = words[1:]
        if words and words[0] in DECLARATIONS:
            words = [word for word in words[1:] if _ASSIGNMENT.fullmatch(word)]
        own: dict[str, str] = {}
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            before = variables.get(match[1], "") if match[2] else ""
            own[match[1]] = (before + _expand(match[3], variables | own))[:MAX_VALUE]
            words = words[1:]
        filled = tuple(part for word in words[:MAX_WORDS] for part in _fill(word, variables))
        if filled:
            commands.append(Command(line=line, words=filled, environment=own))
        else:
            variables |= own
    return tuple(commands), variables


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """`text` with variables that are known filled in; at most MAX_VALUE long if anything was."""
    parts: list[str] = []
    size = end = 0
    for match in _VARIABLE.finditer(text):
        value = variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0])
        parts += (text[end : match.start()], value)
        size += match.start() - end + len(value)
        end = match.end()
        if size > MAX_VALUE:
            break
    return ("".join(parts) + text[end:])[:MAX_VALUE] if parts else text


def _fill(word: str, variables: Mapping[str, str]) -> list[str]:
    """An unquoted variable may hold several words; a quoted one with a whole command line is taken apart just the same,
    for such a line is handed to a shell (`bash -c "$CMD"`)."""
    filled = _expand(word, variables)
    if filled == word:
        return [word] if word else []
    return filled.replace("\\\n", " ").split()


def _simple_commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, words) of each simple command, quotes of single words removed."""
    words: list[str] = []
    word: str | None = None
    line, started, index, heredoc = 1, 1, 0, ""
    while match := _TOKEN.match(text, index):
        piece, index = match[0], match.end()
        kind = match.lastgroup or ""
        if kind in ("space", "separator") and word is not None:
            words.append(word)
            word = None
        if kind == "separator" and words:
            yield started, words
            words = []
        if not words and word is None:
            started = line
        line += piece.count("\n")
        if kind == "heredoc":
            heredoc = match["mark"]
        elif kind == "separator" and piece == "\n" and heredoc:
            end = re.compile(rf"^\s*{heredoc}\s*$", re.MULTILINE).search(text, index)
            after = end.end() if end is not None else index
            line, index, heredoc = line + text.count("\n", index, after), after, ""
        elif kind not in ("space", "separator", "comment", "continued"):
            word = (word or "") + _unquoted(kind, piece)
    words += [word] if word is not None else []
    if words:
        yield started, words


_TOKEN = re.compile(
    r"""(?P<continued>\\\n)|(?P<escaped>\\.?)|(?P<single>'[^']*'?)|(?P<double>"(?:[^"\\]|\\.)*"?)
    |(?P<comment>(?<![^\s;|&()])\#[^\n]*)|(?P<heredoc><<-?[ \t]*['"]?(?P<mark>\w+)['"]?)|(?P<redirect>&>|[<>]&)
    |(?P<separator>[\n;|&()`])|(?P<space>[ \t\r]+)|(?P<plain>[^\\'"\#<>\n;|&()`\ \t\r]+|.)""",
    re.VERBOSE | re.DOTALL,
)


def _unquoted(kind: str, piece: str) -> str:
    if kind == "single":
        return piece.strip("'")
    if kind == "double":
        return re.sub(r"\\([\"\\`])", r"\1", piece[1:].removesuffix('"').replace("\\\n", " "))
    return piece[1:] if kind == "escaped" else piece
