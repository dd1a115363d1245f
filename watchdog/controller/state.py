"""What the controller knows: fed by reports and by Slurm, read as frozen views.

Times are the controller's monotonic clock at receipt, less the ages that agents send. State belongs to one run
of one job, (job id, restart count): a restart drops all of it, so that nothing old is ever judged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from msgspec.structs import replace

from watchdog.controller.gpus import GpuPids
from watchdog.detect.view import (
    Checkpoint,
    ClusterView,
    ErrorLine,
    FilesystemView,
    JobView,
    MountAnswer,
    ProcessView,
    Progress,
    StackSnapshot,
)
from watchdog.model import (
    Event,
    EventKind,
    Fence,
    Incident,
    MountProbe,
    Process,
    ProcessStack,
    Report,
    Role,
    SlurmJob,
    SlurmView,
)

KEPT_INTERVALS = 50
"""Recent steps that the limit is learnt from."""
KEPT_ERRORS = 40
KEPT_SNAPSHOTS = 3
START_SLACK_S = 3.0
"""Slurm gives start times in whole seconds, by the clock of its own machine."""
READ_ON_S = 60.0
"""A job's logs are followed this long after its end: the last lines tell why."""
KEPT_GONE_S = 3600.0
"""A process that is gone is remembered this long, so that its death can be told."""
ACTIVE_STATES = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"})
HOLDS_NODES = ACTIVE_STATES | {"CONFIGURING", "COMPLETING"}
"""States in which processes of the job may rightly be on its nodes."""
LOCAL_TYPES = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "vfat", "tmpfs", "overlay"})
"""Filesystems that one kernel has for itself."""

ProcessKey = tuple[str, int, int]
"""(node, pid, start ticks)."""


@dataclass
class _Clock:
    """The progress clock of one counter: one pattern in one file."""

    step: int
    rose_at: float
    first_step: int
    seen: int = 1
    stride: int = 0
    total_steps: int | None = None
    lower: int | None = None
    """A lower count that was read after the highest one: a new epoch if it goes on rising."""
    intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_INTERVALS))
    rises: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=KEPT_INTERVALS))
    """(when, step): the last of those that were read at once."""

    @property
    def step_s(self) -> float | None:
        """Median time of one step, however many of them a report brings at once."""
        times_s = [(b_at - a_at) / (b - a) for (a_at, a), (b_at, b) in pairwise(self.rises) if b_at > a_at]
        return median(times_s) if times_s else None


@dataclass
class _Run:
    """One run of one job."""

    job: SlurmJob
    began_at: float
    """Since when this run is known, or the last grace."""
    valid_from: float
    """Events before this belong to the run before."""
    processes: dict[ProcessKey, tuple[Process, float, float | None]] = field(default_factory=dict)
    """(as last seen, seen at, gone since)."""
    left_over: frozenset[ProcessKey] = frozenset()
    """Processes of the run before that are still ending."""
    step_id: str | None = None
    """The Slurm step that the clocks are about, as far as is known."""
    steps_from: float = float("-inf")
    """Counts that were read before this belong to the Slurm step before."""
    clocks: dict[tuple[str, str], _Clock] = field(default_factory=dict)
    grace_from: float = float("-inf")
    troubled_at: float = float("-inf")
    """When an incident of this job was last open: a step that took so long because of it teaches nothing."""
    started: bool = False
    """Whether this run has begun: until then, while the run before is completing, every line is that one's."""
    inactive_since: float | None = None
    log_starts: dict[str, int] = field(default_factory=dict)
    """Where this run's lines begin in the files of the run before."""
    log_offsets: dict[str, int] = field(default_factory=dict)
    """How far each file has been read."""
    phase: tuple[str, float] | None = None
    checkpoint: tuple[int, float] | None = None
    errors: deque[tuple[str, float, Event]] = field(default_factory=lambda: deque(maxlen=KEPT_ERRORS))
    snapshots: deque[tuple[float, tuple[ProcessStack, ...], tuple[str, ...]]] = field(
        default_factory=lambda: deque(maxlen=KEPT_SNAPSHOTS)
    )


@dataclass
class _Node:
    boot_id: str
    agent_id: str
    sequence: int
    reported_at: float


