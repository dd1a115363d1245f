"""What the page draws beside a status: see slurm_watchdog.controller.api.answers."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.cluster_view import LossPoint, ProcessView, StepTime
from slurm_watchdog.model.documents import ActionRun, Answer, Incident, Job, Status
from slurm_watchdog.model.observations import Gpu
from slurm_watchdog.model.run_record import RunRecord
from slurm_watchdog.model.supervisor import SupervisorStatus


class MapNode(Struct):
    """A node of many: a few dozen bytes."""

    node: str
    state: str  # `ok`, `named` by an incident, `silent`, `away` (taken out by Slurm), `unwatched`.
    gpus: str
    """A letter each, in the order of their indices: x named by an incident, e no answer, t slowed down, i idle and held
    by a process, b works, f free, u unknown, for its node is silent."""
    reason: str = ""
    jobs: tuple[str, ...] = ()


class Todo(Answer):
    """An incident that waits for a person."""

    incident: str
    kind: str
    job_ids: tuple[str, ...] = ()
    why: str  # Why nothing is done about it.
    hint: str = ""  # What usually helps.


class Overview(Status):
    """The status with all open incidents, the nodes, what is being done and what is left for a person."""

    cluster: str
    at: float
    map: tuple[MapNode, ...] = ()
    doing: tuple[ActionRun, ...] = ()
    todo: tuple[Todo, ...] = ()


class Rank(Answer):
    view: ProcessView
    gpus: tuple[Gpu, ...] = ()
    letter: str
    """x gone or named by an incident, e waits in the kernel, t stopped, L late, i its GPU idles, b works, f nothing
    known of its GPU."""
    late_ratio: float | None = None  # Share of the last minutes in which others wait and it does not.


class History(Answer):
    """A job from its first run to now."""

    runs: tuple[RunRecord, ...] = ()
    incidents: tuple[Incident, ...] = ()
    actions: tuple[ActionRun, ...] = ()


class JobPage(Job):
    """A job; `losses` and what follows only for those who may see what its owner may."""

    ended: bool = False
    step_times: tuple[StepTime, ...] = ()
    losses: tuple[LossPoint, ...] = ()
    rank_rows: tuple[Rank, ...] = ()
    supervisor: SupervisorStatus | None = None
    history: History = History()
