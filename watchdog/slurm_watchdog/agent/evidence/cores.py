"""Core files of a job: where the kernel puts them, which are this job's, and what a debugger reads out of them.

Found and read in a child that is the job's owner. The debugger gets no start-up file, loads nothing by itself
and asks no server; it has a deadline and bounds.

It is off by default (agent.core_debugger), and stays so until it is safe: it has to read files that only the
owner may open, so it runs as that user, and a process that has done exec may be taken over by its user. With
it a user's code would run in the unit of the helper.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import stat
import struct
from pathlib import Path

from slurm_watchdog.agent.evidence.tool import Means, run_tool
from slurm_watchdog.agent.workers.request_types import FindFiles, ReadCore
from slurm_watchdog.agent.workers.worker_state import WorkerState
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import opened
from slurm_watchdog.model.evidence import FoundFile

# Which program left a core file: the kernel notes in it which files were mapped, and where the program was entered.
# For a debugger that would else name no frame. Source: core(5), elf(5), the notes NT_AUXV and NT_FILE of Linux
# (include/uapi/linux/elf.h).

MAX_HEADERS = 64  # Of a core file so many headers are looked at; the kernel puts the notes first.
MAX_NOTES = 16 * 1024**2
_PT_NOTE = 4
_NT_AUXV = 6
_NT_FILE = 0x46494C45
_AT_ENTRY = 9
_HEADER_BYTES = 64
_PROGRAM_HEADER_BYTES = 56


def read_program(path: str) -> str | None:
    """The program of the core file at `path`, as its path was when it was started; None if the file does not
    say. Raises OSError."""
    with open(path, "rb") as file:
        head = file.read(_HEADER_BYTES + MAX_HEADERS * _PROGRAM_HEADER_BYTES)
        place = notes_of(head)
        if place is None:
            return None
        file.seek(place[0])
        return parse_program(file.read(min(place[1], MAX_NOTES)))


def notes_of(head: bytes) -> tuple[int, int] | None:
    """(offset, bytes) of the notes, from the beginning of a core file; None if it is no core file of 64 bits,
    little end first."""
    if len(head) < _HEADER_BYTES or head[:6] != b"\x7fELF\x02\x01" or head[16:18] != b"\x04\x00":
        return None
    (offset,) = struct.unpack_from("<Q", head, 32)
    size, number = struct.unpack_from("<HH", head, 54)
    if size < _PROGRAM_HEADER_BYTES:
        return None
    for place in range(offset, min(offset + size * number, len(head) - _PROGRAM_HEADER_BYTES + 1), size):
        kind, _, at, _, _, length = struct.unpack_from("<IIQQQQ", head, place)
        if kind == _PT_NOTE:
            return at, length
    return None


def parse_program(notes: bytes) -> str | None:
    """The mapped file that holds the program's entry; None if the notes do not tell, or are cut short."""
    entry, files = None, None
    at = 0
    while at + 12 <= len(notes):
        name_size, size, kind = struct.unpack_from("<III", notes, at)
        begin = at + 12 + _aligned(name_size)
        body = notes[begin : begin + size]
        if len(body) < size:
            break
        if kind == _NT_AUXV:
            entry = _entry(body)
        elif kind == _NT_FILE:
            files = body
        at = begin + _aligned(size)
    return _holding(files, entry) if entry is not None and files is not None else None


def _aligned(size: int) -> int:
    return (size + 3) & ~3


def _entry(auxv: bytes) -> int | None:
    for kind, value in struct.iter_unpack("<QQ", auxv[: len(auxv) & ~15]):
        if kind == _AT_ENTRY:
            return int(value)
    return None


def _holding(files: bytes, address: int) -> str | None:
    """The name of the mapping with `address`: a table of (start, end, offset), then the names, each ended by a zero."""
    if len(files) < 16:
        return None
    (count,) = struct.unpack_from("<Q", files)
    if count > (len(files) - 16) // 24:
        return None
    names = files[16 + 24 * count :].split(b"\x00")
    for number in range(count):
        start, end, _ = struct.unpack_from("<QQQ", files, 16 + 24 * number)
        if start <= address < end and number < len(names):
            return os.fsdecode(names[number]) or None
    return None


def usable(program: str | None) -> bool:
    """Whether a debugger can be given this file: there, ordinary, readable."""
    return program is not None and os.path.isfile(program) and os.access(program, os.R_OK)


MAX_ENTRIES = 8192  # Names that are looked at in one directory.
MAX_FOUND = 16
DEBUGGER_S = 20.0
DEBUGGER_MEANS = Means(seconds=DEBUGGER_S, output_bytes=1 << 20, address_space=2 << 30, cpu_s=20, processes=4096)
"""It maps the core file's libraries, of which PyTorch's have 1 GiB. Its user's own processes count, so their
number bounds little;
no capability, no file, no core file."""
FRAMES = 8  # Of each thread: the top.
MAX_THREADS = 12
SYSTEMD_PLACE = "/var/lib/systemd/coredump"
"""Where systemd-coredump(8) keeps them: core.NAME.UID.BOOT.PID.TIME, mostly compressed."""
_SPECIFIER = re.compile(r"%.")


