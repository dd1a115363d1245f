"""The supervisor of a job's command (`slurm-watchdog run` in its batch script), and what it and the agent of its node
say to each other: a line of JSON each, over the agent's socket. Pure."""

from __future__ import annotations

import re

import msgspec

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE, is_absolute_path
from slurm_watchdog.model.slurm import SlurmJob

AGENT_SOCKET = f"{KILL_SWITCH_BASE}/agent"  # Beside the kill switches: a container that has the directory has both.
WRITE_EVERY_S = 5.0  # A supervisor sends its status at each change, and after so long.
FRESH_S = 30.0  # Of a status that is older the supervisor is taken for dead: six times WRITE_EVERY_S.
MAX_LINE_BYTES = 65_536  # A job of 4,000 nodes has names of 16 bytes each in a status.
PROTOCOL = 1  # Of these lines. A supervisor of another one is treated as absent.

ORDER_LIFETIME_S = 60.0
"""A supervisor that reads an order later than this after it was given (it was stopped, say) refuses it: the action
has ended, or has gone another way."""
GRACE_S = 5  # Between SIGTERM and SIGKILL of a command that is ended: one that hears the first is gone within a second.
HUNG_GRACE_S = 1  # The same where the loop does not turn: such a rank hears nothing, and its checkpoint is on disk.
BATCH_STEP = "batch"  # The step of a command whose ranks run in the batch script itself, over every start.

_STEP = re.compile(rf"[0-9]{{1,10}}|{BATCH_STEP}")
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


class SupervisorState(StrEnum):
    """What the supervisor is at."""

    STARTING = "starting"  # Looks at the nodes, or has started the command and no step of Slurm's is known yet.
    RUNNING = "running"
    WAITING = "waiting"  # The command ended after a kill switch was written: an order to start again is awaited.
    ENDING = "ending"  # The command is being ended.
    OVER = "over"  # The command has ended and is not started again.


class OrderAnswer(StrEnum):
    """What became of the last order."""

    NONE = ""
    TAKEN = "taken"  # It is being carried out.
    STARTED = "started"  # The command runs again: `step_id` is its new step.
    REFUSED = "refused"  # Nothing was done: `words` says why.
    FAILED = "failed"  # It was ended, and could not be started again, or not without the nodes to avoid.


class SupervisorStatus(Struct):
    """What a supervisor says of itself. Everything is the job owner's word."""

    protocol: int
    state: SupervisorState
    pid: int = 0
    step_id: str = ""
    """The Slurm step that the command runs as; empty while it is not known. A command that starts several has the
    newest here, one that starts none on its only node has BATCH_STEP."""
    starts: int = 0  # How often the command was started.
    begun_ticks: int = 0
    """When the first process of the present start began, in clock ticks since boot, as /proc/PID/stat has it: no older
    process of the batch script is of this start. 0: not known."""
    restarts_left: int = 0
    nodes: tuple[str, ...] = ()  # Of the present start.
    spares: tuple[str, ...] = ()  # Of the allocation, healthy as far as is known, and not in use.
    avoided: tuple[str, ...] = ()  # Nodes of the allocation that no start uses any more.
    takes_resume: bool = False  # It can name the checkpoint to the command that a start resumes from.
    resumed_from: str = ""  # The checkpoint that was named to the present start; empty: none was, the trainer chooses.
    failed: str = ""
    """A clause: why the supervisor starts, or has last started, the command again by itself, and which restart that is;
    empty: it was started by an order, or for the first time."""
    beside: int = 0
    """Process of another supervisor of this job, as the agent says; 0: there is none. While there is one neither takes
    an order, nor says where its command runs."""
    order: str = ""  # Decision of the last order that was seen.
    answer: OrderAnswer = OrderAnswer.NONE
    words: str = ""  # One sentence about the last start, end or order.


