"""Decisions, and what is done for them."""

from __future__ import annotations

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import plural
from slurm_watchdog.model.incidents import GpuProcess
from slurm_watchdog.model.supervisor import OrderAnswer, SupervisorStatus, step_words


class Action(StrEnum):
    NONE = "none"  # Evidence and alert only.
    REQUEUE = "requeue"  # Requeue held, add exclusions to the existing ones, release, see the first new step.
    GRACEFUL_RESTART = "graceful_restart"  # Kill switch, complete checkpoint, then as REQUEUE.
    RESTART_STEP = "restart_step"
    """End the step and start it again in the same allocation, by the supervisor; else as REQUEUE, if in the ladder."""
    RESUBMIT = "resubmit"  # End the job, submit its stored script again.
    LEAVE_TO_CHAIN = "leave_to_chain"
    """End the job; the next element of its array, or the job that waits for it, continues."""
    CANCEL = "cancel"  # End the job, and run nothing again.
    ASK_TO_SAVE = "ask_to_save"  # Kill switch or signal only: what the job does then is its own affair.
    HOLD = "hold"  # Keep a job that waits in the queue from starting again.
    END_PROCESS = "end_process"  # End a process that outlived its job on a GPU.


class Rung(StrEnum):
    """One word of a ladder, as the configuration and a job's owner write it: in this order, each at most once."""

    EVIDENCE = "evidence"  # Wait until what dies with the job has been kept.
    KILL_SWITCH = "kill_switch"  # Write it, wait for a complete checkpoint. Only if the loop turns.
    SIGUSR1 = "sigusr1"
    SIGTERM = "sigterm"
    RESTART_STEP = "restart_step"
    """Have the job's supervisor end the step and start it again in the same allocation, without the nodes that are
    to blame; see the first new step."""
    REQUEUE = "requeue"  # Requeue held, exclude, release, see the first new step.
    RESUBMIT = "resubmit"  # End the job, submit the script that Slurm has stored.
    CHAIN = "chain"  # End the job where another one waits behind it: an array element, a dependency.
    CANCEL = "cancel"  # End the job; nothing is run again.
    HOLD = "hold"  # Hold a job that waits in the queue.
    END_PROCESS = "end_process"  # SIGTERM, later SIGKILL, to a process that outlived its job; a drain where that fails.


class Verdict(StrEnum):
    ALLOWED = "allowed"
    SUPPRESSED = "suppressed"
    OBSERVED = "observed"  # Would have been done, had the mode been `act`.


class Wish(StrEnum):
    """What a person may ask for of a job."""

    RESTART = "restart"
    SAVE = "save"  # Kill switch and a complete checkpoint; what the job does then is its own affair.
    HOLD = "hold"  # The same; then it waits in the queue, held, until someone releases it.


class Fence(Struct):
    """The one run of the one job that a decision is about. It applies to nothing else."""

    job_id: str
    restarts: int
    start_at: float | None


RESTARTING = "restarting"  # `Decision.by` where `slurm-watchdog run` restarts the command: nothing else is done.


