"""A message of the kernel: which fault it reports, and of what (GPU, mount, device, process). Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.redact import mask_cut
from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.kernel_signatures import HARMLESS, USER_TEXT, Signature, kernel_rows
from slurm_watchdog.knowledge.site_rows import SiteRows
from slurm_watchdog.knowledge.xids import describe_xid, side_of_nvlink_event
from slurm_watchdog.model.observations import Fault, FaultSeverity

MAX_LINE = 500  # Characters of a message that are kept.


class KernelFact(Fault):
    """What one message of the kernel says: `may_exclude_node` is the line's own weight, no verdict."""

    message: str  # The message without its prefix, bounded, without control characters.
    consequence: bool = False  # It follows from something else.
    gpu: str | None = None  # UUID of the GPU, where the line gives one.


FREE_GATES: tuple[bytes, ...] = (
    b"link", b"error", b"device", b"fault", b"timeout", b"giving up", b"protection", b"oom-killer", b"page allocation",
    b"bad frame in", b"watchdog", b"unit hang", b"active interface", b"inaccessible", b"timed out",
)  # fmt: skip
"""Each needle of a shipped row without heads contains one of these: most lines are sent away after so few searches."""


class Index(msgspec.Struct, frozen=True, eq=False):
    """The rows by what a line begins with, and what has to be in it."""

    by_head: Mapping[str, tuple[Signature, ...]]
    free: tuple[Signature, ...]  # Rows for lines that begin with anything.
    needles_by_head: Mapping[bytes, tuple[bytes, ...]]
    free_needles: tuple[bytes, ...]
    gates: tuple[bytes, ...]  # One of them is in each of `free_needles`.


def _index() -> Index:
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
    return tuple(dict.fromkeys(needle.encode() for row in rows for needle in row.needles))


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


def parse_message(message: str, level: int | None = None, device: str | None = None) -> KernelFact | None:
    """The fact in a message of the kernel without any prefix. `level` is its severity (syslog(3)), where the
    record says it: no line that the kernel holds for mere information takes a node away, but for rows that
    say so. `device` is that of the record; None: not known, as in most files, then the words are believed."""
    if device is not None and not _is_of(message, device):
        return None
    low = message.lower()
    about_user: frozenset[str] | None = None
    looked = False
    index = _index()
    for row in index.by_head.get(low[:3], index.free):
        if any(needle in low for needle in row.needles) and (match := row.regex.match(message)):
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


_ADDRESSED = late_regex(r"[\w.-]+ ([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\b")
_OF_A_DEVICE = late_regex(r"(?:nvme nvme\d+|thermal [\w-]+|(?:habanalabs|accel) \w+|infiniband [\w.-]+): ")
"""Beginnings that dev_printk() makes of a driver and a device: then the record says of which device it is."""


def _is_of(message: str, device: str) -> bool:
    """Whether a message that begins with a driver and its device comes from that device: a user can make the kernel
    print any words, but not in a record of a device."""
    if match := _ADDRESSED.match(message):
        return device == f"+pci:{match[1]}"
    return bool(device) or _OF_A_DEVICE.match(message) is None


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
        device=_name(found.get("device") or found.get("device2") or (found.get("pci2") if found.get("pci") else None)),
        part=row.part,
    )
    refine = _REFINEMENTS.get(row.name)
    return refine(fact, found) if refine else fact


_PCI = late_regex(r"([0-9a-f]{4,8}):([0-9a-f]{2}:[0-9a-f]{2})(\.[0-7])?", re.IGNORECASE)


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
    if number == 74 and "nvlink: fatal error" in rest:  # longer than a program's name, which stands in `rest`, too
        severity, exclude = FaultSeverity.CRITICAL, True
    elif 144 <= number <= 150:
        severity, exclude = _nvlink_event(rest)
    elif number == 154:
        severity, exclude = _recovery_action(rest)
    elif _ASKS_FOR_RESET.search(rest):
        severity, exclude = FaultSeverity.CRITICAL, True
    return replace(
        fact, xid=number, severity=severity, may_exclude_node=exclude,
        consequence=row.consequence or "caused by previous xid" in rest
    )  # fmt: skip


def _nvlink_event(rest: str) -> tuple[FaultSeverity, bool]:
    """Of this GPU it is a fault of its hardware; of a link or of the other end it only stops what runs."""
    side = side_of_nvlink_event(rest)
    if side == "gpu":
        return FaultSeverity.CRITICAL, True
    fatal = re.search(r"\bfatal\b(?<!non-fatal)", rest) is not None
    return FaultSeverity.ERROR if fatal else FaultSeverity.WARNING, False


_ASKS_FOR_RESET = late_regex(
    r"\bgpu requires (?:a )?reset\b|\bgpu reset (?:is )?required\b|\bgpu needs to be reset\b|\brst: yes, d-rst: "
)
"""All longer than a program's name (15 characters), which may stand in the same place. That a GPU is to be
reset some time (63, `reset gpu to activate`) is none."""


def _recovery_action(rest: str) -> tuple[FaultSeverity, bool]:
    """What Xid 154 asks for: `GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)`."""
    action = rest.rpartition(" to ")[2]
    if "(none)" in action:
        return FaultSeverity.INFO, False
    if "drain" not in action and ("reset" in action or "reboot" in action):  # `GPU Reset Required`, `OS Reboot`
        return FaultSeverity.CRITICAL, True
    return FaultSeverity.WARNING, False


LINK_WENT_DOWN = 20034
"""SXid of an NVSwitch's link that left the active state (Fabric Manager's guide), as when a GPU is reset on purpose."""


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


UNCORRECTED = 1 << 61  # Bit UC of a machine check's status (Intel SDM volume 3B, IA32_MCi_STATUS; the same on AMD).


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
