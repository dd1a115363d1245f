"""`slurm-watchdog diagnose DIRECTORY`: Flight Recorder dumps of all ranks of a job, matched; no controller is asked."""

from __future__ import annotations

import gc
import os
import re
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from slurm_watchdog.cli.client import ClientError
from slurm_watchdog.cli.diagnosis_text import print_list
from slurm_watchdog.cli.options import EXIT_FINE, EXIT_FOUND, EXIT_UNKNOWN, fail, print_json
from slurm_watchdog.cli.terminal import sentence

if TYPE_CHECKING:
    from slurm_watchdog.model.collective_records import CollectiveRecord

MAX_FILES: Final = 16_384
MEMORY_BYTES: Final = 2 << 30
"""Beyond what this process has when it begins: a hostile dump ends with a reason."""
APART_S: Final = 120.0
"""Ranks that wrote their dumps further apart than this may have moved between the two."""
_RANK: Final = re.compile(r"(\d{1,7})(?:\.(?:json|pickle|pkl|bin))?$")
_WORD: Final = re.compile(r"(?i)(?<![a-z])rank[ _.-]?(\d{1,7})(?!\d)")
"""A name that says so anywhere: `rank3_trace.json`."""


def diagnose_dumps(directory: Path, *, as_json: bool) -> None:
    """Says who keeps the others waiting, and exits: 0 nobody waits, 1 somebody is named, 3 nothing can be said."""
    from slurm_watchdog.agent.workers.resource_limits import limit_address_space
    from slurm_watchdog.analysis.collective_order import order_of
    from slurm_watchdog.analysis.collective_words import words_of

    limit_address_space(MEMORY_BYTES)
    gc.disable()  # what dumps hold is no cycle, and walking over it again and again takes most of the time
    try:
        records, problems, written = _read(directory)
    except OSError as error:
        fail(ClientError(f"{directory} can't be read: {error.strerror or error}."), as_json, EXIT_UNKNOWN)
    if not records:
        why = f": {problems[0]}" if problems else ""
        nothing = f"{directory} has no dump of the Flight Recorder that could be read{why}"
        what = "Their names have the rank, as in nccl_trace_rank_3 or dump_3: see docs/evidence.md."
        fail(ClientError(nothing, what), as_json, EXIT_UNKNOWN)
    order, apart_s = order_of(list(records.values())), max(written) - min(written)
    if apart_s > APART_S:
        problems.append(f"the dumps were written over {apart_s:.0f} s: ranks may have moved meanwhile")
    if as_json:
        print_json({**msgspec.to_builtins(order), "summary": words_of(order), "problems": problems})
    else:
        sentence(words_of(order), "bold red" if order.odd else "")
        print_list("Communicators", order.facts)
        print_list("Not read, or not certain", problems)
    sys.exit(EXIT_FOUND if order.odd else EXIT_UNKNOWN if order.waiting else EXIT_FINE)


def _read(directory: Path) -> tuple[dict[int, CollectiveRecord], list[str], list[float]]:
    """The record of each rank, what could not be read, and when each was written. JSON is preferred to a pickle."""
    from slurm_watchdog.parse.flight_recorder import parse_flight_recorder

    records: dict[int, CollectiveRecord] = {}
    problems, written = [], []
    for rank, path in _files(directory):
        try:
            body, at = _body(path)
            records[rank] = parse_flight_recorder(body, rank, at)
            written.append(at)
        except (OSError, ValueError) as error:
            problems.append(f"{path.name}: {error}")
    if any(each.made_at is None for each in records.values()):  # a copy: the others have its date, too
        records = {rank: replace(each, made_at=None) for rank, each in records.items()}
        problems.append("the dates of the files are older than what is in them, and were not used")
    return records, problems, written


def _files(directory: Path) -> list[tuple[int, Path]]:
    names = sorted(os.listdir(directory), key=lambda name: (name.endswith(".json"), name))
    found = [(int(match[1]), directory / name) for name in names if (match := _WORD.search(name) or _RANK.search(name))]
    for depth in ("*", "*/*"):  # of an unpacked bundle
        for path in sorted(directory.glob(f"{depth}/rank-*/flight_recorder*.pickle")):
            found += [(int(match[1]), path)] if (match := _RANK.search(path.parent.name)) else []
    return found[:MAX_FILES]


def _body(path: Path) -> tuple[bytes, float]:
    """What is in a file, bounded, and when it was written. Raises OSError."""
    from slurm_watchdog.parse.flight_recorder_format import MAX_BYTES

    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOFOLLOW)) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError("it is no regular file")
        return file.read(MAX_BYTES + 1), about.st_mtime
