"""Messages say what matters and can't be turned into anything else; Slack is spoken to as it wants to be."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.config.notify import Slack
from slurm_watchdog.model.actions import RESTARTING, Action, Verdict
from slurm_watchdog.model.incidents import Culprit, GpuProcess
from slurm_watchdog.notify.notification import Caller, JobNote, Notice, Topic
from slurm_watchdog.notify.programs import SendFailed
from slurm_watchdog.notify.slack import SlackPoster
from slurm_watchdog.notify.slack_messages import Payload, card, reply, updated
from tests.builders.notices import CALLING, DECISION, FAILED, INCIDENT, LINKED, OVER, RUN, SITE, notice, replace
from tests.builders.slack_server import CHANNEL, SECRET, TOKEN, Answer, FakeSlack, marked, shown, too_long, with_slack

HOSTILE = [
    "<!channel> <@U123> @everyone",
    "</text> & <https://evil.example|click>",
    "a\nb\r\n\x1b[31mred\x00",
    "\u202egnp.exe",
    "&" * 5000,
    "*bold* `code` :skull:",
]
LINKS = "<https://w.example/?incident=i1|Incident> · <https://r.example/collective_hang?a=1&amp;b=2|Runbook>"
CAPTURE = Path(__file__).parents[2] / "captures" / "notices.txt"


def every_message(text: str) -> list[Payload]:
    """All kinds of messages with `text` wherever a user may have a hand in it."""
    incident = replace(
        INCIDENT, summary=text, facts=(text,) * 40, subject=text, job_ids=(), resolution=text, resolved_at=200.0,
        culprits=(Culprit(path=text, reason=text),) * 40,
    )  # fmt: skip
    run = replace(RUN, records=(replace(RUN.records[0], detail=text),) * 40, end=replace(RUN.end, detail=text))
    failed = replace(run, end=replace(RUN.end, ok=False, detail=text))
    jobs = (JobNote(job_id="7", user=text, partition=text, name=text),) * 8
    story = [
        Notice(topic=Topic.OPENED, at=1.0, incident=incident, jobs=jobs),
        Notice(topic=Topic.DIAGNOSED, at=1.0, incident=incident, said=(text,) * 20),
        Notice(topic=Topic.DECIDED, at=1.0, incident=incident, decision=replace(DECISION, reason=text, asked_by=text)),
        Notice(topic=Topic.ENDED, at=1.0, incident=incident, run=run),
        Notice(topic=Topic.ENDED, at=1.0, incident=incident, run=failed),
        Notice(topic=Topic.RESOLVED, at=1.0, incident=incident),
    ]  # fmt: skip
    return [
        *(card([each], LINKED) for each in story),
        card(story, CALLING),
        updated(story[:5], LINKED),
        reply(story, CALLING),
    ]


def check_harmless(message: Payload) -> None:
    assert len(message["blocks"]) <= 8
    for where, text in shown(message):
        if where == "context":
            assert text["text"] == LINKS
            continue
        if text["type"] == "mrkdwn":
            # Ids of the configuration, and nothing else.
            assert set(text["text"].split()) <= {"<@U0X>", "<@U0ANN>", "<!subteam^S0LARGE>", "<!here>"}
            continue
        assert text == {"type": "plain_text", "text": text["text"], "emoji": False}
        check_text(text["text"])
    check_text(message["text"])
    assert "\n" not in message["text"]
    assert message["link_names"] is False
    assert not too_long(message)


def check_text(text: str) -> None:
    assert 0 < len(text) <= 3000
    assert "<" not in text
    assert ">" not in text
    bare = text.replace("&amp;", "").replace("&lt;", "").replace("&gt;", "")
    assert "&" not in bare
    assert not set(text) & set("\x00\x1b\r\u202e")


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_users_stays_text(text: str) -> None:
    for message in every_message(text):
        check_harmless(message)
        json.dumps(message)


@given(st.text())
def test_any_text_stays_text(text: str) -> None:
    for message in every_message(text):
        check_harmless(message)


# ------------------------------------------------------------------------------------------------- words


PROCESS = GpuProcess(
    node="n1", boot_id="b", pid=4711, start_ticks=1, uid=7, user="eve", comm="python", job_id="6", minors=(0,)
)
END = RUN.end
assert END is not None
HANG = replace(
    INCIDENT, summary="Rank 3 (pid 41 on n1) of job 7 is stopped (SIGSTOP): 3 ranks wait.",
    culprits=(Culprit(node="n1", rank=3, gpu_uuid="GPU-5"), Culprit(node="n2")),
)  # fmt: skip
JOB = JobNote(job_id="7", user="ann", partition="large", name="llm", gpus=256)
GPU = "GPU 0 (GPU-77 (H100)) on n1 fell off the bus: Xid 79"
OBSERVED = replace(DECISION, verdict=Verdict.OBSERVED)
REQUEUE = replace(OBSERVED, action=Action.REQUEUE)
INSTEAD = {"requeue by hand": REQUEUE, "by hand": replace(REQUEUE, exclude=()), "observed": OBSERVED} | {
    action: replace(OBSERVED, action=action, exclude=()) for action in Action if action is not Action.END_PROCESS
}
STORIES: dict[str, list[Notice]] = {
    "opened": [notice()],
    "job named": [notice(incident=replace(INCIDENT, summary="Job 7 hangs."))],
    "another job named": [notice(incident=replace(INCIDENT, summary="Job 77 writes to /a.b/c and waits"))],
    "many jobs": [notice(incident=replace(INCIDENT, job_ids=tuple("1234567"), severity="warning"))],
    "no job": [notice(incident=replace(INCIDENT, job_ids=(), subject="node:n1", summary=GPU))],
    "who and where": [notice(incident=HANG, jobs=(JOB,))],
    "diagnosed": [notice(Topic.DIAGNOSED, said=("Rank 3 waits for its data loader.", "7 ranks: in all_reduce"))],
    "silenced": [notice(Topic.NOTED, said=("silenced by ann",))],
    "decided": [notice(Topic.DECIDED, decision=DECISION)],
    "decided, asked": [notice(Topic.DECIDED, decision=replace(DECISION, asked_by="ann", exclude=()))],
    "suppressed": [notice(Topic.DECIDED, decision=replace(DECISION, verdict=Verdict.SUPPRESSED, by="storm"))],
    "not yet": [notice(Topic.DECIDED, decision=replace(DECISION, verdict=Verdict.SUPPRESSED, by="blind"))],
    "alert only": [notice(Topic.DECIDED, decision=replace(DECISION, action=Action.NONE, fence=None))],
    "restarting": [notice(Topic.DECIDED, decision=replace(DECISION, action=Action.NONE, by=RESTARTING))],
    "process": [notice(Topic.DECIDED, decision=replace(OBSERVED, action=Action.END_PROCESS, process=PROCESS))],
    "ended": [notice(Topic.ENDED, run=RUN)],
    "needless": [notice(Topic.ENDED, run=replace(FAILED, end=replace(END, ok=False, needless=True)))],
    "failed": [notice(Topic.ENDED, run=FAILED)],
    "under run": [notice(Topic.DECIDED, decision=REQUEUE, caller=Caller.RUN)],
    "over": [notice(Topic.RESOLVED, incident=OVER, jobs=(JOB,))],
    "all": [
        notice(), notice(Topic.DECIDED, decision=DECISION), notice(Topic.ENDED, run=RUN),
        notice(Topic.RESOLVED, incident=replace(OVER, resolution=END.detail)),
    ],
} | {f"instead: {name}": [notice(Topic.DECIDED, decision=each)] for name, each in INSTEAD.items()}  # fmt: skip


def test_what_people_read_of_each_thing_that_happens() -> None:
    """In Slack, whole; `NOTICES=write pytest …` writes them."""
    told = []
    messages = {name: card(story, CALLING) for name, story in STORIES.items()}
    messages |= {
        f"updated: {name}": updated([notice(), *STORIES[name]], SITE)
        for name in ("decided", "suppressed", "ended", "failed")
    }
    for name, message in messages.items():
        told += [f"== {name}", message["text"], *(text["text"] for _, text in shown(message)), ""]
    if os.environ.get("NOTICES") == "write":
        CAPTURE.write_text("\n".join(told))
    assert "\n".join(told) == CAPTURE.read_text()


# ------------------------------------------------------------------------------------------------- mentions


@pytest.mark.parametrize(
    ("jobs", "called"),
    [
        ((JobNote(job_id="7", user="ann", partition="small"),), "<@U0ANN>"),
        ((JobNote(job_id="7", user="bob", partition="large"),), "<!subteam^S0LARGE>"),
        ((JobNote(job_id="7", user="ann", partition="large"),), "<@U0ANN>"),
        ((JobNote(job_id="7", user="bob", partition="small"),), "<!here>"),
        ((), "<!here>"),
    ],
)
def test_who_is_mentioned_depends_on_user_and_partition(jobs: tuple[JobNote, ...], called: str) -> None:
    message = card([notice(Topic.ENDED, run=FAILED, jobs=jobs)], CALLING)
    assert marked(message) == [called]
    assert called not in message["text"]


@pytest.mark.parametrize(
    ("each", "loud"),
    [
        (notice(Topic.OPENED), False),  # what is decided says whether a person is needed
        (notice(Topic.OPENED, incident=replace(INCIDENT, job_ids=())), True),
        (notice(Topic.DECIDED, decision=replace(DECISION, verdict=Verdict.SUPPRESSED)), True),
        (notice(Topic.DECIDED, decision=replace(DECISION, verdict=Verdict.OBSERVED)), True),
        (notice(Topic.DECIDED, decision=replace(DECISION, action=Action.NONE)), True),
        (notice(Topic.DECIDED, decision=replace(DECISION, verdict=Verdict.SUPPRESSED, by="busy")), False),
        (notice(Topic.OPENED, incident=replace(INCIDENT, severity="warning")), False),
        (notice(Topic.DECIDED, decision=DECISION), False),
        (notice(Topic.ENDED, run=RUN), False),
        (notice(Topic.ENDED, run=FAILED), True),
        (notice(Topic.RESOLVED, incident=OVER), False),
    ],
)
def test_only_what_needs_somebody_mentions_anybody(each: Notice, loud: bool) -> None:
    message = card([each], CALLING)
    assert bool(marked(message)) is loud
    assert not marked(card([each], SITE))


# ------------------------------------------------------------------------------------------------- the webhook


def test_a_message_arrives_as_it_was_formatted(tmp_path: Path) -> None:
    message = card([notice()], SITE)

    async def send(slack: FakeSlack) -> None:
        assert await SlackPoster(slack.hook(tmp_path)).post(message) is None
        assert slack.calls == [("webhook", message)]

    with_slack(FakeSlack(), send)


FAILURES: list[tuple[Answer, float | None, bool]] = [
    (Answer(429, headers={"Retry-After": "7"}), 7.0, False),
    (Answer(429, headers={"Retry-After": "soon"}), None, False),
    (Answer(429), None, False),
    (Answer(500), None, False),
    (Answer(503, body="<html>down for maintenance</html>"), None, False),
    (Answer(404), None, False),
    (Answer(400), None, True),
]


@pytest.mark.parametrize(("answer", "retry_after_s", "permanent"), FAILURES)
def test_an_answer_that_is_no_ok_is_a_failure_without_the_address(
    answer: Answer, retry_after_s: float | None, permanent: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG)

    async def send(slack: FakeSlack) -> None:
        with pytest.raises(SendFailed) as caught:
            await SlackPoster(slack.hook(tmp_path)).post({"text": "x"})
        assert str(answer.status) in caught.value.reason
        assert "xyzSECRETxyz" not in caught.value.reason
        assert (caught.value.retry_after_s, caught.value.permanent) == (retry_after_s, permanent)

    with_slack(FakeSlack(answer), send)
    assert "xyzSECRETxyz" not in caplog.text


def test_silence_and_refusal_are_failures_within_the_deadline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def send(slack: FakeSlack) -> None:
        hook = slack.hook(tmp_path)
        start = time.monotonic()
        with pytest.raises(SendFailed, match=r"within 0\.3 s"):
            await SlackPoster(hook, 0.3).post({"text": "x"})
        assert time.monotonic() - start < 10  # and not the 20 s that the server takes
        with pytest.raises(SendFailed, match="cannot be reached"):
            await SlackPoster(hook).post({"text": "x"})

    with_slack(FakeSlack(Answer(hang_s=20), Answer(cut=True)), send)

    async def nobody_listens(slack: FakeSlack) -> None:
        (tmp_path / "gone").write_text(f"http://127.0.0.1:1/services/{SECRET}")
        with pytest.raises(SendFailed, match="cannot be reached") as caught:
            await SlackPoster(Slack(webhook_url_file=str(tmp_path / "gone"))).post({"text": "x"})
        assert SECRET not in str(caught.value)
        assert caught.value.__suppress_context__

    with_slack(FakeSlack(), nobody_listens)
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "url", ["", f"ftp://h/{SECRET}", f"http://hooks.example/{SECRET}", f"https:///{SECRET}", "https://["]
)
def test_an_address_that_is_none_is_not_shown(url: str, tmp_path: Path) -> None:
    (tmp_path / "webhook").write_text(url)

    async def send(slack: FakeSlack) -> None:
        with pytest.raises(SendFailed, match="webhook_url_file") as caught:
            await SlackPoster(Slack(webhook_url_file=str(tmp_path / "webhook"))).post({"text": "x"})
        assert SECRET not in str(caught.value)
        with pytest.raises(SendFailed, match="cannot be read"):
            await SlackPoster(Slack(webhook_url_file=str(tmp_path / "missing"))).post({"text": "x"})

    with_slack(FakeSlack(), send)


# ------------------------------------------------------------------------------------------------- the bot


def test_a_bot_opens_a_thread_answers_in_it_and_changes_its_first_message(tmp_path: Path) -> None:
    message = card([notice()], SITE)

    async def send(slack: FakeSlack) -> None:
        poster = SlackPoster(slack.bot(tmp_path))
        thread = await poster.post(message)
        assert thread == f"{CHANNEL}/1700000000.000000"
        assert await poster.post(reply([notice(Topic.ENDED, run=FAILED)], SITE), thread, loud=True) == thread
        (first,) = slack.in_channel()
        (answer,) = slack.below(first)
        assert answer["reply_broadcast"] is True
        assert first["blocks"] == message["blocks"]
        await poster.revise(thread, card([notice(Topic.RESOLVED, incident=OVER)], SITE))
        assert slack.in_channel()[0]["text"].endswith("job 7 (over)")

    with_slack(FakeSlack(), send)


def test_where_the_first_message_was_removed_the_next_one_stands_by_itself(tmp_path: Path) -> None:
    async def send(slack: FakeSlack) -> None:
        poster = SlackPoster(slack.bot(tmp_path))
        gone = f"{CHANNEL}/1600000000.000000"
        await poster.post(reply([notice(Topic.DECIDED, decision=DECISION)], SITE), gone)
        assert len(slack.in_channel()) == 1
        await poster.revise(gone, card([notice(Topic.RESOLVED, incident=OVER)], SITE))

    with_slack(FakeSlack(), send)


BOT_FAILURES: list[tuple[Answer, float | None, bool]] = [
    (Answer(429, "ratelimited", {"Retry-After": "30"}), 30.0, False),
    (Answer(200, "ratelimited"), None, False),
    (Answer(200, "invalid_blocks"), None, True),
    (Answer(200, "msg_blocks_too_long"), None, True),
    (Answer(200, "not_in_channel"), None, False),
    (Answer(200, "token_revoked"), None, False),
    (Answer(200, "internal_error"), None, False),
    (Answer(200, f"odd {TOKEN}"), None, False),
    (Answer(500), None, False),
    (Answer(502, body="<html>bad gateway</html>"), None, False),
    (Answer(200, body="not what was asked for"), None, False),
]


@pytest.mark.parametrize(("answer", "retry_after_s", "permanent"), BOT_FAILURES)
def test_slack_refusal_is_retried_unless_the_message_itself_is_wrong(
    answer: Answer, retry_after_s: float | None, permanent: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG)

    async def send(slack: FakeSlack) -> None:
        with pytest.raises(SendFailed) as caught:
            await SlackPoster(slack.bot(tmp_path)).post(card([notice()], SITE))
        assert TOKEN not in caught.value.reason
        assert (caught.value.retry_after_s, caught.value.permanent) == (retry_after_s, permanent)

    with_slack(FakeSlack(answer), send)
    assert TOKEN not in caplog.text


def test_a_bot_that_gets_no_answer_or_has_no_token_fails_within_its_deadline(tmp_path: Path) -> None:
    async def send(slack: FakeSlack) -> None:
        message = card([notice()], SITE)
        with pytest.raises(SendFailed, match=r"within 0\.3 s"):
            await SlackPoster(slack.bot(tmp_path), 0.3).post(message)
        with pytest.raises(SendFailed, match="cannot be reached"):
            await SlackPoster(slack.bot(tmp_path)).post(message)
        with pytest.raises(SendFailed, match="channel_not_found"):
            await SlackPoster(slack.bot(tmp_path, "C0OTHER")).post(message)
        broken = slack.bot(tmp_path)
        (tmp_path / "slack-token").write_text("xoxb\nsecond line")
        with pytest.raises(SendFailed, match="token_file") as caught:
            await SlackPoster(broken).post(message)
        assert "xoxb" not in str(caught.value)
        with pytest.raises(SendFailed, match="cannot be read"):
            await SlackPoster(Slack(token_file=str(tmp_path / "none"), channel=CHANNEL)).post(message)

    with_slack(FakeSlack(Answer(hang_s=20), Answer(cut=True)), send)
