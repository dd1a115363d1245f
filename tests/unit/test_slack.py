"""Messages say what matters and can't be turned into anything else; the sender gives up on none too early."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from watchdog.config import Config
from watchdog.controller.journal import Journal, JournalError
from watchdog.model import (
    Action,
    ActionEnd,
    ActionRun,
    Culprit,
    Decision,
    Fence,
    Incident,
    IncidentState,
    Kind,
    Rung,
    RungOutcome,
    RungRecord,
    Severity,
    Verdict,
)
from watchdog.notify import SendFailed, slack
from watchdog.notify.queue import LogSender, Notifier, make_notifier

replace = msgspec.structs.replace
INCIDENT = Incident(
    id="i1", kind=Kind.COLLECTIVE_HANG, subject="job:7", state=IncidentState.FIRING, severity=Severity.CRITICAL,
    job_ids=("7",), opened_at=100.0, pending_mono=5.0, fired_at=160.0, detected_after_s=60.0, summary="rank 3 waits alone.",
    culprits=(Culprit(node="n1", rank=3, pid=42, reason="the only one in forward"),), facts=("no step for 90 s",),
)  # fmt: skip
DECISION = Decision(
    id="d1", incident_id="i1", action=Action.GRACEFUL_RESTART, verdict=Verdict.ALLOWED, by="collective_hang",
    reason="a rank is stuck", decided_at=200.0, fence=Fence(job_id="7", restarts=0, start_at=90.0), exclude=("n1",),
)  # fmt: skip
RUN = ActionRun(
    decision=DECISION,
    records=(
        RungRecord(rung=Rung.REQUEUE_HOLD, attempt=1, intent_at=1.0, outcome=RungOutcome.DONE, detail="held"),
    ),
    end=ActionEnd(
        ok=True, ended_at=300.0, detail="runs on n2", resumed_at_step=500, steps_lost=20, downtime_s=700.0
    ),
)
HOSTILE = [
    "<!channel> <@U123> @everyone",
    "</text> & <https://evil.example|click>",
    "a\nb\r\n\x1b[31mred\x00",
    "\u202egnp.exe",
    "&" * 5000,
    "*bold* `code` :skull:",
]


def texts(message: dict[str, Any]) -> list[str]:
    return [message["text"], *(block["text"]["text"] for block in message["blocks"])]


def every_message(text: str) -> list[dict[str, Any]]:
    """All kinds of messages with `text` wherever a user may have a hand in it."""
    incident = replace(
        INCIDENT, summary=text, facts=(text,) * 40, subject=text, job_ids=(), resolution=text, resolved_at=200.0,
        culprits=(Culprit(path=text, reason=text),) * 40,
    )  # fmt: skip
    decision = replace(DECISION, reason=text, asked_by=text)
    run = replace(
        RUN, records=(replace(RUN.records[0], detail=text),) * 40, end=replace(RUN.end, detail=text)
    )
    return [
        slack.format_opened(incident, "c"),
        slack.format_decision(incident, decision, "c"),
        slack.format_outcome(incident, run, "c"),
        slack.format_outcome(incident, replace(run, end=replace(RUN.end, ok=False, detail=text)), "c"),
        slack.format_resolved(incident, "c"),
    ]


def check_harmless(text: str) -> None:
    for message in every_message(text):
        assert len(message["blocks"]) <= 3
        for block in message["blocks"]:
            assert block["type"] == "section"
            assert block["text"]["type"] == "plain_text"
            assert block["text"]["emoji"] is False
        for shown in texts(message):
            assert 0 < len(shown) <= 3000
            assert "<" not in shown
            assert ">" not in shown
            bare = shown.replace("&amp;", "").replace("&lt;", "").replace("&gt;", "")
            assert "&" not in bare
            assert not set(shown) & set("\x00\x1b\r\u202e")
        assert "\n" not in message["text"]
        assert message["link_names"] is False
        json.dumps(message)


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_users_stays_text(text: str) -> None:
    check_harmless(text)


@given(st.text())
def test_any_text_stays_text(text: str) -> None:
    check_harmless(text)


def test_an_incident_says_what_who_and_what_to_do() -> None:
    sentence, _, evidence, todo = texts(slack.format_opened(INCIDENT, "alpha"))
    assert sentence == "[alpha] CRITICAL: job 7: rank 3 waits alone. Noticed after 60 s."
    assert evidence == "• rank 3 on n1 pid 42: the only one in forward\n• no step for 90 s"
    assert "slurm-watchdog explain i1" in todo


@pytest.mark.parametrize(
    ("change", "sentence", "todo"),
    [
        ({}, "[a] job 7 is being restarted gracefully: a rank is stuck", "slurm-watchdog pause"),
        ({"verdict": Verdict.OBSERVED}, "[a] job 7 would have been restarted gracefully, but was not touched: a rank is stuck",
         "slurm-watchdog restart 7"),
        ({"verdict": Verdict.SUPPRESSED, "by": "storm"},
         "[a] job 7 was not restarted gracefully (guard: storm): a rank is stuck", "slurm-watchdog restart 7"),
        ({"action": Action.NONE, "fence": None}, "[a] job 7: alert only: a rank is stuck", "explain i1"),
    ],
)  # fmt: skip
def test_a_decision_says_what_by_whom_and_what_to_do(
    change: dict[str, Any], sentence: str, todo: str
) -> None:
    said = texts(slack.format_decision(INCIDENT, replace(DECISION, **change), "a"))
    assert said[0] == sentence
    assert todo in said[-1]


@pytest.mark.parametrize(
    ("exclude", "command"),
    [
        ((), "scontrol requeue 7"),
        (
            ("n1", "n2"),
            "scontrol requeuehold 7; scontrol update JobId=7 ExcNodeList=n1,n2; scontrol release 7",
        ),
    ],
)
def test_a_loop_that_does_not_turn_is_not_restarted_by_a_kill_switch(
    exclude: tuple[str, ...], command: str
) -> None:
    decision = replace(DECISION, action=Action.REQUEUE, verdict=Verdict.OBSERVED, exclude=exclude)
    said = texts(slack.format_decision(INCIDENT, decision, "a"))
    assert said[0].startswith("[a] job 7 would have been requeued, but was not touched")
    assert command in said[-1]


def test_a_job_is_named_once() -> None:
    named = replace(INCIDENT, summary="Job 7 hangs.")
    assert texts(slack.format_opened(named, "a"))[0] == "[a] CRITICAL: Job 7 hangs. Noticed after 60 s."
    other = replace(INCIDENT, summary="Job 77 hangs.")
    assert texts(slack.format_opened(other, "a"))[0].startswith("[a] CRITICAL: job 7: Job 77 hangs.")


def test_an_outcome_says_where_the_job_goes_on_or_that_it_needs_somebody() -> None:
    said = texts(slack.format_outcome(INCIDENT, RUN, "a"))
    assert said[0] == "[a] job 7 was restarted: runs on n2; it was down for 12 min"
    assert said[2] == "• requeue_hold: done, held"
    assert "Nodes to look at: n1" in said[-1]
    failed = replace(RUN, end=ActionEnd(ok=False, ended_at=1.0, detail="no checkpoint"))
    said = texts(slack.format_outcome(INCIDENT, failed, "a"))
    assert said[0] == "[a] job 7 NEEDS YOU, its restart failed: no checkpoint"
    assert "scontrol show job 7" in said[-1]


def test_a_resolved_incident_says_how_long_it_lasted() -> None:
    over = replace(INCIDENT, state=IncidentState.RESOLVED, resolved_at=7300.0, resolution="steps again")
    assert slack.format_resolved(over, "a")["text"] == "[a] over after 2 h 00 min: job 7: steps again"


# ------------------------------------------------------------------------------------------------- the webhook

SECRET = "T0SECRET/B0SECRET/xyzSECRETxyz"


class Receiver:
    """In the place of Slack: answers as told, 200 when nothing is left to say, and remembers."""

    def __init__(self, *answers: tuple[int, dict[str, str]]) -> None:
        self.answers = list(answers)
        self.got: list[dict[str, Any]] = []
        self.at: list[float] = []
        self.hang_s = 0.0

    async def handle(self, request: web.Request) -> web.Response:
        self.at.append(time.monotonic())
        self.got.append(await request.json())
        await asyncio.sleep(self.hang_s)
        status, headers = self.answers.pop(0) if self.answers else (200, {})
        return web.Response(
            status=status, headers=headers, text="ok" if status == 200 else f"no {request.path} {SECRET}"
        )

    @asynccontextmanager
    async def listening(self, directory: Path) -> AsyncIterator[Path]:
        """A file with the address of this receiver, while it listens."""
        app = web.Application()
        app.router.add_post(f"/services/{SECRET}", self.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        file = directory / "webhook"
        file.write_text(f"http://127.0.0.1:{port}/services/{SECRET}\n")
        try:
            yield file
        finally:
            await runner.cleanup()


def with_receiver(receiver: Receiver, tmp_path: Path, body: Callable[[Path], Awaitable[None]]) -> None:
    async def go() -> None:
        async with receiver.listening(tmp_path) as file:
            await body(file)

    asyncio.run(asyncio.wait_for(go(), 30))


def test_a_message_arrives_as_it_was_formatted(tmp_path: Path) -> None:
    receiver = Receiver()
    message = slack.format_opened(INCIDENT, "a")
    with_receiver(receiver, tmp_path, lambda file: slack.SlackWebhook(str(file), 5).send(message))
    assert receiver.got == [message]


@pytest.mark.parametrize(
    ("answer", "retry_after_s", "permanent"),
    [
        ((429, {"Retry-After": "7"}), 7.0, False),
        ((429, {"Retry-After": "soon"}), None, False),
        ((429, {}), None, False),
        ((500, {}), None, False),
        ((404, {}), None, False),
        ((400, {}), None, True),
    ],
)
def test_an_answer_that_is_no_ok_is_a_failure_without_the_address(
    answer: tuple[int, dict[str, str]],
    retry_after_s: float | None,
    permanent: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)

    async def send(file: Path) -> None:
        with pytest.raises(SendFailed) as caught:
            await slack.SlackWebhook(str(file), 5).send({"text": "x"})
        assert str(answer[0]) in caught.value.reason
        assert "xyzSECRETxyz" not in caught.value.reason
        assert (caught.value.retry_after_s, caught.value.permanent) == (retry_after_s, permanent)

    with_receiver(Receiver(answer), tmp_path, send)
    assert "xyzSECRETxyz" not in caplog.text


def test_silence_and_refusal_are_failures_within_the_deadline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    receiver = Receiver()
    receiver.hang_s = 20

    async def send(file: Path) -> None:
        start = time.monotonic()
        with pytest.raises(SendFailed, match=r"within 0\.3 s"):
            await slack.SlackWebhook(str(file), 0.3).send({"text": "x"})
        assert time.monotonic() - start < 2

    with_receiver(receiver, tmp_path, send)
    with pytest.raises(SendFailed, match="can't be reached") as caught:  # now nobody listens there
        asyncio.run(slack.SlackWebhook(str(tmp_path / "webhook"), 5).send({"text": "x"}))
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "url", ["", f"ftp://h/{SECRET}", f"http://hooks.example/{SECRET}", f"https:///{SECRET}", "https://["]
)
def test_an_address_that_is_none_is_not_shown(url: str, tmp_path: Path) -> None:
    (tmp_path / "webhook").write_text(url)
    with pytest.raises(SendFailed, match="webhook_url_file") as caught:
        asyncio.run(slack.SlackWebhook(str(tmp_path / "webhook"), 5).send({"text": "x"}))
    assert SECRET not in str(caught.value)
    with pytest.raises(SendFailed, match="can't be read"):
        asyncio.run(slack.SlackWebhook(str(tmp_path / "missing"), 5).send({"text": "x"}))


# ------------------------------------------------------------------------------------------------- the queue


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(f"sqlite:///{tmp_path}/journal.sqlite")


async def until_empty(journal: Journal, notifier: Notifier) -> None:
    task = asyncio.create_task(notifier.run())
    for _ in range(2000):
        if not journal.outbox_pending(1):
            break
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_messages_go_in_order_through_failures_and_apart(journal: Journal, tmp_path: Path) -> None:
    receiver = Receiver((200, {}), (500, {}), (429, {"Retry-After": "1"}), (500, {}))

    async def send(file: Path) -> None:
        sender = slack.SlackWebhook(str(file), 5)
        notifier = Notifier(journal, sender, "a", min_gap_s=0.2, poll_s=0.1, first_retry_s=0.05)
        notifier.opened(INCIDENT)
        notifier.decided(INCIDENT, DECISION)
        notifier.ended(INCIDENT, RUN)
        notifier.resolved(replace(INCIDENT, resolved_at=1.0))
        assert receiver.got == []  # nobody waited
        await until_empty(journal, notifier)

    with_receiver(receiver, tmp_path, send)
    heads = [message["text"].split("job 7")[0] for message in receiver.got]
    second = "[a] "
    assert heads == ["[a] CRITICAL: ", second, second, second, second, "[a] ", "[a] over after 0 s: "]
    gaps = [later - earlier for earlier, later in zip(receiver.at, receiver.at[1:], strict=False)]
    assert min(gaps) >= 0.19
    assert gaps[2] >= 0.99  # Retry-After


def test_what_was_not_sent_is_sent_after_a_restart(journal: Journal, tmp_path: Path) -> None:
    async def first() -> None:
        Notifier(journal, slack.SlackWebhook(str(tmp_path / "none"), 5), "a").opened(INCIDENT)

    asyncio.run(first())
    journal.close()
    again = Journal(f"sqlite:///{tmp_path}/journal.sqlite")
    receiver = Receiver()
    with_receiver(
        receiver,
        tmp_path,
        lambda file: until_empty(
            again, Notifier(again, slack.SlackWebhook(str(file), 5), "a", min_gap_s=0.01)
        ),
    )
    assert [message["text"] for message in receiver.got] == [slack.format_opened(INCIDENT, "a")["text"]]


class Refuser:
    """Never takes the messages that start with `bad`."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def send(self, message: dict[str, Any]) -> None:
        if message["text"].startswith("bad"):
            raise SendFailed("invalid", permanent=True)
        self.sent.append(message["text"])


