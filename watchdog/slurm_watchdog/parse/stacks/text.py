"""Reads stacks as people have them: py-spy's text and JSON, faulthandler, gdb, pystack; many in one text,
with prefixes, in prose.

Nothing here judges. What is no stack is passed over; what says who is dumped (a header, a prefix, a command
line) is kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.model.evidence import Frame, ThreadStack
from slurm_watchdog.parse.stacks import frame_lines
from slurm_watchdog.parse.stacks.headers import Dump, DumpHeader, header_below_rule, is_rule, parse_header, parse_prefix
from slurm_watchdog.parse.stacks.py_spy_json import parse_documents, parse_labelled

# Headers of threads: py-spy's, faulthandler's, gdb's, eu-stack's, pystack's, those of people.
_SPY_THREAD = late_regex(r'\s*Thread (0x[0-9A-Fa-f]+|\d+)(?: \(([\w+ -]*)\))?(?:: "(.*?)"?)?\s*$')
_FAULT_THREAD = late_regex(
    r"\s*(?:Current thread|Thread) (0x[0-9A-Fa-f]+|\d+|[\w-]+)(?:,? ?[\[(](.*?)[\])])? \(most recent "
    r"call (first|last)\):?"
)
_PYSTACK_THREAD = late_regex(
    r"\s*Traceback for thread (\d+)(?: \((.*?)\))?(?: \[(.*?)\])? \(most recent call (first|last)\):?"
)
_GDB_THREAD = late_regex(r'\s*Thread (\d+) \((?:Thread 0x[0-9a-f]+ )?\(?(?:LWP|process) (\d+)\)?\)?(?: "(.*?)")?\)?:')
_EU_STACK_THREAD = late_regex(r"\s*TID (\d+):\s*$")
_LOOSE_THREAD = late_regex(
    r"""\s*(?:#\s*|-+\s*)?(?:Stack (?:of|for) )?(?:[Tt]hread)(?:ID| ID| name)?[:=]?\s*["']?([A-Za-z][\w-]*?)"""
    r"""["']?\s*\(?(?:ident|id|tid)?[=: ]*(\d+|0x[0-9a-f]+)?[^)]*\)?:?\s*-*$"""
)


class ThreadHeader(NamedTuple):
    """A thread whose frames follow."""

    thread_id: int  # 0 if unknown.
    name: str
    mode: str
    """How its frames are written: `spy`, `gdb`, `fault` and `first` (the innermost first), `last` (the outermost)."""
    active: bool = False
    owns_gil: bool = False
    may_share: bool = False
    """A main thread of py-spy: several headers one below the other may share the frames after them."""
    main_pid: int | None = None  # Of gdb's main thread, the pid of the process.

    def thread(self) -> ThreadStack:
        """The thread, still without frames."""
        name = self.name[:200] if "most recent" not in self.name else ""
        return ThreadStack(thread_id=self.thread_id, name=name, active=self.active, frames=(), owns_gil=self.owns_gil)


def may_be_thread_header(line: str) -> bool:
    """Whether one of the words is in the line without which it begins no thread: most lines end here."""
    return "hread" in line or "Traceback" in line or "(gdb)" in line or "#0 " in line or "[<" in line or "TID " in line


def parse_thread_header(line: str) -> ThreadHeader | None:
    """The thread that a line of a tool begins; None if it begins none."""
    if (match := _SPY_THREAD.match(line)) is not None:
        status, name = match[2] or "", match[3] or ""
        return ThreadHeader(_number(match[1]), name, "spy", "active" in status, "gil" in status, name == "MainThread")
    if (match := _PYSTACK_THREAD.match(line)) is not None:
        mode = "first" if match[4] == "first" else "last"
        return ThreadHeader(_number(match[1]), "", mode, owns_gil="Has the GIL" in line)
    if (match := _FAULT_THREAD.match(line)) is not None:
        named = match[2] or ("" if match[1][:1].isdigit() else match[1])
        return ThreadHeader(_number(match[1]), named, "fault" if match[3] == "first" else "last")
    if (match := _GDB_THREAD.match(line)) is not None:
        main = match[1] == "1"
        name = "MainThread" if main else (match[3] or f"Thread-{match[1]}")
        main_pid = int(match[2]) % 2**31 if main else None
        return ThreadHeader(_number(match[2]), name, "gdb", main_pid=main_pid)
    if (match := _EU_STACK_THREAD.match(line)) is not None:
        return ThreadHeader(_number(match[1]), "", "gdb")
    return None


def parse_loose_thread_header(line: str) -> ThreadHeader | None:
    """A header as people write it: `Thread: MainThread (id 12)`, `--- thread loader ---`."""
    match = _LOOSE_THREAD.match(line) if "Traceback" not in line else None
    return None if match is None else ThreadHeader(_number(match[2] or "0"), match[1], "last")


def _number(text: str) -> int:
    """A thread's number, decimal or hexadecimal, as far as 63 bits hold it; 0 for a name."""
    plain = re.fullmatch(r"0x[0-9A-Fa-f]+|[1-9]\d*|0", text)
    return int(text, 0) % 2**63 if plain else 0


