"""What is said of a hang: the sentences of `collective_hang`. Pure."""

from __future__ import annotations

from slurm_watchdog.analysis.held_processes import held_by
from slurm_watchdog.base.shortened import shortened
from slurm_watchdog.diagnose.culprit_words import describe, what_they_do
from slurm_watchdog.diagnose.stacks.vote import Vote
from slurm_watchdog.diagnose.stacks.wording import few, group_words
from slurm_watchdog.model.cluster_view import JobView, ProcessView
from slurm_watchdog.model.incidents import Culprit


def waited_for(held: ProcessView | None, *, saves: bool) -> tuple[str, ...]:
    """Why nothing is done yet: a process that is blocked on a filesystem, or a checkpoint that is written."""
    if held is not None:
        return (_left_to_storage(held),)
    return ("files of a checkpoint grow: nothing is done before it is whole, or grows no more",) if saves else ()


def _left_to_storage(held: ProcessView) -> str:
    """Whether it is one node's filesystem, or everybody's, other nodes are still asked: no restart comes
    before the answer."""
    blocked = held.process.blocked
    if blocked is not None and blocked.mount is None:
        return f"{held.process.comm} (pid {held.process.pid}) on {held.node} {held_by(held)}: its filesystem is unknown"
    where = "" if blocked is None else f" on {blocked.mount} for {blocked.seconds:.0f} s"
    return f"{held.process.comm} on {held.node} has been blocked{where}: what is done about it filesystem_stall says"


def why_not(voted: Vote) -> str:
    """Why stacks do not show a hang."""
    if voted.missing:
        return f"the stacks of rank {few(voted.missing)} are missing"
    if voted.moving is None:
        return "the stacks are not in yet"
    if voted.moving:
        return "the ranks still move"
    return "nothing moves" if voted.waiting else "no rank waits in a collective"


def phase_fact(job: JobView) -> str:
    """The phase that the logs announce, with the line that does; and since when."""
    said = job.announced
    if said is None:
        return "phase: training, no line of the log since the last step announces anything else"
    return f"phase: {said.phase} for {said.age_s:.0f} s, announced in {said.source}: {shortened(said.line, 200)}"


def facts_of(job: JobView, voted: Vote) -> tuple[str, ...]:
    """Which phase is believed, and where every rank is."""
    facts = [phase_fact(job)]
    facts += [f"{group_words(group, nodes=True)}, {' < '.join(group.frames[:4])}" for group in voted.groups[:8]]
    facts += [f"{describe(c)} {c.reason}" for c in voted.undumped[:8]]
    facts += [
        f"{p.node} rank {p.process.rank}: state {p.process.state}" for p in job.ranks if p.process.state in "DTt"
    ][:8]
    return tuple(facts)


def ranks_wait(number: int) -> str:
    """`3 ranks wait`."""
    return "1 rank waits" if number == 1 else f"{number} ranks wait"


def held_up_by(culprits: tuple[Culprit, ...], voted: Vote) -> str:
    """Who does what, and how many wait for that."""
    return f"{what_they_do(culprits)}, {ranks_wait(voted.waiting)} for {'them' if len(culprits) > 1 else 'it'}"
