"""Messages on their way: in order, few, together where they are many, and none lost that is not too old.
Hours take no time here."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from ClusterShell.NodeSet import NodeSet
from ClusterShell.RangeSet import RangeSet

from slurm_watchdog.base.text import fold
from slurm_watchdog.config.notify import Slack
from slurm_watchdog.config.schema import Config
from slurm_watchdog.journal.journal import Journal, JournalError
from slurm_watchdog.model.actions import Verdict
from slurm_watchdog.model.documents import Delivery
from slurm_watchdog.model.incidents import IncidentKind, IncidentState, Severity
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.notify.dispatcher import IncidentSources, Notifier, make_notifier
from slurm_watchdog.notify.programs import SendFailed
from slurm_watchdog.notify.slack import MessageRate, SlackChannel, SlackPoster
from slurm_watchdog.notify.slack_messages import Payload
from tests.builders.notices import (
    CALLING,
    DECISION,
    FAILED,
    INCIDENT,
    OVER,
    RUN,
    SITE,
    Ticking,
    incident,
    open_journal,
    replace,
)
from tests.builders.slack_server import FakeSlack, shown, too_long, with_slack


@pytest.fixture
def journal() -> Journal:
    """In memory: nobody dies in most of these tests."""
    return Journal("sqlite://")


class Wall:
    """In the place of Slack: fails as told, else keeps (when, message, thread)."""

    def __init__(self, *failures: SendFailed, threads: bool = False) -> None:
        self.failures: list[SendFailed | None] = list(failures)
        self.threads = threads
        self.posts: list[tuple[float, Payload, str | None]] = []
        self.tries: list[float] = []
        self.now = lambda: 0.0

    async def post(self, message: Payload, thread: str | None = None, *, loud: bool = False) -> str | None:
        self.tries.append(self.now())
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        assert not too_long(message)
        self.posts.append((self.now(), message, thread))
        return (thread or f"C/{len(self.posts)}") if self.threads else None

    async def revise(self, thread: str, message: Payload) -> None:
        self.posts.append((self.now(), message, f"revised {thread}"))

    def texts(self) -> list[str]:
        return [message["text"] for _, message, _ in self.posts]

    def everything(self) -> str:
        return "\n".join(text["text"] for _, message, _ in self.posts for _, text in shown(message))


def ticking(journal: Journal, wall: Wall, **changes: Any) -> Ticking:
    pulses, site = changes.pop("pulses", tuple), changes.pop("site", SITE)
    found = Ticking(journal, [SlackChannel(wall, site, Slack(**changes), pulses)])
    wall.now = lambda: found.now
    return found


def most_in_a_minute(times: list[float]) -> int:
    return max((sum(1 for other in times if at <= other < at + 60.0) for at in times), default=0)


# ------------------------------------------------------------------------------------------------- the story of one


def test_slack_without_threads_is_two_messages_an_incident(journal: Journal) -> None:
    wall = Wall()

    async def go() -> None:
        told = ticking(journal, wall, site=CALLING)
        told.notifier.opened(INCIDENT)
        await told.run_until(told.now + 5.0)
        assert wall.posts == []  # what is decided is in the same message
        told.notifier.decided(INCIDENT, DECISION)
        await told.run_until_empty()
        told.notifier.diagnosed(INCIDENT, ["Rank 3 waits for its data loader."])
        await told.run_until_empty()
        told.notifier.ended(INCIDENT, RUN)
        await told.run_until(told.now + 5.0)
        told.notifier.resolved(OVER)
        await told.run_until_empty()

    asyncio.run(go())
    assert wall.texts() == [f"[a] Rank 3 on n1 waits alone, job 7 ({done})" for done in ("restarting", "over")]
    assert "job 7 was restarted: runs on n2" in wall.everything()
    assert "<!here>" not in wall.everything()  # nobody is called for what mends itself


def test_slack_without_threads_waits_for_no_decision_for_long_and_calls_a_person_once_more(journal: Journal) -> None:
    wall = Wall()

    async def go() -> None:
        told = ticking(journal, wall, site=CALLING)
        told.notifier.opened(INCIDENT)
        told.notifier.opened(replace(INCIDENT, id="i8", job_ids=()))  # nothing is decided about it
        await told.run_until(told.now + 3.0)
        assert len(wall.posts) == 1
        await told.run_until(told.now + 17.0)
        assert wall.texts()[1] == "[a] Rank 3 on n1 waits alone, job 7"
        told.notifier.decided(INCIDENT, replace(DECISION, verdict=Verdict.SUPPRESSED, by="budget"))
        await told.run_until_empty()

    asyncio.run(go())
    assert wall.texts()[2:] == ["[a] Rank 3 on n1 waits alone, job 7 (needs a person)"]
    assert wall.everything().count("<!here>") == 2


def test_a_bot_tells_one_incident_in_one_thread_and_strikes_its_first_message_when_it_is_over(
    journal: Journal, tmp_path: Path
) -> None:
    async def go(slack: FakeSlack) -> None:
        told = Ticking(journal, [SlackChannel(SlackPoster(slack.bot(tmp_path)), SITE, Slack())])
        told.notifier.opened(INCIDENT)
        told.notifier.decided(INCIDENT, DECISION)
        await told.run_until_empty()
        told.notifier.diagnosed(INCIDENT, ["Rank 3 waits for its data loader.", "7 ranks: in all_reduce"])
        await told.run_until_empty()
        told.notifier.ended(INCIDENT, FAILED)
        await told.run_until_empty()
        (first,) = slack.in_channel()
        assert first["text"] == "[a] Rank 3 on n1 waits alone, job 7 (needs a person)"
        assert "the only one in forward" in json.dumps(first)
        diagnosis, outcome = slack.below(first)
        assert "evidence: Rank 3 waits for its data loader." in json.dumps(diagnosis)
        assert "NEEDS YOU" in json.dumps(outcome)
        assert (diagnosis["reply_broadcast"], outcome["reply_broadcast"]) == (False, True)
        told.notifier.resolved(OVER)
        await told.run_until_empty()
        assert len(slack.below(first)) == 2  # that it is over stands in the first message, and nowhere else
        assert slack.in_channel()[0]["text"] == "[a] Rank 3 on n1 waits alone, job 7 (over)"

    with_slack(FakeSlack(), go)


def test_slack_thread_continues_after_a_restart_of_the_controller(tmp_path: Path) -> None:
    wall, journal = Wall(threads=True), open_journal(tmp_path)

    async def before() -> None:
        told = ticking(journal, wall)
        told.notifier.opened(INCIDENT)
        await told.run_until_empty()
        told.notifier.ended(INCIDENT, RUN)

    asyncio.run(before())
    journal.close()

    async def after() -> None:
        await ticking(open_journal(tmp_path), wall).run_until_empty()

    asyncio.run(after())
    assert [thread for _, _, thread in wall.posts] == [None, "C/1", "revised C/1"]
    assert wall.texts()[-2:] == [f"{start}Rank 3 on n1 waits alone, job 7 (restarted)" for start in ("", "[a] ")]


def test_an_incident_that_another_explains_is_not_announced(journal: Journal) -> None:
    async def go() -> None:
        told = ticking(journal, Wall())
        told.notifier.opened(replace(INCIDENT, inhibited_by="i0"))
        told.notifier.resolved(replace(INCIDENT, inhibited_by="i0"))
        told.notifier.resolved(replace(INCIDENT, fired_at=None))

    asyncio.run(go())
    assert journal.outbox.pending(5) == []


CAUSE = replace(
    INCIDENT, id="i9", kind=IncidentKind.FILESYSTEM_OUTAGE, subject="mount:/shared", summary="/shared does not answer."
)


def test_a_cause_takes_over_the_message_of_what_it_explains_and_closes_it(journal: Journal) -> None:
    wall = Wall(threads=True)

    async def go() -> None:
        told = ticking(journal, wall)
        told.notifier.opened(INCIDENT)
        await told.run_until_empty()
        told.notifier.explained(replace(INCIDENT, inhibited_by="i9"), CAUSE)
        told.notifier.opened(CAUSE)
        await told.run_until_empty()
        told.notifier.resolved(
            replace(CAUSE, state=IncidentState.RESOLVED, resolved_at=told.now, resolution="it answers")
        )
        await told.run_until_empty()

    asyncio.run(go())
    assert [thread for _, _, thread in wall.posts].count(None) == 1, "one fault, one message in the channel"
    revisions = [message["text"] for _, message, thread in wall.posts if (thread or "").startswith("revised C/1")]
    assert any(text == "[a] Rank 3 on n1: /shared does not answer, job 7" for text in revisions)
    assert revisions[-1].endswith("(over)")


@pytest.mark.parametrize("guard", ["blind", "evidence", "busy"])
def test_that_a_transient_guard_holds_for_a_moment_is_not_sent(journal: Journal, guard: str) -> None:
    notifier = ticking(journal, Wall()).notifier
    notifier.decided(INCIDENT, replace(DECISION, verdict=Verdict.SUPPRESSED, by=guard))
    assert journal.outbox.pending(5) == []
    notifier.decided(INCIDENT, DECISION)
    assert len(journal.outbox.pending(5)) == 1


def test_a_channel_that_fails_says_since_when_and_what_waits_until_a_message_gets_through(journal: Journal) -> None:
    wall = Wall(*[SendFailed("HTTP 500")] * 3)
    counted: dict[str, int] = {}

    def count(channel: str, outcome: str, number: int) -> None:
        counted[f"{channel} {outcome}"] = counted.get(f"{channel} {outcome}", 0) + number

    async def go() -> None:
        told = ticking(journal, wall)
        (worker,) = told.workers
        told.notifier.attach(IncidentSources(count=count))
        assert worker.delivery() == Delivery(channel="slack")
        told.notifier.opened(INCIDENT)
        told.now += 30.0
        await worker.send_next()
        told.now += 1.0
        failing = worker.delivery()
        assert (failing.failing_s, failing.error) == (1.0, "HTTP 500")
        await told.run_until_empty()
        assert worker.delivery().failing_s is None

    asyncio.run(go())
    assert counted == {"slack failed": 3, "slack sent": 1, "slack dropped": 0}


def test_whose_job_it_is_stands_in_the_message(journal: Journal) -> None:
    wall = Wall()

    async def go() -> None:
        told = ticking(journal, wall, site=CALLING)
        job = SlurmJob(job_id="7", state="RUNNING", user="ann", partition="large", name="gpt")
        told.notifier.attach(IncidentSources(job_of={"7": job}.get))
        told.notifier.opened(INCIDENT)
        told.notifier.decided(INCIDENT, replace(DECISION, verdict=Verdict.OBSERVED))
        await told.run_until_empty()

    asyncio.run(go())
    assert "<@U0ANN>" in wall.everything()


# ------------------------------------------------------------------------------------------------- failures


def test_messages_go_in_order_through_failures_and_wait_as_long_as_slack_asks(journal: Journal) -> None:
    wall = Wall()
    wall.failures = [None, SendFailed("500"), SendFailed("429", retry_after_s=30.0), SendFailed("500"), None]

    async def go() -> None:
        told = ticking(journal, wall, messages_per_minute=50)
        for number in range(3):
            told.notifier.opened(incident(number))
        await told.run_until_empty()

    asyncio.run(go())
    assert [re.search(r"job (\d)", text)[1] for text in wall.texts()] == ["0", "1", "2"]  # type: ignore[index]
    gaps = [later - earlier for earlier, later in zip(wall.tries, wall.tries[1:], strict=False)]
    assert min(gaps) >= 1.0
    assert gaps[2] >= 30.0  # Retry-After
    assert gaps[3] >= 8.0  # the third failure of the same message


def test_outbox_rows_of_an_earlier_controller_are_sent_after_a_restart(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)

    async def before() -> None:
        told = ticking(journal, Wall(*[SendFailed("away")] * 100))
        told.notifier.opened(INCIDENT)
        await told.run_until(told.now + 100.0)

    asyncio.run(before())
    journal.close()
    wall = Wall()

    async def after() -> None:
        await ticking(open_journal(tmp_path), wall).run_until_empty()

    asyncio.run(after())
    assert len(wall.posts) == 1


def test_a_message_that_can_never_be_delivered_does_not_block_the_others(journal: Journal) -> None:
    wall = Wall(SendFailed("invalid", permanent=True))

    async def go() -> None:
        told = ticking(journal, wall)
        told.notifier.opened(incident(1))
        told.notifier.opened(incident(2))
        journal.outbox.add("slack", "i3", {"of": "another release"}, told.now)
        await told.run_until_empty()

    asyncio.run(go())
    assert len(wall.posts) == 1
    assert "job 2" in wall.texts()[0]


def test_messages_older_than_a_day_are_dropped(journal: Journal) -> None:
    wall = Wall()

    async def go() -> None:
        told = ticking(journal, wall)
        told.notifier.opened(incident(1))
        told.now += 90_000.0
        told.notifier.opened(incident(2))
        await told.run_until_empty()

    asyncio.run(go())
    assert ["job 2" in text for text in wall.texts()] == [True]


def test_a_clock_that_was_set_back_holds_nothing_up_for_long(journal: Journal) -> None:
    wall = Wall(SendFailed("no", retry_after_s=3000.0), threads=True)

    async def go() -> None:
        told = ticking(journal, wall)
        told.notifier.opened(incident(1))
        await told.run_until(told.now + 1.0)
        told.now -= 86_400.0
        await told.run_until_empty(60.0)

    asyncio.run(go())
    assert len(wall.posts) == 1


class BrokenOutbox:
    """An outbox on a disk that fails, the first time it is looked at."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        if name == "pending" and not self.failed:
            self.failed = True
            raise JournalError("the disk is full")
        return getattr(self.journal, name)


