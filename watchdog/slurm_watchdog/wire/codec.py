"""Reports and replies as MessagePack, and back, strictly. Both sides of the wire use these four functions."""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any, Final, TypeVar, get_args

import msgspec

from slurm_watchdog.model.observations import EventKind, FaultSeverity
from slurm_watchdog.model.protocol import Command, Reply
from slurm_watchdog.model.report import HELD, Report

# Messages of a newer release: an event or command of an unknown type is left out, and the rest is decoded.
# Only what may be missing without accusing anybody: a process or a GPU that was left out would look gone, so their
# words are closed, and new ones take a new version of the wire.

T = TypeVar("T")

OPEN_LISTS: Final[dict[type, dict[str, tuple[str, frozenset[str]]]]] = {
    Report: {"events": ("kind", frozenset(EventKind)), "node_events": ("severity", frozenset(FaultSeverity))},
    Reply: {"commands": ("type", frozenset(str(each.__struct_config__.tag) for each in get_args(Command)))},
}  # Lists of a message of which an element may have a word that is not known: its key, and the words that are.


def read_newer(data: bytes, kind: type[T]) -> T | None:
    """The message in `data` without the elements of unknown words; None if these were not what is wrong."""
    try:
        tree: Any = msgspec.msgpack.decode(data)
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


# How long a single text of a report may be.
# A report has at most 8 MiB, and its rows are counted (slurm_watchdog.controller.state.door); that one of
# them holds 4 MiB in a name would make every bound in rows worthless. Agents cut what they send far below this, so
# what is cut here comes from a node that is not ours any more. Results are no part of it: their evidence is bounded
# by the report, and kept within shares of a day.

MAX_NAME = 256  # Characters of a name: of a process (15), node (64), user (32), job, GPU, phase, state.
MAX_SENTENCE = 1024
MAX_PATH = 4096  # linux/limits.h
MAX_STATE = 64  # Bytes of Report.state; agents send twenty.
MAX_LENGTHS: Final[dict[str, int]] = {
    **dict.fromkeys(("path", "directory", "mount", "source", "device", "server", "probe", "variables"), MAX_PATH),
    **dict.fromkeys(("line", "error", "problems", "reason"), MAX_SENTENCE),
}  # Field -> the most characters of its text; of all others MAX_NAME. Agents send lines of 500 at most.
UNCUT_FIELDS = frozenset({"results"})
ELLIPSIS = "…"


def may_have_long_text(data: bytes) -> bool:
    """Whether a text longer than the shortest limit may be in this message. May be wrong only in saying yes: the bytes
    of a number may look like the head of a text (str 16 or str 32 of MessagePack), if of none longer than all this."""
    return len(data) > MAX_NAME and (
        b"\xdb\x00" in data or _long_text(min(255, len(data) >> 8)).search(data) is not None
    )


@cache
def _long_text(most: int) -> re.Pattern[bytes]:
    """The head of a text of at least 256 bytes, and less than 256 more than `most` times as many."""
    return re.compile(b"\xda[\x01-%b]" % re.escape(bytes((most,))))


def cut_texts(report: Report) -> Report:
    """The report with no text longer than its field may be (`…` where cut); the same object where none is."""
    return _cut(report, MAX_NAME)  # type: ignore[no-any-return]


def _cut(value: Any, limit: int) -> Any:
    match value:
        case str():
            return value if len(value) <= limit else value[: limit - 1] + ELLIPSIS
        case tuple():
            cut = tuple([_cut(each, limit) for each in value])
            return cut if any(new is not old for new, old in zip(cut, value, strict=True)) else value
        case msgspec.Struct():
            found = {}
            for name in value.__struct_fields__:
                old = getattr(value, name)
                new = old if name in UNCUT_FIELDS else _cut(old, MAX_LENGTHS.get(name, MAX_NAME))
                if new is not old:
                    found[name] = new
            return msgspec.structs.replace(value, **found) if found else value
        case _:
            return value


Message = TypeVar("Message", Report, Reply)

MAX_BYTES = 8 * 1024**2  # 1,000 processes with stacks have about 2 MiB; anything larger is a mistake or an attack.

MAX_WHY = 300  # Characters of what is wrong with it: the decoder repeats the value, which may be long.


