"""Everybody waits in a collective and no one is outside of it: part of `collective_hang`. Pure.

Who entered last, no stack shows. A network that is down looks like this, and may come back; so does the log of a job
that trains without writing. What tells them apart: stacks that do not move for minutes, ranks that are known to do
nothing but wait, and what the kernel said of the nodes' links.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from slurm_watchdog.analysis.job_state import made_last_step, process_on_storage
from slurm_watchdog.analysis.links import DOWN_S, MOVES_BYTES_S, complaints, congestion, rates_of, rising_of, stopped
from slurm_watchdog.analysis.rank_activity import LoopState
from slurm_watchdog.diagnose.culprit_words import what_they_do
from slurm_watchdog.diagnose.stacks.places import contexts_of, main_thread
from slurm_watchdog.diagnose.stacks.vote import Vote
from slurm_watchdog.knowledge.kernel_causes import ADAPTER
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.incidents import Culprit, Finding, Truth
from slurm_watchdog.model.node_view import NodeView, SeenEvent

LOOK_EVERY_S = 20.0  # Time between two dumps until something is done: all that have been taken are to be alike.
FRESH_S = 60.0  # The last of them is no older than this.
SLACK_S = 60.0  # A step is seen a little later than it ends, and a link that is down within a minute.
MAX_LINKS = 4  # In a sentence.


def all_wait(job: JobView, voted: Vote) -> bool:
    """Whether every rank of a job that trains waits in a collective, as the newest of several dumps shows."""
    trains = job.phase is None and job.progress is not None and job.progress.phase is None
    everybody = voted.waiting == len(job.ranks) and not (voted.outside or voted.elsewhere or voted.undumped)
    if not trains or not everybody or voted.missing or voted.moving is not False or voted.checkpointing:
        return False
    stacks = job.snapshots[-1].stacks
    mains = [thread for stack in stacks if stack.rank is not None and (thread := main_thread(stack)) is not None]
    return not any(contexts_of(thread.frames) for thread in mains)


def with_everybody(job: JobView, found: Finding, seen: LoopState, patient_s: float) -> Finding:
    """A hang in which all ranks wait in a collective: with those who are late by their GPUs, and to be acted on after
    `patient_s` if the dumps are fresh and it is known of every rank (`seen`) that it does nothing else."""
    late = _late_by_gpu(seen)
    summary = f"{found.summary.removesuffix('.')}; {what_they_do(late)}." if late else found.summary
    finished = job.progress is None or made_last_step(job)
    known = seen.stands is True and job.snapshots[-1].age_s <= FRESH_S
    ready = known and found.duration_s >= patient_s and not finished and process_on_storage(job) is None
    return replace(found, summary=summary, culprits=late, actionable=found.actionable or ready)


def _late_by_gpu(seen: LoopState) -> tuple[Culprit, ...]:
    """The few whose GPUs do nothing while those of all others spin: what they were to send was never begun."""
    if not seen.in_collective:
        return ()
    return tuple(replace(each, reason="is in the collective, too, and its GPU does nothing") for each in seen.culprits)


def with_links(job: JobView, found: Finding, nodes: Iterable[NodeView], patient_s: float) -> Finding:
    """A hang in which no one stands outside, with the links of the job's nodes that are down. They may come back, and
    are given `patient_s`."""
    if found.truth is not Truth.BAD:
        return found
    mine = [node for node in nodes if node.name in job.job.nodes]
    found = replace(found, facts=(*found.facts, *links_said(mine)))
    down = links_down(job, mine) if not found.culprits else ()
    if not down:
        return found
    words = f"{', '.join(down)} {'is' if len(down) == 1 else 'are'} down, as last seen"
    return replace(
        found,
        summary=f"{found.summary.removesuffix('.')}; {words}.",
        facts=(*found.facts, f"network: {words}"),
        actionable=found.actionable and found.duration_s >= patient_s,
    )


def links_said(nodes: Sequence[NodeView]) -> tuple[str, ...]:
    """What the links of a job's nodes say of a hang: facts, which convict no one."""
    silent, now = stopped(nodes), max((node.reported_at for node in nodes), default=0.0)
    rates, rising = rates_of(nodes), rising_of(nodes)
    wrong = [
        f"network: {each.link.name} of {node.name} {complaint.text}"
        for node in nodes
        for each in node.links
        for complaint in complaints(node, each, now, rates, rising)
    ]
    words = (
        f"network: nothing goes through {', '.join(silent[:MAX_LINKS])} any more, while other nodes send and receive"
    )
    return (*([words] if silent else []), *wrong, *congestion(nodes))[:MAX_LINKS]


def links_down(job: JobView, nodes: Iterable[NodeView]) -> tuple[str, ...]:
    """Of the job's nodes, each network device of which the kernel said last that it is dead, or whose link is seen
    to be down: `mlx5_0 of n2`. For DOWN_S, since about the last step, and not one that is
    known to carry little."""
    mine = [node for node in nodes if node.name in job.job.nodes]
    now = max((node.reported_at for node in mine), default=0.0)
    stands_s = job.progress.age_s if job.progress is not None else job.run_age_s
    begin, end = now - stands_s - SLACK_S, now - DOWN_S
    found: dict[tuple[str, str], str] = {}
    for node in mine:
        busy = [each for each in node.links if (each.usual_bytes_s or 0.0) >= MOVES_BYTES_S]
        seen = [each.link.name for each in busy if each.down_since is not None and begin <= each.down_since <= end]
        idle = {each.link.name.partition("/")[0] for each in node.links} - {
            each.link.name.partition("/")[0] for each in busy
        }
        said = [device for device, at in _down(node.events) if begin <= at <= end and device not in idle]
        for device in (*said, *seen):  # an adapter, as the kernel names it, or a port of one
            found.setdefault((node.name, device.partition("/")[0]), f"{device or 'a network link'} of {node.name}")
    return tuple(found.values())[:MAX_LINKS]


def _down(events: Iterable[SeenEvent]) -> list[tuple[str, float]]:
    down: dict[str, float | None] = {}
    for seen in events:
        if seen.event.name in ADAPTER:
            device = seen.event.device or ""
            at = down.get(device)
            down[device] = seen.at if at is None else at
        elif seen.event.name == "nic_recovered":
            down[seen.event.device or ""] = None
    return [(device, at) for device, at in down.items() if at is not None]
