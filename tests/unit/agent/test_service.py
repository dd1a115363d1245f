"""A tick of the daemon: which failures leave it whole, and which make it blind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.agent import Agent
from slurm_watchdog.agent.delivery.sender import Sender, Spool
from slurm_watchdog.agent.metrics import AgentMetrics
from slurm_watchdog.agent.service import Service
from slurm_watchdog.base.clock import monotonic
from slurm_watchdog.base.loop import Signals
from slurm_watchdog.config.agent_settings import settings_of
from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.model.observations import Process
from tests.trusting import trusting


class BrokenCheckpoints:
    def collect(self, *_: object) -> None:
        raise OSError(5, "Input/output error")


class Blind:
    """In place of the processes: they can't be listed."""

    def __init__(self, processes: object) -> None:
        self._processes = processes

    def __getattr__(self, name: str) -> object:
        return getattr(self._processes, name)

    def collect(self, now: float, deadline_s: float) -> tuple[Process, ...]:
        raise OSError(24, "Too many open files")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A daemon whose sender has not been started: what it was given waits in the spool."""
    settings = settings_of(
        parse_config(f"agent: {{node_name: n1, kernel_log: '', state_directory: '{tmp_path}'}}")
    )
    agent = Agent(settings)
    spool = Spool(10**7, 60)
    yield Service(
        agent, Sender("http://127.0.0.1:1", spool, trusting("http://127.0.0.1:1")), AgentMetrics(), Signals()
    )
    agent.close()


def test_a_whole_tick_is_reported_and_counts_as_life(service: Service) -> None:
    assert service.tick(monotonic()) is True
    assert service.sender.spool_bytes > 0


def test_a_collector_that_fails_is_a_problem_of_the_report_and_the_agent_lives(service: Service) -> None:
    service.agent.checkpoints = BrokenCheckpoints()  # type: ignore[assignment]
    assert service.tick(monotonic()) is True
    assert service.agent.seen.problems == ["checkpoint: OSError: [Errno 5] Input/output error"]
    assert 'slurm_watchdog_collector_success{collector="checkpoint"} 0\n' in service.metrics.render().decode()
    assert 'slurm_watchdog_collector_success{collector="process"} 1\n' in service.metrics.render().decode()


def test_a_tick_that_could_not_see_sends_nothing_and_is_no_sign_of_life(service: Service) -> None:
    service.agent.processes = Blind(service.agent.processes)  # type: ignore[assignment]
    assert service.tick(monotonic()) is False
    assert service.sender.spool_bytes == 0
    assert 'slurm_watchdog_collector_success{collector="process"} 0\n' in service.metrics.render().decode()


@pytest.mark.parametrize(("limit_s", "away_s", "ends"), [(600.0, 601.0, True), (600.0, 599.0, False), (0.0, 1e6, False)])  # fmt: skip
def test_an_agent_of_attach_ends_after_its_controller_and_a_service_never(
    service: Service, limit_s: float, away_s: float, ends: bool
) -> None:
    settings = service.agent.config
    service.agent.config = replace(settings, agent=replace(settings.agent, give_up_after=limit_s))
    service.tick(service.sender.heard_at + away_s)
    assert service.signals.stop is ends
