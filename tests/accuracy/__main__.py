"""`python -m tests.accuracy`: the accuracy matrix. Figures as JSON lines on standard output, progress and a
table on standard error."""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import datetime, timezone
from pathlib import Path

from lab.bench.figures import Figures, take_standard_output
from slurm_watchdog.recording.recorder import Recorder
from tests.accuracy import matrix
from tests.accuracy.cases import CASES
from tests.accuracy.healthy import THINGS
from tests.accuracy.run import FINE_EVERY, case_scene, direct, run_case, run_thing, thing_scene
from tests.rig.commands import commit

RESULTS = Path(__file__).parents[2] / "lab/results/accuracy.json"


def main() -> int:
    """Returns 0 if every bound holds."""
    parser = argparse.ArgumentParser(prog="make accuracy", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names of cases and healthy things (default: all)")
    parser.add_argument("--hours", type=float, default=matrix.HOURS, help="healthy job-hours in all (default 10000)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="begin no further run after so long (default: do all)",
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed-from", type=int, default=0, help="first seed of every case and thing (default 0)")
    parser.add_argument(
        "--write",
        action="store_true",
        help="keep the result for docs/evaluation.md, which `make docs` then writes",
    )
    one = parser.add_argument_group("one run, to look at it closely")
    one.add_argument("--case", help="its full name, such as case_05_lingering_gone or healthy_requeue")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--nodes", type=int, default=2, help="of a case; a healthy thing draws its own size from its seed")
    one.add_argument("--way", choices=("direct", "replay"), default="direct")
    one.add_argument("--record", metavar="FILE", help="record it, for `replay`")
    options = parser.parse_args()
    if options.case:
        return one_run(options)
    figures = Figures(take_standard_output())
    jobs = matrix.plan(options.hours, tuple(options.names), options.seed_from)
    if not jobs:
        parser.error("nothing has such a name")
    results = matrix.run(jobs, options.processes, options.minutes)
    matrix.write_figures(figures, results)
    print("\n".join(matrix.table(results)), file=sys.stderr)
    done = len(results.scores) + sum(each.runs for each in results.healthy.values())
    print(
        f"accuracy: {done} of {len(jobs)} runs in {results.seconds:.0f} s; {len(figures.missed)} bounds are missed",
        file=sys.stderr,
    )
    if options.write:
        today = datetime.now(timezone.utc).date().isoformat()
        RESULTS.write_text(json.dumps(matrix.summary(results, today, commit()), indent=1) + "\n", encoding="utf-8")
    return 1 if figures.missed else 0


def one_run(options: argparse.Namespace) -> int:
    """One case or thing with one seed: what was said, or its trace."""
    case = next((each for each in CASES if each.key == options.case), None)
    thing = next((each for each in THINGS if each.key == options.case), None)
    if case is None and thing is None:
        names = "\n  ".join([each.key for each in CASES] + [each.key for each in THINGS])
        print(f"there is no {options.case!r}; there are:\n  {names}", file=sys.stderr)
        return 2
    if options.record:
        scene = case_scene(case, options.seed, options.nodes) if case else thing_scene(thing, options.seed)  # type: ignore[arg-type]
        recorder = Recorder(options.record, max_waiting=0)
        direct(scene, recorder)
        recorder.close()
        print(f"{options.record}: fault at {scene.fault_at} s, expected: {scene.expect}", file=sys.stderr)
        return 0
    if case is not None:
        score = run_case(case, options.seed, options.nodes, options.way)
        print(score, *score.said, sep="\n")
        return 0 if score.perfect else 1
    assert thing is not None
    hours, said, failures, nodes = run_thing(thing, options.seed)
    fine = "5 s" if thing.fine or options.seed % FINE_EVERY == 0 else "20 s"
    print(
        f"{hours:.1f} simulated job-hours on {nodes} nodes, reports every {fine}, {len(said)} false incidents, failures: {failures}"
    )
    for incident in said:
        print(f"{incident.fired_at:.0f} s: {incident.kind}: {incident.summary}", *incident.facts, sep="\n    ")
    return 1 if said or failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
