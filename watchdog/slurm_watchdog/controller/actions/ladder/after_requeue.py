"""The ladder after the end of the run: exclude, drain, take the kill switch away, release, see the first new
step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.controller.actions.ladder.state import (
    Execute,
    Finish,
    Move,
    Observed,
    Stage,
    StepsLost,
    StuckNode,
    Wait,
    steps_lost,
    why_it_waits,
    work_words,
)
from slurm_watchdog.model.actions import ActionEnd, Operation, OperationOutcome
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import REQUEUED, STARTED

LATE_S = 60.0  # slurmctld may carry a request out so long after its sender gave up waiting: it is queued there.
QUEUE_REASONS: dict[str, str] = {
    "JobArrayTaskLimit": "another element of its array runs, and the array allows no more at once (%)",
    "Resources": "there are not enough free nodes",
    "Priority": "jobs of higher priority come first",
    "Dependency": "another job has to end first",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved",
    "BeginTime": "its start was put off",
    "JobHeldUser": "a user holds it",
    "JobHeldAdmin": "an administrator holds it",
}  # Slurm's reasons for a job that waits, in words (squeue(1), JOB REASON CODES).


def after_requeue(at: Observed) -> Move:
    """Requeued by us: held, queued, or running again."""
    if at.stage is Stage.HELD:
        return _while_held(at)
    return _confirm(at)


def _while_held(at: Observed) -> Move:
    """Requeued and held by us: add exclusions, take the kill switch away, release."""
    assert at.job is not None
    if at.done(Operation.RELEASE):
        return at.give_up("the job was released and then held again by a user")
    careful = _exclude(at) or drain_nodes(at)
    if careful is not None:
        return careful
    if at.switch_is_out:
        return at.retry(Execute(operation=Operation.REMOVE_KILL_SWITCH))
    if at.decision.hold:
        saved = [f" ({each.detail})" for each in at.tries(Operation.WAIT_CHECKPOINT) if each.detail][-1:]
        waits = f"it waits in the queue, held: `scontrol release {at.job.job_id}` lets it run"
        return at.ends(f"the job has saved{''.join(saved)}; {waits}")
    if at.stalled_mounts:
        return at.wait_for_mounts()
    if at.paused:
        return Wait(reason="paused: the job stays held until `slurm-watchdog resume`")
    if at.decision.held_why:
        why = f"the job was requeued and stays held: `scontrol release` lets it run. {at.decision.held_why}"
        return at.ends(why)
    if _may_be_requeued_again(at):
        return Wait(reason="a request to requeue it got no answer: it stays held until that request has expired")
    return at.retry(Execute(operation=Operation.RELEASE))


def _may_be_requeued_again(at: Observed) -> bool:
    """Whether a request that was repeated because no one answered may still be under way to Slurm: it would
    hit the next run. A job that is held takes no harm from it."""
    before = at.tries(Operation.REQUEUE_HOLD)
    doubtful = [r.outcome_at or r.intent_at for r in before if r.outcome is OperationOutcome.UNKNOWN]
    return len(before) > 1 and any(at.now < sent_at + LATE_S for sent_at in doubtful)


def _exclude(at: Observed) -> Move | None:
    """Adds the decision's nodes to the exclusions that are there, and drops those of ours that are too old."""
    assert at.job is not None
    if at.refusal(Operation.EXCLUDE) is not None or at.in_vain(Operation.EXCLUDE):
        return None
    if any(r.outcome is OperationOutcome.SKIPPED for r in at.tries(Operation.EXCLUDE)):
        return None
    there = at.job.excluded_nodes
    missing = [node for node in at.decision.exclude if node not in there]
    if missing and at.exclude_objection is not None:
        return at.retry(Execute(operation=Operation.EXCLUDE, skip=at.exclude_objection))
    expired = [node for node in at.expired_exclusions if node in there and node not in at.decision.exclude]
    if not missing and not expired:
        return None
    nodes = tuple(dict.fromkeys((*(node for node in there if node not in expired), *missing)))
    return at.retry(Execute(operation=Operation.EXCLUDE, nodes=nodes))


def drain_nodes(at: Observed) -> Move | None:
    """Drains what the decision wants drained, before another job lands there; the job continues either way."""
    if not at.decision.drain or at.tried(Operation.DRAIN):
        return None
    if at.paused:
        return Wait(reason="paused: no node is drained until `slurm-watchdog resume`")
    return Execute(operation=Operation.DRAIN, attempt=1, nodes=at.decision.drain)


def _confirm(at: Observed) -> Move:
    """Released: the restart has worked when the new run has made its first new step."""
    assert at.job is not None
    if at.switch_is_out:
        return at.retry(Execute(operation=Operation.REMOVE_KILL_SWITCH))
    requeued_at = at.tries(Operation.REQUEUE_HOLD)[0].intent_at
    if at.next_first_step is not None:
        avoided = [node for node in at.decision.exclude if node in at.job.excluded_nodes]
        without = f" without {', '.join(avoided)}" if avoided else ""
        what = f"the job runs again{without}"
        return Finish(end=end_of_restart(at, what, requeued_at, at.next_first_step))
    if at.stage is Stage.NEXT_RUN and at.job.state == "COMPLETED":  # it did what was left to do
        why = "the job was restarted and has completed, with exit code 0"
        return Finish(end=ActionEnd(ok=True, ended_at=at.now, detail=why, downtime_s=at.now - requeued_at))
    if at.stage is Stage.NEXT_RUN and at.job.state not in STARTED | REQUEUED:
        return at.give_up(f"the job was restarted and is {at.job.state} without a new step")
    freed = (_free_stuck(at) or _drop_exclusions(at)) if at.stage is Stage.QUEUED else None
    return freed or described_end(at, at.job)


