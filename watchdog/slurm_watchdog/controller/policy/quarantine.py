"""Whether a node may be taken out of service, and when a suspect one goes back. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from slurm_watchdog.base.text import plural
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.detect.spec import Subject
from slurm_watchdog.ledger.counted import OWN_KINDS, strength_of
from slurm_watchdog.model.node_events import NodeEvent, NodeEventKind
from slurm_watchdog.model.quarantine import Quarantine
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.model.slurm_states import is_drained, is_out, starts_jobs

VERDICTS = frozenset({NodeEventKind.TEST_PASSED, NodeEventKind.TEST_FAILED, NodeEventKind.MENDED})


def objection_to_draining(
    node: str, known: Sequence[SlurmNode], most: int, percent: float, reserved: Collection[str] = ()
) -> str | None:
    """Why a node is not taken out of service, a sentence; None if it may be.

    `known`: all nodes of the cluster; `reserved`: those that we keep in reservations, or have drained since they were
    listed. No more than `most` nodes, and this share of all, may be out of service for whatever reason; one that
    somebody else has drained is his, and the last one of a partition stays.
    """
    mine = next((each for each in known if each.name == node), None)
    if mine is None or is_drained(mine.state):
        return objection_of_state(node, mine)
    out = sum(is_out(each.state) or each.name in reserved for each in known)
    allowed = min(most, int(len(known) * percent / 100))
    if out + (0 if is_out(mine.state) else 1) > allowed:
        return f"out of service already: {plural(out, 'node')}; allowed: {allowed}"
    for partition in mine.partitions:
        others = (each for each in known if each.name != node and partition in each.partitions)
        if not any(starts_jobs(each.state) and each.name not in reserved for each in others):
            return f"{node} is the last node of partition {partition} that starts jobs"
    return None


def objection_of_state(node: str, now: SlurmNode | None) -> str | None:
    """Why a node cannot be drained as it is `now`, a sentence; None if it can."""
    if now is None:
        return f"Slurm knows no node {node}"
    if is_drained(now.state):
        return f"{node} is drained already: {now.reason}" + (f" (by {now.reason_user})" if now.reason_user else "")
    return None


def is_new(events: Iterable[NodeEvent], before: Sequence[Quarantine]) -> bool:
    """Whether the node has done anything since it was last given back, or left to somebody: without that it is not
    drained again."""
    last = max((each.ended_at or 0.0 for each in before), default=0.0)
    return any(each.at > last and strength_of(each.kind) > 0 and not each.withdrawn_why for each in events)


def objection_to_witnesses(events: Iterable[NodeEvent]) -> str | None:
    """Why what is known does not suffice to drain a node, a sentence; None if it does.

    A program can hang on one node and nowhere else as it pleases: what the jobs of a single user show is no proof
    against a node, unless the hardware, Slurm or an operator's test says something, too.
    """
    standing = [each for each in events if strength_of(each.kind) > 0 and not each.withdrawn_why]
    users = {each.chain.partition("/")[0] for each in standing if not _is_of_node(each)}
    if len(users) > 1 or any(map(_is_of_node, standing)):
        return None
    return "all that it did was in jobs of one user, and a program can do that: a person has to look"


def _is_of_node(event: NodeEvent) -> bool:
    """Whether it was seen of the node itself, and not of a job's processes."""
    if event.kind in OWN_KINDS:
        return event.kind != NodeEventKind.RESTART_HELPED
    return spec_of(event.kind).subject in (Subject.NODE, Subject.GPU)


def verdict(quarantine: Quarantine, events: Iterable[NodeEvent]) -> NodeEvent | None:
    """What an operator's test, or a repair, said last of the node since it was drained; None: nothing yet."""
    since = [each for each in events if each.kind in VERDICTS and each.at >= quarantine.at]
    newest = max(since, key=lambda each: each.at, default=None)
    if newest is None or newest.kind != NodeEventKind.TEST_PASSED:
        return newest
    # Of one run of a test every part of the node has to have passed.
    run = newest.key.split(":")[2:3]
    failed = [each for each in since if each.kind == NodeEventKind.TEST_FAILED and each.key.split(":")[2:3] == run]
    return failed[-1] if failed else newest