def test_an_outbox_that_fails_once_does_not_end_the_sending(journal: Journal) -> None:
    wall, outbox = Wall(), BrokenOutbox(journal.outbox)

    async def go() -> None:
        notifier = Notifier(outbox, [SlackChannel(wall, SITE, Slack())], poll_s=0.02)
        notifier.opened(INCIDENT)
        await until_empty(journal, notifier)

    asyncio.run(go())
    assert outbox.failed
    assert len(wall.posts) == 1


async def until_empty(journal: Journal, notifier: Notifier) -> None:
    task = asyncio.create_task(notifier.run())
    for _ in range(2000):
        if not journal.outbox.pending(1):
            break
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not journal.outbox.pending(1)


def test_without_a_receiver_nothing_waits_for_one(journal: Journal) -> None:
    """The controller's log has what fires, what is decided, how it ends."""
    make_notifier(Config(cluster_name="alpha"), journal.outbox).opened(INCIDENT)
    assert journal.outbox.waiting_channels() == []


class Silent(Wall):
    """A Slack that takes a message and never answers."""

    async def post(self, message: Payload, thread: str | None = None, *, loud: bool = False) -> str | None:
        await asyncio.Event().wait()
        return None


def test_a_slack_that_never_answers_keeps_nobody_from_working(journal: Journal) -> None:
    """The tick and the ladder live in the same loop: while 5,000 incidents are told to nobody they have turn
    after turn."""
    turns = 0

    async def act() -> None:
        nonlocal turns
        while turns < 1000:
            turns += 1
            await asyncio.sleep(0)

    async def go() -> None:
        notifier = ticking(journal, Silent()).notifier
        task = asyncio.create_task(notifier.run())
        with journal.together():
            for number in range(500):
                notifier.opened(incident(number))
        await act()
        notifier.opened(incident(9999))
        assert not task.done()
        task.cancel()

    asyncio.run(go())
    assert turns == 1000
    # All are kept: as they came, or in the digest that is on its way.
    assert journal.outbox.pending(1)


