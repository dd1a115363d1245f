"""Lines of the kernel's log, in all the forms in which people and programs hand them over: which fault, and of what.

Pure. Only the kernel is believed: a record or a pasted line that says it came from a program gives nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from slurm_watchdog.base.redact import mask_cut
from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.kernel_signatures import HARMLESS, Signature, kernel_rows
from slurm_watchdog.knowledge.kernel_user_text import USER_TEXT
from slurm_watchdog.knowledge.site_rows import SiteRows
from slurm_watchdog.knowledge.xids import describe_xid
from slurm_watchdog.model.observations import FaultSeverity

MAX_LINE = 500
"""Characters of a message that are kept."""
MAX_TEXT = 4096
"""Characters that are looked at; a record of the kernel has at most 2048 bytes of text (PRINTK_MESSAGE_MAX)."""
KERN = 0
"""Number of the facility `kern` (syslog(3)); the kernel refuses it to programs that write to /dev/kmsg."""


@dataclass(frozen=True)
class KernelFact:
    """What one message of the kernel says. It accuses nobody: `may_exclude_node` is the line's own weight, no
    verdict."""

    name: str
    """Which entry of the knowledge matched."""
    severity: FaultSeverity
    message: str
    """The message without its prefix, bounded, without control characters."""
    may_exclude_node: bool = False
    consequence: bool = False
    """It follows from something else."""
    gpu: str | None = None
    """UUID of the GPU, where the line gives one."""
    pci_bus_id: str | None = None
    """As the kernel writes it: 0000:c1:00.0."""
    xid: int | None = None
    pid: int | None = None
    process: str | None = None
    mount: str | None = None
    server: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class Record:
    """One record of /dev/kmsg, not yet understood."""

    facility: int
    level: int
    sequence: int
    time_us: int
    """By the kernel's local clock, which starts with the machine and is not disciplined by NTP."""
    message: bytes
    """As the kernel escaped it."""


# ---------------------------------------------------------------------------------------- from bytes to a message

