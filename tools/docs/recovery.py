"""The tables of docs/evaluation.md about getting back to work, from what `make bench ARGS='recovery --write'` and
`make compare ARGS=--write` kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_WAYS = {"in_place": "in place", "requeue": "requeue"}
_FAULTS = ("hang", "killed", "power", "d_state")


def recovery(ours: Path) -> str:
    """The table of what was measured with our own watchdog, with a sentence before it."""
    if not ours.exists():
        return "No results are kept."
    kept = json.loads(ours.read_text(encoding="utf-8"))
    runs = dict.fromkeys(f"{row['date']}, {row['commit']}" for row in kept["results"])
    lines = [
        f"`make bench ARGS=recovery`, {', '.join(runs)}; seconds from the fault:",
        "",
        "| fault | way | verdict | named | first new step | goal | steps lost | left out |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in kept["results"]:
        case = kept["cases"][row["case"]]
        in_place = row["way"] == "in_place"
        waits_s = case.get("slurm_waits_s")
        goal = f"{case['goal_s']:.0f} s" if in_place else f"- (Slurm waits {waits_s:.0f} s)" if waits_s else "-"
        missed = in_place and (row["first_step_s"] is None or row["first_step_s"] > case["goal_s"])
        left_out = ", ".join(row["left_out"]) or "-"
        if row["healthy_left_out"]:
            left_out += " (**healthy**)"
        lines.append(
            f"| {case['words']} | {_WAYS[row['way']]} | {_verdict(row)} | {'right' if row['right_rank'] else '**no**'} | "
            f"{_again(row)}{': **missed**' if missed else ''} | {goal} | {_number(row['steps_lost'])} | "
            f"{left_out} |"
        )
    return "\n".join(lines)


def compare(peers_file: Path, ours: Path) -> str:
    """The table of peers, a row each, with ours above; below it what is to be said about single ones."""
    if not peers_file.exists():
        return "No results are kept."
    kept = json.loads(peers_file.read_text(encoding="utf-8"))
    scenes, peers = kept["scenes"], kept["peers"]
    rows = {(row["peer"], row["scene"]): row for row in kept["outcomes"]}
    healthy = [name for name in scenes if name not in _FAULTS]
    head = ["", *(scenes[name] for name in _FAULTS), "healthy phases suspected", "lines of the training to change"]
    lines = [
        f"{kept['date']}, commit {kept['commit']}, `make compare`; ours as in the table above. In a cell: seconds from the fault to the verdict "
        "(✓ names the right rank, ✗ another or none) → to the first new step.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
        *_our_rows(ours),
    ]
    for name, about in peers.items():
        cells = [_cell(rows.get((name, scene))) for scene in _FAULTS]
        accused = [_accused(rows.get((name, scene))) for scene in healthy]
        told = "-" if None in accused else f"{sum(map(bool, accused))} of {len(accused)}"
        release = f"{about['distribution']} {about['release']}: " if about["distribution"] else ""
        lines.append(f"| {release}{about['what']} | {' | '.join(cells)} | {told} | {about['lines_changed']} |")
    lines += ["", *(f"- {text}" for text in _remarks(kept, rows))]
    return "\n".join(lines)


def _our_rows(ours: Path) -> list[str]:
    if not ours.exists():
        return []
    kept = json.loads(ours.read_text(encoding="utf-8"))
    rows = {(row["way"], row["case"]): row for row in kept["results"]}
    return [
        f"| **this watchdog, {words}** | "
        + " | ".join(_our_cell(rows.get((way, fault))) for fault in _FAULTS)
        + " | 0 (`make live`) | 0 |"
        for way, words in _WAYS.items()
    ]


def _our_cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    mark = "" if row["verdict_s"] is None else " ✓" if row["right_rank"] else " ✗"
    return f"{_s(row['verdict_s'])}{mark} → {_s(row['first_step_s'])}"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or row["problem"]:
        return "-" if row is None else "did not train"
    if row["verdict_s"] is None and row["first_step_s"] is None:
        return (
            f"nothing: job {row['job_state']}" if row["job_state"] != "RUNNING" else f"none in {_s(row['watched_s'])}"
        )
    mark = "" if row["verdict_s"] is None else " ✓" if row["right_rank"] else " ✗"
    again = _s(row["first_step_s"]) if row["first_step_s"] is not None else f"none, job {row['job_state']}"
    return f"{_s(row['verdict_s'])}{mark} → {again}"


def _accused(row: Mapping[str, Any] | None) -> bool | None:
    """Whether a healthy phase was ended; None: not tried."""
    if row is None or row["problem"]:
        return None
    return row["verdict_s"] is not None or row["starts"] > 0


def _remarks(kept: Mapping[str, Any], rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[str]:
    told = [f"{name}: {about['remark']}." for name, about in kept["peers"].items() if about["remark"]]
    for (peer, scene), row in rows.items():
        if row["problem"]:
            told.append(f"{peer}, {kept['scenes'][scene]}: {_plain(row['problem'])}")
    return told


def _verdict(row: Mapping[str, Any]) -> str:
    return _s(row["verdict_s"]) + (f", `{row['kind']}`" if row["kind"] else "")


def _again(row: Mapping[str, Any]) -> str:
    """The first new step; where none came, for how long it was waited for."""
    watched_s = row.get("watched_s")
    return _s(row["first_step_s"]) + (f" in {watched_s:.0f} s" if watched_s else "")


def _s(value: float | None) -> str:
    return "none" if value is None else f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _plain(text: str) -> str:
    return " ".join(text.replace("|", "/").replace("`", "'").replace("<", "‹").split())[:300]
