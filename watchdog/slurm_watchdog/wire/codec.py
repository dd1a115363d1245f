"""Reports and replies as MessagePack, and back, strictly. Both sides of the wire use these four functions.

Decoding bounds each value of a report once, for all that comes after it: bytes, characters of a text, size of a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Final, TypeVar, get_args

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.structs import mapped, picked
from slurm_watchdog.model.observations import EventKind, FaultSeverity
from slurm_watchdog.model.protocol import Command, Reply
from slurm_watchdog.model.report import HELD, Report, State
from slurm_watchdog.wire.frames import MAX_BYTES

MAX_WHY = 300  # Characters of what is wrong with a message: the decoder repeats the value, which may be long.

OPEN_LISTS: Final[dict[type, dict[str, tuple[str, frozenset[str]]]]] = {
    Report: {"events": ("kind", frozenset(EventKind)), "node_events": ("severity", frozenset(FaultSeverity))},
    Reply: {"commands": ("type", frozenset(str(each.__struct_config__.tag) for each in get_args(Command)))},
}
"""Lists of a message of which an element of a newer release is left out, and the rest is decoded: its key, and the
words that are known. Only what may be missing without accusing anybody: a process or a GPU that was left out would look
gone, so their words are closed, and new ones take a new version of the wire."""

# Rows of a report are counted (slurm_watchdog.controller.state.door); a text of 4 MiB in one of them
# would make every bound in rows worthless. Agents cut what they send far below this, so what is cut here comes from a
# node that is not ours any more.
MAX_NAME = 256  # Characters of a name: of a process (15), node (64), user (32), job, GPU, phase, state.
MAX_SENTENCE = 1024
MAX_PATH = 4096  # linux/limits.h
MAX_STATE = 64  # Bytes of Report.state; agents send twenty.
MAX_LENGTHS: Final[dict[str, int]] = {
    **dict.fromkeys(("path", "directory", "mount", "source", "device", "server", "probe", "variables"), MAX_PATH),
    **dict.fromkeys(("line", "error", "problems", "reason"), MAX_SENTENCE),
}  # Field -> the most characters of its text; of all others MAX_NAME. Agents send lines of 500 at most.
UNCUT_FIELDS = frozenset({"results"})  # Their evidence is bounded by the report, and kept within shares of a day.
ELLIPSIS = "…"

LARGEST = 2**63  # No journal takes whole numbers from here on.
_ODD_NUMBERS = (
    (int, re.compile(rb"\xcf[\x80-\xff]")),  # uint 64
    (float, re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")),  # float 64
    (float, re.compile(rb"\xca[\x7f\xff][\x80-\xff]")),  # float 32
)  # Type -> bytes without which no number is too large, infinite or NaN. Other values may look so, too.

Message = TypeVar("Message", Report, Reply, State)
_encoder = msgspec.msgpack.Encoder()
_reports, _replies = msgspec.msgpack.Decoder(Report), msgspec.msgpack.Decoder(Reply)
_states = msgspec.msgpack.Decoder(State)
_held = attrgetter(*HELD)


class WireError(Exception):
    """Bytes that are no report or no reply. The text says which, and what is wrong with them."""


def encode_report(report: Report) -> bytes:
    """The bytes of a report; a fraction that is NaN or infinite, as a line of a log may have it, is sent as unknown.
    Raises WireError if they exceed MAX_BYTES."""
    data = _encoder.encode(report)
    if float in _odd_numbers(data):
        data = _encoder.encode(mapped(report, (float,), _finite))
    return _bounded(data, "report")


def encode_state(report: Report) -> bytes:
    """The bytes of a report that only says that all is as before (model.report.is_state)."""
    return _encoder.encode(picked(State, report))


def encode_reply(reply: Reply) -> bytes:
    """The bytes of a reply. Raises WireError if they exceed MAX_BYTES."""
    return _bounded(_encoder.encode(reply), "reply")


def with_age(data: bytes, age_s: float) -> bytes:
    """The report or state in `data`, which has no age yet (0 is left off), with one: a field more of the same map, or
    another last one of the same list."""
    if data[0] & 0xF0 == 0x90:  # a list of up to 15 of MessagePack
        return _encoder.encode(replace(_states.decode(data), age_s=age_s))
    many = data[0] == 0xDE  # map 16 of MessagePack; else a map of up to 15 fields, their number in its first byte
    fields = int.from_bytes(data[1:3], "big") if many else data[0] & 0x0F
    return b"\xde%b\xa5age_s%b%b" % ((fields + 1).to_bytes(2, "big"), _encoder.encode(age_s), data[3 if many else 1 :])


def decode_report(data: bytes) -> Report:
    """The report in `data`, with every text cut to what its field may hold. Raises WireError if it is too
    large, no MessagePack, or no report of a version we know."""
    report = _decoded(data, "report", _reports)
    if kinds := _odd_numbers(data):
        check_numbers(report, kinds)
    _check_state(report.state)
    if report.same_as and any(_held(report)):
        more = [name for name in HELD if getattr(report, name)]
        raise WireError(f"not a report: a small one, and it has {', '.join(more)}")
    if report.version != 1:
        raise WireError(f"report of version {report.version}: this end reads version 1; bring both to one release")
    return cut_texts(report) if may_have_long_text(data) else report


def decode_state(data: bytes) -> State:
    """The state in `data`. Raises WireError if it is none, or a number in it is infinite, NaN, or too large."""
    said = _decoded(data, "state", _states)
    _check_state(said.state)
    if not (math.isfinite(said.made_s) and math.isfinite(said.age_s) and max(said.sequence, said.same_as) < LARGEST):
        raise WireError("not a state: a number in it is infinite, NaN, or beyond 64 bits with its sign")
    if said.same_as <= 0:
        raise WireError("not a state: it names no report")
    return said


def decode_reply(data: bytes) -> Reply:
    """The reply in `data`. Raises WireError if it is too large, no MessagePack, or no reply."""
    return _decoded(data, "reply of a controller", _replies)


def _check_state(state: bytes) -> None:
    if len(state) > MAX_STATE:
        raise WireError(f"not a report: its state has {len(state)} bytes, and {MAX_STATE} are the most")


def _decoded(data: bytes, what: str, decoder: msgspec.msgpack.Decoder[Message]) -> Message:
    try:
        return decoder.decode(_bounded(data, what))
    except msgspec.ValidationError as error:
        if (newer := _read_newer(data, decoder.type)) is None:
            raise WireError(f"not a {what}: {str(error)[:MAX_WHY]}") from error
        return newer
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WireError(f"not a {what}: {str(error)[:MAX_WHY]}") from error
    except RecursionError as error:
        raise WireError(f"not a {what}: nested too deeply") from error


def _bounded(data: bytes, what: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise WireError(f"{what} of {len(data)} bytes: the limit is {MAX_BYTES}")
    return data


def _read_newer(data: bytes, kind: type[Message]) -> Message | None:
    """The message without the elements of OPEN_LISTS whose words are not known; None if these are not what is wrong."""

    def is_known(element: Any, key: str, words: frozenset[str]) -> bool:
        word = element.get(key) if isinstance(element, dict) else None
        return not isinstance(word, str) or word in words

    try:
        tree = msgspec.msgpack.decode(data, type=dict[str, Any])
        for name, (key, words) in OPEN_LISTS.get(kind, {}).items():
            if isinstance(rows := tree.get(name), list):
                tree[name] = [each for each in rows if is_known(each, key, words)]
        return msgspec.convert(tree, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


# ------------------------------------------------------------------------------------------------ bounds of values


def _odd_numbers(data: bytes) -> tuple[type, ...]:
    """The types of which a number in this message may be too large, infinite or NaN."""
    return tuple([kind for kind, odd in _ODD_NUMBERS if odd.search(data)])


def _finite(field: str, numbers: Sequence[float]) -> Sequence[float | None]:
    return [each if math.isfinite(each) else None for each in numbers]


def check_numbers(report: Report, kinds: tuple[type, ...] = (int, float)) -> None:
    """Raises WireError if a number of these types is infinite, NaN, or too large."""

    def check(field: str, numbers: Sequence[float]) -> Sequence[float]:
        if any(each >= LARGEST if isinstance(each, int) else not math.isfinite(each) for each in numbers):
            raise WireError(f"not a report: a number in its {field} is infinite, NaN, or beyond 64 bits with its sign")
        return numbers

    mapped(report, kinds, check)


def may_have_long_text(data: bytes) -> bool:
    """Whether a text longer than the shortest limit may be in this message. May be wrong only in saying yes: the bytes
    of a number may look like the head of a text (str 16 or str 32 of MessagePack), if of none longer than all this."""
    return len(data) > MAX_NAME and (
        _LONGEST_TEXT.search(data) is not None or _long_text(min(255, len(data) >> 8)).search(data) is not None
    )


_LONGEST_TEXT = re.compile(
    rb"\xdb[\x00]"
)  # The head of a text of 64 KiB or more; so it is looked for by its first byte.


@cache
def _long_text(most: int) -> re.Pattern[bytes]:
    """The head of a text of at least 256 bytes, and less than 256 more than `most` times as many."""
    return re.compile(b"\xda[\x01-%b]" % re.escape(bytes((most,))))


def cut_texts(report: Report) -> Report:
    """The report with no text longer than its field may be (`…` where cut); the same object where none is."""
    return mapped(report, (str,), _cut, UNCUT_FIELDS)


def _cut(field: str, texts: Sequence[str]) -> Sequence[str]:
    limit = MAX_LENGTHS.get(field, MAX_NAME)
    return [each if len(each) <= limit else each[: limit - 1] + ELLIPSIS for each in texts]
