"""The notifier: writes messages to the journal's outbox at once and sends them later, in order, whether or
not a receiver answers.

No caller waits for a message. What is in the outbox when the controller ends is sent after its next start. Each
channel (Slack, a webhook, Alertmanager) has its own rows, its own worker with growing pauses after failures, and its
own failures.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import one_line
from slurm_watchdog.model.actions import ActionRun, Decision, Verdict
from slurm_watchdog.model.documents import Delivery
from slurm_watchdog.model.incidents import GpuProcess, Incident, IncidentKind, IncidentState, Severity
from slurm_watchdog.model.silence import Silence
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.notify.http import SendFailed
from slurm_watchdog.notify.notification import (
    KEPT_JOBS,
    TEST_SUBJECT,
    TRANSIENT_GUARDS,
    Caller,
    JobNote,
    Notice,
    Site,
    Topic,
    to_row,
)
from slurm_watchdog.notify.programs import ALERTED, Programs, post_alerts, post_events, write_log
from slurm_watchdog.notify.slack import SlackChannel, SlackPoster

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.journal.outbox import SqlOutbox

LOG = logging.getLogger(__name__)

HOLD_BACK_S = 60.0
"""A decision by a transient guard is announced only if no other decision replaces it within this time."""
OUTCOMES = ("sent", "failed", "dropped")
POLL_S = 5.0
FIRST_RETRY_S = 2.0
LONGEST_RETRY_S = 600.0
LONGEST_WAIT_S = 3600.0
"""Even if Slack asks for more."""
STALE_AFTER_S = 86400.0
"""Older messages are dropped; they are in the log and in the journal."""
FORGET_AFTER_S = 14 * 86400.0
"""Threads and sent messages are remembered so long: an incident that lasts longer gets a new thread."""
TIDY_EVERY_S = 600.0
TRIES = 8
"""Turns of one channel in a test: two messages, a change of the first, and the pauses that Slack's pace asks for."""
LONGEST_PAUSE_S = 2.0
"""A receiver that asks for more than that between two messages has failed the test."""