_ESCAPE = re.compile(rb"\\x([0-9a-fA-F]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


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
    return Record(priority >> 3, priority & 7, sequence, time_us, text.partition(b"\n")[0])


def readable(message: bytes) -> str:
    r"""The text of a record: `\xNN` undone, what is no UTF-8 replaced, control characters and line ends made spaces."""
    raw = _ESCAPE.sub(lambda match: bytes((int(match[1], 16),)), message[: 4 * MAX_TEXT])
    return clean(raw.decode("utf-8", "replace"))


def clean(text: str) -> str:
    """`text` on one line and without control characters, bounded."""
    return _CONTROL.sub(" ", text[:MAX_TEXT]).strip()


# ---------------------------------------------------------------------------------------- from a pasted line
# to a message

_KMSG = re.compile(r"(?P<priority>\d{1,3}),\d+,(?P<time_us>\d+),[^;]{0,100};")
_RAW = re.compile(r"<(?P<priority>\d{1,3})>")
_DECODED = re.compile(r"(?P<facility>[a-z]+\d?) *:(?:emerg|alert|crit|err|warn|notice|info|debug) *: ")
_STAMP = re.compile(
    r"\[(?:\s*\d+\.\d+|\s*\+\d+\.\d+|[A-Z][a-z]{2} ?[ \d]?\d \d\d:\d\d"
    r"|[^\W\d_]{1,5}\.? [^\[\]]{1,24} \d\d:\d\d:\d\d \d{4}|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[^\[\] ]{0,16})"
    r"(?:\s*<\s*\+?\d*\.\d+>)?\] ?"
)
"""`[ 8593.4970]`, `[Sep19 02:29]`, `[Thu Sep 19 02:29:46 2024]` in any language, each with dmesg's `<    0.000012>` or without."""
_DMESG_ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d+(?:Z|[+-]\d\d:?\d\d) ")
_CALLER = re.compile(r"\[\s*[TC]\d+\] ?")
_DATE = re.compile(
    r"(?:[A-Z][a-z]{2}\s+\d{1,2} (?:\d{4} )?\d\d:\d\d:\d\d(?:\.\d+)?"  # Sep 19 02:29:46
    r"|(?:1 )?(?:[A-Z][a-z]{2} )?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:?\d\d| [A-Z]{2,5})?"  # RFC 5424's begin with 1
    r"|\d{9,11}\.\d{3,9}) "  # journalctl -o short-unix
)
_SOURCE = re.compile(
    r"[\w./@+-]+:(?:\d+:)? ?(?=\[\s*\d+\.\d+\]|\[[A-Z][a-z]{2} [A-Z]|[A-Z][a-z]{2}\s+\d{1,2} \d\d:\d\d|\d{4}-\d\d-\d\dT)"
)
"""What grep, pdsh and clush put before a line: a file or a host, only where a time follows."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_HOST_AND_TAG = re.compile(r"(?P<host>\S+) (?P<tag>[^\s:\[]+)(?:\[\d+\])?(?:: ?| \S+ \S+ - )")
_KERNEL_TAG = re.compile(r"(?:(?P<host>[\w.-]+) )?kernel(?:\[\d+\])?: ?")


GPFS_DAEMON = "mmfs"
"""The only program whose lines in a syslog are read beside the kernel's: GPFS has its client there. What such
a line may give is about GPFS alone, and takes no node away."""


@dataclass(frozen=True)
class Words:
    """The kernel's own words in a line, and what the line's prefix says of them."""

    text: str
    node: str | None = None
    stamp: str | None = None
    """Time as it is written: seconds since the boot, or a date."""


def strip_prefix(line: str) -> str | None:
    """The kernel's own words in a line of dmesg, journalctl, a syslog file or /dev/kmsg; None if a program wrote it."""
    words = split_line(line)
    return words.text if words else None


def split_line(line: str) -> Words | None:
    """The same with the node and the time that the prefix gives."""
    text = _COLOUR.sub("", line[: 2 * MAX_TEXT]).strip("\r\n")
    node, stamp = None, None
    if match := _SOURCE.match(text):
        node, text = _node_of(match[0]), text[match.end() :]
    for pattern in (_KMSG, _RAW):
        if match := pattern.match(text):
            if int(match["priority"]) >> 3 != KERN:
                return None
            text = text[match.end() :]
            if pattern is _KMSG:
                return Words(readable(text.encode()), node, f"{int(match['time_us'][:18]) / 1e6}")
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
            return Words(clean(f"{GPFS_DAEMON}: {text}"), node, stamp.strip(" []"))
    if match := _KERNEL_TAG.match(text):
        node, text = match["host"] or node, text[match.end() :]
    if match := _STAMP.match(text):
        stamp, text = stamp or match[0], text[match.end() :]
    return Words(clean(_without(_CALLER, text)), node, stamp.strip(" []") if stamp else None)


_FILE = re.compile(
    r"/|:\d+:|^(?:messages|syslog|dmesg|kern)\b|\.(?:log|txt|out|dmesg|gz|\d)\b", re.IGNORECASE
)


def _node_of(source: str) -> str | None:
    """The node in what stands before a line; None for a file's name or the number of a task."""
    name = source.strip().rstrip(":")
    return None if _FILE.search(source.strip()) or name.isdigit() else name


def _without(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.match(text)
    return text[match.end() :] if match else text


# ---------------------------------------------------------------------------------------- from a message to a fact


FREE_GATES: tuple[bytes, ...] = (
    b"link", b"error", b"device", b"fault", b"timeout", b"giving up", b"protection", b"oom-killer", b"page allocation",
    b"bad frame in", b"watchdog", b"unit hang", b"active interface",
)  # fmt: skip
"""Each needle of a shipped row without heads contains one of these: most lines are sent away after so few searches."""


@dataclass(frozen=True, eq=False)
class Index:
    """The rows by what a line begins with, and what has to be in it."""

    by_head: Mapping[str, tuple[Signature, ...]]
    free: tuple[Signature, ...]
    """Rows for lines that begin with anything."""
    needles_by_head: Mapping[bytes, tuple[bytes, ...]]
    free_needles: tuple[bytes, ...]
    gates: tuple[bytes, ...]
    """One of them is in each of `free_needles`."""


def _index() -> Index:
    """Of the rows in force in this process."""
    return _index_of(site_rows.current())


@lru_cache(maxsize=2)
def _index_of(_site: SiteRows) -> Index:
    rows = kernel_rows()
    free = tuple(row for row in rows if not row.heads)
    heads = {head for row in rows for head in row.heads}
    own = {head: tuple(row for row in rows if head in row.heads) for head in heads}
    free_needles = _needles(free)
    gates = [needle for needle in free_needles if not any(gate in needle for gate in FREE_GATES)]
    return Index(
        {head: (*own[head], *free) for head in heads},
        free,
        {head.encode(): _needles(own[head]) for head in heads},
        free_needles,
        (*FREE_GATES, *gates),
    )


def _needles(rows: tuple[Signature, ...]) -> tuple[bytes, ...]:
    return tuple(dict.fromkeys(row.needle.encode() for row in rows))


def is_interesting(message: bytes) -> bool:
    """Whether `parse_message` could find something in this message of a record; a microsecond or two."""
    low, index = message.lower(), _index()
    for needle in index.needles_by_head.get(low[:3], ()):
        if needle in low:
            return True
    for gate in index.gates:  # any() with a generator takes twice as long
        if gate in low:
            return any(needle in low for needle in index.free_needles)
    return False


def parse_kernel_line(text: str) -> KernelFact | None:
    """The fact in a line as people paste it, with whatever prefix, or in a bare message; None if there is none."""
    message = strip_prefix(text)
    return parse_message(message) if message else None


def parse_message(message: str, level: int | None = None) -> KernelFact | None:
    """The fact in a message of the kernel without any prefix. `level` is its severity (syslog(3)), where the
    record says it: no line that the kernel holds for mere information takes a node away, but for rows that
    say so."""
    low = message.lower()
    about_user: frozenset[str] | None = None
    looked = False
    index = _index()
    for row in index.by_head.get(low[:3], index.free):
        if row.needle in low and (match := row.regex.match(message)):
            if not looked:  # hardly any line comes so far
                looked, about_user = True, _rows_for_user_text(message)
            if about_user is not None and row.name not in about_user:
                continue
            if HARMLESS.match(message):
                return None
            fact = _fact(row, match.groupdict(), message)
            if level is not None and level > row.highest_level and fact.may_exclude_node:
                return replace(fact, may_exclude_node=False)
            return fact
    return None


def _rows_for_user_text(message: str) -> frozenset[str] | None:
    """What a line may give that holds a user's words where a driver's would stand; None for a line that holds
    none there. One that has two such forms was made to look like the other: it gives what both may."""
    forms = [form.rows for form in USER_TEXT if form.regex.match(message)]
    return frozenset.intersection(*forms) if forms else None


def _fact(row: Signature, found: dict[str, str | None], message: str) -> KernelFact:
    pid = found.get("pid")
    fact = KernelFact(
        name=row.name,
        severity=row.severity,
        message=mask_cut(message, MAX_LINE),
        may_exclude_node=row.may_exclude_node,
        consequence=row.consequence,
        gpu=found.get("gpu"),
        pci_bus_id=_pci(found.get("pci") or found.get("pci2")),
        pid=int(pid) or None if pid and len(pid) < 11 else None,
        process=_process(found.get("process")),
        mount=_name(found.get("mount")),
        server=_name(found.get("server") or found.get("server2")),
        device=_name(found.get("device") or found.get("device2")),
    )
    refine = _REFINEMENTS.get(row.name)
    return refine(fact, found) if refine else fact


_PCI = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2})(\.[0-7])?", re.IGNORECASE)


