"""The notifier: writes messages to the journal's outbox at once and sends them later, in order, whether or not a
receiver answers, also after the controller's next start. No caller waits for a message. Each channel (Slack, a webhook,
Alertmanager) has its own rows, and its own worker with growing pauses after failures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.structs import picked
from slurm_watchdog.base.text import one_line, plural
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import ActionRun, Decision, Verdict
from slurm_watchdog.model.documents import Delivery
from slurm_watchdog.model.headline import BUSY
from slurm_watchdog.model.incidents import Incident, IncidentKind, IncidentState, Severity, Silence
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.notify.notification import TEST_SUBJECT, Caller, JobNote, Notice, Site, Topic, to_row
from slurm_watchdog.notify.programs import ALERTED, Programs, SendFailed, post_alerts, post_events
from slurm_watchdog.notify.slack import SlackChannel, SlackPoster

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.journal.outbox import SqlOutbox

LOG = logging.getLogger(__name__)

OUTCOMES = ("sent", "failed", "dropped")
POLL_S = 5.0
FIRST_RETRY_S = 2.0
LONGEST_RETRY_S = 600.0
LONGEST_WAIT_S = 3600.0  # even if Slack asks for more
STALE_AFTER_S = 86400.0  # older messages are dropped; they are in the log and in the journal
FORGET_AFTER_S = 14 * 86400.0  # for threads and sent messages: an incident that lasts longer gets a new thread
TIDY_EVERY_S = 600.0
KEPT_JOBS = 8  # of an incident, in a message
TRANSIENT_GUARDS = frozenset({"blind", "evidence", *BUSY})
"""They usually hold for seconds: until Slurm answers, stacks are collected, or another action has ended."""
Channel: TypeAlias = "SlackChannel | Programs"


@dataclass(frozen=True, kw_only=True)
class IncidentSources:
    """Lookups for what an incident does not contain. Each answers at once, from memory."""

    job_of: Callable[[str], SlurmJob | None] = lambda job_id: None
    firing: Callable[[], Sequence[Incident]] = tuple  # and are announced
    pulses: Callable[[], Sequence[str]] = tuple  # how many jobs there are, and a line about each
    acting: Callable[[], frozenset[str]] = frozenset  # ids of the incidents on which an action is under way
    silence_of: Callable[[Incident], Silence | None] = lambda incident: None
    gpus_of: Callable[[str], int] = lambda job_id: 0  # 0: not known
    count: Callable[[str, str, int], None] = lambda channel, outcome, number: None  # how many, of OUTCOMES


class Worker:
    """Sends the outbox rows of one channel."""

    def __init__(self, notifier: Notifier, channel: Channel) -> None:
        self.channel, self._notifier, self._outbox = channel, notifier, notifier.outbox
        self.added = asyncio.Event()  # a row
        self._failing_since: float | None = None
        self._error = ""
        self._failures = 0  # since something was sent, dropped or has expired
        self._retry_at = 0.0
        self._backlog: tuple[int, float | None] = (0, None)

    def delivery(self) -> Delivery:
        """How this channel's messages fare."""
        now, since, (waiting, oldest_at) = self._notifier.wall(), self._failing_since, self._backlog
        return Delivery(
            channel=self.channel.name, error=one_line(self._error, 200), waiting=waiting,
            failing_s=None if since is None else max(0.0, now - since),
            oldest_s=0.0 if oldest_at is None else max(0.0, now - oldest_at),
        )  # fmt: skip

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            self.added.clear()
            wait_s = None
            try:
                wait_s = await self.send_next()
                self._backlog = self._outbox.backlog(self.channel.name)
            except Exception:  # the boundary: an outbox that fails is tried again
                LOG.exception("the outbox of %s cannot be sent", self.channel.name)
            pause_s = self._notifier.poll_s
            with contextlib.suppress(TimeoutError):
                async with timeout(pause_s if wait_s is None else min(wait_s, pause_s)):
                    await self.added.wait()

    async def send_next(self) -> float | None:
        """One turn of the channel; returns after how many seconds the next is due, None if it waits for news. A message
        that fails delays those behind it: they are sent in order."""
        name, now, count = self.channel.name, self._notifier.wall(), self._notifier.sources.count
        first = self._outbox.first(name)
        if first is not None and now - first.added_at > STALE_AFTER_S:
            return self._dropped(
                self._outbox.expire(name, now - STALE_AFTER_S), f"a day old, last failure: {self._error}"
            )
        # A clock that was set back must not keep a message for longer than any retry takes.
        if now < self._retry_at <= now + LONGEST_WAIT_S:
            return self._retry_at - now
        try:
            wait_s = await self.channel.send_due(self._outbox, now)
        except SendFailed as error:
            return self._failed(error, now)
        sent = first is not None and self._outbox.first(name) != first
        if sent:
            count(name, "sent", 1)
        if sent or (first is None and self._failures):  # what had failed was a repeat, or the status of jobs
            self._failing_since, self._failures = None, 0
        return wait_s

    def _failed(self, error: SendFailed, now: float) -> float:
        """Drops what will never be taken; returns the pause until the next try."""
        name, item, asked_s = self.channel.name, self._outbox.first(self.channel.name), error.retry_after_s
        self._failing_since = now if self._failing_since is None else self._failing_since
        self._error = error.reason
        if item is not None and error.permanent:
            self._outbox.done_all(name, (item.id,))
            return self._dropped(1, f"about {item.incident_id}: {error.reason}")
        pause_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(self._failures, 20))
        pause_s = pause_s if asked_s is None else min(asked_s, LONGEST_WAIT_S)
        self._retry_at, self._failures = self._notifier.wall() + pause_s, self._failures + 1
        self._notifier.sources.count(name, "failed", 1)
        LOG.warning("messages to %s wait %.0f s: %s", name, pause_s, error.reason)
        return pause_s

    def _dropped(self, number: int, why: str) -> float:
        self._failures = 0
        self._notifier.sources.count(self.channel.name, "dropped", number)
        LOG.error("%s to %s dropped: %s", plural(number, "message"), self.channel.name, why)
        return 0.0


