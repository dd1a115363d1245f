"""The allocation as the script's environment has it, which nodes of it the next start uses, and the environment and
arguments of the command there. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from ipaddress import ip_address
from itertools import compress, groupby
from pathlib import PurePath

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.launch_options import (
    ADDRESSES,
    MPI,
    NODES,
    PROCESSES,
    SHELLS,
    VARIABLE,
    VARIABLES,
    name_of,
)
from slurm_watchdog.knowledge.srun_options import gpu_number, scaled_gpus
from slurm_watchdog.slurm.node_names import MAX_NODES, expand_nodes, fold_nodes

_NAMES = "|".join(sorted(each.replace("_", "[_-]") for each in NODES | PROCESSES | ADDRESSES))
_NODES = "|".join(sorted(each.replace("_", "[_-]") for each in NODES))
_LEAST = re.compile(rf"(?:^|[\s\"'])--?(?:{_NODES})(?:=|\s+)[\"']?(\d{{1,6}}):(\d{{1,6}})\b")
_IN_SHELL = re.compile(
    rf"(?<![\w.+$-])((?:--?(?:[\w-]+\.)*(?:{_NAMES})(?:=|\s+)|\+{{0,2}}(?:[\w-]+\.)*(?:{_NAMES})=)[\"']?)"
    r"([^\s\"';&|()<>,]+)",
    re.IGNORECASE,
)
"""An option in a line for a shell: (its name and what joins it to its value, the value)."""
_SUFFIX = re.compile(r"(?:[-._](?!\d)|ib|hsn)[\w.-]*", re.IGNORECASE)
"""Of the name that a node has in another network: n1-ib0, n1.cluster.example, n1ib0. With a number next, as gpu-1-2
beside gpu-1, it is the name of another node."""


_REPEATED = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?")


class Allocation(Struct):
    """The job that this process is in."""

    job_id: str
    restarts: int = 0
    nodes: tuple[str, ...]  # In Slurm's order, which is that of the ranks.
    batch_host: str = ""  # Where the batch script runs; empty in an allocation's shell, which may be anywhere.
    tasks: tuple[int, ...] = ()  # Of each node (SLURM_TASKS_PER_NODE); empty: not known.
    cpus: tuple[int, ...] = ()  # Of each node (SLURM_JOB_CPUS_PER_NODE); empty: not known.
    gpus: int = 0  # Of all nodes together; 0: none, or not known.
    end_at: float | None = None  # When its time is over, since the epoch; None: not known.


FIRST_OF_SLURMS_OWN = 0xFFFFFFF0
"""Step ids from here on are the batch script's and the like (slurm.h: SLURM_MAX_NORMAL_STEP_ID)."""


def is_in_job(environ: Mapping[str, str]) -> bool:
    """Whether this is a batch script, or an allocation's shell; a task of a step is none, for there are many."""
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) < FIRST_OF_SLURMS_OWN:
        return False
    return environ.get("SLURM_JOB_ID", "").isdecimal() and bool(environ.get("SLURM_JOB_NODELIST"))


def read_allocation(environ: Mapping[str, str]) -> Allocation:
    """The job of this environment. Raises ValueError with a sentence where `run` cannot supervise it."""
    if environ.get("SLURM_HET_SIZE") or environ.get("SLURM_PACK_SIZE"):
        raise ValueError(
            "this is a heterogeneous job: `run` starts a command on the nodes of one component, and cannot tell "
            "which; start the command without `run`, the watchdog requeues it as before"
        )
    if not is_in_job(environ):
        raise ValueError("SLURM_JOB_ID and SLURM_JOB_NODELIST are not set: this is not a batch script")
    nodes = expand_nodes(environ["SLURM_JOB_NODELIST"])
    if not nodes:
        raise ValueError("SLURM_JOB_NODELIST names no node")
    end, restarts = environ.get("SLURM_JOB_END_TIME", ""), environ.get("SLURM_RESTART_COUNT", "")
    tasks = _of_each(environ.get("SLURM_TASKS_PER_NODE", ""), len(nodes))
    return Allocation(
        job_id=environ["SLURM_JOB_ID"],
        restarts=int(restarts) if restarts.isdecimal() else 0,
        nodes=nodes,
        batch_host=environ.get("SLURMD_NODENAME", ""),
        tasks=tasks,
        cpus=_of_each(environ.get("SLURM_JOB_CPUS_PER_NODE", ""), len(nodes)),
        gpus=_all_gpus(environ, len(nodes), alike="SLURM_GPUS_PER_TASK" not in environ or len(set(tasks)) == 1),
        end_at=float(end) if end.isdecimal() else None,
    )


