"""A batch script: what it asks of Slurm and its simple commands, and what it lacks to be protected. Pure.

No shell: what a `source`d file or a substitution sets is not known, and stays as written (`$NAME`). A rule is silent
where it cannot tell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import PurePath

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import plural
from slurm_watchdog.doctor.finding import Advice, Facts, examine
from slurm_watchdog.knowledge.launch_options import ADDRESSES, MPI
from slurm_watchdog.knowledge.srun_options import FLAGS, LETTERS, OPTIONAL
from slurm_watchdog.knowledge.trainer_options import directories_in
from slurm_watchdog.model.slurm import run_limits

MAX_CHARS = 1 << 20
MAX_VALUE = 16 * 1024
MAX_VARIABLES = 200  # Filled in in one word.
MAX_COMMANDS = 5000
MAX_WORDS = 20_000
WITHOUT_VALUE = FLAGS | OPTIONAL | {"requeue", "no-requeue", "ignore-pbs"}  # Of srun, and what sbatch has beside them.
RUN_FLAGS = frozenset({"observe", "no-page", "quiet", "alone"})  # Options of `run` without a value.
ON = frozenset({"1", "yes", "true", "y", "on"})  # Values of a variable that switch something on.
KEYWORDS = frozenset("if then else elif do while until time ! { ( exec eval nohup command env".split())  # noqa: SIM905
DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset", "set"})
LAUNCHERS = re.compile(r"(?:.*/)?(?:torchrun|accelerate|deepspeed)|torch\.distributed\.(?:run|launch)")
TRAINS = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed)|.*\.(?:py|sh)|\$.*", re.DOTALL)
"""A word of an srun that may run for long: a program in a variable may, too."""
KILL_SWITCH = re.compile(r"SLURM_WATCHDOG_KILL_SWITCH|kill[-_]?switch|\bslurm_watchdog_hooks\b", re.IGNORECASE)
OUTPUT = re.compile("save|ckpt|checkpoint|output", re.IGNORECASE)
ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
"""Since PyTorch 2.2 by the first name; on by itself since 2.0 (pytorch/pytorch#110723)."""
OF_A_TASK = re.compile(r"%\d*[tnN]")  # In a name of srun's output: a file for each task, or for each node.
OF_TORCHRUN = re.compile(r"--(?:tee|redirects|log[-_]dir)\b|-[tr]$")  # Its options that keep the ranks' lines apart.
ADDRESS = re.compile(rf"--(?:{'|'.join(sorted(each.replace('_', '[_-]') for each in ADDRESSES))})(?:=(.*))?", re.DOTALL)
NO_FIXED_HOST = re.compile(r"env://|file:|(?:[a-z]+://)?(?:localhost|127\.[\d.]+|::1|0\.0\.0\.0)|.*[$`(]|$", re.DOTALL)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^{}]*))?\}|([A-Za-z_]\w*))")


class Command(Struct):
    """One simple command."""

    line: int
    words: tuple[str, ...]  # Quotes removed, variables filled in as far as they are known.
    environment: Mapping[str, str] = {}  # Assignments before it: `NAME=value command`.

    @property
    def names(self) -> list[str]:
        return [PurePath(word).name for word in self.words]

    @property
    def parts(self) -> list[str]:
        """Its words; those of a command line that is one word, apart."""
        return [part for word in self.words for part in word.split()]


