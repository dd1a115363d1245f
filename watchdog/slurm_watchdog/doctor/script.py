"""What a batch script asks of Slurm and what it starts. Pure: text in, facts out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.doctor.shell import Command, parse_shell

_DIRECTIVE = re.compile(r"#SBATCH\s+(.*)")
_HETJOB = re.compile(r"#SBATCH\s+(hetjob|packjob)\b")
SHORT = {
    "J": "job-name", "N": "nodes", "n": "ntasks", "o": "output", "e": "error", "p": "partition", "t": "time",
    "a": "array",
    "A": "account", "c": "cpus-per-task", "w": "nodelist", "x": "exclude", "G": "gpus", "C": "constraint",
    "d": "dependency", "k": "no-kill",
    "D": "chdir", "q": "qos", "K": "kill-on-bad-exit", "W": "wait", "l": "label", "u": "unbuffered",
    "m": "distribution",
}  # fmt: skip
"""Of sbatch and srun, as `man srun` has them."""
ON = frozenset({"1", "yes", "true", "y", "on"})
"""Values of a variable that switch something on."""
OPTIONAL_VALUE = frozenset({"K"})
FLAGS = frozenset({
    "requeue", "no-requeue", "exclusive", "overlap", "kill-on-bad-exit", "no-kill", "label", "unbuffered",
    "verbose", "quiet",
    "overcommit", "oversubscribe", "exact", "whole", "multi-prog", "pty", "disable-status", "contiguous", "hold",
    "parsable",
    "test-only", "spread-job", "use-min-nodes", "reboot", "ignore-pbs", "interactive", "no-allocate",
    "preserve-env", "propagate",
})  # fmt: skip
"""Options that may stand without a value; with one it is joined by `=`."""
SHORT_FLAGS = frozenset("lOQusvkHIEVX")
UTILITIES = frozenset({
    "hostname", "nvidia-smi", "rocm-smi", "dcgmi", "echo", "date", "env", "printenv", "true", "sleep", "mkdir",
    "rm", "cp", "rsync",
    "tar", "ls", "cat", "df", "du", "free", "lscpu", "numactl-show", "ip", "ifconfig", "ibstat", "ibdev2netdev",
    "rdma", "sbcast",
    "touch", "ln", "chmod", "pkill", "kill", "killall", "uname", "whoami", "pwd", "which", "module", "nvcc",
    "find", "test", "ps",
    "top", "uptime", "lsof", "scontrol", "squeue", "sinfo", "wget", "curl", "git", "unzip", "cpupower", "dmesg",
    "ulimit", "vmstat",
    "iostat", "sh-c", "id", "stat", "head", "tail", "grep", "awk", "sed", "wc", "tee", "timeout-test",
    "enroot-import", "nc", "ping",
})  # fmt: skip
"""Programs that are over in a moment: no training waits in them for a dead rank."""
LAUNCHERS = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed"})


class Srun(Struct, frozen=True, kw_only=True):
    """One `srun` of the script."""

    line: int
    options: tuple[tuple[str, str], ...]
    """(long name, value); a flag's value is empty."""
    words: tuple[str, ...]
    """What it starts."""
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def unknown(self) -> bool:
        """Whether options stand in a variable that is set elsewhere."""
        return any(name.startswith("$") for name, _ in self.options)


class Script(Struct, frozen=True, kw_only=True):
    """A batch script."""

    path: str = ""
    directives: tuple[tuple[str, str, int], ...] = ()
    """(long name, value, line) of #SBATCH lines that Slurm reads; the last one of a name holds."""
    ignored: tuple[tuple[str, int], ...] = ()
    """#SBATCH lines after the first command: Slurm does not read them."""
    components: int = 1
    """Of a heterogeneous job."""
    sruns: tuple[Srun, ...] = ()
    commands: tuple[Command, ...] = ()
    variables: Mapping[str, str] = {}
    text: str = ""
    sources: bool = False
    """It reads in other files, which may set anything."""

    def directive(self, name: str) -> str | None:
        """Value of the last directive of that name; empty for a flag, None if there is none."""
        return next((value for given, value, _ in reversed(self.directives) if given == name), None)