def places(core_pattern: str, directories: list[str], uses_pid: bool = True) -> list[tuple[str, str]]:
    """(directory, pattern of names) where core files of a process may lie, for the text of
    /proc/sys/kernel/core_pattern and the working directories of the job. Empty where a program takes them
    that we do not know (see core(5))."""
    pattern = core_pattern.strip()
    if pattern.startswith("|"):
        return [(SYSTEMD_PLACE, "core.*")] if "systemd-coredump" in pattern else []
    if not pattern:
        return []
    name = _SPECIFIER.sub(lambda found: "%" if found[0] == "%%" else "*", pattern)
    directory, _, base = name.rpartition("/")
    patterns = [base, f"{base}.*"] if uses_pid and "*" not in base else [base]
    if directory.startswith("/") and "*" not in directory:
        return [(directory, each) for each in patterns]
    return [(where, each) for where in directories for each in patterns] if not directory else []


def find_cores(request: FindFiles) -> list[FoundFile]:
    """Every core file of the owner that is not older than the job, newest first. A directory that cannot be read
    is no error: nothing is there."""
    wall = clock.wall()
    found: dict[str, FoundFile] = {}
    for directory, pattern in request.places:
        try:
            with os.scandir(directory) as entries:
                for number, entry in enumerate(entries):
                    if number >= MAX_ENTRIES:
                        break
                    if not fnmatch.fnmatchcase(entry.name, pattern):
                        continue
                    about = entry.stat(follow_symlinks=False)
                    age_s = wall - about.st_mtime
                    mine = about.st_uid == request.uid or f".{request.uid}." in entry.name
                    if stat.S_ISREG(about.st_mode) and mine and age_s <= request.max_age_s and _is_core(entry):
                        found[entry.path] = FoundFile(
                            kind="core", path=entry.path, size_bytes=about.st_size, age_s=max(0.0, age_s)
                        )
        except OSError:
            continue
    return sorted(found.values(), key=lambda each: each.age_s)[:MAX_FOUND]


def _is_core(entry: os.DirEntry[str]) -> bool:
    """Whether it begins as a core file does (ELF, type 4), or is one that was compressed by systemd."""
    if entry.name.endswith((".zst", ".lz4", ".xz")):
        return True
    try:
        with opened(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            head = os.read(fd, 18)
    except OSError:
        return False
    return head[:4] == b"\x7fELF" and head[16:18] in (b"\x04\x00", b"\x00\x04")


def read_core(request: ReadCore, worker: WorkerState) -> list[str]:
    """The top frames of each thread of a core file, as gdb prints them, with the program that the file names.

    Raises OSError with the reason: no debugger, no answer in time.
    """
    gdb = shutil.which("gdb", path="/usr/bin:/bin:/usr/local/bin")
    if gdb is None:
        raise OSError(0, "no debugger (gdb) is installed here")
    safe = ["-nx", "-nh", "-batch", "-iex", "set auto-load off", "-iex", "set debuginfod enabled off"]
    command = [gdb, *safe, "-ex", f"thread apply all bt {FRAMES}"]
    program, why_not = _program_of(request.path, request.program)
    command += [program] if program is not None else []
    command += ["-c", request.path]
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "LC_ALL": "C"}
    ran = run_tool(command, DEBUGGER_MEANS, environment)
    if ran.problem is not None:
        raise OSError(0, f"the debugger gave no answer: {ran.problem}")
    lines = list(parse_backtraces(ran.out.decode(errors="replace")))
    return lines if why_not is None else [why_not, *lines]


def _program_of(path: str, neighbours: str | None) -> tuple[str | None, str | None]:
    """(the program to give to the debugger, why there is none or not the right one)."""
    try:
        own = read_program(path)
    except OSError:
        own = None
    if usable(own):
        return own, None
    if usable(neighbours):
        return neighbours, None
    if own is not None:
        why = f"{own}, the program that left this core file, is not readable on this node"
    else:
        why = "this core file does not say which program left it, and no rank lives whose program it could be"
    return None, f"frames have no names: {why}"


def parse_backtraces(text: str) -> tuple[str, ...]:
    """What matters in gdb's output: how the program ended, and each thread's frames."""
    kept: list[str] = []
    threads = 0
    for line in text.splitlines():
        threads += line.startswith("Thread ")
        shown = threads <= MAX_THREADS and line.startswith(("Thread ", "#"))
        if shown or line.startswith(("Program terminated", "Core was generated by")):
            kept.append(line[:300])
    return tuple(kept)


def read_pattern() -> tuple[str, bool]:
    """(/proc/sys/kernel/core_pattern, whether the pid is appended); empty where it cannot be read."""
    try:
        uses_pid = Path("/proc/sys/kernel/core_uses_pid").read_text().strip() == "1"
        return Path("/proc/sys/kernel/core_pattern").read_text(), uses_pid
    except OSError:
        return "", False
