"""Fetches what detectors want to know: stacks of all ranks, probes of a mount. At most one of a kind at a time."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager

from msgspec.structs import replace

from slurm_watchdog.base.clock import monotonic
from slurm_watchdog.base.structs import picked
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.run import has_ranks, ids_on
from slurm_watchdog.diagnose.stacks.vote import MIN_APART_S
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.incidents import Finding, MountProbeRequest, StackRequest
from slurm_watchdog.model.protocol import DumpStacks, ProbeMount
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.wire.rate_limits import TokenBuckets

EARLY_DUMPS_AN_HOUR = 24
"""Of one run. A dump stops no rank (py-spy --nonblocking) and costs 17 to 28 ms of CPU a process (17 ms for 41 threads
of 20 to 40 frames), of a rank and at most four of its workers: 0.15 s. 24 of these are 3.6 s in an hour, 0.1 % of the
one core that a rank has at least; after a rest there may be twice as many in one hour. A training that breathes so
unevenly that this is used up is judged by its limit alone until there is one more."""
REMEMBERED = 1024  # Runs, and questions: beyond so many those that may be asked again anyway are forgotten.


def early_budget() -> TokenBuckets:
    """Of the dumps of each run that are taken because its step is late by its own measure."""
    return TokenBuckets(EARLY_DUMPS_AN_HOUR, EARLY_DUMPS_AN_HOUR / 3600.0)


class FairSlots:
    """`places` at once, at most `most_of_one` of them one user's, first come, first served. One event loop owns it."""

    def __init__(self, places: int, most_of_one: int):
        self._places = asyncio.Semaphore(places)
        self._of_user = defaultdict[int, asyncio.Semaphore](lambda: asyncio.Semaphore(most_of_one))

    @asynccontextmanager
    async def of(self, uid: int) -> AsyncIterator[None]:
        """Waits for a place of this user's, and gives it back."""
        async with self._of_user[uid], self._places:
            yield


log = logging.getLogger(__name__)

DUMP_DEADLINE_S = 25.0  # For one node: two report intervals and 8 ranks x 1 s of py-spy.
PROBE_EVERY_S = 15.0  # A filesystem in trouble is asked this often whether it answers again.
LATER_DUMPS_EVERY_S = 300.0  # Once several dumps are in, the stacks are refreshed no more often than this.
FIRST_DUMPS = 3
PROBES, PROBES_OF_USER = 512, 64  # Nodes asked about filesystems at once, in all and as one user, who may mount many.


