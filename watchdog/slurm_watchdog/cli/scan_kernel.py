"""`slurm-watchdog scan-log --kernel`: what the kernel's lines of a file say, cause before consequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click

from slurm_watchdog.cli.input_progress import reading
from slurm_watchdog.cli.options import EXIT_FINE, EXIT_FOUND, EXIT_USAGE, print_json
from slurm_watchdog.cli.terminal import clean, count, sentence, table

if TYPE_CHECKING:
    from slurm_watchdog.diagnose.kernel_log.verdict import JudgedLine, KernelVerdict

MAX_ROWS: Final = 60
"""Rows of a table that a person still reads; `--json` has all."""
MAX_TEXT: Final = 140


def scan_kernel(paths: Sequence[str], as_json: bool) -> int:
    """Reads each file (plain or packed; `-` is standard input) and says what the kernel reported in it.

    Returns the exit code: 0 nothing found, 1 something found, 2 a file can't be read (or not to its end, and
    nothing was found).
    """
    found: list[tuple[str, KernelVerdict]] = []
    unreadable = damaged = False
    for path in paths:
        verdict, whole = _read(path)
        unreadable = unreadable or verdict is None
        damaged = damaged or not whole
        if verdict is not None:
            found.append((path, verdict))
    if as_json:
        lines = [_json(path, each) for path, verdict in found for each in verdict.lines]
        print_json({"lines": lines})
    else:
        for path, verdict in found:
            _print(path, verdict)
    something = any(_matters(each) for _, verdict in found for each in verdict.lines)
    if unreadable or (damaged and not something):
        return EXIT_USAGE
    return EXIT_FOUND if something else EXIT_FINE


def _read(path: str) -> tuple[KernelVerdict | None, bool]:
    """(what one file says, whether it could be read to its end); no verdict, after saying why, if it can't be read."""
    from slurm_watchdog.diagnose.kernel_log.block_scan import KernelScan
    from slurm_watchdog.diagnose.kernel_log.verdict import judge_file
    from slurm_watchdog.parse.text_input import Unreadable

    scan = KernelScan()
    try:
        with reading(path) as file:
            verdict = judge_file(
                message
                for block in file.blocks
                for message in scan.messages(block.data, block.numbers or block.first_line)
            )
    except Unreadable as error:
        click.echo(clean(error), err=True)
        return None, False
    return replace(verdict, messages=scan.counted, dropped=verdict.dropped + scan.left_out), not file.damaged


def _matters(line: JudgedLine) -> bool:
    return line.role != "news"


# ---------------------------------------------------------------------------------------- for programs


def _json(path: str, line: JudgedLine) -> dict[str, Any]:
    fact = line.fact
    return {
        "file": path,
        "line": line.number,
        "class": line.class_name,
        "severity": fact.severity.value,
        "resource": {
            "gpu": line.gpu,
            "pci": fact.pci_bus_id,
            "mount": fact.mount,
            "server": fact.server,
            "pid": fact.pid,
            "device": fact.device,
        },
        "may_exclude_node": line.may_exclude_node,
        "role": line.role,
        "because_of": line.because_of,
        "over_at": line.over_at,
        "node": line.node,
        "xid": fact.xid,
        "process": fact.process,
        "waits_for": line.waits_for,
        "text": fact.message,
    }


# ---------------------------------------------------------------------------------------- for people


def _print(path: str, verdict: KernelVerdict) -> None:
    name = "standard input" if path == "-" else path
    sentence(f"{name}: {summary(verdict)}")
    rows = fold(verdict.lines)
    table(
        ("LINE", "TIMES", "NODE", "SEVERITY", "CLASS", "OF WHAT", "ROLE", "MAY EXCLUDE NODE", "TEXT"),
        [_row(line, times) for line, times in rows[:MAX_ROWS]],
        [_style(line) for line, _ in rows[:MAX_ROWS]],
    )
    if len(rows) > MAX_ROWS:
        sentence(f"{len(rows) - MAX_ROWS} more rows: `--json` has them all.")
    if any(line.may_exclude_node for line, _ in rows):
        sentence(
            "A file has only the kernel's words, and a user can make it print some. The agent believes a line about "
            "a device only if the record's own device field names it."
        )
    if verdict.dropped:
        sentence(f"{count(verdict.dropped, 'further line')} with a fault were too many to be judged.")


