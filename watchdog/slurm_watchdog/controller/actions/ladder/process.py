"""The ladder of a process that outlived its job on a GPU: SIGTERM, a wait, SIGKILL, a wait; drain if it
cannot be killed. Pure.

The world is asked first here as well: the node says whether the process is there. A SIGTERM is sent once,
whatever became of the answer; before each signal the node looks at everything again, and refuses if anything
is not as the request says.
"""

from __future__ import annotations

from datetime import datetime, timezone

from slurm_watchdog.controller.actions.ladder.state import MIN_TRIES, Execute, Move, Observed, Reconcile, Wait
from slurm_watchdog.model.actions import ActionRun, Operation, OperationOutcome, OperationRecord
from slurm_watchdog.model.incidents import GpuProcess
from slurm_watchdog.model.protocol import ProcessEnd

MAX_TRIES = 6  # Of one signal: what the node objects to has three quarters of a minute to pass.
SIGNALS: dict[Operation, str] = {Operation.TERM_PROCESS: "term", Operation.KILL_PROCESS: "kill"}


def next_move(at: Observed, process: GpuProcess) -> Move:
    """What is to be done next. Given any prefix of the journal and any world, no process gets SIGTERM twice."""
    seen = at.process
    lost = next((record for record in at.records if record.outcome is None), None)
    if lost is not None and (lost.operation is Operation.DRAIN or seen is not None or _is_silent(at)):
        return _reconcile(lost, seen)
    if seen is not None and seen.gone:
        return at.ends(f"{name_of(process)} has ended: {gpus_of(process)} free again")
    if seen is not None and seen.released and not _sent(at, Operation.KILL_PROCESS):
        return at.ends(f"{name_of(process)} has let go of {gpus_of(process)}")
    if seen is None and at.records:
        if _is_silent(at):
            return at.ends(f"what became of {name_of(process)} is not known: {process.node} does not answer", ok=False)
        return Wait(reason=f"{process.node} is asked what became of process {process.pid}")
    if not at.records and at.process_objection is not None:
        return at.ends(f"{name_of(process)} was left alone: {at.process_objection}", ok=False)
    if not _is_over(at, Operation.TERM_PROCESS, at.limits.term_s):
        return _signal(at, process, Operation.TERM_PROCESS)
    if not _is_over(at, Operation.KILL_PROCESS, at.limits.kill_s):
        return _signal(at, process, Operation.KILL_PROCESS)
    return _in_vain(at, process)


def _is_silent(at: Observed) -> bool:
    """Whether the node has not said a word since long after the last signal."""
    last = max((record.intent_at for record in at.records), default=at.decision.decided_at)
    return at.process is None and at.now - max(last, at.taken_up_at) > at.limits.kill_s + at.limits.step_s


def _reconcile(lost: OperationRecord, seen: ProcessEnd | None) -> Reconcile:
    """The controller died, or the node did not answer, between intent and outcome."""
    if seen is not None and seen.gone:
        return Reconcile(
            operation=lost.operation,
            attempt=lost.attempt,
            outcome=OperationOutcome.DONE,
            detail="the answer was lost; the process has ended",
        )
    detail = "the answer was lost; a signal is not sent twice, its effect is waited for"
    if lost.operation is not Operation.TERM_PROCESS:
        detail = "the answer was lost; it is done again, which is harmless"
    return Reconcile(operation=lost.operation, attempt=lost.attempt, outcome=OperationOutcome.UNKNOWN, detail=detail)


def _is_over(at: Observed, operation: Operation, limit_s: float) -> bool:
    """Whether a signal was sent, as far as is known, and had its time."""
    sent = _sent(at, operation)
    if operation is Operation.KILL_PROCESS and not _is_sure(sent) and len(sent) < MIN_TRIES:
        return False  # SIGKILL does no more the second time than the first: it is sent until that is known
    return bool(sent) and at.now - sent[-1].intent_at > limit_s


def _sent(at: ActionRun, operation: Operation) -> list[OperationRecord]:
    """Every time the signal was, or may have been, sent."""
    return [each for each in at.tries(operation) if each.outcome in (OperationOutcome.DONE, OperationOutcome.UNKNOWN)]


def _is_sure(sent: list[OperationRecord]) -> bool:
    return any(each.outcome is OperationOutcome.DONE for each in sent)


def _signal(at: Observed, process: GpuProcess, operation: Operation) -> Move:
    sent = _sent(at, operation)
    if _is_sure(sent) or (sent and operation is Operation.TERM_PROCESS):
        return Wait(reason=f"{operation}: process {process.pid} on {process.node} has a moment to end")
    if at.process_objection is not None:
        return at.ends(f"{name_of(process)} was left alone: {at.process_objection}", ok=False)
    if len(at.tries(operation)) >= MAX_TRIES:
        return at.ends(f"{name_of(process)} was left alone: {at.tries(operation)[-1].detail}", ok=False)
    if at.paused:
        return Wait(reason=f"paused: process {process.pid} gets no signal until `slurm-watchdog resume`")
    return at.retry(Execute(operation=operation))


def _in_vain(at: Observed, process: GpuProcess) -> Move:
    """SIGKILL had its time, and the process is there."""
    if not _is_sure(_sent(at, Operation.KILL_PROCESS)):
        return at.ends(f"whether {name_of(process)} got SIGKILL is not known: {process.node} did not say so", ok=False)
    seen = at.process
    assert seen is not None
    why = f"unkillable: {described(at, process, seen)}"
    drain = at.decision.drain
    if not drain:
        return at.ends(why, ok=False)
    if not at.done(Operation.DRAIN):
        if at.paused:
            return Wait(reason=f"paused: {process.node} is not drained until `slurm-watchdog resume`")
        move = at.attempt(Execute(operation=Operation.DRAIN, nodes=drain))
        return at.ends(f"{why}; {at.why_failed(Operation.DRAIN)}", ok=False) if move is None else move
    return at.ends(f"{why}; {at.tries(Operation.DRAIN)[-1].detail}", ok=False)


def name_of(process: GpuProcess) -> str:
    """`process 4711 (python) of alice on n1`."""
    return f"process {process.pid} ({process.comm}) of {process.user} on {process.node}"


def gpus_of(process: GpuProcess) -> str:
    """The GPUs that it holds, as people find them."""
    return ", ".join(process.gpu_uuids) or ", ".join(f"/dev/nvidia{minor}" for minor in process.minors)


def described(at: ActionRun, process: GpuProcess, seen: ProcessEnd) -> str:
    """Who holds what since when, and where it hangs: for the reason of a drain too, so in few words."""
    where = f"in state {seen.state or '?'}" + (f" ({seen.wchan})" if seen.wchan else "")
    since = at.decision.process_since
    date = f" since {datetime.fromtimestamp(since, timezone.utc):%Y-%m-%dT%H:%MZ}" if since is not None else ""
    return (
        f"{name_of(process)}, of job {process.job_id}, which is over, holds {gpus_of(process)}{date}, "
        f"{where} after SIGKILL"
    )
