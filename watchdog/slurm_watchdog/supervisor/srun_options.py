"""An srun of the command, put onto the nodes of the present start. Pure.

Standard library only, but for a node list: see `plan`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
)
from slurm_watchdog.supervisor.plan import Plan, file_named

_ALONE = FLAGS | OPTIONAL | OF_PYXIS
_KNOWN = _ALONE | PLACING


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


class Hosts(NamedTuple):
    """A file with the node of each task, on the nodes of this start."""

    path: str
    before: int  # Tasks in the file that srun was called with.
    nodes: tuple[str, ...]  # Of each task.


class _Unmet(Exception):
    """A wish that this start cannot fulfil; its text says which."""


def parse(arguments: Sequence[str]) -> tuple[list[Option], tuple[str, ...]]:
    """(srun's options, what it starts with that one's arguments)."""
    found: list[Option] = []
    index = 0
    while index < len(arguments) and arguments[index].startswith("-") and arguments[index] != "-":
        word = arguments[index]
        following = arguments[index + 1] if index + 1 < len(arguments) else None
        index += 1
        if word == "--":
            break
        options, used = _long(word, following) if word.startswith("--") else _letters(word, following)
        found += options
        index += used
    return found, tuple(arguments[index:])


def _long(word: str, following: str | None) -> tuple[list[Option], int]:
    name, equals, value = word[2:].partition("=")
    if name not in BEGIN_A_FLAG:
        meant = [each for each in _KNOWN if len(name) > 3 and each.startswith(name)]
        name = name if name in meant or len(meant) != 1 else meant[0]
    if equals:
        return [Option(name, value, (word,))], 0
    if name in _ALONE or following is None:
        return [Option(name, None, (word,))], 0
    return [Option(name, following, (word, following))], 1


def _letters(word: str, following: str | None) -> tuple[list[Option], int]:
    """`-N4`, `-N 4`, or several flags in one word with such an option at its end."""
    found: list[Option] = []
    for position, letter in enumerate(word[1:], 2):
        name, rest = LETTERS.get(letter, letter), word[position:]
        if name in OPTIONAL or name not in _ALONE:
            if rest or name in OPTIONAL or following is None:
                return [*found, Option(name, rest or None, (f"-{letter}{rest}",))], 0
            return [*found, Option(name, following, (f"-{letter}", following))], 1
        found.append(Option(name, None, (f"-{letter}",)))
    return found, 0


def rewrite(
    arguments: Sequence[str], plan: Plan, busy: Collection[str] = (), environ: Mapping[str, str] = {},
    hosts: Hosts | None = None,
) -> Rewritten:  # fmt: skip
    """The arguments by which srun starts the same on the nodes of `plan`; unchanged where that cannot be.

    `busy`: nodes of the command's steps that run. Of several small steps side by side each gets nodes of its own, as
    Slurm would give them; beside --exclude it takes the first nodes for all, and they wait for each other (22.05).
    `environ`: of the call. `hosts`: what its file of nodes has become.
    """
    options, command = parse(arguments)
    given = {option.name: option.value for option in options}
    if not command or given.keys() & NO_LAUNCH or given.get("jobid", plan.job_id) != plan.job_id:
        return Rewritten(tuple(arguments))
    try:
        if _elsewhere(given, command, plan):
            placed: dict[str, str | None] = {}
        elif file_named(given, environ):
            placed = _by_file(given, plan, hosts)
        else:
            placed = _place(given, plan, busy, environ)
    except _Unmet as wish:
        return Rewritten(tuple(arguments), str(wish))
    kept = [word for option in options if option.name not in placed for word in option.words]
    added = [f"--{name}={value}" if value else f"--{name}" for name, value in placed.items() if value is not None]
    if "no-kill" not in given:
        added.append("--no-kill")
    if plan.overlap and not given.keys() & {"overlap", "exclusive"}:
        added.append("--overlap")
    separator = ("--",) if "--" in arguments[: len(arguments) - len(command)] else ()
    listed = placed.get("nodelist")
    nodes = plan.nodes if "nodes" in placed else tuple(listed.split(",")) if listed else ()
    nodes = nodes if hosts is None else hosts.nodes
    return Rewritten((*added, *kept, *separator, *command), "", nodes)


def _elsewhere(given: dict[str, str | None], command: tuple[str, ...], plan: Plan) -> bool:
    """Whether there is nothing to place. Raises _Unmet where there is, in a way that is not known here."""
    if not plan.left_out:
        return True
    if other := sorted(given.keys() & OTHER_PLACING):
        raise _Unmet(f"--{other[0]} already places the step")
    if ":" in command:
        raise _Unmet("it has several parts (`:`)")
    return False


def _place(
    given: dict[str, str | None], plan: Plan, busy: Collection[str], environ: Mapping[str, str]
) -> dict[str, str | None]:
    """Option to its new value; the old ones of that name go. None: it only goes."""
    if (given.get("distribution") or environ.get("SLURM_DISTRIBUTION", "")).startswith("arbitrary"):
        raise _Unmet("--distribution=arbitrary places each task by a list")
    have, total = len(plan.nodes), len(plan.nodes) + len(plan.left_out)
    placed: dict[str, str | None] = {"exclude": _excluded(given.get("exclude"), plan)}
    listed = _listed(given.get("nodelist"), plan)
    if listed is not None:
        placed["nodelist"] = listed
    ntasks, few = _number(given.get("ntasks")), 0
    if given.get("nodes") is not None:
        low, high = _range(given["nodes"] or "")
        if (low, high) in ((total, total), (have, have)):
            placed["nodes"] = str(have)
        elif low > have:
            raise _Unmet(f"--nodes={given['nodes']}, and this start has {have}")
        elif high > have:
            placed["nodes"] = f"{low}-{have}"
        else:
            few = low if low == high else 0
    elif "nodelist" not in given:
        if "ntasks" not in given or ntasks in (plan.tasks, plan.all_tasks, total):
            placed["nodes"] = str(have)
        else:
            few = ntasks or 0  # srun takes no more nodes than there are tasks
    if not few and plan.all_tasks and ntasks == plan.all_tasks:
        placed["ntasks"] = str(plan.tasks)
    elif not few and ntasks == total:
        placed["ntasks"] = str(have)  # one task a node: a launcher
    gpus = None if few else _gpus(given.get("gpus"), plan)
    if gpus is not None:
        placed["gpus"] = gpus
    free = [node for node in plan.nodes if node not in busy]
    if 0 < few <= len(free) and few < have and "nodelist" not in given:
        placed["nodelist"] = ",".join(free[:few])
    return placed


def _by_file(given: dict[str, str | None], plan: Plan, hosts: Hosts | None) -> dict[str, str | None]:
    """As _place, where the file says it."""
    if hosts is None or not hosts.nodes:
        raise _Unmet("its file of nodes cannot be read, has more in it than a name a line, or none of this start")
    name = next((name for name in ("nodefile", "nodelist") if given.get(name)), None)
    placed: dict[str, str | None] = {} if name is None else {name: hosts.path}
    if _number(given.get("nodes")) == len(plan.nodes) + len(plan.left_out):
        placed["nodes"] = str(len(plan.nodes))
    if _number(given.get("ntasks")) == hosts.before:
        placed["ntasks"] = str(len(hosts.nodes))
    return placed


def _gpus(given: str | None, plan: Plan) -> str | None:
    """`40`, `a100:40` or `a100:8,h100:32`, where it is the whole job's, for the nodes of this start; None: it stays."""
    parts = [part.rpartition(":") for part in (given or "").split(",")]
    numbers = [_number(number) or 0 for _, _, number in parts]
    total = plan.all_gpus
    if not total or sum(numbers) != total or any(number * plan.gpus % total for number in numbers):
        return None
    return ",".join(
        f"{kind}{colon}{number * plan.gpus // total}" for (kind, colon, _), number in zip(parts, numbers, strict=True)
    )


def _excluded(given: str | None, plan: Plan) -> str:
    if given and "/" in given:
        raise _Unmet("--exclude names a file")
    return ",".join([*([given] if given else []), *plan.left_out])


def _listed(given: str | None, plan: Plan) -> str | None:
    """What is left of a list of nodes; None where all of it is."""
    if not given:
        return None
    from slurm_watchdog.slurm.node_names import expand_nodes

    try:
        wanted = expand_nodes(given)
    except ValueError as error:
        raise _Unmet(f"--nodelist: {error}") from error
    left = [node for node in wanted if node not in plan.left_out]
    if not left:
        raise _Unmet(f"--nodelist={given}, and none of these is used by this start")
    if len(left) == len(wanted):
        return None
    # The whole allocation, which a script has kept: the nodes of this start take its place.
    return ",".join(plan.nodes if set(plan.nodes) <= set(wanted) or len(wanted) >= len(plan.nodes) else left)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _range(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    first, last = _number(low), _number(high if dash else low)
    if first is None or last is None:
        raise _Unmet(f"--nodes={text} is not a number here")
    return first, last
