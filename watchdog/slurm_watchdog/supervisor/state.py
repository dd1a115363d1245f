"""What the supervisor remembers, what can happen to it, and what it can do. Pure: see `machine`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from msgspec.structs import replace

from slurm_watchdog.base.python310 import StrEnum
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.supervisor import (
    BATCH_STEP,
    PROTOCOL,
    OrderAnswer,
    RestartOrder,
    SupervisorState,
    SupervisorStatus,
)
from slurm_watchdog.supervisor.placement import Allocation, Placement

KILL_WAIT_S = 30.0  # Between SIGTERM to a command and SIGKILL, as Slurm's KillWait has it by default.
RESTART_DELAY_S = 15.0
"""Before a command that has failed starts again: its last words have been read and judged by then."""


class Phase(StrEnum):
    """What the supervisor is at, more finely than its status says."""

    PAUSING = "pausing"
    LOOKING = "looking"
    RUNNING = "running"
    WAITING = "waiting"
    ENDING = "ending"
    OVER = "over"


class Settings(Struct):
    """What does not change."""

    allocation: Allocation
    count: int  # Nodes of a start.
    max_restarts: int
    least: int  # Nodes with which the command says that it can run, too, or `count`.
    in_slurm: bool = True  # There is a job of Slurm's around it.
    patient: bool = False  # One machine is all there is: what does not end is waited for, and started beside never.
    kill_wait_s: float = KILL_WAIT_S
    restart_delay_s: float = RESTART_DELAY_S


class Run(Struct):
    """All that the supervisor remembers."""

    settings: Settings
    phase: Phase
    since: float  # When the phase began, on the monotonic clock.
    began: float  # When all of this began, on the same.
    starts: int = 0
    begun_ticks: int = 0  # See SupervisorStatus.
    placement: Placement = Placement(nodes=())
    avoided: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()  # Of these: that Slurm has taken out of the job.
    resume_from: str = ""
    """See SupervisorStatus.resumed_from: of the present start, and of the next one that is being prepared."""
    suspects: Mapping[str, str] = {}  # Node to what the newest look found.
    looked: bool = False  # The look before the next start is over.
    steps: tuple[str, ...] = ()
    """Numbers of the present start's steps, oldest first, or BATCH_STEP alone; after its end those that it had."""
    elsewhere: tuple[str, ...] = ()
    """Nodes that the present start leaves out, and on which a step of it runs all the same."""
    beside: int = 0  # See SupervisorStatus.
    ends: Literal["", "TERM", "KILL", "TREE"] = ""  # How far the ending of the command has gone.
    exit_code: int = 0
    asked_at: float | None = None  # When a signal asked for the end; None: none did.
    told: int = 0  # The signal that was passed to the present start and did not ask for its end: SIGUSR1, or Ctrl-C.
    told_at: float | None = None  # When; None: none was.
    cancelled: bool = False  # A person, or Slurm, has ended the command: its end is no failure.
    requeued: bool = False  # Our own controller has asked for the next start
    held: bool = False  # and has not released it yet.
    switch_gone_at: float | None = None
    order: RestartOrder | None = None  # Being carried out.
    seen: frozenset[str] = frozenset()
    answered: str = ""
    answer: OrderAnswer = OrderAnswer.NONE
    words: str = ""
    failed: str = ""  # See SupervisorStatus.

    @property
    def in_batch(self) -> bool:
        """Whether the command runs in the batch script itself, or did until it ended."""
        return self.steps == (BATCH_STEP,)

    @property
    def restarts_left(self) -> int:
        """How often the command may still be started again."""
        return self.settings.max_restarts - max(0, self.starts - 1)


# ------------------------------------------------------------------------------------ actions


class Look(Struct, kw_only=False):
    """Look at these nodes, and tell `machine.looked`."""

    nodes: tuple[str, ...]


class Begin(Struct, kw_only=False):
    """Start the command on these nodes, or tell `machine.not_begun`."""

    placement: Placement
    in_batch: bool = False  # The start before ran in the batch script: report that step, too.
    resume_from: str = ""  # See SupervisorStatus.resumed_from.


class SignalSteps(Struct, kw_only=False):
    """Send a signal to steps."""

    name: str
    steps: tuple[str, ...]


class SignalTree(Struct, kw_only=False):
    """Send a signal to all that the command has started on this host."""

    name: str


class Forward(Struct, kw_only=False):
    """Hand a signal on to the command."""

    number: int


class Requeue(Struct, kw_only=False):
    """Have Slurm requeue the job, which ends all of it, or tell `machine.not_requeued`."""


class Say(Struct, kw_only=False):
    """A line for people."""

    text: str


Action: TypeAlias = Look | Begin | SignalSteps | SignalTree | Forward | Requeue | Say

# ------------------------------------------------------------------------------------ status

_STATES = {
    Phase.PAUSING: SupervisorState.STARTING, Phase.LOOKING: SupervisorState.STARTING,
    Phase.WAITING: SupervisorState.WAITING, Phase.ENDING: SupervisorState.ENDING, Phase.OVER: SupervisorState.OVER,
}  # fmt: skip


def status_of(run: Run, pid: int) -> SupervisorStatus:
    """What is said to the agent."""
    nodes = run.settings.allocation.nodes
    said = SupervisorStatus(
        protocol=PROTOCOL, state=SupervisorState.STARTING, pid=pid, restarts_left=max(0, run.restarts_left),
        beside=run.beside, order=run.answered, answer=run.answer, words=run.words[:1000],
    )  # fmt: skip
    if run.beside:  # what one says of its command is not what the other says
        return said
    return replace(
        said, state=_STATES.get(run.phase, SupervisorState.RUNNING if run.steps else SupervisorState.STARTING),
        step_id=run.steps[-1] if run.steps else "", starts=run.starts, begun_ticks=run.begun_ticks,
        nodes=tuple(n for n in nodes if n in run.placement.nodes or n in run.elsewhere),
        spares=tuple(n for n in run.placement.spares if n not in run.suspects and n not in run.elsewhere),
        avoided=tuple(n for n in nodes if n in run.avoided and n not in run.elsewhere),
        takes_resume=True, resumed_from=run.resume_from,
        failed=run.failed[:500],
    )  # fmt: skip
