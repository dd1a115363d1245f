"""`slurm-watchdog scan-log --kernel`: what the kernel's lines of a file say, cause before consequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from slurm_watchdog.cli.offline import Answer, read_file
from slurm_watchdog.cli.options import EXIT_FINE, EXIT_FOUND, EXIT_USAGE
from slurm_watchdog.cli.terminal import count, show

if TYPE_CHECKING:
    from slurm_watchdog.diagnose.kernel_log.block_scan import KernelScan
    from slurm_watchdog.diagnose.kernel_log.verdict import JudgedLine, KernelVerdict
    from slurm_watchdog.parse.text_input import Block

SEVERITIES = ("critical", "error", "warning", "info")


def read_kernel_logs(paths: Sequence[str]) -> Answer:
    """What the kernel reported in each file."""
    from slurm_watchdog.diagnose.kernel_log.block_scan import KernelScan

    found: list[tuple[str, KernelVerdict]] = []
    unread = damaged = False
    for path in paths:
        scan = KernelScan()
        verdict, whole = read_file(path, partial(_judge, scan))
        unread, damaged = unread or verdict is None, damaged or not whole
        if verdict is not None:
            found.append((path, replace(verdict, messages=scan.lines if scan.speaks else 0)))

    def show_all() -> None:
        for path, verdict in found:
            _print("standard input" if path == "-" else path, verdict)

    lines = [_json(path, each) for path, verdict in found for each in verdict.lines]
    something = any(line["role"] != "news" for line in lines)
    code = EXIT_FOUND if something else EXIT_FINE
    return Answer({"lines": lines}, show_all, EXIT_USAGE if unread or (damaged and not something) else code)


def _judge(scan: KernelScan, blocks: Iterator[Block]) -> KernelVerdict:
    from slurm_watchdog.diagnose.kernel_log.verdict import judge_file

    return judge_file(each for block in blocks for each in scan.messages(block.data, block.numbers or block.first_line))


def _json(path: str, line: JudgedLine) -> dict[str, Any]:
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


def _print(name: str, verdict: KernelVerdict) -> None:
    times = Counter(map(_identity, verdict.lines))
    first = {_identity(line): line for line in reversed(verdict.lines)}
    found = sorted(first.items(), key=lambda item: (item[1].role == "news", _weight(item[1])))
    rows = [(line, _resource(line), times[key]) for key, line in found]
    show("kernel_log", name=name, summary=summary(verdict), rows=rows, dropped=verdict.dropped)


def summary(verdict: KernelVerdict) -> str:
    """One sentence about a file: what is broken first, then what else is a cause, then how much follows from it."""
    if not verdict.messages:
        return "no line in which the kernel speaks."
    lines = [line for line in verdict.lines if line.role != "news"]
    if not lines:
        return f"no fault in its {count(verdict.messages, 'line')}."
    first = min(lines, key=_weight)
    broken = any(line.may_exclude_node for line in lines)
    parts = [f"{_what(first)} (line {first.number})"]
    parts.append("the node may be broken" if broken else "nothing in it alone excludes a node")
    if others := len({_identity(line) for line in lines if line.role == "cause"} - {_identity(first)}):
        parts.append(f"{count(others, 'other cause')}")
    if follow := sum(line.role == "consequence" for line in lines):
        parts.append(f"{count(follow, 'line follows', 'lines follow')} from something else")
    return "; ".join(parts) + "."


def _weight(line: JudgedLine) -> tuple[bool, int, bool, int]:
    """What is to be read first: what breaks a node, then what is severe, causes before consequences, the earliest."""
    is_cause = line.role == "cause"
    severity = SEVERITIES.index(line.fact.severity.value)
    return (not (line.may_exclude_node and is_cause), severity, not is_cause, line.number)


def _what(line: JudgedLine) -> str:
    from slurm_watchdog.knowledge.xids import describe_xid

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
