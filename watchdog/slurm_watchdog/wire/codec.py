"""Reports and replies as JSON bytes, and back, strictly. Both sides of the wire use these four functions."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec

from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.forward_compat import read_newer
from slurm_watchdog.wire.text_limits import cut_texts, may_have_long_text

Message = TypeVar("Message", Report, Reply)

MAX_BYTES: Final = 8 * 1024**2
"""A report of 1,000 processes with stacks has about 2 MiB; anything larger than this is a mistake or an attack."""

MAX_WHY: Final = 300
"""Characters of what is wrong with it: the decoder repeats the value, which may be long."""


class WireError(Exception):
    """Bytes that are no report or no reply. The text says which, and what is wrong with them."""


_SHAPE: Final = bytes.maketrans(b"012345689[, \t\n\r", b"777777777" + b":" * 6)
_LONG: Final = b":" + b"7" * 19
_LONG_NEGATIVE: Final = b":-" + b"7" * 19
"""Only where so many digits follow each other can a whole number need more than 64 bits: Python's have no
end, and then become no float. What follows a point is a fraction, and what follows a quotation mark is a
string: both may be as long, and often are."""
_LARGEST: Final = 2**63

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
        raise WireError("this is no report: a whole number in it has more than 64 bits")
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
            raise WireError(f"this is no {what}: {str(error)[:MAX_WHY]}") from error
        return newer
    except UnicodeDecodeError as error:
        raise WireError(f"this is no {what}: no UTF-8") from error
    except RecursionError as error:
        raise WireError(f"this is no {what}: nested too deeply") from error


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
