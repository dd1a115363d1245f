"""The words of a ladder, their order, and what is shipped for each kind of incident. Data, and one check of it."""

from __future__ import annotations

from slurm_watchdog.model.actions import Step
from slurm_watchdog.model.incidents import Kind

ENDINGS: tuple[Step, ...] = (Step.REQUEUE, Step.RESUBMIT, Step.CHAIN, Step.CANCEL)
"""Steps that end a run. Each is the fallback of the ones before it, where Slurm refuses those."""
GENTLE: tuple[Step, ...] = (Step.KILL_SWITCH, Step.SIGUSR1, Step.SIGTERM)
"""Steps that ask the job itself."""
HARMLESS: frozenset[Step] = frozenset({Step.KILL_SWITCH, Step.SIGUSR1})
"""What a job's owner may put before what the administrator permits: it only asks the job to save."""
ORDER: tuple[Step, ...] = (Step.EVIDENCE, *GENTLE, *ENDINGS, Step.HOLD, Step.END_PROCESS)

SHIPPED: dict[Kind, tuple[Step, ...]] = {
    Kind.FILESYSTEM_STALL: (Step.EVIDENCE, Step.REQUEUE),
    Kind.LINGERING_JOB: (Step.EVIDENCE, Step.REQUEUE),
    Kind.COLLECTIVE_HANG: (Step.EVIDENCE, Step.REQUEUE),
    Kind.RANK_STOPPED: (Step.EVIDENCE, Step.REQUEUE),
    Kind.OPERATOR_RESTART: (Step.KILL_SWITCH, Step.REQUEUE),
}
"""What answers each kind. A loop that does not turn cannot hear a kill switch: it is requeued from its last
complete checkpoint. Whatever is not here is told, and nothing is done about it, unless a site gives it a ladder."""

MAY_HAVE_LADDER: frozenset[Kind] = frozenset(
    {
        *SHIPPED,
        Kind.STALLED_PROGRESS,
        Kind.WEDGED_TEARDOWN,
        Kind.SLOW_NODE,
        Kind.CRASH_LOOP,
        Kind.GPU_FAULT,
        Kind.ORPHAN_GPU_PROCESS,
    }
)
"""Kinds whose evidence can be good enough to act on. Of all others something is known, and never who or whether."""

OF_A_PROCESS: frozenset[Kind] = frozenset({Kind.ORPHAN_GPU_PROCESS})
"""Kinds that are about one process and no job: nothing that is done to jobs can be done about them, and nothing else to jobs."""

WHY_NONE: dict[Kind, str] = {
    Kind.FILESYSTEM_OUTAGE: "no restart helps while the filesystem is unavailable, and no node is to blame",
    Kind.PARTITION_OR_OUTAGE: "many nodes at once are no fault of any of them",
    Kind.AGENT_SILENT: "silence proves nothing about the jobs on the node",
    Kind.NODE_DOWN: "Slurm ends and requeues the jobs of a node that it has lost by itself",
    Kind.LOG_ERROR: "errors in the log are reported only: a restart does not mend a program",
    Kind.DISK_FULL: "a person has to free space",
    Kind.CRASH_LOOP: "another restart would fail the same way: a person has to look at it",
    Kind.SLURM_UNREACHABLE: "nobody knows what runs while Slurm does not answer",
}
"""Why nothing is done, in words, where there is more to say than that."""


def unfit(kind: Kind, ladder: tuple[Step, ...]) -> str | None:
    """Why a ladder does not answer this kind, a sentence; None if it may."""
    if kind not in MAY_HAVE_LADDER:
        why = WHY_NONE.get(kind, "its evidence is never good enough to act on")
        return f"{kind} is only told: {why}; kinds with a ladder: {', '.join(sorted(MAY_HAVE_LADDER))}"
    wrong = [step for step in ladder if (step is Step.END_PROCESS) != (kind in OF_A_PROCESS)]
    if not wrong:
        return None
    if kind in OF_A_PROCESS:
        return f"{kind} is about a process whose job is over: its ladder is [{Step.END_PROCESS}] or [], not {', '.join(wrong)}"
    kinds = ", ".join(sorted(OF_A_PROCESS))
    return f"{Step.END_PROCESS} ends a process whose job is over, and answers {kinds} alone: {kind} is about jobs that run"


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
