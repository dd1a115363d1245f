"""The rungs of a ladder and their order. Data, and one check of it."""

from __future__ import annotations

from slurm_watchdog.model.actions import Step

ENDINGS: tuple[Step, ...] = (Step.REQUEUE, Step.RESUBMIT, Step.CHAIN, Step.CANCEL)
"""Steps that end a run. Each is the fallback of the ones before it, where Slurm refuses those."""
GENTLE: tuple[Step, ...] = (Step.KILL_SWITCH, Step.SIGUSR1, Step.SIGTERM)
"""Steps that ask the job itself."""
HARMLESS: frozenset[Step] = frozenset({Step.KILL_SWITCH, Step.SIGUSR1})
"""What a job's owner may put before what the administrator permits: it only asks the job to save."""
ORDER: tuple[Step, ...] = (Step.EVIDENCE, *GENTLE, *ENDINGS, Step.HOLD, Step.END_PROCESS)


def problem_of(ladder: tuple[Step, ...]) -> str | None:
    """What is wrong with a ladder, a sentence; None if nothing is."""
    if len(set(ladder)) != len(ladder):
        return "names a rung twice"
    if Step.HOLD in ladder and set(ladder) - {Step.HOLD, Step.EVIDENCE}:
        return "hold keeps a waiting job from starting: it goes with no other rung"
    if Step.END_PROCESS in ladder and len(ladder) > 1:
        return "end_process is about a process whose job is over: it goes with no other rung"
    in_order = [step for step in ORDER if step in ladder and step not in ENDINGS]
    if [step for step in ladder if step not in ENDINGS] != in_order:
        return f"the rungs come in this order: {', '.join(ORDER)}"
    ends = [place for place, step in enumerate(ladder) if step in ENDINGS]
    if ends and ends[0] < len(ladder) - len(ends):
        before = ", ".join((Step.EVIDENCE, *GENTLE))
        return f"{before} come before {', '.join(ENDINGS)}: after those nobody is left to ask"
    if Step.CANCEL in ladder[:-1]:
        return "cancel is never refused for a reason that another rung would mend: it comes last"
    return None
