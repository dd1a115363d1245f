"""When a restarted run counts as training again, and what the restart cost."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from slurm_watchdog.analysis.progress_limit import progress_limit
from slurm_watchdog.controller.actions.ladder.state import (
    StepsLost,
    first_step_if_proven,
    steps_lost,
    work_words,
)
from slurm_watchdog.detect.collective_hang import CollectiveHang
from slurm_watchdog.model.past_runs import PastRun
from tests.builders.views import job, progress


@pytest.mark.parametrize(
    ("first", "step", "rises", "loaded", "proven"),
    [
        (None, 0, 0, 40, False),  # a bar was drawn at `0/90`
        (40, 40, 0, 40, False),  # the line says which checkpoint was loaded
        (41, 41, 1, 40, True),  # 40, then 41: but 40 is no step of this run
        (41, 41, 0, 40, False),
        (50, 50, 0, 40, False),  # one line of a log that has one every ten steps
        (50, 60, 1, 40, True),
        (30, 40, 1, 40, False),  # it makes again what the checkpoint has
        (41, 42, 1, None, False),
        (41, 43, 2, None, True),
    ],
)
def test_restart_is_proven_by_two_steps_above_the_loaded_one(
    first: int | None, step: int, rises: int, loaded: int | None, proven: bool
) -> None:
    view = job(progress=progress(1.0, step=step, first_step=first, rises=rises))
    assert (first_step_if_proven(view, loaded) == first and first is not None) is proven


def test_restart_without_a_step_is_not_proven_and_a_count_that_is_no_step_has_to_rise_twice() -> None:
    assert first_step_if_proven(None, None) is None
    assert first_step_if_proven(job(progress=None), 40) is None
    for rises, proven in ((1, None), (2, 0)):
        counted = progress(1.0, step=0, step_known=False, rises=rises)
        assert first_step_if_proven(job(progress=counted), 40) == proven


@pytest.mark.parametrize(
    ("last", "stride", "first", "next_stride", "loaded", "words"),
    [
        (57, 1, 41, 1, 40, "17 steps lost"),
        (64, 1, 65, 1, 64, "0 steps lost"),
        (57, 1, 41, 1, None, "17 to 20 steps lost"),  # no checkpoint is known: lines before 41 may have been missed
        (
            50,
            10,
            50,
            10,
            40,
            "10 to 20 steps lost",
        ),  # a line every ten steps: up to nine more were made, ten if it counts from 0
        (50, 10, 60, 10, None, "0 to 40 steps lost"),
        (21, 1, 21, 1, 20, "1 step lost"),
        (57, 1, 61, 1, 40, "0 steps lost"),  # it continued from a checkpoint that nobody saw
        (11, 1, 12, 1, 10, "0 to 1 steps lost"),  # the line of step 11 was missed, or a checkpoint was
    ],
)
def test_steps_lost_are_steps_that_were_made_and_a_range_where_the_log_is_coarse(
    last: int, stride: int, first: int, next_stride: int, loaded: int | None, words: str
) -> None:
    assert steps_lost(last, stride, first, next_stride, loaded).words == words


@pytest.mark.parametrize(
    ("last", "first", "next_stride", "loaded", "words"),
    [
        (85, 66, 1, None, "0 to 23 steps lost"),  # ignite 0.5 at 81 of 130: `Epoch [2/2]: [1/65]`
        (306, 50, 1, None, "0 to 260 steps lost"),  # fastai 2.8 in its epoch 31 of 35: `Epoch 6/35`
        (87, 81, 1, 80, "7 steps lost"),  # the newest checkpoint fits
        (57, 61, 1, None, "0 steps lost"),
    ],
)
def test_steps_lost_of_a_log_that_counts_by_epochs_are_at_most_what_it_says(
    last: int, first: int, next_stride: int, loaded: int | None, words: str
) -> None:
    assert steps_lost(last, 1, first, next_stride, loaded, by_epochs=True).words == words


def test_start_after_a_restart_has_the_time_that_earlier_starts_took_and_not_an_hour() -> None:
    settings = CollectiveHang()
    past = PastRun(restarts=0, began_at=0.0, ended_at=900.0, steps_seen=50, start_s=40.0)
    starting = job(progress=None, run_age_s=30.0, past=(past,))
    assert progress_limit(starting, settings).seconds == 600.0
    slow = replace(starting, past=(replace(past, start_s=300.0),))
    assert progress_limit(slow, settings).seconds == 1500.0
    endless = replace(starting, past=(replace(past, start_s=3000.0),))
    assert progress_limit(endless, settings).seconds == settings.startup_grace
    never = replace(starting, past=(replace(past, start_s=None),))
    assert progress_limit(never, settings).seconds == settings.startup_grace
    loaded = replace(starting, progress=progress(30.0, step=40, rises=0, steps_seen=1, intervals_s=()))
    assert progress_limit(loaded, settings).seconds == 600.0


@pytest.mark.parametrize(
    ("at_least", "at_most", "step_s", "words"),
    [(6, 6, 0.5, "3 s"), (1, 1, 0.2, "1 s"), (10, 19, 30.0, "5 min to 10 min"), (0, 9, 10.0, "0 s to 90 s")],
)
def test_work_lost_is_a_range_where_the_steps_are_one(at_least: int, at_most: int, step_s: float, words: str) -> None:
    assert work_words(StepsLost(at_least=at_least, at_most=at_most), step_s) == words
