"""`python -m tests.accuracy.sources`: the same hangs with each source of evidence switched off. Figures as JSON lines on
standard output; `--write` keeps them for docs/evaluation.md, which `make docs` then writes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace as changed

from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.state.evidence_collection import FLIGHT_RECORDER, RAS
from slurm_watchdog.model.incidents import StackRequest
from tests.accuracy.cases import (
    Builder,
    hang_at_evaluation,
    hang_in_a_step,
    hang_of_everybody,
    rank_that_cannot_be_dumped,
)
from tests.accuracy.cases_machine import records_of, seen_elsewhere, seen_with_the_others
from tests.accuracy.drive import Drive, _Mail
from tests.accuracy.run import COARSE_LOOKS_S, quiet
from tests.accuracy.scene import Scene, Setup
from tests.accuracy.score import names, right_ones
from tests.bench.figures import Figures, take_standard_output

RESULTS = Path(__file__).parent / "sources.json"
STACKS, GPUS = "stacks", "GPU readings"
SETTLE_S = 90.0
SEEDS, SIZES = 4, (1, 2, 8)
OFF: dict[str, frozenset[str]] = {
    "all of them": frozenset(),
    "without stacks": frozenset({STACKS}),
    "without GPU readings": frozenset({GPUS}),
    "without the Flight Recorder": frozenset({FLIGHT_RECORDER}),
    "without NCCL's RAS": frozenset({RAS}),
    "without either record": frozenset({FLIGHT_RECORDER, RAS}),
    "stacks alone": frozenset({GPUS, FLIGHT_RECORDER, RAS}),
    "records without stacks and GPUs": frozenset({STACKS, GPUS}),
}


FAULTS: tuple[tuple[Builder, bool], ...] = (
    (hang_in_a_step, True),
    (hang_at_evaluation, True),
    (rank_that_cannot_be_dumped, True),
    (seen_with_the_others, True),
    (seen_elsewhere, False),
    (hang_of_everybody, False),
)
"""(scene, whether the rank that it makes look different has not entered the collective)."""


class SourceDrive(Drive):
    """A judgement without some of its sources; records of collectives come when evidence of the incident is in."""

    def __init__(self, scene: Scene, off: frozenset[str], *, absent: bool):
        super().__init__(scene.world, Config(), calm_s=COARSE_LOOKS_S)
        self._off = off
        kept = records_of(scene, absent=absent)
        scene.world.records = lambda: tuple(each for each in kept() if each.source not in off)

    def _deliver(self, mail: _Mail, t: float) -> None:
        super()._deliver(replace(mail, report=changed(mail.report, gpus=())) if GPUS in self._off else mail, t)

    def _dump(self, wanted: StackRequest, t: float, asked_at: float) -> None:
        if STACKS not in self._off:
            super()._dump(wanted, t, asked_at)


@quiet()
def run_one(fault: int, seed: int, nodes: int, off: frozenset[str]) -> tuple[bool, bool, bool]:
    """Whether it was found, who should be named was, and somebody was who should not be."""
    build, absent = FAULTS[fault]
    scene = build(Setup(seed, nodes))
    drive = SourceDrive(scene, off, absent=absent)

    def done(story: Any, now: float) -> bool:
        if scene.fault_at is None or now < scene.fault_at:
            return False
        right = right_ones(scene.expect, story.incidents.values())
        return bool(right) and now > (right[0].fired_at or 0.0) + SETTLE_S

    story = drive.run(scene.until_s, done)
    expect = scene.expect if absent else replace(scene.expect, nodes=None, ranks=None, nobody=True)
    right = right_ones(scene.expect, story.incidents.values())
    named = any(names(expect, each) for each in right)
    return bool(right), named, any(each.culprits for each in right) and not named


def main() -> int:
    """Returns 0 if nobody is named wrongly with all sources on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    figures = Figures(take_standard_output())
    plan = [
        (name, (fault, seed, nodes, off))
        for name, off in OFF.items()
        for fault in range(len(FAULTS))
        for seed in range(options.seeds)
        for nodes in SIZES
    ]
    with ProcessPoolExecutor(options.processes) as pool:
        came = list(pool.map(run_one, *zip(*(given for _, given in plan), strict=True)))
    rows = []
    for name in OFF:
        mine = [(given[0], got) for (row, given), got in zip(plan, came, strict=True) if row == name]
        rows.append(
            {
                "sources": name, "runs": len(mine), "found": 100 * sum(got[0] for _, got in mine) / len(mine),
                "right": 100 * sum(got[1] for _, got in mine) / len(mine), "wrong": sum(got[2] for _, got in mine),
                "faults": {
                    FAULTS[fault][0].__name__: 100 * sum(got[1] for at, got in mine if at == fault) / (len(mine) / len(FAULTS))
                    for fault in range(len(FAULTS))
                },
            }
        )  # fmt: skip
        figures.add(f"sources.{name.replace(' ', '_')}.right", rows[-1]["right"], "%")
        figures.add(
            f"sources.{name.replace(' ', '_')}.wrong", rows[-1]["wrong"], "1", at_most=0 if not OFF[name] else None
        )
    if options.write:
        kept = {"date": datetime.now(UTC).date().isoformat(), "rows": rows}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 1 if figures.missed else 0


if __name__ == "__main__":
    sys.exit(main())
