"""Logs in the layouts of public threads (tests/captures/field): text in, the answer of `scan-log` out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from slurm_watchdog.cli.main import main

FIELD = Path(__file__).parents[2] / "captures" / "field"
FOLDERS = ("logs", "seeds", "own")


def cases() -> list[Any]:
    """One parameter a label; `pending` ones must fail, so that a case that is right now says so."""
    return [
        pytest.param(
            FIELD / folder / case["file"],
            case,
            id=f"{folder}/{case['file']}",
            marks=[pytest.mark.xfail(reason=case["pending"], strict=True)] if "pending" in case else [],
        )
        for folder in FOLDERS
        for case in yaml.safe_load((FIELD / folder / "labels.yaml").read_text())
    ]


def scanned(path: Path) -> list[dict[str, Any]]:
    """What `scan-log --json` says of a file, or of the files of a folder together."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    done = CliRunner().invoke(main, ["scan-log", "--json", *map(str, files)])
    rows: list[dict[str, Any]] = json.loads(done.stdout)["files"]
    unread = all(row["unread"] for row in rows)
    assert done.exit_code == (2 if unread else 0 if all(row["healthy"] for row in rows) else 1)
    return rows


def judged_wrong(case: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """What of the answer is not as the label says; empty: it is right."""
    verdict = next((row["verdict"] for row in rows if row["verdict"] is not None), None)
    wrong = []
    if case.get("unread", False) or rows[0]["unread"]:
        return [] if rows[0]["unread"] and case.get("unread") else [f"unread: {rows[0]['unread']}"]
    steps = [row["progress"]["last_step"] for row in rows if row["progress"]["last_step"] is not None]
    if "last_step" in case and max(steps, default=None) != case["last_step"]:
        wrong.append(f"last step {max(steps, default=None)}")
    if "note" in case and case["note"] not in "".join(rows[0]["notes"]):
        wrong.append(f"notes {rows[0]['notes']}")
    if [each["class"] for each in rows[0]["excerpts"]] != case.get("excerpts", []):
        wrong.append(f"excerpts {rows[0]['excerpts']}")
    if verdict is None or not case["incident"]:
        return [*wrong, *([f"verdict {verdict}"] if (verdict is not None) != case["incident"] else [])]
    if verdict["class"] not in case["cls"]:
        wrong.append(f"class {verdict['class']}")
    named = [verdict["rank"]] if verdict["rank"] is not None else verdict["missing_ranks"] or [None]
    if not set(named) <= set(case["ranks"]):
        wrong.append(f"ranks {named}")
    if verdict["host"] not in case["hosts"]:
        wrong.append(f"host {verdict['host']}")
    causes = [error["text"] for row in rows for error in row["errors"] if error["role"] == "cause"]
    shown = {
        "cause": "\n".join([verdict["text"], verdict["summary"], *causes]),
        "summary": verdict["summary"],
        "advice": json.dumps(verdict["hints"]),
    }
    if "not_advice" in case and case["not_advice"] in shown["advice"]:
        wrong.append(f"advice {shown['advice']}")
    wrong += [f"{key} {text}" for key, text in shown.items() if key in case and case[key] not in text]
    return wrong


@pytest.mark.parametrize(("path", "case"), cases())
def test_a_log_of_the_field_is_read_right(path: Path, case: dict[str, Any]) -> None:
    assert judged_wrong(case, scanned(path)) == []


SHORT = [
    pytest.param(case, id=case["name"])
    for name in ("endings.yaml", "threads.yaml")
    for case in yaml.safe_load((FIELD / name).read_text())
]


@pytest.mark.parametrize("case", SHORT)
def test_a_short_log_is_read_right(case: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(case["log"])
    assert judged_wrong(case, scanned(log)) == []
