"""Every word that Slurm has for the state of a job and of a node, and every set that anything here derives
from them. Pure.

One row a word, one column a question: what asks something of a state asks it here, and a state that Slurm
adds is added here. A word that is not in the table is neither running nor waiting nor over: nothing is done
to such a job, and nothing is concluded from it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from slurm_watchdog.base.python310 import StrEnum


class Stage(StrEnum):
    """Where a job is in its life."""

    WAITS = "waits"  # It will run (again), held or not.
    STARTS = "starts"  # It has nodes, which are made ready.
    RUNS = "runs"  # It has nodes and processes, stopped ones too.
    ENDS = "ends"  # It still has nodes, and goes.
    OVER = "over"


class JobState(NamedTuple):
    """What one word says of a job."""

    stage: Stage
    held: bool = False  # The word says itself that someone has to release the job.
    failed: bool = False  # It ended by a fault of its program, its nodes or Slurm.
    by_person: bool = False  # A person ended it, or a date that a person set.
    from_outside: bool = False  # A node, a limit or another job ended it.


_W, _S, _R, _E, _O = Stage.WAITS, Stage.STARTS, Stage.RUNS, Stage.ENDS, Stage.OVER

JOB_STATES: dict[str, JobState] = {
    "PENDING": JobState(_W),
    "REQUEUED": JobState(_W),
    "REQUEUE_FED": JobState(_W),
    "REQUEUE_HOLD": JobState(_W, held=True),
    "SPECIAL_EXIT": JobState(_W, held=True),
    "RESV_DEL_HOLD": JobState(_W, held=True),
    "EXPEDITING": JobState(_W),  # 25.11: sbatch --requeue=expedite
    "CONFIGURING": JobState(_S),
    "POWER_UP_NODE": JobState(_S),
    "RUNNING": JobState(_R),
    "SUSPENDED": JobState(_R),
    "STOPPED": JobState(_R),
    "SIGNALING": JobState(_R),
    "RESIZING": JobState(_R),
    "UPDATE_DB": JobState(_R),
    "STAGE_OUT": JobState(_R),
    "COMPLETING": JobState(_E),
    "BOOT_FAIL": JobState(_O, failed=True, from_outside=True),
    "CANCELLED": JobState(_O, by_person=True),
    "COMPLETED": JobState(_O),
    "DEADLINE": JobState(_O, by_person=True),
    "FAILED": JobState(_O, failed=True),
    "LAUNCH_FAILED": JobState(_O, failed=True),
    "NODE_FAIL": JobState(_O, failed=True, from_outside=True),
    "OUT_OF_MEMORY": JobState(_O, failed=True),
    "PREEMPTED": JobState(_O, from_outside=True),
    "RECONFIG_FAIL": JobState(_O, failed=True),
    "REVOKED": JobState(_O, by_person=True),
    "TIMEOUT": JobState(_O, from_outside=True),
}
"""The states and flags of the manual pages squeue(1) and sacct(1), releases 22.05 to 26.05. squeue shows one
word: a flag (COMPLETING, SIGNALING, REQUEUE_HOLD, …) wins over the state below it."""


def _jobs(*stages: Stage) -> frozenset[str]:
    return frozenset(word for word, state in JOB_STATES.items() if state.stage in stages)


RUNNING = _jobs(Stage.RUNS)  # It has processes: what is judged, and what a signal can reach.
WAITING = _jobs(Stage.WAITS)  # It will run (again).
OVER = _jobs(Stage.OVER)
HOLDS_NODES = _jobs(Stage.STARTS, Stage.RUNS, Stage.ENDS)  # Processes of the job may rightly be on its nodes.
HAD_PROCESSES = _jobs(Stage.RUNS, Stage.ENDS)
"""It was given its nodes and has used them: what it was allocated is final."""
ALIVE = HOLDS_NODES | WAITING  # It runs, or will, or is just ending.
COMES = _jobs(Stage.WAITS, Stage.STARTS, Stage.RUNS)
"""It runs or will: COMPLETING is not among them, for most jobs that complete do not come again."""
STARTED = _jobs(Stage.STARTS, Stage.RUNS)  # Slurm has started it.
REQUEUED = _jobs(Stage.WAITS, Stage.ENDS)
"""What a job may be after a requeue, and where a hold takes effect. COMPLETING: the run before has not ended yet."""
HELD = frozenset(word for word, state in JOB_STATES.items() if state.held)
CAN_BE_HELD = REQUEUED - HELD
FAILED = frozenset(word for word, state in JOB_STATES.items() if state.failed)
ENDED_BY_PERSON = frozenset(word for word, state in JOB_STATES.items() if state.by_person)
ENDED_FROM_OUTSIDE = frozenset(word for word, state in JOB_STATES.items() if state.from_outside or state.by_person)
"""The word itself says why the job ended: no process of it did that."""
RESTARTABLE = frozenset({"RUNNING"})
"""The only state in which anything is done to a job by itself: one that is suspended, stopped, resized or
signalled is in the hands of someone else."""


def is_known(state: str) -> bool:
    """Whether the word is one of Slurm's, of the releases that we know."""
    return state in JOB_STATES


