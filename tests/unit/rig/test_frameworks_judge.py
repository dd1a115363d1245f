"""How a case of lab/frameworks is judged: each verdict, and that nothing wrong counts as right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lab.frameworks import table
from lab.frameworks.catalogue import FAULTS, FRAMEWORKS, chosen
from lab.frameworks.judge import judge
from lab.frameworks.outcome import Outcome, RankRun, Said, from_json, said_of
from tools.docs import evaluation

FAULT_AT = 1000.0


def made(run: int, first: int, last: int, at: float) -> tuple[RankRun, ...]:
    return tuple(RankRun(run, rank, 100 + rank, first, last, at, at + last - first, 0.0) for rank in (0, 1))


OPENED = Said("opened", FAULT_AT + 21, "collective_hang", "rank 1 waits for its data loader", (1,))
ENDED = Said("ended", FAULT_AT + 60, "collective_hang", "the job runs again", (1,), True, 3, 9)
GOOD = Outcome(
    framework="PyTorch DDP", fault="loader", rank=1, total=130, fault_at=FAULT_AT,
    runs=(*made(0, 1, 85, 900.0), *made(1, 81, 130, FAULT_AT + 50)), said=(OPENED, ENDED), exit_code=0, seconds=120.0,
)  # fmt: skip


def of(**changes: Any) -> Outcome:
    return replace(GOOD, **changes)


def test_judge_of_a_hang_with_its_rank_and_a_restart_from_the_checkpoint_is_good() -> None:
    verdict = judge(GOOD)
    assert (verdict.found_s, verdict.kind, verdict.rank, verdict.cause) == (
        21.0,
        "collective_hang",
        "right",
        "right",
    )
    assert (verdict.restart_s, verdict.resumed_at, verdict.lost, verdict.lost_said) == (50.0, 80, 5, "3-9")
    assert verdict.false == () and verdict.ok


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (of(said=(replace(OPENED, ranks=(0,)), ENDED)), "an innocent rank"),
        (of(said=(replace(OPENED, kind="log_error"), ENDED)), "log_error is not what happened"),
        (of(said=(replace(OPENED, at=FAULT_AT - 30), ENDED)), "before the fault"),
        (of(said=(OPENED, ENDED, replace(OPENED, at=FAULT_AT + 90))), "after the restart"),
        (of(said=(OPENED, replace(ENDED, steps_lost=45, steps_lost_at_most=None))), "5 steps were lost"),
        (of(said=(OPENED, replace(ENDED, ok=False))), "the restart worked"),
        (of(said=(OPENED, ENDED), runs=(*made(0, 1, 85, 900.0), *made(1, 81, 81, 1050.0))), "did not work"),
        (of(said=(replace(OPENED, text="the kernel killed it: out of memory"), ENDED)), "another cause"),
        (of(fault="none", runs=made(0, 1, 130, 900.0), fault_at=None), "nothing is wrong"),
    ],
)  # fmt: skip
def test_judge_finds_the_false_sentence(outcome: Outcome, why: str) -> None:
    verdict = judge(outcome)
    assert any(why in each for each in verdict.false), verdict.false
    assert not verdict.ok


@pytest.mark.parametrize(
    ("outcome", "rank"),
    [
        (of(said=()), "nothing said"),
        (of(said=(replace(OPENED, ranks=()), ENDED)), "nobody"),
        (of(said=(replace(OPENED, ranks=()), replace(OPENED, topic="diagnosed", ranks=(0, 1)), ENDED)), "WRONG (rank 0)"),
        (of(said=(replace(OPENED, ranks=()), replace(OPENED, topic="diagnosed"), ENDED)), "right"),
        (of(fault="save"), "-"),
    ],
)  # fmt: skip
def test_judge_says_whom_it_named(outcome: Outcome, rank: str) -> None:
    assert judge(outcome).rank == rank


@pytest.mark.parametrize(
    "outcome",
    [
        of(said=()),
        of(runs=made(0, 1, 85, 900.0), exit_code=None),
        of(runs=(*made(0, 1, 85, 900.0), *made(1, 1, 130, 1050.0)), said=(OPENED,)),
        of(broke="it ended with code 1 before its first step"),
        of(fault="none", said=(), runs=made(0, 1, 99, 900.0)),
    ],
    ids=["missed", "not restarted", "from the beginning", "no result", "did not end"],
)
def test_judge_calls_nothing_good_that_misses_the_target(outcome: Outcome) -> None:
    assert not judge(outcome).ok


def test_judge_of_an_action_that_was_not_needed_is_no_word_against_the_restart() -> None:
    assert judge(of(said=(OPENED, replace(ENDED, ok=False, needless=True, steps_lost=None)))).ok


def test_judge_of_a_healthy_training_that_was_left_alone_is_good() -> None:
    for fault in ("save", "evaluation", "none"):
        assert judge(of(fault=fault, said=(), runs=made(0, 1, 130, 900.0))).ok


def test_said_of_reads_the_webhooks_events() -> None:
    event = {
        "event": "ended", "at": 5.0, "text": "It runs again.", "said": ["two"], "jobs": [],
        "incident": {"kind": "collective_hang", "culprits": [{"rank": 1}, {"rank": None}]},
        "action": {"end": {"ok": True, "steps_lost": 2, "steps_lost_at_most": None}},
    }  # fmt: skip
    assert said_of([event]) == [Said("ended", 5.0, "collective_hang", "It runs again. two", (1,), True, 2, None)]


def test_outcome_survives_its_file_and_the_page_has_a_row_for_it(tmp_path: Any) -> None:
    import json

    file = tmp_path / "results.jsonl"
    worse = of(said=(replace(OPENED, ranks=(0,)), ENDED))
    file.write_text("".join(json.dumps(each.as_json()) + "\n" for each in (worse, GOOD)))
    assert from_json(GOOD.as_json()) == GOOD
    assert table.read(file) == [GOOD], "of a case that was repeated, the newest"
    older, newer = (table.with_releases(GOOD, {"torch": release}) for release in ("2.13.0", "2.15.0"))
    kept = table.results([older, replace(newer, fault="none")], {"agent": {"interval": "2s"}}, "4711abcd")
    assert kept["frameworks"][0]["releases"] == "torch 2.13.0 and 2.15.0"
    assert "Of 1 faults 1 were reported, 1 with the right rank" in evaluation.frameworks(kept)
    assert "| 1 of 1 | 1, 0, 0 | 1 | 21 to 21 | 50 to 50 |" in evaluation.frameworks(kept)


def test_catalogue_has_a_script_for_each_framework_and_twelve_at_least() -> None:
    from lab.frameworks.case import SCRIPTS

    assert all((SCRIPTS / f"{each.script}.py").exists() for each in FRAMEWORKS)
    assert len({each.script for each in FRAMEWORKS}) >= 12
    assert len(FAULTS) == 8
    assert [each.name for each in chosen(["keras"])] == ["Keras"]
    with pytest.raises(ValueError, match="no framework of the catalogue"):
        chosen(["caffe"])
