"""What agent and controller send each other: reports, replies, commands and their results."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.evidence import NodeEvidence, ProcessStack
from slurm_watchdog.model.observations import MountProbe, ProcessOnGpu
from slurm_watchdog.model.supervisor import RestartOrder


class JobCommand(Struct):
    """What commands about a job have in common."""

    id: str
    job_id: str
    expires_s: float = 60.0


class DumpStacks(JobCommand, tag="dump_stacks"):
    """Dump the Python stacks of every rank (and worker) of the job on this node, stopping nothing."""

    restarts: int


class ProbeMount(Struct, tag="probe_mount"):
    """Write and read back on a mount, in `directory`, as `uid`; leaves nothing behind when it answers."""

    id: str
    mount: str
    directory: str
    uid: int
    expires_s: float = 60.0


class KillSwitchCommand(JobCommand):
    """What commands about a kill switch have in common."""

    path: str
    uid: int
    content: str  # One JSON line: who, why, which incident.


class WriteKillSwitch(KillSwitchCommand, tag="write_kill_switch"):
    """Create the kill switch of one run of one job, as the job's owner."""

    restarts: int


class RemoveKillSwitch(KillSwitchCommand, tag="remove_kill_switch"):
    """Remove a kill switch if, and only if, it holds exactly `content`: we wrote it."""

    expires_s: float = 300.0


class GiveOrder(JobCommand, tag="give_order"):
    """Hand an order to the supervisor of one run of a job, now or when it connects within ORDER_LIFETIME_S."""

    restarts: int
    uid: int
    order: RestartOrder


class WithdrawOrder(JobCommand, tag="withdraw_order"):
    """Hand that order to no one any more; a supervisor that has it and has not begun drops it."""

    decision: str


class EndProcess(ProcessOnGpu, tag="end_process"):
    """One signal to one process that holds a GPU and whose job is over; or only a look at what became of it.

    The node refuses unless all of it is still so: this boot, this process (its start time) with this user and
    name, none of a job that lives, and a device of `minors` open. Answered with a ProcessEnd, refusals
    included.
    """

    id: str
    how: str  # `look`, `term` or `kill`.
    expires_s: float = 30.0


class CollectEvidence(JobCommand, tag="collect_evidence"):
    """Gather all about the job on this node that dies with it, stopping nothing. Answered with a NodeEvidence."""

    restarts: int
    expires_s: float = 90.0
    dumps: int = 3  # So many dumps of every rank's stacks tell stuck from busy.
    apart_s: float = 10.0  # Time between two of them.
    ras: bool = False  # NCCL's RAS is asked, too: it answers for the whole job, so one node asks.
    only_ras: bool = False  # Nothing else is gathered: another node was to ask, and could not.


Command = (
    DumpStacks
    | ProbeMount
    | WriteKillSwitch
    | RemoveKillSwitch
    | GiveOrder
    | WithdrawOrder
    | CollectEvidence
    | EndProcess
)


class ProcessEnd(Struct):
    """What a node says of the process that it was to end, after it has done so, or has refused to."""

    gone: bool = False  # It has ended, or its number is another's by now.
    released: bool = False  # It lives, and holds no GPU any more.
    sent: bool = False  # The signal went to it.
    state: str = ""  # The kernel's letter for it, the most stuck of its threads: D, S, Z.
    wchan: str = ""  # Where in the kernel that thread waits.
    refusal: str = ""  # Why nothing was sent.


class CommandResult(Struct):
    """What became of one command. Every command is answered once, refusals included."""

    command_id: str
    ok: bool
    error: str | None = None
    stacks: tuple[ProcessStack, ...] = ()
    probe: MountProbe | None = None
    evidence: NodeEvidence | None = None
    process: ProcessEnd | None = None


class JobWatch(Struct):
    """What the controller tells an agent about a job that runs on its node."""

    job_id: str
    restarts: int
    uid: int
    log_paths: tuple[str, ...] = ()  # Followed by this node: the job's standard output and error on its batch host.
    checkpoint_trackers: tuple[str, ...] = ()  # Files with the step of the newest complete checkpoint.
    checkpoint_directories: tuple[str, ...] = ()  # Where its checkpoints lie; looked at by its batch host only.
    progress_files: tuple[str, ...] = ()  # Files and directories that its loop writes to; looked at by its batch host.
    log_offsets: tuple[tuple[str, int], ...] = ()
    """(path, bytes): where this run's lines begin in files that earlier runs wrote; from 0 if a file is shorter."""
    progress_patterns: tuple[str, ...] = ()
    """Regular expressions of the site for lines with a step (slurm_watchdog.parse.training_log.site_patterns)."""
    kill_switch: str = ""  # Its directory is made ready on this node, owned by the job's owner.


class Reply(Struct):
    """The controller's answer to a report; or, pushed at any time, `commands` alone."""

    commands: tuple[Command, ...] = ()
    watch: tuple[JobWatch, ...] = ()
    running: tuple[str, ...] | None = None
    """SLURM_JOB_ID of every job that Slurm has on this node now, watched, ending or not; None: not known."""
    controller_id: str = ""  # New at every start of the controller: agents send the recent past again to it.
    closely: bool | None = None
    """Whether each report is to be whole from now on: a job here is late, starts or is asked about; None: as before."""
