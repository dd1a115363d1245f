"""Reads stacks as people have them: py-spy's text and JSON, faulthandler, gdb, pystack; many in one text,
with prefixes, in prose.

Nothing here judges. What is no stack is passed over; what says who is dumped (a header, a prefix, a command
line) is kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.evidence import Frame, ThreadStack
from slurm_watchdog.parse.stacks.headers import DumpHeader, parse_header, parse_prefix
from slurm_watchdog.parse.stacks.py_spy_json import Found, parse_documents

MAX_FRAMES: Final = 200
MAX_LINE: Final = 4000
JSON_ATTEMPTS: Final = 64

_LABEL_AT_BEGIN = re.compile(r"(?m)^( {0,5}\d{1,6}): ")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PROCESS = re.compile(r"\s*Process (\d+)(?::\s?(.*))?$")
_PARENT = re.compile(r"\s*Parent Process (\d+)")
_SPY_THREAD = re.compile(r'\s*Thread (0x[0-9A-Fa-f]+|\d+)(?: \(([\w+ -]*)\))?(?:: "(.*?)"?)?\s*$')
_FAULT_THREAD = re.compile(
    r"\s*(?:Current thread|Thread) (0x[0-9A-Fa-f]+|\d+|[\w-]+)(?:,? ?[\[(](.*?)[\])])? \(most recent call (first|last)\):?"
)
_PYSTACK_THREAD = re.compile(
    r"\s*Traceback for thread (\d+)(?: \((.*?)\))?(?: \[(.*?)\])? \(most recent call (first|last)\):?"
)
_GDB_THREAD = re.compile(
    r'\s*Thread (\d+) \((?:Thread 0x[0-9a-f]+ )?\(?(?:LWP|process) (\d+)\)?\)?(?: "(.*?)")?\)?:'
)
_LOOSE_THREAD = re.compile(
    r"""\s*(?:#\s*|-+\s*)?(?:Stack (?:of|for) )?(?:[Tt]hread)(?:ID| ID| name)?[:=]?\s*["']?([A-Za-z][\w-]*?)["']?\s*\(?(?:ident|id|tid)?[=: ]*(\d+|0x[0-9a-f]+)?[^)]*\)?:?\s*-*$"""
)
_PY_FRAME = re.compile(r'\s*(?:\((?:Python|C)\)\s*)?File:? "(.*?)", line (\d+),? in (.+?)\s*$')
_GDB_FRAME = re.compile(r"\s*#(\d+)\s+(?:0x[0-9a-f]+ in )?(.+)$")
_GDB_PYTHON = re.compile(r"Frame 0x[0-9a-f]+, for file (.+?), line (\d+), in ([\w.<>]+)")
_FR_FRAME = re.compile(r"\s*(?:#\d+\s+)?([\w.<>]+) from (\S+\.py):(\d+)\s*$")
_ERROR = re.compile(
    r"\s*(?:Error:\s*)?((?:Failed to (?:suspend|get|attach|find|copy|open|read|lock)|Permission [Dd]enied|Operation not permitted|"
    r"No such process|[Tt]imed out|[Tt]imeout|Killed|Terminated|Could not attach|Cannot attach|ptrace|EPERM|Couldn't|Process \d+ (?:not|does)|"
    r"(?:os )?error |No python|The process|process \d+ (?:is|has)|py-spy: (?!command)).*)",
)
_ANY_ERROR = re.compile(r"\s*(?:Error|ERROR|error):\s*(.+)")
_REASON = re.compile(r"\s*(?:Reason|Caused by):\s*(.+)")
_DUMP_ASKED = re.compile(r"\b(?:dump|remote)\b")
_DUMPED_PID = re.compile(r"(?:--pid|-p|remote)[ =](\d{2,8})\b")
_GDB_PID = re.compile(r"-p ?(\d{1,9})")
_RANK_SPEAKS = re.compile(
    r"(?i)\W*(?:global )?rank[ _:=#-]*(\d{1,6})\W+(?:\(gdb\)|Timeout \(|Fatal Python|Attaching|\$|sudo|py-spy|gdb|pystack|thread apply|kill|"
    r"dumping|stack trace).*"
)


