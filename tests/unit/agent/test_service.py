"""A tick of the daemon: which failures leave it whole, and which make it blind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as replace_field
from pathlib import Path

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.agent import Agent
from slurm_watchdog.agent.collectors.collector import Collector
from slurm_watchdog.agent.collectors.registry import COLLECTORS
from slurm_watchdog.agent.courier.streams import TcpController
from slurm_watchdog.agent.delivery.sender import Sender
from slurm_watchdog.agent.delivery.spool import Spool
from slurm_watchdog.agent.metrics import AgentMetrics
from slurm_watchdog.agent.service import OUT_OF_TURN_S, Service
from slurm_watchdog.agent.settings import settings_of
from slurm_watchdog.base.clock import monotonic
from slurm_watchdog.base.loop import Signals
from slurm_watchdog.base.structs import Struct, picked
from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.model.protocol import DumpStacks, Reply, WriteKillSwitch
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import WireError, decode_report, decode_state
from tests.builders.sending import link_to


@dataclass(frozen=True)
class Broken(Collector):
    """In place of a collector: it raises."""

    error: OSError

    def collect(self, now: float) -> Struct:
        raise self.error


@contextmanager
def serving(tmp_path: Path, **broken: OSError) -> Iterator[Service]:
    """A daemon whose courier is not started: what it was given waits in the spool. The collectors in
    `broken` raise."""
    collectors = [
        replace_field(each, make=lambda _, name=each.name: Broken(broken[name])) if each.name in broken else each
        for each in COLLECTORS
    ]
    settings = settings_of(parse_config(f"agent: {{node_name: n1, kernel_log: '', state_directory: '{tmp_path}'}}"))
    agent = Agent(settings, collectors=collectors)
    spool = Spool(10**7, 60)
    link = link_to([TcpController("http://127.0.0.1:1", "n1")])
    sender = Sender(spool, link)
    sender._retry_at = float("inf")
    yield Service(agent, sender, AgentMetrics(), Signals())
    agent.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with serving(tmp_path) as made:
        yield made


def test_a_whole_tick_is_reported_and_counts_as_life(service: Service) -> None:
    assert service.tick(monotonic()) is True
    assert service.sender.spool_bytes > 0


def test_a_collector_that_fails_is_a_problem_of_the_report_and_the_agent_lives(tmp_path: Path) -> None:
    with serving(tmp_path, checkpoint=OSError(5, "Input/output error")) as service:
        assert service.tick(monotonic()) is True
        assert "checkpoint: OSError: [Errno 5] Input/output error" in service.agent.seen.problems
        text = service.metrics.render().decode()
    assert 'slurm_watchdog_collector_success{collector="checkpoint"} 0\n' in text
    assert 'slurm_watchdog_collector_success{collector="process"} 1\n' in text


def test_a_tick_that_could_not_see_sends_nothing_and_is_no_sign_of_life(tmp_path: Path) -> None:
    with serving(tmp_path, process=OSError(24, "Too many open files")) as service:
        assert service.tick(monotonic()) is False
        assert service.sender.spool_bytes == 0
        text = service.metrics.render().decode()
    assert 'slurm_watchdog_collector_success{collector="process"} 0\n' in text


@pytest.mark.parametrize(("limit_s", "away_s", "ends"), [(600.0, 601.0, True), (600.0, 599.0, False), (0.0, 1e6, False)])  # fmt: skip
def test_an_agent_of_attach_ends_after_its_controller_and_a_service_never(
    service: Service, limit_s: float, away_s: float, ends: bool
) -> None:
    settings = service.agent.config
    service.agent.config = replace(settings, agent=replace(settings.agent, give_up_after=limit_s))
    service.tick(service.sender.heard_at + away_s)
    assert service.signals.stop is ends


def test_what_is_asked_between_two_reports_is_answered_in_one_out_of_turn(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = monotonic()
    assert service.tick(now)
    assert service.wanted_at() == float("inf")
    command = WriteKillSwitch(id="c1", job_id="7", path="/elsewhere", uid=1, content="", restarts=0)
    orders = [Reply(commands=(command,))]
    monkeypatch.setattr(service.sender, "orders", lambda: [orders.pop()] if orders else [])
    service.between(now + 0.1)
    assert service.agent.commands.has_results, "it is refused at once"
    assert service.wanted_at() == now + OUT_OF_TURN_S
    sent = service.agent.sequence
    service.between(now + OUT_OF_TURN_S)
    assert service.agent.sequence == sent + 1
    assert service.wanted_at() == float("inf")


def test_what_fails_between_ticks_does_not_end_the_agent(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command may meet anything that a user has: other jobs of the node still need their agent."""

    def fails(*_: object) -> None:
        raise UnicodeEncodeError("utf-8", "\udce9", 0, 1, "odd")

    replies = [Reply(commands=(DumpStacks(id="c1", job_id="7", restarts=0, expires_s=25.0),))]
    monkeypatch.setattr(service.sender, "replies", lambda: [replies.pop()] if replies else [])
    monkeypatch.setattr(service.agent.commands, "accept", fails)
    monkeypatch.setattr(service.agent.commands, "advance", fails)
    now = monotonic()
    assert service.tick(now)
    service.between(now + 0.1)
    assert service.tick(now + 5.0)
    assert "commands: UnicodeEncodeError" in " ".join(service.agent.seen.problems)


