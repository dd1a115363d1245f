"""What a decision depends on: the incident, the configuration, and the cluster at that moment. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.policy.by_user import orphans_at_once
from slurm_watchdog.controller.policy.orphan_process import job_of, objection, orphan_for_s
from slurm_watchdog.controller.policy.rules import Rule
from slurm_watchdog.model.actions import Decision
from slurm_watchdog.model.incidents import GpuProcess, Incident
from slurm_watchdog.model.node_view import NodeView
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.model.supervisor import SupervisorStatus


class Moment(Struct):
    """What is the same for every incident of one look; `recent` grows with what is allowed meanwhile."""

    now_wall: float
    paused: str | None
    blind: str | None  # Why the controller cannot see well enough: just started, just woken, Slurm not answering.
    recent: list[Decision]  # Actions that were allowed within the longest window, newest last.
    running_jobs: int
    nodes_known: int
    nodes_silent: int
    drained_by_us: int = 0
    users_running: int = 1  # Users who have jobs that run.
    suspects: tuple[tuple[str, str], ...] = ()
    """(node, sentence) of those that an open incident calls suspect: see `suspect_nodes`."""
    nodes: tuple[SlurmNode, ...] = ()  # All of the cluster, as Slurm listed them last.


class PolicyInput(Moment):
    """The world at the moment of a decision."""

    incident: Incident
    config: Config
    rule: Rule  # What the configuration and the job's owner say; see slurm_watchdog.controller.policy.rules.
    job: SlurmJob | None  # The job as Slurm has it now; None if Slurm does not know it.
    busy: bool  # Another action on this job has not ended.
    jobs_in_trouble: int  # Jobs of the same user with a firing incident of the same kind, this one included.
    mounts_stalled: tuple[str, ...]  # Filesystems with an open outage that this job is known to use.
    full: tuple[str, ...] = ()
    """Filesystems without space left, or what is known of them, on which this job has failed to write."""
    step: int | None = None
    step_s: float | None = None
    loop_turns: bool | None = None  # Whether the job makes steps within its limit; None: not known.
    crash_loop: str | None = None
    """The sentence of an open incident that says that the job restarts and dies again and again."""
    storm_over_s: float | None = None  # Since when the last storm is over; None if there was none.
    process: GpuProcess | None = None  # What is decided about, of an incident about processes: this one, and no job.
    process_since: float | None = None  # Since when it has had no job, a date.
    process_objection: str | None = None
    """Why it must not be touched now; see slurm_watchdog.controller.policy.orphan_process."""
    process_job: SlurmJob | None = None  # The job that it came from, while Slurm remembers it.
    users_in_trouble: int = 0  # Users of jobs with a firing incident of the same kind, this one's included.
    jobs_with_orphans: int = 0
    """Jobs of the same user of which processes became orphans at about the same time, this one's included."""
    users_with_orphans: int = 0
    hang: str | None = None  # The open incident that proves that the job's loop does not turn.
    why_held: str | None = None
    """Why a restart would end in the same hang again, a sentence: see controller.incidents.hang_memory."""
    supervisor: SupervisorStatus | None = None  # The job's own, if one lives.
    resume_from: str = ""  # Checkpoint that a restart in place names to the command; empty: none, the trainer chooses.
    switch_of_others: str = ""  # Why the job's kill switch may end another job, too, a sentence.
    waits_behind: tuple[str, ...] = ()
    """Jobs, not held, that wait for the end of this one (--dependency): they start when it ends."""
    switch_unknown: str = ""  # Why it is not known yet where the job looks for its kill switch, a sentence.
    broken: tuple[tuple[str, str], ...] = ()  # (node, what broke there under this job): see `broken_under`.


def with_process(
    situation: PolicyInput, process: GpuProcess, view: Callable[[str], NodeView | None],
    reporting: Collection[str], jobs: Collection[SlurmJob], incidents: Collection[Incident],
) -> PolicyInput:  # fmt: skip
    """The situation, with what is known of this process of the incident. `view` gives a node's newest report."""
    crowd, node = orphans_at_once(situation.incident, process, incidents), view(process.node)
    orphan_s = orphan_for_s(process, node)
    return replace(
        situation,
        process=process,
        process_since=None if orphan_s is None else situation.now_wall - orphan_s,
        process_objection=objection(process, node, process.node in reporting, jobs),
        process_job=job_of(process, jobs),
        jobs_with_orphans=crowd.own,
        users_with_orphans=crowd.users,
    )
