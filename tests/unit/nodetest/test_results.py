"""Lines of a node's: parsed, refused, put together."""

from __future__ import annotations

import json

import pytest

from slurm_watchdog.nodetest.probes import phases
from slurm_watchdog.nodetest.results import MARK, measured, parse_line


def line(**fields: object) -> str:
    return MARK + json.dumps({"node": "n1", "phase": "cpu", "state": "ok", "at": 1.0, **fields})


def test_the_mark_is_the_one_that_the_node_prints() -> None:
    assert MARK == phases.MARK


def test_figures_of_a_directory_have_its_name_and_disturbed_ones_do_not_count() -> None:
    found = measured(
        "n1",
        [
            each
            for text in (
                line(phase="state", facts={"model": "X x2"}),
                line(
                    figures={
                        "cpu_core": [1.0, 0.1, 5, False],
                        "cpu_all": [2.0, 0.1, 9, True],
                        "other": [1, 0, 1, False],
                    }
                ),
                line(phase="mount", subject="/s", figures={"mount_write": [3.0, 0.0, 4, False]}),
            )
            if (each := parse_line(text)) is not None
        ],
    )
    assert found.model == "X x2"
    assert found.figures == {"cpu_core": 1.0, "mount_write /s": 3.0}
    assert found.disturbed == ("cpu_all",)


def test_a_phase_that_had_begun_when_the_job_ended_hangs() -> None:
    begun = parse_line(line(phase="mount", subject="/s", state="begun"))
    assert begun is not None
    (problem,) = measured("n1", [begun]).problems
    assert (problem.phase, problem.subject, problem.state) == ("mount", "/s", "late")


@pytest.mark.parametrize(
    "text", ["", "hello", MARK, MARK + "{", line(state="well"), line(figures={"cpu_core": ["x"]}), line(node=3)]
)
def test_what_is_none_of_our_lines_is_nothing(text: str) -> None:
    assert parse_line(text) is None
