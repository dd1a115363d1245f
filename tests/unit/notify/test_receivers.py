"""Receivers of `notify.receivers`: who gets what, in which form, and that no text of a user makes another document of it."""

from __future__ import annotations

import asyncio
import dataclasses
import socketserver
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.analysis.lost_time import report
from slurm_watchdog.config.loading import ConfigError, parse_config
from slurm_watchdog.config.receivers import Receiver
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.notify.dispatcher import IncidentSources
from slurm_watchdog.notify.factory import make_notifier
from slurm_watchdog.notify.heartbeat import Heartbeat
from slurm_watchdog.notify.links import SiteLinks
from slurm_watchdog.notify.receivers import ReceiverChannel
from slurm_watchdog.notify.self_test import each_receiver
from slurm_watchdog.notify.weekly_message import weekly_row, weekly_words
from tests.builders.json_receiver import JsonReceiver
from tests.builders.notices import DECISION, FAILED, INCIDENT, OVER, Ticking, incident, replace

HOSTILE = 'x", "evil": "{text} \n\r\x1b[31m**bold** <!here>'
PLACES = SiteLinks(external_url="https://watchdog.example.org")


def settings(tmp_path: Path, url: str = "", **given: Any) -> Receiver:
    (tmp_path / "url").write_text(f"{url}/secret\n")
    (tmp_path / "key").write_text("K" * 32 + "\n")
    files = {"pagerduty": {"key_file": str(tmp_path / "key")}, "email": {"sender": "watchdog@example.org"}}
    return Receiver(**{"name": "r", **files.get(given["type"], {"url_file": str(tmp_path / "url")}), **given})


def sent(
    tmp_path: Path, *steps: Any, places: SiteLinks = PLACES, answers: Sequence[tuple[int, str]] = (), **given: Any
) -> list[Any]:
    """The documents that a receiver, which answers so, has got after these steps of a notifier."""
    receiver, journal = JsonReceiver(*answers), Journal("sqlite://")

    async def go() -> None:
        async with receiver.listening():
            channel = ReceiverChannel(settings(tmp_path, receiver.url, **given), "c", places, receiver.url)
            told = Ticking(journal, [channel])
            job = SlurmJob(
                job_id="7", state="RUNNING", user="ann", uid=5, partition="gpu", account="vision", name=HOSTILE
            )
            told.notifier.attach(IncidentSources(job_of=lambda job_id: job if job_id == "7" else None))
            for step in steps:
                step(told.notifier)
            await told.run_until_empty()

    asyncio.run(go())
    return receiver.documents()


def opened(told: Any) -> None:
    told.opened(INCIDENT)


def story(told: Any) -> None:
    told.opened(INCIDENT)
    told.decided(INCIDENT, DECISION)
    told.ended(INCIDENT, FAILED)
    told.noted(INCIDENT, "silenced by ann until 12:00")  # which is no acknowledgement
    told.attach(dataclasses.replace(told.sources, acknowledged_by=lambda incident: "bob"))
    told.noted(INCIDENT, "acknowledged by bob")
    told.resolved(OVER)


def test_pagerduty_rings_for_what_needs_a_person_and_its_alert_is_acknowledged_and_resolved(tmp_path: Path) -> None:
    events = sent(tmp_path, story, type="pagerduty")
    assert [each["event_action"] for each in events] == ["trigger", "acknowledge", "resolve"]
    assert {each["dedup_key"] for each in events} == {"slurm-watchdog/c/i1"}
    first = events[0]
    assert first["routing_key"] == "K" * 32 and first["payload"]["severity"] == "critical"
    assert "NEEDS YOU" in first["payload"]["summary"]
    assert first["links"] == [{"href": "https://watchdog.example.org/#/incident/i1", "text": "Incident"}]


def test_a_silence_acknowledges_no_alert_at_pagerduty_whatever_it_is_sent(tmp_path: Path) -> None:
    events = sent(tmp_path, story, type="pagerduty", only_persons=False)
    assert [each["event_action"] for each in events] == ["trigger"] * 3 + ["acknowledge", "resolve"]


def test_pagerduty_of_an_account_elsewhere_is_asked_at_its_own_address(tmp_path: Path) -> None:
    receiver, journal = JsonReceiver(), Journal("sqlite://")

    async def go() -> None:
        async with receiver.listening():
            given = settings(tmp_path, receiver.url, type="pagerduty", url_file=str(tmp_path / "url"))
            told = Ticking(journal, [ReceiverChannel(given, "c")])
            told.notifier.decided(INCIDENT, DECISION)
            told.notifier.ended(INCIDENT, FAILED)
            await told.run_until_empty()

    asyncio.run(go())
    assert [path for path, _, _ in receiver.got] == ["/secret"]