def _pci(text: str | None) -> str | None:
    """`00000000:C1:00` as 0000:c1:00.0: four digits of domain, lower case, with the function."""
    match = _PCI.fullmatch(text or "")
    return f"{int(match[1], 16):04x}:{match[2].lower()}{match[3] or '.0'}" if match else None


def _process(text: str | None) -> str | None:
    name = _name((text or "").strip("'"))
    return None if name in (None, "<unknown>", "Unknown") else name


def _name(text: str | None) -> str | None:
    return text.strip()[:100] or None if text else None


def _refine_xid(fact: KernelFact, found: dict[str, str | None]) -> KernelFact:
    number = int((found.get("xid") or "0")[:6])
    row, rest = describe_xid(number), (found.get("rest") or "").lower()
    severity, exclude = row.severity, row.may_exclude_node
    if (
        number == 74 and "nvlink: fatal error" in rest
    ):  # longer than a program's name, which stands in `rest`, too
        severity, exclude = FaultSeverity.CRITICAL, True
    elif 144 <= number <= 150 and " fatal " in rest:
        severity = FaultSeverity.ERROR
    elif number == 154:
        severity, exclude = _recovery_action(rest)
    elif _ASKS_FOR_RESET.search(rest):
        severity, exclude = FaultSeverity.CRITICAL, True
    return replace(
        fact, xid=number, severity=severity, may_exclude_node=exclude, consequence=row.consequence or "caused by previous xid" in rest
    )  # fmt: skip


