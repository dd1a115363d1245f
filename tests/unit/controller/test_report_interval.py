"""How often agents report: as configured, and less often where they are too many, or the controller's core is full."""

from __future__ import annotations

from contextlib import closing
from itertools import count, pairwise
from pathlib import Path

import pytest

from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.controller.state.agents import SETTLED_S, TOO_BUSY, ReportInterval
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmView
from tests.builders.busy_controller import make
from tests.builders.views import slurm_job


@pytest.mark.parametrize(
    ("agents", "interval_s"), [(0, 5.0), (1, 5.0), (5_000, 5.0), (5_001, 6.0), (10_000, 10.0), (50_000, 10.0)]
)
def test_the_more_agents_the_longer_their_interval_within_what_a_report_lasts(agents: int, interval_s: float) -> None:
    assert ReportInterval().of(agents) == interval_s


def test_a_few_agents_may_report_as_often_as_they_like() -> None:
    assert [ReportInterval().least_s(agents) for agents in (0, 1, 1_000)] == [0.0, 0.0, 0.0]
    assert ReportInterval(usual_s=30.0).of(10_000) == 30.0


def follow(interval: ReportInterval, share_of_rate: float, *, agents: int, minutes: int) -> list[float]:
    """The interval every second, where the core is full as far as reports come: `share_of_rate` of it at one a
    second."""
    found = []
    for now in range(60 * minutes):
        share = min(1.0, 0.2 + share_of_rate * agents / interval.of(agents))
        interval.follow(float(now), agents, share if now >= 60 else None)
        found.append(interval.of(agents))
    return found


def test_a_full_core_gets_fewer_reports_until_it_has_room_and_does_not_swing() -> None:
    seen = follow(ReportInterval(), 0.000_62, agents=10_000, minutes=60)
    assert set(seen) == {10.0}, "it has room with that"
    slow = follow(ReportInterval(), 0.001_7, agents=3_000, minutes=60)
    changes = [(at, after) for at, (before, after) in enumerate(pairwise(slow)) if before != after]
    assert [after for _, after in changes] == [7.0, 9.0]
    assert all(later - at >= SETTLED_S for (at, _), (later, _) in pairwise(changes))
    assert 0.2 + 0.001_7 * 3_000 / slow[-1] < TOO_BUSY


def test_once_there_is_room_again_reports_come_as_often_as_before() -> None:
    interval = ReportInterval()
    assert follow(interval, 0.004, agents=3_000, minutes=60)[-1] == 10.0
    later = [interval.of(3_000)]
    for now in range(3600, 7200):
        interval.follow(float(now), 3_000, 0.3)
        later.append(interval.of(3_000))
    assert sorted(set(later), reverse=True) == [10.0, 8.0, 6.0, 5.0]
    assert later == sorted(later, reverse=True)


def test_without_a_measurement_nothing_changes() -> None:
    interval = ReportInterval()
    interval.follow(0.0, 3_000, None)
    interval.follow(1000.0, 3_000, None)
    assert interval.of(3_000) == 5.0


def test_all_agents_that_come_at_once_after_a_start_are_no_lasting_load() -> None:
    interval = ReportInterval()
    for now, busy_share in ((0.0, None), (60.0, 1.0), (119.0, 1.0), (121.0, 0.7)):
        interval.follow(now, 3_000, busy_share)
    assert interval.of(3_000) == 5.0


def test_each_reply_says_it_and_after_a_start_nobody_is_hurried(tmp_path: Path) -> None:
    def reply(node: int, interval_s: float) -> Reply:
        report = Report(node=f"n{node}", boot_id="b", agent_id="a", sequence=next(numbers), interval_s=interval_s)
        return controller.accept(report)

    numbers, config = count(1), parse_config("mode: act\n")
    with closing(Journal(f"sqlite:///{tmp_path}/j")) as journal:
        controller, _ = make(journal, 4, config=config)
        controller.state._report_interval.max_reports_per_s = 0.5
        assert [reply(n, 5.0).interval_s for n in range(4)] == [5.0] * 4
        controller.tick()
        assert [reply(n, 5.0).interval_s for n in range(4)] == [8.0] * 4
        assert reply(1, 13.0).interval_s == 13.0, "before it was started there were more, perhaps"
        assert controller.state.report_interval_s == 8.0
        controller.started_mono -= config.controller.agent_silent_after
        assert [reply(n, 13.0).interval_s for n in range(4)] == [8.0] * 4
        controller.tick()
        assert b"slurm_watchdog_report_interval_seconds 8.0" in controller.metrics.text()


def test_jobs_of_agents_that_report_less_often_are_given_their_time() -> None:
    for interval, later_s in ((ReportInterval(usual_s=1.0), 5.0), (ReportInterval(max_reports_per_s=0.125), 8.0)):
        state = ClusterState(silent_after_s=40.0, report_lifetime_s=30.0, report_interval=interval)
        state.apply_slurm(SlurmView(jobs=(slurm_job(),), nodes=()), 0.0)
        state.apply_report(Report(node="n1", boot_id="b", agent_id="a", sequence=1), 1.0)
        state.follow_load(1.0, None)
        (job,) = state.view(1.0).jobs
        assert job.read_later_s == later_s
