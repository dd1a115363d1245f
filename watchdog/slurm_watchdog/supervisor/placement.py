"""Which nodes of the allocation the next start uses, and the environment and arguments of the command there. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.slurm.node_names import fold_nodes
from slurm_watchdog.supervisor.allocation import Allocation, repeated

ADDRESS_OPTIONS = frozenset({
    "master_addr", "master-addr", "rdzv_endpoint", "rdzv-endpoint", "main_process_ip", "main-process-ip",
})  # fmt: skip
"""Options whose value is the host of rank 0, with or without a port: torchrun, DeepSpeed, Accelerate."""


class NoSpare(Exception):
    """Too few nodes are left; the text is a sentence."""


class Placement(Struct, frozen=True, kw_only=True):
    """Nodes of one start, and the others of the allocation; each in the allocation's order."""

    nodes: tuple[str, ...]
    spares: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()

    @property
    def left_out(self) -> tuple[str, ...]:
        """Nodes that the start does not use."""
        return (*self.avoided, *self.spares)


def choose(
    allocation: Allocation,
    count: int,
    *,
    avoided: Collection[str] = (),
    suspects: Collection[str] = (),
    once: Collection[str] = (),
    previous: Sequence[str] = (),
) -> Placement:
    """`count` nodes: none of `avoided`, of `suspects` and then of `once` only where nothing else is left, and as many
    of `previous` as can stay. Raises NoSpare."""
    usable = [node for node in allocation.nodes if node not in avoided]
    if len(usable) < count:
        raise NoSpare(
            f"no spare is left: {count} nodes are needed, and of the {len(allocation.nodes)} of the job "
            f"{len(usable)} may be used"
        )
    position = {node: index for index, node in enumerate(allocation.nodes)}
    best = sorted(
        usable,
        key=lambda node: (node in suspects, node in once, bool(previous) and node not in previous, position[node]),
    )
    chosen = frozenset(best[:count])
    return Placement(
        nodes=tuple(node for node in allocation.nodes if node in chosen),
        spares=tuple(node for node in usable if node not in chosen),
        avoided=tuple(node for node in allocation.nodes if node in avoided),
    )


def task_count(allocation: Allocation, nodes: Collection[str]) -> int:
    """Tasks of the command on these nodes; 0 where the job has no such number."""
    return sum(number for node, number in zip(allocation.nodes, allocation.tasks, strict=False) if node in nodes)


def environment(allocation: Allocation, placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `environ` that are different on these nodes, with their values there."""
    if placement.nodes == allocation.nodes:
        return {}
    nodes, count = fold_nodes(placement.nodes), str(len(placement.nodes))
    tasks = str(task_count(allocation, placement.nodes))
    values = {
        "SLURM_JOB_NODELIST": nodes, "SLURM_NODELIST": nodes, "SLURM_NNODES": count, "SLURM_JOB_NUM_NODES": count,
        "SLURM_TASKS_PER_NODE": repeated(_chosen(allocation, allocation.tasks, placement)),
        "SLURM_JOB_CPUS_PER_NODE": repeated(_chosen(allocation, allocation.cpus, placement)),
    }  # fmt: skip
    if allocation.tasks:
        values |= {"SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks}
    gpus, per = environ.get("SLURM_GPUS", ""), len(allocation.nodes)
    if gpus.isdecimal() and int(gpus) % per == 0:
        values["SLURM_GPUS"] = str(int(gpus) // per * len(placement.nodes))
    changed = {name: value for name, value in values.items() if value and name in environ}
    if "MASTER_ADDR" in environ:
        changed["MASTER_ADDR"] = _address(environ["MASTER_ADDR"], allocation, placement)
    return {name: value for name, value in changed.items() if value != environ[name]}


def _chosen(allocation: Allocation, numbers: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
    return tuple(number for node, number in zip(allocation.nodes, numbers, strict=False) if node in placement.nodes)


def _address(text: str, allocation: Allocation, placement: Placement) -> str:
    """`host` or `host:port` of rank 0, with its new host where it named a node of the allocation."""
    host, colon, port = text.partition(":")
    node = next((each for each in allocation.nodes if each in (host, host.partition(".")[0])), None)
    first = placement.nodes[0]
    if node is None or node == first or (node != allocation.nodes[0] and node in placement.nodes):
        return text
    domain = host[len(node) :] if host != node else ""
    return f"{first}{domain}{colon}{port}"


def arguments(command: Sequence[str], allocation: Allocation, placement: Placement) -> tuple[str, ...]:
    """The command's words, with rank 0's host in options that held a node of the allocation and nothing else."""
    if placement.nodes == allocation.nodes:
        return tuple(command)
    found: list[str] = []
    for index, word in enumerate(command):
        name, equals, value = word.partition("=")
        if equals and _is_address(name):
            word = f"{name}={_address(value, allocation, placement)}"
        elif index and _is_address(command[index - 1]):
            word = _address(word, allocation, placement)
        found.append(word)
    return tuple(found)


def _is_address(word: str) -> bool:
    return word.startswith("-") and word.lstrip("-") in ADDRESS_OPTIONS
