"""Four losses of the chronicle of a 176B training (48 nodes, 105 s a step): what a report counts is what people wrote.

A row is a loss: how long each run stood after its last step, how many steps the run after it made again, and the hours
that the chronicle says were lost.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurm_watchdog.analysis.lost_time import report
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.incidents import IncidentState
from slurm_watchdog.model.run_record import RunRecord, Spell
from tests.builders.cli import run
from tests.builders.notices import INCIDENT, replace

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


def test_the_command_reports_the_whole_chronicle_from_a_journal(tmp_path: Path) -> None:
    """As jobs of one user: 42.3 h were lost, 2,030 node-hours on 48 nodes."""
    journal = Journal(f"sqlite:///{tmp_path}/journal.sqlite")
    for number, name in enumerate(LOSSES, 11):
        runs, spells = told(name)
        for each in runs:
            journal.run_records.save(
                replace(each, job_id=f"{number}", user="stas", uid=1, name="tr11", partition="gpu")
            )
        for index, spell in enumerate(spells):
            journal.save_incident(
                replace(
                    INCIDENT, id=f"i{number}{index}", kind=spell.kind, job_ids=(f"{number}",), runs=((f"{number}", spell.restarts),),
                    state=IncidentState.RESOLVED, opened_at=spell.began_at, fired_at=spell.began_at, resolved_at=spell.ended_at,
                )
            )  # fmt: skip
    journal.close()
    of = ("--from", "2022-04-01", "--to", "2022-12-31", "--user", "st*", "--journal", str(tmp_path / "journal.sqlite"))
    found = json.loads(run("report", *of, "--json").output)
    lost = {cause: hours / NODES for cause, hours in found["lost_h"] if hours / NODES > 0.01}
    assert lost == pytest.approx(
        {"collective_hang": 12.2 + 3.1 + 8.1, "recomputed steps": 7.3 + 5.8 + 2.9 + 2.9}, rel=0.05
    )
    assert sum(lost.values()) == pytest.approx(sum(SAID_H.values()), rel=0.02)
    each = {job["job_id"]: (job["measured_h"] - job["effective_h"]) / NODES for job in found["jobs"]}
    assert list(each.values()) == pytest.approx(sorted(SAID_H.values(), reverse=True), rel=0.05)
    assert "collective_hang   1,12" in run("report", *of).output
