"""The rungs of a ladder and their order. Data, and one check of it."""

from __future__ import annotations

from slurm_watchdog.model.actions import Rung

ENDINGS: tuple[Rung, ...] = (Rung.RESTART_STEP, Rung.REQUEUE, Rung.RESUBMIT, Rung.CHAIN, Rung.CANCEL)
"""Steps that end a run. Each is the fallback of the ones before it, where Slurm refuses those."""
RUN_AGAIN: frozenset[Rung] = frozenset({Rung.REQUEUE, Rung.RESUBMIT})
"""Those after which the job goes through Slurm's queue again."""
GENTLE: tuple[Rung, ...] = (Rung.KILL_SWITCH, Rung.SIGUSR1, Rung.SIGTERM)  # Steps that ask the job itself.
HARMLESS: frozenset[Rung] = frozenset({Rung.KILL_SWITCH, Rung.SIGUSR1})
"""What a job's owner may put before what the administrator permits: it only asks the job to save."""
ORDER: tuple[Rung, ...] = (Rung.EVIDENCE, *GENTLE, *ENDINGS, Rung.HOLD, Rung.END_PROCESS)


def problem_of(ladder: tuple[Rung, ...]) -> str | None:
    """What is wrong with a ladder, a sentence; None if nothing is."""
    if len(set(ladder)) != len(ladder):
        return "names a rung twice"
    if Rung.HOLD in ladder and set(ladder) - {Rung.HOLD, Rung.EVIDENCE}:
        return "hold keeps a waiting job from starting: it goes with no other rung"
    if Rung.END_PROCESS in ladder and len(ladder) > 1:
        return "end_process is about a process whose job is over: it goes with no other rung"
    in_order = [rung for rung in ORDER if rung in ladder and rung not in ENDINGS]
    if [rung for rung in ladder if rung not in ENDINGS] != in_order:
        return f"the rungs must be in this order: {', '.join(ORDER)}"
    ends = [place for place, rung in enumerate(ladder) if rung in ENDINGS]
    if ends and ends[0] < len(ladder) - len(ends):
        late = next(rung for rung in ladder[ends[0] :] if rung not in ENDINGS)
        return f"{late} must come before {ladder[ends[0]]}"
    if Rung.RESTART_STEP in ladder and next(rung for rung in ladder if rung in ENDINGS) is not Rung.RESTART_STEP:
        return "restart_step must come before the other rungs that end a run"
    if Rung.CANCEL in ladder[:-1]:
        return "cancel is never refused for a reason that another rung would solve: it must come last"
    return None