def test_a_template_has_values_in_its_strings_and_no_text_makes_another_document_of_it(tmp_path: Path) -> None:
    template = {
        "text": "{text}",
        "who": ["{users} in {partitions} of {accounts}"],
        "n": 3,
        "job": "{jobs}",
        "u": "{link}",
    }
    hostile = replace(INCIDENT, summary=HOSTILE)
    (document,) = sent(tmp_path, lambda told: told.opened(hostile), type="template", template=template)
    assert set(document) == {"text", "who", "n", "job", "u"}
    assert (document["n"], document["job"], document["who"]) == (3, "7", ["ann in gpu of vision"])
    assert "\n" not in document["text"] and "\x1b" not in document["text"] and "{text}" in document["text"]


def test_teams_gets_runs_of_text_without_markup(tmp_path: Path) -> None:
    (document,) = sent(tmp_path, opened, type="teams")
    card = document["attachments"][0]["content"]
    assert {block["type"] for block in card["body"]} == {"RichTextBlock"}
    assert "rank 3 waits alone" in card["body"][0]["inlines"][0]["text"]
    assert card["actions"][0]["url"].endswith("/i1")


@pytest.mark.parametrize(
    ("route", "gets"),
    [
        ({}, True),
        ({"severity": ["critical"]}, True),
        ({"severity": ["warning", "info"]}, False),
        ({"kinds": ["collective_hang"]}, True),
        ({"kinds": ["gpu_fault"]}, False),
        ({"partition": "g*"}, True),
        ({"partition": ["cpu", "debug"]}, False),
        ({"account": "vision", "user": "ann"}, True),
        ({"account": "vision", "user": "bob"}, False),
    ],
)
def test_a_receiver_gets_what_its_route_lets_through(tmp_path: Path, route: dict[str, Any], gets: bool) -> None:
    documents = sent(tmp_path, opened, type="template", template={"x": "{kind}"}, route=route)
    assert documents == ([{"x": "collective_hang"}] if gets else [])


def test_an_incident_of_no_job_goes_to_no_partition(tmp_path: Path) -> None:
    fault = replace(INCIDENT, kind=IncidentKind.GPU_FAULT, job_ids=(), subject="node:n1")
    for route, number in (({"partition": "*"}, 0), ({}, 1)):
        found = sent(tmp_path, lambda told: told.opened(fault), type="template", template="{kind}", route=route)
        assert len(found) == number


def test_many_at_once_are_one_digest_that_names_each(tmp_path: Path) -> None:
    def storm(told: Any) -> None:
        for number in range(100, 400):
            told.opened(incident(number))

    (document,) = sent(tmp_path, storm, type="template", template={"text": "{text}", "more": "{details}"})
    assert "300 incidents" in document["text"] and "100-399" in document["more"]


class Smtp(socketserver.StreamRequestHandler):
    """As much of an SMTP server as takes mails. `server.bye`: what it answers to QUIT; `server.answers`: what to a
    recipient, one after the other."""

    def handle(self) -> None:
        self.wfile.write(b"220 here\r\n")
        to: list[str] = []
        while line := self.rfile.readline():
            word = line.split()[0].upper() if line.split() else b""
            if word == b"RCPT":
                who = line.decode().partition("<")[2].partition(">")[0]
                if answers := self.server.answers.get(who):  # type: ignore[attr-defined]
                    self.wfile.write(answers.pop(0))
                    continue
                to.append(who)
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                body = b"".join(iter(self.rfile.readline, b".\r\n"))
                self.server.mails.append((to, message_from_bytes(body, policy=policy.default)))  # type: ignore[attr-defined]
                to = []
            self.wfile.write(self.server.bye if word == b"QUIT" else b"250 ok\r\n")  # type: ignore[attr-defined]
            if word == b"QUIT":
                return


@contextmanager
def smtp() -> Iterator[Any]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Smtp) as server:
        server.mails, server.bye, server.answers = [], b"221 bye\r\n", {}  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


MAIL = {"type": "email", "encryption": "none", "owner": "{user}@example.org"}


def flooded(place: str, tmp_path: Path, users: int, called: str = "u{}", **given: Any) -> Journal:
    """An outbox after an incident of each of so many users' jobs, sent for an hour."""
    journal = Journal("sqlite://")
    channel = ReceiverChannel(settings(tmp_path, server=place, **{**MAIL, **given}), "c")
    told = Ticking(journal, [channel])
    told.notifier.attach(
        IncidentSources(job_of=lambda id_: SlurmJob(job_id=id_, state="RUNNING", user=called.format(id_), uid=5))
    )
    for number in range(users):
        told.notifier.opened(incident(number, summary=f"rank {number} waits alone."))
    asyncio.run(told.run_until(told.now + 3600.0))
    return journal


