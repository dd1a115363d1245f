"""The `srun` that stands first in the command's PATH: it puts srun's options onto the nodes of the present start, and
becomes the real one. The standard library alone, but for a node list: it runs at every call."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from slurm_watchdog.knowledge.srun_options import (
    BEGIN_A_FLAG,
    FLAGS,
    LETTERS,
    NO_LAUNCH,
    OF_PYXIS,
    OPTIONAL,
    OTHER_PLACING,
    PLACING,
    gpu_number,
    scaled_gpus,
)

PLAN, CALLS, LOCK, NAME = "plan", "calls", "lock", "srun"
"""In its directory: the plan of the present start; a file for each call, called as its process; what calls hold while
they choose their nodes; itself."""
_ALONE = FLAGS | OPTIONAL | OF_PYXIS
_KNOWN = _ALONE | PLACING


class Plan(NamedTuple):
    """Written by the supervisor for each start, as JSON."""

    job_id: str
    srun: str  # Path of the real one.
    directory: str  # Of our own srun: taken out of PATH behind it.
    nodes: tuple[str, ...]  # Of this start, in the order of the allocation.
    left_out: tuple[str, ...]  # Nodes of the allocation that this start does not use: avoided ones, and spares.
    tasks: int  # Of the command on `nodes`; 0: the allocation has no number of tasks.
    all_tasks: int  # On all nodes of the allocation, as the script knows it.
    overlap: bool  # An older step is still there.
    all_gpus: int = 0  # Of all nodes of the allocation, as the script knows it; 0: not known.


class Option(NamedTuple):
    """One option as it was given."""

    name: str
    value: str | None
    words: tuple[str, ...]


class Rewritten(NamedTuple):
    """Arguments of srun."""

    arguments: tuple[str, ...]
    unmet: str = ""  # Why they are as they were, where a wish cannot be met here.
    nodes: tuple[str, ...] = ()  # Where the step goes; empty: not known.


class _Unmet(Exception):
    """A wish that this start cannot fulfil; its text says which."""


def own_program(module: str, function: str = "main") -> tuple[str, ...]:
    """What runs a function of a module beside this one, by an interpreter that ignores its environment and finds what
    this one has found."""
    paths = dict.fromkeys([str(Path(__file__).parents[2]), *(each for each in sys.path if each.startswith("/"))])
    program = (
        f"import sys; sys.path[:0] = {list(paths)!r}; from slurm_watchdog.supervisor.{module} import {function}; "
        f"{function}(*sys.argv[1:])"
    )
    return sys.executable, "-I", "-c", program


def program() -> str:
    """The file `srun`."""
    return f'#!/bin/sh\nexec {shlex.join(own_program("srun"))} "${{0%/*}}" "$@"\n'


def main(directory: str, *arguments: str) -> None:
    """Becomes the real srun. `directory`: that of ours."""
    place = Path(directory)
    try:
        fields = json.loads((place / PLAN).read_text())
        fields = {name: value for name, value in fields.items() if name in Plan._fields}  # 0.1 has more
        plan = Plan(**{**fields, "nodes": tuple(fields["nodes"]), "left_out": tuple(fields["left_out"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        sys.exit(f"slurm-watchdog: {directory}/{PLAN} cannot be read ({error}): take {directory} out of PATH")
    if os.environ.get("SLURM_JOB_ID", plan.job_id) == plan.job_id:
        try:
            rewritten = _rewrite_call(arguments, plan, place)
            arguments, why = rewritten.arguments, rewritten.unmet
        except OSError as error:
            why = str(error)
        if why:
            sys.stderr.write(f"slurm-watchdog: srun is called as it is written, for {why}\n")
    path = [each for each in os.environ.get("PATH", os.defpath).split(os.pathsep) if each != plan.directory]
    os.environ["PATH"] = os.pathsep.join(path)
    os.execv(plan.srun, ["srun", *arguments])  # noqa: S606 - what it was called for


def _rewrite_call(arguments: Sequence[str], plan: Plan, place: Path) -> Rewritten:
    """Leaves a file for this call, with its nodes in it."""
    calls = place / CALLS
    with (place / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two calls side by side take different nodes
        running = [call for call in calls.iterdir() if Path(f"/proc/{call.name}").exists()]
        busy = {node for call in running for node in call.read_text().split(",")}
        rewritten = rewrite(arguments, plan, busy, os.environ)
        (calls / str(os.getpid())).write_text(",".join(rewritten.nodes))
    return rewritten


# ------------------------------------------------------------------------------------ options


def parse(arguments: Sequence[str]) -> tuple[list[Option], tuple[str, ...]]:
    """(srun's options, what it starts with that one's arguments)."""
    found: list[Option] = []
    left = list(arguments)
    while left and left[0].startswith("-") and left[0] != "-":
        word = left.pop(0)
        if word == "--":
            break
        found += _long(word, left) if word.startswith("--") else _letters(word, left)
    return found, tuple(left)


def _long(word: str, left: list[str]) -> list[Option]:
    """Takes its value from `left` where that holds it."""
    name, equals, value = word[2:].partition("=")
    if name not in BEGIN_A_FLAG:
        meant = [each for each in _KNOWN if len(name) > 3 and each.startswith(name)]
        name = name if name in meant or len(meant) != 1 else meant[0]
    if equals:
        return [Option(name, value, (word,))]
    if name in _ALONE or not left:
        return [Option(name, None, (word,))]
    value = left.pop(0)
    return [Option(name, value, (word, value))]


def _letters(word: str, left: list[str]) -> list[Option]:
    """`-N4`, `-N 4`, or several flags in one word with such an option at its end."""
    found: list[Option] = []
    for position, letter in enumerate(word[1:], 2):
        name, rest = LETTERS.get(letter, letter), word[position:]
        if name in OPTIONAL or name not in _ALONE:
            if rest or name in OPTIONAL or not left:
                return [*found, Option(name, rest or None, (f"-{letter}{rest}",))]
            value = left.pop(0)
            return [*found, Option(name, value, (f"-{letter}", value))]
        found.append(Option(name, None, (f"-{letter}",)))
    return found


def rewrite(
    arguments: Sequence[str], plan: Plan, busy: Collection[str] = (), environ: Mapping[str, str] = {}
) -> Rewritten:
    """The arguments by which srun starts the same on the nodes of `plan`; unchanged where that cannot be. `busy`: nodes
    of the command's steps that run. Of small steps side by side each gets nodes of its own: beside --exclude Slurm
    takes the first nodes for all, and they wait for each other (22.05)."""
    options, command = parse(arguments)
    given = {option.name: option.value for option in options}
    if not command or given.keys() & NO_LAUNCH or given.get("jobid", plan.job_id) != plan.job_id:
        return Rewritten(tuple(arguments))
    placed: dict[str, str | None] = {}
    try:
        if plan.left_out:
            if why := _other_placing(given, command, environ):
                raise _Unmet(why)
            placed = _place(given, plan, busy)
    except _Unmet as wish:
        return Rewritten(tuple(arguments), str(wish))
    kept = [word for option in options if option.name not in placed for word in option.words]
    added = [f"--{name}={value}" for name, value in placed.items()]
    if plan.overlap and not given.keys() & {"overlap", "exclusive"}:
        added.append("--overlap")
    separator = ("--",) if "--" in arguments[: len(arguments) - len(command)] else ()
    listed = placed.get("nodelist")
    nodes = plan.nodes if "nodes" in placed else tuple(listed.split(",")) if listed else ()
    return Rewritten((*added, *kept, *separator, *command), "", nodes)


def _other_placing(given: dict[str, str | None], command: Sequence[str], environ: Mapping[str, str]) -> str:
    """What places its tasks in a way of its own; empty: nothing."""
    listed = given.get("nodelist") or ""
    if other := sorted(given.keys() & OTHER_PLACING):
        return f"--{other[0]} already places the step"
    if ":" in command:
        return "it has several parts (`:`)"
    if (given.get("distribution") or environ.get("SLURM_DISTRIBUTION", "")).startswith("arbitrary"):
        return "--distribution=arbitrary places each task by a list"
    # As Slurm's src/srun/opt.c has it: the variable counts where no list is given, whatever the distribution.
    if "nodefile" in given or "/" in listed or (not listed and environ.get("SLURM_HOSTFILE")):
        return "a file of nodes places its tasks"
    return "--exclude names a file" if "/" in (given.get("exclude") or "") else ""


def _place(given: dict[str, str | None], plan: Plan, busy: Collection[str]) -> dict[str, str | None]:
    """Option to its new value; the old ones of that name go."""
    have, total = len(plan.nodes), len(plan.nodes) + len(plan.left_out)
    placed: dict[str, str | None] = {"exclude": ",".join(filter(None, [given.get("exclude"), *plan.left_out]))}
    if (listed := given.get("nodelist")) and (left := _listed(listed, plan)):
        placed["nodelist"] = left
    ntasks, few = _number(given.get("ntasks")), 0
    if (asked := given.get("nodes")) is not None:
        low, high = _range(asked)
        if (low, high) in ((total, total), (have, have)):
            placed["nodes"] = str(have)
        elif low > have:
            raise _Unmet(f"--nodes={asked}, and this start has {have}")
        elif high > have:
            placed["nodes"] = f"{low}-{have}"
        else:
            few = low if low == high else 0
    elif "nodelist" not in given:
        if "ntasks" not in given or ntasks in (plan.tasks, plan.all_tasks, total):
            placed["nodes"] = str(have)
        else:
            few = ntasks or 0  # srun takes no more nodes than there are tasks
    if not few:
        if plan.all_tasks and ntasks == plan.all_tasks:
            placed["ntasks"] = str(plan.tasks)
        elif ntasks == total:
            placed["ntasks"] = str(have)  # one task a node: a launcher
        gpus = given.get("gpus") or ""
        if plan.all_gpus and gpu_number(gpus) == plan.all_gpus and (fewer := scaled_gpus(gpus, total, have)):
            placed["gpus"] = fewer
    free = [node for node in plan.nodes if node not in busy]
    if 0 < few <= len(free) and few < have and "nodelist" not in given:
        placed["nodelist"] = ",".join(free[:few])
    return placed


def _listed(given: str, plan: Plan) -> str:
    """What is left of a list of nodes; empty where all of it is."""
    from slurm_watchdog.slurm.node_names import expand_nodes

    try:
        wanted = expand_nodes(given)
    except ValueError as error:
        raise _Unmet(f"--nodelist: {error}") from error
    left = [node for node in wanted if node not in plan.left_out]
    if not left:
        raise _Unmet(f"--nodelist={given}, and none of these is used by this start")
    if len(left) == len(wanted):
        return ""
    # The whole allocation, which a script has kept: the nodes of this start take its place.
    return ",".join(plan.nodes if set(plan.nodes) <= set(wanted) or len(wanted) >= len(plan.nodes) else left)


def _range(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    first, last = _number(low), _number(high if dash else low)
    if first is None or last is None:
        raise _Unmet(f"--nodes={text} is not a number here")
    return first, last


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
