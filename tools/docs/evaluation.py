"""Writes the tables of docs/evaluation.md from the newest kept runs of `make accuracy`, `make bench ARGS=recovery` and
`make compare`: `python -m tools.docs evaluation`.

The rest of the page is prose, and stays as it is. `make accuracy ARGS=--write` keeps a run in
tests/accuracy/results.json; tools/docs/recovery.py says where the others are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.docs import recovery
from tools.docs.marks import between

CHECKOUT = Path(__file__).parents[2]
FILE = CHECKOUT / "docs/evaluation.md"
RESULTS = CHECKOUT / "tests/accuracy/results.json"
SOURCES = CHECKOUT / "tests/accuracy/sources.json"


def write() -> str:
    """The whole page: its text as it is, with new tables."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = between(FILE.read_text(encoding="utf-8"), "accuracy", accuracy(results))
    off = json.loads(SOURCES.read_text(encoding="utf-8"))
    page = between(page, "sources", sources(off))
    page = between(page, "sources by case", sources_by_case(off))
    page = between(page, "recovery", recovery.recovery())
    return between(page, "compare", recovery.compare())


def sentence(results: Mapping[str, Any]) -> str:
    """What came of it, for one line."""
    cases, healthy = results["cases"], results["healthy"]
    missed = [_name(row) for row in cases if not _is_perfect(row)]
    verdict = (
        f"not as they should be: {', '.join(missed)}"
        if missed
        else "all found in time, with the right culprit and without another incident"
    )
    return (
        f"{sum(row['runs'] for row in cases)} runs of {len({row['case'] for row in cases})} cases, "
        f"{verdict}; {sum(row['hours'] for row in healthy):,.0f} healthy job-hours, "
        f"{sum(row['false'] for row in healthy)} false incidents ({results['date']}, {results['commit']})."
    )


def accuracy(results: Mapping[str, Any]) -> str:
    """Two tables, and a sentence before each, of what `tests.accuracy.matrix.summary` kept."""
    cases, healthy = results["cases"], results["healthy"]
    hours, false = sum(row["hours"] for row in healthy), sum(row["false"] for row in healthy)
    lines = [
        f"On {results['date']}, in {results['minutes']} minutes: {sentence(results)}",
        "",
        "| case | runs | found | right culprit | seconds to verdict, p50 / p99 | other incidents |",
        "|---|---|---|---|---|---|",
        *(f"| {_name(row)} | {row['runs']} | {_percent(row['found'])} | {_percent(row['culprit'])} | "
                f"{_s(row['p50_s'])} / {_s(row['p99_s'])} | {row['false']} |" for row in cases),
        "",
        "What healthy jobs did, for how long:",
        "",
        "| healthy thing | simulated job-hours | false incidents |",
        "|---|---|---|",
        *(f"| {row['thing'].removeprefix('healthy_').replace('_', ' ')} | {row['hours']:,.0f} | {row['false']} |" for row in healthy),
        f"| **together** | **{hours:,.0f}** | **{false}** |",
    ]  # fmt: skip
    return "\n".join(lines)


def sources(results: Mapping[str, Any]) -> str:
    """A table of what `tests.accuracy.sources` kept."""
    rows = results["rows"]
    faults = list(rows[0]["faults"])
    lines = [
        f"On {results['date']}, {rows[0]['runs']} runs a row:",
        "",
        f"| sources | found | right verdict | somebody wrongly named | {' | '.join(f.replace('_', ' ') for f in faults)} |",
        "|---|---|---|---|" + "---|" * len(faults),
        *(f"| {row['sources']} | {_percent(row['found'])} | {_percent(row['right'])} | {row['wrong']} | "
          f"{' | '.join(_percent(row['faults'][each]) for each in faults)} |" for row in rows),
    ]  # fmt: skip
    return "\n".join(lines)


def sources_by_case(results: Mapping[str, Any]) -> str:
    """Of the same: a row for each case that comes out otherwise without one of the sources."""
    rows = results["cases"]
    all_of_them, *off = rows[0]["right"]
    changed = [row for row in rows if any(_cell(row, name) != _cell(row, all_of_them) for name in off)]
    total = {name: sum(row["wrong"][name] for row in rows) for name in (all_of_them, *off)}
    lines = [
        f"{sum(row['runs'] for row in rows)} runs of {len(rows)} cases in each column; the {len(rows) - len(changed)} cases "
        "that are not in the table come out the same without any single one:",
        "",
        f"| case | {all_of_them} | {' | '.join(f'without {name}' for name in off)} |",
        f"|---|---|{'---|' * len(off)}",
        *(f"| {_name({'way': '', **row})} | {' | '.join(_cell(row, name) for name in (all_of_them, *off))} |" for row in changed),
        f"| **somebody wrongly named** | {' | '.join(str(total[name]) for name in (all_of_them, *off))} |",
    ]  # fmt: skip
    return "\n".join(lines)


def _cell(row: Mapping[str, Any], name: str) -> str:
    wrong = row["wrong"][name]
    return f"{row['right'][name]:.0f} %" + (f", {wrong} wrong" if wrong else "")


def _is_perfect(row: Mapping[str, Any]) -> bool:
    return row["found"] == row["culprit"] == 100 and not row["late"] and not row["false"]


def _name(row: Mapping[str, Any]) -> str:
    way = " (plain trace)" if row["way"] == "trace" else ""
    return f"{row['case'].removeprefix('case_').replace('_', ' ')}{way}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s"
