"""The generic webhook and Alertmanager: the same queue, programs at the other end."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import ssl
from pathlib import Path

import pytest

from slurm_watchdog.config.loading import ConfigError, parse_config
from slurm_watchdog.controller.app import Heartbeat
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.incidents import IncidentKind, Severity
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.notify.dispatcher import IncidentSources, make_notifier, try_receivers
from slurm_watchdog.notify.programs import alerts_json, event_json, why
from slurm_watchdog.notify.slack_messages import card
from tests.builders.json_receiver import JsonReceiver
from tests.builders.notices import DECISION, FAILED, INCIDENT, LINKED, OVER, SITE, Ticking, incident, notice, replace

SECRET = "hookSECRET"
LINKS = "<https://w.example/?incident=i1|Incident> · <https://r.example/collective_hang?a=1&amp;b=2|Runbook>"


@pytest.fixture
def journal() -> Journal:
    return Journal("sqlite://")


def webhook(journal: Journal, receiver: JsonReceiver, directory: Path, token: str = "") -> Ticking:
    (directory / "hook").write_text(f"{receiver.url}/{SECRET}\n")
    (directory / "token").write_text(f"{token}\n")
    named = f", token_file: {directory / 'token'}" if token else ""
    return Ticking(journal, config=f"{{webhook: {{url_file: {directory / 'hook'}{named}}}}}")


def alertmanager(journal: Journal, *urls: str) -> Ticking:
    return Ticking(journal, config=f"{{alertmanager: {{urls: {list(urls)}}}}}")


# ------------------------------------------------------------------------------------------------- the webhook


def test_webhook_gets_every_event_in_order_with_values_by_their_names(journal: Journal, tmp_path: Path) -> None:
    receiver = JsonReceiver()

    async def go() -> None:
        async with receiver.listening():
            told = webhook(journal, receiver, tmp_path, "tokenSECRET")
            job = SlurmJob(job_id="7", state="RUNNING", user="ann", partition="large", name="gpt")
            told.notifier.attach(IncidentSources(job_of={"7": job}.get))
            told.notifier.opened(INCIDENT)
            told.notifier.diagnosed(INCIDENT, ["Rank 3 waits."])
            told.notifier.decided(INCIDENT, DECISION)
            told.notifier.ended(INCIDENT, FAILED)
            told.notifier.resolved(OVER)
            await told.run_until_empty()

    asyncio.run(go())
    ((path, headers, document),) = receiver.got
    assert (path, headers["Authorization"]) == (f"/{SECRET}", "Bearer tokenSECRET")
    assert (document["version"], document["cluster"]) == (1, "a")
    events = document["events"]
    assert [each["event"] for each in events] == ["opened", "diagnosed", "decided", "ended", "resolved"]
    assert [each["needs_person"] for each in events] == [False, False, False, True, False]
    opened = events[0]
    assert opened["text"] == "CRITICAL: rank 3 waits alone. Noticed after 60 s."
    assert opened["incident"]["kind"] == "collective_hang"
    (culprit,) = opened["incident"]["culprits"]
    assert culprit | {"node": "n1", "rank": 3, "pid": 42, "reason": "the only one in forward"} == culprit
    assert opened["jobs"] == [{"job_id": "7", "user": "ann", "partition": "large", "name": "gpt"}]
    assert events[2]["decision"]["action"] == "graceful_restart"
    assert events[3]["action"]["end"]["detail"] == "no checkpoint"
    assert len({each["id"] for each in events}) == 5


def test_webhook_that_fails_is_retried_and_a_rejected_event_is_dropped_alone(
    journal: Journal, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = JsonReceiver((500, f"no {SECRET}"), (302, ""), (422, "no"), (200, ""), (422, "no"), (422, "no"))

    async def go() -> None:
        async with receiver.listening():
            told = webhook(journal, receiver, tmp_path)
            for number in range(3):
                told.notifier.opened(incident(number))
            await told.run_until_empty()

    asyncio.run(go())
    sent = [[e["incident"]["id"] for e in document["events"]] for document in receiver.documents()]
    # As a whole until it is refused for good; then each by itself: the first is taken, the second is not, the third is.
    assert sent == [["i0", "i1", "i2"]] * 3 + [["i0"], ["i1", "i2"], ["i1"], ["i2"]]
    assert SECRET not in caplog.text


def test_a_thousand_events_are_ten_requests(journal: Journal, tmp_path: Path) -> None:
    receiver = JsonReceiver()

    async def go() -> None:
        async with receiver.listening():
            told = webhook(journal, receiver, tmp_path)
            with journal.together():
                for number in range(1000):
                    told.notifier.opened(incident(number))
            await told.run_until_empty()

    asyncio.run(go())
    assert len(receiver.got) == 10
    named = [event["incident"]["id"] for document in receiver.documents() for event in document["events"]]
    assert named == [f"i{number}" for number in range(1000)]


# ------------------------------------------------------------------------------------------------- Alertmanager


def test_incident_is_an_alert_repeated_while_it_fires_and_then_ended(journal: Journal) -> None:
    receiver = JsonReceiver()

    async def go() -> None:
        async with receiver.listening():
            ticking, firing = alertmanager(journal, receiver.url), []
            job = SlurmJob(job_id="7", state="RUNNING", user="ann", partition="large", name="g\x1bpt")
            ticking.notifier.attach(IncidentSources(job_of={"7": job}.get, firing=lambda: firing))
            await ticking.run_until(ticking.now + 1.0)
            firing.append(INCIDENT)
            ticking.notifier.opened(INCIDENT)
            ticking.notifier.decided(INCIDENT, DECISION)  # of no interest here
            await ticking.run_until(ticking.now + 130.0)
            firing.clear()
            ticking.notifier.resolved(OVER)
            await ticking.run_until(ticking.now + 130.0)

    asyncio.run(go())
    assert {path for path, _, _ in receiver.got} == {"/api/v2/alerts"}
    opened, *again, over, over_while_acted_on = [alert for document in receiver.documents() for alert in document]
    assert len(again) == 2
    assert opened["labels"] == {
        "alertname": "SlurmWatchdogIncident", "cluster": "a", "kind": "collective_hang", "severity": "page", "incident": "i1",
        "job_id": "7",
    }  # fmt: skip
    assert opened["annotations"]["summary"] == "Rank 3 on n1 waits alone, job 7"
    assert opened["annotations"]["description"].startswith("CRITICAL: rank 3 waits alone. Noticed after 60 s.")
    assert opened["annotations"]["job"] == "7 g\N{REPLACEMENT CHARACTER}pt of ann in large"
    for alert in (*again, over):
        assert alert["labels"] == opened["labels"]
        assert alert["startsAt"] == opened["startsAt"] == "1970-01-01T00:02:40+00:00"
    assert "endsAt" not in opened
    assert over_while_acted_on["labels"] == opened["labels"] | {"severity": "ticket"}
    assert over["endsAt"] == "1970-01-01T02:01:40+00:00"


def test_one_alertmanager_of_two_is_enough_and_none_is_tried_again(journal: Journal) -> None:
    receiver = JsonReceiver((200, ""), (503, ""))

    async def go() -> None:
        async with receiver.listening():
            told = alertmanager(journal, "http://127.0.0.1:1", receiver.url)
            told.notifier.opened(incident(1))
            await told.run_until_empty(10.0)
            told.notifier.opened(incident(2))
            await told.run_until_empty(60.0)

    asyncio.run(go())
    assert [d[0]["labels"]["incident"] for d in receiver.documents()] == ["i1", "i2", "i2"]


def test_an_alert_that_is_refused_for_good_is_dropped_alone(journal: Journal) -> None:
    receiver = JsonReceiver((400, "no"), (200, ""), (400, "no"), (400, "no"))

    async def go() -> None:
        async with receiver.listening():
            told = alertmanager(journal, receiver.url)
            for number in range(3):
                told.notifier.opened(incident(number))
            await told.run_until_empty(60.0)

    asyncio.run(go())
    sent = [[alert["labels"]["incident"] for alert in document] for document in receiver.documents()]
    # As a whole, the first alone, which is taken; the two others, the second alone, which is not; the third.
    assert sent == [["i0", "i1", "i2"], ["i0"], ["i1", "i2"], ["i1"], ["i2"]]


def test_severities_are_those_of_the_shipped_rules(journal: Journal) -> None:
    receiver = JsonReceiver()

    async def go() -> None:
        async with receiver.listening():
            told = alertmanager(journal, receiver.url)
            for severity in Severity:
                told.notifier.opened(
                    replace(INCIDENT, id=severity, severity=severity, kind=IncidentKind.NODE_DOWN, job_ids=())
                )
            await told.run_until_empty()

    asyncio.run(go())
    labels = [alert["labels"] for alert in receiver.documents()[0]]
    assert {each["incident"]: each["severity"] for each in labels} == {
        "critical": "page", "warning": "ticket", "info": "none",
    }  # fmt: skip
    assert not any("job_id" in each for each in labels)


# ------------------------------------------------------------------------------------------------- configuration


def test_every_configured_receiver_gets_the_message(journal: Journal, tmp_path: Path) -> None:
    text = """
