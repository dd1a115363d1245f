"""What ranks recorded of their collectives, held against who is accused by other evidence. Pure.

Where a source says the same, it is said; where it shows that all who are accused wait themselves, no rank is
identified. Alone it names a single rank where none else is named, if it records sending and receiving: a rank that only
receives would look absent otherwise, and so does one that waits in a store, in gloo, in a monitored barrier, or for its
communicator, without which no operation is recorded. A rank inside of torch.distributed is therefore not named by it,
nor is one of which there is no stack; but where it stands in the very call of those who wait, and every source says
that it has not entered it, it is. Of several ranks it is said, and none is accused by it alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from slurm_watchdog.analysis.collective_order import CollectiveOrder, order_of, who_and_why, words_of
from slurm_watchdog.analysis.job_state import made_last_step, process_on_storage
from slurm_watchdog.analysis.links import DOWN_S, MOVES_BYTES_S, complaints, congestion, rates_of, rising_of, stopped
from slurm_watchdog.analysis.rank_activity import LoopState
from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.culprit_words import what_they_do
from slurm_watchdog.diagnose.stacks.places import contexts_of, main_thread
from slurm_watchdog.diagnose.stacks.vote import Vote
from slurm_watchdog.knowledge.kernel_causes import ADAPTER
from slurm_watchdog.model.cluster_view import JobView, ProcessView, StackSnapshot
from slurm_watchdog.model.collective_records import RecordSet
from slurm_watchdog.model.evidence import ProcessStack
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


_UNRECORDED = late_regex(
    r"gloo|monitored_?barrier|[Ss]tore\b|store_based_barrier|rendezvous|distributed_c10d|CommInit|initNCCLComm",
    re.IGNORECASE,
)


class Weighed(Struct):
    """Who is accused when all sources were heard."""

    culprits: tuple[Culprit, ...]
    words: tuple[str, ...] = ()  # What each source adds to the sentence.
    facts: tuple[str, ...] = ()
    disagree: bool = False  # A source shows that those who were accused wait themselves.


def weigh(
    culprits: tuple[Culprit, ...],
    ranks: Iterable[ProcessView],
    sets: Sequence[RecordSet],
    dumps: Sequence[StackSnapshot] = (),
) -> Weighed:
    """`culprits` are accused by other evidence; `ranks` are all of the job, `dumps` their stacks."""
    found = Weighed(culprits=culprits)
    orders = [(each, order_of(each.records)) for each in sets]
    odd = [{each.rank for each in order.odd} for _, order in orders if order.waiting]
    agreed = frozenset(set.intersection(*odd)) if len(odd) > 1 else frozenset[int]()
    for each, order in orders:
        found = replace(found, facts=(*found.facts, *(f"{each.source}: {fact}" for fact in each.facts)))
        if order.waiting:
            facts = (f"{each.source}: {words_of(order)}", *(f"{each.source}: {fact}" for fact in order.facts))
            elsewhere = _may_wait_elsewhere(order, agreed, dumps)
            found = _heard(replace(found, facts=(*found.facts, *facts)), each, order, ranks, elsewhere)
    return found


def _may_wait_elsewhere(
    order: CollectiveOrder, agreed: frozenset[int], dumps: Sequence[StackSnapshot]
) -> frozenset[int]:
    """Those named by `order` that may wait in something that no source records, by their newest stacks. Of one without
    a stack it is not known; where no one has one, what its records say of collectives stands for itself. `agreed`:
    those that each of several sources names; they are in nothing else where they stand as those do who wait."""
    places = {stack.rank: _place(stack) for stack in (dumps[-1].stacks if dumps else ())}
    awaited = {places.get(rank, ()) for rank in order.waiting}
    found = set[int]()
    for each in order.odd:
        place = places.get(each.rank, ())
        unseen = not place and (bool(places) or each.only_spoken_to)
        with_the_others = each.rank in agreed and place in awaited
        if unseen or (any(map(_UNRECORDED.search, place)) and not with_the_others):
            found.add(each.rank)
    return frozenset(found)


def _place(stack: ProcessStack) -> tuple[str, ...]:
    """`FUNCTION FILE` of each frame of the main thread."""
    thread = main_thread(stack)
    return () if thread is None else tuple(f"{frame.function} {frame.file}" for frame in thread.frames)


def _heard(
    found: Weighed,
    source: RecordSet,
    order: CollectiveOrder,
    ranks: Iterable[ProcessView],
    elsewhere: frozenset[int],
) -> Weighed:
    """`elsewhere`: see `_may_wait_elsewhere`."""
    reasons = {each.rank: each.reason for each in order.odd}
    accused = {each.rank for each in found.culprits}
    confirmed = sorted(rank for rank in reasons if rank in accused)
    if confirmed:
        kept = tuple(each for each in found.culprits if each.rank in reasons or each.rank not in order.waiting)
        words = f"{source.source} has it, too: {who_and_why({rank: reasons[rank] for rank in confirmed})}"
        return replace(found, culprits=kept, words=(*found.words, words))
    if accused and accused <= set(order.waiting):
        named = f", and {who_and_why(reasons)}" if reasons else ""
        words = f"but {source.source} has rank {min(accused, key=str)} wait as the others do{named}: none is identified"
        return replace(found, culprits=(), words=(*found.words, words), disagree=True)
    if accused or not reasons or found.disagree:
        return found
    if not all(record.point_to_point for record in source.records):
        return found
    if elsewhere:
        return found
    if len(reasons) > 1:  # said, and accused by nothing else: nothing is done about them
        return replace(found, words=(*found.words, f"by {source.source}, {who_and_why(reasons)}"))
    absent = tuple(
        each.culprit(reasons[number])
        for each in ranks
        if (number := each.process.rank) is not None and number in reasons
    )
    if not absent:
        return found
    words = f"by {source.source}, {what_they_do(absent)}"
    return replace(found, culprits=absent, words=(*found.words, words))


def with_other_sources(job: JobView, finding: Finding, nodes: Iterable[NodeView], patient_s: float) -> Finding:
    """A hang with what its ranks recorded, and with links of its nodes that are down. Where the sources disagree it is
    left alone for `patient_s`."""
    if finding.truth is not Truth.BAD or not job.collectives:
        return with_links(job, finding, nodes, patient_s)
    weighed = weigh(finding.culprits, job.ranks, job.collectives, job.snapshots)
    found = replace(
        finding,
        summary="; ".join((finding.summary.removesuffix("."), *weighed.words)) + ".",
        culprits=weighed.culprits,
        clears=weighed.disagree,
        facts=(*finding.facts, *weighed.facts),
        actionable=finding.actionable and (not weighed.disagree or finding.duration_s >= patient_s),
    )
    return with_links(job, found, nodes, patient_s)
