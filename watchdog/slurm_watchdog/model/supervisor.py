"""The supervisor of a job (`slurm-watchdog run` in its batch script), and the two files by which the controller
reaches it: its status, and orders to it. Both lie in the directory of the run's kill switch, on the batch host,
and belong to the job's owner. Pure.
"""

from __future__ import annotations

import re

import msgspec

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE, MAX_FIELD, RESUME_FIELD, clean_field
from slurm_watchdog.model.slurm import SlurmJob

STATUS_FILE = "supervisor"  # One line of JSON, a SupervisorStatus, replaced whole at each change and WRITE_EVERY_S.
ORDER_PREFIX = "restart-"  # Name of an order, the id of its decision behind it: a kill switch with ORDER_FIELDS.
WRITE_EVERY_S = 5.0
FRESH_S = 30.0  # Of a status that is older the supervisor is taken for dead: six times WRITE_EVERY_S.
MAX_STATUS_BYTES = 65_536  # A job of 4,000 nodes has names of 16 bytes each there.
PROTOCOL = 1  # Of these two files. A supervisor of another one is treated as absent.

ORDER_LIFETIME_S = 60.0
"""A supervisor that reads an order later than this after it was written (it was stopped, say) refuses it: the action
has ended, or has gone another way."""
GRACE_S = 5  # Between SIGTERM and SIGKILL of a command that is ended: one that hears the first is gone within a second.
HUNG_GRACE_S = 1  # The same where the loop does not turn: such a rank hears nothing, and its checkpoint is on disk.
BATCH_STEP = "batch"  # The step of a command whose ranks run in the batch script itself, over every start.

_STEP = re.compile(rf"[0-9]{{1,10}}|{BATCH_STEP}")
_START = re.compile(r"[0-9]{1,6}")
_GRACE = re.compile(r"[0-9]{1,2}")
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
    """Process of another supervisor of this job, which writes the same file; 0: there is none. While there is one
    neither takes an order, nor says where its command runs."""
    order: str = ""  # Decision of the last order that was seen.
    answer: OrderAnswer = OrderAnswer.NONE
    words: str = ""  # One sentence about the last start, end or order.


class JobSupervisor(Struct):
    """The supervisor of one run of a job, as the agent of its batch host read it."""

    job_id: str  # As processes know it.
    restarts: int
    age_s: float  # Since the status was written; FRESH_S and more: it does not live any more.
    read_age_s: float = 0.0  # Since the agent found it so.
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


def run_directory(job_id: str, restarts: int) -> str:
    """Directory of one run, on each of its nodes; `job_id` as processes know it (SLURM_JOB_ID)."""
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


def order_fields(order: RestartOrder) -> dict[str, str]:
    """The ORDER_FIELDS of an order's line. Raises ValueError if they cannot be written there."""
    avoid = ",".join(order.avoid)
    if len(avoid) > MAX_FIELD:
        raise ValueError(f"{len(order.avoid)} nodes are too many for one order")
    if not _STEP.fullmatch(order.step_id) or not all(_NODE.fullmatch(node) for node in order.avoid):
        raise ValueError(f"no step or node: {order.step_id!r}, {avoid[:100]!r}")
    if order.resume_from and not may_be_named(order.resume_from):
        raise ValueError(f"an order cannot name the checkpoint {order.resume_from[:300]!r}")
    return {
        "step": order.step_id, "start": str(order.start), "avoid": avoid, "grace": str(order.grace_s),
        RESUME_FIELD: order.resume_from,
    }  # fmt: skip


def may_be_named(checkpoint: str) -> bool:
    """Whether an order can name the checkpoint with this path, as it is: see kill_switch.MAX_FIELD."""
    return checkpoint.startswith("/") and clean_field(checkpoint) == checkpoint


def order_in(fields: dict[str, str]) -> RestartOrder:
    """The order that a parsed line holds. Raises ValueError if it holds none."""
    decision, step_id, start, grace = (fields.get(name, "") for name in ("decision", "step", "start", "grace"))
    avoid = tuple(node for node in fields.get("avoid", "").split(",") if node)
    named = decision and _STEP.fullmatch(step_id) and _START.fullmatch(start)
    resume_from = fields.get(RESUME_FIELD, "")
    if resume_from and not may_be_named(resume_from):
        raise ValueError(f"the order names a checkpoint that is not an absolute path: {resume_from[:100]!r}")
    if not named or not all(_NODE.fullmatch(node) for node in avoid):
        raise ValueError("the order names no decision, no step, no start, or an invalid node name")
    return RestartOrder(
        decision=decision, step_id=step_id, start=int(start), avoid=avoid, why=fields.get("why", ""),
        resume_from=resume_from, grace_s=int(grace) if _GRACE.fullmatch(grace) else GRACE_S,
    )  # fmt: skip


def step_words(step_id: str) -> str:
    """A step as people read it, within a sentence."""
    return "the batch step" if step_id == BATCH_STEP else f"step {step_id}"


def parse_status(data: bytes) -> SupervisorStatus:
    """The status in a file. Raises ValueError, with the reason, where it is none, or of another protocol."""
    if len(data) > MAX_STATUS_BYTES:
        raise ValueError(f"{len(data)} bytes are too many for a supervisor's status")
    try:
        status = msgspec.json.decode(data, type=SupervisorStatus)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a supervisor's status: {error}") from None
    if not all(_NODE.fullmatch(node) for node in (*status.nodes, *status.spares, *status.avoided)):
        raise ValueError("not a supervisor's status: it has an invalid node name")
    if status.protocol != PROTOCOL:
        raise ValueError(f"protocol {status.protocol} of a supervisor is not known here")
    return status
