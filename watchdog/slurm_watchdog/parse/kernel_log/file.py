"""A file of the kernel's log as people have it: dmesg, journalctl (also as JSON), syslog files, pasted into Markdown.

Pure. It gives the kernel's own words line by line, with the node and the time that the line itself names.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Any

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.parse.kernel_log import KERNELS_OWN
from slurm_watchdog.parse.kernel_log.line import KernelFact, is_interesting, parse_message

MAX_TEXT = 4096
"""Characters that are looked at; a record of the kernel has at most 2048 bytes of text (PRINTK_MESSAGE_MAX)."""
KERN = 0  # Number of the facility `kern` (syslog(3)); the kernel refuses it to programs that write to /dev/kmsg.


class Record(msgspec.Struct, frozen=True):
    """One record of /dev/kmsg, not yet understood."""

    facility: int
    level: int
    sequence: int
    time_us: int  # By the kernel's local clock, which starts with the machine and is not disciplined by NTP.
    message: bytes  # As the kernel escaped it.
    device: str = ""
    """The device that the kernel itself says the record is about (dev_printk), `+pci:0000:c1:00.0`, `c240:0`; no
    text of a message, and no program that writes to /dev/kmsg, can set it."""


_DEVICE = b" DEVICE="
_ESCAPE = late_regex(rb"\\x([0-9a-fA-F]{2})")
_CONTROL = late_regex(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


def parse_record(data: bytes) -> Record | None:
    """`6,339,5140900,-;message` and its dictionary lines (Documentation/ABI/testing/dev-kmsg); None: no record."""
    prefix, separator, text = data.partition(b";")
    fields = prefix.split(b",")
    if not separator or len(fields) < 3:
        return None
    try:
        priority, sequence, time_us = int(fields[0]), int(fields[1]), int(fields[2])
    except ValueError:
        return None
    message, *dictionary = text.split(b"\n")
    device = next((line[len(_DEVICE) :] for line in dictionary if line.startswith(_DEVICE)), b"")
    return Record(priority >> 3, priority & 7, sequence, time_us, message, device.decode("ascii", "replace"))


def readable(message: bytes) -> str:
    r"""The text of a record: `\xNN` undone, what is no UTF-8 replaced, control characters and line ends made spaces."""
    raw = _ESCAPE.sub(lambda match: bytes((int(match[1], 16),)), message[: 4 * MAX_TEXT])
    return clean(raw.decode("utf-8", "replace"))


def clean(text: str) -> str:
    """`text` on one line and without control characters, bounded."""
    return _CONTROL.sub(" ", text[:MAX_TEXT]).strip()


_KMSG = late_regex(r"(?P<priority>\d{1,3}),\d+,(?P<time_us>\d+),[^;]{0,100};")
_RAW = late_regex(r"<(?P<priority>\d{1,3})>")
_DECODED = late_regex(r"(?P<facility>[a-z]+\d?) *:(?:emerg|alert|crit|err|warn|notice|info|debug) *: ")
_STAMP = late_regex(
    r"\[(?:\s*\d+\.\d+|\s*\+\d+\.\d+|[A-Z][a-z]{2} ?[ \d]?\d \d\d:\d\d"
    r"|[^\W\d_]{1,5}\.? [^\[\]]{1,24} \d\d:\d\d:\d\d \d{4}|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[^\[\] ]{0,16})"
    r"(?:\s*<\s*\+?\d*\.\d+>)?\] ?"
)
"""`[ 8593.4970]`, `[Sep19 02:29]`, `[Thu Sep 19 02:29:46 2024]` in any language, each perhaps with `< 0.000012>`."""
_DMESG_ISO = late_regex(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d+(?:Z|[+-]\d\d:?\d\d) ")
_CALLER = late_regex(r"\[\s*[TC]\d+\] ?")
_DATE = late_regex(
    r"(?:[A-Z][a-z]{2}\s+\d{1,2} (?:\d{4} )?\d\d:\d\d:\d\d(?:\.\d+)?"  # Sep 19 02:29:46
    r"|(?:1 )?(?:[A-Z][a-z]{2} )?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d| "
    r"[A-Z]{2,5})?"  # RFC 5424's begin with 1
    r"|\d{9,11}\.\d{3,9}) "  # journalctl -o short-unix
)
_SOURCE_BEFORE = late_regex(
    r"[\w./@+-]+:(?:\d+:)? ?(?=\[\s*\d+\.\d+\]|\[[A-Z][a-z]{2} [A-Z]|[A-Z][a-z]{2}\s+\d{1,2} \d\d:\d\d"
    r"|\d{4}-\d\d-\d\dT)"
)
"""What grep, pdsh and clush put before a line: a file or a host, only where a time follows."""
_COLOUR = late_regex(r"\x1b\[[0-9;]*m")
_HOST_AND_TAG = late_regex(r"(?P<host>\S+) (?P<tag>[^\s:\[]+)(?:\[\d+\])?(?:: ?| \S+ \S+ - )")
_KERNEL_TAG = late_regex(r"(?:(?P<host>[\w.-]+) )?kernel(?:\[\d+\])?: ?")
GPFS_DAEMON = "mmfs"
"""The only program whose lines in a syslog are read beside the kernel's: GPFS has its client there. What such
a line may give is about GPFS alone, and takes no node away."""


class KernelText(msgspec.Struct, frozen=True):
    """The kernel's own words in a line, and what the line's prefix says of them."""

    text: str
    node: str | None = None
    stamp: str | None = None  # Time as it is written: seconds since the boot, or a date.
    device: str | None = None  # The device of the record, as in Record; None where a file does not keep it.


def split_line(line: str) -> KernelText | None:
    """The kernel's own words in a line of dmesg, journalctl, a syslog file or /dev/kmsg, with the node and the time of
    its prefix; None if a program wrote it."""
    text = _COLOUR.sub("", line[: 2 * MAX_TEXT]).strip("\r\n")
    node, stamp = None, None
    if match := _SOURCE_BEFORE.match(text):
        node, text = _node_of(match[0]), text[match.end() :]
    for pattern in (_KMSG, _RAW):
        if match := pattern.match(text):
            if int(match["priority"]) >> 3 != KERN:
                return None
            text = text[match.end() :]
            if pattern is _KMSG:
                return KernelText(readable(text.encode()), node, f"{int(match['time_us'][:18]) / 1e6}")
    if match := _DECODED.match(text):
        if match["facility"] != "kern":
            return None
        text = text[match.end() :]
    for pattern in (_STAMP, _DMESG_ISO):
        if match := pattern.match(text):
            stamp, text = match[0], text[match.end() :]
    text = _without(_CALLER, text)
    if match := _DATE.match(text):
        source = _HOST_AND_TAG.match(text, match.end())
        if source is None or source["tag"] not in ("kernel", GPFS_DAEMON):
            return None
        node, stamp, text = source["host"], match[0], text[source.end() :]
        if source["tag"] == GPFS_DAEMON:
            return KernelText(clean(f"{GPFS_DAEMON}: {text}"), node, stamp.strip(" []"))
    if match := _KERNEL_TAG.match(text):
        node, text = match["host"] or node, text[match.end() :]
    if match := _STAMP.match(text):
        stamp, text = stamp or match[0], text[match.end() :]
    return KernelText(clean(_without(_CALLER, text)), node, stamp.strip(" []") if stamp else None)


_FILE_NAME = late_regex(r"/|:\d+:|^(?:messages|syslog|dmesg|kern)\b|\.(?:log|txt|out|dmesg|gz|\d)\b", re.IGNORECASE)


def _node_of(source: str) -> str | None:
    """The node in what stands before a line; None for a file's name or the number of a task."""
    name = source.strip().rstrip(":")
    return None if _FILE_NAME.search(source.strip()) or name.isdigit() else name