class Channel(Protocol):
    """A notification backend: Slack, or programs (a webhook, Alertmanager, the log)."""

    name: str
    """In the outbox; at most 32 characters."""
    topics: frozenset[Topic]
    """The topics that it sends."""

    async def send_due(self, outbox: SqlOutbox, now: float) -> float | None:
        """Send what is due of the oldest rows, within a deadline of its own, and mark them as done.

        Returns after how many seconds to call again; None if there is nothing to do. Raises SendFailed with
        what comes first still to be done, and JournalError. `now` is a date.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class IncidentSources:
    """Lookups for what an incident does not contain. Each answers at once, from memory."""

    job_of: Callable[[str], SlurmJob | None] = lambda job_id: None
    firing: Callable[[], Sequence[Incident]] = tuple
    """Incidents that fire and are announced."""
    pulses: Callable[[], Sequence[str]] = tuple
    """How many jobs there are, and a line about each."""
    acting: Callable[[], frozenset[str]] = frozenset
    """Ids of the incidents on which an action is under way."""
    silence_of: Callable[[Incident], Silence | None] = lambda incident: None
    """The silence that holds for an incident."""
    gpus_of: Callable[[str], int] = lambda job_id: 0
    """How many GPUs a job has; 0: not known."""
    count: Callable[[str, str, int], None] = lambda channel, outcome, number: None
    """Is called with channel, outcome (`sent`, `failed`, `dropped`) and how many."""


class Worker:
    """Sends the outbox rows of one channel."""

    def __init__(self, notifier: Notifier, channel: Channel) -> None:
        self.channel = channel
        self._notifier, self._outbox = notifier, notifier.outbox
        self.added = asyncio.Event()
        """A row was added."""
        self._failing_since: float | None = None
        self._error = ""
        self._idle_failed = False
        """The last failure was of what is no row (repeated alerts): the next such turn without a failure clears it."""
        self._retry_at = float("-inf")
        self._backlog: tuple[int, float | None] = (0, None)

    def delivery(self) -> Delivery:
        """How this channel's messages fare."""
        now = self._notifier.wall()
        waiting, oldest_at = self._backlog
        return Delivery(
            channel=self.channel.name,
            failing_s=None if self._failing_since is None else max(0.0, now - self._failing_since),
            error=one_line(self._error, 200),
            waiting=waiting,
            oldest_s=0.0 if oldest_at is None else max(0.0, now - oldest_at),
        )

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            self.added.clear()
            wait_s = None
            try:
                wait_s = await self.send_next()
                self._backlog = self._outbox.backlog(self.channel.name)
            except Exception:  # the boundary: an outbox that fails is tried again
                LOG.exception("the outbox of %s can't be worked off", self.channel.name)
            if wait_s is not None:
                await asyncio.sleep(min(wait_s, self._notifier.poll_s))
                continue
            try:
                async with timeout(self._notifier.poll_s):
                    await self.added.wait()
            except TimeoutError:
                pass

    async def send_next(self) -> float | None:
        """One turn of the channel; returns after how many seconds the next is due, None if it waits for news.

        A message that fails delays those behind it: they are sent in order.
        """
        name, now, count = self.channel.name, self._notifier.wall(), self._notifier.sources.count
        first = next(iter(self._outbox.pending(1, name)), None)
        if first is not None and now - first.added_at > STALE_AFTER_S:
            dropped = self._outbox.expire(name, now - STALE_AFTER_S)
            count(name, "dropped", dropped)
            LOG.error("%d messages to %s are dropped: a day old, last failure: %s", dropped, name, first.error)
            return 0.0
        retry_at = max(self._retry_at, -math.inf if first is None else first.retry_at)
        # A clock that was set back must not keep a message for longer than any retry takes.
        if now < retry_at <= now + LONGEST_WAIT_S:
            return retry_at - now
        try:
            wait_s = await self.channel.send_due(self._outbox, now)
        except SendFailed as error:
            self._failing_since = now if self._failing_since is None else self._failing_since
            self._error, self._idle_failed = error.reason, first is None
            wait_s = self._failed(error)
            self._retry_at = self._notifier.wall() + wait_s
            return wait_s
        left = next(iter(self._outbox.pending(1, name)), None)
        if first is None:
            self._failing_since = None if self._idle_failed else self._failing_since
        elif left is None or left.id != first.id:
            count(name, "sent", 1)
            self._failing_since = None
        return wait_s

    def _failed(self, error: SendFailed) -> float:
        """Writes a failure down at the row that comes first; returns the pause until the next try."""
        name, asked_s = self.channel.name, error.retry_after_s
        item = next(iter(self._outbox.pending(1, name)), None)
        gone = item is not None and error.permanent
        self._notifier.sources.count(name, "dropped" if gone else "failed", 1)
        if item is not None and error.permanent:
            LOG.error("message %d to %s about %s is dropped: %s", item.id, name, item.incident_id, error.reason)
            self._outbox.done_all(name, (item.id,))
            return 0.0
        backoff_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(item.attempts, 20)) if item else 10 * FIRST_RETRY_S
        wait_s = backoff_s if asked_s is None else min(asked_s, LONGEST_WAIT_S)
        about = f"message {item.id} about {item.incident_id}" if item else "what is repeated"
        LOG.warning("%s to %s waits %.0f s: %s", about, name, wait_s, error.reason)
        if item is not None:
            self._outbox.failed(item.id, error.reason, self._notifier.wall() + wait_s)
        return wait_s


