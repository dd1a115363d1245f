"""Why a requeued job does not start: processes of its old run that do not end, where, and what can be done
about it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.observations import Process
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, is_unkillable, why_not_set_down
from slurm_watchdog.model.slurm_states import is_out

SHOWN = 3  # Processes of a node that are named one by one.


class StuckNode(Struct):
    """A node on which the old run of a requeued job has not ended."""

    name: str
    processes: str = ""  # What of it is still there, in words; empty if the agent says nothing of any.
    objection: str = ""  # Why the node must not be set DOWN, a sentence; empty if it may.


def stuck_nodes(
    job: SlurmJob,
    listed: Mapping[str, SlurmNode],
    jobs: Sequence[SlurmJob],
    partial: str,
    allowed_out: int,
    processes: Callable[[str], Sequence[Process]],
    unkillable_s: float,
) -> tuple[StuckNode, ...]:
    """The nodes that a requeued job which is COMPLETING still has. `allowed_out`: how many nodes may be out
    of service before we set one DOWN; `processes` are those of the job that the node's agent reports now; one
    that has been in state D for `unkillable_s` cannot be killed."""
    if job.state != "COMPLETING":
        return ()
    out = sum(1 for node in listed.values() if is_out(node.state))
    found = []
    for name in job.nodes:
        node, there = listed.get(name), processes(name)
        why = (
            "Slurm does not list it"
            if node is None
            else why_not_set_down(job, node, jobs, partial, unkillable=is_unkillable(there, unkillable_s))
        )
        if not why and out > allowed_out:
            why = (
                f"{out} nodes are out of service, and {allowed_out} may be (policy.max_drained_nodes, drained_percent)"
            )
        found.append(StuckNode(name=name, processes=words_for(there), objection=why))
    return tuple(found)


def words_for(processes: Sequence[Process]) -> str:
    """`process 4711 (python, rank 1) in state D`, the stuck ones first."""
    ordered = sorted(processes, key=lambda each: (each.state != "D", each.rank is None, each.pid))
    words = []
    for each in ordered[:SHOWN]:
        rank = f", rank {each.rank}" if each.rank is not None else ""
        call = (each.blocked.path or each.blocked.wchan or "") if each.blocked is not None else ""
        words.append(
            f"process {each.pid} ({each.comm}{rank}) in state {each.state}" + (f", waiting for {call}" if call else "")
        )
    more = f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else ""
    return ", ".join(words) + more


def why_it_waits(stuck: Sequence[StuckNode]) -> str:
    """One sentence: what holds the requeued job, and what ends it."""
    where = "; ".join(f"{node.name} ({node.processes or 'its agent reports no process of it'})" for node in stuck)
    commands = " ".join(f"`scontrol update NodeName={node.name} State=DOWN Reason=unkillable`" for node in stuck)
    return (
        f"waiting until its old run has ended on {where}; a process in state D ends when what it waits "
        f"for answers, or with "
        f"the node: {commands} lets the job start elsewhere, and ends every job there"
    )