def node_count(wanted_nodes: int | None, spares: int, allocation: Allocation) -> int:
    """Nodes of a start. Raises ValueError with a sentence."""
    have = len(allocation.nodes)
    count = have - spares if wanted_nodes is None else wanted_nodes
    if count < 1 or count + spares > have:
        asked = f"--nodes={wanted_nodes} " if wanted_nodes is not None else ""
        raise ValueError(f"{asked}--spares={spares} takes more than the {have} nodes of this job: sbatch --nodes=N+S")
    return count


def _all_gpus(environ: Mapping[str, str], nodes: int, *, alike: bool) -> int:
    """By --gpus, --gpus-per-node, or what this node has where all nodes are `alike` (sbatch(1), OUTPUT ENVIRONMENT)."""
    if "SLURM_GPUS" in environ:
        return gpu_number(environ["SLURM_GPUS"])
    each = environ.get("SLURM_GPUS_PER_NODE") or (environ.get("SLURM_GPUS_ON_NODE", "") if alike else "")
    return gpu_number(each) * nodes


def _of_each(text: str, count: int) -> tuple[int, ...]:
    """`2(x3),1` is 2, 2, 2, 1; nothing where it is not a number for each of `count` nodes."""
    found: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part)
        if match is None or int(match[2] or 1) > MAX_NODES:
            return ()
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found) if len(found) == count else ()


def repeated(numbers: tuple[int, ...]) -> str:
    """2, 2, 2, 1 as Slurm writes it: `2(x3),1`."""
    counts = [(number, len(list(group))) for number, group in groupby(numbers)]
    return ",".join(f"{number}(x{count})" if count > 1 else str(number) for number, count in counts)


# ------------------------------------------------------------------------------------ one start


class NoSpare(Exception):
    """Too few nodes are left; the text is a sentence."""


class Placement(Struct):
    """Nodes of one start, and the others of the allocation; each in the allocation's order."""

    nodes: tuple[str, ...]
    spares: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()

    @property
    def left_out(self) -> tuple[str, ...]:
        """Nodes that the start does not use."""
        return (*self.avoided, *self.spares)


def choose(
    allocation: Allocation, count: int, *, avoided: Collection[str] = (), suspects: Collection[str] = (),
    previous: Sequence[str] = (),
) -> Placement:  # fmt: skip
    """`count` nodes: none of `avoided`, of `suspects` only where nothing else is left, and as many of `previous` as can
    stay. Raises NoSpare."""
    usable = [node for node in allocation.nodes if node not in avoided]
    if len(usable) < count:
        raise NoSpare(
            f"no spare is left: {count} nodes are needed, and of the {len(allocation.nodes)} of the job "
            f"{len(usable)} may be used"
        )
    # Sorting keeps the order of the allocation among equals.
    best = sorted(usable, key=lambda node: (node in suspects, bool(previous) and node not in previous))
    chosen = frozenset(best[:count])
    return Placement(
        nodes=tuple(node for node in allocation.nodes if node in chosen),
        spares=tuple(node for node in usable if node not in chosen),
        avoided=tuple(node for node in allocation.nodes if node in avoided),
    )


def least_nodes(command: Sequence[str], count: int) -> int:
    """On how few nodes the command can run by its own words (torchrun's --nnodes=MIN:MAX), or `count`."""
    found = _LEAST.search(" ".join(command))
    return min(count, max(1, int(found[1]))) if found is not None and int(found[1]) < int(found[2]) else count


def task_count(allocation: Allocation, nodes: Collection[str]) -> int:
    """Tasks of the command on these nodes; 0 where the job has no such number."""
    return sum(number for node, number in zip(allocation.nodes, allocation.tasks, strict=False) if node in nodes)


def gpu_count(allocation: Allocation, nodes: Collection[str]) -> int:
    """GPUs of these nodes; 0 where it is not known that all nodes have the same number."""
    return allocation.gpus // len(allocation.nodes) * len(nodes) if allocation.gpus % len(allocation.nodes) == 0 else 0