class Notifier:
    """Writes notices to the outbox for every channel and, while `run` is running, has the channels send them."""

    def __init__(
        self, outbox: SqlOutbox, channels: Iterable[Channel] = (), *, caller: Caller = Caller.SERVICE,
        poll_s: float = POLL_S, wall: Callable[[], float] = clock.wall,
    ) -> None:  # fmt: skip
        self.outbox, self.poll_s, self.wall, self._caller = outbox, poll_s, wall, caller
        self.sources = IncidentSources()
        self.workers = [Worker(self, channel) for channel in channels]

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
        """Announce what was decided, but not that a transient guard holds it back: another decision follows within
        seconds, or what the guard waits for is an incident itself."""
        if decision.verdict is not Verdict.SUPPRESSED or decision.by not in TRANSIENT_GUARDS:
            self._add(Topic.DECIDED, incident, decision=decision)

    def ended(self, incident: Incident, run: ActionRun) -> None:
        """Announce how an action ended."""
        self._add(Topic.ENDED, incident, run=run)

    def resolved(self, incident: Incident) -> None:
        """Announce that an incident is over, if it was announced that it began."""
        if incident.fired_at is not None and incident.inhibited_by is None:
            self._add(Topic.RESOLVED, incident)

    def noted(self, incident: Incident, sentence: str) -> None:
        """Announce what a person has done about an announced incident; a silence does not quiet this."""
        if incident.fired_at is not None and incident.inhibited_by is None:
            self._add(Topic.NOTED, incident, said=(sentence,))

    def explained(self, incident: Incident, cause: Incident | None) -> None:
        """Announce that another incident explains an announced one: it is sent as resolved, with the cause."""
        why = f"explained by {cause.kind}: {cause.summary}" if cause is not None else "another incident explains it"
        why += f" (incident {incident.inhibited_by})"
        over = replace(incident, state=IncidentState.RESOLVED, resolved_at=self.wall(), resolution=why)
        self._add(Topic.RESOLVED, over)

    def _add(self, topic: Topic, incident: Incident, **what: Any) -> None:
        """Writes a notice for each channel that sends such. A silence quiets it, but for what a person has done, and
        the end of what was announced before the silence."""
        workers = [each for each in self.workers if topic in each.channel.topics]
        silence = None if topic is Topic.NOTED else self.sources.silence_of(incident)
        announced = silence is not None and incident.fired_at is not None and incident.fired_at < silence.at
        if not workers or (silence is not None and not (announced and topic is Topic.RESOLVED)):
            return
        notice = self._notice(topic, incident, **what)
        row = to_row(notice)
        for worker in workers:
            self.outbox.add(worker.channel.name, incident.id, row, notice.at)
            worker.added.set()

    def _notice(self, topic: Topic, incident: Incident, **what: Any) -> Notice:
        known, acted_on = self.sources, incident.id in self.sources.acting()
        jobs = filter(None, map(known.job_of, incident.job_ids[:KEPT_JOBS]))
        notes = tuple(picked(JobNote, job, gpus=known.gpus_of(job.job_id)) for job in jobs)
        about: dict[str, Any] = {"caller": self._caller, "acted_on": acted_on, "jobs": notes} | what
        return Notice(topic=topic, at=self.wall(), incident=incident, **about)

    def firing(self) -> list[Notice]:
        """A notice of each incident that fires, for a receiver that has to be told again."""
        return [self._notice(Topic.OPENED, incident) for incident in self.sources.firing()]

    # -- sending

    async def run(self) -> None:
        """Send until cancelled. Nothing that goes wrong here ends it."""
        tasks = [asyncio.ensure_future(each) for each in (self._keep_tidy(), *(each.run() for each in self.workers))]
        try:
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:  # they are cancelled with it: wait for their ends
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _keep_tidy(self) -> None:
        while True:
            try:
                self.tidy()
            except Exception:  # the boundary: a journal that fails gets it later
                LOG.exception("the outbox cannot be cleaned up")
            await asyncio.sleep(TIDY_EVERY_S)

    def tidy(self) -> None:
        """Forgets what is old, and drops the rows of channels that are no receiver any more."""
        self.outbox.forget(self.wall() - FORGET_AFTER_S)
        for name in set(self.outbox.waiting_channels()) - {worker.channel.name for worker in self.workers}:
            dropped = self.outbox.expire(name, math.inf)
            LOG.warning("%d messages to %s are dropped: this receiver was removed", dropped, name)


