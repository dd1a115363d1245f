"""What one agent saw in one tick, as it goes to the controller: one section for each collector."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args, get_origin, get_type_hints

from msgspec.structs import replace

from slurm_watchdog.base.python310 import is_class
from slurm_watchdog.base.structs import Struct, picked
from slurm_watchdog.model.observations import (
    Checkpoint,
    Event,
    Gpu,
    GpuHolder,
    HungProbe,
    Link,
    LogFile,
    MountProbe,
    NodeEvent,
    Pressure,
    Process,
    Usage,
)
from slurm_watchdog.model.protocol import CommandResult
from slurm_watchdog.model.supervisor import JobSupervisor


class JobDirectives(Struct):
    """What the processes of one run of a job have in their environment for the watchdog; see
    slurm_watchdog.controller.policy.owner_directives."""

    job_id: str
    restarts: int
    variables: tuple[tuple[str, str], ...]  # SLURM_WATCHDOG…, bounded; none: a rank was read, and says nothing.
    uid: int  # The user whose process has them.


class LeftOut(Struct):
    """Processes of one user that are there and not in a report: too many, short helpers most often."""

    job_id: str | None
    uid: int
    count: int


# -- sections: what one collector saw in one tick ---------------------------------------------------------------


class ProcessSection(Struct):
    """Processes of jobs; all of them until the report is made, which names as many as it has room for."""

    processes: tuple[Process, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    unread: tuple[int, ...] = ()


class LogSection(Struct):
    """Log files of jobs, and what was read in them."""

    logs: tuple[LogFile, ...] = ()
    events: tuple[Event, ...] = ()
    events_dropped: int = 0


class MountSection(Struct):
    """Filesystems that jobs use: which of them answered."""

    mounts: tuple[MountProbe, ...] = ()


class CheckpointSection(Struct):
    """Checkpoints of jobs, and those that have become complete."""

    checkpoints: tuple[Checkpoint, ...] = ()
    events: tuple[Event, ...] = ()


class GpuSection(Struct):
    """GPUs as NVML shows them, and what it announced."""

    gpus: tuple[Gpu, ...] = ()
    node_events: tuple[NodeEvent, ...] = ()


class OrphanGpuProcessSection(Struct):
    """Processes that hold a GPU without a job."""

    gpu_holders: tuple[GpuHolder, ...] = ()


class KernelLogSection(Struct):
    """What the kernel logged about this node."""

    node_events: tuple[NodeEvent, ...] = ()
    node_events_dropped: int = 0


class DirectiveSection(Struct):
    """What owners of jobs want of the watchdog."""

    wishes: tuple[JobDirectives, ...] = ()


class SupervisorSection(Struct):
    """Supervisors of jobs whose batch host this is."""

    supervisors: tuple[JobSupervisor, ...] = ()


class UsageSection(Struct):
    """What is in use of what has a limit, and what is waited for."""

    usages: tuple[Usage, ...] = ()
    pressures: tuple[Pressure, ...] = ()


class LinkSection(Struct):
    """Network links of the node."""

    links: tuple[Link, ...] = ()


class Report(Struct):
    """What one agent saw in one tick. A section is a field of its own type here, or, as in the first release,
    spread over fields of the same names: see `with_sections`. A new field has a default, so that an older
    agent or controller is understood."""

    node: str
    boot_id: str
    agent_id: str  # Random, new at every start of the agent.
    sequence: int  # Rises by one with every report of this agent_id; a report seen before is dropped.
    age_s: float = 0.0  # Seconds between making and sending; not 0 when it waited in the spool.
    made_s: float = 0.0  # When it was made, in seconds since the kernel started; 0: an older agent's.
    interval_s: float = 5.0
    version: int = 1
    agent_version: str = ""
    processes: tuple[Process, ...] = ()
    logs: tuple[LogFile, ...] = ()
    events: tuple[Event, ...] = ()
    events_dropped: int = 0
    mounts: tuple[MountProbe, ...] = ()
    hung_probes: tuple[HungProbe, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    node_events: tuple[NodeEvent, ...] = ()
    node_events_dropped: int = 0  # Kernel records overwritten before they were read, or too many for one.
    checkpoints: tuple[Checkpoint, ...] = ()
    gpu_holders: tuple[GpuHolder, ...] = ()
    wishes: tuple[JobDirectives, ...] = ()  # Of jobs that have any.
    results: tuple[CommandResult, ...] = ()
    problems: tuple[str, ...] = ()  # Collectors that failed this tick, each with its reason.
    supervisors: tuple[JobSupervisor, ...] = ()
    usages: tuple[Usage, ...] = ()
    pressures: tuple[Pressure, ...] = ()
    links: tuple[Link, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    """What is not in `processes`: a release without this field takes them for ended, which is no harm."""
    unread: tuple[int, ...] = ()
    """Pids of processes of which no child of the agent has read yet what they are: whoever was known by such a number
    may be there still."""
    state: bytes = b""
    """Names the classes of all that the node has (slurm_watchdog.agent.frames): the same bytes of the same agent, the
    same classes. A controller compares it with the one before and reads nothing in it."""
    same_as: int = 0
    """0: a whole report. Else a small one: the node is as the whole report of this number said (`HELD` has which of its
    fields hold), of the same agent and with the same `state`. One that is not known makes UNKNOWN: the node is heard,
    and nothing is known of what it does."""


HELD = (
    "processes", "left_out", "unread", "mounts", "hung_probes", "gpus", "checkpoints", "gpu_holders", "wishes",
    "usages", "pressures", "links", "problems",
)  # fmt: skip
"""What a small report leaves out: it is as in the whole one that it names. All else is in each: what happened (events,
node_events, results), logs and supervisors."""


_HAPPENED = ("logs", "events", "node_events", "results", "supervisors", "events_dropped", "node_events_dropped")


def is_state(report: Report) -> bool:
    """Whether it says only that all is as before: the next one says so again."""
    return report.same_as > 0 and not any(getattr(report, name) for name in _HAPPENED)


class State(Struct, array_like=True):
    """All that such a report has to say after another one of the same agent on the same stream."""

    sequence: int
    same_as: int
    made_s: float
    state: bytes
    age_s: float = 0.0

    def report(self, node: str, agent: tuple[str, str]) -> Report:
        """As a report; `agent`: boot and agent id."""
        return picked(Report, self, *self.__struct_fields__, node=node, boot_id=agent[0], agent_id=agent[1])


def _own_fields() -> dict[type, str]:
    """Type of a section -> the field of Report that holds it whole."""
    return {
        each: name
        for name, hint in get_type_hints(Report).items()
        for each in (hint, *get_args(hint))
        if is_class(each) and issubclass(each, Struct) and get_origin(hint) is not tuple
    }


_OWN_FIELD = _own_fields()


def with_sections(report: Report, sections: Iterable[Struct]) -> Report:
    """The report with these sections of one tick, each seen by another collector. Where two sections share a
    field of a report (two collectors see events), lists are joined in this order, and counts added."""
    found: dict[str, object] = {}
    for section in sections:
        if type(section) in _OWN_FIELD:
            found[_OWN_FIELD[type(section)]] = section
            continue
        for name in section.__struct_fields__:
            value = getattr(section, name)
            found[name] = found[name] + value if name in found else value
    return replace(report, **found)
