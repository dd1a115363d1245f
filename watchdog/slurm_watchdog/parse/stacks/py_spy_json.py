"""Stacks as JSON: `py-spy dump --json`, our own evidence, and documents that hold such with a rank and a host."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.model.evidence import Frame, ThreadStack
from slurm_watchdog.parse.stacks.headers import AT_EXIT, ROOTS, Dump, DumpHeader

DEPTH = 12
MAX_FRAMES = 200

_THREAD_KEYS = frozenset({"thread_id", "os_thread_id", "thread_name", "name", "pid", "active"})
"""Without any of these, frames belong to no thread: a group of ranks in our own answers has frames, too."""

MAX_COMMAND = 4000
_LABELLED = late_regex(r"(?m)^(\d{1,5}|[A-Za-z][\w.-]*\d[\w.-]*): ?(?=\[\s*\{|\{\s*\"|[\[{]\s*$)")
"""A document that begins behind the prefix of `srun --label`, `pdsh` or `clush`."""


def parse_labelled(text: str) -> tuple[list[Dump], str]:
    """The dumps in documents each line of which has a prefix, several processes mixed, and the rest of the text."""
    lines: dict[str, list[str]] = {match[1]: [] for match in _LABELLED.finditer(text)}
    if not lines:
        return [], text
    rest: list[str] = []
    for line in text.splitlines():
        prefix, _, content = line.partition(":")
        lines.get(prefix, rest).append(content if prefix in lines else line)
    found = []
    for prefix, contents in lines.items():
        document = "\n".join(contents).lstrip()
        header = DumpHeader(label=int(prefix)) if prefix.isdigit() else DumpHeader(host=prefix)
        found += _walk_from(document, header) if document else []
    return (found, "\n".join(rest)) if found else ([], text)


def _walk_from(text: str, header: DumpHeader) -> list[Dump]:
    dumps, _ = parse_documents(text, 0)
    return [replace(dump, header=header.overlaid(dump.header)) for dump in dumps]


def parse_documents(text: str, start: int) -> tuple[list[Dump], int]:
    """The dumps in the JSON document that begins at `start`, and where it ends; nothing and `start` if it is none.

    An array that was cut short gives the elements that are whole.
    """
    decoder = json.JSONDecoder()
    try:
        document, end = decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        document, end = _whole_elements(decoder, text, start)
    try:
        return (_walk(document, DumpHeader(), 0), end) if document is not None else ([], start)
    except RecursionError:
        return [], start


def why_broken(text: str) -> str:
    """Why a text that begins as JSON is none; empty of any other text, and of one that is whole."""
    if not text.lstrip().startswith(("[", "{")):
        return ""
    try:
        json.loads(text)
    except RecursionError:
        return "its JSON nests too deep"
    except json.JSONDecodeError as error:
        early = error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip())
        return "its JSON ends early" if early else f"its JSON is broken in line {error.lineno}, column {error.colno}"
    except ValueError as error:
        return f"its JSON is broken: {str(error)[:100]}"
    return ""


def _whole_elements(decoder: json.JSONDecoder, text: str, start: int) -> tuple[list[Any] | None, int]:
    elements: list[Any] = []
    position = start + 1
    while text[start : start + 1] == "[":
        match = re.compile(r"[\s,]*(?=[\[{])").match(text, position)
        if match is None:
            break
        try:
            element, position = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError):
            break
        elements.append(element)
    return (elements, position) if elements else (None, start)


def _walk(node: Any, header: DumpHeader, depth: int) -> list[Dump]:
    if depth > DEPTH:
        return []
    if isinstance(node, list):
        return _walk_list(node, header, depth)
    if not isinstance(node, dict):
        return []
    header = header.overlaid(_header_of(node))
    dumps = node.get("dumps")
    if isinstance(dumps, list) and (header.pid or header.rank is not None) and all(isinstance(d, dict) for d in dumps):
        return [each for whole in whole_dumps(dumps) for each in _walk(whole, header, depth + 1)]
    threads = node.get("threads")
    if isinstance(threads, list | dict):
        entries = list(threads.values()) if isinstance(threads, dict) else threads
        parsed = tuple(thread for each in entries if (thread := _thread(each)) is not None)
        command = next((line for each in entries if (line := _command(each))), "") or _command(node)
        pid, error = header.pid or _pid_of(entries), _error(node) if not parsed else None
        return [Dump(header=header, pid=pid, threads=parsed, error=error, command=command)]
    if _thread(node) is not None and depth > 0:
        return _walk_list([node], header, depth)
    if (error := _error(node)) is not None and (header.rank is not None or header.pid or header.host):
        return [Dump(header=header, pid=header.pid, error=error, command=_command(node))]
    found: list[Dump] = []
    for key, value in node.items():
        if isinstance(value, list | dict):
            found += _walk(value, header.overlaid(_header_of_key(str(key))), depth + 1)
    return found


def whole_dumps(dumps: list[Any]) -> Iterator[dict[str, Any]]:
    """Our own evidence: each dump has the threads that changed since the one before, and the numbers of the others."""
    current: dict[Any, Any] = {}
    for dump in dumps:
        if dump.get("error") or not isinstance(dump.get("threads"), list):
            yield dump
            continue
        kept = {number: current[number] for number in _hashable(dump.get("unchanged")) if number in current}
        new = {_integer(each.get("thread_id")): each for each in dump["threads"] if isinstance(each, dict)}
        current = kept | new
        yield {**dump, "threads": list(current.values())}


def _hashable(numbers: Any) -> list[int]:
    return [number for number in numbers if isinstance(number, int)] if isinstance(numbers, list) else []


def _walk_list(nodes: list[Any], header: DumpHeader, depth: int) -> list[Dump]:
    threads = [each for each in nodes if isinstance(each, dict) and "threads" not in each and _thread(each)]
    if not threads:
        return [found for each in nodes for found in _walk(each, header, depth + 1)]
    by_process: dict[tuple[DumpHeader, int], list[ThreadStack]] = {}
    commands: dict[tuple[DumpHeader, int], str] = {}
    for each in threads:
        own = header.overlaid(_header_of(each)) if "rank" in each or "host" in each else header
        thread = _thread(each)
        if thread is not None:
            key = (own, _integer(each.get("pid")) or header.pid)
            by_process.setdefault(key, []).append(thread)
            commands[key] = commands.get(key) or _command(each)
    return [
        Dump(header=header, pid=pid, threads=tuple(found), command=commands[header, pid])
        for (header, pid), found in by_process.items()
    ]


def _command(node: Any) -> str:
    """The command line that py-spy puts beside a thread; empty if it does not."""
    info = node.get("process_info") if isinstance(node, dict) else None
    command = info.get("command_line") if isinstance(info, dict) else None
    return _plain(command, MAX_COMMAND) if isinstance(command, str) else ""


def _thread(node: Any) -> ThreadStack | None:
    if not isinstance(node, dict) or not _THREAD_KEYS & node.keys():
        return None
    frames = next((node[key] for key in ("frames", "stack", "stacktrace") if isinstance(node.get(key), list)),
    None)  # fmt: skip
    if frames is None:
        return None
    name = node.get("thread_name", node.get("name"))
    identity = _integer(node.get("os_thread_id")) or _integer(node.get("thread_id")) or 0
    pid = _integer(node.get("pid"))
    if not isinstance(name, str) or not name:
        name = "MainThread" if pid and identity == pid else ""
    parsed = tuple(frame for each in frames[:MAX_FRAMES] if (frame := _frame(each)) is not None)
    if frames and not parsed:
        return None
    of_main = bool(pid) and identity == pid and len(frames) <= MAX_FRAMES
    at_exit = of_main and bool(parsed) and isinstance(frames[-1], dict) and frames[-1].get("is_entry") is True
    return ThreadStack(
        thread_id=identity % 2**63,
        name=_plain(name, 200),
        active=node.get("active") is True,
        frames=(*parsed, AT_EXIT) if at_exit and parsed[-1].function not in ROOTS else parsed,
        owns_gil=node.get("owns_gil") is True,
    )


def _frame(node: Any) -> Frame | None:
    if isinstance(node, dict):
        name = node.get("name", node.get("function"))
        file = next((node[k] for k in ("short_filename", "filename", "file",
        "module") if isinstance(node.get(k), str)), "")  # fmt: skip
        if not isinstance(name, str):
            return None
        line = _integer(node.get("line", node.get("lineno"))) or 0
        return Frame(function=_plain(name, 300), file=_plain(file, 300), line=line)
    if isinstance(node, list) and len(node) >= 2 and isinstance(node[0], str) and isinstance(node[1], str):
        line = _integer(node[2]) or 0 if len(node) > 2 else 0
        return Frame(function=_plain(node[0], 300), file=_plain(node[1], 300), line=line)
    if isinstance(node, str):
        name, found, inner = _plain(node, 2000).strip().rpartition(" (")
        match = re.fullmatch(r"(.+?)(?::(\d{1,8}))?", inner[:-1]) if found and inner.endswith(")") else None
        if name and match is not None:
            return Frame(function=name, file=match[1], line=int(match[2] or 0))
    return None


def _header_of(node: dict[str, Any]) -> DumpHeader:
    values = {str(key).lower(): value for key, value in node.items()}
    host = next((v for k in ("node", "host", "hostname", "nodename") if isinstance(v := values.get(k), str)),
    "")  # fmt: skip
    rank = next((v for k in ("rank", "global_rank") if (v := _integer(values.get(k))) is not None), None)
    return DumpHeader(
        host=_plain(host, 100),
        rank=rank,
        local_rank=_integer(values.get("local_rank")),
        world=_integer(values.get("world_size")) or 0,
        pid=_integer(values.get("pid")) or 0,
        role=_plain(str(values.get("role") or ""), 20) if isinstance(values.get("role"), str) else "",
    )


def _header_of_key(key: str) -> DumpHeader:
    rank = re.fullmatch(r"(?:global[_ ]?)?rank[_: -]?(\d{1,7})|(\d{1,6})", key)
    if rank is not None:
        return DumpHeader(rank=int(rank[1] or rank[2]))
    if re.fullmatch(r"[A-Za-z](?:[^\W\d]|[.-])*\d[\w.-]*", key) and not re.search(
        r"thread|stack|dump|trace|frame", key
    ):
        return DumpHeader(host=_plain(key, 100))
    return DumpHeader()


def _error(node: dict[str, Any]) -> str | None:
    error = node.get("error")
    return _plain(error, 300) if isinstance(error, str) and error else None


def _plain(text: str, limit: int) -> str:
    """The beginning, without half characters, which JSON may spell and nothing can write."""
    return text[:limit].encode(errors="replace").decode()


def _pid_of(threads: list[Any]) -> int:
    for each in threads:
        if isinstance(each, dict) and (pid := _integer(each.get("pid"))):
            return pid
    for each in threads:
        if isinstance(each, dict) and each.get("thread_name", each.get("name")) == "MainThread":
            identity = _integer(each.get("os_thread_id")) or _integer(each.get("thread_id")) or 0
            return identity if identity < 2**23 else 0
    return 0


def _integer(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int) and 0 <= value < 2**63:
        return value
    return int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}", value) else None
