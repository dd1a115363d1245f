"""NVIDIA's own quick check of a node's GPUs (dcgmi diag -r 1), where it is installed. Standard library only.

Written against DCGM's sources (dcgmi/Diag.cpp, dcgm_errors.h; releases 2 to 4); never run on a GPU so far.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

ROOTS = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
"""Of the answer, from release 4 on and before."""
GRAVE = (2, 6)
"""DCGM_ERROR_ISOLATE, DCGM_ERROR_RESET (dcgm_errors.h)."""
MOST = 20
"""Failures that are kept."""


def measure_gpu_dcgm(asked: dict[str, Any]) -> dict[str, Any]:
    """Facts: `tests` (how many gave a result), `failed`, and `fail_N` of each failure (`parse_dcgm`). `skipped`: dcgmi
    is not there, its service does not run, or this user may not."""
    program = shutil.which("dcgmi")
    if program is None:
        return _skipped("dcgmi is not installed on the node")
    try:
        done = subprocess.run(
            [program, "diag", "-r", "1", "-j"], stdin=subprocess.DEVNULL, capture_output=True, check=False,
            timeout=asked["dcgm_s"], cwd="/",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _skipped(f"dcgmi did not end within {asked['dcgm_s']:g} s")
    except OSError as error:
        return _skipped(f"dcgmi cannot be started: {error.strerror}")
    facts = parse_dcgm(done.stdout.decode(errors="replace"))  # it ends with other codes than 0 where a test fails
    if facts is None:
        lines = (done.stdout or done.stderr).decode(errors="replace").strip().splitlines()
        return _skipped(f"dcgmi ended with {done.returncode}: {lines[0] if lines else 'no answer'}"[:300])
    return {"figures": {}, "facts": facts}


def parse_dcgm(text: str) -> dict[str, Any] | None:
    """Given what `dcgmi diag -j` prints (with warnings before it): the facts; None: it is no result. A failure has
    `test`, `entity` (GPU), `number` (DCGM's), `serial`, and of its gravest warning `warning`, `severity`, `category`
    (dcgmErrorSeverity_t, dcgmErrorCategory_t: -1 where this release does not give them)."""
    try:
        found = json.loads(text[text.index("{") :])
        root = next((found[name] for name in ROOTS if name in found), None)
        if root is None or root.get("runtime_error"):
            return None
        tests = [test for category in root["test_categories"] for test in category.get("tests") or []]
        results = [(test["name"], each) for test in tests for each in test.get("results") or []]
        serials = {
            (group.get("entity_group"), each.get("entity_id")): each.get("serial_num", "")
            for group in found.get("entity_groups") or [] for each in group.get("entities") or []
        }  # fmt: skip
        failed = [_failure(name, each, serials) for name, each in results if str(each.get("status")).upper() == "FAIL"]
        ran = {name for name, each in results if str(each.get("status")).upper() in ("PASS", "FAIL", "WARN")}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return {"tests": len(ran), "failed": len(failed), **{f"fail_{at}": each for at, each in enumerate(failed[:MOST])}}


def _failure(test: str, result: dict[str, Any], serials: dict[Any, str]) -> dict[str, Any]:
    number = result.get("entity_id", result.get("gpu_ids", result.get("gpu_id", "")))
    group = result.get("entity_group", "GPU" if number != "" else "")
    warnings = result.get("warnings") or []
    listed = warnings if isinstance(warnings, list) else [warnings]
    grave = (each for each in listed if isinstance(each, dict) and each.get("error_severity") in GRAVE)
    first = next(grave, listed[0] if listed else "")
    known = first if isinstance(first, dict) else {}
    words = known.get("warning") or (first if isinstance(first, str) else "")
    return {
        "test": str(test), "entity": str(group), "number": str(number), "serial": str(serials.get((group, number), "")),
        "warning": str(words)[:300],
        "severity": _whole(known.get("error_severity")), "category": _whole(known.get("error_category")),
    }  # fmt: skip


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else -1


def _skipped(why: str) -> dict[str, Any]:
    return {"figures": {}, "facts": {"skipped": why}}