class EvidenceRequests:
    """Keeps the tasks that are out. One event loop owns it."""

    def __init__(self, state: ClusterState, commands: CommandQueue, *, probe_deadline_s: float):
        self._state = state
        self.commands = commands
        self._probe_deadline_s = probe_deadline_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._last: dict[str, float] = {}
        self._early = early_budget()

    def serve(self, findings: Iterable[Finding], now: float) -> None:
        """Starts what is wanted and not under way; never waits."""
        for finding in findings:
            for wanted in finding.wanted:
                if isinstance(wanted, StackRequest):
                    self.dump(wanted, now)
                elif isinstance(wanted, MountProbeRequest):
                    self.probe(wanted, now)

    def dump(self, wanted: StackRequest, now: float) -> None:
        """Asks all nodes of the job for its ranks' stacks, unless they were asked a moment ago."""
        view = self._state.job_view(wanted.job_id, now)
        if view is None:
            return
        run = f"{wanted.job_id}.{view.job.restarts}"
        key = f"usual:{run}" if wanted.usual else f"stacks:{run}"
        taken = len(view.snapshots)
        last_at = self._last.get(key, float("-inf"))
        if taken and view.snapshots[-1].age_s < MIN_APART_S:
            return  # the last one was long on its way: a dump so soon after it would show nothing
        every_s = wanted.apart_s if taken < FIRST_DUMPS else wanted.later_s or LATER_DUMPS_EVERY_S
        budgeted = wanted.early or wanted.usual
        if budgeted:
            every_s = wanted.apart_s
        if key in self._tasks or now - last_at < every_s or (budgeted and not self._early.acquire(run, now)):
            return
        self._remember(key, now)
        self._spawn(key, self._dump_job(view.job, wanted, now))

    async def _dump_job(self, job: SlurmJob, wanted: StackRequest, asked_at: float) -> None:
        deadline_s = max(DUMP_DEADLINE_S, 3 * self._state.report_interval_s)
        restarts, places = job.restarts, self._places_of(job)
        asked = []
        for node, job_id in places:
            command = DumpStacks(id=uuid.uuid4().hex, job_id=job_id, restarts=restarts, expires_s=deadline_s)
            asked.append(self.commands.ask(node, command, deadline_s, job.uid))
        results = await asyncio.gather(*asked)
        stacks: list[ProcessStack] = []
        silent = []
        for (node, _), result in zip(places, results, strict=True):
            # A node speaks for itself alone, whatever name its stacks have in them.
            stacks.extend(replace(stack, node=node) for stack in result.stacks)
            if not result.ok and not result.stacks:
                silent.append(node)
        if wanted.usual:
            self._state.runs.add_usual(job.job_id, restarts, tuple(stacks), monotonic())
            return
        early_asked_at = asked_at if wanted.early else None
        self._state.runs.add_snapshot(job.job_id, restarts, tuple(stacks), tuple(silent), monotonic(), early_asked_at)

    def _places_of(self, job: SlurmJob) -> list[tuple[str, str]]:
        """Its nodes, each with the job's id there, without those on which no rank is left: what is there yet (workers
        that lost their rank) ends, and such a node is heard with its next report only. All of them where no rank is
        known."""
        run = self._state.runs.get(job.job_id)
        if run is None:
            return [(node, job.process_id) for node in job.nodes]
        there = [node for node in job.nodes if has_ranks(run, node)] or job.nodes
        return [(node, each) for node in there for each in ids_on(run, node)]

    def probe(self, wanted: MountProbeRequest, now: float) -> None:
        """Asks each of the nodes whether it reaches the mount, unless it was asked a moment ago."""
        for node in wanted.nodes:
            key = f"probe:{node}:{wanted.uid}:{wanted.mount}"
            last_at = self._last.get(key, float("-inf"))
            if key in self._tasks or now - last_at < min(PROBE_EVERY_S, 3 * self._state.report_interval_s):
                continue
            probes = [key for key in self._tasks if key.startswith("probe:")]
            own = sum(key.split(":", 3)[2] == str(wanted.uid) for key in probes)
            if len(probes) >= PROBES or own >= PROBES_OF_USER:
                self._state.left_out.note("probes", node, uid=wanted.uid)
                continue
            self._remember(key, now)
            self._spawn(key, self._probe_node(node, wanted))

    async def _probe_node(self, node: str, wanted: MountProbeRequest) -> None:
        patience_s = self._probe_deadline_s + 3 * self._state.report_interval_s
        command = picked(ProbeMount, wanted, "mount", "directory", "uid", id=uuid.uuid4().hex, expires_s=patience_s)
        result = await self.commands.ask(node, command, patience_s, wanted.uid)
        if result.probe is not None:
            # Which user asked is our word, not the node's.
            self._state.apply_probe(node, replace(result.probe, uid=wanted.uid), monotonic())

    async def answered(self, mounts: Iterable[str], limit_s: float) -> None:
        """Waits until no one is being asked about one of these mounts, but no longer than `limit_s`."""
        ends = tuple(f":{mount}" for mount in mounts)
        out = [task for key, task in self._tasks.items() if key.startswith("probe:") and key[6:].endswith(ends)]
        if ends and out:
            await asyncio.wait(out, timeout=limit_s)

    def _remember(self, key: str, now: float) -> None:
        """Remembers that it was asked. What may be asked again by now needs no memory."""
        self._last[key] = now
        if len(self._last) > REMEMBERED:
            self._last = {
                each: at for each, at in self._last.items() if each in self._tasks or now - at < LATER_DUMPS_EVERY_S
            }

    def _spawn(self, key: str, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks[key] = task
        task.add_done_callback(lambda ended: self._ended(key, ended))

    def _ended(self, key: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", key, exc_info=error)

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
