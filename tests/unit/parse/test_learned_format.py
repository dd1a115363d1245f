"""What is learnt of a log of unknown format, and of how many nothing is learnt: silence is better than a
wrong clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.agent.logs.log_file import LogFollower
from slurm_watchdog.model.observations import Event
from slurm_watchdog.parse.training_log.learned_format import MAX_FORMS, Learner

LOSSES = [f"{2 + 3 / (1 + n) + random.Random(n).uniform(-0.3, 0.3):.4f}" for n in range(2000)]


def counts(line: Callable[[int], str], lines: int = 40, every_s: float = 12.0, look_s: float = 5.0) -> list[float]:
    """What is learnt of a log that gets `line(n)` every so many seconds and is looked at every 5 s."""
    learner, found = Learner(), []
    at, waiting, next_line = 0.0, [], 0
    while next_line < lines:
        while next_line < lines and next_line * every_s <= at:
            waiting.append(line(next_line))
            next_line += 1
        if waiting:
            found += learner.feed(("\n".join(waiting) + "\n").encode(), at)
            waiting = []
        at += look_s
    return [fact.count or 0.0 for fact in found]


@pytest.mark.parametrize(
    ("line", "last"),
    [
        (lambda n: f"[{10 * n} | {12.5 * n:.2f}] loss={LOSSES[n]} avg={LOSSES[n]}", 390),
        (
            lambda n: f"2024-05-01 10:{n:02d}:00,123 INFO trainer >> it {n} (lr 1.2e-4) Verlust {LOSSES[n]}",
            39,
        ),
        (lambda n: f"[rank0]: n={50 * n} nll {LOSSES[n]} grad_norm 1.{n % 7}", 1950),
        (lambda n: f"part {n + 1000} ppl {LOSSES[n]}", 1039),
        (lambda n: f"{n:06d} | loss {LOSSES[n]} | acc 0.{n % 9}", 39),
    ],
)
def test_a_count_beside_a_loss_is_learnt_and_then_told(line: Callable[[int], str], last: int) -> None:
    found = counts(line)
    assert found[-1] == last
    assert found == sorted(set(found))
    assert 25 <= len(found) <= 36


@pytest.mark.parametrize(
    "line",
    [
        lambda n: f"PULSE {n} loss {LOSSES[n]}",
        lambda n: f"heartbeat {n}: loss {LOSSES[n]}",
        lambda n: f"still alive, tick {n}, last loss {LOSSES[n]}",
        lambda n: f"tick {n}",
        lambda n: f"tick {n} at 12.{n % 5}",
        lambda n: f"loss {LOSSES[0]} after n {n}",
        lambda n: f"t={12 * n} loss {LOSSES[n]}",
        lambda n: f"t={12000 * n} ms loss {LOSSES[n]}",
        lambda n: f"now {1714557600 + 12 * n} loss {LOSSES[n]}",
        lambda n: f"10:{n:02d}:00 loss {LOSSES[n]} lr 0.1",
        lambda n: f"elapsed {30 * n} loss {LOSSES[n]}",
        lambda n: f"retry {n} of the loss server: {LOSSES[n]}",
        lambda n: f"GPU mem {n} MiB, loss {LOSSES[n]}",
        lambda n: f"worker pid {4000 + n} loss {LOSSES[n]}",
        lambda n: f"x {n * n} loss {LOSSES[n]}",
        lambda n: f"x {random.Random(n).randrange(1000)} loss {LOSSES[n]}",
        lambda n: f"x {n % 5} loss {LOSSES[n]}",
        lambda n: f"x {1000 - n} loss {LOSSES[n]}",
        lambda n: f"eval part {n} loss {LOSSES[n]}",
        lambda n: f"validation part {n} acc {LOSSES[n]}",
        lambda n: f"checkpoint {n} written, loss {LOSSES[n]}",
        lambda n: f"x 100 loss {LOSSES[n]}",
        lambda n: f"{n},{LOSSES[n]},0.001",
    ],
)
def test_nothing_is_learnt_of(line: Callable[[int], str]) -> None:
    assert counts(line) == []


def test_nothing_is_learnt_of_what_was_written_at_once() -> None:
    assert counts(lambda n: f"it {n} loss {LOSSES[n]}", every_s=0.1) == []


def test_nothing_is_learnt_before_it_rose_often_enough() -> None:
    assert counts(lambda n: f"it {n} loss {LOSSES[n]}", lines=6) == []


def test_nothing_is_learnt_of_an_unsteady_pace() -> None:
    learner, found, at = Learner(), [], 0.0
    for n in range(30):
        at += 5.0 if n % 5 else 900.0
        found += learner.feed(f"it {n} loss {LOSSES[n]}\n".encode(), at)
    assert found == []


def test_one_form_of_line_counts_and_no_other() -> None:
    found = counts(lambda n: f"it {n} loss {LOSSES[n]}\nseqs {512 * n} ppl {LOSSES[n]}")
    assert found == sorted(found)
    assert found[-1] == 39


@given(st.lists(st.binary(max_size=200), max_size=30), st.floats(0, 1e6))
def test_no_text_breaks_it(lines: list[bytes], at: float) -> None:
    Learner().feed(b"\n".join(lines), at)


@given(st.lists(st.text(alphabet="0123456789.,-+eE_ loss:=@[]", max_size=60), max_size=40))
def test_no_number_breaks_it(lines: list[str]) -> None:
    learner = Learner()
    for at, line in enumerate(lines):
        learner.feed(f"{line} loss 2.5".encode(), 10.0 * at)


def test_a_log_of_ever_new_forms_holds_no_memory() -> None:
    learner = Learner()
    for n in range(3000):
        learner.feed(
            f"{'abcdefghij'[n % 10]}{'klmnopqrst'[n // 10 % 10]}{'uvwxyzabcd'[n // 100 % 10]} {n} loss 1.5\n".encode(),
            5.0 * n,
        )
    assert len(learner._forms) <= MAX_FORMS


def follow(path: Path, lines: list[str]) -> list[Event]:
    """Events of a log that gets a line every 12 s."""
    log, events = LogFollower(str(path), 0), []
    for number, line in enumerate(lines):
        with path.open("a") as file:
            file.write(line + "\n")
        now = 12.0 * number
        log.refresh(now, now, {})
        while log.has_more:
            log.read(now, now)
        events += log.drain_events()[0]
    log.close()
    return events


def test_a_followed_log_of_unknown_format_tells_its_count(tmp_path: Path) -> None:
    events = follow(tmp_path / "log", [f"part {n} ppl {LOSSES[n]}" for n in range(20)])
    assert {event.pattern for event in events} == {"learnt"}
    assert [event.step for event in events] == [None] * len(events)
    assert events[-1].count == 19


def test_where_a_known_format_is_written_nothing_is_learnt(tmp_path: Path) -> None:
    lines = [f"step {n}/100\npart {n} ppl {LOSSES[n]}" for n in range(20)]
    events = follow(tmp_path / "log", lines)
    assert {event.pattern for event in events} == {"step_of"}