class Script(Struct):
    """A batch script."""

    path: str
    directives: Mapping[str, str]  # #SBATCH options that Slurm reads, by long names; `hetjob`: of components.
    commands: tuple[Command, ...]
    variables: Mapping[str, str]

    def value_of(self, name: str) -> str:
        """What a variable is set to, for one command or from then on; empty: not set."""
        own = (each.environment[name] for each in self.commands if name in each.environment)
        return next(own, self.variables.get(name, ""))

    @property
    def nodes(self) -> int | None:
        """Of the job, where the script says one number."""
        low, _, high = (self.directives.get("nodes") or "").partition("-")
        return int(low) if low.isdecimal() and high in ("", low) else None

    def starts(self, flags: Collection[str], *program: str) -> Iterator[tuple[Command, dict[str, str], list[str]]]:
        """Each command that starts `program`, also behind `exec ./batch.sh --`, `timeout 3h` or `nohup`, with its
        options by their long names and the words behind them; `flags` are its options without a value."""
        for each in self.commands:
            names, length = each.names, len(program)
            ends = (at + length for at in range(len(names)) if (*names[at : at + length],) == program)
            if (start := next(ends, None)) is not None:
                yield each, *parse_options(each.words[start:], flags)

    def steps(self) -> Iterator[tuple[Command, dict[str, str]]]:
        """Each srun that may run for long and may have several tasks: what it starts, and its options."""
        job = {} if "hetjob" in self.directives else self.directives
        for each, options, rest in self.starts(WITHOUT_VALUE, "srun"):
            wanted = {**job, **options}
            one_a_node = wanted.get("ntasks-per-node", wanted.get("ntasks")) == "1"
            step = Command(line=each.line, words=tuple(rest), environment=each.environment)
            is_one_task = wanted.get("ntasks") == "1" or (wanted.get("nodes") in ("1", "1-1") and one_a_node)
            if not is_one_task and any(map(TRAINS.fullmatch, step.parts)):
                yield step, options

    @property
    def programs(self) -> tuple[str, ...]:
        """Python files that the script starts, as they are named in it."""
        parts = (part for command in self.commands for part in command.parts)
        return tuple(dict.fromkeys(part for part in parts if part.endswith(".py") and not part.startswith("-")))


# ------------------------------------------------------------------------------------------------ what it lacks


def examine_script(
    script: Script,
    *,
    slurm: Mapping[str, str] | None = None,
    read: Mapping[str, str] = {},
    checkpoint_directories: Sequence[str] = (),
    comment: str = "",
    requeueable: bool | None = None,
) -> Iterator[Advice]:
    """What a script, or its job, lacks. `slurm` is `scontrol show config`, `read` the programs that it starts and that
    could be read, `checkpoint_directories` what the configuration names, `requeueable` Slurm's word about the job."""
    path = script.path
    runs = tuple(script.starts(RUN_FLAGS, "slurm-watchdog", "run"))
    hosts = [("MASTER_ADDR", script.value_of("MASTER_ADDR")), *_addresses(script)] if runs else []
    yield from examine(
        "script",
        {
            "where": path,
            "no_requeue": _why_not_requeued(script, flag(slurm, "JobRequeue"), requeueable),
            "switched_off": next((name for name in ERROR_HANDLING if script.value_of(name) == "0"), None),
            "checkpoints": bool(checkpoint_directories) or _names_checkpoints(script),
            "fixed_host": next((f"{name}={host}"[:100] for name, host in hosts if not NO_FIXED_HOST.match(host)), None),
        },
    )
    words = [word for command in script.commands for word in (*command.words, *command.names)]
    wrapped = any(KILL_SWITCH.search(word) or word == "batch.sh" for word in words)
    if read and not wrapped:
        switch = any(KILL_SWITCH.search(text) for text in read.values())
        exported = any(KILL_SWITCH.search(name) for name in script.variables)
        yield from examine("program", {"where": next(iter(read)), "switch": switch, "exported": exported})
    for step, options in script.steps():
        yield from examine("step", {"where": f"{path}:{step.line}", **_step(script, step, options, slurm)})
    for command, options, _ in runs:
        yield from examine("run", {"where": f"{path}:{command.line}", **_run(script, command, options, comment)})


def flag(config: Mapping[str, str] | None, key: str) -> bool | None:
    """A setting of `scontrol show config` that is on or off; None: not known."""
    first = (config or {}).get(key, "").split()[:1]
    return None if not first else first[0].lower() in ("1", "yes", "true")


def _why_not_requeued(script: Script, default: bool | None, requeueable: bool | None) -> str | None:
    if "no-requeue" in script.directives and "requeue" not in script.directives:
        return "#SBATCH --no-requeue"
    if requeueable is False:
        return "scontrol show job: Requeue=0"
    if "requeue" in script.directives or default or requeueable:
        return None
    return f"no --requeue in it, and JobRequeue=0 {'may be' if default is None else 'is'} in slurm.conf"


