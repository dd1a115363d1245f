"""Whose lines are whose by what stands around them: which files are logs of one job, what their names say, and what the
layout of a text says (a heading for each rank, numbers that only count). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.logs.line import NOBODY, Line, Who, without_numbers
from slurm_watchdog.diagnose.logs.ranks import DYING

_ATTEMPT = late_regex(r"(?:^|/)(?P<attempt>attempt_\d+)/(?P<local>\d+)/(?P<stream>stdout|stderr)[\w.]*$")
_RANK = late_regex(r"(?:^|[/._-])(?:global[_-]?)?rank[_.-]?(?P<rank>\d+)(?=[/._-]|$)", re.IGNORECASE)
_NUMBERED = late_regex(
    r"(?:^|/)(?P<stem>log|out|err|output|stdout|stderr|task|proc|process|train"
    r"|worker)[_.-](?P<number>\d{1,4})(?=\.\w+$|$)",
    re.IGNORECASE,
)
_NODE = late_regex(
    r"(?:^|[/._-])(?P<host>(?:node|host|gpu|compute|worker-node|nid|cn|n|dgx|h100|a100|ip)[-_]?\d[\w-]*?"
    r"|\d{1,3}(?:\.\d{1,3}){3})(?=[._/]|$)",
    re.IGNORECASE,
)
_STREAM = late_regex(
    r"\b(?:stdout|stderr|out|err)\b(?=[.\w]*$)|(?<=[._-])(?:stdout|stderr|out|err|o|e)(?=\d*$|\.log$|\.txt$)"
)
_ROTATED = late_regex(r"(?P<base>.+?)(?:\.(?P<place>\d{1,3})|-(?P<date>20\d{6}))(?P<packed>\.(?:gz|bz2|xz|zst))?")
_NO_RANK_STEMS = frozenset({"worker", "train", "proc", "process"})


class NamedBy(Struct, kw_only=False):
    """Who wrote a file, as its name has it."""

    key: str  # Files with the same key are of one job.
    rank: int | None = None
    local: int | None = None
    host: str | None = None


def named_by(path: str) -> NamedBy:
    """What a path says."""
    key, rank, local, host = path, None, None, None
    match = _ATTEMPT.search(key)
    if match:
        key, local = key[: match.start("local")] + "*", int(match["local"])
        key = re.sub(r"attempt_\d+/\*$", "*", key)
    match = next(reversed([*_RANK.finditer(key)]), None)  # the file's own name before those of its folders
    if match:
        key, rank = key[: match.start("rank")] + "*" + key[match.end("rank") :], int(match["rank"])
    match = _NUMBERED.search(key) if rank is None and local is None else None
    if match:
        key = key[: match.start("number")] + "*" + key[match.end("number") :]
        if match["stem"].lower() not in _NO_RANK_STEMS:
            rank = int(match["number"])
    match = _NODE.search(key.rpartition("/")[2]) or _NODE.search(key)
    if match:
        host = match["host"]
        key = key.replace(host, "*")
    return NamedBy(_STREAM.sub("*", key), rank, local, host)


def group(paths: Sequence[str]) -> list[list[int]]:
    """The places of the paths, those of one job together, in order, of a log that was rotated the oldest part first. A
    path that stands alone has no one's number."""
    groups: dict[str, list[int]] = {}
    for place, path in enumerate(paths):
        key = named_by(base_of(path, paths)).key if path != "-" else f"-{place}"
        groups.setdefault(key, []).append(place)
    return [sorted(places, key=lambda place: _age(paths[place], paths)) for places in groups.values()]


def base_of(path: str, paths: Sequence[str]) -> str:
    """The log of which `path` is an older part (`train.log` of `train.log.2.gz`), if in `paths`; else `path`."""
    match = _ROTATED.fullmatch(path)
    return match["base"] if match and match["base"] in paths else path


def rotated_parts(paths: Sequence[str]) -> dict[str, str]:
    """Those of the paths that are older parts of another one -> that one."""
    return {path: base for path in paths if (base := base_of(path, paths)) != path}


def _age(path: str, paths: Sequence[str]) -> tuple[bool, int]:
    match = _ROTATED.fullmatch(path) if base_of(path, paths) != path else None
    if match is None:
        return True, 0
    return False, int(match["date"]) if match["date"] else -int(match["place"])


