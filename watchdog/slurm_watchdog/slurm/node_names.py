"""Node sets as Slurm writes them, into names, and back; and one row of a listing, field by field: what cannot be read
is unknown, noted by name, and spoils nothing else. Pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

MAX_NODES = 65_536  # Nodes in one list: Slurm's own limit is 64 k (slurm.conf(5), MAX_SLURM_NODES).


@lru_cache(maxsize=16384)
def expand_nodes(text: str) -> tuple[str, ...]:
    """`n[1-2],x` gives n1, n2, x; nothing, or Slurm's words for nothing, gives no nodes. Raises ParseError.

    Groups (`@name`) are not looked up: that would run whatever the groups of this machine are configured to run.
    """
    if text in {"", "(null)", "n/a", "None", "None assigned"}:
        return ()
    if node_count(text) > MAX_NODES:
        raise ParseError(f"a list of more than {MAX_NODES} nodes: {text[:80]!r}")
    try:
        # The names are shared by all jobs that have had these nodes: what is kept stays small on 10,000 of them.
        return tuple(sys.intern(str(node)) for node in NodeSet(text, resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise ParseError(f"no list of nodes: {text[:80]!r} ({error})") from error


def fold_nodes(names: Iterable[str]) -> str:
    """The names as Slurm writes a set of them: n1, n3, n4 is `n[1,3-4]`. Raises ParseError."""
    try:
        return str(NodeSet.fromlist(list(names), resolver=RESOLVER_NOGROUP))
    except NodeSetException as error:
        raise ParseError(f"no names of nodes ({error})") from error


def node_count(text: str) -> int:
    """At most how many nodes a list stands for, without expanding it."""
    total = 0
    for part in re.split(r",(?![^\[]*\])", text):
        count = 1
        for inside in re.findall(r"\[([^\]]*)\]", part):
            count *= sum(_length(span) for span in inside.split(","))
        total += count
    return total


def _length(span: str) -> int:
    match = re.match(r"(\d{1,18})-(\d{1,18})", span, re.ASCII)
    if match is None:
        return MAX_NODES + 1 if len(span) > 20 else 1
    return max(1, int(match.group(2)) - int(match.group(1)) + 1)


@dataclass(frozen=True)
class Names:
    """What the patterns of an output path stand for."""

    raw_id: str  # The id of this one job; for an array's element not the one with the underscore.
    job_id: str
    user: str
    name: str
    batch_host: str


T = TypeVar("T")
Raw = TypeVar("Raw")


class ParseError(ValueError):
    """Output that is cut short, or not what was asked for. Never take it for an empty answer."""


Listed = tuple[tuple[T, ...], tuple[str, ...]]  # What was listed, and a sentence about each row left out.


def all_or_none(listed: Listed[T]) -> tuple[T, ...]:
    """The rows of a listing. Raises ParseError if one was left out."""
    rows, dropped = listed
    if dropped:
        raise ParseError(dropped[0])
    return rows


@dataclass
class Fields:
    """Reads the fields of one row and remembers which of them could not be read."""

    unreadable: list[str] = field(default_factory=list)  # Names as in `SlurmJob` and `SlurmNode`.

    def read(self, name: str, rule: Callable[[Raw], T], raw: Raw, unknown: T) -> T:
        """`rule(raw)`; `unknown` where the rule cannot read it."""
        try:
            return rule(raw)
        except (ValueError, TypeError, OverflowError):
            self.unreadable.append(name)
            return unknown
