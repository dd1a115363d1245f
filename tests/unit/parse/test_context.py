"""What the lines before it add to a line of progress: epochs in lines of their own, shorter epochs, bars
inside of bars."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest

from slurm_watchdog.agent.logs.position import LineBuffer
from slurm_watchdog.diagnose.logs.digest import Collector
from slurm_watchdog.diagnose.logs.progress import Progress, read_changes, read_phases, read_progress
from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.training_log.context import INNER, Context
from slurm_watchdog.parse.training_log.line_scan import ShapeMemory, scan
from slurm_watchdog.parse.training_log.text import LogFact

WHOLE = Path(__file__).parents[2] / "captures/logs" / "whole"


def facts_of(text: str) -> list[LogFact]:
    context = Context()
    found = scan(LineBuffer().feed(text.encode() + b"\n"), ShapeMemory(steps_in_full=10**6))
    return [context.with_context(fact) for fact in found.facts]


def steps_of(text: str) -> list[int]:
    return [fact.step for fact in facts_of(text) if fact.step is not None and fact.kind is EventKind.PROGRESS]


def bar(done: int, total: int, label: str = "", tail: str = "") -> str:
    rate = "?it/s" if done == 0 else "4.00it/s"
    times = "00:00<?" if done == 0 else "00:10<00:12"
    return f"{label}{100 * done // total:3d}%|###       | {done}/{total} [{times}, {rate}{tail}]"


def digest_of(name: str) -> tuple[Progress, list[dict[str, object]]]:
    collector = Collector()
    collector.add(LineBuffer().feed((WHOLE / name).read_bytes() + b"\n"), 1)
    digest = collector.digest()
    assert read_changes(digest) == ()
    return read_progress(digest), read_phases(digest)


@pytest.mark.parametrize(
    ("name", "framework", "first", "last", "total", "seconds"),
    [
        ("hf_evaluation_bars.log", "tqdm", 0, 60, 60, (0.15, 0.3)),  # its evaluation: 0.05 s an item of 100
        ("keras_verbose_2.log", "keras", 40, 240, 240, (0.12, 0.14)),
        ("keras_bar.log", "keras", 4, 120, 120, (0.1, 0.13)),
        ("fastai.log", "fastai", 0, 200, 200, None),  # its validation: 20 batches under the label of the epoch
        ("lightning_rich.log", "lightning", 120, 120, None, (0.15, 0.16)),  # the last epoch has 20 of 50 batches
    ],
)  # fmt: skip
def test_a_log_of_a_framework_at_its_defaults_gives_the_steps_of_the_training(
    name: str, framework: str, first: int, last: int, total: int | None, seconds: tuple[float, float] | None
) -> None:
    found, _ = digest_of(name)
    assert (found.framework, found.first_step, found.last_step, found.total_steps) == (
        framework, first, last, total,
    )  # fmt: skip
    if seconds is None:
        assert found.step_seconds_median is None
    else:
        assert found.step_seconds_median is not None
        assert seconds[0] <= found.step_seconds_median <= seconds[1]


def test_evaluation_bars_of_hugging_face_are_a_phase_and_the_redraw_after_the_end_is_none() -> None:
    found, phases = digest_of("hf_evaluation_bars.log")
    names = [phase["phase"] for phase in phases]
    assert names == ["training", "evaluating"] * (len(names) // 2) + ["finishing"]
    assert found.finished


def test_one_line_of_a_bar_that_was_drawn_at_the_end_shows_no_advance() -> None:
    assert not digest_of("lightning_rich.log")[0].advancing


def test_a_bar_that_begins_inside_of_a_steady_one_counts_apart_and_its_count_rises_on() -> None:
    training = [bar(step, 90) for step in range(21)]
    evaluation = [bar(item, 8000) for item in range(0, 8001, 500)]
    facts = facts_of("\n".join([*training, *evaluation, *[bar(s, 90) for s in range(20, 41)], *evaluation]))
    inner = [fact for fact in facts if fact.pattern == INNER]
    assert max(steps_of("\n".join([*training, *evaluation]))) == 20
    assert len(inner) == 2 * len(evaluation)
    counts = [fact.count or 0.0 for fact in inner]
    assert all(b >= a for a, b in pairwise(counts)) and counts[-1] == 16000
    assert all(fact.step is None and fact.step_s is None and fact.phase == "evaluating" for fact in inner)


def test_batches_inside_of_a_bar_of_epochs_are_the_steps() -> None:
    lines = [bar(0, 3)]
    for epoch in range(1, 4):
        lines += [bar(batch, 500) for batch in range(0, 501, 50)] + [bar(epoch, 3)]
    assert max(steps_of("\n".join(lines))) == 500


def test_two_bars_that_take_turns_the_shorter_one_is_the_evaluation_from_its_second_time_on() -> None:
    epoch = [bar(b, 500) for b in range(0, 501, 50)] + [bar(b, 40) for b in range(0, 41, 10)]
    facts = facts_of("\n".join(epoch * 3))
    assert [fact.pattern for fact in facts[-5:]] == [INNER] * 5
    assert facts[-6].step == 500


def test_two_evaluations_after_each_other_are_both_inside() -> None:
    lines = [bar(step, 90) for step in range(21)]
    lines += [bar(item, 100) for item in range(0, 101, 10)] + [bar(item, 70) for item in range(0, 71, 10)]
    assert max(steps_of("\n".join(lines))) == 20


def test_a_bar_that_was_left_before_its_end_does_not_hide_the_epochs_of_the_training_for_long() -> None:
    left = [bar(item, 5000) for item in range(0, 4000, 100)]
    epoch = [bar(batch, 300) for batch in range(0, 301, 50)]
    facts = facts_of("\n".join(left + epoch * 5))
    assert facts[-1].pattern == "tqdm"
    assert facts[-1].step == 300


def test_a_bar_with_a_loss_inside_of_one_that_shows_none_is_the_training() -> None:
    left = [bar(item, 5000) for item in range(0, 4000, 100)]
    training = [bar(step, 300, tail=", loss=2.3") for step in range(0, 290, 10)]
    assert facts_of("\n".join(left + training))[-1].step == 280


def test_a_second_run_in_the_same_file_begins_anew() -> None:
    first = [bar(step, 90) for step in range(58)]
    assert steps_of("\n".join([*first, *[bar(step, 90) for step in range(5)]]))[-1] == 4


def test_an_epoch_that_is_cut_short_counts_from_the_length_of_those_before() -> None:
    lines = [f"Epoch {e}:  45%|###  | {b}/50 [00:10<00:12, 4.00it/s]" for e in (0, 1) for b in (25, 50)]
    assert steps_of("\n".join([*lines, "Epoch 2: 100%|###  | 20/20 [00:10<00:00, 4.00it/s]"])) == [
        25, 50, 75, 100, 120,
    ]  # fmt: skip


def test_an_epoch_without_a_known_length_takes_the_length_of_those_before() -> None:
    opened = "Epoch {}: |          | {}/? [00:01<00:00, 3.71it/s]"
    assert steps_of(opened.format(0, 58)) == [58]
    assert facts_of(opened.format(3, 58))[0].step is None  # nobody knows how long the three before it were
    known = "Epoch 2: 100%|###  | 50/50 [00:10<00:00, 4.00it/s]\n" + opened.format(3, 8)
    assert steps_of(known) == [150, 158]


def test_a_position_that_a_bar_begins_at_is_initial_and_the_next_one_is_not() -> None:
    lines = [
        "44%|####  | 40/90 [00:00<?, ?it/s]",
        "46%|####  | 41/90 [00:03<02:00,  3.00s/it]",
        "0it [00:00, ?it/s]",
    ]
    assert [fact.initial for fact in facts_of("\n".join(lines))] == [True, False, True]


@pytest.mark.parametrize("header", ["Epoch 2/3 begins", "", "Epoch 7/6"])
def test_a_count_within_an_epoch_without_its_header_stays_a_count(header: str) -> None:
    fact = facts_of(header + "\n40/40 - 7s - 168ms/step - loss: 0.1928")[-1]
    assert fact.total_steps in (40, None)
    assert (fact.step is None) is (header != "Epoch 7/6")


def test_no_number_of_bars_takes_memory() -> None:
    context = Context()
    for total in range(2, 500):
        for fact in facts_of(bar(1, total)):
            context.with_context(fact)
    assert len(context._bars) <= 32


@pytest.mark.parametrize(("step_s", "every"), [(0.5, 1), (2.0, 1), (0.5, 10)])
def test_a_clock_of_whole_seconds_shows_a_change_of_speed_over_ten_of_them_and_none_where_there_is_none(
    step_s: float, every: int
) -> None:
    def changes(slower: float) -> list[tuple[int, float]]:
        begins_at, text = 1_790_000_000.0, ""
        for step in range(1, 2001):
            begins_at += step_s * (1 + slower * (step >= 1000))
            if step % every == 0:
                stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(begins_at))
                text += f"{stamp} INFO step {step} loss 2.5\n"
        collector = Collector()
        collector.add(text.encode(), 1)
        return [(change.step or 0, change.percent) for change in read_changes(collector.digest())]

    assert changes(0.0) == []
    ((step, percent),) = changes(0.2)
    assert abs(step - 1000) <= 40
    assert abs(percent - 20) < 3
