"""Messages on their way: written to the journal's outbox at once, sent later and in order, whatever happens to whoever takes them.

Nobody waits for a message. What is in the outbox when the controller ends is sent after its next start. Each channel (Slack, a webhook,
Alertmanager) has its own rows, its own worker and its own failures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.text import one_line
from slurm_watchdog.model.actions import ActionRun, Decision, Verdict
from slurm_watchdog.model.incidents import GpuProcess, Incident, IncidentState
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.notify import SendFailed
from slurm_watchdog.notify.job_status_message import PULSE_ID, JobPulse, pulse_message
from slurm_watchdog.notify.notification import (
    BUSY,
    KEPT_JOBS,
    Caller,
    Delivery,
    Notice,
    Topic,
    job_notes,
    to_row,
)

if TYPE_CHECKING:
    from slurm_watchdog.journal.outbox import OutboxItem

LOG = logging.getLogger(__name__)

POLL_S = 5.0
FIRST_RETRY_S = 2.0
LONGEST_RETRY_S = 600.0
LONGEST_WAIT_S = 3600.0
"""Even if Slack asks for more."""
STALE_AFTER_S = 86400.0
"""A message this old is news to nobody; it is in the log and in the journal."""
FORGET_AFTER_S = 14 * 86400.0
"""Threads and sent messages are remembered so long: an incident that lasts longer gets a thread anew."""
TIDY_EVERY_S = 600.0
OLD_CHANNEL = "people"
"""Where the first releases put messages for Slack, ready to be sent."""
TAKEN_OVER = 10
"""Of so many that waited: two minutes at five a minute."""
TAKEN_AT_ONCE = 5000
HELD_S = 30.0
"""A decision that is about to be replaced is sent only if it still stands after this time."""
PASSING = frozenset({"blind", "evidence", *BUSY})
"""Guards whose word is mostly over in seconds: the controller sees again, the stacks are in and the job's own limit is passed, or
the action that is under way for the job ends this incident, too."""


OUTCOMES = ("sent", "failed", "dropped")
Count = Callable[[str, str, int], None]


class Outbox(Protocol):
    """The part of the journal that keeps messages. Every method raises JournalError."""

    def add(self, channel: str, incident_id: str, payload: dict[str, Any], at: float) -> None: ...
    def pending(self, limit: int, channel: str | None = None, after: int = 0) -> list[OutboxItem]: ...
    def waiting_channels(self) -> list[str]: ...
    def backlog(self, channel: str) -> tuple[int, float | None]: ...
    def done_all(self, channel: str, item_ids: Sequence[int]) -> None: ...
    def replace(
        self, channel: str, through: int, incident_id: str, payloads: Sequence[dict[str, Any]], at: float
    ) -> None: ...
    def failed(self, item_id: int, error: str, retry_at: float) -> None: ...
    def expire(self, channel: str, before: float) -> int: ...
    def drop(self, channel: str, incident_id: str) -> None: ...
    def forget(self, before: float) -> None: ...
    def keep_thread(self, channel: str, incident_id: str, thread: str, at: float) -> None: ...
    def thread_of(self, channel: str, incident_id: str) -> str | None: ...


class Channel(Protocol):
    """Whoever is told."""

    name: str
    """In the outbox; at most 32 characters."""
    topics: frozenset[Topic]
    """What it wants to hear of."""
    takes_messages: bool
    """Whether it takes messages that are made already (a pulse), beside notices."""

    async def turn(self, outbox: Outbox, now: float) -> float | None:
        """Send what is due of the oldest rows, within a deadline of its own, and mark them as done.

        Returns after how many seconds to call again; None if there is nothing to do. Raises SendFailed with what comes first still
        to be done, and JournalError. `now` is a date.
        """
        ...


class IncidentSources:
    """Where a notifier looks up what an incident does not say itself. Each answers at once, from memory."""

    def __init__(
        self,
        *,
        job_of: Callable[[str], SlurmJob | None] = lambda job_id: None,
        firing: Callable[[], Sequence[Incident]] = tuple,
        pulses: Callable[[], Sequence[JobPulse]] = tuple,
        acting: Callable[[], frozenset[str]] = frozenset,
        gpus_of: Callable[[str], int] = lambda job_id: 0,
        count: Count = lambda channel, outcome, number: None,
    ) -> None:
        self.acting = acting
        """Ids of the incidents on which an action is under way."""
        self.gpus_of = gpus_of
        """How many GPUs a job has; 0: not known."""
        self.job_of = job_of
        self.firing = firing
        """Incidents that fire and are announced."""
        self.pulses = pulses
        self.count = count
        """Is called with channel, outcome (`sent`, `failed`, `dropped`) and how many."""


class Notifier:
    """Puts notices up for every channel and, while `run` is running, has the channels send them."""

    def __init__(  # noqa: PLR0913 - each has a default, and one caller in the program
        self,
        outbox: Outbox,
        channels: Sequence[Channel],
        cluster: str,
        *,
        heir: str = "",
        pulse_s: float = 0.0,
        poll_s: float = POLL_S,
        first_retry_s: float = FIRST_RETRY_S,
        wall: Callable[[], float] = clock.wall,
        caller: Caller = Caller.SERVICE,
    ) -> None:
        self._outbox = outbox
        self._caller = caller
        self._heir = heir
        """The channel that is given what an older release has left; empty: there is none that takes it."""
        self._channels = tuple(channels)
        self._cluster = cluster
        self._pulse_s = pulse_s
        self._poll_s = poll_s
        self._wall = wall
        self._workers = [Worker(outbox, channel, poll_s, first_retry_s, wall) for channel in self._channels]
        self.sources = IncidentSources()
        self._held: dict[tuple[str, str | GpuProcess], tuple[float, Incident, Decision]] = {}
        """(incident, job or process) -> since when which decision is held back."""

    def attach(self, sources: IncidentSources) -> None:
        """Where to look things up from now on."""
        self.sources = sources
        for worker in self._workers:
            for outcome in OUTCOMES:
                sources.count(worker.channel.name, outcome, 0)
            worker.count = sources.count

    def deliveries(self) -> tuple[Delivery, ...]:
        """How the messages of each channel fare; from memory, at once."""
        return tuple(worker.delivery() for worker in self._workers)

    # -- for the controller: each returns at once; raises what the outbox raises (JournalError)

    def opened(self, incident: Incident) -> None:
        """Announce an incident, unless another explains it."""
        if incident.inhibited_by is None:
            self._add(Topic.OPENED, incident)

    def diagnosed(self, incident: Incident, said: Iterable[str]) -> None:
        """Announce what the evidence tells, the most important sentence first."""
        self._add(Topic.DIAGNOSED, incident, said=tuple(said))

    def decided(self, incident: Incident, decision: Decision) -> None:
        """Announce what was decided. That nothing is done for the moment, by a guard of PASSING, is held back: mostly another decision
        follows within seconds."""
        key = (incident.id, decision.process or ("" if decision.fence is None else decision.fence.job_id))
        self._held.pop(key, None)
        if decision.verdict is Verdict.SUPPRESSED and decision.by in PASSING:
            self._held[key] = (self._wall(), incident, decision)
        else:
            self._add(Topic.DECIDED, incident, decision=decision)

    def release(self) -> None:
        """Announces what was held back for HELD_S, and was followed by nothing."""
        now = self._wall()
        for key in [key for key, (at, _, _) in self._held.items() if not 0 <= now - at < HELD_S]:
            _, incident, decision = self._held.pop(key)
            self._add(Topic.DECIDED, incident, decision=decision)

    def ended(self, incident: Incident, run: ActionRun) -> None:
        """Announce how an action ended."""
        self._add(Topic.ENDED, incident, run=run)

    def resolved(self, incident: Incident) -> None:
        """Announce that an incident is over, if it was announced that it began."""
        self._forget_held(incident)
        if incident.fired_at is not None and incident.inhibited_by is None:
            self._add(Topic.RESOLVED, incident)

    def _forget_held(self, incident: Incident) -> None:
        for key in [key for key in self._held if key[0] == incident.id]:
            del self._held[key]

    def explained(self, incident: Incident, cause: Incident | None) -> None:
        """An announced incident has turned out to be a part of another one: whoever was told that it began is told that it is that."""
        self._forget_held(incident)
        why = (
            f"explained by {cause.kind}: {cause.summary}"
            if cause is not None
            else "another incident explains it"
        )
        over = replace(
            incident,
            state=IncidentState.RESOLVED,
            resolved_at=self._wall(),
            resolution=f"{why} (incident {incident.inhibited_by})",
        )
        self._add(Topic.RESOLVED, over)

    def _add(
        self,
        topic: Topic,
        incident: Incident,
        *,
        decision: Decision | None = None,
        run: ActionRun | None = None,
        said: tuple[str, ...] = (),
    ) -> None:
        if not any(topic in channel.topics for channel in self._channels):
            return
        at = self._wall()
        jobs = job_notes(map(self.sources.job_of, incident.job_ids[:KEPT_JOBS]), self.sources.gpus_of)
        row = to_row(
            Notice(
                topic=topic,
                at=at,
                incident=incident,
                decision=decision,
                run=run,
                said=said,
                jobs=jobs,
                caller=self._caller,
            )
        )
        for worker in self._workers:
            if topic in worker.channel.topics:
                self._outbox.add(worker.channel.name, incident.id, row, at)
                worker.wake()

    # -- sending

    async def run(self) -> None:
        """Send until cancelled. Nothing that goes wrong here ends it."""
        try:
            self.take_over()
        except Exception:  # the boundary: what is left lying is no reason to keep news back
            LOG.exception("messages of other channels can't be looked at")
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers:
                tasks.create_task(worker.run())
            tasks.create_task(self._tidy_for_ever())
            tasks.create_task(self._release_for_ever())
            if self._pulse_s > 0:
                tasks.create_task(self._pulse_for_ever())

    async def deliver(self, tries: int, pause_s: float) -> str | None:
        """Sends what waits, at once, in at most `tries` turns of a channel; the first failure, None if nothing is left."""
        for worker in self._workers:
            name = worker.channel.name
            for _ in range(tries):
                if not self._outbox.pending(1, name) or worker.delivery().failing_s is not None:
                    break
                await asyncio.sleep(min(pause_s, await worker.step() or 0.0))
            if worker.delivery().failing_s is not None:
                return worker.delivery().error
            if self._outbox.pending(1, name):
                return f"not delivered within {tries} turns"
        return None

    def take_over(self) -> None:
        """What waits for a channel that is not there any more: after an upgrade, or without a notifier that was configured before.

        The newest of an older release's are delivered. All others end here, in writing.
        """
        for name in self._outbox.waiting_channels():
            if name in (worker.channel.name for worker in self._workers):
                continue
            while items := self._outbox.pending(TAKEN_AT_ONCE, name):
                self._end(name, items)

    def _end(self, name: str, items: Sequence[OutboxItem]) -> None:
        now = self._wall()
        ours = [item for item in items if name == OLD_CHANNEL and {"text", "blocks"} <= item.payload.keys()]
        fresh = [item for item in ours if self._heir and now - item.added_at < STALE_AFTER_S][-TAKEN_OVER:]
        for item in fresh:
            self._outbox.add(self._heir, item.incident_id, {"message": item.payload}, item.added_at)
        for item in items:
            if item not in fresh:
                said = one_line(str(item.payload.get("text", "")), 300)
                LOG.warning(
                    "message %d to %s about %s ends here, nobody takes it: %s",
                    item.id, name, item.incident_id, said,
                )  # fmt: skip
        self._outbox.done_all(name, [item.id for item in items])

    async def _tidy_for_ever(self) -> None:
        while True:
            try:
                self._outbox.forget(self._wall() - FORGET_AFTER_S)
            except Exception:  # the boundary: a journal that fails is tidied later
                LOG.exception("the outbox can't be tidied")
            await asyncio.sleep(TIDY_EVERY_S)

    async def _release_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                self.release()
            except Exception:  # the boundary: a journal that fails gets it later
                LOG.exception("what was held back cannot be written")

    async def _pulse_for_ever(self) -> None:
        """On the grid of the wall clock: a controller that starts again repeats nothing."""
        told = self._wall() // self._pulse_s
        while True:
            await asyncio.sleep(min(self._poll_s, self._pulse_s))
            try:
                told = self.pulse(told)
            except Exception:  # the boundary: a pulse that fails is one that is missing
                LOG.exception("a pulse can't be written")

    def pulse(self, told: float) -> float:
        """Put a pulse up if one is due; `told` is the number of the last one. Returns the newest number."""
        at = self._wall()
        number = at // self._pulse_s
        pulses = self.sources.pulses() if number != told else ()
        for worker in self._workers if pulses else ():
            if worker.channel.takes_messages:
                # Of a Slack that was away nobody wants to hear five hours one after the other.
                self._outbox.drop(worker.channel.name, PULSE_ID)
                row = {"message": pulse_message(pulses, self._cluster)}
                self._outbox.add(worker.channel.name, PULSE_ID, row, at)
                worker.wake()
        return number


class Worker:
    """Has one channel work its rows off."""

    def __init__(
        self, outbox: Outbox, channel: Channel, poll_s: float, first_retry_s: float, wall: Callable[[], float]
    ) -> None:
        self.channel = channel
        self._outbox = outbox
        self._poll_s = poll_s
        self._first_retry_s = first_retry_s
        self._wall = wall
        self._added = asyncio.Event()
        self.count: Count = lambda channel, outcome, number: None
        self._failing_since: float | None = None
        self._error = ""
        self._told_again = False
        """What failed last was no row: the channel repeats what fires by itself, and a turn without a failure has done so."""
        self._backlog: tuple[int, float | None] = (0, None)

    def delivery(self) -> Delivery:
        """How this channel's messages fare."""
        now = self._wall()
        waiting, oldest_at = self._backlog
        return Delivery(
            channel=self.channel.name,
            failing_s=None if self._failing_since is None else max(0.0, now - self._failing_since),
            error=one_line(self._error, 200),
            waiting=waiting,
            oldest_s=0.0 if oldest_at is None else max(0.0, now - oldest_at),
        )

    def wake(self) -> None:
        """There is something new."""
        self._added.set()

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            self._added.clear()
            try:
                wait_s = await self.step()
                self._backlog = self._outbox.backlog(self.channel.name)
            except Exception:  # the boundary: an outbox that fails is tried again
                LOG.exception("the outbox of %s can't be worked off", self.channel.name)
                wait_s = None
            if wait_s is not None:
                await asyncio.sleep(min(wait_s, self._poll_s))
                continue
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._added.wait()
            except TimeoutError:
                pass

    async def step(self) -> float | None:
        """One turn of the channel; returns after how many seconds the next is due, None if it waits for news.

        A message that fails holds up those behind it, for their order tells the story.
        """
        name, now = self.channel.name, self._wall()
        first = self._outbox.pending(1, name)
        if first and now - first[0].added_at > STALE_AFTER_S:
            dropped = self._outbox.expire(name, now - STALE_AFTER_S)
            self.count(name, "dropped", dropped)
            LOG.error(
                "%d messages to %s are dropped: a day old, last failure: %s", dropped, name, first[0].error
            )
            return 0.0
        # A clock that was set back must not keep a message for longer than any retry takes.
        if first and now < first[0].retry_at <= now + LONGEST_WAIT_S:
            return first[0].retry_at - now
        try:
            wait_s = await self.channel.turn(self._outbox, now)
        except SendFailed as error:
            self._failing_since = now if self._failing_since is None else self._failing_since
            self._error, self._told_again = error.reason, not first
            return self._failed(error)
        left = self._outbox.pending(1, name) if first else []
        if first and (not left or left[0].id != first[0].id):
            self.count(name, "sent", 1)
            self._failing_since = None
        elif not first and self._told_again:
            self._failing_since = None
        return wait_s

    def _failed(self, error: SendFailed) -> float:
        """Writes a failure down at the row that comes first; returns the pause until the next try."""
        name = self.channel.name
        pending = self._outbox.pending(1, name)
        self.count(name, "dropped" if pending and error.permanent else "failed", 1)
        if not pending:
            LOG.warning("%s: %s", name, error.reason)
            return min(LONGEST_WAIT_S, error.retry_after_s or 10 * self._first_retry_s)
        item = pending[0]
        if error.permanent:
            LOG.error(
                "message %d to %s about %s is dropped: %s", item.id, name, item.incident_id, error.reason
            )
            self._outbox.done_all(name, (item.id,))
            return 0.0
        backoff = min(LONGEST_RETRY_S, self._first_retry_s * 2 ** min(item.attempts, 20))
        wait_s = backoff if error.retry_after_s is None else min(error.retry_after_s, LONGEST_WAIT_S)
        LOG.warning(
            "message %d to %s about %s waits %.0f s: %s",
            item.id,
            name,
            item.incident_id,
            wait_s,
            error.reason,
        )
        self._outbox.failed(item.id, error.reason, self._wall() + wait_s)
        return wait_s