def parse_script(text: str, path: str = "", *, given: Sequence[str] = ()) -> Script:
    """The facts of a script; `given` are options from sbatch's command line, which outrank it."""
    directives, ignored, components = _directives(text)
    directives += [(name, value, 0) for name, value in parse_options(given)[0]]
    commands, variables = parse_shell(text)
    return Script(
        path=path,
        directives=tuple(directives),
        ignored=tuple(ignored),
        components=components,
        sruns=tuple(srun for command in commands for srun in _sruns(command)),
        commands=commands,
        variables=variables,
        text=text,
        sources=any(command.words[0] in (".", "source") for command in commands),
    )


def _directives(text: str) -> tuple[list[tuple[str, str, int]], list[tuple[str, int]], int]:
    directives: list[tuple[str, str, int]] = []
    ignored: list[tuple[str, int]] = []
    components, begun = 1, False
    for number, line in enumerate(text.splitlines(), 1):
        match = _DIRECTIVE.match(line)
        if match is None:
            begun = begun or bool(line.strip() and not line.lstrip().startswith("#"))
        elif begun:
            ignored.append((line.strip(), number))
        elif _HETJOB.match(line):
            components += 1
        else:
            try:
                words = shlex.split(match[1], comments=True)
            except ValueError:
                words = match[1].split()
            directives += [(name, value, number) for name, value in parse_options(words)[0]]
    return directives, ignored, components


def parse_options(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """(options by their long names, the words after them)."""
    found: list[tuple[str, str]] = []
    rest = list(words)
    while rest and (rest[0].startswith("-") or rest[0].startswith("$")):
        word = rest.pop(0)
        if word == "--":
            break
        if word.startswith("$"):
            found.append((word, ""))
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and name not in FLAGS and rest and not rest[0].startswith("-"):
                value = rest.pop(0)
            found.append((name, value))
        else:
            letter, value = word[1:2], word[2:].removeprefix("=")
            if letter in SHORT_FLAGS and letter not in SHORT:
                continue
            takes = letter not in OPTIONAL_VALUE and letter not in SHORT_FLAGS
            if not value and takes and rest:
                value = rest.pop(0)
            found.append((SHORT.get(letter, letter), value))
    return found, rest


def _sruns(command: Command) -> list[Srun]:
    """The srun of a command, also behind `exec ./batch.sh --`, `timeout 3h` or `nohup`."""
    for index, word in enumerate(command.words):
        if PurePath(word).name == "srun":
            options, rest = parse_options(command.words[index + 1 :])
            # Het jobs: `srun A : B` are two parts of one step.
            return [
                Srun(
                    line=command.line,
                    options=tuple(options),
                    words=tuple(rest),
                    environment=command.environment,
                )
            ]
    return []


def is_training(srun: Srun) -> bool:
    """Whether this srun may run for long. What can't be seen (a variable) may."""
    program = PurePath(srun.words[0]).name if srun.words else ""
    if program in ("bash", "sh") and "-c" in srun.words[:3]:
        inner, _ = parse_shell(" ".join(srun.words[srun.words.index("-c") + 1 :]))
        names = {PurePath(command.words[0]).name for command in inner}
        return not names or not names <= UTILITIES
    return program not in UTILITIES


def uses_launcher(script: Script) -> bool:
    """Whether torchrun, or what uses it, starts the ranks: it sets variables of its own, and ends all ranks
    of a node if one ends."""
    words = {PurePath(word).name for command in script.commands for word in command.words}
    return bool(words & LAUNCHERS)


def programs(script: Script) -> tuple[str, ...]:
    """Python files that the script starts, as they are named in it."""
    found: dict[str, None] = {}
    for command in script.commands:
        for word in command.words:
            for part in word.split() if " " in word else (word,):
                if part.endswith(".py") and not part.startswith("-"):
                    found[part] = None
    return tuple(found)


def is_on(script: Script, name: str, *, any_value: bool = False) -> bool:
    """Whether the script sets a variable of this name to something that switches on, or to anything."""
    value = script.variables.get(name)
    return value is not None and (any_value or value.lower() in ON)


def is_one_task(script: Script) -> bool:
    """Whether the job is known to have one task."""
    return script.components == 1 and has_one_task({name: value for name, value, _ in script.directives})


def has_one_task(options: Mapping[str, str]) -> bool:
    """The same of options by their long names."""
    return options.get("ntasks") == "1" or (
        options.get("nodes") in ("1", "1-1") and options.get("ntasks-per-node", options.get("ntasks")) == "1"
    )
