"""The plan of `make live`, and what it reads of its trainer; the runs themselves need torch and their time."""

from __future__ import annotations

import ast
import io
import json
from pathlib import Path

import pytest

from lab.bench.figures import Figures
from lab.live.__main__ import plan, write
from lab.live.cases import FAULTS, HEALTHY, SRUN, TORCHRUN
from lab.live.run import Result
from lab.live.stage import STEP, TRAINER
from slurm_watchdog.detect.registry import KINDS


def test_every_case_has_a_name_of_its_own_a_launcher_and_kinds_that_exist() -> None:
    names = [name for act in (False, True) for name, _ in plan([], act=act)]
    assert len(names) == len(set(names))
    assert {launcher for each in (*FAULTS, *HEALTHY) for launcher in each.launchers} == {SRUN, TORCHRUN}
    for fault in FAULTS:
        assert {*fault.kinds, *fault.also} <= set(KINDS), fault.name
        assert fault.ranks, "somebody is to blame"


def test_parts_of_names_choose_cases() -> None:
    chosen = [name for name, _ in plan(["lock.srun", "healthy.end"], act=False)]
    assert chosen == ["lock.srun", "healthy.end.srun", "healthy.end.torchrun"]
    assert [name for name, _ in plan(["lock.srun"], act=True)] == ["act.lock.srun"]
    assert plan(["no such thing"], act=False) == []


def test_a_step_that_the_trainer_logs_is_read_with_and_without_a_total() -> None:
    text = "step 7/60 | loss 0.1000 | step_time: 0.312 s\nstep 8 | loss 0.1000 | step_time: 0.4 s\nstep by step\n"
    assert STEP.findall(text) == [("7", "0.312"), ("8", "0.4")]


@pytest.mark.parametrize("version", [(3, 8), (3, 11)])
def test_the_trainer_is_one_file_for_old_interpreters_that_imports_nothing_of_ours(
    version: tuple[int, int],
) -> None:
    tree = ast.parse(Path(TRAINER).read_text(), feature_version=version)
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [name for name in imported if name.split(".")[0] in ("slurm_watchdog", "tests", "deploy")]


def test_a_verdict_that_never_came_or_named_somebody_else_misses_its_bound() -> None:
    figures = Figures(io.StringIO())
    write(
        figures,
        Result("right", bound_s=70.0, verdict_s=61.0, diagnosis_s=25.0, culprit_right=True, diagnosis_right=True),
    )
    assert figures.missed == []
    write(
        figures,
        Result("late", bound_s=70.0, verdict_s=75.0, diagnosis_s=61.0, culprit_right=True, diagnosis_right=True),
    )
    write(figures, Result("silent", bound_s=70.0))
    write(
        figures,
        Result("healthy.a", false_incidents=["collective_hang: …"], stopped=["n1 7"], step_ratio=1.5, acted=True),
    )
    write(
        figures,
        Result(
            "act.b",
            bound_s=70.0,
            verdict_s=61.0,
            asks_ranks=False,
            culprit_right=True,
            resumed=True,
            steps_lost=21,
        ),
    )
    assert [name.removeprefix("live.") for name in figures.missed] == [
        "late.verdict_s", "late.diagnosis_s",
        "silent.verdict_s", "silent.culprit_right", "silent.diagnosis_s", "silent.diagnosis_right",
        "healthy.a.step_time_ratio", "healthy.a.acted", "healthy.a.false_incidents", "healthy.a.left_stopped",
        "act.b.steps_lost",
    ]  # fmt: skip
    rows = [json.loads(line) for line in figures.out.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert {row["bound"] for row in rows} >= {0, 1, 20, 60.0, 70.0}
