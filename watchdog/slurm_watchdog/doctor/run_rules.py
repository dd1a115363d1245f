"""What a batch script with `slurm-watchdog run` in it lacks. Pure; rules as in `script_rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePath

from slurm_watchdog.base.text import plural
from slurm_watchdog.doctor.finding import Advice, Level, Rule
from slurm_watchdog.doctor.job_facts import JobFacts
from slurm_watchdog.doctor.script import Script
from slurm_watchdog.doctor.shell import Command
from slurm_watchdog.knowledge.launch_options import ADDRESSES, MPI
from slurm_watchdog.model.comment_words import run_limits

LAUNCHERS = MPI | {"srun"}
FLAGS = frozenset({"observe", "no-page", "quiet", "alone"})
"""Options of `run` without a value."""
ADDRESS = re.compile(rf"--(?:{'|'.join(sorted(each.replace('_', '[_-]') for each in ADDRESSES))})(?:=(.*))?", re.DOTALL)
SHELL_LINE = re.compile(
    r"""^[^#\n]{0,500}\bslurm-watchdog\s+run\b(?:\\\n|[^\n]){0,2000}?"""
    r'''\b(?:ba|da|z|k)?sh\s+(?:-\S+\s+){0,9}?-[a-zA-Z]*c\s+"((?:[^"\\]|\\.)*)"''',
    re.MULTILINE | re.DOTALL,
)
"""Of `run` a line for a shell that stands in double quotes: what the script's own shell fills in first."""
FILLED_IN = re.compile(r"(?<!\\)\$\{?(SLURM_(?:N\w+|PROCID|LOCALID|JOB_NODELIST|JOB_NUM_NODES)|MASTER_ADDR)\b")
"""Variables that are different on other nodes, or in each task. sbatch(1), srun(1): OUTPUT ENVIRONMENT VARIABLES."""
HOSTNAME_IP = re.compile(r"^[^#\n]*\bhostname\s+(?:-[a-zA-Z]*[iI]|--(?:all-)?ip-address(?:es)?)\b.*$", re.MULTILINE)
HERE = re.compile(r"env://|file:|(?:[a-z]+://)?(?:localhost|127\.[\d.]+|::1|0\.0\.0\.0)")


def _options(command: Command) -> dict[str, str] | None:
    """Options of `run`; None: the command is none."""
    words = list(command.words)
    start = next((i for i, word in enumerate(words) if PurePath(word).name == "slurm-watchdog"), None)
    if start is None or words[start + 1 : start + 2] != ["run"]:
        return None
    found: dict[str, str] = {}
    rest = words[start + 2 :]
    while rest and rest[0].startswith("--") and rest[0] != "--":
        name, equals, value = rest.pop(0)[2:].partition("=")
        if not equals and name not in FLAGS and rest:
            value = rest.pop(0)
        found[name] = value
    return found


def _runs(script: Script) -> Iterator[tuple[Command, dict[str, str]]]:
    for command in script.commands:
        options = _options(command)
        if options is not None:
            yield command, options


def _spare_count(facts: JobFacts, command: Command, options: dict[str, str]) -> int:
    """Spare nodes that this `run` wants, by its option, its environment or the job's comment; 0 as well where what is
    written there is no number."""
    said = options.get("spares", "") or dict(command.environment).get("SLURM_WATCHDOG_SPARES", "")
    said = said or facts.script.variables.get("SLURM_WATCHDOG_SPARES", "")
    if not said:
        with suppress(ValueError):
            said = str(run_limits(facts.comment or facts.script.directive("comment") or "").get("spares", ""))
    return int(said) if said.isascii() and said.isdecimal() else 0


def _nodes(script: Script) -> int | None:
    """Of the job, where the script says one number."""
    text = script.directive("nodes") or ""
    low, _, high = text.partition("-")
    return int(low) if low.isdecimal() and high in ("", low) else None


def _no_kill(facts: JobFacts) -> Iterator[Advice]:
    script = facts.script
    if script.directive("no-kill") is not None or _nodes(script) == 1:
        return
    for command, options in _runs(script):
        if _nodes(script) is not None or _spare_count(facts, command, options):
            yield Advice(
                rule="run_no_kill", level=Level.WARNING, where=script.path,
                evidence=f"line {command.line}: slurm-watchdog run, and no --no-kill",
                sentence="A node that dies ends the job: Slurm requeues it, and no spare takes its place.",
                add="#SBATCH --no-kill",
            )  # fmt: skip
            return


