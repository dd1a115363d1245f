"""Frames of stacks as py-spy, Python, gdb, pystack and PyTorch's flight recorder write them, one a line. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.model.evidence import Frame

_PY_FRAME = late_regex(r'\s*(?:\((?:Python|C)\)\s*)?File:? "(.*?)", line (\d+),? in (.+?)\s*$')
_GDB_FRAME = late_regex(r"\s*#(\d+)\s+(?:0x[0-9a-f]+ (?:in )?)?(.+)$")
"""eu-stack writes no `in`, with -m ` - /path/of/library` behind the function, and with -s the source below it."""
_GDB_PYTHON = late_regex(r"Frame 0x[0-9a-f]+, for file (.+?), line (\d+), in ([\w.<>]+)")
_RECORDED_FRAME = late_regex(r"\s*(?:#\d+\s+)?([\w.<>]+) from (\S+\.py):(\d+)\s*$")
_KERNEL_FRAME = late_regex(r"\s*\[<[0-9a-f]+>\] (?:([\w.]+)\+0x[0-9a-f]+/0x[0-9a-f]+(?: \[(\w+)\])?|0xf{16})\s*$")
"""A line of /proc/PID/stack; the last one of old kernels, and the only one of a task that runs, is an address."""
_ARGUMENTS = late_regex(r"\s{8,}\S")  # Below a frame of py-spy: arguments and locals.


def begins_program(frames: Sequence[Frame]) -> bool:
    """Whether a thread's outermost Python frame is that of a program: `python train.py`, `python -m train`."""
    python = (frame for frame in reversed(frames) if ".py" in frame.file or frame.file.startswith("<"))
    outermost = next(python, None)
    return outermost is not None and outermost.function in ("<module>", "_run_module_as_main")


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
    numbered = bool(colon) and digits.isdecimal() and len(digits) < 9
    number = int(digits) if numbered else 0
    file = file if numbered else inner
    code = re.search(r"\.(pyx?|pyc|so|c|cc|cpp|cu|h|hpp|rs|S)\b|^<.*>$|^lib|python[\d.]*$|^\[|^\?+$|^[\w./-]+$", file)
    if code is None or (line[:2] != "  " and (not number or " " in name or ".py" not in file)):
        return None
    if " " in file and not number and not re.search(r"\.(so|py)", file):
        return None
    if " " in name and not re.search(r"[:<(*]|operator|\[clone", name):
        return None
    return Frame(function=name[:300], file=file[:300], line=number)


def parse_frame_line(line: str, mode: str) -> Frame | None:
    """The frame in a line below a thread's header of this `mode` (see `ThreadHeader.mode`); None if it has none."""
    if mode == "spy":
        frame = parse_frame(line)
        return _recorded_frame(line) if frame is None and not _ARGUMENTS.match(line) else frame
    if mode == "kernel":
        return parse_kernel_frame(line)
    if (match := _PY_FRAME.match(line)) is not None:
        return Frame(function=match[3][:300], file=match[1][:300], line=int(match[2][:9]))
    if mode == "gdb":
        return _gdb_frame(line)
    return Frame(function="gc_collect_main", file="gcmodule.c") if "Garbage-collecting" in line else None


def belongs_to_frame(line: str, mode: str) -> bool:
    """Whether a line that is no frame belongs to the one before it: arguments, locals, a line of source."""
    if mode == "spy":
        return _ARGUMENTS.match(line) is not None
    if mode == "gdb":
        return _GDB_FRAME.match(line) is None and re.match(r"\s+(from|at|\S+=|\S+:\d+(:\d+)?$)", line) is not None
    source = re.match(r"\s{4,}\S|\s*<(?:built-in|method|no Python|unknown)\b", line)
    return source is not None or line.strip() == "..."


def is_first_gdb_frame(line: str) -> bool:
    """Whether a stack of gdb begins with this line."""
    match = _GDB_FRAME.match(line)
    return match is not None and match[1] == "0"


def parse_kernel_frame(line: str) -> Frame | None:
    """A function of the kernel, its module as the file; None if the line is no such frame."""
    match = _KERNEL_FRAME.match(line)
    if match is None:
        return None
    return Frame(function=(match[1] or "runs")[:300], file=f"[{match[2] or 'kernel'}]")


def _gdb_frame(line: str) -> Frame | None:
    match = _GDB_FRAME.match(line)
    if match is None:
        return None
    if (recorded := _recorded_frame(line)) is not None:
        return recorded
    if (python := _GDB_PYTHON.search(line)) is not None:
        return Frame(function=python[3], file=python[1].strip("\"'"), line=int(python[2][:9]))
    place = re.search(r"\) (?:at|from) (\S+?)(?::(\d+))?$", match[2])
    name = re.split(r" \((?!anonymous)| - /", match[2], maxsplit=1)[0][:300]
    if place is None:
        return Frame(function=name, file="??")
    return Frame(function=name, file=place[1], line=int((place[2] or "0")[:9]))


def _recorded_frame(line: str) -> Frame | None:
    match = _RECORDED_FRAME.match(line)
    return None if match is None else Frame(function=match[1], file=match[2], line=int(match[3][:9]))