def summary(verdict: KernelVerdict) -> str:
    """One sentence about a file: what is broken first, then what else is a cause, then how much follows from it."""
    if not verdict.messages:
        return "no line in which the kernel speaks."
    lines = [line for line in verdict.lines if _matters(line)]
    if not lines:
        return f"{count(verdict.messages, 'line')} of the kernel, no fault in them."
    broken = [line for line in lines if line.may_exclude_node]
    causes = [line for line in lines if line.role == "cause"]
    first = min(lines, key=_weight)
    others = len({_identity(line) for line in causes} - {_identity(first)})
    follow = sum(line.role == "consequence" for line in lines)
    parts = [f"{_what(first)} (line {first.number})"]
    parts.append("the node may be broken" if broken else "nothing in it alone excludes a node")
    if others:
        parts.append(f"{count(others, 'other cause')}")
    if follow:
        parts.append(f"{count(follow, 'line follows', 'lines follow')} from something else")
    return "; ".join(parts) + "."


_SEVERITIES = ("critical", "error", "warning", "info")


def _weight(line: JudgedLine) -> tuple[bool, int, bool, int]:
    """What is to be read first: what breaks a node, then what is severe, causes before consequences, the earliest."""
    is_cause = line.role == "cause"
    severity = _SEVERITIES.index(line.fact.severity.value)
    return (not (line.may_exclude_node and is_cause), severity, not is_cause, line.number)


def _what(line: JudgedLine) -> str:
    from slurm_watchdog.knowledge.xids import describe_xid

    of = _resource(line)
    where = f" on {line.node}" if line.node else ""
    if line.fact.xid is not None:
        row = describe_xid(line.fact.xid)
        return f"{row.text} (Xid {row.number}, {of}){where}" if of else f"{row.text} (Xid {row.number}){where}"
    waits = f", waiting for {line.waits_for}" if line.waits_for else ""
    return f"{line.class_name}{f' of {of}' if of else ''}{waits}{where}"


def _identity(line: JudgedLine) -> tuple[Any, ...]:
    return (line.node, line.class_name, _resource(line), line.role, line.may_exclude_node)


def fold(lines: Sequence[JudgedLine]) -> list[tuple[JudgedLine, int]]:
    """The first line of each kind, thing and role with how often it came; what weighs most first."""
    first: dict[tuple[Any, ...], JudgedLine] = {}
    times: dict[tuple[Any, ...], int] = {}
    for line in lines:
        key = _identity(line)
        first.setdefault(key, line)
        times[key] = times.get(key, 0) + 1
    kept = sorted(first.items(), key=lambda item: (item[1].role == "news", _weight(item[1])))
    return [(line, times[key]) for key, line in kept]


def _resource(line: JudgedLine) -> str:
    fact = line.fact
    of = [
        f"GPU {line.gpu}" if line.gpu else fact.pci_bus_id,
        fact.server,
        fact.mount,
        fact.device,
        f"{fact.process or 'pid'} {fact.pid}" if fact.pid else fact.process,
    ]
    return ", ".join(each for each in of if each)


def _row(line: JudgedLine, times: int) -> tuple[str, ...]:
    role: str = line.role
    if line.because_of is not None:
        role = f"follows line {line.because_of}"
    elif line.role == "consequence":
        role = "follows from something not here"
    if line.waits_for:
        role += f", waits for {line.waits_for}"
    if line.over_at is not None:
        role += f", over at line {line.over_at}"
    text = line.fact.message
    return (
        str(line.number), f"{times}", line.node or "-", line.fact.severity.value, line.class_name,
        _resource(line) or "-", role,
        "yes" if line.may_exclude_node else "no", text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…",
    )  # fmt: skip


def _style(line: JudgedLine) -> str:
    if line.may_exclude_node:
        return "bold red"
    return "" if line.role == "cause" else "dim"