class Notifier:
    """Writes notices to the outbox for every channel and, while `run` is running, has the channels send them."""

    def __init__(
        self,
        outbox: SqlOutbox,
        channels: Iterable[Channel] = (),
        *,
        caller: Caller = Caller.SERVICE,
        poll_s: float = POLL_S,
        wall: Callable[[], float] = clock.wall,
    ) -> None:
        self.outbox, self.poll_s, self.wall = outbox, poll_s, wall
        self._caller = caller
        self.sources = IncidentSources()
        self.workers = [Worker(self, channel) for channel in channels]
        self._held: dict[tuple[str, str | GpuProcess], tuple[float, Incident, Decision]] = {}
        """(incident, job or process) -> since when which decision is held back."""

    def attach(self, sources: IncidentSources) -> None:
        """Where to look things up from now on."""
        self.sources = sources
        for worker in self.workers:
            for outcome in OUTCOMES:
                sources.count(worker.channel.name, outcome, 0)

    def deliveries(self) -> tuple[Delivery, ...]:
        """How the messages of each channel fare; from memory, at once."""
        return tuple(worker.delivery() for worker in self.workers)

    # -- for the controller: each returns at once; raises what the outbox raises (JournalError)

    def opened(self, incident: Incident) -> None:
        """Announce an incident, unless another explains it."""
        if incident.inhibited_by is None:
            self._add(Topic.OPENED, incident)

    def diagnosed(self, incident: Incident, said: Iterable[str]) -> None:
        """Announce the diagnosis, the most important sentence first."""
        self._add(Topic.DIAGNOSED, incident, said=tuple(said))

    def decided(self, incident: Incident, decision: Decision) -> None:
        """Announce what was decided. That nothing is done for the moment, by a transient guard, is held
        back: mostly another decision follows within seconds."""
        key = (incident.id, decision.process or ("" if decision.fence is None else decision.fence.job_id))
        self._held.pop(key, None)
        if decision.verdict is Verdict.SUPPRESSED and decision.by in TRANSIENT_GUARDS:
            self._held[key] = (self.wall(), incident, decision)
        else:
            self._add(Topic.DECIDED, incident, decision=decision)

    def release(self) -> None:
        """Announces what was held back for HOLD_BACK_S, and was followed by nothing, with the incident as it is now."""
        now, firing = self.wall(), {each.id: each for each in self.sources.firing()}
        for key in [key for key, (at, _, _) in self._held.items() if not 0 <= now - at < HOLD_BACK_S]:
            _, incident, decision = self._held.pop(key)
            self._add(Topic.DECIDED, firing.get(incident.id, incident), decision=decision)

    def ended(self, incident: Incident, run: ActionRun) -> None:
        """Announce how an action ended."""
        self._add(Topic.ENDED, incident, run=run)

    def resolved(self, incident: Incident) -> None:
        """Announce that an incident is over, if it was announced that it began."""
        self._held = {key: held for key, held in self._held.items() if key[0] != incident.id}
        if incident.fired_at is not None and incident.inhibited_by is None:
            self._add(Topic.RESOLVED, incident)

    def noted(self, incident: Incident, sentence: str) -> None:
        """Announce what a person has done about an announced incident; a silence does not quiet this."""
        if incident.fired_at is not None and incident.inhibited_by is None:
            self._add(Topic.NOTED, incident, said=(sentence,))

    def explained(self, incident: Incident, cause: Incident | None) -> None:
        """Announce that another incident explains an announced one: it is sent as resolved, with the cause."""
        self._held = {key: held for key, held in self._held.items() if key[0] != incident.id}
        why = f"explained by {cause.kind}: {cause.summary}" if cause is not None else "another incident explains it"
        over = {"state": IncidentState.RESOLVED, "resolved_at": self.wall()}
        self._add(Topic.RESOLVED, replace(incident, resolution=f"{why} (incident {incident.inhibited_by})", **over))

    def _add(self, topic: Topic, incident: Incident, **what: Any) -> None:
        """Writes a notice for each channel that sends such. A silence quiets it, but for what a person has done, and
        the end of what was announced before the silence."""
        workers = [each for each in self.workers if topic in each.channel.topics]
        silence = self.sources.silence_of(incident) if workers and topic is not Topic.NOTED else None
        if silence is not None:
            before = incident.fired_at is not None and incident.fired_at < silence.at
            if topic is not Topic.RESOLVED or not before:
                return
        if not workers:
            return
        notice = self._notice(topic, incident, **what)
        row = to_row(notice)
        for worker in workers:
            self.outbox.add(worker.channel.name, incident.id, row, notice.at)
            worker.added.set()

    def _notice(self, topic: Topic, incident: Incident, **what: Any) -> Notice:
        jobs = [job for job in map(self.sources.job_of, incident.job_ids[:KEPT_JOBS]) if job is not None]
        return Notice(
            topic=topic,
            at=self.wall(),
            incident=incident,
            caller=self._caller,
            acted_on=incident.id in self.sources.acting(),
            jobs=tuple(
                JobNote(
                    job_id=job.job_id, user=job.user, partition=job.partition, account=job.account, name=job.name,
                    gpus=self.sources.gpus_of(job.job_id),
                )
                for job in jobs
            ),
            **what,
        )  # fmt: skip

    def firing(self) -> list[Notice]:
        """A notice of each incident that fires, for a receiver that has to be told again."""
        return [self._notice(Topic.OPENED, incident) for incident in self.sources.firing()]

    # -- sending

    async def run(self) -> None:
        """Send until cancelled. Nothing that goes wrong here ends it."""
        parts = [worker.run() for worker in self.workers]
        parts.append(self._every(TIDY_EVERY_S, self.tidy, "the outbox can't be tidied"))
        parts.append(self._every(self.poll_s, self.release, "what was held back cannot be written"))
        tasks = [asyncio.ensure_future(each) for each in parts]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:  # they are cancelled with it: wait for their ends
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _every(self, pause_s: float, work: Callable[[], object], complaint: str) -> None:
        while True:
            try:
                work()
            except Exception:  # the boundary: a journal that fails gets it later
                LOG.exception(complaint)
            await asyncio.sleep(pause_s)

    def tidy(self) -> None:
        """Forgets what is old, and drops the rows of channels that are no receiver any more."""
        self.outbox.forget(self.wall() - FORGET_AFTER_S)
        for name in set(self.outbox.waiting_channels()) - {worker.channel.name for worker in self.workers}:
            dropped = self.outbox.expire(name, math.inf)
            LOG.warning("%d messages to %s are dropped: it is no receiver any more", dropped, name)

    async def deliver(self, tries: int, pause_s: float) -> str | None:
        """Sends what waits, at once, in at most `tries` turns of a channel; the first failure, None if
        nothing is left."""
        for worker in self.workers:
            for _ in range(tries):
                if not self.outbox.pending(1, worker.channel.name) or worker.delivery().failing_s is not None:
                    break
                await asyncio.sleep(min(pause_s, await worker.send_next() or 0.0))
            if worker.delivery().failing_s is not None:
                return worker.delivery().error
            if self.outbox.pending(1, worker.channel.name):
                return f"not delivered within {tries} turns"
        return None