class WireError(Exception):
    """Bytes that are no report or no reply. The text says which, and what is wrong with them."""


_ODD = tuple(map(re.compile, (rb"\xcf[\x80-\xff]", rb"\xcb[\x7f\xff][\xf0-\xff]", rb"\xca[\x7f\xff][\x80-\xff]")))
"""Only where such bytes follow each other can a whole number be 2^63 or more (uint 64), which no journal takes, or a
fraction be infinite or none (float 64, float 32), with which nothing can be compared. Others may look so, too."""
_LARGEST = 2**63

_encoder = msgspec.msgpack.Encoder()
_reports = msgspec.msgpack.Decoder(Report)
_replies = msgspec.msgpack.Decoder(Reply)


def encode_report(report: Report) -> bytes:
    """The bytes of a report, of whose numbers those that are infinite or none are not known: a line of a log may have
    them, and the door refuses them. Raises WireError if they exceed MAX_BYTES."""
    data = _encoder.encode(report)
    if any(odd.search(data) for odd in _ODD):
        data = _encoder.encode(_finite(msgspec.to_builtins(report, builtin_types=(bytes,))))
    return _bounded(data, "report")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return list(map(_finite, value)) if isinstance(value, list | tuple) else value


def encode_reply(reply: Reply) -> bytes:
    """The bytes of a reply. Raises WireError if they exceed MAX_BYTES."""
    return _bounded(_encoder.encode(reply), "reply")


def with_age(data: bytes, age_s: float) -> bytes:
    """The report in `data`, which has no age yet (0 is left off), with one: a field more of the same map."""
    many = data[0] == 0xDE  # map 16 of MessagePack; else a map of up to 15 fields, their number in its first byte
    fields = int.from_bytes(data[1:3], "big") if many else data[0] & 0x0F
    return b"\xde%b\xa5age_s%b%b" % ((fields + 1).to_bytes(2, "big"), _encoder.encode(age_s), data[3 if many else 1 :])


def decode_report(data: bytes) -> Report:
    """The report in `data`, with every text cut to what its field may hold. Raises WireError if it is too
    large, no MessagePack, or no report of a version we know."""
    report = _decoded(data, "report", "report", _reports)
    if any(odd.search(data) for odd in _ODD) and not _moderate(report):
        raise WireError("not a report: a number in it is infinite, none, or has more than 64 bits with its sign")
    if len(report.state) > MAX_STATE:
        raise WireError(f"not a report: its state has {len(report.state)} bytes, and {MAX_STATE} are the most")
    if report.same_as and (more := [name for name in HELD if getattr(report, name)]):
        raise WireError(f"not a report: a small one, and it has {', '.join(more)}")
    if report.version != 1:
        raise WireError(f"report of version {report.version}: this end reads version 1; bring both to one release")
    return cut_texts(report) if may_have_long_text(data) else report


def decode_reply(data: bytes) -> Reply:
    """The reply in `data`. Raises WireError if it is too large, no MessagePack, or no reply."""
    return _decoded(data, "reply", "reply of a controller", _replies)


def _decoded(data: bytes, name: str, what: str, decoder: msgspec.msgpack.Decoder[Message]) -> Message:
    try:
        return decoder.decode(_bounded(data, name))
    except msgspec.MsgspecError as error:
        newer = read_newer(data, decoder.type) if isinstance(error, msgspec.ValidationError) else None
        if newer is None:
            raise WireError(f"not a {what}: {str(error)[:MAX_WHY]}") from error
        return newer
    except UnicodeDecodeError as error:
        raise WireError(f"not a {what}: not UTF-8") from error
    except RecursionError as error:
        raise WireError(f"not a {what}: nested too deeply") from error


def _moderate(value: object) -> bool:
    """Whether all numbers in it are finite, and whole ones have 64 bits, sign included."""
    match value:
        case int():
            return value < _LARGEST
        case float():
            return math.isfinite(value)
        case msgspec.Struct():
            return all(_moderate(getattr(value, name)) for name in value.__struct_fields__)
        case tuple():
            return all(map(_moderate, value))
        case _:
            return True


def _bounded(data: bytes, what: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise WireError(f"{what} of {len(data)} bytes: the limit is {MAX_BYTES}")
    return data