@dataclass
class _Filesystem:
    mount: str
    device: str | None
    boot_id: str | None
    """Of the only kernel that has it, for a local disk; None for a filesystem that nodes share."""
    nodes: set[str] = field(default_factory=set)
    answers: dict[str, tuple[MountProbe, float, bool]] = field(default_factory=dict)
    """Node -> newest probe, when it came, and whether it is about this very filesystem."""
    last_blocked_at: float = 0.0


class ClusterState:
    """Everything that reports and Slurm said, and that still counts. Not thread-safe: one loop owns it."""

    def __init__(self, *, silent_after_s: float, report_lifetime_s: float, partitions: Iterable[str] = ()):
        self._silent_after_s = silent_after_s
        self._report_lifetime_s = report_lifetime_s
        self._partitions = frozenset(partitions)
        self._runs: dict[str, _Run] = {}
        self._nodes: dict[str, _Node] = {}
        self._filesystems: dict[str, _Filesystem] = {}
        self._job_ids: dict[str, str] = {}
        """What agents call a job -> what Slurm's commands call it."""
        self.gpus = GpuPids()
        self.jobs: dict[str, SlurmJob] = {}
        """Every job of Slurm's newest listing, finished ones included."""
        self._acted_on: dict[str, int] = {}
        """Job -> restart count, of actions that an earlier controller left open: how such a job ended counts, too."""
        self._on_node: dict[str, set[str]] = {}
        """Node -> what its processes call the jobs that have it."""
        self.node_addresses: dict[str, str] = {}
        self.slurm_at: float | None = None

    # ------------------------------------------------------------------------------------ feeding

    def apply_slurm(self, view: SlurmView, now: float, wall: float | None = None) -> None:
        """Takes over one complete listing: new runs begin, runs that are over are forgotten.

        `wall` is the date of `now`: with it, what was logged before a run's start time is known to be older than it.
        """
        self.slurm_at = now
        self.jobs = {job.job_id: job for job in view.jobs}
        self._job_ids = {job.process_id: job.job_id for job in view.jobs}
        self.node_addresses = {node.name: node.address for node in view.nodes}
        self._on_node = {}
        for job in view.jobs:
            for name in job.nodes if job.state in HOLDS_NODES else ():
                self._on_node.setdefault(name, set()).add(job.process_id)
        for job in view.jobs:
            self.apply_job(job, now, wall)
        for job_id in [job_id for job_id in self._runs if job_id not in self.jobs]:
            del self._runs[job_id]

    def apply_job(self, job: SlurmJob, now: float, wall: float | None = None) -> None:
        """Takes over what Slurm says of one job."""
        self.jobs[job.job_id] = job
        self._job_ids[job.process_id] = job.job_id
        if self._partitions and job.partition not in self._partitions:
            return
        run = self._runs.get(job.job_id)
        if job.state not in ACTIVE_STATES:
            if run is not None and run.job.restarts != job.restarts:
                self._runs[job.job_id] = _new_run(job, now, run, wall)
            elif run is not None:
                run.inactive_since = now if run.inactive_since is None else run.inactive_since
                run.job = job
            elif self._acted_on.get(job.job_id) == job.restarts and job.state != "PENDING":
                run = self._runs[job.job_id] = _new_run(job, now, None, wall)
                run.started, run.valid_from, run.inactive_since = True, _started_at(job, now, wall), now
            return
        if run is None or run.job.restarts != job.restarts:
            self._runs[job.job_id] = _new_run(job, now, run, wall)
        else:
            if run.inactive_since is not None or (job.state == "RUNNING" and run.job.state != "RUNNING"):
                run.grace_from = now  # it waited in the queue, or was suspended: no step was due in that time
                run.snapshots.clear()
            if not run.started:
                run.began_at, run.started = now, True
                run.valid_from = max(run.valid_from, _started_at(job, now, wall))
            run.job, run.inactive_since = job, None

    def apply_report(self, report: Report, now: float) -> str:
        """Takes over one report. Returns what became of it: `accepted`, `duplicate` or `expired`.

        A report older than its lifetime proves that the node is there and says nothing about now.
        """
        node = self._nodes.get(report.node)
        if node is not None and node.agent_id == report.agent_id and report.sequence <= node.sequence:
            return "duplicate"
        made_at = now - max(0.0, report.age_s)
        self._nodes[report.node] = _Node(
            boot_id=report.boot_id,
            agent_id=report.agent_id,
            sequence=report.sequence,
            reported_at=max(made_at, node.reported_at) if node else made_at,
        )
        if report.age_s > self._report_lifetime_s:
            return "expired"
        self._apply_processes(report, made_at)
        self.gpus.apply(report, made_at)
        for log in report.logs:
            run = self._run(log.job_id)
            if log.offset is not None and run is not None:
                offsets = run.log_offsets
                offsets[log.path] = max(log.offset, offsets.get(log.path, 0))
        for event in report.events:
            self._apply_event(report.node, event, made_at)
        for probe in report.mounts:
            self.apply_probe(report.node, probe, now)
        return "accepted"

    def _run(self, process_job_id: str) -> _Run | None:
        """The run of the job that agents know by this id."""
        return self._runs.get(self._job_ids.get(process_job_id, process_job_id))

    def _apply_processes(self, report: Report, made_at: float) -> None:
        present: dict[str, set[ProcessKey]] = {}
        for process in report.processes:
            run = self._run(process.job_id)
            key = (report.node, process.pid, process.start_ticks)
            if run is None or key in run.left_over:
                continue
            present.setdefault(run.job.job_id, set()).add(key)
            if process.job_id != run.job.job_id:
                process = replace(process, job_id=run.job.job_id)
            if run.job.state in ACTIVE_STATES:
                dead_at = run.processes[key][2] if key in run.processes else None
                dead_at = (made_at if dead_at is None else dead_at) if process.state in ("Z", "X") else None
                run.processes[key] = (process, made_at, dead_at)
                self._note_blocked(report, process, made_at)
        for job_id, run in self._runs.items():
            seen = present.get(job_id, set())
            for key, (process, seen_at, gone_at) in list(run.processes.items()):
                if key[0] != report.node or key in seen:
                    continue
                gone_since = made_at if gone_at is None else gone_at
                if made_at - gone_since > KEPT_GONE_S:
                    del run.processes[key]
                else:
                    run.processes[key] = (process, seen_at, gone_since)
            if seen:
                _follow_training(run, made_at, report.interval_s)

    def _note_blocked(self, report: Report, process: Process, made_at: float) -> None:
        if process.blocked is None or process.blocked.mount is None:
            return
        call = process.blocked
        key = filesystem_key(call.mount or "", call.device, call.fs_type, report.boot_id)
        boot_id = report.boot_id if is_local(call.device, call.fs_type) else None
        filesystem = self._filesystems.setdefault(
            key, _Filesystem(mount=call.mount or "", device=call.device, boot_id=boot_id)
        )
        filesystem.nodes.add(report.node)
        filesystem.last_blocked_at = made_at

    def _apply_event(self, node: str, event: Event, made_at: float) -> None:
        run = self._run(event.job_id)
        at = made_at - max(0.0, event.age_s)
        if run is None or at < run.valid_from or not run.started:
            return
        if event.backlog and (run.job.restarts > 0 or event.kind is not EventKind.PROGRESS):
            return
        if event.step is not None and event.kind is EventKind.PROGRESS:
            if at >= run.steps_from:
                self._apply_step(run, event, at)
        elif event.kind is EventKind.CHECKPOINT and event.step is not None:
            if run.checkpoint is None or at >= run.checkpoint[1]:
                run.checkpoint = (event.step, at)
            run.phase = None
        elif event.kind is EventKind.PHASE and event.phase:
            run.phase = (event.phase, at)
        elif event.kind is EventKind.ERROR:
            run.errors.append((node, at, event))

    def _apply_step(self, run: _Run, event: Event, at: float) -> None:
        """Only a count that rises is progress. A lower one is a new epoch once it rises by itself."""
        assert event.step is not None
        key = (event.source, event.pattern or "")
        clock = run.clocks.get(key)
        if clock is None:
            run.clocks[key] = _Clock(
                step=event.step, rose_at=at, first_step=event.step, total_steps=event.total_steps
            )
        elif event.backlog:
            clock.step = max(clock.step, event.step)
        elif event.step > clock.step:
            if at > clock.rose_at > run.troubled_at and clock.seen > 1:
                clock.intervals_s.append(at - clock.rose_at)
            clock.stride = event.step - clock.step
            clock.step, clock.rose_at, clock.lower = event.step, at, None
            if clock.rises and clock.rises[-1][0] == at:
                clock.rises.pop()
            clock.rises.append((at, event.step))
            clock.seen += 1
            clock.total_steps = event.total_steps or clock.total_steps
        elif event.step < clock.step:
            if clock.lower is not None and event.step > clock.lower:
                run.clocks[key] = _Clock(
                    step=event.step, rose_at=at, first_step=clock.lower, total_steps=event.total_steps, seen=2
                )
            else:
                clock.lower = event.step
                return
        else:
            return
        run.phase = None if run.phase and run.phase[1] <= at else run.phase
        run.snapshots.clear()

    def apply_probe(self, node: str, probe: MountProbe, now: float) -> None:
        """The answer of a node about a mount; counts for every troubled filesystem mounted there."""
        boot_id = self._nodes[node].boot_id if node in self._nodes else ""
        for filesystem in self._filesystems.values():
            if filesystem.mount == probe.mount:
                same_device = probe.device is None or filesystem.device in (None, probe.device)
                same = same_device and filesystem.boot_id in (None, boot_id)
                filesystem.answers[node] = (probe, now, same)

    def add_snapshot(
        self,
        job_id: str,
        restarts: int,
        stacks: tuple[ProcessStack, ...],
        silent: tuple[str, ...],
        now: float,
    ) -> None:
        """One dump of all ranks; dropped if the job has restarted since it was asked for."""
        run = self._runs.get(job_id)
        if run is not None and run.job.restarts == restarts:
            run.snapshots.append((now, stacks, silent))

    def grant_grace(self, now: float, job_ids: Iterable[str] | None = None) -> None:
        """Starts the clocks of these jobs (all by default) anew: a cause has gone, or the controller slept."""
        for job_id in self._runs if job_ids is None else job_ids:
            if job_id in self._runs:
                run = self._runs[job_id]
                run.grace_from = now
                run.snapshots.clear()

    def note_trouble(self, job_ids: Iterable[str], now: float) -> None:
        """These jobs have an open incident at this moment."""
        for job_id in job_ids:
            if job_id in self._runs:
                self._runs[job_id].troubled_at = now

    def forget_silence(self, now: float) -> None:
        """After the controller's own pause no agent counts as silent: they all get their time again."""
        for node in self._nodes.values():
            node.reported_at = now
        if self.slurm_at is not None:
            self.slurm_at = now

    # ------------------------------------------------------------------------------------ reading

    def reporting_nodes(self, now: float) -> tuple[str, ...]:
        return tuple(sorted(n for n, s in self._nodes.items() if now - s.reported_at <= self._silent_after_s))

    def address_of(self, node: str) -> str | None:
        """The address that Slurm has for a node; None for a node that it does not know."""
        return self.node_addresses.get(node)

    def known_nodes(self) -> tuple[str, ...]:
        return tuple(sorted(self._nodes))

    def jobs_on(self, node: str, now: float) -> list[tuple[SlurmJob, dict[str, int]]]:
        """The jobs that run on a node, or ended there lately, with the offsets at which their logs begin."""
        return [
            (run.job, run.log_starts)
            for run in self._runs.values()
            if node in run.job.nodes and (run.inactive_since is None or now - run.inactive_since < READ_ON_S)
        ]

    def running_on(self, node: str, now: float, max_age_s: float) -> tuple[str, ...] | None:
        """SLURM_JOB_ID of every job that has `node` now, of whatever partition; None if Slurm's listing is older than `max_age_s`."""
        if self.slurm_at is None or now - self.slurm_at > max_age_s:
            return None
        return tuple(sorted(self._on_node.get(node, ())))

    def view(self, now: float) -> ClusterView:
        """Everything that detectors need, frozen."""
        reporting = self.reporting_nodes(now)
        return ClusterView(
            now=now,
            jobs=tuple(
                self._job_view(run, now, reporting)
                for _, run in sorted(self._runs.items())
                if run.job.state in ACTIVE_STATES
            ),
            filesystems=tuple(self._filesystem_views(now)),
            reporting_nodes=reporting,
            silent_nodes=tuple(sorted(set(self._nodes) - set(reporting))),
            slurm_age_s=None if self.slurm_at is None else now - self.slurm_at,
        )

    def job_view(self, job_id: str, now: float) -> JobView | None:
        """One job alone, also while it is pending between two runs."""
        run = self._runs.get(job_id)
        return None if run is None else self._job_view(run, now, self.reporting_nodes(now))

    def _job_view(self, run: _Run, now: float, reporting: tuple[str, ...]) -> JobView:
        step_id = _training_step(run.processes)
        return JobView(
            job=run.job,
            run_age_s=now - max(run.began_at, run.grace_from),
            processes=tuple(
                ProcessView(
                    node=key[0],
                    process=process,
                    seen_age_s=now - seen_at,
                    gone_s=None if gone_at is None else now - gone_at,
                )
                for key, (process, seen_at, gone_at) in sorted(run.processes.items())
                if process.role is not Role.RANK or process.step_id == step_id
            ),
            progress=_progress(run, now),
            checkpoint=Checkpoint(step=run.checkpoint[0], age_s=now - run.checkpoint[1])
            if run.checkpoint
            else None,
            snapshots=tuple(
                StackSnapshot(age_s=now - at, stacks=stacks, silent_nodes=silent)
                for at, stacks, silent in run.snapshots
            ),
            errors=tuple(ErrorLine(node=node, age_s=now - at, event=event) for node, at, event in run.errors),
            silent_nodes=tuple(node for node in run.job.nodes if node not in reporting),
        )

    def _filesystem_views(self, now: float) -> Iterable[FilesystemView]:
        blocked: dict[str, list[ProcessView]] = {}
        for run in self._runs.values():
            for (node, _, _), (process, seen_at, gone_at) in run.processes.items():
                call = process.blocked
                if gone_at is not None or call is None or call.mount is None or node not in self._nodes:
                    continue
                key = filesystem_key(call.mount, call.device, call.fs_type, self._nodes[node].boot_id)
                blocked.setdefault(key, []).append(
                    ProcessView(node=node, process=process, seen_age_s=now - seen_at)
                )
        for key, filesystem in list(self._filesystems.items()):
            here = blocked.get(key, [])
            hung = any(not probe.responding and same for probe, _, same in filesystem.answers.values())
            if not here and not hung and now - filesystem.last_blocked_at > KEPT_GONE_S:
                del self._filesystems[key]
                continue
            yield FilesystemView(
                key=key,
                mount=filesystem.mount,
                blocked=tuple(here),
                known_nodes=tuple(sorted(filesystem.nodes)),
                answers=tuple(
                    (
                        node,
                        MountAnswer(
                            responding=probe.responding,
                            age_s=now - at,
                            seconds=probe.seconds,
                            error=probe.error,
                            same_filesystem=same,
                        ),
                    )
                    for node, (probe, at, same) in sorted(filesystem.answers.items())
                ),
            )

    def remember_trouble(self, incidents: Iterable[Incident], now: float) -> None:
        """Takes up the filesystems of incidents that an earlier controller left open: they are looked at again."""
        for incident in incidents:
            if incident.subject.startswith("mount:") and incident.mounts:
                self._filesystems.setdefault(
                    incident.subject.removeprefix("mount:"),
                    _Filesystem(
                        mount=incident.mounts[0],
                        device=None,
                        boot_id=None,
                        nodes={culprit.node for culprit in incident.culprits if culprit.node},
                        last_blocked_at=now,
                    ),
                )

    def remember_action(self, fence: Fence) -> None:
        """This run may have ended because of an action, while nobody listened: agents tell the recent past again."""
        self._acted_on[fence.job_id] = fence.restarts

    def end_trouble(self, subject: str) -> None:
        """A filesystem is well again: what was answered about it is no evidence for the next time."""
        filesystem = self._filesystems.get(subject.removeprefix("mount:"))
        if filesystem is not None:
            filesystem.nodes.clear()
            filesystem.answers.clear()