@pytest.mark.parametrize("to", [[], ["ops@example.org"]])
def test_in_a_flood_each_owner_gets_what_is_about_his_jobs_alone(tmp_path: Path, to: list[str]) -> None:
    with smtp() as server:
        journal = flooded(f"127.0.0.1:{server.server_address[1]}", tmp_path, 25, to=to)
        mails = [(who, mail.get_content()) for who, mail in server.mails]
    assert not journal.outbox.pending(1)
    assert [who for who, _ in mails] == [to] * len(to) + [[f"u{number}@example.org"] for number in range(25)]
    for number, (_, text) in enumerate(mails[len(to) :]):
        assert f"rank {number} waits alone" in text and text.count("waits alone") == 1
    assert not to or "25 incidents" in mails[0][1]


@pytest.mark.parametrize("name", ["jürgen", "LAB\\ann", "a@b", "-oann", "a b", ""])
def test_an_owner_whose_name_is_no_address_holds_up_nobody(tmp_path: Path, name: str) -> None:
    with smtp() as server:
        journal = flooded(f"127.0.0.1:{server.server_address[1]}", tmp_path, 2, called=name, to=["ops@example.org"])
        assert [who for who, _ in server.mails] == [["ops@example.org"]] * 2
    assert not journal.outbox.pending(1)


def test_many_incidents_of_one_owner_are_one_digest_of_his(tmp_path: Path) -> None:
    def storm(told: Any) -> None:
        for number in range(30):
            told.opened(replace(INCIDENT, id=f"i{number}"))

    with smtp() as server:
        sent(tmp_path, storm, server=f"127.0.0.1:{server.server_address[1]}", **MAIL)
        ((to, mail),) = server.mails
    assert to == ["ann@example.org"] and "30 incidents" in mail.get_content()


def test_a_flood_continues_where_it_was_put_off_and_an_owner_without_a_mailbox_stops_nobody(tmp_path: Path) -> None:
    with smtp() as server:
        server.answers = {"u3@example.org": [b"451 later\r\n"], "u5@example.org": [b"550 no such user\r\n"] * 99}
        journal = flooded(f"127.0.0.1:{server.server_address[1]}", tmp_path, 25, to=["ops@example.org"])
        got = [who for who, _ in server.mails]
    assert not journal.outbox.pending(1)
    assert got == [["ops@example.org"], *([f"u{number}@example.org"] for number in range(25) if number != 5)]


def test_a_digest_that_is_refused_for_good_is_sent_message_by_message(tmp_path: Path) -> None:
    def storm(told: Any) -> None:
        for number in range(25):
            told.opened(incident(number))

    documents = sent(
        tmp_path, storm, answers=[(400, "no")], type="template", template={"event": "{event}", "n": "{incident}"}
    )
    assert [each["n"] for each in documents] == ["", *(f"i{number}" for number in range(25))]


def test_a_weekly_report_is_sent_in_its_order_and_when_it_is_refused_nothing_else_is_dropped(tmp_path: Path) -> None:
    def week(told: Any) -> None:
        told.opened(incident(1))
        told.opened(incident(2))
        told.put_up("to-r", "week-1", weekly_row(weekly_words(report([], [], 0.0, 1.0)), "c"))
        told.opened(incident(3))

    answers = [(200, ""), (200, ""), (400, "no"), (200, "")]
    documents = sent(tmp_path, week, answers=answers, type="template", template={"n": "{event} {incident}"})
    assert [each["n"] for each in documents] == ["opened i1", "opened i2", "weekly_report ", "opened i3"]


def test_a_mail_goes_to_the_site_and_to_the_jobs_owner(tmp_path: Path) -> None:
    with smtp() as server:
        place = f"127.0.0.1:{server.server_address[1]}"
        more = {"encryption": "none", "to": ["ops@example.org"], "owner": "{user}@example.org"}
        shared = replace(INCIDENT, id="i2", job_ids=("7", "8"))
        sent(tmp_path, opened, lambda told: told.opened(shared), type="email", server=place, **more)
        (to, mail), (of_two, _) = server.mails
    assert (to, of_two) == (["ops@example.org", "ann@example.org"], ["ops@example.org"])
    assert mail["Subject"].startswith("[c] CRITICAL: job 7: rank 3 waits alone.") and mail["Auto-Submitted"]
    text = mail.get_content()
    assert "no step for 90 s" in text and "slurm-watchdog explain i1" in text and "users: ann" in text


