"""The logs of the project's first documents, line by line at their times, through the engine that watches a job: lines
in, incidents out."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

from slurm_watchdog.model.incidents import Incident
from tests.replay.stories import SPINS, TRAINS, Story

SEEDS = Path(__file__).parents[1] / "captures" / "field" / "seeds"
STEP_S = 105.0


def lines(name: str) -> list[str]:
    return (SEEDS / name).read_text().splitlines()


def fired(story: Story) -> list[Incident]:
    return [each for each in story.play().incidents if each.fired_at is not None and each.inhibited_by is None]


def before(story: Story, first: int, steps: int, text: str) -> None:
    """So many steps before step `first`, in the words of its line, with the loss as it was."""
    for step in range(first - steps, first):
        story.go_on(STEP_S, lambda rank, s: TRAINS)
        story.log(re.sub(r"iteration +\d+/", f"iteration {step:8d}/", text))


def test_the_hang_at_the_evaluation_of_step_45000_is_reported_while_the_pulse_continues() -> None:
    step, *evaluation = lines("hang_at_evaluation.log")
    story = Story(every_s=30.0)
    before(story, 45_000, 12, step)
    story.go_on(STEP_S, lambda rank, s: TRAINS)
    for line in (step, *evaluation[:3]):
        story.log(line)
    story.fault("hang at the evaluation")
    last = None
    for line in evaluation[3:]:
        at = datetime.fromisoformat(line[1:20])
        # The first PULSE after it came within its hour.
        story.go_on(1800.0 if last is None else (at - last).total_seconds(), lambda rank, s: SPINS)
        story.log(line)
        last = at
    (incident,) = fired(story)
    assert incident.kind in ("collective_hang", "stalled_progress")
    assert "45000" in incident.summary.replace(",", ""), incident.summary
    assert incident.culprits == ()


def test_the_loss_that_jumps_to_5_1_at_step_31219_is_reported() -> None:
    usual, *rest = lines("loss_spike.log")
    story = Story(every_s=30.0)
    before(story, 31_214, 40, usual)
    for line in (usual, *rest):
        story.go_on(STEP_S, lambda rank, s: TRAINS)
        story.log(line)
    (incident,) = fired(story)
    assert incident.kind == "loss_spike"
    assert "31219" in incident.summary.replace(",", ""), incident.summary


def test_steps_that_take_5_percent_longer_since_step_42783_are_reported() -> None:
    text = [line for line in lines("slower.log") if "elapsed time" in line]
    story = Story(every_s=30.0)
    before(story, 42_780, 60, text[0])
    for line in text:
        story.go_on(STEP_S, lambda rank, s: TRAINS)
        story.log(line)
    before(story, 42_850, 65, text[-1])
    (incident,) = fired(story)
    assert incident.kind == "slow_job"
    since = re.search(r"since step (\d+)", incident.summary.replace(",", ""))
    assert since is not None and abs(int(since[1]) - 42_783) <= 3, incident.summary
