"""The kernel's lines of a whole file: which are causes, which follow from them, what is over again, and what
may cost a node its jobs.

Pure. Only lines whose letters hold a needle of some row are taken apart, as in line_scan, and after a stuck task those
of its call trace. A line has its weight from the knowledge; the file around it can take weight away (the device
recovered) and, for a disk, give some: a filesystem's trouble may keep jobs off its node only if the disk below it is
the node's own.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.knowledge import site_rows
from slurm_watchdog.knowledge.kernel_causes import ENDS, RULES, TRACE_WORDS, Rule, things_of
from slurm_watchdog.knowledge.kernel_signatures import kernel_rows
from slurm_watchdog.knowledge.site_rows import SiteRows
from slurm_watchdog.knowledge.xids import describe_xid
from slurm_watchdog.model.observations import FaultSeverity, NodeEvent
from slurm_watchdog.parse.kernel_log.file import Message, is_indented, is_stamped, read_line
from slurm_watchdog.parse.kernel_log.line import KernelFact
from slurm_watchdog.parse.training_log.line_scan import cover, letters, with_needle

Role = Literal["cause", "consequence", "news"]

MAX_LINES = 100_000  # Lines with a fact that are kept of one file: a storm says nothing new after that.
STUCK = frozenset({"hung_task", "soft_lockup", "rcu_stall"})
"""After a line of these the kernel prints what the task waits for."""
TRACE_LINES = 80  # Lines after a stuck task in which its call trace is looked for.
WITHIN_LINES = 5000  # What is near where lines have no time.


class JudgedLine(msgspec.Struct):
    """One line with a fact, and how it stands to the others."""

    number: int
    node: str | None
    class_name: str
    fact: KernelFact
    time_s: float | None
    role: Role = "cause"
    may_exclude_node: bool = False
    because_of: int | None = None  # Line of the cause, for a consequence whose cause is in the file.
    over_at: int | None = None  # Line that says that it is over.
    waits_for: str | None = None  # For a stuck task: what its call trace names.
    gpu: str | None = None  # UUID if the file tells it, else the GPU's address; None if it is about no GPU.


class KernelVerdict(msgspec.Struct, frozen=True):
    """What a file says. `dropped` lines with a fact were too many to be kept."""

    lines: tuple[JudgedLine, ...]
    messages: int = 0  # Lines of the file; 0 if the kernel speaks in none of them.
    dropped: int = 0


def judge_file(messages: Iterable[Message]) -> KernelVerdict:
    """Cause and consequence among the messages of one file, which may be of many nodes."""
    remote: set[tuple[str | None, str]] = set()
    entries, uuids, dropped = _collect(messages, remote)
    for own in _by_node(entries):
        ordered = _in_time(own)
        _mark_ends(ordered)
        _mark_causes(ordered)
    remote |= _remote_disks(entries)
    for entry in entries:
        _judge_line(entry, uuids, remote)
    return KernelVerdict(tuple(entries), dropped=dropped)


def class_of(fact: KernelFact) -> str:
    """The name of what a line says: the knowledge's, or the Xid's own."""
    if fact.xid is None:
        return fact.name
    name = describe_xid(fact.xid).name
    return f"xid_{fact.xid}" if name == "unknown" else name


# ---------------------------------------------------------------------------------------- reading

MAX_LINE_BYTES = 65536  # Of a line so much is looked at; a record of the journal as JSON has a few thousand bytes.
TRACE_REACH = 5000
"""Lines after a stuck task in which its node's next ones are looked for, where many nodes' lines are mixed."""
TRIED = 2000  # Lines of a block in which the kernel is looked for, if none of them tells anything.
SENTENCE_LINES = 6
MAX_RECORD_LINES = 64
MAX_NODES = 4096
_ESCAPES = late_regex(rb"\x1b\[[0-9;]*m|\\x[0-9a-fA-F]{2}")
"""Colours, and the kernel's way to write a byte: letters that are none of the message."""
_BYTES = b'"MESSAGE":['  # The journal writes what is no UTF-8 as a list of numbers: such lines are always read.


@lru_cache(maxsize=2)
def _needles_of(_site: SiteRows) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    """(letters of which some are in the shape of each line that a row may match, what is searched for as it stands)."""
    needles = {*(needle for row in kernel_rows() for needle in row.needles), *ELSEWHERE_NEEDLES}
    bare = {needle for needle in needles if not letters(needle)}
    return cover(needles - bare), (*sorted(needle.strip().encode() for needle in bare), _BYTES)


