"""The ladder where the step is started again in its allocation, by the job's supervisor. Pure.

The order is written once, under the id of its decision, and names the step that it is about: a supervisor that
reads it twice, or late, or after the step has ended by itself, does nothing. Whether the restart has worked is
seen in the new step's log, as after a requeue.
"""

from __future__ import annotations

from slurm_watchdog.controller.actions.ladder.after_requeue import drain_nodes, end_of_restart
from slurm_watchdog.controller.actions.ladder.state import Execute, Finish, Move, Observed, Stage, Wait, ladder_of
from slurm_watchdog.model.actions import ActionRun, Operation, Rung
from slurm_watchdog.model.slurm_states import ENDED_BY_PERSON, FAILED
from slurm_watchdog.model.supervisor import OrderAnswer

ORDER = (Operation.WRITE_ORDER, Operation.RESTART_STEP)
Way = tuple[Move | None, str]  # What to do; or None, and why this way is closed.


def restart_step(at: Observed) -> Way:
    """Starts the step again. Closed where the supervisor refuses or does not answer, and where the new step
    trains not in time."""
    if at.done(Operation.RESTART_STEP):
        return _follow(at)
    if at.stage is not Stage.SAME_RUN:
        return _ended_before(at)
    if started_by_itself(at):
        why = "the supervisor has already restarted the command: nothing to do"
        return at.finish(why, ok=False, needless=True), ""
    for operation in ORDER:
        if at.refusal(operation) is not None:
            return None, at.why_failed(operation)
    for operation in ORDER:
        if at.tried(operation) and not at.done(operation) and at.in_vain(operation):
            # No one knows: it may happen yet, and any other way would then end a step that trains.
            return at.give_up(at.why_failed(operation)), ""
    if at.paused and not at.tried(Operation.WRITE_ORDER):
        return Wait(reason="paused: the step is not started again until `slurm-watchdog resume`"), ""
    if at.in_place_objection is not None and not at.tried(Operation.WRITE_ORDER):
        return None, f"no restart_step: {at.in_place_objection}"
    if at.switch_is_out:  # the new step has the same kill switch, and would save and exit
        if at.in_vain(Operation.REMOVE_KILL_SWITCH):
            return None, f"no restart_step: {at.why_failed(Operation.REMOVE_KILL_SWITCH)}"
        where = tuple(node for node in at.decision.nodes if node not in at.decision.avoid)
        return at.retry(Execute(operation=Operation.REMOVE_KILL_SWITCH, nodes=where)), ""
    operation = Operation.RESTART_STEP if at.done(Operation.WRITE_ORDER) else Operation.WRITE_ORDER
    return at.retry(Execute(operation=operation)), ""


def is_under_way(at: ActionRun) -> bool:
    """Whether an order is out, or was carried out, and no other way of ending the run was begun."""
    began = any(at.tried(each) for each in (Operation.REQUEUE_HOLD, Operation.CANCEL, Operation.RESUBMIT))
    return at.tried(Operation.WRITE_ORDER) and not began and Rung.RESTART_STEP in ladder_of(at.decision)


def is_closed(at: ActionRun) -> bool:
    """Whether the step is not started again in its allocation any more, so that the nodes to avoid may be used."""
    return any(at.refusal(operation) is not None for operation in ORDER) or at.tried(Operation.REQUEUE_HOLD)


def started_by_itself(at: Observed) -> bool:
    """Whether the supervisor runs a later start, or step, than that of the decision, and not because of it."""
    status, step_id = at.supervisor, at.decision.step_id
    if status is None or not status.step_id or not step_id:
        return False
    if status.order == at.decision.id and status.answer is not OrderAnswer.REFUSED:
        return False
    numbers = status.step_id.isdecimal() and step_id.isdecimal()
    return status.starts > at.decision.start > 0 or (numbers and int(status.step_id) > int(step_id))


def _follow(at: Observed) -> Way:
    """The new step was started: does it train?"""
    ordered_at = at.tries(Operation.WRITE_ORDER)[0].intent_at
    started_at = max(record.outcome_at or record.intent_at for record in at.tries(Operation.RESTART_STEP))
    if at.new_step_first_step is not None:
        drained = drain_nodes(at)
        if drained is not None:
            return drained, ""
        without = f" without {', '.join(at.decision.avoid)}" if at.decision.avoid else ""
        resumed = f", from {at.decision.resume_from}" if at.decision.resume_from else ""
        what = f"the job runs again in its allocation{without}{resumed}"
        end = end_of_restart(at, what, ordered_at, at.new_step_first_step)
        return Finish(end=end), ""
    if at.stage is not Stage.SAME_RUN:
        return _ended(at)
    if at.now - started_at > at.limits.confirm_s and at.supervisor is None:
        return at.give_up("the step was started again, and its supervisor has not reported since"), ""
    if at.now - started_at > at.limits.confirm_s:
        return None, f"the step was started again, and trained not within {at.limits.confirm_s:.0f} s"
    return Wait(reason="waiting for the first new step", until=started_at + at.limits.confirm_s), ""


def _ended_before(at: Observed) -> Way:
    """The job has ended, and no new step of it is known. Without an order it is run again as the rungs before have
    left it; one that hung while an order was out may have lost its supervisor in the middle of it."""
    assert at.job is not None
    if not at.tried(Operation.WRITE_ORDER):
        return None, "no restart_step: the job has ended"
    hung = at.done(Operation.WRITE_ORDER) and at.decision.loop_turns is False and at.job.state in FAILED
    over = at.made_last_step or at.job.state in ENDED_BY_PERSON
    if not over and at.may_have_made_last_step:
        return Wait(reason="the job has ended; waiting for the last lines of its log: it may be finished"), ""
    if not over and (at.is_saved or hung):
        return None, f"no restart_step: the job has ended {at.job.state}"
    return at.give_up(f"the job ended on its own ({at.job.state}); it is not run again"), ""


def _ended(at: Observed) -> Way:
    assert at.job is not None
    if at.stage is Stage.ENDING:
        return Wait(reason="the job is ending"), ""
    if at.job.state == "COMPLETED" or at.job.state in ENDED_BY_PERSON:
        ok = at.job.state == "COMPLETED"
        why = f"the step was started again, and the job has ended {at.job.state}"
        return at.finish(why, ok=ok), ""
    return None, f"the job ended {at.job.state} after its step was started again"
