"""Which program left a core file: the kernel notes in it which files were mapped, and where the program was entered.

For a debugger that would else name no frame. Source: core(5), elf(5), the notes NT_AUXV and NT_FILE of Linux
(include/uapi/linux/elf.h).
"""

from __future__ import annotations

import os
import struct
from typing import Final

MAX_HEADERS: Final = 64
"""Of a core file so many headers are looked at; the kernel puts the notes first."""
MAX_NOTES: Final = 16 * 1024**2
_PT_NOTE: Final = 4
_NT_AUXV: Final = 6
_NT_FILE: Final = 0x46494C45
_AT_ENTRY: Final = 9
_HEADER_BYTES: Final = 64
_PROGRAM_HEADER_BYTES: Final = 56


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
