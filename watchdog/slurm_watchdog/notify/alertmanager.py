"""Alertmanager's API: an alert for each firing incident, repeated while it fires, and its end.

Without Prometheus in between, an incident alerts as soon as it fires, with its sentence. An alert that is not
repeated ends after Alertmanager's `resolve_timeout` (5 min), so a stopped controller leaves no alert behind:
https://prometheus.io/docs/alerting/latest/alerts_api/
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import msgspec

from slurm_watchdog.base.text import one_line
from slurm_watchdog.model.incidents import Incident, Severity
from slurm_watchdog.notify.delivery import send_together
from slurm_watchdog.notify.http import SendFailed, post_json
from slurm_watchdog.notify.notification import NO_LINKS, JobNote, Notice, SiteLinks, Topic, from_row, job_notes
from slurm_watchdog.notify.wording import culprit_line, next_step, opened_message, resolved_message

if TYPE_CHECKING:
    from slurm_watchdog.journal.outbox import OutboxItem, SqlOutbox
    from slurm_watchdog.notify.dispatcher import IncidentSources

BATCH = 200
GAP_S = 1.0
SEVERITIES = {Severity.CRITICAL: "page", Severity.WARNING: "ticket", Severity.INFO: "none"}
"""The words of deploy/prometheus/alerts.yaml, so that one routing serves both."""
LABEL_LIMIT = 200
TEXT_LIMIT = 1000


class AlertmanagerChannel:
    """Posts to every Alertmanager of a cluster, as its manual asks; one that answers is enough."""

    name = "alertmanager"
    topics = frozenset({Topic.OPENED, Topic.RESOLVED})

    def __init__(
        self,
        urls: Sequence[str],
        deadline_s: float,
        repeat_s: float,
        cluster: str,
        sources: Callable[[], IncidentSources],
        places: SiteLinks = NO_LINKS,
    ) -> None:
        """`repeat_s`: time between two repeats of firing alerts; `sources` has the firing incidents."""
        self._urls = tuple(url.rstrip("/") + "/api/v2/alerts" for url in urls)
        self._deadline_s = deadline_s
        self._repeat_s = repeat_s
        self._cluster = cluster
        self._places = places
        self._sources = sources
        self._round_at = float("-inf")
        self._round_left: list[dict[str, Any]] = []
        """Alerts not yet repeated in this round."""

    async def send_due(self, outbox: SqlOutbox, now: float) -> float | None:
        """See delivery.Channel. New alerts go before repeats."""
        items = outbox.pending(BATCH, self.name)
        if items:
            await send_together(outbox, self.name, items, self._post_news)
            return GAP_S
        if not 0 <= now - self._round_at < self._repeat_s:
            self._round_at = now
            sources = self._sources()
            self._round_left = [
                _firing(
                    incident,
                    job_notes(map(sources.job_of, incident.job_ids[:1])),
                    self._cluster,
                    acted_on=incident.id in sources.acting(),
                    places=self._places,
                )
                for incident in sources.firing()
            ]
        if not self._round_left:
            return None
        some, self._round_left = self._round_left[:BATCH], self._round_left[BATCH:]
        try:
            await self._post(some)
        except SendFailed:
            self._round_left = [*some, *self._round_left]
            raise
        return GAP_S if self._round_left else None

    async def _post_news(self, items: Sequence[OutboxItem]) -> None:
        await self._post([alert for item in items for alert in self._alerts_of(item)])

    def _alerts_of(self, item: OutboxItem) -> list[dict[str, Any]]:
        try:
            return alerts_json(from_row(item.payload), self._cluster, self._sources().acting(), self._places)
        except msgspec.ValidationError:
            return []  # a row of another release: it is repeated while it fires

    async def _post(self, alerts: Sequence[dict[str, Any]]) -> None:
        """Raises SendFailed if none of them took it."""
        failures = []
        for url in self._urls if alerts else ():
            try:
                await post_json(url, alerts, self._deadline_s, receiver="Alertmanager")
            except SendFailed as error:
                failures.append(error)
        if failures and len(failures) == len(self._urls):
            raise next((error for error in failures if not error.permanent), failures[0])


def alerts_json(
    notice: Notice, cluster: str, acting: Collection[str] = (), places: SiteLinks = NO_LINKS
) -> list[dict[str, Any]]:
    """The alert that begins with this notice; or those that end: the one that calls a person, and the one
    while an action was under way."""
    if notice.topic is not Topic.RESOLVED:
        return [alert_json(notice, cluster, acted_on=notice.incident.id in acting, places=places)]
    both = [alert_json(notice, cluster, acted_on=acted_on, places=places) for acted_on in (False, True)]
    return both if both[0]["labels"] != both[1]["labels"] else both[:1]


def alert_json(notice: Notice, cluster: str, *, acted_on: bool = False, places: SiteLinks = NO_LINKS) -> dict[str, Any]:
    """The alert that begins, or ends, with this notice; its severity is lower while it is `acted_on`."""
    alert = _firing(notice.incident, notice.jobs, cluster, acted_on=acted_on, places=places)
    if notice.topic is not Topic.RESOLVED:
        return alert
    alert["annotations"]["summary"] = one_line(resolved_message(notice.incident).sentence, TEXT_LIMIT)
    return alert | {"endsAt": _date(notice.incident.resolved_at or notice.at)}


def _firing(
    incident: Incident,
    jobs: Sequence[JobNote],
    cluster: str,
    *,
    acted_on: bool = False,
    places: SiteLinks = NO_LINKS,
) -> dict[str, Any]:
    """Labels name the incident and stay the same for its whole life; all that changes is an annotation."""
    labels = {
        "alertname": "SlurmWatchdogIncident",
        "cluster": cluster,
        "kind": str(incident.kind),
        "severity": SEVERITIES[
            Severity.WARNING if acted_on and incident.severity is Severity.CRITICAL else incident.severity
        ],
        "incident": incident.id,
    }
    if len(incident.job_ids) == 1:
        labels["job_id"] = incident.job_ids[0]
    annotations = {
        "summary": opened_message(incident).sentence,
        "description": "\n".join(incident.facts[:10]),
        "who": "; ".join(culprit_line(incident, index) for index in range(min(3, len(incident.culprits)))),
        "job": ", ".join(f"{job.name} of {job.user} in {job.partition}" for job in jobs[:1]),
        "next": next_step(incident, "{}"),
        "runbook_url": places.runbook(incident.kind),
    }
    page = places.incident_url(incident.id)
    return {
        **({"generatorURL": page} if page else {}),
        "labels": {key: one_line(value, LABEL_LIMIT) for key, value in labels.items()},
        "annotations": {
            key: "\n".join(one_line(line, TEXT_LIMIT) for line in value.splitlines())
            for key, value in annotations.items()
            if value
        },
        "startsAt": _date(incident.fired_at or incident.opened_at),
    }


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, tz=timezone.utc).isoformat()
