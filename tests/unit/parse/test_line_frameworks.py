"""What each framework writes, line by line: tests/captures/logs, whose README says how the captures are written."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from slurm_watchdog.knowledge.progress_patterns import PATTERNS, SIGNS, Pattern, Sign
from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.training_log.line import Rows, all_rows, parse_line
from slurm_watchdog.parse.training_log.line_scan import scan
from slurm_watchdog.parse.training_log.text import LogFact, split_prefix

CAPTURES = Path(__file__).parents[2] / "captures/logs"
KEYS = {"step": "step", "total": "total_steps", "seconds": "step_s", "loss": "loss", "count": "count"}


class Capture(NamedTuple):
    place: str
    expected: str
    line: str


def captures() -> list[Capture]:
    found = []
    for path in sorted(CAPTURES.glob("*.txt")):
        for number, text in enumerate(path.read_text().splitlines(), 1):
            if text and not text.startswith("#"):
                expected, _, line = text.partition("\t")
                found.append(Capture(f"{path.name}:{number}", expected, line.replace("\\x1b", "\x1b")))
    return found


ALL = captures()


def kind_of(words: list[str]) -> EventKind:
    if "saved" in words:
        return EventKind.CHECKPOINT
    return EventKind.PHASE if any(word.startswith("phase=") for word in words) else EventKind.PROGRESS


def check(fact: LogFact | None, expected: str) -> None:
    if expected == "-":
        assert fact is None
        return
    name, *words = expected.split()
    values = dict(word.split("=") for word in words if "=" in word)
    assert fact is not None
    assert (fact.pattern, fact.kind, fact.phase) == (name, kind_of(words), values.get("phase"))
    for key, attribute in KEYS.items():
        value = getattr(fact, attribute)
        if key in values:
            assert value == pytest.approx(float(values[key]), rel=1e-8, nan_ok=True), key
        else:
            assert value is None, key


@pytest.mark.parametrize("capture", ALL, ids=lambda capture: capture.place)
def test_a_line_of_a_framework(capture: Capture) -> None:
    check(parse_line(capture.line), capture.expected)


@pytest.mark.parametrize("path", sorted(CAPTURES.glob("*.txt")), ids=lambda path: path.stem)
def test_a_whole_log_says_what_its_lines_say(path: Path) -> None:
    lines = [capture for capture in ALL if capture.place.startswith(f"{path.name}:")]
    facts = scan("\n".join(capture.line for capture in lines).encode()).facts
    expected = [capture for capture in lines if capture.expected != "-"]
    assert [fact.text for fact in facts] == [capture.line for capture in expected]
    for fact, capture in zip(facts, expected, strict=True):
        check(fact, capture.expected)


@pytest.mark.parametrize("capture", ALL, ids=lambda capture: capture.place)
@pytest.mark.parametrize("prefix", ["[rank3]: ", "[default5]:", "17: ", "node-12: "])
def test_a_launchers_prefix_changes_nothing(capture: Capture, prefix: str) -> None:
    if split_prefix(capture.line)[1]:
        return  # it has one, and knows better
    check(parse_line(prefix + capture.line), capture.expected)


def without(row: Pattern | Sign) -> Rows:
    return Rows(
        all_rows().signatures,
        tuple(each for each in SIGNS if each is not row),
        tuple(each for each in PATTERNS if each is not row),
        mapping=True,
    )


def before(row: Pattern | Sign) -> Rows:
    if isinstance(row, Sign):
        return Rows(all_rows().signatures, SIGNS[: SIGNS.index(row)], (), mapping=False)
    return Rows(all_rows().signatures, SIGNS, PATTERNS[: PATTERNS.index(row)], mapping=False)


@pytest.mark.parametrize("row", [*PATTERNS, *SIGNS], ids=lambda row: row.name)
def test_every_row_is_needed_and_no_row_before_it_takes_its_lines(row: Pattern | Sign) -> None:
    own = [capture.line for capture in ALL if capture.expected.split()[0] == row.name]
    if not own:
        assert row.name in {"num_updates", "validation_bar", "evaluation_bar", "saved", "bracketed"}
        return  # its lines stand in test_line.py
    assert all(parse_line(line, before(row)) is None for line in own)
    assert any(parse_line(line, without(row)) != parse_line(line) for line in own)


@pytest.mark.parametrize("capture", [each for each in ALL if each.expected != "-"], ids=lambda each: each.place)
def test_a_line_that_was_cut_anywhere_never_says_a_larger_step(capture: Capture) -> None:
    """A line that is cut off may say less. It must not say another number that is higher than what was counted."""
    whole = parse_line(capture.line)
    assert whole is not None
    if any(row.name == whole.pattern and row.in_epoch for row in PATTERNS):
        return  # the length of the epoch may be cut in two: nobody reads a last line without its end for its step
    for end in range(len(capture.line)):
        part = parse_line(capture.line[:end])
        if part is not None and part.step is not None and whole.step is not None and part.pattern == whole.pattern:
            assert part.step <= whole.step
