"""The simulated cluster: nodes with files, training jobs with faults, and the part of slurmctld that puts
jobs where they run.

Jobs, ranks, logs and GPUs are those of tests/accuracy; here they get what acting on them needs: a queue,
holds, exclusions, requeues, a trainer that listens to its kill switch. `truth` is the record of what really
happened: the checker reads it, the product never does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from msgspec.structs import replace

from slurm_watchdog.controller.policy.owner_directives import fill
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from tests.accuracy import looks
from tests.accuracy.logs import FORMATS
from tests.accuracy.looks import Look
from tests.accuracy.training import LOG, Job, Node, Plan, Span
from tests.accuracy.world import World
from tests.simulation.timeline import Timeline
from tests.simulation.truth import Deed, Fault, Truth

EPOCH = 1_700_000_000.0
MIN_JOB_AGE_S = 300.0
"""Slurm's default: a job that is over is listed so long (slurm.conf, MinJobAge)."""
OVER = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"})
UID = 1000


class SimJob(Job):
    """A training job under a Slurm that queues it."""

    def __init__(self, job_id: str, plan: Plan, rng: random.Random, at: float, cluster: Cluster):
        super().__init__(job_id, plan, [], rng, at)
        self.cluster = cluster
        self.slurm_id = job_id
        """As Slurm's commands call it; its processes know it by `job_id`."""
        self.array = ""
        self.task = 0
        self.at_once = 0
        """How many elements of its array run at once (%); 0: any number."""
        self.begun = False
        self.behind: SimJob | None = None
        """It starts when this one is over."""
        self.wants = plan.nodes
        self.held_by: str | None = None
        self.excluded: tuple[str, ...] = ()
        self.next_state = ""
        self.completing_until = 0.0
        self.eligible_at = at
        self.slurm_start_at: float | None = None
        self.over_at: float | None = None
        self.listens = rng.random() < 0.8
        self.comment = ""
        self.leaving: str | None = None
        """What its kill switch said, once it has been heard."""
        self.last_host = cluster.nodes[0]
        self.extra = self._look_for_switch

    @property
    def host(self) -> Node:
        """Also of a job that waits: who ran it last still reads its last lines."""
        if self.nodes:
            self.last_host = self.nodes[0]
        return self.last_host

    def _look_for_switch(self, span: Span, t: float) -> list[str]:
        if span.step is None or not self.listens or self.leaving is not None:
            return []
        content = self.cluster.switch_on(self.host.name, self)
        if content is None:
            return []
        self.leaving = content
        self.cluster.deed("job", "heard", self, content)
        self._script = self._leave(span.step, t)
        return []

    def _leave(self, step: int, t: float) -> Iterator[Span]:
        form, lasts = self.format, self.plan.save_s * (0.5 + self.rng.random())
        if self.saves:
            yield Span(
                "save",
                lasts,
                saved=step,
                before=form.saving(step, t),
                after=form.saved(step, t + lasts),
            )
        yield Span("end", 2.0)

    def hear(self, signal: str) -> None:
        """A signal that Slurm has taken on: one that turns and listens saves and ends, one that hangs can
        only be ended."""
        t = self.cluster.timeline.now
        if self.frozen_at is None and self.listens and self.leaving is None:
            self.leaving = f'{{"signal": "{signal}"}}'
            self.cluster.deed("job", f"heard {signal}", self)
            self._script = self._leave(len(self.told_at), t)
        elif signal == "TERM" and self.rng.random() < 0.8:
            restarts = self.restarts
            self.cluster.timeline.after(
                5.0, lambda: self.cluster.stop(self, "FAILED", "job") if self.restarts == restarts else None
            )

    def thaw(self, t: float) -> None:
        """What held it is gone: it continues where it was."""
        left_s = max(0.5, self._span_end - (self.frozen_at or t))
        self.frozen_at, self.others, self.overrides = None, None, {}
        self._span_end = t + left_s
        self.look_again(t)


