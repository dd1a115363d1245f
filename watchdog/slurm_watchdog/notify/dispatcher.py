"""The notifier: writes messages to the journal's outbox at once and sends them later, in order, whether or
not a receiver answers.

No caller waits for a message. What is in the outbox when the controller ends is sent after its next start. Each
channel (Slack, a webhook, Alertmanager) has its own rows, its own worker and its own failures.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.model.actions import ActionRun, Decision, Verdict
from slurm_watchdog.model.documents import Delivery
from slurm_watchdog.model.incidents import GpuProcess, Incident, IncidentState
from slurm_watchdog.model.silence import Silence
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.notify.delivery import (
    FORGET_AFTER_S,
    POLL_S,
    TIDY_EVERY_S,
    Channel,
    ChannelWorker,
    Count,
)
from slurm_watchdog.notify.job_status_message import PULSE_CHANNEL, PULSE_ID, JobPulse, pulse_message
from slurm_watchdog.notify.notification import (
    KEPT_JOBS,
    TRANSIENT_GUARDS,
    Caller,
    Notice,
    Topic,
    job_notes,
    to_row,
)

if TYPE_CHECKING:
    from slurm_watchdog.journal.outbox import SqlOutbox

LOG = logging.getLogger(__name__)

ROWS_AT_ONCE = 5000
HOLD_BACK_S = 60.0
"""A decision by a transient guard is announced only if no other decision replaces it within this time."""
OUTCOMES = ("sent", "failed", "dropped")


@dataclass(frozen=True, kw_only=True)
class IncidentSources:
    """Lookups for what an incident does not contain. Each answers at once, from memory."""

    job_of: Callable[[str], SlurmJob | None] = lambda job_id: None
    firing: Callable[[], Sequence[Incident]] = tuple
    """Incidents that fire and are announced."""
    pulses: Callable[[], Sequence[JobPulse]] = tuple
    acting: Callable[[], frozenset[str]] = frozenset
    """Ids of the incidents on which an action is under way."""
    silence_of: Callable[[Incident], Silence | None] = lambda incident: None
    """The silence that holds for an incident."""
    gpus_of: Callable[[str], int] = lambda job_id: 0
    """How many GPUs a job has; 0: not known."""
    count: Count = lambda channel, outcome, number: None
    """Is called with channel, outcome (`sent`, `failed`, `dropped`) and how many."""


class Notifier:
    """Writes notices to the outbox for every channel and, while `run` is running, has the channels send them."""

    def __init__(
        self,
        outbox: SqlOutbox,
        channels: Sequence[Channel],
        cluster: str,
        *,
        pulse_s: float = 0.0,
        poll_s: float = POLL_S,
        wall: Callable[[], float] = clock.wall,
        caller: Caller = Caller.SERVICE,
    ) -> None:
        self._outbox = outbox
        self._caller = caller
        self._channels = tuple(channels)
        self._cluster = cluster
        self._pulse_s = pulse_s
        self._newest_pulse: float | None = None
        self._poll_s = poll_s
        self._wall = wall
        self._workers = [ChannelWorker(outbox, channel, poll_s, wall) for channel in self._channels]
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
        """Announce the diagnosis, the most important sentence first."""
        self._add(Topic.DIAGNOSED, incident, said=tuple(said))

    def decided(self, incident: Incident, decision: Decision) -> None:
        """Announce what was decided. That nothing is done for the moment, by a guard of PASSING, is held
        back: mostly another decision follows within seconds."""
        key = (incident.id, decision.process or ("" if decision.fence is None else decision.fence.job_id))
        self._held.pop(key, None)
        if decision.verdict is Verdict.SUPPRESSED and decision.by in TRANSIENT_GUARDS:
            self._held[key] = (self._wall(), incident, decision)
        else:
            self._add(Topic.DECIDED, incident, decision=decision)

    def release(self) -> None:
        """Announces what was held back for HOLD_BACK_S, and was followed by nothing, with the incident as it is now."""
        now, firing = self._wall(), {each.id: each for each in self.sources.firing()}
        for key in [key for key, (at, _, _) in self._held.items() if not 0 <= now - at < HOLD_BACK_S]:
            _, incident, decision = self._held.pop(key)
            self._add(Topic.DECIDED, firing.get(incident.id, incident), decision=decision)

    def ended(self, incident: Incident, run: ActionRun) -> None:
        """Announce how an action ended."""
        self._add(Topic.ENDED, incident, run=run)

    def resolved(self, incident: Incident) -> None:
        """Announce that an incident is over, if it was announced that it began."""
        self._forget_held(incident)
        if incident.fired_at is not None and incident.inhibited_by is None:
            self._add(Topic.RESOLVED, incident)

    def noted(self, incident: Incident, sentence: str) -> None:
        """Announce what a person has done about an announced incident; a silence does not quiet this."""
        if incident.fired_at is not None and incident.inhibited_by is None:
            self._add(Topic.NOTED, incident, said=(sentence,))

    def _forget_held(self, incident: Incident) -> None:
        for key in [key for key in self._held if key[0] == incident.id]:
            del self._held[key]

    def explained(self, incident: Incident, cause: Incident | None) -> None:
        """Announce that another incident explains an announced one: it is sent as resolved, with the cause."""
        self._forget_held(incident)
        why = f"explained by {cause.kind}: {cause.summary}" if cause is not None else "another incident explains it"
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
        if not any(topic in channel.topics for channel in self._channels) or self._is_quiet(topic, incident):
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

    def _is_quiet(self, topic: Topic, incident: Incident) -> bool:
        """Whether a silence holds. The end of what was announced before it is announced, too."""
        silence = None if topic is Topic.NOTED else self.sources.silence_of(incident)
        before = silence is not None and incident.fired_at is not None and incident.fired_at < silence.at
        return silence is not None and not (topic is Topic.RESOLVED and before)

    # -- sending

    async def run(self) -> None:
        """Send until cancelled. Nothing that goes wrong here ends it."""
        try:
            self.clear_unknown_channels()
        except Exception:  # the boundary: old rows must not delay new messages
            LOG.exception("messages of other channels can't be looked at")
        parts = [worker.run() for worker in self._workers]
        parts.append(self._every(TIDY_EVERY_S, self._tidy, "the outbox can't be tidied"))
        parts.append(self._every(self._poll_s, self.release, "what was held back cannot be written"))
        if self._pulse_s > 0:
            pause_s = min(self._poll_s, self._pulse_s)
            parts.append(self._every(pause_s, self._pulse_if_due, "a pulse can't be written"))
        tasks = [asyncio.ensure_future(each) for each in parts]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:  # they are cancelled with it: wait for their ends
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def deliver(self, tries: int, pause_s: float) -> str | None:
        """Sends what waits, at once, in at most `tries` turns of a channel; the first failure, None if
        nothing is left."""
        for worker in self._workers:
            name = worker.channel.name
            for _ in range(tries):
                if not self._outbox.pending(1, name) or worker.delivery().failing_s is not None:
                    break
                await asyncio.sleep(min(pause_s, await worker.send_next() or 0.0))
            if worker.delivery().failing_s is not None:
                return worker.delivery().error
            if self._outbox.pending(1, name):
                return f"not delivered within {tries} turns"
        return None

    def clear_unknown_channels(self) -> None:
        """Drops the rows of channels that no longer exist: a receiver was removed from the configuration."""
        for name in self._outbox.waiting_channels():
            if name in (worker.channel.name for worker in self._workers):
                continue
            while items := self._outbox.pending(ROWS_AT_ONCE, name):
                LOG.warning("%d messages to %s are dropped: it is no receiver any more", len(items), name)
                self._outbox.done_all(name, [item.id for item in items])

    async def _every(self, pause_s: float, work: Callable[[], object], complaint: str) -> None:
        while True:
            try:
                work()
            except Exception:  # the boundary: a journal that fails gets it later
                LOG.exception(complaint)
            await asyncio.sleep(pause_s)

    def _tidy(self) -> None:
        self._outbox.forget(self._wall() - FORGET_AFTER_S)

    def _pulse_if_due(self) -> None:
        """On the grid of the wall clock: a restarted controller repeats none."""
        newest = self._wall() // self._pulse_s if self._newest_pulse is None else self._newest_pulse
        self._newest_pulse = self.pulse(newest)

    def pulse(self, newest: float) -> float:
        """Queues a job status message if one is due; `newest` is the number of the last interval. Returns the
        newest number."""
        at = self._wall()
        number = at // self._pulse_s
        pulses = self.sources.pulses() if number != newest else ()
        for worker in self._workers if pulses else ():
            if worker.channel.name == PULSE_CHANNEL:
                # After an outage of Slack only the newest status is sent, not one per hour.
                self._outbox.drop(PULSE_CHANNEL, PULSE_ID)
                message = pulse_message(pulses, self._cluster)
                self._outbox.add(PULSE_CHANNEL, PULSE_ID, {"message": message}, at)
                worker.wake()
        return number
