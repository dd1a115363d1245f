"""What one case came to: what was true, and what was said. Plain values, kept as one line of JSON a case."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROW = struct.Struct("<qqqddd")
"""As scripts/faults.py writes it: pid, first step, last step, their times, begin of the fault."""


@dataclass(frozen=True)
class RankRun:
    """What one rank did in one run of the command, by its own account."""

    run: int
    rank: int
    pid: int
    first: int
    """-1: no step."""
    last: int
    first_at: float
    last_at: float
    fault_at: float


@dataclass(frozen=True)
class Said:
    """One event of the webhook."""

    topic: str
    at: float
    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    ok: bool | None = None
    """Of an action that has ended."""
    steps_lost: int | None = None
    steps_lost_at_most: int | None = None
    needless: bool = False
    """It ended because nothing was left to do."""


@dataclass(frozen=True)
class Outcome:
    """One case."""

    framework: str
    fault: str
    rank: int
    """That has the fault."""
    total: int
    """Steps of the whole training."""
    fault_at: float | None
    runs: tuple[RankRun, ...]
    said: tuple[Said, ...]
    exit_code: int | None
    """Of `slurm-watchdog run`; None: it was ended, for nothing more happened."""
    seconds: float
    broke: str = ""
    """Why this is no result: the training itself did not work."""
    releases: Mapping[str, str] = field(default_factory=dict)
    """Distribution -> release, of what the case is about."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def from_json(row: Mapping[str, Any]) -> Outcome:
    """The outcome of `as_json`. Raises TypeError for fields of another release."""
    said = tuple(Said(**{**each, "ranks": tuple(each["ranks"])}) for each in row["said"])
    return Outcome(**{**row, "runs": tuple(RankRun(**each) for each in row["runs"]), "said": said})


def read_truth(place: Path) -> list[RankRun]:
    """Of all ranks of all runs so far; a file that is being made is left out."""
    found = []
    for file in sorted(place.glob("run*.rank*")):
        data = file.read_bytes()
        if len(data) != ROW.size:
            continue
        run, rank = (int(part) for part in file.name.removeprefix("run").split(".rank"))
        pid, first, last, first_at, last_at, fault_at = ROW.unpack(data)
        found.append(RankRun(run, rank, pid, first, last, first_at, last_at, fault_at))
    return found


def said_of(events: Iterable[Mapping[str, Any]]) -> list[Said]:
    """The events of the webhook, in their order, without what nobody judges here."""
    found = []
    for event in events:
        incident = event.get("incident") or {}
        end = (event.get("action") or {}).get("end") or {}
        text = " ".join((event.get("text", ""), *event.get("said", ())))
        ranks = {culprit.get("rank") for culprit in incident.get("culprits", ())} - {None}
        found.append(
            Said(
                topic=event["event"],
                at=event["at"],
                kind=incident.get("kind", ""),
                text=text,
                ranks=tuple(sorted(ranks)),
                ok=end.get("ok"),
                needless=bool(end.get("needless")),
                steps_lost=end.get("steps_lost"),
                steps_lost_at_most=end.get("steps_lost_at_most"),
            )
        )
    return found
