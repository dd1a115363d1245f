"""What a batch script with `slurm-watchdog run` in it lacks. Pure; rules as in `script_rules`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from slurm_watchdog.doctor.finding import Advice, Level, Rule
from slurm_watchdog.doctor.job_facts import JobFacts
from slurm_watchdog.doctor.script import Script
from slurm_watchdog.doctor.shell import Command

FLAGS = frozenset({"observe", "no-page", "quiet", "alone"})
"""Options of `run` without a value."""
ADDRESS = re.compile(r"--(?:master[_-]addr|rdzv[_-]endpoint|main[_-]process[_-]ip)(?:=(.*))?", re.DOTALL)
HERE = re.compile(r"localhost|127\.[\d.]+|::1|0\.0\.0\.0")


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
        if _nodes(script) is not None or options.get("spares", "0") != "0":
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


def _spares(facts: JobFacts) -> Iterator[Advice]:
    have = _nodes(facts.script)
    for command, options in _runs(facts.script):
        spares, count = options.get("spares", "0"), options.get("nodes", "1")
        if have is None or not spares.isdecimal() or not count.isdecimal() or int(count) + int(spares) <= have:
            continue
        yield Advice(
            rule="run_spares", level=Level.WARNING, where=f"{facts.script.path}:{command.line}",
            evidence=f"--nodes={have} of the job, and run {' '.join(f'--{k}={v}' for k, v in options.items())}"[:100],
            sentence="The job has too few nodes for its spares: `run` refuses to start the command.",
            add=f"#SBATCH --nodes={int(count) + int(spares)}",
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


RUN_RULES: tuple[Rule[JobFacts], ...] = (_no_kill, _master_addr, _spares, _heterogeneous)
