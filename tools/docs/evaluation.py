"""Writes the tables of docs/evaluation.md from the kept runs below lab/results: `python -m tools.docs evaluation`.

Each run is kept by its own command with `--write` (`make accuracy ARGS=--write`, …), with its date and commit.
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
KEPT = CHECKOUT / "lab/results"


def read(name: str) -> dict[str, Any]:
    """A kept run."""
    found = json.loads((KEPT / f"{name}.json").read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def write() -> str:
    """The whole page: its text as it is, with new tables."""
    page = FILE.read_text(encoding="utf-8")
    blocks = {
        "accuracy": accuracy(read("accuracy")),
        "sources": sources(read("sources")),
        "frameworks": frameworks(read("frameworks")),
        "bad_nodes": bad_nodes(read("bad_nodes")),
        "recovery": recovery.recovery(KEPT / "recovery.json"),
        "compare": recovery.compare(KEPT / "compare.json", KEPT / "recovery.json"),
    }
    for name, block in blocks.items():
        page = between(page, name, block)
    return page


def measured(kept: Mapping[str, Any], command: str) -> str:
    """When, of what and how."""
    return f"{kept['date']}, commit {kept['commit']}, `{command}`"


def sentence(results: Mapping[str, Any]) -> str:
    """What came of it, for one line."""
    cases, healthy = results["cases"], results["healthy"]
    missed = list(dict.fromkeys(_name(row) for row in cases if not _is_perfect(row)))
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
    """Each case of what `tests.accuracy.matrix.summary` kept, its ways together; the hours of healthy jobs."""
    cases, healthy = results["cases"], results["healthy"]
    ways = [[row for row in cases if row["case"] == name] for name in dict.fromkeys(row["case"] for row in cases)]
    wrong = [
        f"{row['thing'].removeprefix('healthy_').replace('_', ' ')} {row['false']}" for row in healthy if row["false"]
    ]
    lines = [
        f"{measured(results, 'make accuracy')} ({results['minutes']} min): {sentence(results)}",
        "",
        f"Seconds to the verdict, median / 99th percentile: {'; '.join(map(_case, ways))}.",
        "",
        f"Healthy jobs did {len(healthy)} things that look like a fault (evaluations, long saves, retries, full memory, …), for "
        f"{sum(row['hours'] for row in healthy):,.0f} hours; false: {', '.join(wrong) or 'none'}.",
    ]
    return "\n".join(lines)


def _case(ways: list[Mapping[str, Any]]) -> str:
    first, runs = ways[0], sum(row["runs"] for row in ways)
    found = sum(row["runs"] * row["found"] for row in ways) / runs
    judged = [row for row in ways if row["culprit"] is not None]
    named = sum(row["runs"] for row in judged)
    right = sum(row["runs"] * row["culprit"] for row in judged) / named if named else None
    false = sum(row["false"] for row in ways)
    missed = "" if found == right == 100 else f"; found {_percent(found)}, right culprit {_percent(right)}"
    other = f"; {false} other incidents" if false else ""
    seconds = " / ".join("-" if first[each] is None else f"{first[each]:.0f}" for each in ("p50_s", "p99_s"))
    return f"{_name(first)} {seconds}{missed}{other}"


def sources(results: Mapping[str, Any]) -> str:
    """What `tests.accuracy.sources` kept, a line for each set of sources."""
    rows, told = results["rows"], []
    for row in rows:
        missed = [
            f"{name.replace('_', ' ')} {_percent(share)}" for name, share in row["faults"].items() if share != 100
        ]
        wrong = f", {row['wrong']} wrongly named" if row["wrong"] else ""
        told.append(f"{row['sources']}: {_percent(row['right'])}{wrong}{_in_brackets(missed)}")
    command = measured(results, "python -m tests.accuracy.sources --write")
    head = f"{command}, right verdicts in {rows[0]['runs']} runs of {len(rows[0]['faults'])} hangs each:"
    return f"{head} {'; '.join(told)}."


def _in_brackets(words: list[str]) -> str:
    return f" ({', '.join(words)})" if words else ""


def frameworks_sentence(kept: Mapping[str, Any]) -> str:
    """What came of the runs of `make frameworks`, for one line."""
    cases = [case for each in kept["frameworks"] for case in each["cases"] if not case["broke"]]
    faults, healthy = ([case for case in cases if case["healthy"] is well] for well in (False, True))
    return (
        f"{len(kept['frameworks'])} frameworks, {len(cases)} cases. Of {len(faults)} faults "
        f"{sum(case['found_s'] is not None for case in faults)} were reported, {sum(case['rank'] == 'right' for case in faults)} "
        f"with the right rank, {sum(case['rank'] in ('nobody', 'none') for case in faults)} naming no rank, "
        f"{sum(case['rank'].startswith('WRONG') for case in faults)} with a wrong one; "
        f"{sum(bool(case['resumed_at']) for case in faults)} were restarted and resumed from their own checkpoint. "
        f"Of {len(healthy)} healthy cases {sum(case['ended'] and not case['false'] for case in healthy)} were not touched. "
        f"False sentences: {sum(len(case['false']) for case in cases)}."
    )


def frameworks(kept: Mapping[str, Any]) -> str:
    """A row for each framework of what `lab.frameworks.table.results` kept."""
    lines = [
        f"{measured(kept, 'make frameworks')}: {frameworks_sentence(kept)}",
        "",
        "| framework | its log | reported | rank: right, none, wrong | cause in the sentence | s to the report | s to the next new step |",
        "|---|---|---|---|---|---|---|",
        *(_framework(each) for each in kept["frameworks"]),
    ]
    missing = [f"{name} ({why})" for name, why in kept["not_tried"].items()]
    return "\n".join([*lines, *(["", f"Not tried: {'; '.join(missing)}."] if missing else [])])


def _framework(kept: Mapping[str, Any]) -> str:
    faults = [case for case in kept["cases"] if not case["healthy"]]
    ranks = [sum(case["rank"].startswith(word) for case in faults) for word in ("right", "no", "WRONG")]
    return (
        f"| {kept['name']} ({kept['releases']}) | {kept['log']} | {sum(case['found_s'] is not None for case in faults)} of {len(faults)} | "
        f"{', '.join(map(str, ranks))} | {sum(case['cause'] == 'right' for case in faults)} | {_range(faults, 'found_s')} | "
        f"{_range(faults, 'restart_s')} |"
    )


def _range(cases: list[Mapping[str, Any]], key: str) -> str:
    values = [max(0.0, case[key]) for case in cases if case[key] is not None]
    return f"{min(values):.0f} to {max(values):.0f}" if values else "-"


def bad_nodes(kept: Mapping[str, Any]) -> str:
    """What `make bench ARGS='bad-nodes --write'` kept."""
    named = ", ".join(f"{words}: {kept['named'][name]}" for name, words in kept["words"].items())
    return (
        f"`test-nodes` of {kept['nodes']} nodes on one machine, {measured(kept, 'make bench ARGS=bad-nodes')}: with one node "
        f"throttled it named that node, and no other, in {sum(kept['named'].values())} of {kept['tries']} tests ({named}); "
        f"with none throttled it named no node in {kept['healthy']} of {kept['tries']}. A test took {kept['median_s']} s "
        f"({kept['longest_s']} s at most)."
    )


def _is_perfect(row: Mapping[str, Any]) -> bool:
    return row["found"] == row["culprit"] == 100 and not row["late"] and not row["false"]


def _name(row: Mapping[str, Any]) -> str:
    return str(row["case"]).removeprefix("case_").replace("_", " ")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s"
