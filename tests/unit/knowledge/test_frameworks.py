"""Which framework wrote a log that counts nothing, and what its user can do about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_watchdog.agent.logs.log_file import LogFollower
from slurm_watchdog.knowledge.frameworks import ANY_FRAMEWORK, FRAMEWORKS, recognise, title_of, what_to_do

WHOLE = Path(__file__).parents[2] / "captures/logs" / "whole"


@pytest.mark.parametrize(
    ("name", "framework"),
    [
        ("lightning_rich.log", "lightning"),
        ("hf_evaluation_bars.log", "huggingface"),
        ("deepspeed_quiet.log", "deepspeed"),
        ("fastai.log", "fastai"),
        ("keras_verbose_2.log", None),  # nothing but its lines of progress, which are known
    ],
)
def test_recognise_a_log_at_its_defaults_is_known_by_its_own_words(name: str, framework: str | None) -> None:
    assert recognise((WHOLE / name).read_bytes()) == framework


@pytest.mark.parametrize("row", FRAMEWORKS, ids=lambda row: row.name)
def test_recognise_each_sign_names_its_row_or_one_that_builds_on_it(row: object) -> None:
    place = FRAMEWORKS.index(row)  # type: ignore[arg-type]
    for sign in FRAMEWORKS[place].signs:
        assert sign == sign.lower()
        assert recognise(b"a line of " + sign.upper() + b" and more") == FRAMEWORKS[place].name


def test_recognise_a_framework_that_is_merely_installed_is_not_the_one_that_trains() -> None:
    line = b"[WARNING] [real_accelerator.py:213:get_accelerator] Setting accelerator to CPU."
    assert recognise(line) is None


def test_recognise_what_builds_on_another_one_wins_in_any_order() -> None:
    quiet, lightning = b"[WARNING] [engine.py:2304:_do] x", b"/lib/lightning/pytorch/trainer.py:70: y"
    assert recognise(lightning, recognise(quiet)) == recognise(quiet, recognise(lightning)) == "lightning"


def test_framework_advice_is_a_sentence_for_every_framework_and_for_none() -> None:
    for row in FRAMEWORKS:
        assert what_to_do(row.name) == row.advice and title_of(row.name) == row.title
        assert not row.advice.endswith(".") and row.advice[0].islower()
    assert what_to_do(None) == what_to_do("own loop") == ANY_FRAMEWORK
    assert title_of(None) is None


def test_tail_a_log_without_steps_names_its_framework_to_the_controller(tmp_path: Path) -> None:
    log = tmp_path / "out"
    log.write_bytes((WHOLE / "lightning_rich.log").read_bytes())
    tail = LogFollower(str(log), start=0)
    tail.refresh(0.0, 0.0, {})
    while tail.has_more:
        tail.read(0.0, 0.0)
    tail.close()
    assert tail.framework == "lightning"