def may_hold_nodes(state: str) -> bool:
    """Whether processes of a job in this state may be on its nodes: also of a job whose state is not known."""
    return state in HOLDS_NODES or state not in JOB_STATES


# ------------------------------------------------------------------------------------------------- nodes


class NodeWord(NamedTuple):
    """What one word of a node's state says."""

    used: bool = False  # A job has it.
    lost: bool = False  # Slurm itself has lost it.
    absent: bool = False
    """It is switched off, starts, or is none yet: its agent rightly says nothing, unless a job runs there."""
    leaves: bool = False  # It is taken away as soon as no job runs there.
    shut: bool = False  # Slurm starts no job there now.
    out: bool = False  # It counts as one that was taken out of service, in budgets of how many may be.


_USED, _LOST = NodeWord(used=True), NodeWord(lost=True, shut=True, out=True)
_MAINT, _NOTHING = NodeWord(leaves=True, shut=True), NodeWord()

NODE_WORDS: dict[str, NodeWord] = {
    "ALLOCATED": _USED,
    "ALLOC": _USED,
    "MIXED": _USED,
    "MIX": _USED,
    "COMPLETING": _USED,
    "COMP": _USED,
    "IDLE": _NOTHING,
    "DOWN": _LOST,
    "FAIL": _LOST,
    "FAILING": _LOST,
    "ERROR": _LOST,
    "NOT_RESPONDING": NodeWord(lost=True, shut=True),
    "NO_RESPOND": NodeWord(lost=True, shut=True),
    "DRAIN": NodeWord(shut=True, out=True),
    "DRAINING": NodeWord(shut=True, out=True),
    "DRAINED": NodeWord(leaves=True, shut=True, out=True),
    "POWERED_DOWN": NodeWord(absent=True),
    "POWERING_DOWN": NodeWord(absent=True),
    "POWERING_UP": NodeWord(absent=True),
    "POWER_UP": NodeWord(absent=True),
    "POWER_DOWN": NodeWord(leaves=True),
    "POWER_DRAIN": NodeWord(leaves=True, shut=True),
    "FUTURE": NodeWord(absent=True, shut=True),
    "REBOOT_ISSUED": NodeWord(absent=True, shut=True),
    "REBOOT_REQUESTED": NodeWord(leaves=True),
    "REBOOT": NodeWord(leaves=True, shut=True),
    "REBOOT_CANCEL": _NOTHING,
    "MAINT": _MAINT,
    "MAINTENANCE": _MAINT,
    "UNKNOWN": NodeWord(shut=True),
    "UNK": NodeWord(shut=True),
    "INVAL": NodeWord(shut=True),
    "INVALID": NodeWord(shut=True),
    "INVALID_REG": NodeWord(shut=True),
    "BLOCKED": NodeWord(shut=True),
    # Properties: they say nothing of whether the node is there.
    "CLOUD": _NOTHING,
    "PLANNED": _NOTHING,
    "PLND": _NOTHING,
    "RESERVED": _NOTHING,
    "RESV": _NOTHING,
    "DYNAMIC_NORM": _NOTHING,
    "DYNAMIC_FUTURE": NodeWord(absent=True, shut=True),
    "EXTERNAL": _NOTHING,
    "NPC": _NOTHING,
    "PERFCTRS": _NOTHING,
    "RESUME": _NOTHING,
    "UNDRAIN": _NOTHING,
}
"""The words of sinfo(1), scontrol(1) (NodeState) and slurm.h (NODE_STATE_*), releases 22.05 to 26.05, long
and short."""
MARKS = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "!": "POWER_DOWN", "%": "POWERING_DOWN",
         "$": "MAINT", "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "-": "PLANNED"}  # fmt: skip