def environment(
    allocation: Allocation, placement: Placement, environ: Mapping[str, str], first: Collection[str] = ()
) -> dict[str, str]:
    """The variables of `environ` that are different on these nodes, with their values there. `first`: IP addresses of
    the allocation's first node."""
    if placement.nodes == allocation.nodes:
        return {}
    nodes, count = fold_nodes(placement.nodes), str(len(placement.nodes))
    tasks, kept = str(task_count(allocation, placement.nodes)), [node in placement.nodes for node in allocation.nodes]
    values = {
        "SLURM_JOB_NODELIST": nodes, "SLURM_NODELIST": nodes, "SLURM_NNODES": count, "SLURM_JOB_NUM_NODES": count,
        "SLURM_TASKS_PER_NODE": repeated(tuple(compress(allocation.tasks, kept))),
        "SLURM_JOB_CPUS_PER_NODE": repeated(tuple(compress(allocation.cpus, kept))),
    }  # fmt: skip
    if allocation.tasks:
        values |= {"SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks}
    if "SLURM_GPUS" in environ:
        values["SLURM_GPUS"] = scaled_gpus(environ["SLURM_GPUS"], len(allocation.nodes), len(placement.nodes))
    changed = {name: value for name, value in values.items() if value and name in environ}
    for name, value in environ.items():
        if name.isupper():
            changed.setdefault(name, _value(name_of(name), value, allocation, placement, first))
    return {name: value for name, value in changed.items() if value != environ[name]}


def _address(text: str, allocation: Allocation, placement: Placement, first: Collection[str]) -> str:
    """`host`, `host:port` or a URL of rank 0, with the name of its new host where it meant a node of the allocation."""
    scheme, separator, rest = text.rpartition("://")
    place, slash, path = rest.partition("/")
    host, colon, port = place.rpartition(":") if place.count(":") == 1 or "]:" in place else (place, "", "")
    try:
        node, suffix = allocation.nodes[0] if str(ip_address(host.strip("[]"))) in first else None, ""
    except ValueError:
        node, suffix = _node_of(host, allocation)
    if node is None or node == placement.nodes[0] or (node != allocation.nodes[0] and node in placement.nodes):
        return text
    return f"{scheme}{separator}{placement.nodes[0]}{suffix}{colon}{port}{slash}{path}"


def _node_of(host: str, allocation: Allocation) -> tuple[str | None, str]:
    """(node of this name, what follows it there: `-ib0`, `.cluster.example`)."""
    begins = [
        node for node in allocation.nodes
        if host == node or (host.startswith(node) and _SUFFIX.fullmatch(host, len(node)))
    ]  # fmt: skip
    node = max(begins, key=len, default=None)
    return node, host[len(node or "") :]


def arguments(
    command: Sequence[str], allocation: Allocation, placement: Placement, first: Collection[str] = ()
) -> tuple[str, ...]:
    """The command's words on these nodes: rank 0's host in options that held a node of the allocation and nothing else,
    and the numbers of nodes and processes in options that held the allocation's. So too in the line for `bash -c`."""
    if placement.nodes == allocation.nodes:
        return tuple(command)

    def value(name: str, given: str) -> str:
        return _value(name_of(name), given, allocation, placement, first)

    found: list[str] = []
    for index, word in enumerate(command):
        name, equals, given = word.partition("=")
        option = command[index - 1] if index else ""
        holders = (name if equals else "", option)
        if _is_shell_line(command, index) or any(each[:1] == "-" and name_of(each) in VARIABLES for each in holders):
            word = _IN_SHELL.sub(lambda part: part[1] + value(part[1].rstrip("\"'= \t\n"), part[2]), word)
        elif equals and re.fullmatch(r"[\w.+-]+", name):
            word = f"{name}={value(name, given)}"
        elif option == "-n" and index > 1 and PurePath(command[index - 2]).name in MPI:
            word = value("np", word)
        elif option.startswith("-") or (index > 1 and command[index - 2] in VARIABLE):
            word = value(option, word)
        found.append(word)
    return tuple(found)


def _is_shell_line(command: Sequence[str], index: int) -> bool:
    """Whether this word is a line for a shell: `bash -c LINE`, `bash --login -xc LINE`."""
    before = index - 1
    if before < 1 or not re.fullmatch(r"-[a-zA-Z]*c", command[before]):
        return False
    while before > 0 and command[before].startswith("-"):
        before -= 1
    return PurePath(command[before]).name in SHELLS


def _value(name: str, given: str, allocation: Allocation, placement: Placement, first: Collection[str]) -> str:
    """What an option (by `name_of`) is on these nodes; as it was where it is none of ours, or says something else."""
    if name in ADDRESSES:
        return _address(given, allocation, placement, first)
    if name in NODES:
        total, have = len(allocation.nodes), len(placement.nodes)
        return {f"{total}": f"{have}", f"{total}:{total}": f"{have}:{have}"}.get(given, given)
    if name in PROCESSES:
        # A process a task, or one a GPU. Totals that are not known are 0.
        known = {str(gpu_count(allocation, allocation.nodes)): gpu_count(allocation, placement.nodes)}
        known |= {str(sum(allocation.tasks)): task_count(allocation, placement.nodes)}
        return str(known[given]) if given != "0" and given in known else given
    return given
