"""What a kernel log says, for programs and for people: its lines, a row of each thing, one sentence. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base.text import plural
from slurm_watchdog.diagnose.kernel_log.verdict import JudgedLine, KernelScan, KernelVerdict, judge_file
from slurm_watchdog.knowledge.xids import describe_xid

SEVERITIES = ("critical", "error", "warning", "info")


def judge_blocks(blocks: Iterable[tuple[bytes, int, Sequence[int] | None]]) -> KernelVerdict:
    """The verdict over a file, given as blocks: whole lines, the number of the first, of each if they are no row."""
    scan = KernelScan()
    verdict = judge_file(each for data, first, numbers in blocks for each in scan.messages(data, numbers or first))
    return replace(verdict, messages=scan.lines if scan.speaks else 0)


def document_of(path: str, line: JudgedLine) -> dict[str, Any]:
    """A line in the shape of `scan-log --kernel --json`."""
    fact = line.fact
    resource = {"gpu": line.gpu, "pci": fact.pci_bus_id, "mount": fact.mount, "server": fact.server}
    return {
        "file": path,
        "line": line.number,
        "class": line.class_name,
        "severity": fact.severity.value,
        "resource": resource | {"pid": fact.pid, "device": fact.device},
        **{key: getattr(line, key) for key in ("may_exclude_node", "role", "because_of", "over_at", "node")},
        "xid": fact.xid,
        "process": fact.process,
        "waits_for": line.waits_for,
        "text": fact.message,
    }


def rows_of(verdict: KernelVerdict) -> list[tuple[JudgedLine, str, int]]:
    """(the first line that says it, of what, how often) for each thing that the file says; the gravest first."""
    times = Counter(map(_identity, verdict.lines))
    first = {_identity(line): line for line in reversed(verdict.lines)}
    found = sorted(first.items(), key=lambda item: (item[1].role == "news", _weight(item[1])))
    return [(line, _resource(line), times[key]) for key, line in found]


def summary_of(verdict: KernelVerdict) -> str:
    """One sentence about a file: what is broken first, then what else is a cause, then how much follows from it."""
    if not verdict.messages:
        return "no line of the kernel."
    lines = [line for line in verdict.lines if line.role != "news"]
    if not lines:
        return f"no fault in its {plural(verdict.messages, 'line')}."
    first = min(lines, key=_weight)
    broken = any(line.may_exclude_node for line in lines)
    parts = [f"{_what(first)} (line {first.number})"]
    parts.append("the node may be broken" if broken else "nothing in it alone excludes a node")
    if others := len({_identity(line) for line in lines if line.role == "cause"} - {_identity(first)}):
        parts.append(f"{plural(others, 'other cause')}")
    if follow := sum(line.role == "consequence" for line in lines):
        parts.append(f"{plural(follow, 'line follows', 'lines follow')} from something else")
    return "; ".join(parts) + "."


def _weight(line: JudgedLine) -> tuple[bool, int, bool, int]:
    """What is to be read first: what breaks a node, then what is severe, causes before consequences, the earliest."""
    is_cause = line.role == "cause"
    severity = SEVERITIES.index(line.fact.severity.value)
    return (not (line.may_exclude_node and is_cause), severity, not is_cause, line.number)


def _what(line: JudgedLine) -> str:
    of = _resource(line)
    where = f" on {line.node}" if line.node else ""
    if line.fact.xid is not None:
        row = describe_xid(line.fact.xid)
        return f"{row.text} (Xid {row.number}{f', {of}' if of else ''}){where}"
    waits = f", waiting for {line.waits_for}" if line.waits_for else ""
    return f"{line.class_name}{f' of {of}' if of else ''}{waits}{where}"


def _identity(line: JudgedLine) -> tuple[Any, ...]:
    return (line.node, line.class_name, _resource(line), line.role, line.may_exclude_node)


def _resource(line: JudgedLine) -> str:
    fact = line.fact
    process = f"{fact.process or 'pid'} {fact.pid}" if fact.pid else fact.process
    of = (f"GPU {line.gpu}" if line.gpu else fact.pci_bus_id, fact.server, fact.mount, fact.device, process)
    return ", ".join(each for each in of if each)
