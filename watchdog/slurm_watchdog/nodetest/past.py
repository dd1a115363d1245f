"""Earlier tests of nodes, a JSON line each, in a file of the user's own: what is usual for a node."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.nodetest.conduct import Report

FILE: Final = "node-tests.jsonl"
MOST_BYTES: Final = 16 << 20
"""The end of the file that is read: some 20,000 tests of a node."""
MOST_TESTS: Final = 20
"""Of a node that make what is usual for it."""


class PastTest(Struct, frozen=True, kw_only=True):
    """One test of one node."""

    node: str
    at: float
    """Date."""
    model: str
    cluster: str = ""
    seconds: float = 0.0
    """Of each figure: tests of another length are not compared."""
    figures: Mapping[str, float] = {}
    truth: str = "unknown"
    reasons: tuple[str, ...] = ()


def append_tests(place: Path, tests: Sequence[PastTest]) -> None:
    """Adds them at the end of the file in `place`, which is made. Raises OSError."""
    place.mkdir(parents=True, exist_ok=True)
    data = b"".join(msgspec.json.encode(each) + b"\n" for each in tests)
    fd = os.open(place / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


def read_tests(place: Path) -> list[PastTest]:
    """The newest of the file, oldest first; lines that cannot be read are left out. None where there is no file."""
    try:
        with (place / FILE).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=PastTest))
        except (msgspec.MsgspecError, RecursionError):
            continue
    return found


def usual(
    tests: Sequence[PastTest], models: Mapping[str, str], seconds: float, cluster: str
) -> dict[str, list[Mapping[str, float]]]:
    """Node to the figures of its newest tests that may be compared: of the same cluster, model and length, and not
    found bad."""
    found: dict[str, list[Mapping[str, float]]] = {}
    for test in reversed(tests):
        same = (test.model, test.seconds, test.cluster) == (models.get(test.node), seconds, cluster)
        kept = found.setdefault(test.node, [])
        if same and test.truth != "bad" and len(kept) < MOST_TESTS:
            kept.append(test.figures)
    return found


def tests_of(report: Report, seconds: float, cluster: str) -> list[PastTest]:
    """What is kept of a test: nodes of which something was measured."""
    truths = {each.node: each for each in report.verdicts}
    return [
        PastTest(
            node=each.name,
            at=report.ended_at,
            model=each.model,
            cluster=cluster,
            seconds=seconds,
            figures=each.figures,
            truth=truths[each.name].truth.value,
            reasons=truths[each.name].reasons,
        )
        for each in report.nodes
        if each.figures
    ]