class KernelScan:
    """Takes blocks of whole lines and gives those that say something."""

    def __init__(self) -> None:
        self.lines = 0
        self.speaks = False
        """Whether the kernel speaks in any of them."""
        self._read_until = 0
        self._gpus: dict[str | None, tuple[int, str]] = {}
        """Node -> (line, address) of the GPU that the first of several lines named."""

    def messages(self, data: bytes, number: int | Sequence[int]) -> Iterator[Message]:
        """Every line of the block with a fact or a word about the node's disks, and those of call traces.

        `number` is that of the first line in its file, or of each line.
        """
        lines = data.removesuffix(b"\n").split(b"\n") if data else []
        self.lines += len(lines)
        wanted, bare = _needles_of(site_rows.current())
        plain = _ESCAPES.sub(b"", data) if b"\x1b" in data or b"\\x" in data else data
        shapes = letters(plain).split(b"\n")
        telling = with_needle(set(shapes), wanted)
        for at, line in enumerate(lines):
            line_number = number + at if isinstance(number, int) else number[at]
            tells = shapes[at] in telling or any(each in line for each in bare)
            if not tells and (at >= TRIED or self.speaks) and line_number > self._read_until:
                continue
            message = read_line(line_number, _text(line).rstrip("\r"))
            if message is None:
                continue
            self.speaks = True
            if message.fact is not None and _is_continued(lines, at):
                message = replace(message, fact=None)
            message = self._with_address(message)
            if message.fact is not None and message.fact.name in STUCK:
                self._read_until = line_number + TRACE_REACH
            yield message

    def _with_address(self, message: Message) -> Message:
        """The message with the GPU that a line just before named: NVIDIA's driver parts a sentence into four lines."""
        fact = message.fact
        if fact is None or not fact.name.startswith("gpu_"):
            return message
        if fact.name == "gpu_identity" and fact.pci_bus_id is not None:
            if len(self._gpus) >= MAX_NODES:
                self._gpus.clear()
            self._gpus[message.node] = (message.number, fact.pci_bus_id)
        line, address = self._gpus.get(message.node, (0, ""))
        near = 0 < message.number - line <= SENTENCE_LINES
        if fact.pci_bus_id is not None or fact.gpu is not None or not near or not line:
            return message
        return replace(message, fact=replace(fact, pci_bus_id=address))


def _is_continued(lines: Sequence[bytes], at: int) -> bool:
    first = at
    while first > 0 and at - first < MAX_RECORD_LINES and is_indented(_text(lines[first])):
        first -= 1
    return first < at and is_stamped(_text(lines[first]))


def _text(line: bytes) -> str:
    return line[:MAX_LINE_BYTES].decode("utf-8", "replace")


def _collect(
    messages: Iterable[Message], remote: set[tuple[str | None, str]]
) -> tuple[list[JudgedLine], dict[tuple[str | None, str], str], int]:
    entries: list[JudgedLine] = []
    uuids: dict[tuple[str | None, str], str] = {}
    tracing: dict[str | None, tuple[JudgedLine, int]] = {}
    dropped = 0
    for message in messages:
        fact = message.fact
        if fact is None:
            if match := _ELSEWHERE.match(message.text[:200]):
                remote.add((message.node, match["disk"] or "sd"))
            _follow_trace(tracing, message)
            continue
        tracing.pop(message.node, None)
        if fact.gpu and fact.pci_bus_id:
            uuids[message.node, fact.pci_bus_id] = fact.gpu
        if len(entries) >= MAX_LINES:
            dropped += 1
            continue
        name = f"xid_{fact.xid}" if fact.xid is not None else fact.name
        entry = JudgedLine(message.number, message.node, name, fact, message.time_s)
        entries.append(entry)
        if fact.name in STUCK:
            tracing[message.node] = (entry, TRACE_LINES)
    return entries, uuids, dropped


_TRACE = tuple((name, late_regex(pattern)) for name, pattern in TRACE_WORDS)
_RANK = {name: index for index, (name, _) in enumerate(TRACE_WORDS)}


def _follow_trace(tracing: dict[str | None, tuple[JudgedLine, int]], message: Message) -> None:
    """Takes in one line after a stuck task: the most telling word of its call trace is kept."""
    current = tracing.get(message.node)
    if current is None:
        return
    entry, left = current
    if left <= 0:
        del tracing[message.node]
        return
    tracing[message.node] = (entry, left - 1)
    for name, pattern in _TRACE:
        if pattern.search(message.text[:300]):
            if entry.waits_for is None or _RANK[name] < _RANK[entry.waits_for]:
                entry.waits_for = name
            return


def _by_node(entries: Sequence[JudgedLine]) -> Iterator[list[JudgedLine]]:
    nodes: dict[str | None, list[JudgedLine]] = defaultdict(list)
    for entry in entries:
        nodes[entry.node].append(entry)
    yield from nodes.values()