@pytest.mark.parametrize(
    "words", ["=?utf-8?q?=0AReply-To:_x=40evil.org=0A=0Aplease_log_in?=", "=?utf-7?q?+2AA-?=", "a\ud800b"]
)
def test_words_of_a_user_make_no_header_of_a_mail_and_hold_up_no_other(tmp_path: Path, words: str) -> None:
    with smtp() as server:
        place = f"127.0.0.1:{server.server_address[1]}"
        more = {"encryption": "none", "to": ["ops@example.org"]}
        hostile = replace(INCIDENT, id="i2", summary=words)
        sent(tmp_path, lambda told: told.opened(hostile), opened, type="email", server=place, **more)
        mails = [mail for _, mail in server.mails]
    assert all(mail["Reply-To"] is None and mail["Auto-Submitted"] for mail in mails)
    assert "rank 3 waits alone" in mails[-1].get_content()


@pytest.mark.parametrize("bye", [b"421 too busy\r\n", b""])
def test_a_mail_that_was_taken_is_not_sent_again_whatever_the_server_says_afterwards(
    tmp_path: Path, bye: bytes
) -> None:
    with smtp() as server:
        server.bye = bye
        place = f"127.0.0.1:{server.server_address[1]}"
        sent(tmp_path, opened, type="email", server=place, encryption="none", to=["ops@example.org"])
        assert len(server.mails) == 1


def test_a_mail_server_that_is_not_there_is_tried_again_and_said(tmp_path: Path) -> None:
    journal = Journal("sqlite://")
    given = settings(tmp_path, type="email", server="127.0.0.1:1", encryption="none", to=["ops@example.org"])
    told = Ticking(journal, [ReceiverChannel(given, "c")])
    told.notifier.opened(INCIDENT)
    asyncio.run(told.run_until(told.now + 30))
    assert told.workers[0].delivery().error == "r can't be reached (Connection refused)"
    assert journal.outbox.pending(1)


@pytest.mark.parametrize(
    ("receiver", "words"),
    [
        ("{name: a, type: pagerduty}", "key_file: required"),
        ("{name: a, type: teams}", "url_file: required"),
        ("{name: a, type: template, url_file: /f}", "template: required"),
        ("{name: a, type: template, url_file: /f, template: '{texts}'}", "{texts} is not known; known: text"),
        ("{name: A b, type: teams, url_file: /f}", "pattern"),
        ("{name: a, type: sms}", "pagerduty"),
        ("{name: a, type: teams, url_file: /f, route: {kinds: [x]}}", "'x' is no kind"),
        ("{name: a, type: email, sender: w@x.org, server: mail, to: [a@x.org]}", "HOST:PORT"),
        (
            "{name: a, type: email, sender: w@x.org, server: 'mail:25', encryption: none, to: [a@x.org]}",
            "on this machine",
        ),
        ("{name: a, type: email, sender: w@x.org, server: 'mail:25', to: ['a@x.org, b@y']}", "is no mail address"),
        ("{name: a, type: email, sender: w@x.org, server: 'mail:25'}", "name who gets the mails"),
        (
            "{name: a, type: email, sender: w@x.org, server: 'mail:25', owner: '{user}', to: [a@x.org]}",
            "is no mail address",
        ),
        ("{name: a, type: teams, url_file: /f}, {name: a, type: teams, url_file: /g}", "two are called a"),
    ],
)
def test_a_receiver_that_cannot_work_is_refused(receiver: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"notify: {{receivers: [{receiver}]}}\n")
    assert words in "\n".join(caught.value.lines()), caught.value.lines()


def test_every_receiver_has_its_channel_and_is_tried_by_the_self_test_whatever_its_route() -> None:
    config = parse_config(
        "notify: {receivers: [{name: a, type: teams, url_file: /f, route: {severity: [critical]}}, "
        "{name: b, type: pagerduty, key_file: /f}]}\n"
    )
    channels = [each.channel for each in make_notifier(config, Journal("sqlite://").outbox).deliveries()]
    assert channels == ["to-a", "to-b"]
    tried = {name: one.notify.receivers for name, one in each_receiver(config)}
    assert list(tried) == ["teams a", "pagerduty b"]
    assert [(each.only_persons, each.route.severity) for (each,) in tried.values()] == [(False, [])] * 2


def test_the_heartbeat_beats_only_while_the_controller_sees(tmp_path: Path) -> None:
    receiver, health = JsonReceiver((200, ""), (500, "")), [(True, "watching")]

    async def go() -> list[bool]:
        async with receiver.listening():
            (tmp_path / "url").write_text(f"{receiver.url}/secret\n")
            heart = Heartbeat(str(tmp_path / "url"), 2.0, "c", lambda: health[0])
            beats = [await heart.beat(), await heart.beat()]
            health[0] = (False, "no complete tick lately")
            return [*beats, await heart.beat()]

    assert asyncio.run(go()) == [True, False, False]
    assert receiver.documents() == [{"cluster": "c", "detail": "watching"}] * 2
