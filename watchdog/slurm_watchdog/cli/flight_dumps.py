"""Flight Recorder dumps of all ranks of a job, matched: who has not entered which collective."""

from __future__ import annotations

import gc
import os
import re
import stat
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from slurm_watchdog.cli.offline import Answer
from slurm_watchdog.cli.options import EXIT_FINE, EXIT_FOUND, EXIT_UNKNOWN
from slurm_watchdog.cli.terminal import sentence, show

if TYPE_CHECKING:
    from slurm_watchdog.model.collective_records import CollectiveRecord

MAX_FILES = 16_384
MEMORY_BYTES = 2 << 30  # Beyond what this process has when it begins: a hostile dump ends with a reason.
APART_S = 120.0  # Ranks that wrote their dumps further apart than this may have moved between the two.
RANK = re.compile(r"(?i)(?<![a-z])rank[ _.-]?(\d{1,7})(?!\d)|(\d{1,7})(?:\.(?:json|pickle|pkl|bin))?$")
"""In the name of a file, or else of its folder, as in a bundle: `rank3_trace.json`, `nccl_trace_rank_3`, `dump_3`."""


def read_dumps(paths: Sequence[str]) -> Answer:
    """Who keeps the others waiting: code 0 nobody waits, 1 somebody is named, 3 nothing can be said."""
    from slurm_watchdog.agent.workers.resource_limits import limit_address_space
    from slurm_watchdog.analysis.collective_order import order_of
    from slurm_watchdog.analysis.collective_words import words_of

    limit_address_space(MEMORY_BYTES)
    gc.disable()  # what dumps hold is no cycle, and walking over it again and again takes most of the time
    records, problems, written = _read(paths)
    if written and max(written) - min(written) > APART_S:
        apart_s = max(written) - min(written)
        problems.append(f"the dumps were written over {apart_s:.0f} s: ranks may have moved meanwhile")
    order = order_of(list(records.values()))
    summary = words_of(order) if records else "No dump could be read."

    def print_all() -> None:
        sentence(summary, "bold red" if order.odd else "")
        show("list", title="Communicators", lines=order.facts)
        show("list", title="Not read, or not certain", lines=problems)

    document = {**msgspec.to_builtins(order), "summary": summary, "problems": problems}
    unknown = order.waiting or not records
    return Answer(document, print_all, EXIT_FOUND if order.odd else EXIT_UNKNOWN if unknown else EXIT_FINE)


def _read(paths: Sequence[str]) -> tuple[dict[int, CollectiveRecord], list[str], list[float]]:
    """The record of each rank, what could not be read, and when each was written. JSON is preferred to a pickle."""
    from slurm_watchdog.parse.flight_recorder import parse_flight_recorder

    records: dict[int, CollectiveRecord] = {}
    problems, written = [], []
    for path in sorted(paths, key=lambda path: (path.endswith(".json"), path))[:MAX_FILES]:
        folder, name = os.path.split(path)
        match = RANK.search(name) or RANK.search(os.path.basename(folder))
        try:
            if match is None:
                raise ValueError("its name has no rank, as nccl_trace_rank_3 and dump_3 have: see docs/evidence.md")
            rank = int(match[1] or match[2])
            body, at = _body(path)
            records[rank] = parse_flight_recorder(body, rank, at)
            written.append(at)
        except (OSError, ValueError) as error:
            problems.append(f"{name}: {error}")
    if any(each.made_at is None for each in records.values()):  # a copy: the others have its date, too
        records = {rank: replace(each, made_at=None) for rank, each in records.items()}
        problems.append("the dates of the files are older than what is in them, and were not used")
    return records, problems, written


def _body(path: str) -> tuple[bytes, float]:
    """What is in a file, bounded, and when it was written. Raises OSError."""
    from slurm_watchdog.parse.flight_recorder_format import MAX_BYTES

    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW)) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError("it is not a regular file")
        return file.read(MAX_BYTES + 1), about.st_mtime
