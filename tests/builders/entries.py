"""Entries of a recording, for tests: the two clocks are one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.recording.entries import Answer, Begin, Entry, Tick, Value
from slurm_watchdog.wire.codec import encode_report
from slurm_watchdog.wire.frames import REPORT


def entry(at: float, what: bytes | Value) -> Entry:
    return Entry(at, at, what)


def begin(at: float) -> Entry:
    return entry(at, Begin())


def frame(report: Report, at: float) -> Entry:
    return entry(at, REPORT + encode_report(report))


def listing(at: float, jobs: Iterable[SlurmJob] = (), nodes: Iterable[SlurmNode] = ()) -> Entry:
    return entry(at, Answer(view=SlurmView(jobs=tuple(jobs), nodes=tuple(nodes))))


def no_answer(at: float) -> Entry:
    return entry(at, Answer(why_not="timed out", answered=False))


def tick(at: float) -> Entry:
    return entry(at, Tick())


def ticks(since: float, until: float, every_s: float) -> Iterator[Entry]:
    return (tick(since + n * every_s) for n in range(math.ceil((until - since) / every_s)))
