"""Reports and replies as JSON bytes, and back, strictly. Both sides of the wire use these four functions."""

from __future__ import annotations

from typing import Any, Final, TypeVar, get_args

import msgspec

from slurm_watchdog.model.observations import EventKind, FaultSeverity
from slurm_watchdog.model.protocol import Command, Reply
from slurm_watchdog.model.report import Report

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


# How long a single text of a report may be.
# A report has at most 8 MiB, and its rows are counted (slurm_watchdog.controller.state.reported_processes); that one of
# them holds 4 MiB in a name would make every bound in rows worthless. Agents cut what they send far below this, so
# what is cut here comes from a node that is not ours any more. Results are no part of it: their evidence is bounded
# by the report, and kept within shares of a day.

MAX_NAME = 256  # Characters of a name: of a process (15), node (64), user (32), job, GPU, phase, state.
MAX_SENTENCE = 1024
MAX_PATH = 4096  # linux/limits.h
MAX_LENGTHS: Final[dict[str, int]] = {
    **dict.fromkeys(("path", "directory", "mount", "source", "device", "server", "probe", "variables"), MAX_PATH),
    **dict.fromkeys(("line", "error", "problems", "reason"), MAX_SENTENCE),
}  # Field -> the most characters of its text; of all others MAX_NAME. Agents send lines of 500 at most.
UNCUT_FIELDS = frozenset({"results"})
ELLIPSIS = "…"


def may_have_long_text(data: bytes) -> bool:
    """Whether a text longer than the shortest limit may be in this JSON. May be wrong only in saying yes."""
    if len(data) <= MAX_NAME:
        return False
    # Without escaped backslashes every `\"` is within a text, and of what the other quotation marks divide
    # every second piece is one. What lies between two texts counts nothing: the numbers of eight ranks are
    # longer than any name, in each report.
    plain = data.replace(b"\\\\", b"..").replace(b'\\"', b"..")
    return max(map(len, plain.split(b'"')[1::2]), default=0) > MAX_NAME


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


_SHAPE = bytes.maketrans(b"012345689[, \t\n\r", b"777777777" + b":" * 6)
_LONG = b":" + b"7" * 19
_LONG_NEGATIVE = b":-" + b"7" * 19
"""Only where so many digits follow each other can a whole number need more than 64 bits: Python's have no
end, and then become no float. What follows a point is a fraction, and what follows a quotation mark is a
string: both may be as long, and often are."""
_LARGEST = 2**63

_encoder = msgspec.json.Encoder()
_reports = msgspec.json.Decoder(Report)
_replies = msgspec.json.Decoder(Reply)


def encode_report(report: Report) -> bytes:
    """The bytes of a report. Raises WireError if they exceed MAX_BYTES."""
    return _bounded(_encoder.encode(report), "report")


def encode_reply(reply: Reply) -> bytes:
    """The bytes of a reply. Raises WireError if they exceed MAX_BYTES."""
    return _bounded(_encoder.encode(reply), "reply")


def decode_report(data: bytes) -> Report:
    """The report in `data`, with every text cut to what its field may hold. Raises WireError if it is too
    large, no JSON, or no report of a version we know."""
    report = _decoded(data, "report", "report", _reports)
    if _may_be_long(data) and not _moderate(msgspec.to_builtins(report)):
        raise WireError("not a report: a whole number in it has more than 64 bits")
    if report.version != 1:
        raise WireError(f"report of version {report.version}: this end reads version 1; bring both to one release")
    return cut_texts(report) if may_have_long_text(data) else report


def decode_reply(data: bytes) -> Reply:
    """The reply in `data`. Raises WireError if it is too large, no JSON, or no reply."""
    return _decoded(data, "reply", "reply of a controller", _replies)


def _decoded(data: bytes, name: str, what: str, decoder: msgspec.json.Decoder[Message]) -> Message:
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


def _may_be_long(data: bytes) -> bool:
    """Whether a whole number of so many digits may stand in this JSON; what it finds may also be a part of a string."""
    shape = data.translate(_SHAPE)
    return _LONG in shape or _LONG_NEGATIVE in shape


def _moderate(value: object) -> bool:
    """Whether all whole numbers in it have 64 bits, sign included."""
    match value:
        case int():
            return -_LARGEST <= value < _LARGEST
        case dict():
            return all(map(_moderate, value.values()))
        case list() | tuple():
            return all(map(_moderate, value))
        case _:
            return True


def _bounded(data: bytes, what: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise WireError(f"{what} of {len(data)} bytes: the limit is {MAX_BYTES}")
    return data