def test_the_pace_forgets_what_is_a_minute_old_and_what_a_clock_left_in_the_future() -> None:
    pace = MessageRate(5)
    for at in (100.0, 102.0, 104.0, 106.0, 108.0):
        assert pace.wait_s(at) == 0.0
        pace.count_message(at)
    assert (pace.free(109.0), round(pace.wait_s(109.0))) == (0, 51)
    assert (pace.free(160.5), pace.wait_s(160.5)) == (1, 0.0)
    assert (pace.free(50.0), pace.wait_s(50.0)) == (5, 0.0)  # the clock was set back
    pace.count_message(50.0)
    assert pace.wait_s(50.5) == 0.5  # a second between two


# ------------------------------------------------------------------------------------------------- many


def folded_numbers(text: str) -> list[int]:
    """Every number that is named in ranges, with ClusterShell as the other opinion."""
    found: list[int] = []
    for line in re.findall(r"×[^:\n]*: ([\d, …-]+)", text) + re.findall(r"^• … ([\d, -]+)", text, re.MULTILINE):
        found.extend(int(n) for n in RangeSet(line.replace(" ", "").replace("…", "").strip(",")))
    return found


@pytest.mark.parametrize(("threads", "scattered", "in_a_row"), [(True, 4000, 1000), (False, 100, 200)])
def test_five_thousand_incidents_at_once_are_a_few_messages_and_each_is_in_them(
    journal: Journal, threads: bool, scattered: int, in_a_row: int
) -> None:
    wall = Wall(threads=threads)
    numbers = [1000 + 7 * n for n in range(scattered)] + [40_000 + n for n in range(in_a_row)]

    async def go() -> None:
        told = ticking(journal, wall)
        with journal.together():
            for number in numbers:
                one = incident(number)
                told.notifier.opened(one)
                held = replace(DECISION, verdict=Verdict.SUPPRESSED, by="storm")
                told.notifier.decided(one, held)
        await told.run_until_empty()
        with journal.together():
            for number in numbers:
                told.notifier.resolved(incident(number, resolved_at=told.now, resolution="steps again"))
        await told.run_until_empty()

    asyncio.run(go())
    times = [at for at, _, _ in wall.posts]
    assert most_in_a_minute(times) <= 5
    said = wall.everything()
    assert re.search(
        r"^\[a\] [\d,]+ incidents: [\d,]+ CRITICAL collective_hang, [\d,]+ graceful_restart suppressed", said
    )
    # Opened and over: what one message does not take is in the next.
    assert sorted(folded_numbers(said)) == sorted(numbers * 2)
    assert len(wall.posts) < 30


