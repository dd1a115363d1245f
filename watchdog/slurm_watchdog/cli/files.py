"""Files that someone sent: which were given, how one is read, and what a kernel log or a Flight Recorder dump says."""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import structs

from slurm_watchdog.base.text import plural
from slurm_watchdog.cli.options import EXIT_UNKNOWN, EXIT_USAGE, Answer, load_or_exit, warn
from slurm_watchdog.cli.terminal import sentence, show

if TYPE_CHECKING:
    from slurm_watchdog.config.schema import Config
    from slurm_watchdog.diagnose.kernel_log.verdict import JudgedLine, KernelScan, KernelVerdict
    from slurm_watchdog.model.collective_records import CollectiveRecord
    from slurm_watchdog.parse.text_input import Block

T = TypeVar("T")

MAX_FILES = 20_000
MAX_DEPTH = 6
SEVERITIES = ("critical", "error", "warning", "info")
MAX_DUMPS = 16_384
MEMORY_BYTES = 2 << 30  # Beyond what this process has when it begins: a hostile dump ends with a reason.
APART_S = 120.0  # Ranks that wrote their dumps further apart than this may have moved between the two.
RANK = re.compile(r"(?i)(?<![a-z])rank[ _.-]?(\d{1,7})(?!\d)|(\d{1,7})(?:\.(?:json|pickle|pkl|bin))?$")
"""In the name of a file, or else of its folder, as in a bundle: `rank3_trace.json`, `nccl_trace_rank_3`, `dump_3`."""


def configured(config_file: str | None) -> Config | None:
    """A configuration, with its rows of knowledge in force; None without one. Ends the process with code 2 if the file
    is wrong."""
    if config_file is None:
        return None
    from slurm_watchdog.config.knowledge_files import put_in_force

    config = load_or_exit(config_file)
    put_in_force(config.site_texts)
    return config


def read_file(path: str, take: Callable[[Iterator[Block]], T]) -> tuple[T | None, bool]:
    """(what `take` makes of a file, whether it was read to its end); None, after a warning, if it cannot be read."""
    from slurm_watchdog.parse.text_input import Unreadable, read_blocks

    damage: list[str] = []
    try:
        found = take(read_blocks(path, lambda: damage.append(path)))
    except Unreadable as error:
        warn(error)
        return None, False
    if damage:
        warn(f"{path}: the archive is cut short or damaged; what could be unpacked was read")
    return found, not damage


def files_in(paths: Sequence[str], problems: list[str]) -> Iterator[tuple[str, str]]:
    """(the part of its name that may say whose it is, its path), for each file, and each below a directory."""
    given = sorted(set(paths))
    common = os.path.commonpath([str(Path(path).absolute().parent) for path in given if path != "-"] or ["/"])
    seen = 0
    for path in given:
        if path == "-" or not Path(path).is_dir():
            yield ("standard input" if path == "-" else os.path.relpath(Path(path).absolute(), common)), path
            continue
        base = Path(path).absolute()
        for folder, folders, files in os.walk(base, onerror=lambda error: problems.append(str(error))):
            depth = len(Path(folder).relative_to(base).parts)
            folders[:] = sorted(each for each in folders if not each.startswith(".")) if depth < MAX_DEPTH else []
            for whole in (Path(folder) / each for each in sorted(files) if not each.startswith(".")):
                seen += 1
                if seen > MAX_FILES:
                    problems.append(f"{path} holds more than {MAX_FILES} files: the others were left out")
                    return
                if whole.is_file():
                    name = str(whole.relative_to(base))
                    yield (name if len(given) == 1 else f"{os.path.relpath(base, common)}/{name}"), str(whole)