def _in_time(entries: list[JudgedLine]) -> list[JudgedLine]:
    """Oldest first: `journalctl -r` and `tac` turn a log round."""
    times = [entry.time_s for entry in entries if entry.time_s is not None]
    falls = sum(after < before for before, after in pairwise(times))
    rises = sum(after > before for before, after in pairwise(times))
    return entries[::-1] if falls > 4 * rises and falls > 0 else entries


# ---------------------------------------------------------------------------------------- what ends, what follows


def _mark_ends(entries: Sequence[JudgedLine]) -> None:
    open_now: dict[tuple[str, str | None], list[JudgedLine]] = defaultdict(list)
    begins = {name for names in ENDS.values() for name in names}
    for entry in entries:
        for thing in things_of(entry.fact):
            if entry.class_name in begins:
                open_now[entry.class_name, thing].append(entry)
            for name in ENDS.get(entry.class_name, ()):
                for each in open_now.pop((name, thing), ()):
                    each.over_at = entry.number


def _mark_causes(entries: Sequence[JudgedLine]) -> None:
    for rule in RULES:
        causes = [index for index, entry in enumerate(entries) if _named(entry.class_name, rule.causes)]
        if not causes:
            continue
        for index, entry in enumerate(entries):
            if entry.because_of is None and _named(entry.class_name, rule.effects):
                found = _cause_of(index, entries, causes, rule)
                if found is not None:
                    entry.because_of = entries[found].number
    _point_to_roots(entries)


def _point_to_roots(entries: Sequence[JudgedLine]) -> None:
    """What follows from a consequence follows from its cause."""
    by_number = {entry.number: entry for entry in entries}
    for entry in entries:
        passed = {entry.number}
        while entry.because_of is not None:
            further = by_number[entry.because_of].because_of
            if further is None or further in passed:
                break
            passed.add(entry.because_of)
            entry.because_of = further


def _named(name: str, patterns: tuple[str, ...]) -> bool:
    return any(name.startswith(each[:-1]) if each.endswith("*") else name == each for each in patterns)


NEAREST = 50  # Candidates that are looked at on each side of a line.


def _cause_of(index: int, entries: Sequence[JudgedLine], causes: Sequence[int], rule: Rule) -> int | None:
    """The nearest cause before the line, else, if the rule allows, the nearest after it."""
    effect = entries[index]
    if rule.waits_for and effect.waits_for is not None and effect.waits_for not in rule.waits_for:
        return None
    at = bisect_left(causes, index)
    before = causes[max(0, at - NEAREST) : at][::-1]
    after = causes[at : at + NEAREST] if rule.either else ()
    for each in (*before, *after):
        cause = entries[each]
        if each == index or cause.because_of == effect.number:
            continue
        if _near(effect, cause, rule.within_s) and _same_thing(effect, cause, rule):
            return each
    return None


def _near(one: JudgedLine, other: JudgedLine, within_s: float) -> bool:
    if one.time_s is not None and other.time_s is not None:
        return abs(one.time_s - other.time_s) <= within_s
    return abs(one.number - other.number) <= WITHIN_LINES


def _same_thing(effect: JudgedLine, cause: JudgedLine, rule: Rule) -> bool:
    if rule.same == "node":
        return True
    if rule.same == "gpu":
        mine, theirs = effect.fact.pci_bus_id, cause.fact.pci_bus_id
        if effect.class_name == cause.class_name:
            return False
        return mine is None or theirs is None or mine[:10] == theirs[:10]
    if rule.same == "port":
        return bool({*things_of(effect.fact)} & {*things_of(cause.fact)} - {None})
    mine, theirs = disk_of(effect.fact.device), disk_of(cause.fact.device)
    if effect.class_name == cause.class_name:
        return False
    return mine is not None and theirs is not None and (mine == theirs or mine.startswith(theirs + "n"))


_DISK = late_regex(
    r"(?:/dev/)?(nvme\d+(?:n\d+)?|sd[a-z]{1,3}|vd[a-z]|xvd[a-z]|md\d+|dm-\d+|ata\d+|mmcblk\d+|rbd\d+"
    r"|loop\d+|nbd\d+|drbd\d+)"
)


def disk_of(device: str | None) -> str | None:
    """`nvme0n1p2` -> `nvme0n1`, `sda1` -> `sda`; None if it is no disk's name."""
    match = _DISK.match(device or "")
    return match[1] if match else None


# ---------------------------------------------------------------------------------------- whether a node may
# be excluded

