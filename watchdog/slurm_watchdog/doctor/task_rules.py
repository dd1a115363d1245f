"""Numbers of tasks, nodes and GPUs that contradict each other: a trainer waits for ranks that Slurm does not start.
Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from slurm_watchdog.base.text import plural
from slurm_watchdog.doctor.finding import Advice, Level, Rule
from slurm_watchdog.doctor.job_facts import JobFacts
from slurm_watchdog.doctor.script import LAUNCHERS, Srun, is_training

_GPUS = re.compile(r"(?:^|,)(?:gres[/:])?gpu(?::[\w.-]+)?[:=](\d{1,3})(?=,|$|\()")
_PLAIN = re.compile(r"(?:[\w.-]+:)?(\d{1,5})")


def _number(options: Mapping[str, str], name: str) -> int | None:
    match = _PLAIN.fullmatch(options.get(name, ""))
    return int(match[1]) if match else None


def _nodes(options: Mapping[str, str]) -> int | None:
    """Where their number is exact."""
    least, _, most = options.get("nodes", "").partition("-")
    return int(least) if least.isdecimal() and most in ("", least) else None


def _gpus_of_node(options: Mapping[str, str]) -> int | None:
    match = _GPUS.search(options.get("gres", ""))
    if match or "gpus-per-node" in options:
        return int(match[1]) if match else _number(options, "gpus-per-node")
    total, nodes = _number(options, "gpus"), _nodes(options)
    return total // nodes if total is not None and nodes else None


def _tasks(facts: JobFacts) -> Iterator[Advice]:
    """Of each srun, for whose options override those of the script."""
    script = facts.script
    if script.components != 1:
        return
    given = {name: value for name, value, _ in script.directives}
    for srun in [each for each in script.sruns if is_training(each) and not each.unknown]:
        options = given | dict(srun.options)
        where = f"{script.path}:{srun.line}"
        tasks, per_node, nodes = _number(options, "ntasks"), _number(options, "ntasks-per-node"), _nodes(options)
        if tasks is not None and per_node is not None and nodes != 0:
            asked = per_node * (nodes or 1)
            if tasks < asked or (nodes is not None and tasks > asked):
                yield _contradiction(tasks, per_node, nodes, _gpus_of_node(options), where)
                return
        a_node = per_node if per_node is not None else -(-tasks // nodes) if tasks and nodes else None
        if a_node is not None:
            yield from _beside_gpus(a_node, _gpus_of_node(options), srun, where)


def _contradiction(tasks: int, per_node: int, nodes: int | None, gpus: int | None, where: str) -> Advice:
    asked = per_node * (nodes or 1)
    beside = f"--ntasks-per-node={per_node}"
    beside += f" on {nodes} nodes" if nodes is not None and nodes > 1 else ""
    beside += f" and {gpus} GPUs a node" if gpus is not None and gpus > 1 else ""
    effect = (
        f"Slurm starts {plural(tasks, 'task')}, and a trainer that expects {asked} waits for the others indefinitely."
        if tasks < asked
        else f"Slurm refuses the job, or starts more than {per_node} on a node."
    )
    return Advice(
        rule="tasks", level=Level.WARNING, where=where, evidence=f"--ntasks={tasks} and {beside}",
        sentence=f"--ntasks={tasks} contradicts {beside}: {effect}",
        add=f"#SBATCH --ntasks-per-node={per_node}  # without --ntasks",
    )  # fmt: skip


def _beside_gpus(a_node: int, gpus: int | None, srun: Srun, where: str) -> Iterator[Advice]:
    launcher = next((name for word in srun.words if (name := PurePath(word).name) in LAUNCHERS), None)
    shown = f"a node: srun {' '.join(srun.words[:3])[:80]}"
    if launcher is not None and a_node > 1:
        yield Advice(
            rule="tasks", level=Level.HINT, where=where, evidence=f"{a_node} tasks {shown}",
            sentence=f"srun starts {launcher} {a_node} times on each node, and each of them starts the node's ranks.",
            add="#SBATCH --ntasks-per-node=1",
        )  # fmt: skip
    elif launcher is None and gpus is not None and gpus != a_node and gpus > 0 and _is_python(srun):
        idle = plural(gpus - a_node, "GPU")
        effect = f"{idle} of each node may stay idle" if a_node < gpus else "several share a GPU"
        yield Advice(
            rule="tasks", level=Level.HINT, where=where, evidence=f"{a_node} tasks and {gpus} GPUs {shown}",
            sentence=f"{plural(a_node, 'task')} on a node of {plural(gpus, 'GPU')}: where a rank uses one, {effect}.",
            add=f"#SBATCH --ntasks-per-node={gpus}",
        )  # fmt: skip


def _is_python(srun: Srun) -> bool:
    return any(re.fullmatch(r"python[\d.]*", PurePath(word).name) for word in srun.words[:4])


def _without_srun(facts: JobFacts) -> Iterator[Advice]:
    """Only srun and MPI start a task more than once."""
    script = facts.script
    given = {name: value for name, value, _ in script.directives}
    tasks = _number(given, "ntasks") or (_number(given, "ntasks-per-node") or 1) * (_nodes(given) or 1)
    started = {PurePath(word).name for command in script.commands for word in command.words}
    if tasks < 2 or script.sources or script.sruns or started & (_STARTERS | LAUNCHERS):
        return
    for command in script.commands:
        if re.fullmatch(r"python[\d.]*", PurePath(command.words[0]).name) and len(command.words) > 1:
            yield Advice(
                rule="tasks", level=Level.HINT, where=f"{script.path}:{command.line}",
                evidence=" ".join(command.words[:3])[:80],
                sentence=f"The script runs this once, on the first node: {tasks} tasks are asked for, and only srun "
                "starts them.",
                add=f"srun {' '.join(command.words[:2])[:60]} …",
            )  # fmt: skip
            return


_STARTERS = frozenset(
    {"srun", "mpirun", "mpiexec", "prun", "ibrun", "aprun", "jsrun", "horovodrun", "ray", "pdsh", "clush"}
)
TASK_RULES: tuple[Rule[JobFacts], ...] = (_tasks, _without_srun)
