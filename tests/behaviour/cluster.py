"""A scripted cluster: jobs that train, hang, save and listen as a test wants them to, and the part of Slurm
that acting meets.

It lives by simulated time, a second at a time. `done` is the record of what was asked of Slurm, in words that
tests look for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from slurm_watchdog.model.observations import Event, EventKind, GpuHolder, Process, Role
from slurm_watchdog.model.protocol import (
    Command,
    CommandResult,
    EndProcess,
    ProcessEnd,
    RemoveKillSwitch,
    WriteKillSwitch,
)
from slurm_watchdog.model.report import JobDirectives, Report
from slurm_watchdog.model.slurm import Reservation, SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.slurm.client import Refusal, SignalTo, SlurmRefused, SlurmUnavailable, Submission
from slurm_watchdog.slurm.request_guard import require_unchanged

EPOCH = 1_700_000_000.0
UID = 1000
LOG = "/scratch/job.log"
OVER = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"})
ENDING_S = 3.0
ELIGIBLE_AFTER_S = 5.0
"""A requeued job may not start at once."""


@dataclass
class Job:
    """One job, and how its trainer behaves."""

    id: str
    wants: int = 2
    name: str = "train"
    user: str = "ann"
    account: str = "physics"
    partition: str = "gpu"
    comment: str = ""
    is_batch: bool = True
    requeueable: bool = True
    required: tuple[str, ...] = ()
    dependency: str = ""
    array: str = ""
    array_limit: int | None = None
    # the trainer
    step_s: float = 2.0
    save_every: int = 100
    total_steps: int | None = 100_000
    hangs: bool = False
    listens_at: str | None = None
    """Path of the kill switch that it looks for at every step; None: the one that it was given."""
    hears_switch: bool = True
    on_usr1: str = "ignore"
    """`save`, `save and exit`, `exit`, `ignore`."""
    on_term: str = "ignore"
    exits_after_saving: bool = True
    hangs_again: bool = False
    """Every run of it hangs."""
    unkillable: bool = False
    # where it stands
    state: str = "PENDING"
    next_state: str = ""
    reason: str = "None"
    restarts: int = 0
    start_at: float | None = None
    held: bool = False
    nodes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    step: int = 0
    saved: int = 0
    saved_at: float | None = None
    since: float = 0.0
    eligible_at: float = 0.0
    steps_owed: float = 0.0
    told: int = 0
    """Steps that its log has told."""
    host: str = ""
    """The node that follows its log."""

    @property
    def is_there(self) -> bool:
        return self.state not in OVER


@dataclass
class Leftover:
    """A process that outlived its job on a GPU of a node. `hears`: the signals that end it."""

    node: str
    pid: int
    hears: tuple[str, ...] = ("term", "kill")
    job_id: str = "6"
    signals: list[str] = field(default_factory=list)

    @property
    def gone(self) -> bool:
        return any(signal in self.hears for signal in self.signals)

    def held(self) -> GpuHolder:
        return GpuHolder(
            pid=self.pid, start_ticks=1, uid=UID, user="eve", comm="python", state="S", job_id=self.job_id, minors=(self.pid % 8,),
            gpu_uuids=(f"GPU-{self.pid}",), memory_bytes=1 << 30, orphan_for_s=300.0, was_in_job=True,
        )  # fmt: skip

    def hear(self, how: str) -> ProcessEnd:
        """What its node answers to `look`, `term` or `kill`."""
        if how != "look" and not self.gone:
            self.signals.append(how)
        return ProcessEnd(gone=self.gone, sent=how != "look", state="" if self.gone else "D")


@dataclass
class Scripted:
    """The cluster. Implements slurm_watchdog.slurm.client.SlurmClient."""

    now: Callable[[], float]
    jobs: dict[str, Job] = field(default_factory=dict)
    nodes: dict[str, SlurmNode] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    """`requeue_hold 7`, `exclude 7 n1`, `signal 7 USR1 steps`, …"""
    refuses: dict[str, SlurmRefused] = field(default_factory=dict)
    when_asked: dict[str, Callable[[], object]] = field(default_factory=dict)
    """Request -> what happens at the very moment it arrives, once."""
    loses: dict[str, list[str]] = field(default_factory=dict)
    """Request -> fates of the next ones: `done` (it was, and the answer was lost) or `not done`."""
    away: bool = False
    silent: set[str] = field(default_factory=set)
    """Nodes whose agents say nothing."""
    reservations: dict[str, Reservation] = field(default_factory=dict)
    leftovers: list[Leftover] = field(default_factory=list)
    files: dict[tuple[str, str], str] = field(default_factory=dict)
    """(node, path) -> content: kill switches."""
    shared: tuple[str, ...] = ("/shared/",)
    answers: dict[str, list[CommandResult]] = field(default_factory=dict)
    submitted: int = 0
    started_under_switch: list[str] = field(default_factory=list)
    """Runs that began while a kill switch lay where their trainer looks."""
    scripts: dict[str, bytes] = field(default_factory=dict)

    # ---------------------------------------------------------------------------------------- life

    def add_nodes(self, *names: str, partition: str = "gpu") -> None:
        for name in names:
            self.nodes[name] = SlurmNode(name=name, address="127.0.0.1", state="IDLE", partitions=(partition,))

    def live(self) -> None:
        """One second."""
        for job in list(self.jobs.values()):
            if job.state == "COMPLETING" and self.now() - job.since >= ENDING_S and not job.unkillable:
                self._become(job, job.next_state)
                job.nodes = ()
            elif job.state == "RUNNING":
                self._train(job)
        for job in sorted(self.jobs.values(), key=lambda each: each.id):
            if job.state == "PENDING":
                self._schedule(job)

    def _become(self, job: Job, state: str) -> None:
        job.state, job.since = state, self.now()
        if state == "COMPLETING":
            job.steps_owed = 0.0

    def _train(self, job: Job) -> None:
        if job.hangs:
            return
        job.steps_owed += 1.0 / job.step_s
        while job.steps_owed >= 1.0 and job.state == "RUNNING":
            job.steps_owed -= 1.0
            job.step += 1
            if job.total_steps is not None and job.step >= job.total_steps:
                self.save(job)
                self.end(job, "COMPLETED")
            elif job.step % job.save_every == 0:
                self.save(job)
            if job.hears_switch and self.switch_of(job) is not None:
                self.save(job)
                if job.exits_after_saving:
                    self.end(job, "COMPLETED")
                job.hears_switch = False

    def save(self, job: Job) -> None:
        job.saved, job.saved_at = job.step, self.now()

    def end(self, job: Job, state: str) -> None:
        """The run comes to its end; `state` is what Slurm shows then."""
        if job.state in ("RUNNING", "SUSPENDED"):
            job.next_state = state
            self._become(job, "COMPLETING")
        elif job.state == "PENDING":
            self._become(job, state)

    def switch_of(self, job: Job) -> str | None:
        """The kill switch that the trainer of this run looks for, if it lies there."""
        path = job.listens_at or f"/run/slurm-watchdog/jobs/{job.id}.{job.restarts}/kill"
        return next((self.files[node, path] for node in job.nodes if (node, path) in self.files), None)

    def free_nodes(self, job: Job) -> list[str]:
        busy = {node for other in self.jobs.values() if other.is_there for node in other.nodes}
        fitting = [
            node.name
            for node in self.nodes.values()
            if job.partition in node.partitions
            and not any(word in node.state for word in ("DRAIN", "DOWN"))
            and node.name not in busy
            and node.name not in job.excluded
        ]
        return [*job.required, *(name for name in fitting if name not in job.required)]

    def _schedule(self, job: Job) -> None:
        if job.held:
            job.reason = "JobHeldUser"
            return
        waits_for = [self.jobs.get(part) for part in job.dependency.removeprefix("afterany:").split(",")]
        running = [
            other for other in self.jobs.values() if other.array == job.array and other.state != "PENDING" and other.is_there
        ]  # fmt: skip
        if any(other is not None and other.is_there for other in waits_for):
            job.reason = "Dependency"
        elif job.array and job.array_limit is not None and len(running) >= job.array_limit:
            job.reason = "JobArrayTaskLimit"
        elif self.now() < job.eligible_at:
            job.reason = "BeginTime"
        elif len(self.free_nodes(job)) < job.wants:
            job.reason = "Resources"
        else:
            self.start(job)

    def start(self, job: Job) -> None:
        job.nodes = tuple(self.free_nodes(job)[: job.wants])
        job.step, job.start_at, job.reason = job.saved, EPOCH + self.now(), "None"
        job.hangs = job.hangs_again
        job.hears_switch = True
        job.told, job.host = job.saved, job.nodes[0]
        self._become(job, "RUNNING")
        if self.switch_of(job) is not None:
            self.started_under_switch.append(f"{job.id}.{job.restarts}")

    def requeued(self, job: Job, *, held: bool) -> None:
        job.restarts += 1
        job.held, job.eligible_at, job.next_state = held, self.now() + ENDING_S + ELIGIBLE_AFTER_S, "PENDING"
        if job.state in OVER:
            self._become(job, "PENDING")
        else:
            self._become(job, "COMPLETING")

    # ---------------------------------------------------------------------------------------- questions

    def _as_slurm_has_it(self, job: Job) -> SlurmJob:
        return SlurmJob(
            job_id=job.id, state=job.state, reason=job.reason, name=job.name, user=job.user, uid=UID, account=job.account,
            partition=job.partition, nodes=job.nodes, batch_host=job.nodes[0] if job.nodes else None, restarts=job.restarts,
            start_at=job.start_at, excluded_nodes=job.excluded, is_batch=job.is_batch, requeueable=job.requeueable, held=job.held,
            stdout=LOG, workdir="/scratch", comment=job.comment, node_count=job.wants, required_nodes=job.required,
            dependency=job.dependency, array_job_id=job.array, raw_id=job.id.replace("_", "0") if job.array else "",
        )  # fmt: skip

    def notes(self) -> tuple[str, ...]:
        return ()

    async def read_view(self) -> SlurmView:
        self._answer_or_not()
        jobs = tuple(self._as_slurm_has_it(job) for job in self.jobs.values())
        return SlurmView(jobs=jobs, nodes=tuple(self.nodes.values()))

    async def read_job(self, job_id: str) -> SlurmJob | None:
        self._answer_or_not()
        if self.loses.get("read_job"):
            raise SlurmUnavailable(self.loses["read_job"].pop())
        job = self.jobs.get(job_id)
        return None if job is None else self._as_slurm_has_it(job)

    async def read_node(self, node: str) -> SlurmNode | None:
        self._answer_or_not()
        return self.nodes.get(node)

    async def read_script(self, job_id: str) -> bytes:
        if not self.jobs[job_id].is_batch:
            raise SlurmRefused("not a batch job", Refusal.NOT_BATCH)
        return self.scripts.get(job_id, b"#!/bin/sh\nsrun train\n")

    def _arrives(self, name: str) -> None:
        self.when_asked.pop(name, lambda: None)()
        self._answer_or_not()

    def _answer_or_not(self) -> None:
        if self.away:
            raise SlurmUnavailable("Unable to contact slurm controller")

    # ---------------------------------------------------------------------------------------- levers

    def _request(self, name: str, words: str, effect: Callable[[], None]) -> None:
        """Refused, lost, or done."""
        if name in self.refuses:
            raise self.refuses[name]
        fate = self.loses[name].pop(0) if self.loses.get(name) else "answered"
        if fate != "not done":
            effect()
            self.done.append(words)
        if fate != "answered":
            raise SlurmUnavailable("Socket timed out on send/recv operation")

    async def requeue_hold(self, job_id: str, *, only_unfinished: bool) -> None:
        self._arrives("requeue_hold")
        job = self.jobs[job_id]
        if not job.is_batch:
            raise SlurmRefused("Only batch jobs are accepted or processed", Refusal.NOT_BATCH)
        if not job.requeueable:
            raise SlurmRefused("Requested operation is presently disabled", Refusal.NOT_REQUEUEABLE)
        if only_unfinished and job.state in {*OVER, "COMPLETING"}:
            raise SlurmRefused("the job has ended", Refusal.FINISHED)
        self._request("requeue_hold", f"requeue_hold {job_id}", lambda: self.requeued(job, held=True))

    async def requeue(self, job_id: str, *, only_unfinished: bool) -> None:
        self._arrives("requeue")
        job = self.jobs[job_id]
        self._request("requeue", f"requeue {job_id}", lambda: self.requeued(job, held=False))

    async def set_excluded_nodes(self, job_id: str, nodes: Sequence[str]) -> None:
        self._arrives("set_excluded_nodes")

        def effect() -> None:
            self.jobs[job_id].excluded = tuple(nodes)

        self._request("exclude", f"exclude {job_id} {','.join(nodes)}", effect)

    async def release(self, job_id: str) -> None:
        self._arrives("release")

        def effect() -> None:
            self.jobs[job_id].held = False

        self._request("release", f"release {job_id}", effect)

    async def hold(self, job_id: str) -> None:
        self._arrives("hold")

        def effect() -> None:
            self.jobs[job_id].held = True

        self._request("hold", f"hold {job_id}", effect)

    async def cancel(self, job_id: str) -> None:
        self._arrives("cancel")
        job = self.jobs[job_id]
        self._request("cancel", f"cancel {job_id}", lambda: self.end(job, "CANCELLED"))

    async def send_signal(self, job_id: str, signal: str, to: SignalTo) -> None:
        self._arrives("send_signal")
        job = self.jobs[job_id]

        def effect() -> None:
            deed = job.on_usr1 if signal == "USR1" else job.on_term
            if "save" in deed:
                self.save(job)
            if "exit" in deed:
                self.end(job, "COMPLETED" if "save" in deed else "FAILED")

        self._request("signal", f"signal {job_id} {signal} {to}", effect)

    async def submit(self, submission: Submission) -> str:
        self._arrives("submit")
        options: Mapping[str, str] = dict(option[2:].split("=", 1) for option in submission.options if "=" in option)

        def effect() -> None:
            self.submitted += 1
            new = Job(
                str(9000 + self.submitted), wants=int(options["nodes"]), name=options["job-name"], comment=options["comment"],
                partition=options["partition"], dependency=options.get("dependency", ""), held="--hold" in submission.options,
                excluded=tuple(filter(None, options.get("exclude", "").split(","))),
            )  # fmt: skip
            old = self.jobs.get(new.dependency.removeprefix("afterany:"))
            new.saved = old.saved if old is not None else 0
            self.jobs[new.id] = new

        self._request("submit", "submit", effect)
        return str(9000 + self.submitted)

    async def drain_node(self, node: str, reason: str) -> None:
        self._arrives("drain_node")

        def effect() -> None:
            self.nodes[node] = replace(
                self.nodes[node], state="IDLE+DRAIN", reason=reason, reason_at=EPOCH + self.now()
            )

        self._request("drain", f"drain {node}", effect)

    async def undrain_node(self, node: str, reason: str, reason_at: float | None) -> None:
        self._arrives("undrain_node")
        now = self.nodes.get(node)
        require_unchanged(now, node, reason, reason_at)
        assert now is not None

        def effect() -> None:
            self.nodes[node] = replace(now, state="IDLE", reason="", reason_at=None)

        self._request("undrain", f"undrain {node}", effect)

    async def read_reservations(self) -> tuple[Reservation, ...]:
        self._answer_or_not()
        return tuple(self.reservations.values())

    async def reserve_nodes(self, name: str, nodes: Sequence[str]) -> None:
        raise SlurmRefused("no test of nodes is scripted")

    async def delete_reservation(self, name: str) -> None:
        raise SlurmRefused("no test of nodes is scripted")

    # ---------------------------------------------------------------------------------------- agents

    def report(self, node: str, sequence: int, agent_id: str, *, again: bool = False) -> Report:
        """What the agent of `node` sees: a rank of each job that runs there, its new steps, its new checkpoint.

        `again`: with what it has told already, for a controller that is new.
        """
        mine = [job for job in self.jobs.values() if job.state == "RUNNING" and node in job.nodes]
        events: list[Event] = []
        for job in self.jobs.values():
            if node != job.host:
                continue
            for step in range(job.told + 1 - 3 * again, job.step + 1):
                events.append(
                    Event(
                        kind=EventKind.PROGRESS, job_id=self._raw(job), age_s=0.0, source=LOG, step=step,
                        total_steps=job.total_steps, step_s=job.step_s,
                    )
                )  # fmt: skip
            job.told = max(job.told, job.step)
            age_s = None if job.saved_at is None else self.now() - job.saved_at
            if age_s is not None and age_s < (300.0 if again else 5.0):
                saved = Event(kind=EventKind.CHECKPOINT, job_id=self._raw(job), age_s=age_s, source=LOG, step=job.saved)
                events.append(saved)
        return Report(
            node=node, boot_id="b", agent_id=agent_id, sequence=sequence, events=tuple(events),
            processes=tuple(
                Process(
                    pid=1000 + int(job.restarts), start_ticks=1 + job.restarts, job_id=self._raw(job), role=Role.RANK, comm="python",
                    state="S", uid=UID, step_id="0", rank=job.nodes.index(node), world_size=job.wants,
                )
                for job in mine
            ),
            wishes=tuple(JobDirectives(job_id=self._raw(job), restarts=job.restarts, variables=(), uid=UID) for job in mine),
            gpu_holders=tuple(each.held() for each in self.leftovers if each.node == node and not each.gone),
            results=tuple(self.answers.pop(node, ())),
        )  # fmt: skip

    @staticmethod
    def _raw(job: Job) -> str:
        return job.id.replace("_", "0") if job.array else job.id

    def obey(self, node: str, command: Command) -> None:
        """What a node's agent does with a command."""
        ok, error, ended = True, None, None
        if isinstance(command, EndProcess):
            ended = next(each for each in self.leftovers if each.pid == command.pid).hear(command.how)
        elif isinstance(command, WriteKillSwitch):
            for place in self._places(node, command.path):
                self.files[place, command.path] = command.content
        elif isinstance(command, RemoveKillSwitch):
            for place in self._places(node, command.path):
                if self.files.get((place, command.path)) == command.content:
                    del self.files[place, command.path]
        else:
            ok, error = False, "a scripted agent has no evidence"
        result = CommandResult(command_id=command.id, ok=ok, error=error, process=ended)
        self.answers.setdefault(node, []).append(result)

    def _places(self, node: str, path: str) -> list[str]:
        """A file on a shared filesystem is there on every node."""
        return list(self.nodes) if path.startswith(self.shared) else [node]
