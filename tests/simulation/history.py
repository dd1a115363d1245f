"""What happened in a simulated run: the truth of the cluster beside the controller's journal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slurm_watchdog.config.schema import Config
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import ActionRun, Decision, Operation
from slurm_watchdog.model.incidents import Incident
from tests.simulation.recipe import Recipe
from tests.simulation.truth import Deed, Fault

if TYPE_CHECKING:
    from tests.simulation.sim import Circumstances, Simulation


@dataclass
class History:
    """What was written, and what was."""

    recipe: Recipe
    config: Config
    deeds: list[Deed]
    faults: list[Fault]
    circumstances: dict[str, Circumstances]
    complaints: list[str]
    decisions: dict[str, Decision]
    actions: list[ActionRun]
    incidents: dict[str, Incident]
    evidence_at: dict[str, float] = field(default_factory=dict)
    """Incident -> when its first evidence was written."""

    def ours(self, what: str) -> Iterator[Deed]:
        return (deed for deed in self.deeds if deed.by == "us" and deed.what == what)

    def intents(self, decision_id: str, operation: Operation) -> list[float]:
        """When the operation's intents were written."""
        return [deed.t for deed in self.ours(f"journal intent {operation}") if deed.detail.split()[0] == decision_id]


def history_of(sim: Simulation) -> History:
    """Opens the journal of a run that is over, as a controller would."""
    journal = Journal(sim.url)
    try:
        decisions = {each.id: each for each in journal.decisions()}
        incidents = {each.id: each for each in journal.incidents(limit=100_000)}
        ids = {each.incident_id for each in decisions.values()}
        actions = [run for incident_id in sorted(ids) for run in journal.actions(incident_id)]
    finally:
        journal.close()
    history = History(
        sim.recipe, sim.config, sim.cluster.truth.deeds, sim.cluster.truth.faults, sim.circumstances, sim.complaints,
        decisions, actions, incidents,
    )  # fmt: skip
    for deed in history.ours("journal evidence"):
        history.evidence_at.setdefault(deed.detail, deed.t)
    return history
