"""What detectors look at: the whole cluster at one moment, as frozen values.

Every age is in seconds before `ClusterView.now`, on the controller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import islice

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.collective_records import RecordSet
from slurm_watchdog.model.evidence import OwnWords, ProcessStack
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.node_events import NodeSuspicion
from slurm_watchdog.model.node_view import GpuView, NodeView, SlurmNodeView, UnreachedNode
from slurm_watchdog.model.observations import Blocked, Event, Process, Role
from slurm_watchdog.model.observations import Checkpoint as CheckpointOnDisk
from slurm_watchdog.model.past_runs import EndedJob, Motion, PastRun, SlowSearch, Steady, WaitBlock, WaitDump
from slurm_watchdog.model.slurm import Reservation, SlurmJob
from slurm_watchdog.model.supervisor import SupervisorStatus

READ_LATER_S = 5.0  # The agents' interval as shipped.


class NoData(Exception):
    """A detector cannot judge: what it needs was not seen. Opens nothing, closes nothing."""


class ProcessView(Struct):
    """One process of a job, as last seen."""

    node: str
    process: Process
    seen_age_s: float  # Since the report that last held it.
    gone_s: float | None = None  # Since the first report without it, or with a zombie; None while it is there.
    storage_age_s: float | None = None
    """Since it was last seen waiting for a disk or a file for a moment, as one that moves data; None: never."""
    worked_age_s: float | None = None
    """Since a report showed that it had computed or moved data, or the first of it; None: not known."""
    quiet_s: float | None = None
    """Since it, having used most of a core, was last seen to use more than next to nothing; None: not known."""

    @property
    def alive(self) -> bool:
        """Present in its node's newest report, and no zombie."""
        return self.gone_s is None and self.process.state not in ("Z", "X")

    @property
    def unending(self) -> Blocked | None:
        """The call of another thread of it that keeps it from ending, of a process whose main thread has ended;
        None of any other. Such a process is a zombie, is not `alive`, and holds what it held (GPU memory)."""
        left = self.process.state == "Z" and (self.process.threads or 1) > 1
        return self.process.blocked if left else None

    @property
    def key(self) -> tuple[str, int, int]:
        """What its dumps have as well: no other process has all three."""
        return self.node, self.process.pid, self.process.start_ticks

    def culprit(self, reason: str) -> Culprit:
        """It, named as a cause for this reason."""
        return Culprit(node=self.node, rank=self.process.rank, pid=self.process.pid, reason=reason)


class Progress(Struct):
    """The progress clock of one run of one job."""

    step: int  # 0 where `step_known` is not set.
    step_known: bool = True
    """Not set: something rises (epochs, tokens, what was learnt of an unknown log) and shows that the loop
    turns; which step it is no one knows."""
    age_s: float  # Since the step last rose (or since a grace was granted, whichever is shorter).
    last_increase_age_s: float | None = None  # Since the step last rose, without any grace; None: it was not seen to.
    ungranted_age_s: float | None = None  # `age_s` without the grace; None: the same.
    steps_seen: int  # How many times it rose in this run, with the line in which it was seen first.
    rises: int = 0  # How many times it was seen to rise in this run: 0 after one line, or a bar's position only.
    intervals_s: tuple[float, ...] = ()  # The recent times between two rises, oldest first.
    paces_s: tuple[float, ...] = ()  # Recent times between two rises in training alone, oldest first.
    longest_pace_s: float = 0.0  # The longest such time of the last day; 0: none was seen.
    read_age_s: float | None = None  # Since `source` was last read to its end: nothing later is known of it.
    step_s: float | None = None  # Of one step, the median of the recent ones; None until two rises were seen.
    stride: int = 1  # Steps between two log lines.
    widest_stride: int = 1  # The same, the most of the recent ones.
    by_epochs: bool = False
    """The step is that of an epoch, added to the epochs before: some frameworks begin an epoch's count, or
    the number of epochs, counted again from a resume."""
    total_steps: int | None = None
    first_step: int | None = None
    """The first step that this run logged as made, not where a bar begins; None until it rose from there."""
    begun_anew: int = 0  # How often its count fell and rose again in this run: then `total_steps` is that of an epoch.
    phase: str | None = None
    phase_age_s: float = 0.0
    phase_intervals_s: tuple[float, ...] = ()
    """Recent times between two rises in which the log announced this phase: an evaluation with the step
    after it."""
    source: str = ""
    shared: bool = False  # Two programs count in one log, in the same words: one that stops is hidden by the other.

    @property
    def known_step(self) -> int | None:
        """The step, None where only something else is counted."""
        return self.step if self.step_known else None

    @property
    def place(self) -> str:
        """Where the run stands, in words: `step 500`, or that it counts no steps."""
        return f"step {self.step}" if self.step_known else "its last sign of progress"