def read_kernel_logs(paths: Sequence[str]) -> Answer:
    """What the kernel reported in each file."""
    from slurm_watchdog.diagnose.kernel_log.verdict import KernelScan

    found: list[tuple[str, KernelVerdict]] = []
    unread = damaged = False
    for path in paths:
        scan = KernelScan()
        verdict, whole = read_file(path, partial(_judge_kernel, scan))
        unread, damaged = unread or verdict is None, damaged or not whole
        if verdict is not None:
            found.append((path, structs.replace(verdict, messages=scan.lines if scan.speaks else 0)))

    def show_all() -> None:
        for path, verdict in found:
            _print_kernel("standard input" if path == "-" else path, verdict)

    lines = [_kernel_line(path, each) for path, verdict in found for each in verdict.lines]
    something = any(line["role"] != "news" for line in lines)
    return Answer({"lines": lines}, show_all, EXIT_USAGE if unread or (damaged and not something) else something)


def _judge_kernel(scan: KernelScan, blocks: Iterator[Block]) -> KernelVerdict:
    from slurm_watchdog.diagnose.kernel_log.verdict import judge_file

    return judge_file(each for block in blocks for each in scan.messages(block.data, block.numbers or block.first_line))


def _kernel_line(path: str, line: JudgedLine) -> dict[str, Any]:
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


def _print_kernel(name: str, verdict: KernelVerdict) -> None:
    times = Counter(map(_identity, verdict.lines))
    first = {_identity(line): line for line in reversed(verdict.lines)}
    found = sorted(first.items(), key=lambda item: (item[1].role == "news", _weight(item[1])))
    rows = [(line, _resource(line), times[key]) for key, line in found]
    show("kernel_log", name=name, summary=summary(verdict), rows=rows, dropped=verdict.dropped)


def summary(verdict: KernelVerdict) -> str:
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


def read_dumps(paths: Sequence[str]) -> Answer:
    """Who keeps the others waiting: code 0: no rank waits; 1: a rank is named; 3: neither is known."""
    from slurm_watchdog.agent.workers.child import limit_address_space
    from slurm_watchdog.analysis.collective_order import order_of, words_of

    limit_address_space(MEMORY_BYTES)
    gc.disable()  # what dumps hold is no cycle, and walking over it again and again takes most of the time
    records, problems, written = _read_dumps(paths)
    if written and max(written) - min(written) > APART_S:
        apart_s = max(written) - min(written)
        problems.append(f"the dumps were written over {apart_s:.0f} s: ranks may have moved meanwhile")
    order = order_of(list(records.values()))
    summary = words_of(order) if records else "No dump could be read."

    def print_all() -> None:
        sentence(summary, "bold red" if order.odd else "")
        show("list", title="Communicators", lines=order.facts)
        show("list", title="Not read, or not certain", lines=problems)

    document = {**msgspec.to_builtins(order), "summary": summary, "problems": problems}
    unknown = order.waiting or not records
    return Answer(document, print_all, True if order.odd else EXIT_UNKNOWN if unknown else False)


def _read_dumps(paths: Sequence[str]) -> tuple[dict[int, CollectiveRecord], list[str], list[float]]:
    """The record of each rank, what could not be read, and when each was written. JSON is preferred to a pickle."""
    from slurm_watchdog.parse.flight_recorder import parse_flight_recorder
    from slurm_watchdog.parse.flight_recorder_format import MAX_BYTES
    from slurm_watchdog.parse.text_input import Unreadable, read_start

    records: dict[int, CollectiveRecord] = {}
    problems, written = [], []
    for path in sorted(paths, key=lambda path: (path.endswith(".json"), path))[:MAX_DUMPS]:
        folder, name = os.path.split(path)
        match = RANK.search(name) or RANK.search(os.path.basename(folder))
        try:
            if match is None:
                raise ValueError("its name has no rank, as nccl_trace_rank_3 and dump_3 have: see docs/evidence.md")
            rank = int(match[1] or match[2])
            at = os.stat(path).st_mtime
            records[rank] = parse_flight_recorder(read_start(path, MAX_BYTES + 1), rank, at)
            written.append(at)
        except (OSError, ValueError, Unreadable) as error:
            problems.append(f"{name}: {error}")
    if any(each.made_at is None for each in records.values()):  # a copy: the others have its date, too
        records = {rank: structs.replace(each, made_at=None) for rank, each in records.items()}
        problems.append("the dates of the files are older than what is in them, and were not used")
    return records, problems, written
