"""The ladder of a process that outlived its job on a GPU: SIGTERM, a wait, SIGKILL, a wait; drain if it
cannot be killed. Pure.

The world is asked first here as well: the node says whether the process is there. A SIGTERM is sent once,
whatever became of the answer; before each signal the node looks at everything again, and refuses if anything
is not as the request says.
"""

from __future__ import annotations

from datetime import datetime, timezone

from slurm_watchdog.controller.actions.ladder.state import (
    MIN_TRIES,
    Execute,
    Finish,
    LadderLimits,
    Move,
    Observed,
    Reconcile,
    Wait,
    attempt,
    done,
    retry,
    tries,
    why_failed,
)
from slurm_watchdog.model.actions import ActionEnd, ActionRun, Operation, OperationOutcome, OperationRecord
from slurm_watchdog.model.incidents import GpuProcess
from slurm_watchdog.model.protocol import ProcessEnd

MAX_TRIES = 6  # Of one signal: what the node objects to has three quarters of a minute to pass.
SIGNALS: dict[Operation, str] = {Operation.TERM_PROCESS: "term", Operation.KILL_PROCESS: "kill"}


def next_move(run: ActionRun, process: GpuProcess, world: Observed, limits: LadderLimits) -> Move:
    """What is to be done next. Given any prefix of the journal and any world, no process gets SIGTERM twice."""
    seen = world.process
    lost = next((record for record in run.records if record.outcome is None), None)
    if lost is not None and (lost.operation is Operation.DRAIN or seen is not None or _is_silent(run, world, limits)):
        return _reconcile(lost, seen)
    if seen is not None and seen.gone:
        return _end(world, True, f"{name_of(process)} has ended: {gpus_of(process)} free again")
    if seen is not None and seen.released and not _sent(run, Operation.KILL_PROCESS):
        return _end(world, True, f"{name_of(process)} has let go of {gpus_of(process)}")
    if seen is None and run.records:
        if _is_silent(run, world, limits):
            return _end(
                world,
                False,
                f"what became of {name_of(process)} is not known: {process.node} does not answer",
            )
        return Wait(reason=f"{process.node} is asked what became of process {process.pid}")
    if not run.records and world.process_objection is not None:
        return _end(world, False, f"{name_of(process)} was left alone: {world.process_objection}")
    if not _is_over(run, world, Operation.TERM_PROCESS, limits.term_s):
        return _signal(run, process, world, Operation.TERM_PROCESS)
    if not _is_over(run, world, Operation.KILL_PROCESS, limits.kill_s):
        return _signal(run, process, world, Operation.KILL_PROCESS)
    return _in_vain(run, process, world, limits)


def _is_silent(run: ActionRun, world: Observed, limits: LadderLimits) -> bool:
    """Whether the node has not said a word since long after the last signal."""
    last = max((record.intent_at for record in run.records), default=run.decision.decided_at)
    return world.process is None and world.now - max(last, world.taken_up_at) > limits.kill_s + limits.step_s


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


def _is_over(run: ActionRun, world: Observed, operation: Operation, limit_s: float) -> bool:
    """Whether a signal was sent, as far as is known, and had its time."""
    sent = _sent(run, operation)
    if operation is Operation.KILL_PROCESS and not _is_sure(sent) and len(sent) < MIN_TRIES:
        return False  # SIGKILL does no more the second time than the first: it is sent until that is known
    return bool(sent) and world.now - sent[-1].intent_at > limit_s


def _sent(run: ActionRun, operation: Operation) -> list[OperationRecord]:
    """Every time the signal was, or may have been, sent."""
    return [each for each in tries(run, operation) if each.outcome in (OperationOutcome.DONE, OperationOutcome.UNKNOWN)]


def _is_sure(sent: list[OperationRecord]) -> bool:
    return any(each.outcome is OperationOutcome.DONE for each in sent)


def _signal(run: ActionRun, process: GpuProcess, world: Observed, operation: Operation) -> Move:
    sent = _sent(run, operation)
    if _is_sure(sent) or (sent and operation is Operation.TERM_PROCESS):
        return Wait(reason=f"{operation}: process {process.pid} on {process.node} has a moment to end")
    if world.process_objection is not None:
        return _end(world, False, f"{name_of(process)} was left alone: {world.process_objection}")
    if len(tries(run, operation)) >= MAX_TRIES:
        return _end(world, False, f"{name_of(process)} was left alone: {tries(run, operation)[-1].detail}")
    if world.paused:
        return Wait(reason=f"paused: process {process.pid} gets no signal until `slurm-watchdog resume`")
    return retry(run, world, Execute(operation=operation))


def _in_vain(run: ActionRun, process: GpuProcess, world: Observed, limits: LadderLimits) -> Move:
    """SIGKILL had its time, and the process is there."""
    if not _is_sure(_sent(run, Operation.KILL_PROCESS)):
        return _end(
            world,
            False,
            f"whether {name_of(process)} got SIGKILL is not known: {process.node} did not say so",
        )
    seen = world.process
    assert seen is not None
    why = f"unkillable: {described(run, process, seen)}"
    drain = run.decision.drain
    if not drain:
        return _end(world, False, why)
    if not done(run, Operation.DRAIN):
        if world.paused:
            return Wait(reason=f"paused: {process.node} is not drained until `slurm-watchdog resume`")
        move = attempt(run, world, limits, Execute(operation=Operation.DRAIN, nodes=drain))
        return _end(world, False, f"{why}; {why_failed(run, Operation.DRAIN)}") if move is None else move
    return _end(world, False, f"{why}; {tries(run, Operation.DRAIN)[-1].detail}")


def name_of(process: GpuProcess) -> str:
    """`process 4711 (python) of alice on n1`."""
    return f"process {process.pid} ({process.comm}) of {process.user} on {process.node}"


def gpus_of(process: GpuProcess) -> str:
    """The GPUs that it holds, as people find them."""
    return ", ".join(process.gpu_uuids) or ", ".join(f"/dev/nvidia{minor}" for minor in process.minors)


def described(run: ActionRun, process: GpuProcess, seen: ProcessEnd) -> str:
    """Who holds what since when, and where it hangs: for the reason of a drain too, so in few words."""
    where = f"in state {seen.state or '?'}" + (f" ({seen.wchan})" if seen.wchan else "")
    since = run.decision.process_since
    date = f" since {datetime.fromtimestamp(since, timezone.utc):%Y-%m-%dT%H:%MZ}" if since is not None else ""
    return (
        f"{name_of(process)}, of job {process.job_id}, which is over, holds {gpus_of(process)}{date}, "
        f"{where} after SIGKILL"
    )


def _end(world: Observed, ok: bool, detail: str) -> Finish:
    return Finish(end=ActionEnd(ok=ok, ended_at=world.now, detail=detail))
