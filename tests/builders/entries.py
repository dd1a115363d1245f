"""Entries of a recording, for tests: the two clocks are one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.recording.entries import (
    BEGIN,
    FRAME,
    LISTING,
    NO_ANSWER,
    OWN,
    TICK,
    Begin,
    Entry,
    Listing,
    NoAnswer,
    Own,
)
from slurm_watchdog.wire.codec import encode_report
from slurm_watchdog.wire.frames import REPORT


def entry(kind: bytes, at: float, value: Struct) -> Entry:
    return Entry(kind, at, at, msgspec.msgpack.encode(value))


def begin(at: float) -> Entry:
    return entry(BEGIN, at, Begin())


def frame(report: Report, at: float) -> Entry:
    return Entry(FRAME, at, at, REPORT + encode_report(report))


def listing(at: float, jobs: Iterable[SlurmJob] = (), nodes: Iterable[SlurmNode] = ()) -> Entry:
    return entry(LISTING, at, Listing(jobs=tuple(jobs), nodes=tuple(nodes)))


def no_answer(at: float) -> Entry:
    return entry(NO_ANSWER, at, NoAnswer(reason="timed out"))


def own(at: float, what: Own) -> Entry:
    return entry(OWN, at, what)


def tick(at: float) -> Entry:
    return Entry(TICK, at, at)


def ticks(since: float, until: float, every_s: float) -> Iterator[Entry]:
    return (tick(since + n * every_s) for n in range(math.ceil((until - since) / every_s)))