class Checkpoint(Struct):
    step: int
    age_s: float


class Announced(Struct):
    """The line of a log that says which phase a run is in."""

    phase: str
    age_s: float
    step: int | None = None
    line: str = ""
    source: str = ""  # The file that it was read from.


class LogView(Struct):
    """What is known of the logs of a run, all of them together, where agents could read them."""

    grew_age_s: float  # Since one of them last grew.
    whole: bool  # Every one that is known was read, up to its end, and nothing in it was passed over.
    framework: str | None = None  # Which one wrote them, for slurm_watchdog.knowledge.frameworks.what_to_do.


class RankGpu(Struct):
    """Which GPU a rank computes on, as NVML's process lists say."""

    rank: int
    pid: int
    view: GpuView

    def culprit(self, reason: str) -> Culprit:
        """It, named as a cause for this reason."""
        gpu = self.view
        return Culprit(node=gpu.node, rank=self.rank, pid=self.pid, gpu_uuid=gpu.gpu.uuid, reason=reason)


class StepTime(Struct):
    """How long the steps up to `step` took, each."""

    step: int
    seconds: float
    at: float
    logged: bool  # The log, or dates of its lines, say so; else it is as exact as the agent's interval.
    phase: str | None = None  # What the log was in since the line before; None: training, whose steps count.
    batch: float | None = None  # Samples a step, where the line says so.


class LossPoint(Struct):
    step: int
    loss: float  # May be NaN or infinite.
    at: float


class StackSnapshot(Struct):
    """One dump of all ranks of a job."""

    age_s: float
    stacks: tuple[ProcessStack, ...]
    silent_nodes: tuple[str, ...] = ()  # Nodes that did not answer in time.


class StillRow(Struct):
    """Dumps since the last step in which every rank stood where it stood in the first of them."""

    dumps: int
    snapshots: tuple[StackSnapshot, ...]  # The first and the last two, oldest first.
    over: bool = False  # Someone has moved since, or was not seen: until the next step it proves nothing.


class ErrorLine(Struct):
    node: str
    age_s: float
    event: Event


ASKED_RANKS = 64  # Ranks of a job are started alike: what these say of their command line the others would, too.


class CollectiveTimeout(Struct):
    """After how long the ranks of a job give a collective up, and with it themselves and the evidence."""

    seconds: float
    assumed: bool  # Nothing says so: it is torch's own default, and the program may have asked for another.