def test_lasting_storm_is_one_digest_a_minute_with_its_failures(journal: Journal) -> None:
    wall = Wall()
    numbers = list(range(1, 601))

    async def go() -> None:
        told = ticking(journal, wall, site=CALLING)
        for number in numbers:  # two a second, for five minutes
            told.notifier.opened(incident(number))
            if number == 300:
                told.notifier.ended(incident(number), FAILED)
            await told.run_until(told.now + 0.5)
        await told.run_until_empty()

    asyncio.run(go())
    assert most_in_a_minute([at for at, _, _ in wall.posts]) <= 5
    assert len(wall.posts) <= 16
    singles = [int(n) for text in wall.texts() for n in re.findall(r"^\[a\] Rank 3 on n1 waits alone, job (\d+)", text)]
    few = [
        int(n) for n in re.findall(r"^• CRITICAL: Rank 3 on n1 waits alone, job (\d+)", wall.everything(), re.MULTILINE)
    ]
    assert sorted(singles + few + folded_numbers(wall.everything())) == numbers
    assert "job 7 NEEDS YOU, its restart failed: no checkpoint" in wall.everything()
    assert "<!here>" in wall.everything()


def test_incidents_of_all_kinds_and_names_are_in_the_digest(journal: Journal) -> None:
    wall = Wall()
    nodes = [f"gpu{number:04d}" for number in range(0, 900, 3)]

    async def go() -> None:
        told = ticking(journal, wall)
        for node in nodes:
            told.notifier.opened(
                replace(INCIDENT, id=node, kind=IncidentKind.AGENT_SILENT, severity=Severity.WARNING, job_ids=(), subject=f"node:{node}")
            )  # fmt: skip
        for name in ("mount:/scratch <x>", "mount:/home"):
            told.notifier.opened(replace(INCIDENT, id=name, kind=IncidentKind.FILESYSTEM_OUTAGE, job_ids=(), subject=name))  # fmt: skip
        await told.run_until_empty()

    asyncio.run(go())
    said = wall.everything()
    assert wall.texts()[0] == "[a] 302 incidents: 2 CRITICAL filesystem_outage, 300 warning agent_silent"
    assert said.index("CRITICAL: Rank 3 on n1 waits alone") < said.index(
        "warning agent_silent × 300"
    )  # the worst first
    named = NodeSet()
    for part in re.findall(r"node:(gpu\[[\d,-]+\])", said):
        named.update(part)
    assert sorted(named) == nodes