def local_is_rank(paths: Sequence[str], world: int | None) -> bool:
    """Whether torchrun's folders, numbered by local rank, are ranks: one node's, all there, and no more known."""
    locals_ = {who.local for path in paths if (who := named_by(path)).local is not None}
    return bool(locals_) and (world is None or world <= max(number or 0 for number in locals_) + 1)


def with_rank(lines: Sequence[Line], rank: int | None, local: int | None, host: str | None) -> list[Line]:
    """The lines of a file whose name says whose they are; a line that says so itself knows better."""
    filled = []
    for line in lines:
        who = line.who
        if who.rank is None and who.local is None and who.number is None:
            who = replace(who, rank=rank, local=local, host=who.host or host)
        elif who.host is None and host is not None:
            who = replace(who, host=host)
        filled.append(line if who is line.who else replace(line, who=who))
    return filled


_FENCE = r"[-=*#~+_]{3,}"
_FILE = late_regex(r"^==> (?P<path>.{1,300}) <==$")
_BEGIN = late_regex(
    rf"^{_FENCE} ?(?P<end>End )?(?:Begin )?(?:(?:of|for|output|log|logs|stdout|stderr) )*(?:global "
    rf")?rank[ =:_]?(?P<rank>\d{{1,6}})\b(?: \(?(?:STDOUT|STDERR|log|logs|output)\)?)?:? ?{_FENCE}$",
    re.IGNORECASE,
)
_STARTS = frozenset({"==>", *(sign * 3 for sign in "-=*#~+_")})
_FRAME = late_regex(r'\s*File "[^"]+", line \d+')
_MODULE = late_regex(r"\[\w[\w./-]*\.py:\d{1,5}\]")
FEW_LINES = 20
SMALL = 100
"""A task's number is below it, or comes again: of few lines a rising number above is a line's (`grep -n`)."""
LEAST_OF_A_LIST = 3  # 1, 2, 3: someone counts; a task 0 would be there, too.


def without_line_numbers(lines: Sequence[Line]) -> list[Line]:
    """The lines without the numbers in front, if these only count lines: they rise with each, and never come again.

    `srun --label` puts the same number before each line of a task, and its tasks begin with 0.
    """
    numbers = [line.who.number or 0 for line in lines if line.who.labelled]
    if not numbers or numbers[0] == 0 or any(one >= other for one, other in pairwise(numbers)):
        return list(lines)
    is_list = numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= LEAST_OF_A_LIST
    if len(numbers) < FEW_LINES and numbers[-1] < SMALL and not is_list:
        return list(lines)
    return without_numbers(lines, lambda who: who.labelled)


def without_modules(lines: Sequence[Line]) -> list[Line]:
    """The lines without a host and its number in brackets, if there is but one such host and its numbers are
    large, or other lines have a file there: loggers put a module and its line there (`[gpt2:120]`), and of a
    job's ranks some have small numbers."""
    bracketed = [line for line in lines if line.who.host is not None and line.who.number is not None]
    if any(DYING.match(line.text) or _FRAME.match(line.text) for line in bracketed):
        return list(lines)  # mpirun's, with a process's number; a logger has no prefix within a traceback
    speakers = [line.who for line in bracketed]
    if not speakers or len({who.host for who in speakers}) > 1:
        return list(lines)
    if min(who.number or 0 for who in speakers) < SMALL and not any(_MODULE.match(line.raw) for line in lines):
        return list(lines)
    named = speakers[0].host
    return without_numbers(lines, lambda who: who.host == named and who.number is not None)


def with_sections(lines: Sequence[Line]) -> tuple[list[Line], list[int]]:
    """(the lines, in their order; the numbers of the lines that are headings). Those under a heading that
    names a rank have it where they name no one themselves."""
    filled: list[Line] = []
    headings: list[int] = []
    current: Who = NOBODY
    for line in lines:
        text = line.raw.strip()
        heading = _heading(text) if text[:3] in _STARTS else None
        if heading is not None:
            current = heading
            headings.append(line.number)
        elif current.named and not line.who.named:
            line = replace(line, who=current)
        filled.append(line)
    return filled, headings


def _heading(text: str) -> Who | None:
    """Whose lines follow, NOBODY where a part ends; None if it is no heading."""
    file = _FILE.match(text)
    if file is not None:
        named = named_by(file["path"])
        return Who(rank=named.rank, local=named.local, host=named.host)
    part = _BEGIN.match(text)
    if part is None:
        return None
    return NOBODY if part["end"] else Who(rank=int(part["rank"]))