def _without(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.match(text)
    return text[match.end() :] if match else text


class Message(msgspec.Struct, frozen=True):
    """One line in which the kernel speaks."""

    number: int  # Of the line in its file, the first is 1.
    text: str
    node: str | None = None
    time_s: float | None = None  # Seconds, comparable only with others of the same file: since the boot, or a date.
    fact: KernelFact | None = None


def is_stamped(line: str) -> bool:
    """Whether a record of the kernel begins here, with what dmesg, the journal or syslog write before it."""
    return KERNELS_OWN.match(line) is not None


def is_indented(line: str) -> bool:
    """Whether this is no beginning of a record that stands behind one: a message may hold line ends, and a user may
    have written them (a mount option), so that its second line reads as a driver's. Those are printed indented."""
    return line[:1] in (" ", "\t") and not KERNELS_OWN.match(line.lstrip())


def read_line(number: int, line: str) -> Message | None:
    """One line of a file; None if it is a program's, or empty."""
    text = kernel_text_of(line)
    if text is None or not text.text:
        return None
    if match := _REPEATED.match(text.text):
        text = replace(text, text=match["text"])
    return _understood(Message(number, text.text, text.node, parse_time(text.stamp)), text.device)


def _understood(message: Message, device: str | None) -> Message:
    if is_interesting(message.text.encode()) and (fact := parse_message(message.text, device=device)):
        return replace(message, fact=fact)
    match = _NODE_ALONE.match(message.text)
    if match and is_interesting(match["rest"].encode()) and (fact := parse_message(match["rest"])):
        return replace(message, text=match["rest"], node=match["node"], fact=fact)
    return message


_REPEATED = late_regex(r"message repeated \d+ times: \[ ?(?P<text>.*)\]$")
"""What rsyslog writes instead of the same line again."""
_NODE_ALONE = late_regex(
    r"(?P<node>(?!nvme|ata\d|sd\w|md\d|mlx|eth|ib\d|dm-|loop|cpu)(?=[\w.-]*\d)[A-Za-z][\w.-]*): +(?P<rest>\S.*)",
    re.IGNORECASE,
)
"""`node17: NVRM: Xid …`, what pdsh writes before a line without a time; the name of a device is no node."""
_QUOTING = late_regex(r"(?:[\s>|`]|[*-] |\d{1,9}(?:\t|[:.] ?)(?=[\[<]|[A-Z][a-z]{2} [ \d]\d ))+")
"""What Markdown, a mail program, `cat -n` or `grep -n` puts before a line."""
_DMESG_JSON = late_regex(r'"msg": *"(?P<msg>(?:[^"\\]|\\.)*)"')
_EXPORT = late_regex(r"MESSAGE=(?P<text>.*)")


def kernel_text_of(line: str) -> KernelText | None:
    """The kernel's words in a line, in whatever it is wrapped; None if a program wrote it or it holds none."""
    quoting = _QUOTING.match(line)
    bare = line[quoting.end() :] if quoting else line
    bare = bare.rstrip("\r\n").rstrip("`")
    if bare.startswith("{"):
        return _from_json(bare)
    if bare.startswith('"msg"') and (match := _DMESG_JSON.match(bare)):
        return KernelText(clean(_unescaped(match["msg"])))
    if match := _EXPORT.match(bare):
        bare = match["text"]
    return split_line(bare)


def _unescaped(text: str) -> str:
    import json  # agents, which read no files, do without it

    try:
        return str(json.loads(f'"{text}"'))
    except ValueError:
        return text


def _from_json(text: str) -> KernelText | None:
    """A record of `journalctl -o json`, or of a collector that writes one record a line."""
    import json

    try:
        record = json.loads(text.rstrip(","))
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    source = [record.get(key) for key in ("_TRANSPORT", "SYSLOG_IDENTIFIER", "ident", "facility")]
    known = [str(each) for each in source if each is not None]
    if known and not any(each in ("kernel", "kern") for each in known):
        return None
    message = next((_text(record[key]) for key in _MESSAGE_KEYS if record.get(key)), None)
    if not message:
        return None
    found = split_line(message)
    if found is None:
        return None
    host = next((record[key] for key in _HOST_KEYS if isinstance(record.get(key), str)), None)
    stamp = next((record[key] for key in _TIME_KEYS if isinstance(record.get(key), str)), found.stamp)
    device = record.get("_KERNEL_DEVICE")
    return replace(found, node=host or found.node, stamp=stamp, device=device if isinstance(device, str) else None)


_MESSAGE_KEYS = ("MESSAGE", "message", "msg", "log", "MSG")
_HOST_KEYS = ("_HOSTNAME", "hostname", "host", "node", "HOSTNAME")
_TIME_KEYS = ("__REALTIME_TIMESTAMP", "_SOURCE_REALTIME_TIMESTAMP", "timestamp", "time", "@timestamp")


def _text(value: Any) -> str:
    """The journal writes what is no UTF-8 as a list of bytes."""
    if isinstance(value, list):
        return bytes(each for each in value if isinstance(each, int) and 0 <= each < 256).decode("utf-8", "replace")
    return value if isinstance(value, str) else ""


# ---------------------------------------------------------------------------------------- times

_MONTHS = "janfebmaraprmayjunjulaugsepoctnovdec"
_ISO = late_regex(r"(?:1 )?(?:[A-Z][a-z]{2} )?(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(.*)")
_ZONE = late_regex(r"\s*([+-])(\d\d):?(\d\d)")
_MONTH_DAY = late_regex(
    r"(?:[^\W\d_]{1,5}\.? )?([A-Za-z]{3}) ?([ \d]?\d) (?:(\d{4}) )?(\d\d):(\d\d)(?::(\d\d))?(\.\d+)?(?: (\d{4}))?"
)
_YEAR_OF_A_DATE_WITHOUT = 2000  # A leap year, so that 29 February is a day of it.


def parse_time(stamp: str | None) -> float | None:
    """Seconds: as they stand, or of a date (in the zone it names, else as if it were UTC); None for anything else."""
    if not stamp:
        return None
    text = stamp.strip().partition("<")[0].strip()
    if text.startswith("+"):
        return None  # time since the line before
    try:
        if text.isdigit() and len(text) >= 16:
            return int(text[:16]) / 1e6  # the journal counts microseconds
        return float(text)
    except ValueError:
        pass
    try:
        return _parse_date(text)
    except (ValueError, OverflowError):
        return None


def _parse_date(text: str) -> float | None:
    if match := _ISO.match(text):
        year, month, day, hour, minute, second = (int(each) for each in match.groups()[:6])
        seconds = datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc).timestamp()
        if zone := _ZONE.match(match[8]):
            offset_s = int(zone[2]) * 3600 + int(zone[3]) * 60
            seconds += -offset_s if zone[1] == "+" else offset_s
        return seconds + float(f"0.{match[7] or 0}")
    if match := _MONTH_DAY.match(text):
        month = _MONTHS.find(match[1].lower()) // 3 + 1
        year = int(match[3] or match[8] or _YEAR_OF_A_DATE_WITHOUT)
        seconds = datetime(
            year, month, int(match[2]), int(match[4]), int(match[5]), int(match[6] or 0), tzinfo=timezone.utc
        ).timestamp()
        return seconds + float(match[7] or 0)
    return None
