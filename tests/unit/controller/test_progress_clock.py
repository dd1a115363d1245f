"""The clock of a run, fed with what is logged when: epochs, bars inside bars, counts that are no steps."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.agent.logs.step_rows import make_event
from slurm_watchdog.controller.state.counter_clock import Counter, CounterClock
from slurm_watchdog.controller.state.phases import Lately
from slurm_watchdog.controller.state.progress_clock import (
    MAX_CLOCKS,
    Stretch,
    apply_loss,
    apply_step,
    lines_of,
    main_clock,
    read_progress,
)
from slurm_watchdog.knowledge.progress_patterns import progress_table
from slurm_watchdog.model.cluster_view import Progress
from slurm_watchdog.model.observations import Event, EventKind, StepLine
from slurm_watchdog.parse.training_log.text import LogFact

LOG = "/logs/train.out"
Clocks = dict[Counter, CounterClock]


def event(
    step: int | None = None,
    pattern: str = "step_of",
    total: int | None = None,
    count: float | None = None,
    loss: float | None = None,
) -> Event:
    return Event(
        kind=EventKind.PROGRESS, job_id="1", age_s=0.0, source=LOG, step=step, count=count, pattern=pattern,
        total_steps=total, loss=loss,
    )  # fmt: skip


def feed(clocks: Clocks, events: Iterable[Event], at: float = 0.0, every_s: float = 10.0) -> float:
    """Logs one event after the other; returns when the next one would come."""
    for each in events:
        apply_step(clocks, each, at)
        apply_loss(clocks, each, at)
        at += every_s
    return at


def progress(clocks: Clocks, now: float) -> Progress:
    found = read_progress(clocks, None, float("-inf"), now)
    assert found is not None
    return found


def test_epochs_that_begin_anew_at_0_are_one_training_and_keep_what_was_learnt() -> None:
    clocks: Clocks = {}
    epoch = [event(step, total=100) for step in range(0, 101, 10)]
    end = feed(clocks, epoch * 3)
    seen = progress(clocks, end)
    assert (seen.step, seen.begun_anew, seen.steps_seen) == (100, 2, 33)
    assert seen.age_s == 10.0
    assert len(seen.intervals_s) == 31
    assert seen.step_s == 1.0


def test_lines_at_the_begin_the_middle_and_the_end_of_an_epoch_are_as_far_apart_as_the_most_of_them() -> None:
    clocks: Clocks = {}
    end = feed(
        clocks,
        [event(10 * epoch + step, "timm") for epoch in range(8) for step in (0, 5, 9)] + [event(80, "timm")],
    )
    seen = progress(clocks, end)
    assert (seen.stride, seen.widest_stride, seen.by_epochs) == (1, 5, True)


def test_epochs_without_a_total_keep_what_was_learnt_too() -> None:
    clocks: Clocks = {}
    end = feed(clocks, [event(step) for _ in range(3) for step in range(0, 100, 10)])
    seen = progress(clocks, end)
    assert seen.begun_anew == 2
    assert seen.steps_seen > 20
    assert len(seen.intervals_s) > 20


def test_a_program_that_goes_on_from_a_checkpoint_begins_to_learn_anew() -> None:
    clocks: Clocks = {}
    at = feed(clocks, [event(step) for step in range(0, 1000, 10)])
    end = feed(clocks, [event(step) for step in range(500, 540, 10)], at)
    seen = progress(clocks, end)
    assert (seen.step, seen.first_step, seen.steps_seen, seen.begun_anew) == (530, 500, 4, 1)
    assert len(seen.intervals_s) == 2


def test_a_bar_of_an_evaluation_inside_the_bar_of_the_training_takes_nothing_away() -> None:
    clocks: Clocks = {}
    at = feed(clocks, [event(step, "tqdm", 1000) for step in range(1, 61)])
    at = feed(clocks, [event(step, "tqdm", 25) for step in range(26)], at, 2.0)
    seen = progress(clocks, at)
    assert (seen.step, seen.total_steps, seen.begun_anew) == (60, 1000, 0)
    assert seen.age_s == 2.0  # the evaluation goes on
    at = feed(clocks, [event(step, "tqdm", 1000) for step in range(61, 70)], at)
    assert progress(clocks, at).steps_seen == 69


def test_a_run_remembers_how_long_its_evaluations_took_with_the_step_after_them() -> None:
    clocks: Clocks = {}
    at = 0.0
    for step in range(40):
        evaluated = step % 10 == 9
        announced = Lately("evaluating", 2.0) if evaluated else None
        apply_step(clocks, event(step), at, Stretch(lately=announced))
        at += 35.0 if step % 10 == 8 else 5.0
    found = read_progress(clocks, ("evaluating", at), float("-inf"), at)
    assert found is not None
    assert found.phase_intervals_s == (35.0,) * 4
    saving = read_progress(clocks, ("checkpointing", at), float("-inf"), at)
    assert saving is not None
    assert (saving.phase_intervals_s, progress(clocks, at).phase_intervals_s) == ((), ())


def test_a_bar_of_the_data_gives_way_to_that_of_the_training() -> None:
    clocks: Clocks = {}
    at = feed(clocks, [event(step, "tqdm", 5000) for step in range(0, 5001, 10)], every_s=1.0)
    at = feed(clocks, [event(step, "tqdm", 1000) for step in range(1, 4)], at + 300)
    assert (progress(clocks, at).step, progress(clocks, at).steps_seen) == (3, 3)


def test_a_bar_of_the_data_that_never_showed_its_end_is_left_in_time() -> None:
    clocks: Clocks = {}
    at = feed(clocks, [event(step, "tqdm", 5000) for step in range(0, 4999, 10)], every_s=1.0)
    at = feed(clocks, [event(step, "tqdm", 1000) for step in range(1, 70)], at)
    assert progress(clocks, at).total_steps == 1000


def test_a_fraction_of_epochs_is_progress_and_never_a_step() -> None:
    clocks: Clocks = {}
    end = feed(clocks, [event(count=number / 100, pattern="hf_trainer_epoch") for number in range(30)])
    seen = progress(clocks, end + 50)
    assert (seen.step, seen.step_known, seen.first_step, seen.total_steps) == (0, False, None, None)
    assert (seen.age_s, seen.last_increase_age_s, seen.steps_seen) == (60.0, 60.0, 30)
    assert seen.intervals_s == (10.0,) * 28
    assert seen.step_s is None


def test_a_fraction_that_stays_is_no_progress() -> None:
    clocks: Clocks = {}
    assert apply_step(clocks, event(count=0.34, pattern="hf_trainer_epoch"), 0.0)
    assert not apply_step(clocks, event(count=0.34, pattern="hf_trainer_epoch"), 10.0)
    assert apply_step(clocks, event(count=0.35, pattern="hf_trainer_epoch"), 20.0)


def test_a_counter_of_steps_gives_the_step_however_often_another_rises() -> None:
    clocks: Clocks = {}
    at = feed(clocks, [event(count=float(number), pattern="tokens") for number in range(100)])
    end = feed(clocks, [event(5, "tqdm", 1000)], at)
    seen = progress(clocks, end)
    assert (seen.step, seen.step_known) == (5, True)


def test_a_loss_beside_the_epoch_is_of_the_step_that_the_bar_shows() -> None:
    clocks: Clocks = {}
    at = feed(clocks, [event(step, "tqdm", 1000) for step in range(1, 11)])
    feed(clocks, [event(count=0.34, pattern="hf_trainer_epoch", loss=2.5)], at)
    main = main_clock(clocks)
    assert main is not None
    assert [(point.step, point.loss) for point in main.losses] == [(10, 2.5)]


def test_a_log_with_ever_new_bars_holds_no_memory() -> None:
    clocks: Clocks = {}
    at = feed(clocks, [event(step) for step in range(50)])
    feed(clocks, [event(1, "tqdm", total) for total in range(1000, 3000)], at, 0.01)
    assert len(clocks) <= MAX_CLOCKS


# ---------------------------------------------------------------------------- what one line alone may say


@pytest.mark.parametrize("pattern", sorted(progress_table().counted))
def test_one_line_of_a_form_that_anybody_may_write_is_no_progress_and_a_second_one_that_counts_on_is(
    pattern: str,
) -> None:
    clocks: Clocks = {}
    at = feed(clocks, [event(3, pattern, 3)])
    assert read_progress(clocks, None, float("-inf"), at) is None
    at = feed(clocks, [event(3, pattern, 3)], at)
    assert read_progress(clocks, None, float("-inf"), at) is None
    feed(clocks, [event(4, pattern, 4)], at)
    assert progress(clocks, at).step == 4


def test_one_line_of_a_framework_s_own_form_is_enough() -> None:
    clocks: Clocks = {}
    feed(clocks, [event(700, "megatron", 1000)])
    assert (progress(clocks, 0.0).step, progress(clocks, 0.0).total_steps) == (700, 1000)


@pytest.mark.parametrize("pattern", ["step_of", "tqdm"])
def test_the_last_of_three_steps_of_a_set_up_does_not_end_a_training(pattern: str) -> None:
    """`Step 3/3: …`, and hours of a log that nobody can read: nothing says that the training is over."""
    clocks: Clocks = {}
    feed(clocks, [event(step, pattern, 3) for step in (1, 2, 3)])
    assert progress(clocks, 30.0).total_steps is None
    clocks = {}
    feed(clocks, [event(step, pattern, 100) for step in (20, 40, 60, 80, 100)])
    assert progress(clocks, 50.0).total_steps == 100


def test_a_line_alone_beside_a_counter_that_is_known_takes_nothing_away() -> None:
    clocks: Clocks = {}
    at = feed(clocks, [event(step, "megatron", 1000) for step in range(1, 9)])
    feed(clocks, [event(3, "step", None)], at)
    assert progress(clocks, at).step == 8


# ---------------------------------------------------------------------------- two programs, one log


def interleaved(turns: int, each: int = 1, first: int = 500, second: int = 30) -> list[Event]:
    """Two programs that take turns with `each` lines."""
    found = []
    for turn in range(turns):
        found += [event(first + turn * each + n) for n in range(each)]
        found += [event(second + turn * each + n) for n in range(each)]
    return found


@pytest.mark.parametrize("each", [1, 2, 3])
def test_two_programs_that_count_in_one_log_are_seen(each: int) -> None:
    clocks: Clocks = {}
    at = feed(clocks, interleaved(8, each))
    assert progress(clocks, at).shared


def test_when_one_of_them_has_gone_the_log_belongs_to_the_other_again() -> None:
    clocks: Clocks = {}
    at = feed(clocks, interleaved(8))
    at = feed(clocks, [event(600 + n) for n in range(25)], at)
    assert not progress(clocks, at).shared


@pytest.mark.parametrize(
    "steps",
    [
        # Epochs without a total, also of uneven length; evaluations that count in the same words; a program
        # that starts again.
        [n for length in (10, 11, 9, 12, 10, 11, 10, 9) for n in range(length)],
        [n for turn in range(10) for n in (*range(turn * 5, turn * 5 + 5), *range(1, 4))],
        [*range(500), *range(400, 900), *range(800, 1200)],
        # The best step so far, or the last checkpoint, beside each step.
        [n for step in range(100, 160) for n in (step, 90)],
        [n for step in range(100, 160) for n in (step, step // 20 * 20 - 20)],
    ],
)  # fmt: skip
def test_a_single_program_is_not_taken_for_two(steps: list[int]) -> None:
    clocks: Clocks = {}
    at = 0.0
    for step in steps:
        at = feed(clocks, [event(step)], at)
        found = read_progress(clocks, None, float("-inf"), at)
        assert found is None or not found.shared


# ---------------------------------------------------------------------------- whatever is logged

COUNTS = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([0.0, 1.0, 10.0, 900.0]), st.sampled_from(["step", "tqdm", "megatron"]),
              st.sampled_from([None, 20, 40])),
    max_size=60,
)  # fmt: skip


@given(COUNTS)
def test_whatever_is_logged_ages_and_intervals_make_sense(
    lines: list[tuple[int, float, str, int | None]],
) -> None:
    clocks: Clocks = {}
    at = 0.0
    for step, pause_s, pattern, total in lines:
        at += pause_s
        apply_step(clocks, event(step, pattern, total), at)
        found = read_progress(clocks, None, float("-inf"), at)
        if found is not None:
            assert 0.0 <= found.age_s <= at
            assert found.steps_seen <= len(lines)
            assert all(0 < interval_s <= at for interval_s in found.intervals_s)
            assert found.step in {each[0] for each in lines}


@given(COUNTS)
def test_the_same_count_told_again_is_no_progress(lines: list[tuple[int, float, str, int | None]]) -> None:
    clocks: Clocks = {}
    for step, _, pattern, total in lines:
        apply_step(clocks, event(step, pattern, total), 5.0)
    before = {key: clock.count for key, clock in clocks.items()}
    for source, pattern in before:
        name, _, total = pattern.partition("/")
        again = event(int(before[source, pattern]), name, int(total) if total.isdigit() else None)
        assert not apply_step(clocks, again, 50.0)
    assert {key: clock.rose_at for key, clock in clocks.items()} == dict.fromkeys(before, 5.0)


@pytest.mark.parametrize(
    ("line", "sizes"),
    [
        ("step {s} | global batch size: {b} | loss 2", [512.0, 768.0]),
        ("step {s} batch_size={b} loss 2", [512.0, 768.0]),
        ("step {s} | micro batch size: 2 | consumed samples: {c} | loss 2", [512.0, 768.0]),
        ("step {s} gbs: {b} loss 2", [512.0, 768.0]),
        ("step {s} micro batch size: 2", []),
        ("step {s} consumed tokens: {c}", []),
    ],
)
def test_the_size_of_a_batch_is_what_the_line_says_or_what_was_consumed_since(line: str, sizes: list[float]) -> None:
    clocks: Clocks = {}
    consumed = 0
    for step in range(1, 21):
        batch = 512 if step <= 10 else 768
        consumed += batch
        fact = LogFact(
            kind=EventKind.PROGRESS, pattern="step_of", step=step, text=line.format(s=step, b=batch, c=consumed)
        )
        said = make_event(fact, 0.0)
        feed(clocks, [said], at=10.0 * step)
    (clock,) = clocks.values()
    assert list(dict.fromkeys(each.batch for each in clock.times if each.batch is not None)) == sizes


def test_a_position_that_a_bar_begins_at_is_no_step_of_the_run() -> None:
    """A resumed run draws `0/90` or `40/90` first: it must not pass for its first new step."""
    clocks: Clocks = {}
    at = feed(clocks, [msgspec.structs.replace(event(40, "tqdm", 90), initial=True)])
    assert (progress(clocks, at).first_step, progress(clocks, at).rises) == (None, 0)
    at = feed(clocks, [event(40, "tqdm", 90)], at)
    assert (progress(clocks, at).first_step, progress(clocks, at).rises) == (None, 0)  # drawn again
    at = feed(clocks, [event(41, "tqdm", 90), event(42, "tqdm", 90)], at)
    assert (progress(clocks, at).first_step, progress(clocks, at).rises) == (41, 2)


def test_the_jump_of_a_resumed_bar_to_its_first_step_is_no_distance_between_its_lines() -> None:
    clocks: Clocks = {}
    at = feed(clocks, [msgspec.structs.replace(event(0, "tqdm", 90), initial=True)])
    at = feed(clocks, [event(41, "tqdm", 90), event(42, "tqdm", 90)], at)
    assert (progress(clocks, at).first_step, progress(clocks, at).widest_stride) == (41, 1)


def test_a_line_beside_the_training_that_names_a_step_made_before_is_no_progress() -> None:
    clocks: Clocks = {}
    at = feed(clocks, [event(step, "megatron", 1000) for step in range(390, 406)], every_s=1.0)
    for step in (300, 400, 405):  # "uploaded step 300", "evaluated step 400"
        assert not apply_step(clocks, event(step, "step"), at + 60)
    assert progress(clocks, at + 60).age_s == pytest.approx(61.0)
    assert apply_step(clocks, event(410, "step"), at + 61)


def test_a_row_of_many_lines_is_the_lines_that_it_keeps() -> None:
    row = msgspec.structs.replace(
        event(90, total=900, loss=2.0), lines=80, batch=8,
        earlier=(StepLine(20, 0.5, 9.0), StepLine(70, 0.4, None, True), StepLine(80, 0.3, None, True)),
    )  # fmt: skip
    lines = lines_of(row)
    assert [(each.step, each.step_s, each.loss, each.loss_is_no_number) for each in lines] == [
        (20, 0.5, 9.0, False), (70, 0.4, None, True), (80, 0.3, None, True), (90, None, 2.0, False),
    ]  # fmt: skip
    assert all((each.total_steps, each.batch, each.source, each.earlier) == (900, 8, LOG, ()) for each in lines)
    assert [each.count for each in lines_of(msgspec.structs.replace(event(count=0.5), earlier=(StepLine(0.25),)))] == [
        0.25, 0.5,
    ]  # fmt: skip


def test_of_a_row_of_more_lines_than_an_agent_sends_few_are_taken_and_numbers_beyond_all_are_none() -> None:
    flood = msgspec.structs.replace(event(9000), earlier=tuple(StepLine(float(at)) for at in range(4096)))
    assert len(lines_of(flood)) == 9
    assert len(lines_of(msgspec.structs.replace(event(9), earlier=(StepLine(1e300),)))) == 1