MAX_FRAMES = 200
MAX_LINE = 4000
JSON_ATTEMPTS = 64

_LABEL_AT_BEGIN = late_regex(r"(?m)^( {0,5}\d{1,6}): ")
_BEFORE_ALL = (
    late_regex(r"(?m)^> ?"),
    late_regex(r"(?m)^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)? "),
)
"""What a letter and a log with times have before most lines."""
_ESCAPES = late_regex(r"\x1b\[[0-9;?]*[A-Za-z]")
_PROCESS = late_regex(r"\s*Process (\d+)(?::\s?(.*))?$")
_EU_STACK_PROCESS = late_regex(r"\s*PID (\d+) - (?:process|core)()\s*$")
_PARENT = late_regex(r"\s*Parent Process (\d+)")
_ERROR = late_regex(
    r"\s*(?:Error:\s*)?((?:Failed to (?:suspend|get|attach|find|copy|open|read|lock)|Permission [Dd]enied"
    r"|Operation not permitted|"
    r"No such process|[Tt]imed out|[Tt]imeout|Killed|Terminated|Could not attach|Cannot attach|ptrace"
    r"|EPERM|Couldn't|Process \d+ (?:not|does)|"
    r"(?:os )?error |No python|The process|process \d+ (?:is|has)|py-spy: (?!command)).*)"
)
_ANY_ERROR = late_regex(r"\s*(?:Error|ERROR|error):\s*(.+)")
_REASON = late_regex(r"\s*(?:Reason|Caused by):\s*(.+)")
_DUMP_ASKED = late_regex(r"\b(?:dump|remote)\b")
_DUMPED_PID = late_regex(r"(?:--pid|-p|remote)[ =](\d{2,8})\b")
_GDB_PID = late_regex(r"-p ?(\d{1,9})")
_RANK_BEFORE_COMMAND = late_regex(
    r"(?i)\W*(?:global )?rank[ _:=#-]*(\d{1,6})\W+(?:\(gdb\)|Timeout \(|Fatal Python|Attaching|\$|sudo"
    r"|py-spy|gdb|pystack|thread apply|kill|"
    r"dumping|stack trace).*"
)


def parse_stacks(text: str, source: str = "") -> list[Dump]:
    """Every dump in a text, in its order; none if there is none. Anything may be given, nothing is raised."""
    text = text.replace("\x00", "")
    if "\x1b" in text:
        text = _ESCAPES.sub("", text)
    for pattern in _BEFORE_ALL:
        if pattern.match(text) and 2 * len(pattern.findall(text)) >= text.count("\n"):
            text = pattern.sub("", text)
    labelled, text = parse_labelled(_unpadded(text))
    reader = _Reader(source, prose="```" in text)
    reader.documents(labelled)
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