class Dump(Struct, frozen=True, kw_only=True):
    """The stacks of one process, once, and what the text around them says of who it is."""

    source: str = ""
    """The file."""
    at: int = 0
    """The how-manieth dump in that file."""
    said: DumpHeader = DumpHeader()
    pid: int = 0
    """0 if unknown."""
    parent: int = 0
    command: str = ""
    threads: tuple[ThreadStack, ...] = ()
    error: str | None = None


def parse_stacks(text: str, source: str = "") -> list[Dump]:
    """Every dump in a text, in its order; none if there is none. Anything may be given, nothing is raised."""
    text = text.replace("\x00", "")
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    text = _unpadded(text)
    reader = _Reader(source, prose="```" in text)
    position, attempts = 0, 0
    size = len(text)
    while position < size:
        end = text.find("\n", position)
        end = size if end < 0 else end
        line = text[position:end].rstrip("\r")
        if line[:1] in ("[", "{") and attempts < JSON_ATTEMPTS and re.match(r"[\[{]\s*(?:[\"{\[]|$)", line):
            attempts += 1
            documents, after = parse_documents(text, position)
            if documents:
                reader.documents(documents)
                position = max(after, position + 1)
                continue
        reader.line(line[:MAX_LINE])
        position = end + 1
    return reader.end()


def _unpadded(text: str) -> str:
    """Without the blanks with which `srun --label` makes its numbers equally wide, if most lines have such numbers."""
    widths = Counter(len(match[1]) for match in _LABEL_AT_BEGIN.finditer(text))
    if not widths:
        return text
    width, times = widths.most_common(1)[0]
    if width < 2 or 2 * times < text.count("\n"):
        return text
    return re.sub(rf"(?m)^ {{1,{width - 1}}}(?=\d{{1,{width}}}: )", "", text)


@lru_cache(maxsize=65536)
def parse_frame(line: str) -> Frame | None:
    """`    function (file:line)` as py-spy prints it; None if it is something else."""
    text = line.strip()
    if not text.endswith(")") or ' "' in text[:6]:
        return None
    name, found, inner = text[:-1].rpartition(" (")
    if not found or not name or not inner or re.search(r"(?<!:): |^(Arguments|Locals)|^[-*>•] |= ", name):
        return None
    file, colon, digits = inner.rpartition(":")
    number = int(digits) if colon and digits.isdigit() and len(digits) < 9 else 0
    file = file if number else inner
    code = re.search(
        r"\.(pyx?|pyc|so|c|cc|cpp|cu|h|hpp|rs|S)\b|^<.*>$|^lib|python[\d.]*$|^\[|^\?+$|^[\w./-]+$", file
    )
    if code is None or (line[:2] != "  " and (not number or " " in name or ".py" not in file)):
        return None
    if " " in file and not number and not re.search(r"\.(so|py)", file):
        return None
    if " " in name and not re.search(r"[:<(*]|operator|\[clone", name):
        return None
    return Frame(function=name[:300], file=file[:300], line=number)


class _Stream:
    """What one prefix (or none) is saying at the moment."""

    def __init__(self) -> None:
        self.said = DumpHeader()
        self.pid = self.parent = 0
        self.command = ""
        self.threads: list[ThreadStack] = []
        self.open: list[ThreadStack] = []
        self.frames: list[Frame] = []
        self.mode = ""
        self.error: str | None = None
        self.asked: int | None = None
        """Lines since a command that dumps; None if there was none."""
        self.asked_pid = 0


