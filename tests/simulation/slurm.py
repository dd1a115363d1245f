"""Slurm as the controller meets it: each request is answered, lost, done although lost, done late, or refused.

What a request does happens on the timeline, whether or not its sender still lives: an scontrol outlives
a controller that is killed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.model.slurm import Reservation, SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.slurm.client import Refusal, SignalTo, SlurmRefused, SlurmUnavailable, Submission
from tests.accuracy.training import Plan
from tests.simulation.cluster import OVER, Cluster, SimJob

DEADLINE_S = 20.0


@dataclass
class Weather:
    """How likely each fate of a request is; what is left of 1 is an answer in time."""

    lost: float = 0.0
    done_and_lost: float = 0.0
    done_late: float = 0.0
    refused: float = 0.0
    away: bool = False
    """slurmctld does not answer anybody."""
    script: list[str] | None = None
    """Fates of the next requests that change something, in order."""

    def fate(self, rng: random.Random, *, changes: bool) -> str:
        if self.away:
            return "lost"
        if changes and self.script:
            return self.script.pop(0)
        chance = rng.random()
        for name, share in (
            ("lost", self.lost),
            ("done and lost", self.done_and_lost),
            ("done late", self.done_late),
            ("refused", self.refused if changes else 0.0),
        ):
            if chance < share:
                return name
            chance -= share
        return "ok"


class SimSlurm:
    """The client of one life of the controller. Implements slurm_watchdog.slurm.client.SlurmClient."""

    def __init__(
        self, cluster: Cluster, rng: random.Random, weather: Weather, may_run: Callable[[str], bool] = lambda _: True
    ):
        """`may_run(request)`: asked before each that changes something, as slurm_watchdog.slurm.commands does."""
        self._cluster, self._rng, self._weather, self._may_run = cluster, rng, weather, may_run
        self.answered_at = float("-inf")

    async def _request(self, name: str, effect: Callable[[], object], *, changes: bool) -> object:
        """Raises what the client of a real Slurm raises."""
        if changes and not self._may_run(name):
            raise SlurmUnavailable("not asked: another controller may be the active one by now")
        timeline, rng = self._cluster.timeline, self._rng
        fate = self._weather.fate(rng, changes=changes)
        latency_s = min(rng.expovariate(1 / 0.3), 15.0) + 0.01
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        if changes:
            self._cluster.deed("us", f"request {name}", detail=fate)

        def happen() -> None:
            try:
                result, error = effect(), None
            except SlurmRefused as refusal:
                result, error = None, refusal
            if fate == "ok":
                timeline.after(latency_s / 2, lambda: settle(result, error))

        def settle(result: object, error: Exception | None) -> None:
            if not future.done() and not future.get_loop().is_closed():
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)

        if fate == "refused":
            timeline.after(
                latency_s,
                lambda: settle(None, SlurmRefused("Access/permission denied", Refusal.NO_PERMISSION)),
            )
        elif fate in ("ok", "done and lost"):
            timeline.after(latency_s / 2, happen)
        elif fate == "done late" and changes:
            timeline.after(DEADLINE_S + rng.uniform(0, 30), happen)
        try:
            async with timeout(DEADLINE_S):
                return await future
        except TimeoutError:
            raise SlurmUnavailable(f"no answer within {DEADLINE_S:g} s ({name})") from None

    def _job(self, job_id: str) -> SimJob:
        job = self._cluster.find(job_id)
        if job is None:
            raise SlurmRefused("Invalid job id specified", Refusal.NO_SUCH_JOB)
        self._cluster.catch_up()
        return job

    # ------------------------------------------------------------------------------------ the protocol

    def notes(self) -> tuple[str, ...]:
        return ()

    async def read_view(self) -> SlurmView:
        view = await self._request("read_view", self._cluster.listing, changes=False)
        assert isinstance(view, SlurmView)
        self.answered_at = self._cluster.timeline.now
        return view

    async def read_job(self, job_id: str) -> SlurmJob | None:
        def look() -> SlurmJob | None:
            self._cluster.catch_up()
            job = self._cluster.find(job_id)
            if job is None:
                return None
            return replace(self._cluster.listed(job), excluded_nodes=job.excluded)

        found = await self._request("read_job", look, changes=False)
        assert found is None or isinstance(found, SlurmJob)
        return found

    async def requeue_hold(self, job_id: str, *, only_unfinished: bool) -> None:
        def requeue() -> None:
            job = self._job(job_id)
            if job.state == "PENDING" or (job.state == "COMPLETING" and job.next_state == "PENDING"):
                job.held_by = job.held_by or "us"  # Slurm holds it, and requeues nothing
                return
            if only_unfinished and (job.state in OVER or job.state == "COMPLETING"):
                raise SlurmRefused(f"the job is {job.state}: it was left alone", Refusal.FINISHED)
            self._cluster.requeue(job, "us", held=True)

        await self._request(f"requeue_hold {job_id}", requeue, changes=True)

    async def set_excluded_nodes(self, job_id: str, nodes: Sequence[str]) -> None:
        def exclude() -> None:
            job = self._job(job_id)
            if job.state not in ("PENDING", "COMPLETING"):
                raise SlurmRefused("Job is no longer pending execution", Refusal.NOT_PENDING)
            self._cluster.deed("us", "exclude", job, ",".join(nodes))
            job.excluded = tuple(nodes)

        await self._request(f"exclude {job_id}", exclude, changes=True)

    async def release(self, job_id: str) -> None:
        def release() -> None:
            job = self._job(job_id)
            if job.held_by is not None:
                out = any(path == self._cluster.path_of(job) for _, path in self._cluster.switches)
                self._cluster.deed("us", "release", job, f"{job.held_by}{', switch is out' if out else ''}")
                job.held_by = None

        await self._request(f"release {job_id}", release, changes=True)

    async def hold(self, job_id: str) -> None:
        def hold() -> None:
            job = self._job(job_id)
            if job.state != "PENDING":
                raise SlurmRefused("Job is no longer pending execution", Refusal.NOT_PENDING)
            self._cluster.deed("us", "hold", job)
            job.held_by = job.held_by or "us"

        await self._request(f"hold {job_id}", hold, changes=True)

    async def cancel(self, job_id: str) -> None:
        def cancel() -> None:
            job = self._cluster.find(job_id)
            if job is None or job.state in OVER:
                return
            self._cluster.deed("us", "cancel", job, job.state)
            if job.state == "PENDING":
                job.state, job.over_at = "CANCELLED", self._cluster.timeline.now
            else:
                self._cluster.stop(job, "CANCELLED", "us")

        await self._request(f"cancel {job_id}", cancel, changes=True)

    async def send_signal(self, job_id: str, signal: str, to: SignalTo) -> None:
        def send() -> None:
            job = self._job(job_id)
            if job.state != "RUNNING":
                raise SlurmRefused("Job is not running", Refusal.NOT_RUNNING)
            self._cluster.deed("us", f"signal {signal}", job)
            job.hear(signal)

        await self._request(f"signal {signal} {job_id}", send, changes=True)

    # ------------------------------------------------------------------------------------ a job in the place of another

    async def read_script(self, job_id: str) -> bytes:
        def look() -> bytes:
            self._job(job_id)
            return f"#!/bin/sh\n# {job_id}\n".encode()

        found = await self._request(f"read_script {job_id}", look, changes=False)
        assert isinstance(found, bytes)
        return found

    async def submit(self, submission: Submission) -> str:
        """A job like the one whose script it is, held if it is wanted held."""
        job_id = submission.script.decode().split()[-1]
        options = dict(option.removeprefix("--").partition("=")[::2] for option in submission.options)

        def submit() -> str:
            old = self._cluster.find(job_id)
            assert old is not None
            new = self._cluster.new_job(replace_plan(old.plan))
            new.comment, new.held_by = options.get("comment", ""), "us" if "hold" in options else None
            new.behind = old if "dependency" in options else None
            new.excluded = tuple(name for name in options.get("exclude", "").split(",") if name)
            self._cluster.deed("us", "submit", new, f"{old.slurm_id} {new.comment}")
            return new.slurm_id

        found = await self._request(f"submit like {job_id}", submit, changes=True)
        assert isinstance(found, str)
        return found

    # ------------------------------------------------------------------------------------ nodes

    async def read_node(self, node: str) -> SlurmNode | None:
        def look() -> SlurmNode | None:
            return next((each for each in self._cluster.listing().nodes if each.name == node), None)

        found = await self._request(f"read_node {node}", look, changes=False)
        assert found is None or isinstance(found, SlurmNode)
        return found

    async def read_reservations(self) -> tuple[Reservation, ...]:
        found = await self._request("read_reservations", tuple, changes=False)
        assert isinstance(found, tuple)
        return found

    async def drain_node(self, node: str, reason: str) -> None:
        def drain() -> None:
            self._cluster.deed("us", "drain", None, f"{node} {reason}")
            self._cluster.drained[node] = (reason, self._cluster.wall())

        await self._request(f"drain {node}", drain, changes=True)

    async def undrain_node(self, node: str, reason: str, reason_at: float | None) -> None:
        def undrain() -> None:
            if self._cluster.drained.get(node) != (reason, reason_at):
                raise SlurmRefused("somebody has touched it", Refusal.CHANGED)
            self._cluster.deed("us", "undrain", None, node)
            del self._cluster.drained[node]

        await self._request(f"undrain {node}", undrain, changes=True)

    async def set_node_down(self, node: str, reason: str) -> None:
        raise AssertionError("no site of the simulation permits it")


def replace_plan(plan: Plan) -> Plan:
    """The same program: it resumes from the checkpoint that is there."""
    return dataclasses.replace(plan)
