"""Lines of /dev/kmsg, dmesg, journalctl and syslog files without their prefix: the kernel's own message.

Pure. Only the kernel is believed: a record or a pasted line that says it came from a program gives nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

from slurm_watchdog.base.late_regex import late_regex

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
    """`6,339,5140900,-;message` and its dictionary lines (Documentation/ABI/testing/dev-kmsg); None if it is
    no record."""
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
"""`[ 8593.4970]`, `[Sep19 02:29]`, `[Thu Sep 19 02:29:46 2024]` in any language, each with or
without dmesg's `<    0.000012>`."""
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


def strip_prefix(line: str) -> str | None:
    """The kernel's own words in a line of dmesg, journalctl, a syslog file or /dev/kmsg; None if a program wrote it."""
    found = split_line(line)
    return found.text if found else None


def split_line(line: str) -> KernelText | None:
    """The same with the node and the time that the prefix gives."""
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


KERNELS_OWN = late_regex(
    r"(?:<\d+>)?\[ *\d+\.\d{3,9}\] |\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] |(?:kern"
    r"|daemon) *:\w+ *: |.{0,90}\bkernel: "
)
"""What stands before the kernel's words in dmesg (with a time since the boot or a date, or with -x), the
journal and syslog."""
_MOSTLY = 0.6
_ENOUGH = 3


def is_kernel_log(lines: Iterable[str]) -> bool:
    """Whether most of these lines are the kernel's own: then someone gave a kernel log for a job's."""
    filled = [line for line in lines if line.strip()]
    own = sum(1 for line in filled if KERNELS_OWN.match(line))
    return own >= _ENOUGH and own >= _MOSTLY * len(filled)