class JobSupervisor(Struct):
    """The supervisor of one run of a job, as the agent of its batch host knows it."""

    job_id: str  # As processes know it.
    restarts: int
    age_s: float  # Since the status was sent; FRESH_S and more: it does not live any more.
    read_age_s: float = 0.0  # Since this was its last word: 0 while it is connected, and once its process has exited.
    status: SupervisorStatus


class Sighting(Struct):
    """The last word of a supervisor, whether it lives or not; dates on the clock of who keeps it."""

    status: SupervisorStatus
    written_at: float
    read_at: float  # When the agent found it so.


class RestartOrder(Struct):
    """End the command's step `step_id` and start the command again, without the nodes of `avoid`."""

    decision: str
    step_id: str
    start: int  # Number of the start that the order is about, from 1: no other one is ended for it.
    avoid: tuple[str, ...] = ()
    resume_from: str = ""  # Checkpoint that is named to this start; empty: none, the trainer chooses.
    grace_s: int = GRACE_S  # Between SIGTERM and SIGKILL.
    why: str = ""


class FromSupervisor(Struct):
    """A line of a supervisor: its whole status."""

    restarts: int  # The run of the job that it is in.
    status: SupervisorStatus


class FromAgent(Struct):
    """A line of the agent; what it does not name is as it was."""

    order: RestartOrder | None = None
    given_at: float = 0.0  # When the controller's order came, since the epoch.
    withdrawn: str = ""  # A decision whose order is not to be carried out, unless that has begun.
    beside: int | None = None  # See SupervisorStatus.


def run_directory(job_id: str, restarts: int) -> str:
    """Directory of one run's kill switch, on each of its nodes; `job_id` as processes know it (SLURM_JOB_ID)."""
    return f"{KILL_SWITCH_BASE}/{job_id}.{restarts}"


def in_use(job: SlurmJob, supervisor: SupervisorStatus | None) -> tuple[str, ...]:
    """The nodes of a job on which its ranks are: without spares, and without those that a restart left out. Its
    batch host counts always, for its logs are read there."""
    if supervisor is None or not supervisor.nodes:
        return job.nodes
    return tuple(node for node in job.nodes if node in supervisor.nodes or node == job.batch_host)


def left_behind(job: SlurmJob, supervisor: SupervisorStatus | None) -> frozenset[str]:
    """The nodes of a job on which none of its ranks is, its batch host among them where it is a spare."""
    return frozenset() if supervisor is None or not supervisor.nodes else frozenset(job.nodes) - {*supervisor.nodes}


def step_words(step_id: str) -> str:
    """A step as people read it, within a sentence."""
    return "the batch step" if step_id == BATCH_STEP else f"step {step_id}"


def from_supervisor(line: bytes) -> FromSupervisor:
    """What a supervisor says. Raises ValueError, with the reason, where it is nothing, or of another protocol."""
    try:
        said = msgspec.json.decode(line, type=FromSupervisor)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a supervisor's status: {error}") from None
    status = said.status
    if not all(_NODE.fullmatch(node) for node in (*status.nodes, *status.spares, *status.avoided)):
        raise ValueError("not a supervisor's status: it has an invalid node name")
    if status.protocol != PROTOCOL:
        raise ValueError(f"protocol {status.protocol} of a supervisor is not known here")
    return said


def from_agent(line: bytes) -> FromAgent:
    """What the agent says. Raises ValueError, with the reason, where it is nothing, or an order that none may be."""
    try:
        said = msgspec.json.decode(line, type=FromAgent)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not an agent's line: {error}") from None
    order = said.order
    if order is None:
        return said
    if not _STEP.fullmatch(order.step_id) or not all(_NODE.fullmatch(node) for node in order.avoid):
        raise ValueError(f"no step or node: {order.step_id!r}, {order.avoid!r:.100}")
    if order.resume_from and not is_absolute_path(order.resume_from):
        raise ValueError(f"the order names a checkpoint that is not an absolute path: {order.resume_from[:100]!r}")
    return said