def _drop_exclusions(at: Observed) -> Move | None:
    """Nodes that went down since may leave too few: then our own exclusions go again."""
    assert at.job is not None
    ours = [node for node in at.decision.exclude if node in at.job.excluded_nodes]
    last_at = max(r.outcome_at or r.intent_at for r in at.records)
    if at.exclude_objection is None or not ours or at.now - last_at < at.limits.step_s or at.paused:
        return None
    kept = tuple(node for node in at.job.excluded_nodes if node not in ours)
    return Execute(operation=Operation.EXCLUDE, attempt=len(at.tries(Operation.EXCLUDE)) + 1, nodes=kept)


def _free_stuck(at: Observed) -> Move | None:
    """Sets the nodes DOWN that keep the job from starting, where a site permits that, and once: None where
    nothing is to be done."""
    released_at = max((r.intent_at for r in at.tries(Operation.RELEASE)), default=at.now)
    if not at.stuck or at.limits.set_down_after_s <= 0 or at.now - released_at < at.limits.set_down_after_s:
        return None
    if at.done(Operation.SET_DOWN) or any(node.objection for node in at.stuck):
        return None
    if at.paused:
        return Wait(reason="paused: no node is set DOWN until `slurm-watchdog resume`")
    nodes = tuple(node.name for node in at.stuck)
    return at.attempt(Execute(operation=Operation.SET_DOWN, nodes=nodes))


def described_end(at: Observed, job: SlurmJob) -> Move:
    """Waits for the first new step of `job`, and says for what; gives up at the limit."""
    last_at = max(r.outcome_at or r.intent_at for r in at.records)
    queued = _why_queued(job, at.stuck) if job.state in REQUEUED else None
    if job.state not in STARTED | REQUEUED:
        return at.give_up(f"job {job.job_id} is {job.state} without a new step")
    if at.now - last_at > at.limits.confirm_s:
        return at.give_up(
            f"released, and still {queued} {at.limits.confirm_s:.0f} s later: Slurm starts it when it can"
            if queued
            else f"no new step within {at.limits.confirm_s:.0f} s of the restart"
        )
    return Wait(
        reason=f"the job is {queued}" if queued else "waiting for the first new step",
        until=last_at + at.limits.confirm_s,
    )


def _why_queued(job: SlurmJob, stuck: Sequence[StuckNode]) -> str:
    """`waiting in the queue (…)`, with Slurm's reason. Slurm may append node names to it: `ReqNodeNotAvail, …`."""
    if stuck:
        objections = "; ".join(f"{node.name} is not set DOWN: {node.objection}" for node in stuck if node.objection)
        return why_it_waits(stuck) + (f". {objections}" if objections else "")
    if job.state == "COMPLETING":
        return "waiting until its old run has ended"
    name = job.reason.strip("()").partition(",")[0]
    if not name or name == "None":
        return "waiting in the queue"
    words = QUEUE_REASONS.get(name)
    return f"waiting in the queue ({name}{': ' + words if words else ''})"


def end_of_restart(at: Observed, what: str, begun_at: float, first: int) -> ActionEnd:
    """The restart has worked: where it continues, and what was lost. `begun_at`: when the old run was ended;
    `first`: the first step after it."""
    decision = at.decision
    lost = seconds = None
    if decision.step_at_decision is not None and first > 0:
        last = max(decision.step_at_decision, at.step or 0)
        lost = steps_lost(
            last, at.stride, first, at.next_stride, at.loaded_step, by_epochs=at.next_by_epochs,
            unseen=at.unseen_lines,
        )  # fmt: skip
        if at.is_saved and at.loaded_step is not None and at.loaded_step >= last:
            lost = StepsLost(at_least=0, at_most=0)  # it has saved, left by itself, and continues from there
        seconds = None if decision.step_s is None else lost.at_least * decision.step_s
    counted = " (as its log counts epochs)" if at.next_by_epochs else ""
    words = "" if lost is None else f"{counted}, {lost.words}"
    if lost is not None and lost.at_most and decision.step_s is not None:
        words += f" (about {work_words(lost, decision.step_s)} of work)"
    begun = f"first new step {first}"
    if at.loaded_step is not None and 0 < first <= at.loaded_step:  # the line of the checkpoint that it has loaded
        begun = f"its log continues at step {first}"
    return ActionEnd(
        ok=True,
        ended_at=at.now,
        detail=f"{what}; {begun}{words}",
        resumed_at_step=first,
        steps_lost=None if lost is None else lost.at_least,
        steps_lost_at_most=None if lost is None or lost.at_most == lost.at_least else lost.at_most,
        seconds_lost=seconds,
        downtime_s=at.now - begun_at,
    )
