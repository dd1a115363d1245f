"""Messages of a newer release: an event or command of an unknown type is left out, and the rest is decoded.

Only what may be missing without accusing anybody: a process or a GPU that was left out would look gone, so
their words are closed, and new ones take a new version of the wire.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar, get_args

import msgspec

from slurm_watchdog.model.observations import EventKind, FaultSeverity
from slurm_watchdog.model.protocol import Command, Reply
from slurm_watchdog.model.report import Report

T = TypeVar("T")

OPEN_LISTS: Final[dict[type, dict[str, tuple[str, frozenset[str]]]]] = {
    Report: {"events": ("kind", frozenset(EventKind)), "node_events": ("severity", frozenset(FaultSeverity))},
    Reply: {"commands": ("type", frozenset(str(each.__struct_config__.tag) for each in get_args(Command)))},
}
"""Lists of a message of which an element may have a word that is not known: its key, and the words that are."""


def read_newer(data: bytes, kind: type[T]) -> T | None:
    """The message in `data` without the elements whose word is not known; None if that was not what is wrong
    with it."""
    try:
        tree: Any = msgspec.json.decode(data)
        if not isinstance(tree, dict) or not _drop_unknown(tree, OPEN_LISTS[kind]):
            return None
        return msgspec.convert(tree, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _drop_unknown(tree: dict[str, Any], lists: dict[str, tuple[str, frozenset[str]]]) -> bool:
    """Takes such elements out of `tree`; whether there were any."""
    found = False
    for name, (key, known) in lists.items():
        elements = tree.get(name)
        if not isinstance(elements, list):
            continue
        kept = [each for each in elements if not _is_new(each, key, known)]
        found = found or len(kept) != len(elements)
        tree[name] = kept
    return found


def _is_new(element: object, key: str, known: frozenset[str]) -> bool:
    word = element.get(key) if isinstance(element, dict) else None
    return isinstance(word, str) and word not in known