def is_local(device: str | None, fs_type: str | None) -> bool:
    """Whether a mount is a disk of its node; GPFS has a device under /dev, too, and is none."""
    if fs_type is not None:
        return fs_type in LOCAL_TYPES
    return device is not None and device.startswith("/dev/")


def filesystem_key(mount: str, device: str | None, fs_type: str | None, boot_id: str) -> str:
    """Names a filesystem so that two nodes share the name only if they share the filesystem.

    A server's export is the same everywhere; a block device (`/dev/sda1`) is the same only under the same kernel.
    """
    if device is None:
        return mount
    return f"{mount} ({device} of {boot_id[:8]})" if is_local(device, fs_type) else f"{mount} ({device})"


def _started_at(job: SlurmJob, now: float, wall: float | None) -> float:
    """The moment of the run's start on our monotonic clock; without dates, the beginning of time."""
    if wall is None or job.start_at is None:
        return float("-inf")
    return now - max(0.0, wall - job.start_at) - START_SLACK_S


def _new_run(job: SlurmJob, now: float, before: _Run | None, wall: float | None) -> _Run:
    started = job.state in ACTIVE_STATES
    valid_from = now
    if started and (before is None or (wall is not None and job.start_at is not None)):
        valid_from = _started_at(job, now, wall)
    return _Run(
        job=job,
        began_at=now,
        started=started,
        valid_from=valid_from,
        left_over=frozenset(before.processes) if before is not None else frozenset(),
        log_starts=dict(before.log_offsets) if before is not None else {},
        log_offsets=dict(before.log_offsets) if before is not None else {},
    )


