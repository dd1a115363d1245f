"""The ladder where a run is ended: requeue, resubmit, leave it to its chain, cancel; each the fallback of the
ones before. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.controller.actions.ladder.after_requeue import LATE_S, described_end, drain_nodes, end_of_restart
from slurm_watchdog.controller.actions.ladder.state import Execute, Finish, Move, Observed, Stage, Wait, ladder_of
from slurm_watchdog.knowledge.rungs import ENDINGS
from slurm_watchdog.model.actions import ActionRun, Operation, Rung
from slurm_watchdog.model.slurm import SlurmJob
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


def end_run(at: Observed) -> Move:
    """The first way to end the run that Slurm has not refused. `stage` is SAME_RUN or FINISHED."""
    reasons = []
    for rung in ladder_of(at.decision):
        if rung not in ENDINGS:
            continue
        move, why = _ENDINGS[rung](at)
        if move is not None:
            return move
        reasons.append(why)
    if not reasons:  # the job was asked, and that is all that the rule wants
        after = "continues: the rule does not end it"
        if at.stage is Stage.FINISHED:
            after = "ended on its own; the rule restarts nothing"
        return at.finish(f"the job has saved and {after}")
    return at.give_up("; ".join(reasons))


def _requeue(at: Observed) -> Way:
    if at.refusal(Operation.REQUEUE_HOLD) is not None:
        return None, at.why_failed(Operation.REQUEUE_HOLD)
    if (closed := _closed(at)) is not None:
        return closed
    if at.in_vain(Operation.REQUEUE_HOLD):
        # No one knows: it may happen yet, and then any other way would run the job twice.
        return at.give_up(at.why_failed(Operation.REQUEUE_HOLD)), ""
    do = Execute(operation=Operation.REQUEUE_HOLD, only_unfinished=at.stage is Stage.SAME_RUN)
    return at.retry(do), ""


def _closed(at: Observed) -> Way | None:
    """Where the job must not go through the queue again: someone holds it, or another job continues in its place."""
    if at.job is not None and at.job.kept_from_queue:
        return None, at.job.kept_from_queue
    if at.stage is Stage.FINISHED and at.freed:
        return _chain_end(at, at.freed), ""
    return None


def _resubmit(at: Observed) -> Way:
    """Submitted first, held and behind the old job: if that is refused, the old one is as it was."""
    if (closed := _closed(at)) is not None:
        return closed
    if at.freed:
        return None, f"no resubmit: job {at.freed[0].job_id} waits for the end of this one, and would run beside it"
    move = at.attempt(Execute(operation=Operation.RESUBMIT, nodes=at.decision.exclude))
    return (None, at.why_failed(Operation.RESUBMIT)) if move is None else (move, "")


def _chain(at: Observed) -> Way:
    if not at.behind:
        return None, "nothing is queued behind the job: there is no chain to leave it to"
    if at.stage is Stage.FINISHED:
        return _chain_end(at, at.behind), ""
    return _cancel(at)


def _cancel(at: Observed) -> Way:
    if at.stage is Stage.FINISHED:
        return at.finish("the job has ended"), ""
    move = at.attempt(Execute(operation=Operation.CANCEL))
    return (None, at.why_failed(Operation.CANCEL)) if move is None else (move, "")


_ENDINGS = {
    Rung.RESTART_STEP: restart_step,
    Rung.REQUEUE: _requeue,
    Rung.RESUBMIT: _resubmit,
    Rung.CHAIN: _chain,
    Rung.CANCEL: _cancel,
}


def after_cancel(at: Observed) -> Move:
    """Cancelled, or tried to: the job has to end."""
    if at.stage in (Stage.SAME_RUN, Stage.ENDING):
        return _wait_for_end(at)
    if Rung.CHAIN in ladder_of(at.decision) and at.behind:
        return _chain_end(at, at.behind)
    return at.finish("the job was cancelled and has ended")


def _wait_for_end(at: Observed) -> Move:
    began = at.tries(Operation.CANCEL)[0].intent_at
    if not at.done(Operation.CANCEL) and at.stage is Stage.SAME_RUN:
        move = at.attempt(Execute(operation=Operation.CANCEL))
        return at.give_up(at.why_failed(Operation.CANCEL)) if move is None else move
    if at.now - began > at.limits.end_s:
        return at.give_up(
            f"the job was cancelled and has not ended within {at.limits.end_s:.0f} s: a process of it cannot be killed"
        )
    return Wait(reason="the job was cancelled and is ending")


def _chain_end(at: Observed, behind: Sequence[SlurmJob]) -> Move:
    """What continues where the job ended."""
    first = behind[0]
    how = f"{first.state}, {first.reason}" if first.reason not in ("", "None") else first.state
    more = f" and {len(behind) - 1} more" if len(behind) > 1 else ""
    never = first.reason.startswith("DependencyNeverSatisfied")
    detail = f"the job has ended; job {first.job_id} ({how}){more} continues where it stopped"
    if never:
        detail = (
            f"the job has ended, and job {first.job_id} behind it will never start "
            f"(DependencyNeverSatisfied): use afterany"
        )
    return at.finish(detail, ok=not never)


def go_on_elsewhere(at: Observed) -> Move:
    """A new job was submitted, held: the old one is ended, then the new one is let go."""
    new = at.submitted
    if new is None and not at.done(Operation.RESUBMIT):
        last = at.tries(Operation.RESUBMIT)[-1]
        if not at.submission_looked_for or at.now < (last.outcome_at or last.intent_at) + LATE_S:
            return Wait(reason=f"whether a job was submitted is not known yet: {last.detail}")
        move, why = _resubmit(at)
        return at.give_up(why) if move is None else move
    if new is None:
        since = at.tries(Operation.RESUBMIT)[-1].outcome_at or at.now
        if at.now - since > at.limits.step_s and at.submission_looked_for:
            return at.give_up("the job that was submitted in its place was cancelled")
        return Wait(reason="the job that was submitted is not in Slurm's listing yet")
    if at.stage in (Stage.HELD, Stage.QUEUED, Stage.NEXT_RUN):
        return at.give_up("the old job was requeued outside the watchdog, and must not run twice")
    if at.stage in (Stage.SAME_RUN, Stage.ENDING):
        if at.paused:
            return Wait(reason="paused: the job is not cancelled until `slurm-watchdog resume`")
        if not at.tried(Operation.CANCEL):
            return (
                Execute(operation=Operation.CANCEL, attempt=1)
                if at.stage is Stage.SAME_RUN
                else Wait(reason="it is ending")
            )
        return _wait_for_end(at)
    ours = at.tried(Operation.CANCEL) or at.done(Operation.RELEASE)
    if at.stage is Stage.FINISHED and not ours and at.job is not None and at.job.state in ENDED_BY_PERSON:
        return at.give_up(f"the job was ended outside the watchdog ({at.job.state}); it is not run again")
    return _let_go(at, new)


def _let_go(at: Observed, new: SlurmJob) -> Move:
    if at.switch_is_out:
        return at.retry(Execute(operation=Operation.REMOVE_KILL_SWITCH))
    if new.held and not at.done(Operation.RELEASE):
        careful = drain_nodes(at)
        if careful is not None:
            return careful
        if at.stalled_mounts:
            return at.wait_for_mounts()
        if at.paused:
            return Wait(reason="paused: the new job stays held until `slurm-watchdog resume`")
        return at.retry(Execute(operation=Operation.RELEASE, instead=True))
    begun_at = at.tries(Operation.RESUBMIT)[0].intent_at
    if at.next_first_step is not None:
        what = f"job {new.job_id} runs in its place"
        return Finish(end=end_of_restart(at, what, begun_at, at.next_first_step))
    return described_end(at, new)
