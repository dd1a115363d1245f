"""Drains that people ask for, `slurm-watchdog drain` and `undrain`: the watchdog does it for who may not use scontrol.

A drain is done at once or not at all: it is an intent in the journal before Slurm is asked, and if the answer is lost,
or the controller dies, a later round writes down what Slurm has, and drains nothing (quarantine.attend). A person gives
such a node back, never a test or the time. Only a drain of ours is undone, by the journal and by its reason.

As with `restart` what a person asks for is done in every mode; a pause and a controller that does not see Slurm hold it
back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from slurm_watchdog.base.redact import mask_line
from slurm_watchdog.controller.actions.quarantine import (
    QuarantineTools,
    attend,
    end,
    objection_by_budget,
    take_or_leave,
)
from slurm_watchdog.controller.policy.quarantine import objection_of_state, objection_to_returning
from slurm_watchdog.controller.ports.commands import NotDone
from slurm_watchdog.journal.journal import NodeEntry
from slurm_watchdog.model.node_events import NodeEvent, NodeEventKind
from slurm_watchdog.model.quarantine import Quarantine, QuarantineState
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.slurm.client import SlurmRefused
from slurm_watchdog.slurm.request_guard import one_line

log = logging.getLogger(__name__)


class NodeRequests:
    """Takes them. One event loop owns it."""

    def __init__(
        self,
        tools: QuarantineTools,
        known: Callable[[], Sequence[SlurmNode]],
        held_back: Callable[[], str | None],
    ):
        """`known`: Slurm's newest listing of all nodes. `held_back`: why nothing may be done now, a sentence."""
        self._tools, self._known, self._held_back = tools, known, held_back

    async def drain(self, node: str, reason: str, by: str, *, force: bool = False) -> str:
        """Drains `node` for the person `by`. Returns the reason as Slurm has it. `force`: beyond the drain budget, and
        also the last node of a partition. Raises NotDone, SlurmRefused, SlurmUnavailable, JournalError."""
        async with self._tools.lock:
            return await self._drain(node, reason, by, force)

    async def _drain(self, node: str, reason: str, by: str, force: bool) -> str:
        tools = self._tools
        self._require_sight()
        for entry in self._open(node):  # a drain that is over, and that no round has noticed yet
            await attend(tools, entry, self._known())
        for entry in self._open(node):
            where = f"kept in reservation {entry.reservation}" if entry.reservation else "drained"
            raise NotDone(f"{node} is {where} by slurm-watchdog already: {entry.reason}")
        now = await tools.slurm.read_node(node)
        objection = objection_of_state(node, now)
        if objection is None and not force:
            objection = objection_by_budget(tools, node, self._known())
            objection = (
                objection and f"{objection} (policy.max_drained_nodes, drained_percent); --force drains it anyway"
            )
        if objection is not None:
            raise NotDone(objection)
        text = one_line(mask_line(f"{tools.policy.drain_reason} {by}: {reason}"))  # as it will be read back
        tools.journal.quarantines.intend(node, "", text, tools.wall(), asked_by=by)
        (entry,) = self._open(node)
        log.warning("%s asks for a drain of %s%s: %s", by, node, ", beyond the budget if need be" * force, text)
        try:
            await tools.slurm.drain_node(node, text)
        except SlurmRefused as error:
            end(tools, entry, QuarantineState.LEFT, f"not drained: {error}")
            raise
        after = await tools.slurm.read_node(node)
        if after is not None:
            take_or_leave(tools, entry, after)
        if after is None or after.reason != text:
            raise NotDone(f"{node} was drained, and then changed by somebody else: {after.reason if after else 'gone'}")
        return text

    async def undrain(self, node: str, by: str) -> str:
        """Gives `node` back for the person `by`, if its drain is ours. Returns the reason that it had. Raises NotDone,
        SlurmRefused, SlurmUnavailable, JournalError."""
        async with self._tools.lock:
            return await self._undrain(node, by)

    async def _undrain(self, node: str, by: str) -> str:
        tools = self._tools
        self._require_sight()
        now = await tools.slurm.read_node(node)
        drains = [each for each in self._open(node) if not each.reservation]
        by_rule = [each for each in tools.journal.node_entries("drained") if each.node == node]
        ours = {each.reason for each in drains} | {each.reason for each in by_rule}
        objection = objection_to_returning(node, now, tools.policy.drain_reason, ours)
        if now is None or objection is not None:
            raise NotDone(objection or node)
        self._tell(node, by, now, "asks for it to be given back")  # before: a controller that dies leaves the name
        await tools.slurm.undrain_node(now)
        self._tell(node, by, now, "had it given back")
        self._settle(drains, by_rule, f"given back by {by}")
        return now.reason

    def _settle(self, drains: Sequence[Quarantine], by_rule: Sequence[NodeEntry], why: str) -> None:
        for entry in drains:
            end(self._tools, entry, QuarantineState.RETURNED, why)
        for other in by_rule:
            self._tools.journal.end_node_entry(other.id, self._tools.wall(), why)

    def _tell(self, node: str, by: str, drained: SlurmNode, what: str) -> None:
        key = f"undrain:{node}:{drained.reason_at or 0.0:.0f}"
        said = f"{by} {what} (it was drained: {drained.reason})"
        self._tools.record(
            NodeEvent(key=key, node=node, kind=NodeEventKind.BY_OPERATOR, at=self._tools.wall(), what=said)
        )

    def _open(self, node: str) -> list[Quarantine]:
        return [each for each in self._tools.journal.quarantines.open() if each.node == node]

    def _require_sight(self) -> None:
        why = self._held_back()
        if why is not None:
            raise NotDone(why)
