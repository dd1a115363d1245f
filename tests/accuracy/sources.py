"""`python -m tests.accuracy.sources`: the same faults with each source of evidence switched off: hangs, which several
sources tell, and every case of the matrix. Figures as JSON lines on standard output; `--write` keeps them for
docs/evaluation.md, which `make docs` then writes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from lab.bench.figures import Figures, take_standard_output
from slurm_watchdog.controller.evidence.collection import FLIGHT_RECORDER, RAS
from slurm_watchdog.model.incidents import Incident
from tests.accuracy.cases import (
    CASES,
    Builder,
    hang_at_evaluation,
    hang_in_a_step,
    hang_of_everybody,
    rank_that_cannot_be_dumped,
)
from tests.accuracy.cases_machine import records_of, seen_elsewhere, seen_with_the_others
from tests.accuracy.run import quiet
from tests.accuracy.scene import Expect, Scene, Setup
from tests.accuracy.score import names, right_ones
from tests.accuracy.source_drive import (
    GPUS,
    JOB_LOG,
    KERNEL_LOG,
    LINKS,
    MEMORY,
    PROBES,
    SLEEP,
    STACKS,
    SourceDrive,
)
from tests.rig.commands import commit

RESULTS = Path(__file__).parents[2] / "lab/results/sources.json"
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
ONE_OFF: dict[str, frozenset[str]] = {
    "all of them": frozenset(),
    **{
        each: frozenset({each})
        for each in (STACKS, GPUS, JOB_LOG, KERNEL_LOG, SLEEP, PROBES, MEMORY, LINKS, FLIGHT_RECORDER)
    },
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


class Outcome(NamedTuple):
    """Of one run."""

    found: bool
    right: bool
    """Who should be named was, and nobody else; or nobody, if nobody should be."""
    wrong: bool
    """Somebody was named who should not be, and nobody right."""


def _judged(scene: Scene, off: frozenset[str], kinds: tuple[str, ...], expect: Expect) -> Outcome:
    """Until the rank or node that should be named is, and for a while longer; or until nobody was, where nobody should be."""
    scene.expect = replace(scene.expect, kinds=kinds)
    drive = SourceDrive(scene.world, off)

    def wanted() -> Expect:
        """As the scene has filled it in when it broke. What cannot be read of GPUs names none."""
        found = replace(scene.expect, nodes=None, ranks=None, nobody=True) if expect.nobody else scene.expect
        return replace(found, gpu=None) if GPUS in off else found

    def since(incidents: Iterable[Incident]) -> list[Incident]:
        at = float("inf") if scene.fault_at is None else scene.fault_at
        return [each for each in right_ones(scene.expect, incidents) if (each.fired_at or 0.0) >= at]

    def done(story: Any, now: float) -> bool:
        enough = [each for each in since(story.incidents.values()) if names(wanted(), each)]
        return bool(enough) and now > (enough[0].fired_at or 0.0) + SETTLE_S

    found = since(drive.run(scene.until_s, done).incidents.values())
    named = any(names(wanted(), each) for each in found)
    return Outcome(bool(found), named, any(each.culprits for each in found) and not named)


@quiet()
def hang(fault: int, seed: int, nodes: int, off: frozenset[str]) -> Outcome:
    """One of FAULTS."""
    build, absent = FAULTS[fault]
    scene = build(Setup(seed, nodes))
    scene.world.records = records_of(scene, absent=absent)
    return _judged(scene, off, scene.expect.kinds, replace(scene.expect, nobody=not absent))


@quiet()
def case(place: int, seed: int, nodes: int, off: frozenset[str]) -> Outcome:
    """One of CASES, in whichever words its fault is reported."""
    scene = CASES[place].build(Setup(seed, nodes))
    return _judged(scene, off, (*scene.expect.kinds, *scene.expect.also), scene.expect)


def hangs(pool: Executor, seeds: int, figures: Figures) -> list[dict[str, Any]]:
    """A row for each of OFF."""
    plan = [
        (name, (fault, seed, nodes, off))
        for name, off in OFF.items()
        for fault in range(len(FAULTS))
        for seed in range(seeds)
        for nodes in SIZES
    ]
    came = list(pool.map(hang, *zip(*(given for _, given in plan), strict=True)))
    rows: list[dict[str, Any]] = []
    for name in OFF:
        mine = [(given[0], got) for (row, given), got in zip(plan, came, strict=True) if row == name]
        rows.append(
            {
                "sources": name, "runs": len(mine), "found": _percent(got.found for _, got in mine),
                "right": _percent(got.right for _, got in mine), "wrong": sum(got.wrong for _, got in mine),
                "faults": {
                    FAULTS[fault][0].__name__: _percent(got.right for at, got in mine if at == fault)
                    for fault in range(len(FAULTS))
                },
            }
        )  # fmt: skip
        figures.add(f"sources.{name.replace(' ', '_')}.right", rows[-1]["right"], "%")
        figures.add(
            f"sources.{name.replace(' ', '_')}.wrong", rows[-1]["wrong"], "1", at_most=0 if not OFF[name] else None
        )
    return rows


def cases(pool: Executor, seeds: int, figures: Figures) -> list[dict[str, Any]]:
    """A row for each of CASES: how many of its runs came out right, and wrong, with each of ONE_OFF."""
    plan = [
        (place, name, (place, seed, nodes, off))
        for place, each in enumerate(CASES)
        for name, off in ONE_OFF.items()
        for nodes in each.sizes
        if nodes in SIZES
        for seed in range(seeds)
    ]
    came = list(pool.map(case, *zip(*(given for _, _, given in plan), strict=True), chunksize=4))
    rows: list[dict[str, Any]] = []
    for place, each in enumerate(CASES):
        mine: dict[str, list[Outcome]] = {name: [] for name in ONE_OFF}
        for (at, name, _), got in zip(plan, came, strict=True):
            if at == place:
                mine[name].append(got)
        rows.append(
            {
                "case": each.key, "runs": len(mine["all of them"]),
                "right": {name: _percent(got.right for got in all_got) for name, all_got in mine.items()},
                "wrong": {name: sum(got.wrong for got in all_got) for name, all_got in mine.items()},
            }
        )  # fmt: skip
    for name in ONE_OFF:
        right = sum(row["right"][name] * row["runs"] for row in rows) / sum(row["runs"] for row in rows)
        figures.add(f"cases.{name.replace(' ', '_')}.right", right, "%", at_least=100 if not ONE_OFF[name] else None)
        wrong = sum(row["wrong"][name] for row in rows)
        figures.add(f"cases.{name.replace(' ', '_')}.wrong", wrong, "1", at_most=0 if not ONE_OFF[name] else None)
    return rows


def _percent(came: Iterable[bool]) -> float:
    each = list(came)
    return 100 * sum(each) / len(each)


def main() -> int:
    """Returns 0 if all come out right with all sources on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"of each hang, half as many of a case ({SEEDS})")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cases-only", action="store_true", help="the cases again; the hangs stay as they are kept")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    figures = Figures(take_standard_output())
    with ProcessPoolExecutor(options.processes) as pool:
        kept_rows = json.loads(RESULTS.read_text())["rows"] if options.cases_only else []
        rows = kept_rows or hangs(pool, options.seeds, figures)
        of_cases = cases(pool, max(1, options.seeds // 2), figures)
    if options.write:
        kept = {
            "date": datetime.now(timezone.utc).date().isoformat(),
            "commit": commit(),
            "rows": rows,
            "cases": of_cases,
        }
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 1 if figures.missed else 0


if __name__ == "__main__":
    sys.exit(main())
