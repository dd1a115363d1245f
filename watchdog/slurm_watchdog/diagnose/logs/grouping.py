"""Which files are logs of one job, and what their names say about who wrote them. Pure: names go in."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.logs.line import Line

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
    """The log of which `path` is an older part (`train.log` of `train.log.2.gz`), if that is one of `paths`; else
    `path` itself."""
    match = _ROTATED.fullmatch(path)
    return match["base"] if match and match["base"] in paths else path


def rotated_parts(paths: Sequence[str]) -> dict[str, str]:
    """Those of the paths that are older parts of another one -> that one."""
    return {path: base for path in paths if (base := base_of(path, paths)) != path}


def _age(path: str, paths: Sequence[str]) -> tuple[bool, int]:
    """Sorts the parts of one log, the oldest first, and leaves all other paths in their order."""
    match = _ROTATED.fullmatch(path) if base_of(path, paths) != path else None
    if match is None:
        return True, 0
    return False, int(match["date"]) if match["date"] else -int(match["place"])


def local_is_rank(paths: Sequence[str], world: int | None) -> bool:
    """Whether torchrun's folders, which are numbered by local rank, are ranks: one node's, all there, and no
    more ranks known."""
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
