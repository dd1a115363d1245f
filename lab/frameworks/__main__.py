"""`python -m lab.frameworks [FRAMEWORK…]`: a line of JSON a case on standard output, the table with --write."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.frameworks import table
from lab.frameworks.case import SHORT, Case, Hearer
from lab.frameworks.catalogue import FAULTS, chosen, fault_named
from lab.frameworks.judge import judge
from lab.frameworks.outcome import Outcome
from tests.rig.commands import commit

ROOT = Path(__file__).parents[2]
SHIPPED = "lab/results/frameworks-shipped.json"
SHIPPED_PATIENCE_S = 4500.0
SHIPPED_PHASE_S = 150.0  # 2.5 times the limit of a step


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m lab.frameworks", description=__doc__)
    parser.add_argument("frameworks", nargs="*", help="names, first words of names, or scripts (default: all)")
    parser.add_argument(
        "--faults", nargs="+", choices=[fault.name for fault in FAULTS], default=[fault.name for fault in FAULTS]
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="cases at a time (default %(default)s)")
    parser.add_argument("--shipped", action="store_true", help="with the limits as shipped: hours")
    parser.add_argument(
        "--python",
        default=os.environ.get("FRAMEWORKS_PYTHON", str(ROOT / ".venv-frameworks" / "bin" / "python")),
        help="interpreter that has the frameworks",
    )
    parser.add_argument("--keep", metavar="DIR", help="keep logs and journals of all cases there")
    parser.add_argument("--results", metavar="F", help="append each outcome to this file, and write the table from it")
    parser.add_argument(
        "--write", action="store_true", help=f"write {table.FILE} from these cases and those in --results"
    )
    return parser.parse_args()


def cases(args: argparse.Namespace, place: Path) -> Iterator[Case]:
    """Every fault of every framework that was asked for."""
    hearer = Hearer()
    for name in args.faults:
        for framework in chosen(args.frameworks):
            case = Case(framework, fault_named(name), place, args.python, hearer)
            case.directory = place / case.name
            if args.shipped:
                case.limits, case.patience_s, case.phase_s = {}, SHIPPED_PATIENCE_S, SHIPPED_PHASE_S
            yield case


def run_all(args: argparse.Namespace, place: Path) -> list[Outcome]:
    """Runs them, some at a time; each is printed as it ends."""
    outcomes, releases = [], table.versions(args.python)
    with ThreadPoolExecutor(args.jobs) as pool:
        futures = [pool.submit(case.run) for case in cases(args, place)]
        for future in _as_they_end(pool, futures):
            outcome = table.with_releases(future.result(), releases)
            outcomes.append(outcome)
            print(json.dumps(asdict(judge(outcome)) | {"ok": judge(outcome).ok}), flush=True)
            if args.results:
                with open(args.results, "a") as file:
                    file.write(json.dumps(outcome.as_json()) + "\n")
    return outcomes


def _as_they_end(pool: ThreadPoolExecutor, futures: list[Future[Outcome]]) -> Iterator[Future[Outcome]]:
    """Ctrl-C starts no further case; those that run come to their end."""
    try:
        yield from as_completed(futures)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def shipped(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What README says of runs with the limits as shipped, with the day and the product."""
    verdicts = [judge(each) for each in outcomes]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "seconds": SHIPPED_PHASE_S,
        "cases": [[each.framework, each.fault, verdict.ok] for each, verdict in zip(outcomes, verdicts, strict=True)],
    }


def main() -> int:
    """Returns 0 if every case met the target, 1 if not."""
    args = options()
    try:
        chosen(args.frameworks)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not Path(args.python).exists():
        print(f"There is no {args.python}: `make frameworks` makes it (some GB).", file=sys.stderr)
        return 2
    if args.keep:
        outcomes = run_all(args, Path(args.keep).absolute())
    else:
        with tempfile.TemporaryDirectory(prefix="slurm-watchdog-frameworks-") as place:
            outcomes = run_all(args, Path(place))
    if args.write and args.shipped:
        (ROOT / SHIPPED).write_text(json.dumps(shipped(outcomes), indent=1) + "\n")
    elif args.write:
        kept = table.read(Path(args.results)) if args.results else outcomes
        text = json.dumps(table.results(kept, SHORT, commit()), indent=1)
        (ROOT / table.FILE).write_text(text + "\n")
    return 0 if all(judge(outcome).ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