notify:
  slack: {token_file: /t, channel: C024BE91L, mention: here, pulse: 1h}
  webhook: {url_file: /u}
  alertmanager: {urls: ['http://alerts:9093']}
"""

    async def go() -> None:
        make_notifier(parse_config(text), journal.outbox).opened(INCIDENT)

    asyncio.run(go())
    assert [item.channel for item in journal.outbox.pending(9)] == ["slack", "webhook", "alertmanager"]


@pytest.mark.parametrize(
    ("slack", "complaint"),
    [
        ("{token_file: /t}", "notify.slack.channel: required"),
        ("{token_file: /t, webhook_url_file: /w, channel: C1}", "a token or a webhook, not both"),
        ("{mention: '@ann'}", "must be an id"),
        ("{mention: 'U1> <!channel'}", "must be an id"),
        ("{api_url: 'http://slack.example/api/'}", "must be an https:// address"),
        ("{pulse: 5s}", "at least 1min"),
        ("{messages_per_minute: 0}", "at least 1"),
    ],
)
def test_notify_settings_that_contradict_are_refused_at_load(slack: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"notify:\n  slack: {slack}\n")
    assert complaint in str(caught.value)


def test_an_address_of_an_alertmanager_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be http://HOST:PORT"):
        parse_config("notify:\n  alertmanager: {urls: ['alerts:9093']}\n")


RECEIVERS = """
notify:
  slack: {token_file: /t, channel: C024BE91L, weekly_report: 'mon 09:00'}
  webhook: {weekly_report: 'mon 09:00'}
  receivers:
    - {name: oncall, type: pagerduty, key_file: /k, route: {severity: [critical], kinds: [node_down]}, only_persons: true}
    - {name: chat, type: template, url_file: /u, token_file: /t, template: {say: '{text}'}, deadline: 5s}
    - {name: vision, type: teams, url_file: /u, route: {partition: gpu, account: 'v*', user: ann}}
    - {name: owners, type: email, server: 'smtp:587', encryption: tls, ca_file: /c, login: w, password_file: /p,
       sender: w@example.org, to: [a@example.org], owner: '{user}@example.org', weekly_report: 'mon 09:00'}
