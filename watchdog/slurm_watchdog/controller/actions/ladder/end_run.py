"""The ladder where a run is ended: requeue, resubmit, leave it to its chain, cancel; each the fallback of the
ones before. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_watchdog.controller.actions.ladder.after_requeue import (
    LATE_S,
    described_end,
    drain_nodes,
    end_of_restart,
)
from slurm_watchdog.controller.actions.ladder.in_place import Way, restart_step
from slurm_watchdog.controller.actions.ladder.state import (
    Execute,
    Finish,
    LadderLimits,
    Move,
    Observed,
    Stage,
    Wait,
    attempt,
    done,
    finish,
    give_up,
    in_vain,
    ladder_of,
    refused,
    retry,
    switch_is_out,
    tried,
    tries,
    wait_for_mounts,
    why_failed,
)
from slurm_watchdog.knowledge.rungs import ENDINGS
from slurm_watchdog.model.actions import ActionEnd, ActionRun, Operation, Rung
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import ENDED_BY_PERSON


def end_run(run: ActionRun, stage: Stage, world: Observed, limits: LadderLimits) -> Move:
    """The first way to end the run that Slurm has not refused. `stage` is SAME_RUN or FINISHED."""
    reasons = []
    for rung in ladder_of(run.decision):
        if rung not in ENDINGS:
            continue
        move, why = _ENDINGS[rung](run, stage, world, limits)
        if move is not None:
            return move
        reasons.append(why)
    if not reasons:  # the job was asked, and that is all that the rule wants
        after = "continues: the rule does not end it"
        if stage is Stage.FINISHED:
            after = "ended on its own; the rule restarts nothing"
        return finish(run, world, ActionEnd(ok=True, ended_at=world.now, detail=f"the job has saved and {after}"))
    return give_up(run, world, "; ".join(reasons))


def _requeue(run: ActionRun, stage: Stage, world: Observed, limits: LadderLimits) -> Way:
    if refused(run, Operation.REQUEUE_HOLD) is not None:
        return None, why_failed(run, Operation.REQUEUE_HOLD)
    if (closed := _closed(run, stage, world)) is not None:
        return closed
    if in_vain(run, world, limits, Operation.REQUEUE_HOLD):
        # Nobody knows: it may happen yet, and then any other way would run the job twice.
        return give_up(run, world, why_failed(run, Operation.REQUEUE_HOLD)), ""
    do = Execute(operation=Operation.REQUEUE_HOLD, only_unfinished=stage is Stage.SAME_RUN)
    return retry(run, world, do), ""


def _closed(run: ActionRun, stage: Stage, world: Observed) -> Way | None:
    """Where the job must not go through the queue again: somebody holds it, or another job continues in its place."""
    if world.job is not None and world.job.kept_from_queue:
        return None, world.job.kept_from_queue
    if stage is Stage.FINISHED and world.freed:
        return finish(run, world, _chain_end(world, world.freed)), ""
    return None


def _resubmit(run: ActionRun, stage: Stage, world: Observed, limits: LadderLimits) -> Way:
    """Submitted first, held and behind the old job: if that is refused, the old one is as it was."""
    if (closed := _closed(run, stage, world)) is not None:
        return closed
    if world.freed:
        return None, f"no resubmit: job {world.freed[0].job_id} waits for the end of this one, and would run beside it"
    move = attempt(run, world, limits, Execute(operation=Operation.RESUBMIT, nodes=run.decision.exclude))
    return (None, why_failed(run, Operation.RESUBMIT)) if move is None else (move, "")


def _chain(run: ActionRun, stage: Stage, world: Observed, limits: LadderLimits) -> Way:
    if not world.behind:
        return None, "nothing is queued behind the job: there is no chain to leave it to"
    if stage is Stage.FINISHED:
        return finish(run, world, _chain_end(world, world.behind)), ""
    return _cancel(run, stage, world, limits)


def _cancel(run: ActionRun, stage: Stage, world: Observed, limits: LadderLimits) -> Way:
    if stage is Stage.FINISHED:
        return finish(run, world, ActionEnd(ok=True, ended_at=world.now, detail="the job has ended")), ""
    move = attempt(run, world, limits, Execute(operation=Operation.CANCEL))
    return (None, why_failed(run, Operation.CANCEL)) if move is None else (move, "")


_ENDINGS = {
    Rung.RESTART_STEP: restart_step,
    Rung.REQUEUE: _requeue,
    Rung.RESUBMIT: _resubmit,
    Rung.CHAIN: _chain,
    Rung.CANCEL: _cancel,
}


def after_cancel(run: ActionRun, stage: Stage, world: Observed, limits: LadderLimits) -> Move:
    """Cancelled, or tried to: the job has to end."""
    if stage in (Stage.SAME_RUN, Stage.ENDING):
        return _wait_for_end(run, stage, world, limits)
    if Rung.CHAIN in ladder_of(run.decision) and world.behind:
        return finish(run, world, _chain_end(world, world.behind))
    detail = "the job was cancelled and has ended"
    return finish(run, world, ActionEnd(ok=True, ended_at=world.now, detail=detail))


def _wait_for_end(run: ActionRun, stage: Stage, world: Observed, limits: LadderLimits) -> Move:
    began = tries(run, Operation.CANCEL)[0].intent_at
    if not done(run, Operation.CANCEL) and stage is Stage.SAME_RUN:
        move = attempt(run, world, limits, Execute(operation=Operation.CANCEL))
        return give_up(run, world, why_failed(run, Operation.CANCEL)) if move is None else move
    if world.now - began > limits.end_s:
        return give_up(
            run,
            world,
            f"the job was cancelled and has not ended within {limits.end_s:.0f} s: a process of it cannot be killed",
        )
    return Wait(reason="the job was cancelled and is ending")


def _chain_end(world: Observed, behind: Sequence[SlurmJob]) -> ActionEnd:
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
    return ActionEnd(ok=not never, ended_at=world.now, detail=detail)


# ------------------------------------------------------------------------------------- submitted in its place


def go_on_elsewhere(run: ActionRun, stage: Stage, world: Observed, limits: LadderLimits) -> Move:
    """A new job was submitted, held: the old one is ended, then the new one is let go."""
    new = world.submitted
    if new is None and not done(run, Operation.RESUBMIT):
        last = tries(run, Operation.RESUBMIT)[-1]
        if not world.submission_looked_for or world.now < (last.outcome_at or last.intent_at) + LATE_S:
            return Wait(reason=f"whether a job was submitted is not known yet: {last.detail}")
        move, why = _resubmit(run, stage, world, limits)
        return give_up(run, world, why) if move is None else move
    if new is None:
        since = tries(run, Operation.RESUBMIT)[-1].outcome_at or world.now
        if world.now - since > limits.step_s and world.submission_looked_for:
            return give_up(run, world, "the job that was submitted in its place was cancelled")
        return Wait(reason="the job that was submitted is not in Slurm's listing yet")
    if stage in (Stage.HELD, Stage.QUEUED, Stage.NEXT_RUN):
        return give_up(run, world, "the old job was requeued outside the watchdog, and must not run twice")
    if stage in (Stage.SAME_RUN, Stage.ENDING):
        if world.paused:
            return Wait(reason="paused: the job is not cancelled until `slurm-watchdog resume`")
        if not tried(run, Operation.CANCEL):
            return (
                Execute(operation=Operation.CANCEL, attempt=1)
                if stage is Stage.SAME_RUN
                else Wait(reason="it is ending")
            )
        return _wait_for_end(run, stage, world, limits)
    ours = tried(run, Operation.CANCEL) or done(run, Operation.RELEASE)
    if stage is Stage.FINISHED and not ours and world.job is not None and world.job.state in ENDED_BY_PERSON:
        return give_up(run, world, f"the job was ended outside the watchdog ({world.job.state}); it is not run again")
    return _let_go(run, new, world, limits)


def _let_go(run: ActionRun, new: SlurmJob, world: Observed, limits: LadderLimits) -> Move:
    if switch_is_out(run):
        return retry(run, world, Execute(operation=Operation.REMOVE_KILL_SWITCH))
    if new.held and not done(run, Operation.RELEASE):
        careful = drain_nodes(run, world)
        if careful is not None:
            return careful
        if world.stalled_mounts:
            return wait_for_mounts(run, world, limits)
        if world.paused:
            return Wait(reason="paused: the new job stays held until `slurm-watchdog resume`")
        return retry(run, world, Execute(operation=Operation.RELEASE, instead=True))
    begun_at = tries(run, Operation.RESUBMIT)[0].intent_at
    if world.next_first_step is not None:
        what = f"job {new.job_id} runs in its place"
        return Finish(end=end_of_restart(run, world, what, begun_at, world.next_first_step))
    return described_end(run, new, world, limits)
