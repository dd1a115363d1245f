"""When the command has to be started again without a node: never while it may continue."""

from __future__ import annotations

import pytest

from slurm_watchdog.supervisor.lost_nodes import (
    AGAIN_S,
    LOOK_S,
    PATIENT_S,
    STILL_S,
    UNKNOWN_S,
    Watch,
    least_nodes,
    lost,
    seen,
)

GONE: tuple[str, ...] = ()
ANSWERS = ("n2",)


def found_after(
    answering: tuple[str, ...] = GONE,
    *,
    every_s: float = 0.0,
    elastic: bool = False,
    until_s: float = 2000.0,
    line_s: float | None = 1.0,
    says_steps: bool = True,
) -> float | None:
    """Seconds since n2 was missing first, until the command is to be started again without it; a new step is in the log
    `every_s`, or never. None: never."""
    watch, now = seen(Watch(), (), (), {}, 0.0), LOOK_S
    began = now
    while now < until_s:
        step = 100.0 + (now // every_s if every_s else 0)
        watch = seen(watch, ("n2",), answering, {"megatron": step} if says_steps else {}, now, line_s=line_s)
        if lost(watch, now, elastic=elastic) == ("n2",):
            return now - began
        now += AGAIN_S
    return None


@pytest.mark.parametrize(
    ("found", "at"),
    [
        (found_after(), STILL_S),
        (found_after(ANSWERS), PATIENT_S),
        (found_after(elastic=True), PATIENT_S),
        (found_after(line_s=100.0), 300.0),
        (found_after(line_s=None), UNKNOWN_S),
        (found_after(line_s=None, says_steps=False), STILL_S),
        (found_after(ANSWERS, line_s=None, says_steps=False), PATIENT_S),
        (found_after(every_s=10), None),
        (found_after(every_s=105, line_s=105.0), None),
        (found_after(every_s=150, line_s=None), None),
        (found_after(ANSWERS, every_s=600), None),
        (found_after(elastic=True, every_s=600), None),
    ],
    ids=[
        "power cut",
        "slurmd alone",
        "elastic",
        "long steps",
        "unknown steps",
        "no steps in the log",
        "slurmd alone, no steps in the log",
        "continues",
        "continues, long steps",
        "continues, unknown steps",
        "slurmd alone, long steps",
        "elastic, long steps",
    ],
)
def test_the_command_is_started_again_only_where_it_makes_no_step(found: float | None, at: float | None) -> None:
    assert found == at


def test_one_answer_of_slurms_and_a_node_that_comes_back_are_nothing() -> None:
    watch = seen(Watch(), ("n2",), GONE, {}, 0.0)
    assert lost(watch, PATIENT_S + 1, elastic=False) == ()
    watch = seen(watch, (), (), {}, 5.0)
    watch = seen(watch, ("n2",), GONE, {}, 10.0)
    assert lost(watch, PATIENT_S + 1, elastic=False) == ()


def test_a_step_that_was_said_before_the_node_was_missing_counts_where_the_log_has_been_flooded_since() -> None:
    watch = seen(Watch(), (), (), {"megatron": 3.0}, 0.0)
    for now in (5.0, 10.0, 15.0, 30.0):
        watch = seen(watch, ("n2",), GONE, {}, now)
    assert lost(watch, 30.0, elastic=False) == ()
    assert lost(watch, 5.0 + UNKNOWN_S, elastic=False) == ("n2",)


@pytest.mark.parametrize(
    ("command", "least"),
    [
        ("srun torchrun --nnodes=2:4 train.py", 2),
        ("srun torchrun --nnodes 1:8 train.py", 1),
        ("srun bash -c 'torchrun --nnodes=2:4 train.py'", 2),
        ("srun torchrun --nnodes=4:4 train.py", 4),
        ("srun torchrun --nnodes=4 train.py", 4),
        ("srun python train.py --time 1:30", 4),
    ],
)
def test_how_few_nodes_a_command_can_run_on_is_its_own_word(command: str, least: int) -> None:
    assert least_nodes(command.split(), 4) == least
