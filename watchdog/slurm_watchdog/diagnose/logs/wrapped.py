"""Records that hold a log's lines, as Docker, a container runtime, journald, a log collector or a logger writes them.
Each becomes the line that it holds, with the time, the host, the rank and the level that it adds. Pure.

Nothing is known of a format but that one field has the text (TEXT_KEYS). Records in records are looked into, to
MAX_DEPTH, and lists of records in one document. What counts steps in fields of its own stays as it is.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

import msgspec

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.diagnose.logs.line import LINE_END
from slurm_watchdog.knowledge.progress_patterns import EPOCH_KEYS, STEP_KEYS, TRAINING_KEYS
from slurm_watchdog.parse.timestamps import stamp_of
from slurm_watchdog.parse.training_log.text import count_of

MAX_DEPTH = 4
MAX_TRIED = 50  # Lines of a block among which there is a record, if there are any in it.
MAX_RECORD_BYTES = 256 * 1024
MAX_RECORDS = 200_000
TEXT_KEYS = (
    "log", "message", "msg", "MESSAGE", "@message", "textPayload", "text", "line", "body", "stringValue", "event",
    "_raw", "jsonPayload", "_source", "record",
)  # fmt: skip
TIME_KEYS = (
    "time", "timestamp", "@timestamp", "ts", "asctime", "datetime", "created", "__REALTIME_TIMESTAMP",
    "_SOURCE_REALTIME_TIMESTAMP", "ingestionTime", "_timestamp",
)  # fmt: skip
RANK_KEYS = ("rank", "global_rank", "RANK", "world_rank", "process_index")
HOST_KEYS = ("host", "hostname", "node", "node_name", "nodeName", "_HOSTNAME", "instance")
LEVEL_KEYS = ("level", "levelname", "severity", "lvl", "log.level")
RAISED_KEYS = (
    "exc_info",
    "exc_text",
    "exception",
    "stack_trace",
    "stacktrace",
    "stack",
    "traceback",
    "exc",
    "error.stack_trace",
)
_HINT = late_regex(rb'"(?:' + "|".join(re.escape(key) for key in TEXT_KEYS).encode() + rb')"\s*:')
_PREFIX = late_regex(r"[^{}\"]{0,160}?(?=\{\s*\"[\w@.-]+\"\s*:)")
_EXPORT = late_regex(rb"^MESSAGE=", re.MULTILINE)
_EXPORT_TIME = b"__REALTIME_TIMESTAMP="
_HOST = late_regex(r"[A-Za-z][\w.-]{0,62}")
_INNER_RANK = late_regex(r"\[rank(\d{1,6})\]:? ?")
_RAW = late_regex(r"\s*\[rank\d+\]|\s*Traceback \(most|\s+File \"|[\w.]*(?:Error|Exception): |[\w./-]+: error: ")
"""What a program wrote itself: the level beside it is that of whatever collected it."""
_LEVELS = frozenset({"DEBUG", "INFO", "WARNING", "WARN", "ERROR", "CRITICAL", "FATAL"})
_TEN_DIGITS = 10

Numbers = Sequence[int] | None


def unwrapped(data: bytes, first_line: int, numbers: Numbers) -> tuple[bytes, Numbers]:
    """A block whose records are replaced by the lines that they hold, and the number of each of its lines; as it was if
    it holds none. Of a document that is one list, the records are numbered from 1."""
    if _EXPORT_TIME in data and _EXPORT.search(data):
        return _of_export(data, first_line, numbers)
    lines = data.split(b"\n") if _HINT.search(data) else []
    tried = [line for line in lines if line.strip()][:MAX_TRIED]
    if not any(_line_of(line) is not None for line in tried):
        is_document = first_line == 1 and data[:20].lstrip()[:1] in (b"{", b"[")
        return _of_document(data, numbers) if is_document else (data, numbers)
    return b"\n".join(_line_of(line) or line for line in lines), numbers


def _line_of(line: bytes) -> bytes | None:
    """The line that a record holds; None if it is none."""
    if b'"' not in line or len(line) > MAX_RECORD_BYTES:
        return None
    text = line.decode("utf-8", "replace").rstrip()
    match = _PREFIX.match(text) if text.endswith("}") else None
    record = None if match is None else _decoded(text[match.end() :])
    found = _text_in(record, 0) if isinstance(record, dict) else None
    if match is None or found is None:
        return None
    return (match[0] + found).encode("utf-8", "replace")


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        return None


def _text_in(record: dict[str, Any], depth: int) -> str | None:
    """What the record says, with what it adds in front; None if it says nothing, or counts steps itself."""
    if depth > MAX_DEPTH or _counts_itself(record):
        return None
    for key in TEXT_KEYS:
        value = record.get(key)
        if isinstance(value, dict) and value:
            said = _text_in(value, depth + 1)
        elif isinstance(value, list) and value and all(isinstance(each, int) and 0 <= each < 256 for each in value):
            said = bytes(value).decode("utf-8", "replace")  # as journald exports what is no UTF-8
        elif isinstance(value, str):
            inner = _decoded(value) if value.lstrip().startswith("{") else None
            said = _text_in(inner, depth + 1) if isinstance(inner, dict) else None
            said = value if said is None else said
        else:
            continue
        if said is not None and said.strip():
            return _with_fields(record, said)
    return None


def _counts_itself(record: dict[str, Any]) -> bool:
    """Whether it has a step in a field of its own, or an epoch beside what is trained."""
    epoch = any(key in record for key in EPOCH_KEYS) and any(key in record for key in TRAINING_KEYS)
    return epoch or any(count_of(record.get(key)) is not None for key in STEP_KEYS)


def _with_fields(record: dict[str, Any], said: str) -> str:
    raised = next((value for key in RAISED_KEYS if isinstance(value := record.get(key), str) and value), None)
    text = said.rstrip("\r\n") if raised is None or raised in said else f"{said.rstrip()}\n{raised.rstrip()}"
    rank, host, level = (_field(record, keys) for keys in (RANK_KEYS, HOST_KEYS, LEVEL_KEYS))
    stamp = _time_of(record)
    parts = [] if stamp is None or stamp_of(text.lstrip()[:60]) is not None else [f"{stamp} "]
    inner = _INNER_RANK.match(text)
    rank = inner[1] if inner is not None else rank if str(rank).isdecimal() and len(str(rank)) < 7 else None
    host = host if isinstance(host, str) and _HOST.fullmatch(host) else None
    if host is not None and rank is not None:
        parts.append(f"[{host}/rank{rank}]: ")
        text = text[inner.end() :] if inner is not None else text
    elif host is not None:
        parts.append(f"{host}: ")
    elif rank is not None and inner is None:
        parts.append(f"[rank{rank}]: ")
    if isinstance(level, str) and level.upper() in _LEVELS and not _RAW.match(text):
        parts.append(f"{level.upper()} ")
    return "".join(parts) + text.replace("\r\n", "\n").replace("\n", LINE_END)


def _field(record: dict[str, Any], keys: Sequence[str]) -> Any:
    """The first field with one of these names, in the record or in a part of it (labels, extra, kubernetes)."""
    for each in (record, *(value for value in record.values() if isinstance(value, dict))):
        for key in keys:
            value = each.get(key)
            if value is not None and not isinstance(value, dict | list):
                return value
    return None


def _time_of(record: dict[str, Any]) -> str | None:
    value = next((record[key] for key in TIME_KEYS if record.get(key) not in (None, "")), None)
    if isinstance(value, str) and not value.replace(".", "", 1).isdecimal():
        return value if stamp_of(value) is not None and len(value) < 60 else None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    while number >= 10**_TEN_DIGITS:
        number /= 1000  # of milli-, micro- or nanoseconds
    return datetime.fromtimestamp(number, timezone.utc).isoformat(timespec="milliseconds") if number > 10**9 else None


# ------------------------------------------------------------------------------------ one document of many records


def _of_document(data: bytes, numbers: Numbers) -> tuple[bytes, Numbers]:
    text = data.decode("utf-8", "replace").strip()
    document = _decoded(text) if text[:1] in ("{", "[") else None
    lines = max(_lists(document, 0), key=len, default=[])
    if not lines:
        return data, numbers
    lines = lines[:MAX_RECORDS]
    return "\n".join(lines).encode("utf-8", "replace"), array("q", range(1, len(lines) + 1))


def _lists(document: Any, depth: int) -> Iterator[list[str]]:
    """The texts of each list of records in a document."""
    if depth > MAX_DEPTH:
        return
    if isinstance(document, dict):
        for value in document.values():
            yield from _lists(value, depth + 1)
    elif isinstance(document, list):
        said = [_of_item(item) for item in document]
        if any(text is not None for text in said):
            yield [text for text in said if text is not None]
        else:
            for item in document:
                yield from _lists(item, depth + 1)


def _of_item(item: Any) -> str | None:
    if isinstance(item, dict):
        return _text_in(item, 1)
    if isinstance(item, list) and all(isinstance(each, dict) and "field" in each for each in item):  # Logs Insights
        return _text_in({str(each["field"]).lstrip("@"): each.get("value") for each in item}, 1)
    if isinstance(item, list) and len(item) == 2 and isinstance(item[1], str):  # Loki: time and text
        return _with_fields({"time": item[0]}, item[1])
    return None


# ------------------------------------------------------------------------------------ journalctl -o export


def _of_export(data: bytes, first_line: int, numbers: Numbers) -> tuple[bytes, Numbers]:
    """Records of lines NAME=value with a blank line between."""
    fields: dict[str, Any] = {}
    place, texts, places = 0, [], array("q")

    def end() -> None:
        if "MESSAGE" in fields:
            text = _text_in(fields, 0)
            if text is not None:
                texts.append(text)
                places.append(first_line + place if numbers is None else numbers[place])
        fields.clear()

    for at, line in enumerate(data.split(b"\n")):
        name, is_field, value = line.decode("utf-8", "replace").partition("=")
        if not line.strip():
            end()
        elif is_field and name.isupper():
            fields[name] = value
            place = at if name == "MESSAGE" else place
    end()
    return "\n".join(texts).encode("utf-8", "replace"), places