class _Stream:
    """What one prefix (or none) is saying at the moment."""

    def __init__(self) -> None:
        self.header = DumpHeader()
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
        self.fatal = False
        """Whether faulthandler wrote because of a signal that ends the process."""
        self.below_rule = False
        """Whether the line before was nothing but dashes."""


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

    def documents(self, dumps: list[Dump]) -> None:
        """Dumps that stood there as JSON."""
        self._end_process(self.plain)
        for dump in dumps:
            self._add(replace(dump, header=self.plain.header.overlaid(dump.header)))

    def line(self, line: str) -> None:
        if line[:4] == "    " and self.plain.open and self._frame(self.plain, line):
            return
        prefix, header, rest = parse_prefix(line, self.streams)
        stream = self._stream(prefix)
        if header is not None and stream.header != header and not stream.threads and not stream.open:
            stream.header = stream.header.overlaid(header)
        if not self._structural(stream, rest):
            self._other_line(stream, rest)
        stream.below_rule = is_rule(rest)

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
        if (match := _PROCESS.match(line) or _EU_STACK_PROCESS.match(line)) is not None:
            self._end_process(stream)
            stream.pid, stream.command = int(match[1]) % 2**31, (match[2] or "")[:MAX_LINE]
            stream.asked = 0
            return True
        if (match := _PARENT.match(line)) is not None:
            stream.parent = int(match[1]) % 2**31
            return True
        return line.startswith(("Python v", "Python 3"))

    def _header_of_thread(self, stream: _Stream, line: str) -> bool:
        if not may_be_thread_header(line):
            return False
        in_gdb_thread = stream.mode == "gdb" and bool(stream.open)
        if (header := parse_thread_header(line)) is not None:
            self._begin(stream, header)
            if header.main_pid is not None:
                stream.asked_pid = header.main_pid
        elif "Traceback (most recent call first)" in line:
            if not in_gdb_thread:
                self._begin(stream, ThreadHeader(0, "MainThread", "first"))
        elif frame_lines.is_first_gdb_frame(line) and not in_gdb_thread:
            self._begin(stream, ThreadHeader(0, "", "gdb"))
            return self._frame(stream, line)
        elif not stream.threads and not stream.open and frame_lines.parse_kernel_frame(line) is not None:
            self._begin(stream, ThreadHeader(0, "", "kernel"))
            return self._frame(stream, line)
        elif (loose := parse_loose_thread_header(line)) is not None:
            self._begin(stream, loose)
        else:
            return False
        return True

    def _begin(self, stream: _Stream, header: ThreadHeader) -> None:
        """Begins a thread. Headers of main threads one below the other share the next frames: people write so."""
        together = header.may_share and stream.mode == "spy" and bool(stream.open) and not stream.frames
        if not together or stream.open[-1].name != header.name:
            self._end_thread(stream)
        stream.open.append(header.thread())
        stream.mode = header.mode

    def _frame(self, stream: _Stream, line: str) -> bool:
        """Whether the line belongs to the frames of the open thread; a frame is kept."""
        if stream.mode == "gdb" and stream.frames and frame_lines.is_first_gdb_frame(line):
            self._begin(stream, ThreadHeader(0, "", "gdb"))
        frame = frame_lines.parse_frame_line(line, stream.mode)
        if frame is None:
            return frame_lines.belongs_to_frame(line, stream.mode)
        if len(stream.frames) < MAX_FRAMES:
            stream.frames.append(frame)
        return True

    def _other_line(self, stream: _Stream, line: str) -> None:
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
        command_of_rank = _RANK_BEFORE_COMMAND.match(line)
        header = parse_header(line) if command_of_rank is None else DumpHeader(rank=int(command_of_rank[1]))
        if header is None and stream.below_rule and not self.prose:
            header = header_below_rule(line)
        if header is not None:
            self._end_process(stream)
            stream.asked = None
            stream.header = stream.header.followed_by(header)
            stream.pid = header.pid or 0
        elif (pid := _asked_pid(line)) is not None:
            self._end_process(stream)
            stream.asked, stream.asked_pid = 0, pid
        elif re.match(r"\s*(Fatal Python error|Timeout \(\d|Attaching to|\[New LWP)", line):
            if stream.threads:
                self._end_process(stream)
            stream.fatal = line.lstrip().startswith("Fatal")
            attached = re.search(r"process (\d+)", line)
            stream.asked_pid = int(attached[1][:9]) if attached else stream.asked_pid

    def _end_thread(self, stream: _Stream) -> None:
        frames = tuple(stream.frames if stream.mode != "last" else reversed(stream.frames))
        opened, stream.open, stream.frames = stream.open, [], []
        for thread in opened:
            self._add_thread(stream, replace(thread, frames=frames))

    def _add_thread(self, stream: _Stream, thread: ThreadStack) -> None:
        """Into the process at hand, or a new one: none has two main threads, and some tools print the main one last."""
        main = _is_main(thread)
        has_main = any(_is_main(each) for each in stream.threads)
        last = stream.mode in ("fault", "gdb") and has_main
        if stream.threads and (last or (main and has_main)):
            same_process = main and not last and bool(thread.thread_id) and stream.pid == thread.thread_id
            self._end_process(stream, keep_pid=same_process)
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
                    if not self.prose and (stream.command or stream.header.rank is not None)
                    else None
                )
            if stream.threads or error is not None:
                self._add(
                    Dump(
                        header=stream.header,
                        pid=pid,
                        parent=stream.parent,
                        command=stream.command,
                        threads=_crashing(stream.threads) if stream.fatal else tuple(stream.threads),
                        error=None if stream.threads else error,
                    )
                )
        if not keep_pid:
            stream.pid, stream.command = 0, ""
        stream.parent, stream.asked_pid = 0, 0
        stream.threads, stream.error, stream.fatal = [], None, False

    def _add(self, dump: Dump) -> None:
        self.found.append(replace(dump, source=self.source, at=len(self.found)))

    def end(self) -> list[Dump]:
        for stream in self.streams.values():
            self._end_process(stream)
        return list(_without_doubled_errors(self.found))


def _crashing(threads: Sequence[ThreadStack]) -> tuple[ThreadStack, ...]:
    """With the frame of faulthandler in the main thread, whichever received the signal: the process ends."""
    main = next((each for each in threads if _is_main(each)), threads[0] if threads else None)
    handler = Frame(function="faulthandler_fatal_error", file="faulthandler.c")
    return tuple(replace(each, frames=(handler, *each.frames)) if each is main else each for each in threads)


def _asked_pid(line: str) -> int | None:
    """Of a command line that dumps a process, its pid, 0: it does not say; None for any other line. In linear time."""
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
    return not thread.name and frame_lines.begins_program(thread.frames)


def _pid_of(stream: _Stream) -> int:
    """The id of the main thread is the pid, if it is the kernel's: pthread's ids are large."""
    for thread in stream.threads:
        if _is_main(thread) and 0 < thread.thread_id < 2**23:
            return thread.thread_id
    return 0


def _without_doubled_errors(found: list[Dump]) -> Iterator[Dump]:
    """An error without a pid, and then the same one again with it, are one process that was asked twice."""
    named = {(dump.header.host, dump.error) for dump in found if dump.error is not None and dump.pid}
    for dump in found:
        if dump.error is None or dump.pid or (dump.header.host, dump.error) not in named:
            yield dump
