"""Four losses of the chronicle of a 176B training (48 nodes, 105 s a step): what a report counts is what people wrote.

A row is a loss: how long each run stood after its last step, how many steps the run after it made again, and the hours
that the chronicle says were lost.
"""

from __future__ import annotations

import pytest

from slurm_watchdog.analysis.lost_time import report
from slurm_watchdog.model.run_record import RunRecord, Spell

T, H, STEP_S, NODES, STEPS = 1_650_000_000.0, 3600.0, 105.0, 48, 1000
LOSSES = {
    # A GPU died 2 steps before the checkpoint, of which there was one in 250 steps; Slurm requeued at once.
    "gpu": ([(0.0, 248, "")], {"recomputed steps": 7.3}),
    # It hung at the evaluation, was ended after 3 h, hung there again through the night; a checkpoint in 100 steps.
    "eval at 45k": (
        [(3.0, 100, "collective_hang"), (9.2, 100, "collective_hang")],
        {"collective_hang": 12.2, "recomputed steps": 5.8},
    ),
    "eval at 51k": ([(3.1, 100, "collective_hang")], {"collective_hang": 3.1, "recomputed steps": 2.9}),
    "eval again": ([(8.1, 100, "collective_hang")], {"collective_hang": 8.1, "recomputed steps": 2.9}),
}
SAID_H = {"gpu": 7.3, "eval at 45k": 18.0, "eval at 51k": 6.0, "eval again": 11.0}


def told(job_id: str) -> tuple[list[RunRecord], list[Spell]]:
    runs, spells = [], []
    at, step = T, 0
    for number, (waited_h, again, kind) in enumerate([*LOSSES[job_id][0], (0.0, 0, "")]):
        last_at = at + STEPS * STEP_S
        ended_at = last_at + waited_h * H
        runs.append(
            RunRecord(
                job_id=job_id, restarts=number, began_at=at, ended_at=ended_at, seen_at=ended_at, nodes=NODES, step_s=STEP_S,
                first_step=step, last_step=step + STEPS, first_rise_at=at, last_rise_at=last_at, state="NODE_FAIL",
            )
        )  # fmt: skip
        if kind:
            spells.append(Spell(job_id=job_id, restarts=number, kind=kind, began_at=last_at, ended_at=ended_at))
        at, step = ended_at, step + STEPS - again
    return runs, spells


@pytest.mark.parametrize("job_id", LOSSES)
def test_the_hours_lost_by_cause_are_those_of_the_chronicle(job_id: str) -> None:
    found = report(*told(job_id), T, T + 1000 * H)
    lost = {cause: hours / NODES for cause, hours in found.lost_h if hours / NODES > 0.01}
    assert lost == pytest.approx(LOSSES[job_id][1], rel=0.05)
    assert sum(lost.values()) == pytest.approx(SAID_H[job_id], rel=0.05)
    runs = len(LOSSES[job_id][0]) + 1
    kept_h = (runs * STEPS - sum(again for _, again, _ in LOSSES[job_id][0])) * STEP_S / H
    assert found.effective_h / NODES == pytest.approx(kept_h)
