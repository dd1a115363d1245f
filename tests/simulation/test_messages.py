"""Messages delay nothing: whatever becomes of them, the same is done at the same second."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

import tests.simulation.controller
from slurm_watchdog.notify.programs import SendFailed
from tests.simulation.crash_points import quiet_recipe
from tests.simulation.history import history_of
from tests.simulation.recipe import recipe_of
from tests.simulation.sim import simulation


class NeverAnswers:
    """Takes a message and never answers."""

    async def post(self, notices: object) -> None:
        await asyncio.Event().wait()


class AlwaysRefuses(NeverAnswers):
    async def post(self, notices: object) -> None:
        raise SendFailed("Slack answered 429", retry_after_s=30.0)


def deeds(people: type | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    if people is not None:
        monkeypatch.setattr(tests.simulation.controller, "NoPeople", people)
    # Many jobs in trouble, and a controller that lives through it: how it dies is drawn from its writes, of
    # which messages are some.
    rates = replace(recipe_of(1).rates, faults=8.0, people=0.0, kills=0.0, stops=0.0, clocks=0.0, journal_full=0.0)
    recipe = replace(quiet_recipe(1), hours=0.45, calm_s=600.0, nodes=8, jobs=4, rates=rates, cooldown_s=120.0)
    with simulation(recipe) as sim:
        sim.run()
        assert history_of(sim)
        return [deed.line() for deed in sim.cluster.truth.deeds]


@pytest.mark.thorough
def test_whether_slack_answers_is_silent_or_refuses_the_same_is_done_at_the_same_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = deeds(None, monkeypatch)
    assert any("requeue" in line for line in usual), "nothing was done that could be delayed"
    assert deeds(NeverAnswers, monkeypatch) == usual
    assert deeds(AlwaysRefuses, monkeypatch) == usual