class _Reader:
    def __init__(self, source: str, prose: bool) -> None:
        self.source, self.prose = source, prose
        self.streams: dict[str, _Stream] = {}
        self.found: list[Dump] = []
        self.plain = self._stream("")

    def _stream(self, prefix: str) -> _Stream:
        if prefix not in self.streams:
            self.streams[prefix] = _Stream()
        return self.streams[prefix]

    def documents(self, dumps: list[Found]) -> None:
        """Dumps that stood there as JSON."""
        self._end_process(self.plain)
        for said, pid, threads, error, command in dumps:
            whose = self.plain.said.overlaid(said)
            self._add(Dump(said=whose, pid=pid or said.pid, command=command, threads=threads, error=error))

    def line(self, line: str) -> None:
        if line[:4] == "    " and self.plain.open and self._frame(self.plain, line):
            return
        prefix, said, rest = parse_prefix(line, self.streams)
        stream = self._stream(prefix)
        if said is not None and stream.said != said and not stream.threads and not stream.open:
            stream.said = stream.said.overlaid(said)
        if not self._structural(stream, rest):
            self._words(stream, rest)

    def _structural(self, stream: _Stream, line: str) -> bool:
        stripped = line.strip()
        if not stripped:
            return True
        if stripped[:3] in ("```", "~~~"):
            self._end_thread(stream)
            return True
        if stream.open and self._frame(stream, line):
            return True
        return self._header_of_thread(stream, line) or self._header_of_process(stream, line)

    def _header_of_process(self, stream: _Stream, line: str) -> bool:
        if (match := _PROCESS.match(line)) is not None:
            self._end_process(stream)
            stream.pid, stream.command = int(match[1]) % 2**31, (match[2] or "")[:MAX_LINE]
            stream.asked = 0
            return True
        if (match := _PARENT.match(line)) is not None:
            stream.parent = int(match[1]) % 2**31
            return True
        return line.startswith(("Python v", "Python 3"))

    def _header_of_thread(self, stream: _Stream, line: str) -> bool:
        if "hread" not in line and "Traceback" not in line and "(gdb)" not in line and "#0 " not in line:
            return False
        if (match := _SPY_THREAD.match(line)) is not None:
            status = match[2] or ""
            self._begin(
                stream,
                match[1],
                match[3] or "",
                "spy",
                active="active" in status,
                gil="gil" in status,
                shares=bool(match[3]),
            )
            return True
        if (match := _PYSTACK_THREAD.match(line)) is not None:
            self._begin(
                stream, match[1], "", "first" if match[4] == "first" else "last", gil="Has the GIL" in line
            )
            return True
        if (match := _FAULT_THREAD.match(line)) is not None:
            named = match[2] or ("" if match[1][:1].isdigit() else match[1])
            self._begin(stream, match[1], named, "fault" if match[3] == "first" else "last")
            return True
        if (match := _GDB_THREAD.match(line)) is not None:
            main = match[1] == "1"
            self._begin(stream, match[2], "MainThread" if main else (match[3] or f"Thread-{match[1]}"), "gdb")
            if main:
                stream.asked_pid = int(match[2]) % 2**31
            return True
        if "Traceback (most recent call first)" in line:
            if not stream.open or stream.mode != "gdb":
                self._begin(stream, "0", "MainThread", "first")
            return True
        if (
            re.match(r"\s*#0 ", line)
            and not (stream.mode == "gdb" and stream.open)
            and _GDB_FRAME.match(line)
        ):
            self._begin(stream, "0", "", "gdb")
            return self._frame(stream, line)
        if (match := _LOOSE_THREAD.match(line)) is not None and "Traceback" not in line:
            self._begin(stream, match[2] or "0", match[1], "last")
            return True
        return False

    def _begin(
        self,
        stream: _Stream,
        identity: str,
        name: str,
        mode: str,
        *,
        active: bool = False,
        gil: bool = False,
        shares: bool = False,
    ) -> None:
        """A thread's header. Headers of main threads one below the other share the frames that follow: so
        people write groups."""
        number = int(identity, 0) if re.fullmatch(r"0x[0-9A-Fa-f]+|[1-9]\d*|0", identity) else 0
        thread = ThreadStack(
            thread_id=number % 2**63,
            name=name[:200] if "most recent" not in name else "",
            active=active,
            frames=(),
            owns_gil=gil,
        )
        together = (
            shares
            and name == "MainThread"
            and stream.mode == "spy"
            and bool(stream.open)
            and not stream.frames
        )
        if not together or stream.open[-1].name != name:
            self._end_thread(stream)
        stream.open.append(thread)
        stream.mode = mode

    def _frame(self, stream: _Stream, line: str) -> bool:
        frame = None
        if stream.mode == "spy":
            frame = parse_frame(line)
            if frame is None and re.match(r"\s{8,}\S", line):
                return True  # arguments and locals
            if frame is None and (match := _FR_FRAME.match(line)) is not None:
                frame = Frame(function=match[1], file=match[2], line=int(match[3][:9]))
        elif (match := _PY_FRAME.match(line)) is not None:
            frame = Frame(function=match[3][:300], file=match[1][:300], line=int(match[2][:9]))
        elif stream.mode == "gdb":
            return self._gdb_frame(stream, line)
        elif stream.mode in ("first", "last", "fault"):
            if "Garbage-collecting" in line:
                frame = Frame(function="gc_collect_main", file="gcmodule.c")
            elif (
                re.match(r"\s{4,}\S|\s*<(?:built-in|method|no Python|unknown)\b", line)
                or line.strip() == "..."
            ):
                return True  # a line of source
        if frame is None:
            return False
        if len(stream.frames) < MAX_FRAMES:
            stream.frames.append(frame)
        return True

    def _gdb_frame(self, stream: _Stream, line: str) -> bool:
        match = _GDB_FRAME.match(line)
        if match is None:
            return bool(re.match(r"\s+(from|at|\S+=)", line))
        if match[1] == "0" and stream.frames:
            self._begin(stream, "0", "", "gdb")
        python = _GDB_PYTHON.search(line)
        recorded = _FR_FRAME.match(line)
        if recorded is not None:
            frame = Frame(function=recorded[1], file=recorded[2], line=int(recorded[3][:9]))
        elif python is not None:
            frame = Frame(function=python[3], file=python[1].strip("\"'"), line=int(python[2][:9]))
        else:
            text = match[2]
            place = re.search(r"\) (?:at|from) (\S+?)(?::(\d+))?$", text)
            name = re.split(r" \((?!anonymous)", text, maxsplit=1)[0]
            frame = Frame(
                function=name[:300],
                file=place[1] if place else "??",
                line=int((place[2] or "0")[:9]) if place else 0,
            )
        if len(stream.frames) < MAX_FRAMES:
            stream.frames.append(frame)
        return True

    def _words(self, stream: _Stream, line: str) -> None:
        """A line that is part of no stack: an error, a header, a command, or prose."""
        if stream.asked is not None:
            stream.asked += 1
        if (reason := _REASON.match(line)) is not None:
            if stream.error is not None and reason[1].strip() not in stream.error:
                stream.error = f"{stream.error}; {reason[1].strip()}"[:300]
            return
        expected = not self.prose or (stream.asked is not None and stream.asked < 4)
        error = _ERROR.match(line) or (_ANY_ERROR.match(line) if expected and stream.pid else None)
        if error is not None and expected:
            self._end_thread(stream)
            if stream.threads:
                self._end_process(stream)
            stream.error = stream.error or error[1].strip()[:300]
            return
        self._end_thread(stream)
        spoken = _RANK_SPEAKS.match(line)
        header = parse_header(line) if spoken is None else DumpHeader(rank=int(spoken[1]))
        if header is not None:
            self._end_process(stream)
            stream.asked = None
            stream.said = stream.said.followed_by(header)
            stream.pid = header.pid or 0
        elif (pid := _asked_pid(line)) is not None:
            self._end_process(stream)
            stream.asked, stream.asked_pid = 0, pid
        elif re.match(r"\s*(Fatal Python error|Timeout \(\d|Attaching to|\[New LWP)", line):
            if stream.threads:
                self._end_process(stream)
            attached = re.search(r"process (\d+)", line)
            stream.asked_pid = int(attached[1][:9]) if attached else stream.asked_pid

    def _end_thread(self, stream: _Stream) -> None:
        frames = tuple(stream.frames if stream.mode != "last" else reversed(stream.frames))
        opened, stream.open, stream.frames = stream.open, [], []
        for thread in opened:
            self._take(stream, replace(thread, frames=frames))

    def _take(self, stream: _Stream, thread: ThreadStack) -> None:
        """Into the process at hand, or a new one: no process has two main threads, and some tools print the
        main one last."""
        main = _is_main(thread)
        has_main = any(_is_main(each) for each in stream.threads)
        last = stream.mode in ("fault", "gdb") and has_main
        if stream.threads and (last or (main and has_main)):
            again = main and not last and bool(thread.thread_id) and stream.pid == thread.thread_id
            self._end_process(stream, keep_pid=again)
        stream.threads.append(thread)

    def _end_process(self, stream: _Stream, *, keep_pid: bool = False) -> None:
        if stream.open:
            self._end_thread(stream)
        if stream.threads or stream.error is not None or stream.pid:
            pid = stream.pid or _pid_of(stream) or stream.asked_pid
            error = stream.error
            if not stream.threads and error is None:
                error = (
                    "the dump is empty"
                    if not self.prose and (stream.command or stream.said.rank is not None)
                    else None
                )
            if stream.threads or error is not None:
                self._add(
                    Dump(
                        said=stream.said, pid=pid, parent=stream.parent, command=stream.command,
                        threads=tuple(stream.threads), error=None if stream.threads else error,
                    )
                )  # fmt: skip
        if not keep_pid:
            stream.pid, stream.command = 0, ""
        stream.parent, stream.asked_pid = 0, 0
        stream.threads, stream.error = [], None

    def _add(self, dump: Dump) -> None:
        self.found.append(replace(dump, source=self.source, at=len(self.found)))

    def end(self) -> list[Dump]:
        for stream in self.streams.values():
            self._end_process(stream)
        return list(_without_doubled_errors(self.found))


