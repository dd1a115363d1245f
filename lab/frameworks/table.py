"""What `make frameworks` keeps for docs/evaluation.md, from the outcomes of cases."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lab.frameworks.catalogue import FAULTS, FRAMEWORKS, SKIPPED, Framework, fault_named
from lab.frameworks.judge import Verdict, judge
from lab.frameworks.outcome import Outcome, from_json

FILE = "lab/results/frameworks.json"


def read(file: Path) -> list[Outcome]:
    """The outcomes of a file of `--results`; of a case that was repeated, the newest."""
    found = [from_json(json.loads(line)) for line in file.read_text().splitlines() if line]
    return list({(each.framework, each.fault): each for each in found}.values())


def with_releases(outcome: Outcome, releases: Mapping[str, str]) -> Outcome:
    """The outcome with the releases of what its framework consists of."""
    (framework,) = (each for each in FRAMEWORKS if each.name == outcome.framework)
    return replace(outcome, releases={name: releases.get(name, "?") for name in framework.distributions})


def results(outcomes: Iterable[Outcome], limits: Mapping[str, Any], commit: str) -> dict[str, Any]:
    """All cases by framework, with the limits that they had; tools/docs/evaluation.py makes the table of it."""
    outcomes = list(outcomes)
    done = {each.framework for each in outcomes}
    missing = ", ".join(each.name for each in FRAMEWORKS if each.name not in done)
    left = {missing: "its script is there, and no case of it is in these results"} if missing else {}
    return {
        "date": _dates(outcomes),
        "commit": commit,
        "limits": dict(limits),
        "frameworks": [
            {
                "name": framework.name,
                "releases": _releases(framework, [each for each in outcomes if each.framework == framework.name]),
                "log": framework.log,
                "ranks": framework.ranks,
                "cases": [_case(judge(each)) for each in _in_order(outcomes, framework)],
            }
            for framework in FRAMEWORKS
            if framework.name in done
        ],
        "not_tried": {**left, **SKIPPED},
    }


def _in_order(outcomes: Sequence[Outcome], framework: Framework) -> Iterator[Outcome]:
    """The outcomes of one framework, by fault."""
    found = {each.fault: each for each in outcomes if each.framework == framework.name}
    yield from (found[fault.name] for fault in FAULTS if fault.name in found)


def _case(verdict: Verdict) -> dict[str, Any]:
    fault = fault_named(verdict.fault)
    said = {name: value for name, value in asdict(verdict).items() if name != "framework"}
    return said | {"fault": fault.words, "healthy": not fault.kinds}


def _releases(framework: Framework, outcomes: Sequence[Outcome]) -> str:
    """`torch 2.13.0+cpu and 2.15.0, numpy 2.4.1`: all that its cases were run with."""
    found = {name: sorted({each.releases.get(name, "?") for each in outcomes}) for name in framework.distributions}
    return ", ".join(f"{name} {' and '.join(releases)}" for name, releases in found.items())


def _dates(outcomes: Iterable[Outcome]) -> str:
    """`2026-11-22`, or the first and the last day."""
    at = [each.first_at for outcome in outcomes for each in outcome.runs if each.first_at]
    days = sorted({datetime.fromtimestamp(moment, timezone.utc).date().isoformat() for moment in at})
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "unknown"


def versions(python: str) -> dict[str, str]:
    """Distribution -> release, of the environment of `python`; its own and the date's under `Python` and `machine`."""
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    found = json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
    return {str(name): str(version) for name, version in found.items()} | {"Python": platform.python_version()}
