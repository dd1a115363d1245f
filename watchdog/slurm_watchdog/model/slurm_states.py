"""Every word that Slurm has for the state of a job and of a node, and every set that anything here derives
from them. Pure.

What asks something of a state asks it here, and a state that Slurm adds is added here. A word that is not in the
table is neither running nor waiting nor over: nothing is done to such a job, and nothing is concluded from it.
"""

from __future__ import annotations

from functools import lru_cache


def _table(rows: str) -> dict[str, frozenset[str]]:
    """Word -> what it says, from lines of `WHAT, WHAT: WORD WORD`."""
    lines = (row.split(": ") for row in rows.strip().splitlines())
    return {word: frozenset(said.split(", ")) for said, words in lines for word in words.split()}


JOB_STATES = _table("""
waits: PENDING REQUEUED REQUEUE_FED EXPEDITING
waits, held: REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD
starts: CONFIGURING POWER_UP_NODE
runs: RUNNING SUSPENDED STOPPED SIGNALING RESIZING UPDATE_DB STAGE_OUT
ends: COMPLETING
over: COMPLETED
over, failed: FAILED LAUNCH_FAILED OUT_OF_MEMORY RECONFIG_FAIL
over, failed, from outside: BOOT_FAIL NODE_FAIL
over, from outside: PREEMPTED TIMEOUT
over, by person: CANCELLED DEADLINE REVOKED
""")
"""The states and flags of the manual pages squeue(1) and sacct(1), releases 22.05 to 26.05 (EXPEDITING: `sbatch
--requeue=expedite` of 25.11). squeue shows one word: a flag (COMPLETING, SIGNALING, REQUEUE_HOLD, …) wins over the
state below it. *waits*: it will run (again), held or not; *held*: someone has to release it; *starts*: it has nodes,
which are made ready; *runs*: it has processes, stopped ones too; *ends*: it still has nodes, and goes; *failed*: by a
fault of its program, its nodes or Slurm; *by person*: a person ended it, or a date that a person set; *from outside*:
a node, a limit or another job ended it."""


def _jobs(*said: str) -> frozenset[str]:
    return frozenset(word for word, known in JOB_STATES.items() if known.intersection(said))


RUNNING = _jobs("runs")  # It has processes: what is judged, and what a signal can reach.
WAITING = _jobs("waits")  # It will run (again).
OVER = _jobs("over")
HOLDS_NODES = _jobs("starts", "runs", "ends")  # Processes of the job may rightly be on its nodes.
HAD_PROCESSES = _jobs("runs", "ends")  # It was given its nodes and has used them: what it was allocated is final.
ALIVE = HOLDS_NODES | WAITING  # It runs, or will, or is just ending.
COMES = _jobs("waits", "starts", "runs")  # It runs or will: most jobs that complete do not come again.
STARTED = _jobs("starts", "runs")  # Slurm has started it.
REQUEUED = _jobs("waits", "ends")  # What a job may be after a requeue (COMPLETING: the old run), and can be held.
HELD = _jobs("held")
CAN_BE_HELD = REQUEUED - HELD
FAILED = _jobs("failed")
ENDED_BY_PERSON = _jobs("by person")
ENDED_FROM_OUTSIDE = _jobs("from outside", "by person")  # The word says why it ended: no process of it did that.
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


NODE_WORDS = _table("""
used: ALLOCATED ALLOC MIXED MIX COMPLETING COMP
nothing: IDLE REBOOT_CANCEL
nothing: CLOUD PLANNED PLND RESERVED RESV DYNAMIC_NORM EXTERNAL NPC PERFCTRS RESUME UNDRAIN
lost, shut, out: DOWN FAIL FAILING ERROR
lost, shut: NOT_RESPONDING NO_RESPOND
shut, out: DRAIN DRAINING
leaves, shut, out: DRAINED
absent: POWERED_DOWN POWERING_DOWN POWERING_UP POWER_UP
absent, shut: FUTURE REBOOT_ISSUED DYNAMIC_FUTURE
leaves: POWER_DOWN REBOOT_REQUESTED
leaves, shut: POWER_DRAIN REBOOT MAINT MAINTENANCE
shut: UNKNOWN UNK INVAL INVALID INVALID_REG BLOCKED
""")
"""The words of sinfo(1), scontrol(1) (NodeState) and slurm.h (NODE_STATE_*), releases 22.05 to 26.05, long and short;
CLOUD and what follows it are properties. *used*: a job has it; *lost*: Slurm itself has lost it; *absent*: it is
switched off, starts, or is none yet: its agent rightly says nothing, unless a job runs there; *leaves*: it is taken
away as soon as no job runs there; *shut*: Slurm starts no job there now; *out*: it was taken out of service, in budgets
of how many may be."""
MARKS = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "!": "POWER_DOWN", "%": "POWERING_DOWN",
         "$": "MAINT", "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "-": "PLANNED"}  # fmt: skip
"""What sinfo appends to a short state (sinfo(1), NODE STATE CODES)."""


USED, LOST, ABSENT, LEAVES, SHUT, OUT = (
    frozenset(word for word, known in NODE_WORDS.items() if said in known)
    for said in ("used", "lost", "absent", "leaves", "shut", "out")
)
STARTING_UP = frozenset({"POWERED_DOWN", "POWERING_UP", "POWER_UP"})  # It does not respond, and is not lost by that.


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