def test_a_message_that_can_never_be_delivered_does_not_block_the_others(journal: Journal) -> None:
    sender = Refuser()

    async def go() -> None:
        for text in ("bad", "good"):
            journal.outbox_add("people", "i1", {"text": text}, 1000.0)
        journal.outbox_add("people", "i1", {"text": "of yesterday"}, 1000.0 - 90000.0)
        await until_empty(journal, Notifier(journal, sender, "a", min_gap_s=0.0, wall=lambda: 1000.0))

    asyncio.run(go())
    assert sender.sent == ["good"]


class BrokenOutbox:
    """An outbox on a disk that fails, the first time it is looked at."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        if name == "outbox_pending" and not self.failed:
            self.failed = True
            raise JournalError("the disk is full")
        return getattr(self.journal, name)


def test_an_outbox_that_fails_once_does_not_end_the_sending(journal: Journal) -> None:
    sender = Refuser()
    outbox = BrokenOutbox(journal)

    async def go() -> None:
        notifier = Notifier(outbox, sender, "a", min_gap_s=0.0, poll_s=0.02)
        notifier.opened(INCIDENT)
        await until_empty(journal, notifier)

    asyncio.run(go())
    assert outbox.failed
    assert len(sender.sent) == 1


def test_an_incident_that_another_explains_is_not_announced(journal: Journal) -> None:
    async def go() -> None:
        notifier = Notifier(journal, LogSender(), "a")
        notifier.opened(replace(INCIDENT, inhibited_by="i0"))
        notifier.resolved(replace(INCIDENT, inhibited_by="i0"))
        notifier.resolved(replace(INCIDENT, fired_at=None))

    asyncio.run(go())
    assert journal.outbox_pending(5) == []


def test_without_slack_the_messages_go_to_the_log(journal: Journal, caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        notifier = make_notifier(Config(cluster_name="alpha"), journal)
        notifier.opened(INCIDENT)
        await until_empty(journal, notifier)

    asyncio.run(go())
    assert "[alpha] CRITICAL: job 7: rank 3 waits alone." in caplog.text