def _sent(service: Service) -> Report:
    """What was handed to the sender last; of a state what it says."""
    last = service.sender.left()[-1]
    if not last.is_state:
        return decode_report(last.body)
    return picked(Report, decode_state(last.body), "sequence", "same_as", "state", node="n1", boot_id="", agent_id="")


def _hears(service: Service, monkeypatch: pytest.MonkeyPatch, *replies: Reply, orders: tuple[Reply, ...] = ()) -> None:
    waiting, pushed = list(replies), list(orders)
    monkeypatch.setattr(service.sender, "replies", lambda: [waiting.pop(0) for _ in replies[: len(waiting)]])
    monkeypatch.setattr(service.sender, "orders", lambda: [pushed.pop(0) for _ in orders[: len(pushed)]])


def test_what_has_not_changed_is_said_whole_every_30_s_and_graphs_see_all_of_each_look(service: Service) -> None:
    now, sent = monotonic(), []
    for tick in range(14):
        assert service.tick(now + 5.0 * tick)
        sent.append(_sent(service).same_as)
    first = service.agent.sequence - 13
    assert sent == [0, *[first] * 5, 0, *[first + 6] * 5, 0, first + 12]


def test_a_controller_that_watches_closely_gets_whole_reports_the_first_at_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = monotonic()
    service.tick(now)
    service.tick(now + 5.0)
    assert _sent(service).same_as
    _hears(service, monkeypatch, orders=(Reply(closely=True),))
    service.between(now + 5.5)
    assert service.wanted_at() == now + 5.0 + OUT_OF_TURN_S
    service.between(now + 6.0)
    assert not _sent(service).same_as
    _hears(service, monkeypatch, Reply(), Reply(closely=True))
    service.tick(now + 10.0)
    assert not _sent(service).same_as
    assert service.wanted_at() == float("inf"), "it is no news"
    _hears(service, monkeypatch, Reply(closely=False))
    service.tick(now + 15.0)
    assert _sent(service).same_as


def test_after_a_stream_was_lost_or_from_another_controller_the_next_report_is_whole(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = monotonic()
    service.tick(now)
    _hears(service, monkeypatch, Reply(controller_id="one", closely=True))
    service.tick(now + 5.0)
    _hears(service, monkeypatch, Reply(controller_id="one", closely=False))
    service.tick(now + 10.0)
    assert _sent(service).same_as
    service.sender.breaks += 1
    service.tick(now + 15.0)
    assert not _sent(service).same_as
    _hears(service, monkeypatch, Reply(controller_id="one", closely=True))
    service.tick(now + 20.0)
    _hears(service, monkeypatch, Reply(controller_id="two"))
    service.tick(now + 25.0)
    assert not _sent(service).same_as
    service.tick(now + 30.0)
    assert _sent(service).same_as, "what the one before wanted ends with it"


def test_after_a_report_that_could_not_be_sent_the_next_is_whole(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, put = monotonic(), service.sender.put

    def fails(report: Report) -> None:
        raise WireError("too large")

    monkeypatch.setattr(service.sender, "put", fails)
    service.tick(now)
    monkeypatch.setattr(service.sender, "put", put)
    service.tick(now + 5.0)
    assert not _sent(service).same_as
