"""Drains suspect nodes, and gives back those that were tested or mended.

The drain itself is the record: its reason, as Slurm has it, names the incident. A controller that dies finds it there,
and neither drains twice nor touches what someone else has drained meanwhile. The history of the node says when its
quarantine began, and how it ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from slurm_watchdog.actuate import by_slurm
from slurm_watchdog.base.text import one_line, plural
from slurm_watchdog.config.policy import Policy
from slurm_watchdog.controller.node_history.suspicion import MAX_WHAT, OWN_KINDS, strength_of
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.detect.spec import Subject
from slurm_watchdog.model.node_events import OUR_DRAIN, TESTED_MARK, NodeEvent, NodeEventKind
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.model.slurm_states import is_drained, is_out, starts_jobs
from slurm_watchdog.slurm.client import SlurmClient, SlurmRefused, SlurmUnavailable

log = logging.getLogger(__name__)

VERDICTS = frozenset({NodeEventKind.TEST_PASSED, NodeEventKind.TEST_FAILED, NodeEventKind.MENDED})
BEGAN = "drained: "  # Begins the first event of a quarantine, before the drain's reason; any other ends it.


@dataclass(frozen=True)
class QuarantineTools:
    """What a round needs."""

    slurm: SlurmClient
    policy: Policy
    events: Callable[[], Iterable[NodeEvent]]  # All events of nodes that are remembered.
    record: Callable[[NodeEvent], None]  # Writes an event of a node down.
    wall: Callable[[], float]

    def of_node(self, node: str) -> list[NodeEvent]:
        """Its events, oldest first."""
        return sorted((each for each in self.events() if each.node == node), key=lambda each: each.at)

    def newest(self) -> dict[str, NodeEvent]:
        """Node -> the newest event of its quarantines."""
        found = [each for each in self.events() if each.kind == NodeEventKind.QUARANTINED]
        return {each.node: each for each in sorted(found, key=lambda each: each.at)}

    def drained(self) -> dict[str, str]:
        """Nodes that we have drained and not given back, and the reasons of their drains."""
        found = {node: each.what.partition(BEGAN) for node, each in self.newest().items()}
        return {node: reason for node, (before, began, reason) in found.items() if began and not before}

    def tell(self, node: str, what: str, kind: NodeEventKind = NodeEventKind.QUARANTINED) -> None:
        """For the history of the node."""
        at = self.wall()
        log.warning("%s: %s", node, what)
        self.record(NodeEvent(key=f"quarantine:{node}:{kind}:{at:.3f}", node=node, kind=kind, at=at, what=what))


async def sweep(
    tools: QuarantineTools, suspects: Sequence[tuple[str, str]], known: Sequence[SlurmNode], *, drains: bool
) -> None:
    """One round. `suspects`: (node, id of the incident that calls it so), `known`: Slurm's newest listing of all nodes.
    Without `drains` no further node is drained; those that are drained are still returned."""
    newest, reason = tools.newest(), f"{OUR_DRAIN} suspect node, incident "
    for each in (each for each in known if is_drained(each.state) and each.reason.startswith(reason)):
        last = newest.get(each.name)
        if last is None or (each.name not in tools.drained() and last.at < (each.reason_at or 0.0)):
            tools.tell(each.name, BEGAN + each.reason)  # by a controller that died after it
    for node, drained_as in tools.drained().items():
        with _waiting(node):
            await _look_after(tools, node, drained_as)
    out, policy = tools.drained(), tools.policy
    for node, incident_id in suspects if drains else ():
        objection = "it is in quarantine" if node in out else objection_of_events(tools.of_node(node))
        if objection is not None:
            log.info("suspect node %s is not drained: %s", node, objection)
            continue
        with _waiting(node):
            now = await tools.slurm.read_node(node)
            known = [now if now is not None and each.name == node else each for each in known]
            objection = objection_to_draining(node, known, policy.max_drained_nodes, policy.drained_percent, out)
            if objection is not None:
                log.info("suspect node %s stays in service: %s", node, objection)
                continue
            await tools.slurm.drain_node(node, reason + incident_id)
            tools.tell(node, BEGAN + reason + incident_id)
        return  # one a round, also where it is not known whether it was drained: the next listing counts it


@contextmanager
def _waiting(node: str) -> Iterator[None]:
    """What Slurm does not do now, the next round tries."""
    try:
        yield
    except (SlurmUnavailable, SlurmRefused) as error:
        log.warning("quarantine of %s waits for Slurm: %s", node, error)


async def _look_after(tools: QuarantineTools, node: str, reason: str) -> None:
    """Does what is due about one node that we have drained. Raises SlurmRefused, SlurmUnavailable."""
    now, why = await tools.slurm.read_node(node), "it is back in service"
    said = verdict(tools.newest()[node].at, tools.of_node(node))
    passed = said is not None and said.kind != NodeEventKind.TEST_FAILED
    if now is None:
        tools.tell(node, "left as it is: Slurm does not know the node any more")
        return
    if is_drained(now.state):
        if one_line(now.reason, MAX_WHAT) != reason:
            tools.tell(node, f"left as it is: drained by another user: {now.reason}")
            return
        if not passed:
            return
        settled, why = await by_slurm.undrain(tools.slurm, node, now.reason, now.reason_at)
        if not settled:
            return
    elif await _is_being_tested(tools, node):
        return
    if said is None or not passed:
        tools.tell(node, f"left as it is: {why}, by another user")
        return
    if said.kind == NodeEventKind.TEST_PASSED:  # what it did before is settled
        tools.tell(node, f"returned after a test: {said.what}", NodeEventKind.MENDED)
    tools.tell(node, f"{why}: {said.what}")


async def _is_being_tested(tools: QuarantineTools, node: str) -> bool:
    """Whether a node that was just read without a drain is in the reservation of a test, which has lifted the drain and
    puts it back before it deletes the reservation. The node's own state shows the reservation some seconds late. Raises
    SlurmUnavailable, SlurmRefused."""
    reservations = await tools.slurm.read_reservations()
    if any(each.name.startswith(TESTED_MARK) and node in each.nodes for each in reservations):
        return True
    again = await tools.slurm.read_node(node)  # drained by now: the test has ended between the two questions
    return again is not None and is_drained(again.state)


def objection_to_draining(
    node: str, known: Sequence[SlurmNode], most: int, percent: float, ours: Collection[str] = ()
) -> str | None:
    """Why a node is not drained, a sentence; None if it may be. `known`: all nodes of the cluster; `ours`: those that
    we have drained since they were listed. No more than `most` nodes, and this share of all, may be out of service for
    whatever reason; one that someone else has drained is his, and the last one of a partition stays."""
    mine = next((each for each in known if each.name == node), None)
    if mine is None:
        return f"Slurm knows no node {node}"
    if is_drained(mine.state):
        return f"{node} is drained already: {mine.reason}" + (f" (by {mine.reason_user})" if mine.reason_user else "")
    out = sum(is_out(each.state) or each.name in ours for each in known)
    allowed = min(most, int(len(known) * percent / 100))
    if out + (0 if is_out(mine.state) else 1) > allowed:
        return f"out of service already: {plural(out, 'node')}; allowed: {allowed}"
    others = [each for each in known if each.name not in (node, *ours) and starts_jobs(each.state)]
    last = [name for name in mine.partitions if not any(name in each.partitions for each in others)]
    return f"{node} is the last node of partition {last[0]} that starts jobs" if last else None


def objection_of_events(events: Sequence[NodeEvent]) -> str | None:
    """Why what is known does not suffice to drain a node, a sentence; None if it does. It has to have done something
    since it was last given back, or left to someone. A program can hang on one node and nowhere else as it pleases:
    what the jobs of a single user show, in their processes or logs, is no proof against a node, unless the hardware,
    Slurm or an operator's test says something, too."""
    last = max((each.at for each in events if each.kind == NodeEventKind.QUARANTINED), default=0.0)
    standing = [each for each in events if strength_of(each.kind) > 0 and not each.withdrawn_why]
    if not any(each.at > last for each in standing):
        return "nothing has happened on it since it was returned to service"
    of_node = (Subject.NODE, Subject.GPU)  # what was seen of the node itself
    own = {each.key for each in standing if each.kind not in OWN_KINDS and spec_of(each.kind).subject in of_node}
    users = {"" if each.key in own else each.chain.partition("/")[0] for each in standing}
    if len(users) > 1 or "" in users:
        return None
    return "all that it did was in jobs of one user, and a program can do that: a person has to look"


def verdict(since_at: float, events: Iterable[NodeEvent]) -> NodeEvent | None:
    """What an operator's test, or a repair, said last of the node since it was drained; None: nothing yet."""
    since = [each for each in events if each.kind in VERDICTS and each.at >= since_at]
    newest = max(since, key=lambda each: each.at, default=None)
    if newest is None or newest.kind != NodeEventKind.TEST_PASSED:
        return newest
    # Of one run of a test every part of the node has to have passed.
    run = newest.key.split(":")[2:3]
    failed = [each for each in since if each.kind == NodeEventKind.TEST_FAILED and each.key.split(":")[2:3] == run]
    return failed[-1] if failed else newest