class Decision(Struct):
    id: str
    incident_id: str
    action: Action
    verdict: Verdict
    by: str  # The guard that took the action away, or the rule that allowed it.
    reason: str
    decided_at: float
    fence: Fence | None = None
    exclude: tuple[str, ...] = ()
    kill_switch: str | None = None
    kill_switch_uid: int | None = None
    kill_switch_content: str = ""
    hold_first: tuple[str, ...] = ()
    """Elements of the job's array that wait and would see the kill switch: held before it is written, released once it
    is gone. `100_[4-9]` or `100_4`, as Slurm takes them."""
    held_why: str = ""  # Why the job stays held once it is requeued, a sentence; empty: it is released.
    nodes: tuple[str, ...] = ()  # Nodes of the run, where the kill switch is written and removed.
    step_at_decision: int | None = None
    process_job_id: str | None = None  # The job's id as agents know it.
    asked_by: str | None = None  # The operator, for a restart that a person asked for.
    wait_until_responding: tuple[str, ...] = ()  # Mounts that have to answer before the job is released.
    ladder: tuple[Rung, ...] = ()  # What is tried, in this order; in journals of older releases the action says it.
    rule: str = ""  # Which part of the configuration, or whose directive, gave the ladder.
    loop_turns: bool | None = None  # Whether the job made steps then: else it hears no kill switch. None: not known.
    lose_work: bool = False  # The job may be ended although it turns and has not saved.
    signal_to: str = "steps"  # Who gets a signal: `steps`, `batch` (the batch shell) or `all`.
    rung_limits: tuple[tuple[str, float], ...] = ()  # Limits of this rule in place of the general ones, in seconds.
    drain: tuple[str, ...] = ()  # Nodes to drain, for an administrator to look at.
    step_s: float | None = None  # Usual time of a step when it was decided.
    step_id: str = ""  # The Slurm step that an order to the job's supervisor is about; empty: it has none.
    start: int = 0  # Number of the start of the supervisor's command, from 1.
    avoid: tuple[str, ...] = ()  # Nodes of the allocation that the step is started again without.
    resume_from: str = ""  # Checkpoint that is named to the command at its next start; empty: the trainer chooses.
    process: GpuProcess | None = None  # The one process that it is about, in place of a run of a job: `fence` is None.
    process_since: float | None = None  # Since when it has had no job, a date.
    uid: int | None = None  # Whose job it is; None in journals of older releases.
    hold: bool = False  # A requeued job is left held.

    @property
    def blamed(self) -> tuple[str, ...]:
        """The nodes that the restart avoids, for anybody to look at."""
        return self.avoid or self.exclude

    @property
    def acts(self) -> bool:
        """Whether something is done for it: it is allowed, and not to do nothing."""
        return self.verdict is Verdict.ALLOWED and self.action is not Action.NONE


class Operation(StrEnum):
    """What is done for the rungs of a ladder, each with an intent before and an outcome after in the journal."""

    EVIDENCE = "evidence"  # Waits until what dies with the job has been kept, no longer than its limit.
    HOLD_OTHERS = "hold_others"  # Holds the elements of the job's array that would see its kill switch.
    WRITE_KILL_SWITCH = "write_kill_switch"
    WAIT_CHECKPOINT = "wait_checkpoint"
    WRITE_ORDER = "write_order"  # Writes the order to the job's supervisor.
    RESTART_STEP = "restart_step"  # Waits until the supervisor says that the new step runs; else takes the order back.
    REQUEUE_HOLD = "requeue_hold"
    EXCLUDE = "exclude"
    REMOVE_KILL_SWITCH = "remove_kill_switch"
    RELEASE_OTHERS = "release_others"
    RELEASE = "release"
    SET_DOWN = "set_down"  # Tells Slurm that a node is down that cannot end the old run: the job starts elsewhere.
    SIGNAL_USR1 = "signal_usr1"
    SIGNAL_TERM = "signal_term"
    CANCEL = "cancel"
    RESUBMIT = "resubmit"
    HOLD = "hold"
    DRAIN = "drain"
    TERM_PROCESS = "term_process"
    KILL_PROCESS = "kill_process"
    ABANDON = "abandon"  # An operator ended the action before the run was ended: `restart --cancel`.


class OperationOutcome(StrEnum):
    DONE = "done"
    FAILED = "failed"  # Refused for good: the reason is in `detail`.
    UNKNOWN = "unknown"  # No answer: the world is asked before anything else.
    SKIPPED = "skipped"


class OperationRecord(Struct):
    """One operation of one action, as the journal keeps it. `outcome` None: the intent only."""

    operation: Operation
    attempt: int
    intent_at: float
    outcome: OperationOutcome | None = None
    outcome_at: float | None = None
    detail: str = ""


OUTCOMES: dict[str, str] = {"ok": "succeeded", "needless": "was not needed", "failed": "failed"}
"""How an action can end, and the words for it."""