class Cluster(World):
    """Everything outside the controller and the agents."""

    def __init__(self, seed: int, nodes: int, timeline: Timeline, kill_switch: str):
        super().__init__(seed, nodes)
        for node in self.nodes:
            node.gpus = 1
        self.timeline = timeline
        self.truth = Truth()
        self.kill_switch = kill_switch
        self.switches: dict[tuple[str, str], str] = {}
        """(node, path) -> content; node "" for a path on the shared filesystem."""
        self.down: set[str] = set()
        self.drained: dict[str, tuple[str, float]] = {}
        """Node -> reason, and when it was given."""
        self.clock_offset_s = 0.0
        self.sim_jobs: dict[str, SimJob] = {}
        self.forgotten: set[str] = set()

    # ------------------------------------------------------------------------------------ the record

    def deed(self, by: str, what: str, job: SimJob | None = None, detail: str = "") -> None:
        if job is None:
            self.truth.note(Deed(self.timeline.now, by, what, detail=detail))
        else:
            start = job.slurm_start_at
            self.truth.note(Deed(self.timeline.now, by, what, job.slurm_id, job.restarts, start, detail=detail))

    def wall(self) -> float:
        return EPOCH + self.timeline.now + self.clock_offset_s

    def live_fault(self, job: SimJob) -> Fault | None:
        for fault in reversed(self.truth.faults):
            if fault.job_id == job.slurm_id and fault.restarts == job.restarts and fault.ended is None:
                return fault
        return None

    # ------------------------------------------------------------------------------------ jobs

    def new_job(self, plan: Plan) -> SimJob:
        job = self._new_job(plan)
        self.deed("person", "submit", job)
        return job

    def _new_job(self, plan: Plan) -> SimJob:
        self.catch_up()
        number = str(1001 + len(self.sim_jobs))
        job = SimJob(number, plan, random.Random(self.rng.random()), self.timeline.now, self)
        self.sim_jobs[number] = job
        self.jobs.append(job)
        return job

    def new_array(self, plan: Plan, tasks: int, at_once: int) -> list[SimJob]:
        """`--array=1-TASKS%AT_ONCE`."""
        found = [self._new_job(plan) for _ in range(tasks)]
        for task, job in enumerate(found, start=1):
            job.array, job.task, job.at_once = found[0].job_id, task, at_once
            job.slurm_id = f"{job.array}_{task}"
            self.deed("person", "submit", job)
        return found

    def find(self, slurm_id: str) -> SimJob | None:
        """The job that Slurm's commands mean, unless it has forgotten it."""
        found = next((job for job in self.sim_jobs.values() if job.slurm_id == slurm_id), None)
        return None if found is None or found.job_id in self.forgotten else found

    def array_is_full(self, job: SimJob) -> bool:
        others = (each for each in self.jobs if isinstance(each, SimJob) and each.array == job.array)
        return bool(job.at_once) and sum(each.state in ("RUNNING", "COMPLETING") for each in others) >= job.at_once

    def catch_up(self) -> None:
        """Everything that the jobs do until now."""
        self.advance(self.timeline.now)
        for job in self.jobs:
            assert isinstance(job, SimJob)
            if job.state in ("COMPLETED", "FAILED") and job.over_at is None:
                self._complete(job, job.state)
        self._forget()

    def _forget(self) -> None:
        gone = [
            job for job in self.jobs
            if isinstance(job, SimJob) and job.over_at is not None and job.state in OVER
            and self.timeline.now - job.over_at > MIN_JOB_AGE_S
        ]  # fmt: skip
        for job in gone:
            self.jobs.remove(job)
            self.forgotten.add(job.job_id)

    def schedule(self) -> None:
        """One pass of the scheduler, and of what completes by itself."""
        self.catch_up()
        now = self.timeline.now
        for job in self.sim_jobs.values():
            if job.state == "COMPLETING" and now >= job.completing_until:
                job.state = job.next_state
                if job.state in OVER:
                    job.over_at = now
                job.nodes = [] if job.state == "PENDING" else job.nodes
        busy = {node.name for job in self.jobs if job.state in ("RUNNING", "COMPLETING") for node in job.nodes}
        for job in self.sim_jobs.values():
            if job.state != "PENDING" or job.held_by is not None or now < job.eligible_at or self.array_is_full(job):
                continue
            free = [
                n
                for n in self.nodes
                if n.name not in busy
                and n.name not in job.excluded
                and n.name not in self.down
                and n.name not in self.drained
            ]
            if len(free) >= job.wants:
                nodes = free[: job.wants]
                busy |= {node.name for node in nodes}
                job.slurm_start_at = float(int(self.wall()))
                job.leaving, job.over_at, job.begun = None, None, True
                job.start(now, nodes)
                self.deed("slurm", "start", job, ",".join(node.name for node in nodes))

    def _complete(self, job: SimJob, state: str) -> None:
        """The run ends; the job is completing for a while."""
        self.end_fault(job)
        if job.leaving is not None:
            self.deed("job", "left for its kill switch", job, job.leaving)
        job.state, job.next_state = "COMPLETING", state
        job.over_at = self.timeline.now
        job.completing_until = self.timeline.now + self.rng.uniform(0, 15)
        self.deed("job", f"ends {state}", job)

    def stop(self, job: SimJob, state: str, by: str) -> None:
        """The run is ended from outside."""
        self.catch_up()
        if job.state != "RUNNING":
            return
        job.end(self.timeline.now, "RUNNING")
        self._complete(job, state)
        self.deed(by, "end", job, state)

    def requeue(self, job: SimJob, by: str, *, held: bool) -> None:
        """`Restarts` rises at this moment; the run completes, then the job waits."""
        self.deed(by, "requeue", job, f"{job.state} {'held' if held else ''}")
        self.end_fault(job)
        if job.state == "RUNNING":
            job.end(self.timeline.now, "RUNNING")
        job.restarts += 1
        job.held_by = by if held else None
        job.state, job.next_state, job.over_at = "COMPLETING", "PENDING", None
        job.completing_until = self.timeline.now + self.rng.uniform(0, 15)
        job.eligible_at = job.completing_until + self.rng.uniform(0, 60)

    # ------------------------------------------------------------------------------------ faults

    def begin_fault(self, job: SimJob, kind: str) -> Fault | None:
        self.catch_up()
        if job.state != "RUNNING" or job.frozen_at is not None or job.leaving is not None:
            return None
        if kind == "dead_rank" and len(job.ranks) < 2:
            kind = "hang_of_everybody"
        now, rank = self.timeline.now, job.ranks[self.rng.randrange(len(job.ranks))]
        if kind == "hang":
            job.freeze(now, looks.SPIN_REDUCE, {rank.number: self.rng.choice((looks.LOCKED, looks.ELSEWHERE))})
        elif kind == "hang_of_everybody":
            job.freeze(now, looks.SPIN_REDUCE)
        elif kind == "stopped":
            job.freeze(now, looks.SPIN_REDUCE, {rank.number: looks.STOPPED})
        elif kind == "storage":
            blocked = Look(**{**vars(looks.WRITE_BLOCKED), "path": LOG, "mount": "/gpfs"})
            first = [each for each in job.ranks if each.node == job.nodes[0].name][:1]
            job.freeze(now, looks.SPIN, {first[0].number: blocked})
            self.mounts[0].stuck[first[0].node] = now
        elif kind == "dead_rank":
            job.freeze(now, looks.SPIN_REDUCE)
            job.kill(now, [rank.number])
        fault = Fault(kind, job.slurm_id, job.restarts, now, told=len(job.told_at))
        self.truth.faults.append(fault)
        self.deed("fault", f"begins {kind}", job, f"rank {rank.number} on {rank.node}")
        return fault

    def end_fault(self, job: SimJob) -> None:
        """The run is over, or its fault has gone by itself."""
        fault = self.live_fault(job)
        if fault is None:
            return
        fault.ended = self.timeline.now
        if fault.kind == "storage" and job.nodes:
            self.mounts[0].stuck.pop(job.nodes[0].name, None)
        self.deed("fault", f"ends {fault.kind}", job)

    def heal(self, job: SimJob) -> None:
        """The fault goes away by itself, and the job continues."""
        self.catch_up()
        fault = self.live_fault(job)
        if fault is not None and fault.kind != "dead_rank" and job.state == "RUNNING":
            self.end_fault(job)
            job.thaw(self.timeline.now)

    # ------------------------------------------------------------------------------------ kill switches

    def path_of(self, job: SimJob) -> str:
        return fill(self.kill_switch, self.listed(job))

    def place(self, node: str, path: str) -> tuple[str, str]:
        return ("", path) if path.startswith("/gpfs/") else (node, path)

    def switch_on(self, node: str, job: SimJob) -> str | None:
        return self.switches.get(self.place(node, self.path_of(job)))

    def write_switch(self, node: str, path: str, content: str) -> str | None:
        """As the agent's child does it: None, or why not."""
        self.catch_up()
        key = self.place(node, path)
        if self.switches.get(key, content) != content:
            return f"[Errno 17] a kill switch that is not ours is there: {path!r}"
        if key not in self.switches:
            self.switches[key] = content
            self.deed("us", "switch written", None, f"{key[0]} {path} {content.strip()}")
        return None

    def remove_switch(self, node: str, path: str, content: str) -> str | None:
        self.catch_up()
        key = self.place(node, path)
        if self.switches.get(key) == content:
            del self.switches[key]
            self.deed("us", "switch removed", None, f"{key[0]} {path}")
        return None

    # ------------------------------------------------------------------------------------ what Slurm says

    def listed(self, job: SimJob) -> SlurmJob:
        there = job.state in ("RUNNING", "COMPLETING")
        reason = "JobHeldUser" if job.state == "PENDING" and job.held_by else ""
        if job.state == "PENDING" and not reason and self.array_is_full(job):
            reason = "JobArrayTaskLimit"
        return SlurmJob(
            job_id=job.slurm_id,
            raw_id=job.job_id,
            array_job_id=job.array,
            array_tasks=str(job.task or ""),
            state=job.state,
            reason=reason,
            name=job.plan.name,
            user=job.plan.user,
            uid=UID,
            partition="gpu",
            nodes=tuple(n.name for n in job.nodes) if there else (),
            batch_host=job.host.name if there and job.nodes else None,
            restarts=job.restarts,
            start_at=job.slurm_start_at,
            requeueable=True,
            stdout=LOG,
            workdir="/gpfs/m4",
            held=job.held_by is not None,
            comment=job.comment,
        )

    def listing(self) -> SlurmView:
        self.catch_up()
        busy = {n.name for job in self.jobs if job.state in ("RUNNING", "COMPLETING") for n in job.nodes}
        known = [job for job in self.jobs if isinstance(job, SimJob)]
        return SlurmView(
            jobs=(*(self.listed(job) for job in known if job.begun or not job.array), *self._arrays(known)),
            nodes=tuple(
                SlurmNode(
                    name=n.name,
                    address=n.name,
                    state=("DOWN*" if n.name in self.down else "ALLOCATED" if n.name in busy else "IDLE")
                    + ("+DRAIN" if n.name in self.drained else ""),
                    reason=self.drained.get(n.name, ("", 0.0))[0],
                    reason_at=self.drained[n.name][1] if n.name in self.drained else None,
                )
                for n in self.nodes
            ),
        )

    def _arrays(self, known: list[SimJob]) -> Iterator[SlurmJob]:
        """One record for all elements of an array that have not begun yet."""
        for array in dict.fromkeys(job.array for job in known if job.array and not job.begun):
            waiting = [job for job in known if job.array == array and not job.begun]
            tasks = f"{waiting[0].task}-{waiting[-1].task}%{waiting[0].at_once}"
            yield replace(self.listed(waiting[0]), job_id=f"{array}_[{tasks}]", array_tasks=tasks, raw_id=array)


FORMS = tuple(name for name, form in FORMATS.items() if form.tells_saved and form.every == 1)