def test_a_few_incidents_keep_their_sentences(journal: Journal) -> None:
    wall = Wall()

    async def go() -> None:
        told = ticking(journal, wall)
        for number in range(8):
            told.notifier.opened(incident(number))
        await told.run_until_empty()

    asyncio.run(go())
    assert len(wall.posts) == 1
    for number in range(8):
        assert f"CRITICAL: Rank 3 on n1 waits alone, job {number}" in wall.everything()


def test_the_newest_news_of_a_slack_that_was_away_are_told_together(journal: Journal) -> None:
    wall = Wall(*[SendFailed("away")] * 8)

    async def go() -> None:
        told = ticking(journal, wall)
        for number in range(100):
            told.notifier.opened(incident(number))
            await told.run_until(told.now + 10.0)
        await told.run_until_empty()

    asyncio.run(go())
    assert not wall.failures
    assert most_in_a_minute(wall.tries) <= 5
    named = folded_numbers(wall.everything()) + [
        int(n)
        for n in re.findall(
            r"^(?:• CRITICAL: |\W+)Rank 3 on n1 waits alone, job (\d+)", wall.everything(), re.MULTILINE
        )
    ]
    assert sorted(named) == list(range(100))


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], []),
        (["n1", "n2", "n3", "n7"], ["n[1-3,7]"]),
        (["n01", "n02", "n10", "n9"], ["n[01-02]", "n[9-10]"]),
        (["4711", "4712", "12_1", "12_2", "9"], ["9", "4711-4712", "12_[1-2]"]),
        (["login", "a1b", "n1"], ["n1", "a1b", "login"]),
        (["n5", "n5"], ["n5"]),
    ],
)
def test_names_are_folded_into_ranges_and_none_is_lost(names: list[str], folded: list[str]) -> None:
    found = fold(names)
    assert sorted(found) == sorted(folded) or NodeSet(",".join(found)) == NodeSet(",".join(names))