class ActionEnd(Struct):
    """How an action ended, in writing: nothing is forgotten."""

    ok: bool
    ended_at: float
    detail: str
    resumed_at_step: int | None = None
    steps_lost: int | None = None  # Steps that were made and had to be made again: as many as the log proves.
    steps_lost_at_most: int | None = None  # Where not every step is logged: as many as it may be; None: `steps_lost`.
    downtime_s: float | None = None
    seconds_lost: float | None = None  # The steps lost, in the time that they took.
    needless: bool = False
    """Nothing was left to do: it trains again, was started again, or is finished, without this action."""

    @property
    def outcome(self) -> str:
        """`ok`, `needless` or `failed`: as metrics count it."""
        return "ok" if self.ok else "needless" if self.needless else "failed"

    @property
    def words(self) -> str:
        """What the action did, after its name."""
        return OUTCOMES[self.outcome]


ASKING: dict[Rung, Operation] = {
    Rung.KILL_SWITCH: Operation.WRITE_KILL_SWITCH,
    Rung.SIGUSR1: Operation.SIGNAL_USR1,
    Rung.SIGTERM: Operation.SIGNAL_TERM,
}  # The operation in which the job itself is asked.
IRREVERSIBLE = (
    Operation.WRITE_ORDER,
    Operation.REQUEUE_HOLD,
    Operation.CANCEL,
    Operation.RESUBMIT,
    Operation.SIGNAL_TERM,
)  # Operations after which a run may have ended, and an action can only be brought to its end.


class ActionRun(Struct):
    """A decision that was allowed, with everything done for it so far."""

    decision: Decision
    records: tuple[OperationRecord, ...] = ()
    end: ActionEnd | None = None

    def tries(self, operation: Operation) -> list[OperationRecord]:
        """All attempts of an operation, oldest first."""
        return [record for record in self.records if record.operation is operation]

    def tried(self, operation: Operation) -> bool:
        return any(record.operation is operation for record in self.records)

    def sent(self, operation: Operation) -> bool:
        """Whether it was tried and may have reached Slurm: of what was skipped it is known that nothing was sent."""
        return any(record.outcome is not OperationOutcome.SKIPPED for record in self.tries(operation))

    def done(self, operation: Operation) -> bool:
        return any(r.outcome in (OperationOutcome.DONE, OperationOutcome.SKIPPED) for r in self.tries(operation))

    def refusal(self, operation: Operation) -> OperationRecord | None:
        """The attempt that was refused for good, if there is one."""
        return next((r for r in self.tries(operation) if r.outcome is OperationOutcome.FAILED), None)

    def save_requests(self) -> list[OperationRecord]:
        """Every time the job itself was, or may have been, asked to save or to end."""
        return [
            record
            for record in self.records
            if record.operation in ASKING.values()
            and record.outcome not in (OperationOutcome.FAILED, OperationOutcome.SKIPPED)
        ]

    def why_failed(self, operation: Operation) -> str:
        """Why an operation that was tried is over, a sentence."""
        refusal = self.refusal(operation)
        if refusal is not None:
            return f"{operation} was refused: {refusal.detail}"
        return f"{operation} did not succeed in time: {self.tries(operation)[-1].detail}"

    def can_be_abandoned(self) -> bool:
        """Whether nothing was done to the job yet but to ask it to save."""
        return not any(self.tried(operation) for operation in IRREVERSIBLE)


Outcome = tuple[OperationOutcome, str]  # What became of an operation, and a sentence about it.


def answer_shown(decision: Decision, status: SupervisorStatus | None) -> Outcome | None:
    """What the supervisor shows of the order of this decision; None while it shows nothing final."""
    if status is None or status.order != decision.id:
        return None
    if status.answer is OrderAnswer.STARTED:
        return OperationOutcome.DONE, f"{step_words(status.step_id)} runs on {plural(len(status.nodes), 'node')}"
    if status.answer in (OrderAnswer.REFUSED, OrderAnswer.FAILED):
        return OperationOutcome.FAILED, status.words or str(status.answer)
    return None
