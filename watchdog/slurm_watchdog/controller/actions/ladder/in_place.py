"""The ladder where the step is started again in its allocation, by the job's supervisor. Pure.

The order is written once, under the id of its decision, and names the step that it is about: a supervisor that
reads it twice, or late, or after the step has ended by itself, does nothing. Whether the restart has worked is
seen in the new step's log, as after a requeue.
"""

from __future__ import annotations

from slurm_watchdog.controller.actions.ladder.after_requeue import drain_nodes, end_of_restart
from slurm_watchdog.controller.actions.ladder.state import (
    Execute,
    Finish,
    LadderLimits,
    Move,
    Observed,
    Stage,
    Wait,
    done,
    finish,
    give_up,
    in_vain,
    is_saved,
    ladder_of,
    made_last_step,
    may_have_made_last_step,
    refused,
    retry,
    switch_is_out,
    tried,
    tries,
    why_failed,
)
from slurm_watchdog.model.actions import ActionEnd, ActionRun, Operation, Rung
from slurm_watchdog.model.slurm_states import ENDED_BY_PERSON, FAILED
from slurm_watchdog.model.supervisor import OrderAnswer

ORDER = (Operation.WRITE_ORDER, Operation.RESTART_STEP)
Way = tuple[Move | None, str]  # What to do; or None, and why this way is closed.


def restart_step(run: ActionRun, stage: Stage, world: Observed, limits: LadderLimits) -> Way:
    """Starts the step again. Closed where the supervisor refuses or does not answer, and where the new step
    trains not in time."""
    if done(run, Operation.RESTART_STEP):
        return _follow(run, stage, world, limits)
    if stage is not Stage.SAME_RUN:
        return _ended_before(run, world)
    if started_by_itself(run, world):
        why = "the supervisor has already restarted the command: nothing to do"
        return finish(run, world, ActionEnd(ok=False, ended_at=world.now, detail=why, needless=True)), ""
    for operation in ORDER:
        if refused(run, operation) is not None:
            return None, why_failed(run, operation)
    for operation in ORDER:
        if tried(run, operation) and not done(run, operation) and in_vain(run, world, limits, operation):
            # Nobody knows: it may happen yet, and any other way would then end a step that trains.
            return give_up(run, world, why_failed(run, operation)), ""
    if world.paused and not tried(run, Operation.WRITE_ORDER):
        return Wait(reason="paused: the step is not started again until `slurm-watchdog resume`"), ""
    if world.in_place_objection is not None and not tried(run, Operation.WRITE_ORDER):
        return None, f"no restart_step: {world.in_place_objection}"
    if switch_is_out(run):  # the new step has the same kill switch, and would save and exit
        if in_vain(run, world, limits, Operation.REMOVE_KILL_SWITCH):
            return None, f"no restart_step: {why_failed(run, Operation.REMOVE_KILL_SWITCH)}"
        where = tuple(node for node in run.decision.nodes if node not in run.decision.avoid)
        return retry(run, world, Execute(operation=Operation.REMOVE_KILL_SWITCH, nodes=where)), ""
    operation = Operation.RESTART_STEP if done(run, Operation.WRITE_ORDER) else Operation.WRITE_ORDER
    return retry(run, world, Execute(operation=operation)), ""


def is_under_way(run: ActionRun) -> bool:
    """Whether an order is out, or was carried out, and no other way of ending the run was begun."""
    began = any(tried(run, each) for each in (Operation.REQUEUE_HOLD, Operation.CANCEL, Operation.RESUBMIT))
    return tried(run, Operation.WRITE_ORDER) and not began and Rung.RESTART_STEP in ladder_of(run.decision)


def is_closed(run: ActionRun) -> bool:
    """Whether the step is not started again in its allocation any more, so that the nodes to avoid may be used."""
    return any(refused(run, operation) is not None for operation in ORDER) or tried(run, Operation.REQUEUE_HOLD)


def started_by_itself(run: ActionRun, world: Observed) -> bool:
    """Whether the supervisor runs a later start, or step, than that of the decision, and not because of it."""
    status, step_id = world.supervisor, run.decision.step_id
    if status is None or not status.step_id or not step_id:
        return False
    if status.order == run.decision.id and status.answer is not OrderAnswer.REFUSED:
        return False
    numbers = status.step_id.isdecimal() and step_id.isdecimal()
    return status.starts > run.decision.start > 0 or (numbers and int(status.step_id) > int(step_id))


def _follow(run: ActionRun, stage: Stage, world: Observed, limits: LadderLimits) -> Way:
    """The new step was started: does it train?"""
    ordered_at = tries(run, Operation.WRITE_ORDER)[0].intent_at
    started_at = max(record.outcome_at or record.intent_at for record in tries(run, Operation.RESTART_STEP))
    if world.new_step_first_step is not None:
        drained = drain_nodes(run, world)
        if drained is not None:
            return drained, ""
        without = f" without {', '.join(run.decision.avoid)}" if run.decision.avoid else ""
        resumed = f", from {run.decision.resume_from}" if run.decision.resume_from else ""
        what = f"the job runs again in its allocation{without}{resumed}"
        end = end_of_restart(run, world, what, ordered_at, world.new_step_first_step)
        return Finish(end=end), ""
    if stage is not Stage.SAME_RUN:
        return _ended(run, stage, world)
    if world.now - started_at > limits.confirm_s and world.supervisor is None:
        return give_up(run, world, "the step was started again, and its supervisor has not reported since"), ""
    if world.now - started_at > limits.confirm_s:
        return None, f"the step was started again, and trained not within {limits.confirm_s:.0f} s"
    return Wait(reason="waiting for the first new step", until=started_at + limits.confirm_s), ""


def _ended_before(run: ActionRun, world: Observed) -> Way:
    """The job has ended, and no new step of it is known. Without an order it is run again as the rungs before have
    left it; one that hung while an order was out may have lost its supervisor in the middle of it."""
    assert world.job is not None
    if not tried(run, Operation.WRITE_ORDER):
        return None, "no restart_step: the job has ended"
    hung = done(run, Operation.WRITE_ORDER) and run.decision.loop_turns is False and world.job.state in FAILED
    over = made_last_step(world) or world.job.state in ENDED_BY_PERSON
    if not over and may_have_made_last_step(world):
        return Wait(reason="the job has ended; waiting for the last lines of its log: it may be finished"), ""
    if not over and (is_saved(run, world) or hung):
        return None, f"no restart_step: the job has ended {world.job.state}"
    return give_up(run, world, f"the job ended on its own ({world.job.state}); it is not run again"), ""


def _ended(run: ActionRun, stage: Stage, world: Observed) -> Way:
    assert world.job is not None
    if stage is Stage.ENDING:
        return Wait(reason="the job is ending"), ""
    if world.job.state == "COMPLETED" or world.job.state in ENDED_BY_PERSON:
        ok = world.job.state == "COMPLETED"
        why = f"the step was started again, and the job has ended {world.job.state}"
        return finish(run, world, ActionEnd(ok=ok, ended_at=world.now, detail=why)), ""
    return None, f"the job ended {world.job.state} after its step was started again"