class JobView(Struct, dict=True, gc=True):
    """One run of one job that Slurm says is running."""

    job: SlurmJob
    run_age_s: float  # Since this run was first seen, or since a grace was granted.
    read_later_s: float = READ_LATER_S  # So much later may a line be read than it was written: agents' interval.
    step_id: str | None = None  # The Slurm step of its ranks, as far as is known.
    processes: tuple[ProcessView, ...] = ()
    progress: Progress | None = None
    phase: str | None = None  # What the log says that the run is in, before its first step, too; None: training.
    announced: Announced | None = None  # The line that says so.
    log: LogView | None = None  # None: no agent could read any.
    checkpoint: Checkpoint | None = None
    snapshots: tuple[StackSnapshot, ...] = ()  # Taken since the last step, oldest first.
    collectives: tuple[RecordSet, ...] = ()  # What its ranks recorded of their collectives since the last step.
    own_words: tuple[OwnWords, ...] = ()  # What its ranks wrote of their ends since the last step, oldest first.
    row: StillRow | None = None  # Of the dumps since the step was late by its own measure; None: none was taken.
    errors: tuple[ErrorLine, ...] = ()
    error_ranks: tuple[tuple[str, tuple[int, ...]], ...] = ()  # (pattern, ranks) that said so since the last step.
    silent_nodes: tuple[str, ...] = ()  # Nodes of the job whose agent has not reported lately.
    without_ranks: frozenset[str] = frozenset()  # Of the job's nodes: the batch host, where its supervisor left it out.
    gpus: tuple[RankGpu, ...] = ()  # In the order of ranks; a rank that no list of processes names is not in it.
    step_times: tuple[StepTime, ...] = ()  # The recent ones.
    step_history: tuple[StepTime, ...] = ()  # Of the whole run: for each block of steps its first and the median.
    losses: tuple[LossPoint, ...] = ()  # Of this run, the recent ones, oldest first.
    checkpoints_on_disk: tuple[CheckpointOnDisk, ...] = ()  # As agents last saw them; ages inside are as of that look.
    earlier_checkpoints: tuple[CheckpointOnDisk, ...] = ()
    """The newest complete ones as they were seen one after the other, the newest last; some may be gone by now."""
    growing_age_s: float | None = None  # Since files of a checkpoint of it were last seen to grow.
    saving_age_s: float | None = None  # Since its stacks last showed a rank that saves and moves.
    steady: tuple[Steady, ...] = ()  # Ranks that may spin in Python, while no step is made.
    motion: Motion | None = None  # Of a run whose steps can hardly be read: whether ranks move; None: few dumps.
    checkpoint_intervals_s: tuple[float, ...] = ()  # Times between the recent complete checkpoints of this run.
    saved_age_s: float | None = None  # Since a new checkpoint was complete, as log or disk show; None: none was seen.
    save_intervals_s: tuple[float, ...] = ()  # Times between the recent ones of these.
    past: tuple[PastRun, ...] = ()  # Earlier runs, oldest first, as far as this controller has seen them.
    touched_age_s: float | None = None  # Since an action of ours first touched this run: it is ending by it.
    unlisted: int = 0  # Living processes of it that are not in `processes`: what they do is not known.
    supervised: bool = False  # A living supervisor (`slurm-watchdog run`) may start the step of its ranks again.
    supervisor: SupervisorStatus | None = None  # What it says of itself, if it lives.
    waits: tuple[WaitBlock, ...] = ()  # How often its ranks were found waiting while it made steps, oldest first.
    wait_dumps: tuple[WaitDump, ...] = ()  # Dumps that were taken to see where its ranks usually are, oldest first.

    @property
    def ranks_on(self) -> tuple[str, ...]:
        """Nodes on which its ranks are."""
        return tuple(node for node in self.job.nodes if node not in self.without_ranks)

    @property
    def is_writing(self) -> bool:
        """Whether files of a checkpoint show that it is being written."""
        return any(each.writing for each in self.checkpoints_on_disk)

    @cached_property
    def collective_timeout(self) -> CollectiveTimeout | None:
        """The shortest that a rank's command line or environment says, or is assumed; None: nothing points to one."""
        named = [
            (each.process.collective_timeout_assumed, each.process.collective_timeout_s)
            for each in islice(self.ranks, ASKED_RANKS)
            if each.process.collective_timeout_s is not None
        ]
        if not named:
            return None
        assumed, seconds = min(named)
        return CollectiveTimeout(seconds=seconds, assumed=assumed)

    @cached_property
    def every_rank_known(self) -> bool:
        """Whether as many ranks are known as its processes say that there are; True where none of them says."""
        ranks = self.ranks
        world = max((rank.process.world_size or 0 for rank in ranks), default=0)
        return len({rank.process.rank for rank in ranks if rank.process.rank is not None}) >= world

    @cached_property
    def gpu_uuids(self) -> frozenset[str]:
        """The GPUs that its ranks were seen on."""
        return frozenset(each.view.gpu.uuid for each in self.gpus)

    @cached_property
    def renewed(self) -> bool:
        """Whether every living rank succeeds one that ended since the last step: a launcher restarted them."""
        if self.progress is None:
            return False
        since_s = min(self.progress.age_s, self.progress.last_increase_age_s or self.progress.age_s)
        ended = {
            each.process.rank
            for each in self.processes
            if each.gone_s is not None and each.gone_s <= since_s and each.process.role is Role.RANK
        }
        living = {each.process.rank for each in self.living_ranks} if ended else set()
        return bool(living) and living <= ended

    @cached_property
    def ranks(self) -> tuple[ProcessView, ...]:
        """The process that stands for each rank, in the order of their ranks.

        An elastic launcher starts a dead rank again: the living one counts, else the one seen last.
        """
        found = [p for p in self.processes if p.process.role is Role.RANK and p.process.rank is not None]
        found.sort(key=lambda p: (p.process.rank or 0, p.node, p.process.pid, p.process.start_ticks))
        living = [p for p in found if p.alive]
        if len(living) == len(found):
            return tuple(living)
        numbers = {p.process.rank for p in living}
        last: dict[int, ProcessView] = {}
        for process in found:
            number = process.process.rank or 0
            known = last.get(number)
            if number not in numbers and (known is None or _gone_s(process) < _gone_s(known)):
                last[number] = process
        return tuple(sorted([*living, *last.values()], key=lambda p: p.process.rank or 0))

    @cached_property
    def living_ranks(self) -> tuple[ProcessView, ...]:
        """Those of `ranks` that are there, and no zombies."""
        return tuple(rank for rank in self.ranks if rank.alive)

    @cached_property
    def gone_ranks(self) -> tuple[ProcessView, ...]:
        """The others."""
        ranks = self.ranks
        return () if len(self.living_ranks) == len(ranks) else tuple(rank for rank in ranks if not rank.alive)


