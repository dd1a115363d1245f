"""What NCCL's RAS answers, as text (2.24 and later) or as JSON (2.28.7 and later), into counts of each rank. Pure.

Format: src/ras/client_support.cc of NCCL; samples in its user guide, Troubleshooting, RAS.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.model.collective_records import RasAnswer, RasCommunicator, RasRank

MAX_BYTES = 16 << 20
"""Of one answer: 600 bytes a rank of each communicator as JSON, four of which a rank has in a large job."""
MAX_COMMUNICATORS, MAX_RANKS = 512, 16_384  # Of one answer, in all: more are left out.
_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_RELEASE = late_regex(r"NCCL version (\d[\w.+-]{0,40})")
_GROUP = late_regex(r" *(\d{1,9}) +\d+ +\d+ +\S+ +(\d{1,7}) +\d+ +[A-Z]+ +[A-Z,+]+$")
_HEAD = late_regex(r"#(\d{1,9})-\d+ \(([0-9a-f]{1,16})\) (\w+)")
_COUNTS = late_regex(r"  Communicator ranks have different (?:(\w+) operation|collective operation) counts")
_MANY = late_regex(r"  (\d{1,7}) ranks have (?:launched up to operation (\d{1,19})|not launched any operations)")
_RANK = late_regex(
    r"  Rank (\d{1,7})(?: has (?:launched up to operation (\d{1,19})|(not) launched any operations))? -- "
    r"(?:GPU .{1,40} managed by process (\d{1,7}) on node (\S{1,64})|\[process information not found\])"
)
_SILENT = late_regex(r"^(?:INCOMPLETE|DEAD)\n((?:  .*\n)+)", re.MULTILINE)
_STATUSES = late_regex(r"  \d{1,7} ranks have status ([A-Z]{1,20})$")
_STATUS = late_regex(
    r"  Rank (\d{1,7}) has status ([A-Z]{1,20}) -- (?:GPU .{1,40} managed by process (\d{1,7}) on node (\S{1,64})|\[)"
)
NOT_IN_IT = "NOCOMM"  # Status of a rank whose process answers, and has nothing of this communicator.
_PROCESS = late_regex(r"  Process (\d{1,7}) on node (\S{1,64}) managing")
_MISSING = late_regex(r"  The missing ranks?: ([\d,]+)")
_NO_COMMA = late_regex(rb'("nvml_dev": -?\d+)(\s+"status")')  # Of a missing rank, as releases before 2.29 write it.


class _Status(msgspec.Struct, frozen=True, gc=False):
    unresponsive: bool = False
    considered_dead: bool = False


class _Rank(msgspec.Struct, gc=False):
    rank: Annotated[int, Meta(ge=0, le=2**24)]
    host: Annotated[str, Meta(max_length=64)] = ""
    pid: Annotated[int, Meta(ge=-1, le=2**31)] = -1
    collective_counts: dict[str, _Count] = {}
    status: _Status = _Status()


class _Communicator(msgspec.Struct, gc=False):
    hash: Annotated[str, Meta(max_length=64)]
    size: Annotated[int, Meta(ge=0, le=2**24)]
    secondary_hash: Annotated[str, Meta(max_length=128)] = ""
    ranks: list[_Rank] = []
    missing_ranks: list[_Rank] = []


class _Answer(msgspec.Struct, gc=False):
    nccl_version: Annotated[str, Meta(max_length=64)]
    communicators: list[_Communicator] = []


def parse_ras(body: bytes) -> RasAnswer:
    """The answer to STATUS or VERBOSE STATUS. Raises ValueError, with the reason, for what is none."""
    if len(body) > MAX_BYTES:
        raise ValueError(f"an answer of more than {MAX_BYTES} bytes")
    if body.lstrip()[:1] == b"{":
        return _of_json(body)
    text = body.decode(errors="replace")
    release = _RELEASE.search(text)
    if release is None:
        raise ValueError(f"no answer of NCCL's RAS: {text[:60]!r}")
    processes = [each for part in _SILENT.finditer(text) for each in _PROCESS.finditer(part[1])]
    silent = tuple((each[2], int(each[1])) for each in processes[:MAX_RANKS])
    return RasAnswer(release=release[1], communicators=bounded(_of_text(text.splitlines())), silent=silent)


def _of_json(body: bytes) -> RasAnswer:
    try:
        answer = msgspec.json.decode(_NO_COMMA.sub(rb"\1,\2", body), type=_Answer)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no answer of NCCL's RAS: {error}") from None
    found = (
        RasCommunicator(
            key=f"{each.hash.removeprefix('0x')}{each.secondary_hash and ' '}{each.secondary_hash}",
            size=each.size,
            ranks=(
                *(_of(rank) for rank in each.ranks),
                *(_missing_one(rank) for rank in each.missing_ranks),
            ),
        )
        for each in answer.communicators
    )  # fmt: skip
    return RasAnswer(release=answer.nccl_version, communicators=bounded(found))


def _missing_one(rank: _Rank) -> RasRank:
    silent = rank.status.unresponsive or rank.status.considered_dead
    return replace(_of(rank), unreachable=silent, apart=not silent)


def _of(rank: _Rank) -> RasRank:
    counts = tuple(sorted((name[:32], count) for name, count in rank.collective_counts.items())[:16])
    host, pid = (rank.host or None, rank.pid) if rank.pid > 0 else (None, None)
    return RasRank(rank=rank.rank, host=host, pid=pid, counts=counts)


def bounded(communicators: Iterable[RasCommunicator]) -> tuple[RasCommunicator, ...]:
    """The first of them."""
    kept: list[RasCommunicator] = []
    ranks = 0
    for each in communicators:
        ranks += len(each.ranks)
        if ranks > MAX_RANKS or len(kept) == MAX_COMMUNICATORS:
            break
        kept.append(each)
    return tuple(kept)


class _Reading:
    """One communicator while its lines are read."""

    def __init__(self, key: str, size: int):
        self.key, self.size = key, size
        self.kind: str | None = None
        """Of the collectives whose counts are read; None: these lines are about something else."""
        self.sides: dict[str, list[tuple[int, int]]] = {}
        """Kind -> (ranks, count) of each group of ranks."""
        self.counts: dict[int, dict[str, int]] = {}
        self.processes: dict[int, tuple[str, int]] = {}
        """Rank -> its host and pid."""
        self.gone: set[int] = set()
        self.apart: set[int] = set()
        self.status = ""
        """Of the ranks whose lines may follow."""

    def finished(self) -> RasCommunicator:
        """With the counts of those that are not listed: the one group of a kind whose ranks are not."""
        for kind, sides in self.sides.items():
            listed = [rank for rank, counts in self.counts.items() if kind in counts]
            of_count = {count: 0 for _, count in sides} | {self.counts[rank][kind]: 0 for rank in listed}
            for rank in listed:
                of_count[self.counts[rank][kind]] += 1
            open_sides = [(ranks, count) for ranks, count in sides if not of_count[count]]
            known = {*listed, *self.gone, *self.apart}
            others = [rank for rank in range(min(self.size, MAX_RANKS)) if rank not in known]
            if len(open_sides) == 1 and len(others) == open_sides[0][0]:
                for rank in others:
                    self.counts.setdefault(rank, {})[kind] = open_sides[0][1]
        return RasCommunicator(
            key=self.key,
            size=self.size,
            ranks=tuple(self._rank(rank) for rank in sorted(self.counts.keys() | self.gone | self.apart)),
        )

    def _rank(self, rank: int) -> RasRank:
        host, pid = self.processes.get(rank, (None, None))
        counts = tuple(sorted(self.counts.get(rank, {}).items()))
        apart = rank in self.apart and rank not in self.gone
        return RasRank(rank=rank, host=host, pid=pid, counts=counts, unreachable=rank in self.gone, apart=apart)


def _of_text(lines: Iterable[str]) -> Iterable[RasCommunicator]:
    sizes: dict[str, int] = {}
    found: dict[str, _Reading] = {}
    reading, section, count = None, "", 0
    for line in lines:
        if (match := _HEAD.match(line)) is not None:
            section = match[3]
            reading = found.setdefault(match[2], _Reading(match[2], sizes.get(match[1], 0)))
            reading.kind, reading.status = None, ""
        elif (match := _GROUP.match(line)) is not None:
            sizes[match[1]] = int(match[2])
        elif reading is None:
            continue
        elif section == "INCOMPLETE":
            _missing(reading, line)
        elif section == "MISMATCH":
            count = _mismatch(reading, line, count)
    return [each.finished() for each in found.values()]


def _missing(reading: _Reading, line: str) -> None:
    if (match := _MISSING.match(line)) is not None:
        reading.gone |= {int(each) for each in match[1].split(",")[:MAX_RANKS] if each and len(each) < 8}
    elif (match := _RANK.match(line)) is not None:
        reading.gone.add(int(match[1]))
        if match[4]:
            reading.processes[int(match[1])] = match[5], int(match[4])


def _status(reading: _Reading, line: str) -> None:
    """Ranks that have no part in it; of other status nothing is said."""
    if (match := _STATUSES.match(line)) is not None:
        reading.status = match[1]
        return
    match, status = _RANK.match(line), reading.status
    pid, host = (match[4], match[5]) if match is not None else (None, None)
    if match is None and (match := _STATUS.match(line)) is not None:
        status, pid, host = match[2], match[3], match[4]
    if match is None or status != NOT_IN_IT or len(reading.apart) == MAX_RANKS:
        return
    reading.apart.add(int(match[1]))
    if pid and host:
        reading.processes[int(match[1])] = host, int(pid)


def _mismatch(reading: _Reading, line: str, count: int) -> int:
    """Returns the count of the group of ranks whose members may follow."""
    if (match := _COUNTS.match(line)) is not None:
        reading.kind = match[1] or ""
        reading.sides[reading.kind] = []
    elif line.startswith("  Communicator ranks have"):
        reading.kind, reading.status = None, ""
    elif reading.kind is None:
        _status(reading, line)
    elif (match := _MANY.match(line)) is not None:
        count = int(match[2] or 0)
        reading.sides[reading.kind].append((int(match[1]), count))
    elif (match := _RANK.match(line)) is not None and len(reading.counts) < MAX_RANKS:
        own = int(match[2]) if match[2] else 0 if match[3] else count
        reading.counts.setdefault(int(match[1]), {})[reading.kind] = own
        if match[4]:
            reading.processes[int(match[1])] = match[5], int(match[4])
    return count
