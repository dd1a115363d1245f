"""What the Decider of a replay is given in the place of a journal, a cluster and an executor: they keep in
memory, and only write down.

A recording tells of its own controller what no report and no listing tells: whether it was paused, which
actions it had under way and how they ended, what an operator asked for. What a replay alone allows is under
way until the run that it is about is over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count

from msgspec.structs import replace

from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.decider import Decider
from slurm_watchdog.controller.actions.decision_inputs import DecisionPorts, subject_of
from slurm_watchdog.controller.incidents.judge import IncidentChange, Judge
from slurm_watchdog.controller.policy.decision import why_blind
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.journal.error import JournalError
from slurm_watchdog.journal.journal import NodeEntry
from slurm_watchdog.model.actions import ActionEnd, ActionRun, Decision, Wish
from slurm_watchdog.model.incidents import Incident, IncidentKind, IncidentState
from slurm_watchdog.model.slurm_states import RUNNING
from slurm_watchdog.trace.records import Any_, Asked, BadLine, Controller, Ended, ParseStats, Touched

OF_THE_CONTROLLER = (Controller, Asked, Touched, Ended)  # What a recorded controller says of itself.


A_DRAIN = NodeEntry(node="", what="drained", job_id="", decision_id="", at=0.0, reason="")
"""Of which node is not recorded: drains are counted."""


@dataclass
class ReplayJournal:
    """The decisions of a replay, as the journal would hold them. Implements DecisionJournal."""

    own: Controller = field(default_factory=lambda: Controller(t=0.0))
    """What the controller that wrote the recording said of itself last."""
    written: list[Decision] = field(default_factory=list)  # All of them, in the order in which they were made.
    _by_incident: dict[str, list[Decision]] = field(default_factory=dict)  # By incident.
    _allowed: list[Decision] = field(default_factory=list)
    _ends: dict[str, ActionEnd] = field(default_factory=dict)

    def decisions_since(self, at: float) -> list[Decision]:
        return [each for each in self._allowed if each.decided_at >= at]

    def decisions_about(self, incident_ids: Iterable[str]) -> dict[str, list[Decision]]:
        return {incident_id: list(self._by_incident.get(incident_id, ())) for incident_id in incident_ids}

    def actions(self, incident_id: str) -> list[ActionRun]:
        return [
            ActionRun(decision=each, end=self._ends.get(each.id))
            for each in self._allowed
            if each.incident_id == incident_id
        ]

    def add_decision(self, decision: Decision) -> None:
        self._works()
        self.written.append(decision)
        self._by_incident.setdefault(decision.incident_id, []).append(decision)
        if decision.acts:
            self._allowed.append(decision)

    def end_action(self, decision: Decision, end: ActionEnd) -> None:
        """How the action of an allowed decision ended."""
        self._ends[decision.id] = end

    def save_incident(self, incident: Incident) -> None:
        self._works()

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def paused(self) -> tuple[str, str, float] | None:
        self._works()
        return None if self.own.paused is None else (self.own.paused, "", self.own.t)

    def node_entries(self, what: str, job_id: str | None = None) -> Sequence[NodeEntry]:
        return (A_DRAIN,) * (self.own.drained if what == "drained" else 0)

    def _works(self) -> None:
        """Raises JournalError where the recorded controller could not write: it decided nothing then."""
        if self.own.journal_error is not None:
            raise JournalError(self.own.journal_error)


@dataclass
class ReplayExecutor:
    """Writes down what is to be done. Implements Executor."""

    cluster: ClusterState
    _under_way: dict[str, Decision] = field(default_factory=dict)  # By their ids.
    _really: set[str] = field(default_factory=set)  # Of them, under way in the recording, too: it says their ends.

    def drive(self, run: ActionRun) -> None:
        self._under_way[run.decision.id] = run.decision

    def is_busy(self, job_id: str) -> bool:
        return any(each.fence is not None and each.fence.job_id == job_id for each in self._under_way.values())

    def sweep(self, now: float) -> None:
        """What no one did is over with the run that it was to end."""
        for decision in list(self._under_way.values()):
            if decision.id not in self._really and self._is_over(decision):
                del self._under_way[decision.id]

    def acting(self) -> frozenset[str]:
        """Incidents that were really acted on: nothing changes about them meanwhile."""
        return frozenset(self._under_way[each].incident_id for each in self._really)

    def follow(self, subjects: Collection[str]) -> None:
        """What the recorded controller acted on. How one that is not among them any more ended is not known."""
        for decision in list(self._under_way.values()):
            if subject_of(decision) in subjects:
                self._really.add(decision.id)
            elif decision.id in self._really:
                self._forget(decision)

    def ended(self, subject: str) -> Decision | None:
        """The action of the recorded controller on this has ended: the decision for it; None if none was made here."""
        found = next((each for each in self._under_way.values() if subject_of(each) == subject), None)
        if found is not None:
            self._forget(found)
        return found

    def _forget(self, decision: Decision) -> None:
        del self._under_way[decision.id]
        self._really.discard(decision.id)

    def _is_over(self, decision: Decision) -> bool:
        fence = decision.fence
        job = None if fence is None else self.cluster.jobs.get(fence.job_id)
        return fence is not None and (job is None or job.restarts != fence.restarts or job.state not in RUNNING)


class ReplayDecisions:
    """The service's Decider in a replay, with all that it is given; and what the recorded controller did."""

    def __init__(
        self,
        config: Config,
        state: ClusterState,
        judge: Judge,
        tally: ParseStats,
        new_id: Callable[[], str],
        *,
        on_change: Callable[[IncidentChange, float], None],
    ):
        """`new_id` names incidents; `on_change` hears of one that opens or ends by no detector, and when."""
        self._state, self._judge, self._tally, self._on_change = state, judge, tally, on_change
        self._journal = ReplayJournal()
        self._executor = ReplayExecutor(state)
        self._at = 0.0  # The moment that is decided about.
        numbers: Iterator[int] = count(1)
        self._decider = Decider(
            config,
            DecisionPorts(
                journal=self._journal,
                cluster=state,
                judgement=judge,
                executor=self._executor,
                news=self,
                blind=self._blind,
                new_id=lambda: f"d{next(numbers)}",
                new_incident_id=new_id,
                monotonic=lambda: self._at,
                wall=lambda: self._at,
            ),
        )

    def decide(self, now: float) -> None:
        """About every incident that fires and that nothing else explains."""
        self._at = now
        self._decider.decide(now)

    def acting(self) -> frozenset[str]:
        """Incidents that were really acted on."""
        return self._executor.acting()

    def numbered(self) -> tuple[Decision, ...]:
        """All that was decided, in that order, each with a number within its incident."""
        numbers: dict[str, Iterator[int]] = {}
        return tuple(
            replace(each, id=f"{each.incident_id}.{next(numbers.setdefault(each.incident_id, count(1)))}")
            for each in self._journal.written
        )

    def follow_controller(self, records: Iterable[Any_ | BadLine]) -> None:
        """Takes over what the recorded controller says of itself."""
        for record in records:
            self._at = record.t
            if isinstance(record, Controller):
                self._journal.own = record
                self._executor.follow(record.acting)
            elif isinstance(record, Touched):
                at = None if record.age_s is None else record.t - record.age_s
                self._state.runs.note_action(str(record.job_id), record.restarts, at)
            elif isinstance(record, Ended):
                self._end_action(record)
            elif isinstance(record, Asked):
                self._ask_restart(record)

    def _end_action(self, record: Ended) -> None:
        """As the service does: an action that helped ends its incident, one that failed is decided again."""
        decision = self._executor.ended(record.subject)
        if decision is None:
            return
        end = ActionEnd(ok=record.ok, ended_at=record.t, detail=record.detail)
        self._journal.end_action(decision, end)
        if not end.ok:
            self._decider.action_failed(decision)
        incident = self._judge.incidents.get(decision.incident_id)
        if (
            incident is not None
            and decision.process is None
            and decision.incident_id not in self._executor.acting()
            and (end.ok or incident.kind == IncidentKind.OPERATOR_RESTART)
        ):
            self.close_incident(incident, end.detail)

    def _ask_restart(self, record: Asked) -> None:
        job = self._state.jobs.get(str(record.job_id))
        if job is None:
            self._tally.ignore("a restart of a job that no job line has named yet")
            return
        try:
            self._decider.ask_restart(
                job, tuple(record.exclude), record.reason, record.by, at_once=record.now, wish=Wish(record.wish),
                within_s=record.within_s,
            )  # fmt: skip
        except JournalError:
            pass  # it could not be written, and so it was refused

    def _blind(self, now: float) -> str | None:
        own, at = self._journal.own, self._state.slurm_at
        return why_blind(
            journal_error=own.journal_error,
            slurm_age_s=None if at is None else now - at,
            slurm_patience_s=self._judge.slurm_patience_s,
            slurm_problem=own.slurm_problem,
            warming_s=own.warming_s,
        )

    # ------------------------------------------------------------------------------------ the Decider's news
    # and incidents

    def decided(self, incident: Incident, decision: Decision) -> None:
        """The journal has it."""

    def requested(self, incident: Incident, request: Asked) -> None:
        """The journal has it."""

    def journal_failed(self, error: JournalError) -> None:
        """The recorded controller could not write: it decided nothing either."""

    def add_incident(self, incident: Incident) -> None:
        """Opens the incident of a request."""
        self._judge.add(incident)
        self._on_change(IncidentChange(before=None, after=incident), self._at)

    def close_incident(self, incident: Incident, why: str) -> None:
        """Ends an incident because its action has ended, or was refused."""
        over = replace(incident, state=IncidentState.RESOLVED, resolved_at=self._at, resolution=why)
        self._judge.close(over)
        self._on_change(IncidentChange(before=incident, after=over), self._at)
