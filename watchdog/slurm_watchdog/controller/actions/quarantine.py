"""Takes suspect nodes out of service, by a drain or by a reservation of ours, and gives back those that were tested or
mended.

Each step is an intent in the journal before Slurm is asked: a controller that dies between the two looks at the node
first, and neither drains twice nor touches what somebody else has drained meanwhile. A reservation has a name that
only one intent has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurm_watchdog.actuate import drain
from slurm_watchdog.config.policy import Policy
from slurm_watchdog.controller.policy.quarantine import is_new, objection_to_draining, objection_to_witnesses, verdict
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.node_events import NodeEvent, NodeEventKind
from slurm_watchdog.model.quarantine import RESERVED_MARK, TESTED_MARK, Quarantine, QuarantineState
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.model.slurm_states import is_drained
from slurm_watchdog.slurm.client import SlurmClient, SlurmRefused, SlurmUnavailable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuarantineTools:
    """What a round needs."""

    journal: Journal
    slurm: SlurmClient
    policy: Policy
    record: Callable[[NodeEvent], None]
    """Writes an event of a node down."""
    wall: Callable[[], float]


async def sweep(
    tools: QuarantineTools, suspects: Sequence[tuple[str, str]], known: Sequence[SlurmNode], *, drains: bool
) -> None:
    """One round. `suspects`: (node, id of the incident that calls it so), `known`: Slurm's newest listing of all nodes.
    Without `drains` no further node is drained; those that are drained are still tested and returned. Raises
    JournalError."""
    for entry in tools.journal.quarantines.open():
        await _attend(tools, entry, known)
    if not drains:
        return
    for node, incident_id in suspects:
        if any(each.node == node for each in tools.journal.quarantines.open()):
            continue
        events = tools.journal.node_events.of_node((node,))
        if not is_new(events, tools.journal.quarantines.of_node(node)):
            continue
        objection = _objection_by_budget(tools, node, known) or objection_to_witnesses(events)
        if objection is not None:
            log.info("suspect node %s stays in service: %s", node, objection)
            continue
        reason, at = f"{tools.policy.drain_reason} suspect node, incident {incident_id}", tools.wall()
        reserves = tools.policy.quarantine_by == "reservation"
        name = f"{RESERVED_MARK}{node}-{incident_id}-{at:.0f}" if reserves else None
        tools.journal.quarantines.intend(node, incident_id, reason, at, name)
        entry = next(each for each in tools.journal.quarantines.open() if each.node == node)
        await _attend(tools, entry, known)
        return  # one a round: the next listing counts it


def _objection_by_budget(tools: QuarantineTools, node: str, known: Sequence[SlurmNode]) -> str | None:
    """Why `node` is not taken out of service now, a sentence; None if it may be. What we have taken out counts, also
    where the listing is older. Raises JournalError."""
    reserved = {each.node for each in tools.journal.quarantines.open() if each.node != node}
    policy = tools.policy
    return objection_to_draining(node, known, policy.max_drained_nodes, policy.drained_percent, reserved)


def _objection_now(tools: QuarantineTools, now: SlurmNode, known: Sequence[SlurmNode]) -> str | None:
    return _objection_by_budget(tools, now.name, [now if each.name == now.name else each for each in known])


async def _attend(tools: QuarantineTools, entry: Quarantine, known: Sequence[SlurmNode]) -> None:
    """Does what is due about one node that is, or is about to be, out of service. Raises JournalError."""
    try:
        now = await tools.slurm.read_node(entry.node)
        if entry.reservation is not None:
            await _attend_reserved(tools, entry, entry.reservation, now, known)
        elif now is None:
            _end(tools, entry, QuarantineState.LEFT, "Slurm does not know the node any more")
        elif entry.state is QuarantineState.INTENDED:
            await _drain(tools, entry, now, known)
        else:
            await _look_after(tools, entry, now)
    except (SlurmUnavailable, SlurmRefused) as error:
        log.warning("quarantine of %s waits for Slurm: %s", entry.node, error)


async def _drain(tools: QuarantineTools, entry: Quarantine, now: SlurmNode, known: Sequence[SlurmNode]) -> None:
    if not is_drained(now.state):
        objection = _objection_now(tools, now, known)
        if objection is not None:
            _end(tools, entry, QuarantineState.LEFT, f"not drained: {objection}")
            return
        await tools.slurm.drain_node(entry.node, entry.reason)
        now = await tools.slurm.read_node(entry.node) or now
    if is_drained(now.state) and now.reason == entry.reason:
        _taken(tools, entry, f"drained: {entry.reason}", now.reason_at)
    elif is_drained(now.state):
        _end(tools, entry, QuarantineState.LEFT, f"somebody else has drained it: {now.reason}")


async def _attend_reserved(
    tools: QuarantineTools, entry: Quarantine, name: str, now: SlurmNode | None, known: Sequence[SlurmNode]
) -> None:
    """The same of a node that is kept in reservation `name`. What else is done to the node is no matter of ours."""
    ours = next((each for each in await tools.slurm.read_reservations() if each.name == name), None)
    said = verdict(entry, tools.journal.node_events.of_node((entry.node,)))
    if ours is not None and ours.nodes != (entry.node,):
        _end(tools, entry, QuarantineState.LEFT, f"somebody has changed reservation {name}")
    elif ours is None and entry.state is QuarantineState.DRAINED:
        _given_back(tools, entry, said, f"reservation {name} is over")
    elif ours is None:
        objection = "Slurm does not know it any more" if now is None else _objection_now(tools, now, known)
        if objection is not None:
            _end(tools, entry, QuarantineState.LEFT, f"not reserved: {objection}")
            return
        await tools.slurm.reserve_node(entry.node, name)
        _taken(tools, entry, f"reserved as {name}: {entry.reason}")
    elif entry.state is QuarantineState.INTENDED:
        _taken(tools, entry, f"reserved as {name}: {entry.reason}")
    elif said is not None and said.kind != NodeEventKind.TEST_FAILED:
        await tools.slurm.delete_reservation(name)
        _given_back(tools, entry, said, f"reservation {name} is deleted")


def _taken(tools: QuarantineTools, entry: Quarantine, what: str, reason_at: float | None = None) -> None:
    """Slurm has our drain, or our reservation. What is reported again, after a death in between, is one event."""
    _tell(tools, entry, NodeEventKind.QUARANTINED, what)
    tools.journal.quarantines.drained(entry.id, reason_at)
    log.warning("%s is %s", entry.node, what)


async def _look_after(tools: QuarantineTools, entry: Quarantine, now: SlurmNode) -> None:
    if not is_drained(now.state):
        if await _is_being_tested(tools, entry.node):
            return
        said = verdict(entry, tools.journal.node_events.of_node((entry.node,)))
        _given_back(tools, entry, said, "it is back in service")
        return
    if now.reason != entry.reason:  # which names our incident: after a test it has another time
        _end(tools, entry, QuarantineState.LEFT, f"somebody else has it in hand: {now.reason}")
        return
    said = verdict(entry, tools.journal.node_events.of_node((entry.node,)))
    if said is None or said.kind == NodeEventKind.TEST_FAILED:
        return
    settled, why = await drain.undrain(tools.slurm, entry.node, entry.reason, now.reason_at)
    if settled:
        _given_back(tools, entry, said, why)


async def _is_being_tested(tools: QuarantineTools, node: str) -> bool:
    """Whether a node that was just read without a drain is in a reservation of `test-nodes --drained-by-us`, which has
    lifted the drain and puts it back before it deletes the reservation. The node's own state shows the reservation
    some seconds late. Raises SlurmUnavailable, SlurmRefused."""
    reservations = await tools.slurm.read_reservations()
    if any(each.name.startswith(TESTED_MARK) and node in each.nodes for each in reservations):
        return True
    again = await tools.slurm.read_node(node)  # drained by now: the test has ended between the two questions
    return again is not None and is_drained(again.state)


def _given_back(tools: QuarantineTools, entry: Quarantine, said: NodeEvent | None, why: str) -> None:
    """It is in service again. What it did before is settled only if a test or a repair says so."""
    if said is None or said.kind == NodeEventKind.TEST_FAILED:
        _end(tools, entry, QuarantineState.LEFT, f"{why}, by somebody else")
        return
    if said.kind == NodeEventKind.TEST_PASSED:
        _tell(tools, entry, NodeEventKind.MENDED, f"returned after a test: {said.what}")
    _end(tools, entry, QuarantineState.RETURNED, f"{why}: {said.what}")


def _end(tools: QuarantineTools, entry: Quarantine, state: QuarantineState, why: str) -> None:
    """It is over. Raises JournalError."""
    if state is QuarantineState.LEFT:
        _tell(tools, entry, NodeEventKind.QUARANTINED, f"left as it is: {why}")
    tools.journal.quarantines.end(entry.id, state, tools.wall(), why)
    log.warning("quarantine of %s is over (%s): %s", entry.node, state, why)


def _tell(tools: QuarantineTools, entry: Quarantine, kind: NodeEventKind, what: str) -> None:
    """For the history of the node; the same twice is one event."""
    key = f"quarantine:{entry.id}:{kind}:{what[:4]}"
    tools.record(NodeEvent(key=key, node=entry.node, kind=kind, at=tools.wall(), what=what))