def _gone_s(process: ProcessView) -> float:
    return process.seen_age_s if process.gone_s is None else process.gone_s


class MountAnswer(Struct):
    """What the newest probe of a mount on one node said."""

    responding: bool
    age_s: float
    seconds: float
    error: str | None = None
    same_filesystem: bool = True  # False where that node has another one at this place (its own disk): no peer.
    uid: int | None = None  # The user that the child asked as; None: no user's child, whose word counts for everybody.


class FilesystemView(Struct):
    """One filesystem on which a process of a job is, or was lately, blocked."""

    key: str  # Names the filesystem itself: the same on two nodes only if it is the same one.
    mount: str
    blocked: tuple[ProcessView, ...] = ()  # Processes that are blocked on it now.
    known_nodes: tuple[str, ...] = ()  # Nodes where a process was blocked on it since the trouble began.
    answers: tuple[tuple[str, MountAnswer], ...] = ()  # (node, answer) of the probes since the trouble began.


class ClusterView(Struct):
    """Everything, at one moment."""

    now: float
    watched_s: float = 0.0  # Since the first look: what is older was not seen.
    jobs: Sequence[JobView] = ()
    judged: Sequence[JobView] | None = None  # The same as they were judged last, where to make them of now takes time.
    filesystems: tuple[FilesystemView, ...] = ()
    reporting_nodes: tuple[str, ...] = ()
    silent_nodes: tuple[str, ...] = ()
    silent_after_s: float | None = None  # A node counts as silent after this time without a report.
    unreached: tuple[UnreachedNode, ...] = ()
    nodes: tuple[NodeView, ...] = ()  # Every node that has ever reported, silent ones with what they said last.
    heard_at: Mapping[str, float] = {}  # Node -> when its newest report was made, a small one, too.
    slurm_nodes: tuple[SlurmNodeView, ...] = ()
    ended: tuple[EndedJob, ...] = ()
    waiting: tuple[JobView, ...] = ()  # Jobs that neither run nor are over: completing, or requeued and waiting.
    slurm_problem: str = ""  # What is wrong with Slurm's newest answer; empty if it is good, or if there is none.
    slurm_age_s: float | None = None  # Since Slurm last answered, or the controller stalled; None: it never answered.
    slurm_excused: bool = False  # That age rests on such a stall: no answer has been seen since.
    suspects: tuple[NodeSuspicion, ...] | None = None  # Nodes with a past, the worst first; None: no one remembers any.
    searches: tuple[SlowSearch, ...] = ()  # For the nodes that make jobs slow.
    excused_nodes: tuple[str, ...] = ()  # Not silent only because the controller stalled: not seen to report since.
    reservations: tuple[Reservation, ...] = ()  # Of Slurm, as they were listed last.
    date: float | None = None  # Of `now`, as seconds since the epoch; None: no one has said.
    asked: frozenset[str] | None = None
    """Subjects of the open incidents: of nothing else it need be said that it is well. None: of all."""

    @property
    def ageless_jobs(self) -> Sequence[JobView]:
        """The jobs, for who reads no age of them."""
        return self.jobs if self.judged is None else self.judged

    def last_heard(self, node: NodeView) -> float:
        """When the node's newest report was made."""
        return self.heard_at.get(node.name, node.reported_at)