# ------------------------------------------------------------------------------------------------- the pulse


def test_a_pulse_comes_once_an_hour_with_a_line_for_each_job_and_is_not_repeated_after_a_restart(
    journal: Journal,
) -> None:
    wall = Wall(SendFailed("away"))

    async def go() -> None:
        for _ in range(2):
            said = ["3 jobs running, 1 waiting", "job 7 runs", "job 10 (of bob <!here>) waits"]
            told = ticking(journal, wall, pulse=3600.0, pulses=lambda said=said: said)
            told.now = 3600.0 * 1000 + 10.0
            await told.run_until(told.now + 3500.0)
        assert wall.tries == []
        await told.run_until(told.now + 3000.0)  # it is sent again when Slack was away

    asyncio.run(go())
    assert [round(at - 3600.0 * 1001, -1) for at in wall.tries] == [0, 0]
    assert wall.everything().splitlines() == [
        "[a] 3 jobs running, 1 waiting", "• job 7 runs", "• job 10 (of bob &lt;!here&gt;) waits",
        "All jobs: slurm-watchdog status",
    ]  # fmt: skip


def test_a_thousand_jobs_are_one_message_that_slack_takes(journal: Journal) -> None:
    wall = Wall()
    told = ticking(journal, wall, pulse=60.0, pulses=lambda: ["1,000 jobs running", *["x" * 300] * 1000])
    asyncio.run(told.run_until(told.now + 65.0))
    assert "1,000 jobs running" in wall.texts()[0]
    assert re.search(r"9\d\d lines left out. All jobs: slurm-watchdog status", wall.everything())


