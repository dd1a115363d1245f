"""Patterns of progress that a site wrote: what is refused, what is read with them, and that nothing can take
for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.agent.children.requests import Follow, WorkerState
from slurm_watchdog.agent.logs import follow
from slurm_watchdog.config.loading import ConfigError, parse_config
from slurm_watchdog.model.observations import EventKind
from slurm_watchdog.parse.training_log.line import Rows, all_rows, parse_line
from slurm_watchdog.parse.training_log.line_scan import scan
from slurm_watchdog.parse.training_log.site_patterns import MAX_PATTERNS, compile_patterns, problem_of

OURS = r"it (?P<step>[\d,]+)(?:/(?P<total>\d+))? L=(?P<loss>\S+) t=(?P<step_seconds>[\d.]+)s"


def rows(*texts: str) -> Rows:
    return Rows(all_rows().signatures, all_rows().signs, all_rows().patterns, True, compile_patterns(texts))


@pytest.mark.parametrize(
    "text",
    [
        OURS,
        r"step (?P<step>\d+)",
        r"(?P<step>\d+) of (?P<total>\d+)",
        r"step=(?P<step>\d+).*loss=(?P<loss>[\d.]+)",
        r"^Schritt\s+(?P<step>\d+)\s*/\s*(?P<total>\d+)",
        r"seen (?P<tokens>[\d,]+) tokens",
    ],
)
def test_patterns_that_people_write_are_accepted(text: str) -> None:
    assert problem_of(text) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (r"(?P<step>\d", "not a valid regular expression"),
        (r"loss (?P<loss>\d+)", "no group"),
        (r"(?P<step>\d+) (?P<speed>\d+)", "a group 'speed'"),
        (r"(?P<step>\d*)", "an empty line"),
        (r"(?P<step>(\d+)+)x", "repeated"),
        (r"(\w+\s?)+(?P<step>\d+)", "repeated"),
        (r"(?:a|a)*(?P<step>\d)x", "repeated"),
        (r"(\d{1,50}){1,50}(?P<step>x)", "repeated"),
        (r"(?:\d+x){30}(?P<step>\d)", "inside a repeat"),
        (r".*step (?P<step>\d+)", "begins with"),
        (r"a.*b.*(?P<step>\d+)c", "plain characters"),
        (r"abc.*abc.*abc.*abc(?P<step>\d)", "match"),
        (r"(?P<step>\d+)1\d+1\d+1\d+x", "as well"),
        (r"(?P<step>\d+) (?P=step)", "refers back"),
        (r"\w?a?b?c?d?e?f?g?h?i?j?k?l?m?(?P<step>\d)", "more than"),
        ("x" * 400 + r"(?P<step>\d)", "longer"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused_with_its_reason(text: str, why: str) -> None:
    assert why in (problem_of(text) or "")
    assert compile_patterns([text]) == ()


@given(st.text(alphabet=r"()[]{}*+?|.\d\w\s^$<>P=!:step0123abc-,", max_size=60))
def test_whatever_is_written_is_judged(text: str) -> None:
    problem = problem_of(text)
    assert problem is None or problem


def test_a_line_is_read_with_all_its_groups() -> None:
    fact = parse_line("[rank3]: it 1,200/5000 L=2.31 t=0.25s", rows(OURS))
    assert fact is not None
    assert (fact.kind, fact.pattern, fact.step, fact.total_steps) == (EventKind.PROGRESS, "own_1", 1200, 5000)
    assert (fact.loss, fact.step_s, fact.rank) == (2.31, 0.25, 3)


def test_own_patterns_come_before_those_that_are_built_in_and_take_nothing_else_from_them() -> None:
    mine = rows(r"epoch-step (?P<step>\d+)")
    assert (parse_line("step 3/10 epoch-step 3003", mine) or parse_line("")).step == 3003  # type: ignore[union-attr]
    assert parse_line("step 3/10", mine) == parse_line("step 3/10")
    assert parse_line("MemoryError", mine) == parse_line("MemoryError")


def test_tokens_are_a_count_and_no_step() -> None:
    fact = parse_line("seen 1,024 tokens", rows(r"seen (?P<tokens>[\d,]+) tokens"))
    assert fact is not None
    assert (fact.step, fact.count) == (None, 1024)


@pytest.mark.parametrize("line", ["it ,, L=1 t=1s", "it 99999999999999999999999999 L=1 t=1s", "it 5"])
def test_site_pattern_with_an_invalid_number_gives_no_fact(line: str) -> None:
    assert parse_line(line, rows(OURS)) is None


def test_a_whole_log_is_read_with_them() -> None:
    block = "".join(f"it {n} L=2.{n} t=0.5s\nsaving checkpoint\nnothing\n" for n in range(20)).encode()
    facts = scan(block, own=compile_patterns([OURS])).facts
    assert [fact.step for fact in facts if fact.pattern == "own_1"] == list(range(20))
    assert sum(fact.pattern == "saving" for fact in facts) == 20
    assert {fact.pattern for fact in scan(block).facts} == {"saving"}


def test_of_a_flood_that_they_match_a_bounded_part_is_read() -> None:
    block = "".join(f"it {n} L=2.5 t=0.5s\n" for n in range(50_000)).encode()
    found = scan(block, own=compile_patterns([OURS]))
    assert found.parsed < 1000
    assert found.facts[-1].step == 49_999


def test_only_so_many_are_used() -> None:
    assert len(compile_patterns([rf"x{n} (?P<step>\d+)" for n in range(100)])) == MAX_PATTERNS


def test_the_child_that_follows_a_log_is_given_them(tmp_path: Path) -> None:
    path = tmp_path / "log"
    state = WorkerState()
    path.write_text("it 5/50 L=2.5 t=0.5s\n")
    question = Follow([("1", str(path), 0)], own={"1": [OURS, "("]})
    events = follow.follow(question, state).files[0].events
    assert [(each.pattern, each.step, each.total_steps) for each in events] == [("own_1", 5, 50)]


def test_the_configuration_refuses_such_patterns_by_name() -> None:
    def loaded(*patterns: str) -> tuple[str, ...]:
        return parse_config(json.dumps({"jobs": {"progress_patterns": patterns}})).jobs.progress_patterns

    assert loaded(OURS) == (OURS,)
    with pytest.raises(ConfigError, match=r"jobs\.progress_patterns\[1\].*has no group"):
        loaded(OURS, "step")
    with pytest.raises(ConfigError, match="more than 32"):
        loaded(*[OURS] * 33)