def receivers(
    config: Config, firing: Callable[[], Sequence[Notice]] = tuple, pulses: Callable[[], Sequence[str]] = tuple,
    *, apart: bool = False,
) -> dict[str, Channel]:  # fmt: skip
    """Those that are configured, by what people call them; Alertmanagers of one cluster are one, unless `apart`."""
    notify, found = config.notify, dict[str, Channel]()
    site = Site(
        cluster=config.cluster_name, external_url=notify.external_url, runbook_url=notify.runbook_url,
        mention=notify.slack.mention, exceptions=config.exceptions,
    )  # fmt: skip
    if notify.slack.token_file or notify.slack.webhook_url_file:
        where = f"bot in channel {notify.slack.channel}" if notify.slack.token_file else "incoming webhook"
        found[f"slack ({where})"] = SlackChannel(SlackPoster(notify.slack), site, notify.slack, pulses)
    if notify.webhook.url_file:
        found["webhook"] = Programs("webhook", partial(post_events, notify.webhook, site))
    urls = notify.alertmanager.urls
    for some in [(url,) for url in urls] if apart else filter(None, [urls]):
        name = f"alertmanager {some[0]}" if apart else "alertmanager"
        found[name] = Programs(name, partial(post_alerts, some, site), ALERTED, firing)
    return found


def make_notifier(config: Config, outbox: SqlOutbox, caller: Caller = Caller.SERVICE) -> Notifier:
    """With what is configured. Without a receiver the controller's log has all of it."""
    notifier = Notifier(outbox, caller=caller)
    # `attach` replaces the sources.
    found = receivers(config, notifier.firing, lambda: notifier.sources.pulses())  # noqa: PLW0108
    notifier.workers += [Worker(notifier, channel) for channel in found.values()]
    return notifier


async def try_receivers(config: Config, severity: Severity, now: float) -> dict[str, str | None]:
    """Sends every receiver a test incident and its end, so that nothing stays open there. Receiver, and why it did not
    take them; None: it did. `now` is a date."""
    test = Incident(
        id=f"test{int(now)}", kind=IncidentKind.OPERATOR_RESTART, subject=TEST_SUBJECT, state=IncidentState.FIRING,
        severity=severity, job_ids=(), opened_at=now, fired_at=now, pending_mono=0.0,
        summary="This is a test of slurm-watchdog's notifications. Nothing is wrong.",
    )  # fmt: skip
    over = replace(test, state=IncidentState.RESOLVED, resolved_at=now, resolution="The test is over.")
    story = [Notice(topic=Topic.OPENED, at=now, incident=test), Notice(topic=Topic.RESOLVED, at=now, incident=over)]
    found, outbox = receivers(config, apart=True), Journal("sqlite://").outbox
    for channel, notice in product(found.values(), story):
        outbox.add(channel.name, test.id, to_row(notice), now)
    errors = await asyncio.gather(*(each.send_due(outbox, now) for each in found.values()), return_exceptions=True)
    why = [str(error) if isinstance(error, Exception) else None for error in errors]
    return dict(zip(found, why, strict=True))