"""What sinfo appends to a short state (sinfo(1), NODE STATE CODES)."""


def _nodes(column: str) -> frozenset[str]:
    return frozenset(word for word, row in NODE_WORDS.items() if getattr(row, column))


USED, LOST, ABSENT, LEAVES, SHUT, OUT = (
    _nodes(column) for column in ("used", "lost", "absent", "leaves", "shut", "out")
)
STARTING_UP = frozenset({"POWERED_DOWN", "POWERING_UP", "POWER_UP"})
"""A node that is switched off or starts does not respond, and is not lost by that."""


@lru_cache(maxsize=4096)
def node_words(state: str | None) -> frozenset[str]:
    """`IDLE*+DRAIN` or `idle+drain+not_responding` as a set of words in capitals; empty where Slurm says nothing."""
    words = set()
    for word in (state or "").upper().replace(",", "+").split("+"):
        bare = word.strip().rstrip("".join(MARKS))
        words.add(bare)
        words |= {MARKS[mark] for mark in word[len(bare) :] if mark in MARKS}
    if {"DRAIN", "IDLE"} <= words and "COMPLETING" not in words:
        words.add("DRAINED")  # nothing runs there any more
    return frozenset(words - {""})


@lru_cache(maxsize=4096)
def is_lost(state: str | None) -> bool:
    """Whether Slurm has lost the node."""
    return bool(node_words(state) & LOST)


@lru_cache(maxsize=4096)
def is_away(state: str | None, job_runs_there: bool = False) -> bool:
    """Whether the node is away on purpose, so that its agent may rightly be silent.

    Never where a job runs: a node that is to be rebooted, switched off or maintained is in use until its jobs
    have ended.
    """
    words = node_words(state)
    if job_runs_there:
        return False
    return bool(words & ABSENT) or bool(words & LEAVES and not words & USED)


@lru_cache(maxsize=4096)
def is_out(state: str | None) -> bool:
    """Whether the node is out of service: drained, down or failing. One that is switched off to save power is not."""
    words = node_words(state)
    return bool(words & OUT) or bool(words & LOST and not words & ABSENT)


@lru_cache(maxsize=4096)
def is_drained(state: str | None) -> bool:
    """Whether the node takes no new job because someone, or Slurm, has drained it; jobs may still run there."""
    return bool(node_words(state) & {"DRAIN", "DRAINING", "DRAINED"})


@lru_cache(maxsize=4096)
def starts_jobs(state: str, in_maintenance: bool = False) -> bool:
    """Whether Slurm would start a job on the node, when there is room; one that is switched off to save power
    is switched on for it.

    `in_maintenance`: the job belongs to a reservation, which may be the one for which the node shows MAINT.
    """
    words = node_words(state)
    shut = words & SHUT
    if words & STARTING_UP:
        shut -= {"NOT_RESPONDING", "NO_RESPOND"}
    if in_maintenance:
        shut -= {"MAINT", "MAINTENANCE"}
    return bool(words) and not shut