def make_notifier(config: Config, outbox: SqlOutbox, caller: Caller = Caller.SERVICE) -> Notifier:
    """Slack, a webhook, Alertmanager, each if it is configured; the log if none is."""
    settings, slack = config.notify, config.notify.slack
    site = Site(cluster=config.cluster_name, external_url=settings.external_url, runbook_url=settings.runbook_url)
    notifier = Notifier(outbox, caller=caller)
    channels: list[Channel] = []
    if slack.token_file or slack.webhook_url_file:
        pulses = lambda: notifier.sources.pulses()  # noqa: E731, PLW0108 - `attach` replaces the sources
        channels.append(SlackChannel(SlackPoster(slack), site, slack, pulses))
    if settings.webhook.url_file:
        channels.append(Programs("webhook", partial(post_events, settings.webhook, site)))
    if urls := settings.alertmanager.urls:
        channels.append(Programs("alertmanager", partial(post_alerts, urls, site), ALERTED, notifier.firing))
    notifier.workers += [Worker(notifier, each) for each in channels or [Programs("log", partial(write_log, site))]]
    return notifier


class Outcome(Struct, frozen=True, kw_only=True):
    """How one receiver took the test notice."""

    receiver: str
    error: str | None
    """Why it was not delivered; None: it was."""


async def try_receivers(
    config: Config, new_outbox: Callable[[], SqlOutbox], severity: Severity, now: float
) -> list[Outcome]:
    """Sends the test to every receiver at once, each by itself, each Alertmanager of a cluster, too, through the
    channels that send incidents. `now` is a date."""
    notify = config.notify
    slack, hook, alerts = notify.slack, notify.webhook, notify.alertmanager
    nothing = {"slack": type(slack)(), "webhook": type(hook)(), "alertmanager": type(alerts)()}
    parts: list[tuple[str, dict[str, Any]]] = []
    if slack.token_file or slack.webhook_url_file:
        where = f"bot in channel {slack.channel}" if slack.token_file else "incoming webhook"
        parts.append((f"slack ({where})", {"slack": slack}))
    if hook.url_file:
        parts.append(("webhook", {"webhook": hook}))
    for url in alerts.urls:
        parts.append((f"alertmanager {url}", {"alertmanager": alerts.model_copy(update={"urls": [url]})}))
    alone = [config.model_copy(update={"notify": notify.model_copy(update=nothing | part)}) for _, part in parts]
    errors = await asyncio.gather(*(_try(make_notifier(each, new_outbox()), severity, now) for each in alone))
    return [Outcome(receiver=name, error=error) for (name, _), error in zip(parts, errors, strict=True)]


async def _try(notifier: Notifier, severity: Severity, now: float) -> str | None:
    """Opens and resolves a test incident, so that nothing stays open at the receiver; why that was not delivered, None
    if it was."""
    test = Incident(
        id=f"test{int(now)}", kind=IncidentKind.OPERATOR_RESTART, subject=TEST_SUBJECT, state=IncidentState.FIRING,
        severity=severity, job_ids=(), opened_at=now, fired_at=now, pending_mono=0.0,
        summary="This is a test of slurm-watchdog's notifications. Nothing is wrong.",
    )  # fmt: skip
    notifier.opened(test)
    failed = await notifier.deliver(TRIES, LONGEST_PAUSE_S)
    if failed is None:
        notifier.resolved(replace(test, state=IncidentState.RESOLVED, resolved_at=now, resolution="The test is over."))
        failed = await notifier.deliver(TRIES, LONGEST_PAUSE_S)
    return failed