_ASKS_FOR_RESET = re.compile(
    r"\bgpu requires (?:a )?reset\b|\bgpu reset (?:is )?required\b|\bgpu needs to be reset\b|\brst: yes, d-rst: "
)
"""All longer than a program's name (15 characters), which may stand in the same place. That a GPU is to be
reset some time (63, `reset gpu to activate`) is none."""


def _recovery_action(rest: str) -> tuple[FaultSeverity, bool]:
    """What Xid 154 asks for: `GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)`."""
    action = rest.rpartition(" to ")[2]
    if "(none)" in action:
        return FaultSeverity.INFO, False
    if "drain" not in action and (
        "reset" in action or "reboot" in action
    ):  # `GPU Reset Required`, `OS Reboot`
        return FaultSeverity.CRITICAL, True
    return FaultSeverity.WARNING, False


LINK_WENT_DOWN = 20034
"""SXid of an NVSwitch's link that left the active state (Fabric Manager's guide): also when a GPU is reset on
purpose."""


def _refine_sxid(fact: KernelFact, found: dict[str, str | None]) -> KernelFact:
    number, rest = int((found.get("sxid") or "0")[:6]), (found.get("rest") or "").lower()
    if rest.startswith("fatal"):
        severity = FaultSeverity.CRITICAL
    elif rest.startswith("non-fatal"):
        severity = FaultSeverity.WARNING
    else:
        severity = FaultSeverity.INFO  # the data of the message before
    exclude = severity is FaultSeverity.CRITICAL and number != LINK_WENT_DOWN
    return replace(fact, severity=severity, may_exclude_node=exclude)


UNCORRECTED = 1 << 61
"""Bit UC of a machine check's status (Intel SDM volume 3B, IA32_MCi_STATUS; the same on AMD)."""


def _refine_machine_check(fact: KernelFact, found: dict[str, str | None]) -> KernelFact:
    status = found.get("status")
    if status and int(status, 16) & UNCORRECTED:
        return replace(fact, severity=FaultSeverity.CRITICAL, may_exclude_node=True)
    return fact


_REFINEMENTS: dict[str, Callable[[KernelFact, dict[str, str | None]], KernelFact]] = {
    "xid": _refine_xid,
    "sxid": _refine_sxid,
    "machine_check": _refine_machine_check,
}
