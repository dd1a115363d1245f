"""Files that someone gives: which are meant, and what is in them. What cannot be read is a sentence among `problems`;
nothing is executed, and how much is read is bounded."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.parse.text_input import Unreadable, read_start, text_of

if TYPE_CHECKING:
    from slurm_watchdog.model.collective_records import CollectiveRecord

MAX_FILES = 20_000
MAX_DEPTH = 6
LOG_NAME = late_regex(
    r"(?:\.(?:log|out|err|txt|jsonl?|[oe]\d+)|(?:^|[._-])(?:stdout|stderr|log|out|err))(?:\.\d{1,3})?(?:\.(?:gz|bz2|xz|zst))?$"
)
"""Of the files in a directory those that a job's output is in: beside them there may be checkpoints."""
MARKDOWN = (".md", ".markdown")
MARKDOWN_BYTES = 4 * 1024**2
MAX_FILE_BYTES = 64 << 20  # Of one with stacks.
MAX_TOTAL_BYTES = 2 << 30
MAX_RECORDS = 16_384
APART_S = 120.0  # Ranks that wrote their dumps further apart than this may have moved between the two.
RANK = late_regex(r"(?i)(?<![a-z])rank[ _.-]?(\d{1,7})(?!\d)|(\d{1,7})(?:\.(?:json|pickle|pkl|bin))?$")
"""In the name of a file, or else of its folder, as in a bundle: `rank3_trace.json`, `nccl_trace_rank_3`, `dump_3`."""


def files_in(paths: Sequence[str], problems: list[str]) -> Iterator[tuple[str, str]]:
    """(the part of its name that may say whose it is, its path), for each file, and each below a directory."""
    given = sorted(set(paths))
    common = os.path.commonpath([str(Path(path).absolute().parent) for path in given if path != "-"] or ["/"])
    seen = 0
    for path in given:
        if path == "-" or not Path(path).is_dir():
            yield ("standard input" if path == "-" else os.path.relpath(Path(path).absolute(), common)), path
            continue
        base = Path(path).absolute()
        for folder, folders, files in os.walk(base, onerror=lambda error: problems.append(str(error))):
            depth = len(Path(folder).relative_to(base).parts)
            folders[:] = sorted(each for each in folders if not each.startswith(".")) if depth < MAX_DEPTH else []
            for whole in (Path(folder) / each for each in sorted(files) if not each.startswith(".")):
                seen += 1
                if seen > MAX_FILES:
                    problems.append(f"{path} holds more than {MAX_FILES} files: the others were left out")
                    return
                if whole.is_file():
                    name = str(whole.relative_to(base))
                    yield (name if len(given) == 1 else f"{os.path.relpath(base, common)}/{name}"), str(whole)


def is_log_name(path: str) -> bool:
    """Whether a file is named as a job's output is."""
    return LOG_NAME.search(os.path.basename(path)) is not None


def may_be_markdown(path: str) -> bool:
    """Whether a log may be pasted into it: a document, or what is small enough to be one."""
    if path == "-" or path.endswith(MARKDOWN):
        return True
    return os.path.exists(path) and 0 < os.stat(path).st_size <= MARKDOWN_BYTES


def written_at(path: str) -> float | None:
    """The file's modification time as local time, the way logs write it."""
    try:
        local = datetime.fromtimestamp(os.stat(path).st_mtime)  # noqa: DTZ006 - logs write local time
    except (OSError, ValueError, OverflowError):  # no such file, or a date that is none
        return None
    return local.replace(tzinfo=timezone.utc).timestamp()


def read_texts(paths: Sequence[str]) -> tuple[dict[str, str], list[str], int]:
    """The texts of files by name (in directories, in archives, or standard input, `-`), what could not be read, and how
    many hold no text, but what a rank recorded of its collectives."""
    texts: dict[str, str] = {}
    unreadable: list[str] = []
    recorded = total = 0
    for name, path in files_in(paths, unreadable):
        try:
            data = read_start(path, MAX_FILE_BYTES)
        except Unreadable as error:
            unreadable.append(str(error))
            continue
        total += len(data)
        if total > MAX_TOTAL_BYTES:
            unreadable.append(f"{path} and what follows was left out: more than {MAX_TOTAL_BYTES >> 30} GiB")
            break
        for part, content in _parts(name, data):
            if is_flight_record(content):
                recorded += 1
            else:
                texts[part if part not in texts else f"{path}/{part}"] = text_of(content)
    return texts, unreadable, recorded


def _parts(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """The file itself, or if it is an archive the files in it."""
    if not is_archive(data):
        yield name, data
        return
    import tarfile

    with suppress(tarfile.TarError, EOFError, OSError), tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in islice(archive, MAX_FILES):
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name, file.read(MAX_FILE_BYTES)


def is_archive(data: bytes) -> bool:
    """Whether it is an archive of tar, such as the bundle of an incident."""
    return data[257:262] == b"ustar"


def is_flight_record(data: bytes) -> bool:
    """Whether it is a dump of PyTorch's Flight Recorder: a pickle, or JSON with entries of communicators."""
    pickled = data[:1] == b"\x80" and data[1:2] in b"\x02\x03\x04\x05"
    return (pickled or data[:1] == b"{") and b"entries" in data and (b"pg_config" in data or b"process_group" in data)


def read_records(paths: Sequence[str], problems: list[str]) -> list[CollectiveRecord]:
    """What each rank recorded in a dump of PyTorch's Flight Recorder. JSON is preferred to a pickle."""
    from slurm_watchdog.parse.flight_recorder import parse_flight_recorder
    from slurm_watchdog.parse.flight_recorder_format import MAX_BYTES

    records: dict[int, CollectiveRecord] = {}
    written = []
    for path in sorted(paths, key=lambda path: (path.endswith(".json"), path))[:MAX_RECORDS]:
        folder, name = os.path.split(path)
        match = RANK.search(name) or RANK.search(os.path.basename(folder))
        try:
            if match is None:
                raise ValueError("its name has no rank, as nccl_trace_rank_3 and dump_3 have: see docs/evidence.md")
            rank = int(match[1] or match[2])
            # A job writes such files: no link of it is followed, and no pipe waited for.
            with open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NONBLOCK | os.O_NOFOLLOW)) as file:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode):
                    raise OSError("it is not a regular file")
                data, at = file.read(MAX_BYTES + 1), about.st_mtime
            records[rank] = parse_flight_recorder(data, rank, at)
            written.append(at)
        except (OSError, ValueError) as error:
            problems.append(f"{name}: {error}")
    if any(each.made_at is None for each in records.values()):  # a copy: the others have its date, too
        records = {rank: replace(each, made_at=None) for rank, each in records.items()}
        problems.append("the dates of the files are older than what is in them, and were not used")
    if written and (apart_s := max(written) - min(written)) > APART_S:
        problems.append(f"the dumps were written over {apart_s:.0f} s: ranks may have moved meanwhile")
    return list(records.values())