def _follow_training(run: _Run, now: float, interval_s: float) -> None:
    """Where the batch script goes on from one step to the next (its data, then the training), all begins anew.

    What was learnt of the steps before says nothing about how long the next program takes to start. The last lines
    of the one before may come with the next report only, and from another node.
    """
    living = _living_steps(run.processes)
    if not living or run.step_id in living:
        return
    before, run.step_id = run.step_id, _training_step(run.processes)
    if before is not None:
        run.clocks.clear()
        run.snapshots.clear()
        run.phase, run.grace_from, run.steps_from = None, now, now + interval_s


def _living_steps(processes: Mapping[ProcessKey, tuple[Process, float, float | None]]) -> set[str | None]:
    return {p.step_id for p, _, gone_at in processes.values() if p.role is Role.RANK and gone_at is None}


def _training_step(processes: Mapping[ProcessKey, tuple[Process, float, float | None]]) -> str | None:
    """The Slurm step with the most ranks, of those that live: side steps of the same job (a shell, a profiler)
    have few, and one that is over may have had more."""
    living = _living_steps(processes)
    counts: dict[str | None, int] = {}
    for process, _, gone_at in processes.values():
        if process.role is Role.RANK and (not living or process.step_id in living):
            counts[process.step_id] = counts.get(process.step_id, 0) + (2 if gone_at is None else 1)
    return max(counts, key=lambda step: (counts[step], str(step)), default=None)


def _progress(run: _Run, now: float) -> Progress | None:
    """The clock that was seen to rise most often gives the step; any clock that rises proves that the loop turns."""
    if not run.clocks:
        return None
    (source, _), main = max(run.clocks.items(), key=lambda item: (item[1].seen, item[1].rose_at))
    newest = max(clock.rose_at for clock in run.clocks.values() if clock.seen > 1 or clock is main)
    rises = [clock.rose_at for clock in run.clocks.values() if clock.seen > 1]
    return Progress(
        step=main.step,
        age_s=max(0.0, now - max(newest, run.grace_from)),
        rose_age_s=max(0.0, now - max(rises)) if rises else None,
        steps_seen=main.seen,
        intervals_s=tuple(main.intervals_s),
        step_s=main.step_s,
        stride=max(1, main.stride),
        total_steps=main.total_steps,
        first_step=main.first_step,
        phase=run.phase[0] if run.phase else None,
        phase_age_s=now - run.phase[1] if run.phase else 0.0,
        source=source,
    )