LOCAL_DISK_CLASSES = frozenset(
    {"disk_error", "nvme_down", "nvme_media_error", "filesystem_error", "filesystem_shut_down",
    "filesystem_read_only", "journal_aborted", "disk_offline"}
)  # fmt: skip
"""Of a disk of the node's own these say that its filesystem no longer works; of another one nothing about the node."""
_PHYSICAL = late_regex(r"nvme\d+n?\d*|sd[a-z]{1,3}|ata\d+")
_NOT_BROKEN = late_regex(
    r"no space|ENOSPC|error -?28\b|User initiated|CSTS=0x(?!ffffffff)|critical (?:target|nexus|space "
    r"allocation) error|no (?:available|usable) path",
    re.IGNORECASE,
)
"""A full disk, a request that the target refused, a filesystem that someone shut down, a controller that
still answers and is only reset, paths of a storage network."""
_NO_PATH = late_regex(r"no (?:available|usable) path", re.IGNORECASE)
_ELSEWHERE = late_regex(
    r"(?:sd \S+ \[(?P<disk>sd[a-z]+)\] Attached SCSI removable disk"
    r"|scsi host\d+: (?:qla2xxx|QLogic|Emulex|lpfc|fnic|iSCSI Initiator|Virtio SCSI)|iscsi: registered "
    r"transport \(tcp\)|sd \S+ alua:|scsi .*(?:PersistentDisk|LIO-ORG)"
    r"|usb \S+: USB disconnect)"
)
"""Lines that say that a disk is a stick (pulled out, perhaps), a console's virtual medium, or in a storage network."""
ELSEWHERE_NEEDLES = (
    "removable disk",
    "scsi host",
    "registered transport",
    " alua:",
    "persistentdisk",
    "lio-org",
    "usb disconnect",
)
"""One of them is in each lower-cased line that _ELSEWHERE matches."""


def _remote_disks(entries: Sequence[JudgedLine]) -> set[tuple[str | None, str]]:
    """(node, disk) of disks behind a network; (node, "sd") where a SAN is seen, whose disks are called sd, too."""
    remote: set[tuple[str | None, str]] = set()
    for entry in entries:
        if entry.class_name == "nvme_fabric" and entry.fact.device:
            remote.add((entry.node, entry.fact.device))
        elif entry.class_name == "disk_error" and _NO_PATH.search(entry.fact.message):
            remote.add((entry.node, re.sub(r"n\d+$", "", entry.fact.device or "")))
        elif entry.class_name in ("iscsi_error", "multipath_failed"):
            remote.add((entry.node, "sd"))
    return remote


def broken_disk(fact: KernelFact | NodeEvent) -> str | None:
    """The physical disk whose filesystem no longer works by this line; None if it says nothing of the kind. Whether
    the disk is the node's own is another matter."""
    message = fact.message if isinstance(fact, KernelFact) else fact.line
    if fact.severity is FaultSeverity.WARNING or fact.name not in LOCAL_DISK_CLASSES or _NOT_BROKEN.search(message):
        return None
    disk = disk_of(fact.device)
    return disk if disk is not None and _PHYSICAL.fullmatch(disk) else None


def _is_local_failure(entry: JudgedLine, remote: set[tuple[str | None, str]]) -> bool:
    disk, node = broken_disk(entry.fact), entry.node
    if disk is None:
        return False
    if disk.startswith("sd"):
        return (node, "sd") not in remote and (node, disk) not in remote
    controller = re.match(r"nvme\d+", disk)
    return controller is None or (node, controller[0]) not in remote


def _judge_line(
    entry: JudgedLine, uuids: dict[tuple[str | None, str], str], remote: set[tuple[str | None, str]]
) -> None:
    fact = entry.fact
    # A port of PCIe could not be recovered after a fatal error of its own; after any other error the line only says
    # that a driver has no handler for it.
    behind_fatal = entry.class_name == "pcie_recovery_failed" and entry.because_of is not None
    exclude = fact.may_exclude_node or _is_local_failure(entry, remote) or behind_fatal
    entry.may_exclude_node = exclude and entry.over_at is None  # else the device was reset and works again
    if fact.severity is FaultSeverity.INFO:
        entry.role = "news"
    elif entry.because_of is not None or fact.consequence:
        entry.role = "consequence"
    entry.gpu = fact.gpu
    if fact.gpu is None and fact.pci_bus_id and (fact.xid is not None or fact.name.startswith(("gpu_", "amdgpu_"))):
        entry.gpu = uuids.get((entry.node, fact.pci_bus_id), fact.pci_bus_id)
    entry.class_name, entry.fact = class_of(fact), replace(fact, gpu=entry.gpu)