def _master_addr(facts: JobFacts) -> Iterator[Advice]:
    """A host that is written down stays rank 0's, also on a start without it."""
    script = facts.script
    if not any(True for _ in _runs(script)):
        return
    for name, value in _addresses(script):
        if value and not re.search(r"[$`(]", value) and not HERE.match(value):
            yield Advice(
                rule="run_master_addr", level=Level.WARNING, where=script.path, evidence=f"{name}={value}"[:100],
                sentence="The host of rank 0 is written down: a restart without that node waits for it in vain.",
                add='export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            )  # fmt: skip
            return


def _addresses(script: Script) -> Iterator[tuple[str, str]]:
    yield "MASTER_ADDR", script.variables.get("MASTER_ADDR", "")
    for command in script.commands:
        yield from ((name, value) for name, value in command.environment if name == "MASTER_ADDR")
        for index, word in enumerate(command.words):
            match = ADDRESS.fullmatch(word)
            if match is not None:
                following = command.words[index + 1] if index + 1 < len(command.words) else ""
                yield word.partition("=")[0], match[1] if match[1] is not None else following


def _quotes(facts: JobFacts) -> Iterator[Advice]:
    """What the script's own shell has filled in is what it was on all nodes of the job, in each task the same."""
    for line in SHELL_LINE.finditer(facts.script.text):
        if (name := FILLED_IN.search(line[1])) is not None:
            number = facts.script.text.count("\n", 0, line.start(1) + name.start()) + 1
            yield Advice(
                rule="run_quotes", level=Level.WARNING, where=f"{facts.script.path}:{number}",
                evidence=f'{name[0]} in double quotes: bash -c "{line[1].strip()}"'[:100],
                sentence=f"The script's own shell fills in ${name[1]}, once for all tasks: on other nodes it stays "
                "as it was, unless it is the value of an option that `run` knows.",
                add=f"bash -c '...' in single quotes: each task fills in ${name[1]} by itself",
            )  # fmt: skip
            return


def _hostname_ip(facts: JobFacts) -> Iterator[Advice]:
    """It says all addresses of this node, or the one that its own /etc/hosts has."""
    script = facts.script
    found = HOSTNAME_IP.search(script.text)
    if found is None or not any(True for _ in _runs(script)):
        return
    yield Advice(
        rule="run_hostname_ip", level=Level.HINT, where=script.path, evidence=found[0].strip()[:100],
        sentence="The address may be one that other nodes do not reach (a container bridge, 127.0.1.1), and a restart "
        "without this node follows it only where the new first node's name is resolved; a name of a node always.",
        add='export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    )  # fmt: skip


def _spares(facts: JobFacts) -> Iterator[Advice]:
    have = _nodes(facts.script)
    for command, options in _runs(facts.script):
        spares, count = _spare_count(facts, command, options), options.get("nodes", "1")
        if have is None or not count.isdecimal() or int(count) + spares <= have:
            continue
        yield Advice(
            rule="run_spares", level=Level.WARNING, where=f"{facts.script.path}:{command.line}",
            evidence=f"--nodes={have} of the job; run wants {count} and {plural(spares, 'spare')}",
            sentence="The job has too few nodes for its spares: `run` refuses to start the command.",
            add=f"#SBATCH --nodes={int(count) + spares}",
        )  # fmt: skip


def _heterogeneous(facts: JobFacts) -> Iterator[Advice]:
    for command, _ in _runs(facts.script):
        if facts.script.components > 1:
            yield Advice(
                rule="run_heterogeneous", level=Level.WARNING, where=f"{facts.script.path}:{command.line}",
                evidence=f"{facts.script.components} components",
                sentence="`run` refuses a heterogeneous job: it cannot tell which component the command is for.",
                add="start the command without `slurm-watchdog run`; the watchdog requeues the job as before",
            )  # fmt: skip


def _in_step(facts: JobFacts) -> Iterator[Advice]:
    """`srun slurm-watchdog run …`: the wrong way round."""
    for command, _ in _runs(facts.script):
        names = [PurePath(word).name for word in command.words]
        launcher = next((name for name in names[: names.index("slurm-watchdog")] if name in LAUNCHERS), None)
        if launcher is not None:
            yield Advice(
                rule="run_in_step", level=Level.WARNING, where=f"{facts.script.path}:{command.line}",
                evidence=f"{launcher} … slurm-watchdog run",
                sentence="Each task has a watchdog of its own, which sees its own node alone and restarts its own "
                "command alone: the site's watchdog cannot restart the job in its allocation.",
                add=f"slurm-watchdog run -- {launcher} …",
            )  # fmt: skip


def _srun_path(facts: JobFacts) -> Iterator[Advice]:
    for command, _ in _runs(facts.script):
        names = [PurePath(word).name for word in command.words]
        behind = command.words[names.index("slurm-watchdog") :]
        path = next((word for word in behind if "/" in word and PurePath(word).name == "srun"), None)
        if path is not None and _nodes(facts.script) != 1:
            yield Advice(
                rule="run_srun_path", level=Level.WARNING, where=f"{facts.script.path}:{command.line}",
                evidence=path[:100],
                sentence="An srun that is called by its path is not put onto the nodes of a start: a restart without a "
                "node runs on it again.",
                add="srun, by its name alone",
            )  # fmt: skip


RUN_RULES: tuple[Rule[JobFacts], ...] = (
    _no_kill, _master_addr, _quotes, _hostname_ip, _spares, _heterogeneous, _in_step, _srun_path,
)  # fmt: skip