"""


def test_a_file_that_still_has_receivers_and_a_weekly_report_loads_with_a_warning_for_each() -> None:
    config = parse_config(RECEIVERS, "f.yaml")
    assert config.notify.slack.token_file == "/t"
    assert config.warnings == (
        "f.yaml:5: notify.receivers: was removed and has no effect; use Alertmanager (notify.alertmanager), which mails "
        "and pages",
        "f.yaml:3: notify.slack.weekly_report: was removed and has no effect; use `slurm-watchdog report --json` in cron",
        "f.yaml:4: notify.webhook.weekly_report: was removed and has no effect; use `slurm-watchdog report --json` in "
        "cron",
    )


def test_webhook_body_is_ascii_json(journal: Journal, tmp_path: Path) -> None:
    receiver = JsonReceiver()

    async def go() -> None:
        async with receiver.listening():
            told = webhook(journal, receiver, tmp_path)
            told.notifier.opened(replace(INCIDENT, summary="\u202e\x1b]0;x\x07 \ud7ff"))
            await told.run_until_empty()

    asyncio.run(go())
    assert json.dumps(receiver.documents()).isascii()


def test_messages_link_to_the_page_and_the_runbook_where_a_site_names_them_and_nowhere_else() -> None:
    page, runbook = "https://w.example/?incident=i1", "https://r.example/collective_hang?a=1&b=2"
    assert LINKS in json.dumps(card([notice()], LINKED), ensure_ascii=False)
    (alert,) = alerts_json(notice(), LINKED)
    assert (alert["generatorURL"], alert["annotations"]["runbook_url"]) == (page, runbook)
    assert event_json(notice(), LINKED)["links"] == {"page": page, "runbook": runbook}
    assert "http" not in json.dumps([card([notice()], SITE), alerts_json(notice(), SITE)])


def test_an_alert_wakes_nobody_while_an_action_is_under_way() -> None:
    told = [alerts_json(notice(acted_on=acted_on), SITE) for acted_on in (False, True)]
    assert [alert["labels"]["severity"] for (alert,) in told] == ["page", "ticket"]


# ------------------------------------------------------------------------------------------------- notify test


def test_a_test_reaches_every_receiver_is_closed_there_and_each_failure_has_its_reason(tmp_path: Path) -> None:
    hook, good, bad = JsonReceiver(), JsonReceiver(), JsonReceiver(*[(404, "no such tenant")] * 3)

    async def go() -> dict[str, str | None]:
        async with hook.listening(), good.listening(), bad.listening():
            (tmp_path / "hook").write_text(f"{hook.url}/{SECRET}\n")
            config = parse_config(
                f"notify: {{webhook: {{url_file: {tmp_path / 'hook'}}}, alertmanager: {{urls: [{good.url}, {bad.url}]}}}}"
            )
            return await try_receivers(config, Severity.INFO, 1700000000.0)

    assert asyncio.run(go()) == {
        "webhook": None,
        f"alertmanager {good.url}": None,
        f"alertmanager {bad.url}": "Alertmanager answered 404: no such tenant",
    }
    events = [event for document in hook.documents() for event in document["events"]]
    assert [event["event"] for event in events] == ["opened", "resolved"]
    assert all("This is a test" in event["text"] + event["incident"]["summary"] for event in events)
    alerts = [alert for document in good.documents() for alert in document]
    assert [("endsAt" in alert, alert["labels"]["severity"]) for alert in alerts] == [(False, "none"), (True, "none")]
    assert alerts[0]["annotations"]["next"] == "Nothing to do: this is a test"


# ------------------------------------------------------------------------------------------------- the heartbeat


def test_the_heartbeat_beats_only_while_the_controller_sees(tmp_path: Path) -> None:
    receiver, health = JsonReceiver((200, ""), (500, "")), [(True, "watching")]

    async def go() -> list[bool]:
        async with receiver.listening():
            (tmp_path / "url").write_text(f"{receiver.url}/secret\n")
            heart = Heartbeat(str(tmp_path / "url"), "c", lambda: health[0])
            beats = [await heart.beat(), await heart.beat()]
            health[0] = (False, "no complete tick lately")
            return [*beats, await heart.beat()]

    assert asyncio.run(go()) == [True, False, False]
    assert receiver.documents() == [{"cluster": "c", "detail": "watching"}] * 2


# ------------------------------------------------------------------------------------------------- why it failed


class Connector(OSError):
    """As aiohttp's: the cause is inside."""

    def __init__(self, cause: OSError):
        super().__init__(cause.errno, "Cannot connect to host secret.example:443")
        self.os_error = cause


class ConnectorDNS(Connector):
    """As aiohttp's ClientConnectorDNSError, whose cause has no number."""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "secret.example"), "Connection refused"),
        (Connector(OSError(errno.EHOSTUNREACH, "secret.example")), "No route to host"),
        (ConnectorDNS(OSError(None, "secret.example")), "its host name is not known"),
        (socket.gaierror(-2, "secret.example"), "its host name is not known"),
        (ssl.SSLCertVerificationError("secret.example"), "its certificate is not trusted, or its TLS not understood"),
        (FileNotFoundError(errno.ENOENT, "x", "/etc/slack"), "No such file or directory"),
        (ValueError("secret.example"), "ValueError"),
    ],
)
def test_what_failed_is_said_without_the_address(error: Exception, words: str) -> None:
    assert why(error) == words