def _names_checkpoints(script: Script) -> bool:
    """Whether a command says where it saves; also where nothing trains."""
    for command in script.commands:
        srun = command.words[0] == "srun"  # whose own --output is the log
        named = (each for each in command.words if not (srun and each.startswith("--output")))
        told = (each if "$" in each else each.partition("=")[0] for each in named if each[:1] == "-" or "$" in each)
        if directories_in(command.words, "/") or any(OUTPUT.search(each) for each in told):
            return True
    return not script.programs and not any(script.steps())


def _addresses(script: Script) -> Iterator[tuple[str, str]]:
    for command in script.commands:
        for word, following in zip(command.words, (*command.words[1:], ""), strict=True):
            if match := ADDRESS.fullmatch(word):
                yield word.partition("=")[0], match[1] if match[1] is not None else following


def _step(script: Script, step: Command, options: Mapping[str, str], slurm: Mapping[str, str] | None) -> Facts:
    """A task that fails has to end the step, or the others wait for it in a collective; and one line of 512 ranks' log
    has to name its rank."""
    known = not any(name.startswith("$") for name in options)  # not in a variable that is set elsewhere
    site = flag(slurm, "KillOnBadExit") or script.variables.get("SLURM_KILL_BAD_EXIT", "").lower() in ON
    own = options.get("kill-on-bad-exit", step.environment.get("SLURM_KILL_BAD_EXIT", "0"))
    launched = any(map(LAUNCHERS.fullmatch, step.parts))
    apart = any(OF_A_TASK.search(options.get(each, "")) for each in ("output", "error"))
    apart = apart or (launched and any(map(OF_TORCHRUN.match, step.parts)))
    return {
        "shown": " ".join(step.words[:3])[:80],
        "kills": None if site or not known else own == "" or own in ON,
        "waits": "wait" in options or "SLURM_WAIT" in script.variables,
        "prefixes": apart or "label" in options or "SLURM_LABELIO" in script.variables if known else None,
        "label": "torchrun --tee 3 …  # and srun --label …" if launched else "srun --label …",
    }


def _run(script: Script, command: Command, options: Mapping[str, str], comment: str) -> Facts:
    """A node that dies must not end the job, and a spare has to be there to take its place."""
    variable = command.environment.get("SLURM_WATCHDOG_SPARES") or script.variables.get("SLURM_WATCHDOG_SPARES", "")
    said = options.get("spares") or variable
    with suppress(ValueError):
        said = said or str(run_limits(comment or script.directives.get("comment") or "").get("spares", ""))
    spares = int(said) if said.isascii() and said.isdecimal() else 0
    have, count = script.nodes, options.get("nodes", "1")
    needed = int(count) + spares if count.isdecimal() else None
    before = command.names[: command.names.index("slurm-watchdog")]
    return {
        "launcher": next((name for name in before if name in MPI | {"srun"}), None),
        "ends_with_a_node": "no-kill" not in script.directives and have != 1 and (have is not None or spares > 0),
        "have": have,
        "count": count,
        "spares": plural(spares, "spare"),
        "needed": needed,
        "nodes_missing": None if have is None or needed is None else needed - have,
    }


# ------------------------------------------------------------------------------------------------ how it is read


def parse_script(text: str, path: str = "", *, given: Sequence[str] = ()) -> Script:
    """The facts of a script; `given` are options from sbatch's command line, which outrank it."""
    text = text[:MAX_CHARS]
    directives = _directives(text) | parse_options(given)[0]
    commands, variables = _parse_shell(text)
    return Script(path=path, directives=directives, commands=commands, variables=variables)


def _directives(text: str) -> dict[str, str]:
    directives: dict[str, str] = {}
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            break  # Slurm reads none behind the first command
        if line.startswith("#SBATCH"):
            try:
                words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            except ValueError:
                words = line.split()[1:]
            directives |= {"hetjob": ""} if words[:1] in (["hetjob"], ["packjob"]) else parse_options(words)[0]
    return directives


def parse_options(words: Sequence[str], flags: Collection[str] = WITHOUT_VALUE) -> tuple[dict[str, str], list[str]]:
    """(options by their long names, the words after them); a flag's value is empty."""
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
        elif not equals and name not in flags and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        found[name] = value
    return found, rest


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
    """`text` with variables that are known filled in; at most MAX_VALUE long if any was."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0])

    return _VARIABLE.sub(value, text[:MAX_VALUE], MAX_VARIABLES)[:MAX_VALUE] if "$" in text else text


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