def test_what_waits_for_a_receiver_that_left_is_dropped_in_writing(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        journal.outbox.add("to-oncall", f"i{number}", {"topic": "opened"}, 1e6)
    journal.outbox.add("slack", "i1", {"topic": "opened"}, 1e6)
    ticking(journal, Wall()).notifier.tidy()
    assert journal.outbox.waiting_channels() == ["slack"]
    assert "3 messages to to-oncall are dropped" in caplog.text


def test_a_slack_that_asks_for_an_hour_of_silence_hears_nothing_not_even_a_pulse(journal: Journal) -> None:
    wall = Wall(SendFailed("429", retry_after_s=3600.0))
    told = ticking(journal, wall, pulse=60.0, pulses=lambda: ["1 job running"])
    began = told.now

    async def go() -> None:
        await told.run_until(began + 3000.0)
        told.notifier.opened(INCIDENT)
        await told.run_until(began + 3900.0)

    asyncio.run(go())
    assert len(wall.posts) > 1
    assert wall.tries[1] >= wall.tries[0] + 3600.0


class Killed(BaseException):
    """kill -9."""


class Deadly(Wall):
    """A Slack in whose face the controller is killed at a given message, before it is there or after."""

    def __init__(self, at: int, *, taken: bool, threads: bool) -> None:
        super().__init__(threads=threads)
        self.at, self.taken = at, taken

    async def post(self, message: Payload, thread: str | None = None, *, loud: bool = False) -> str | None:
        last = sum(1 for _, _, name in self.posts if "revised" not in str(name)) == self.at
        if last and not self.taken:
            raise Killed
        name = await super().post(message, thread, loud=loud)
        if last:
            raise Killed
        return name


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("taken", [True, False])
def test_a_controller_that_is_killed_while_it_sends_loses_nothing_and_repeats_one_message_at_most(
    tmp_path: Path, taken: bool, threads: bool
) -> None:
    def put_up(told: Ticking) -> None:
        for number in range(3):
            one = incident(number, summary=f"story {number}.")
            told.notifier.opened(one)
            told.notifier.decided(one, DECISION)
            told.notifier.resolved(replace(one, resolved_at=1.0, resolution=f"end {number}"))

    async def until_it_dies(told: Ticking) -> None:
        put_up(told)
        await told.run_until_empty()

    whole = Wall(threads=threads)
    (tmp_path / "whole").mkdir()
    asyncio.run(until_it_dies(ticking(open_journal(tmp_path / "whole"), whole)))
    for at in range(sum(1 for _, _, thread in whole.posts if "revised" not in str(thread))):
        directory = tmp_path / str(at)
        directory.mkdir()
        wall = Deadly(at, taken=taken, threads=threads)
        journal = open_journal(directory)
        with pytest.raises(Killed):
            asyncio.run(until_it_dies(ticking(journal, wall)))
        journal.close()
        wall.at = -1
        again = ticking(open_journal(directory), wall)
        again.now += 500.0
        asyncio.run(again.run_until_empty())
        said = " ".join(wall.texts()) + wall.everything()
        assert all(f"story {number}" in said and f"end {number}" in said for number in range(3))
        assert len(wall.posts) <= len(whole.posts) + 2