def _asked_pid(line: str) -> int | None:
    """Of a command line that dumps a process, its pid, 0 where it does not say; None for any other line. In
    linear time of any line."""
    tool = re.search(r"(?:py-spy|pystack)\b", line)
    asked = _DUMP_ASKED.search(line, tool.end()) if tool is not None else None
    if asked is not None:
        pid = _DUMPED_PID.search(line, asked.start())
        return int(pid[1]) if pid is not None else 0
    gdb = line.find("gdb ")
    found = _GDB_PID.search(line, gdb + 4) if gdb >= 0 else None
    return int(found[1]) if found is not None else None


def _is_main(thread: ThreadStack) -> bool:
    if thread.name == "MainThread":
        return True
    return not thread.name and bool(thread.frames) and thread.frames[-1].function == "<module>"


def _pid_of(stream: _Stream) -> int:
    """The id of the main thread is the pid, if it is the kernel's: pthread's ids are large."""
    for thread in stream.threads:
        if _is_main(thread) and 0 < thread.thread_id < 2**23:
            return thread.thread_id
    return 0


def _without_doubled_errors(found: list[Dump]) -> Iterator[Dump]:
    """An error without a pid, and then the same one again with it, are one process that was asked twice."""
    named = {(dump.said.host, dump.error) for dump in found if dump.error is not None and dump.pid}
    for dump in found:
        if dump.error is None or dump.pid or (dump.said.host, dump.error) not in named:
            yield dump
