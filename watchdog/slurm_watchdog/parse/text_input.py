"""Reads what people have of a log: plain, packed, from standard input, in other encodings, with redrawn bars.

Gives blocks of whole lines as bytes in UTF-8 with `\n` alone at their ends, ready for
slurm_watchdog.parse.training_log.line_scan. A carriage return redraws a line: what it draws becomes lines of
their own here, and the block says which line of the file each one is.
"""

from __future__ import annotations

import codecs
import io
import os
import stat
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from itertools import pairwise
from typing import IO, Any, NamedTuple, TypeVar

from slurm_watchdog.base.late_regex import late_regex

T = TypeVar("T")

BLOCK_BYTES = 4 * 1024**2
LONGEST_LINE = 16 * 1024**2  # A line without an end is cut here, so that a file of one line cannot fill the memory.
_MAGIC: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "gzip", "open"),
    (b"BZh", "bz2", "BZ2File"),
    (b"\xfd7zXZ\x00", "lzma", "LZMAFile"),
)
_ZSTD = b"\x28\xb5\x2f\xfd"
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_PROBE = 4096
_OPEN_FILES = ("/dev/null", "/dev/stdin", "/dev/fd/", "/proc/self/fd/", "/dev/tty", "/dev/pts/")
_LOOKED_AT, _MOST_CONTROLS = 65_536, 0.02
"""Bytes that show whether a file is text; the share of control characters in one. In machine code, images and what is
packed they are 5 to 20 %; a bar that is redrawn, and colours, use those that are left out here."""
_CONTROLS = bytes(set(range(1, 32)) - set(b"\t\n\r\x1b\b\f\a\v")) + b"\x7f"
_BEHIND_BRACKET = late_regex(rb"\](?:[^\s\],|)\r:\[]|\[(?:rank|default|[EWI]\d{0,4} ))")
_BAR_ENDS = late_regex(rb"(?:\d[\w.]*/s|s/[a-z]+)(?:, [^\[\]\n]{0,300})?$")
"""A bar of tqdm ends so, and with a bracket; what follows at once is not of it."""
_BAR_BYTES = 320
_OF_SLURM = (b"slurmstepd: ", b"srun: ")
_BEFORE_SLURM = late_regex(
    rb"[^\s:\]/\w-](?=(?:slurmstepd|srun): (?:error|Job step|launch/slurm|forc|Terminat|\*\*\*))"
    rb"|[\da-z](?=(?:slurmstepd|srun): error: )"
)
MAX_GLUED = 10_000  # Of a block.


class Unreadable(Exception):
    """Why a file cannot be read, a sentence for people."""


class Block(NamedTuple):
    data: bytes
    first_line: int  # Of the file, counted from 1.
    numbers: array[int] | None = None
    """Of each line of `data` its line in the file, where redraws made more lines of one."""


def read_file(path: str, take: Callable[[Iterator[Block]], T], *, only_text: bool = False) -> tuple[T | None, str]:
    """(what `take` makes of a file's blocks, what is wrong with the file); `-` is standard input. None if it cannot be
    read, or is no text and has to be; a packed file that is cut short or damaged gives what could be unpacked."""
    damage: list[str] = []
    what = f"{path}: the archive is cut short or damaged; what could be unpacked was read"
    try:
        with opened(path) as file:
            blocks = _blocks(file, lambda: damage.append(what))
            return take(_text_alone(path, blocks) if only_text else blocks), "".join(damage[:1])
    except Unreadable as error:
        return None, str(error)


def _text_alone(path: str, blocks: Iterator[Block]) -> Iterator[Block]:
    """The blocks. Raises Unreadable if no text begins so, in any encoding. Zeros say nothing: a log cut while written
    begins with a hole."""
    for block in blocks:
        head = block.data[:_LOOKED_AT].replace(b"\0", b"") if block.first_line == 1 else b""
        if len(head) - len(head.translate(None, _CONTROLS)) > _MOST_CONTROLS * len(head):
            what = "is not text (a program, an image?): give the file that the job writes its output to"
            raise Unreadable(f"{path} {what}")
        yield block


def read_start(path: str, most: int) -> bytes:
    """So many bytes of a file, unpacked (as far as it can be), in its own encoding. Raises Unreadable."""
    parts: list[bytes] = []
    with opened(path) as file:
        while most > 0 and (part := _chunk(file, lambda: None)):
            parts.append(part[:most])
            most -= len(part)
    return b"".join(parts)


def text_of(data: bytes) -> str:
    """A whole file as text, whatever its encoding."""
    return data.decode(_encoding(data[:_PROBE]) or "utf-8", "replace").lstrip("\ufeff")


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """A file of which `read1` and `readline` give the unpacked bytes. Raises Unreadable, EOFError."""
    try:
        if path == "-":
            yield _unpack(sys.stdin.buffer, path)
            return
        _refuse_endless(path)
        with open(path, "rb") as file, closing(_unpack(file, path)) as unpacked:
            yield unpacked
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror or error}") from error


def _refuse_endless(path: str) -> None:
    """Raises Unreadable for a pipe that may have no writer (`/dev/fd/63`, of a shell, has one), and for devices."""
    mode = os.stat(path).st_mode
    if stat.S_ISFIFO(mode) and not path.startswith(("/dev/", "/proc/")):
        raise Unreadable(f"{path} is a pipe, which may have no writer: cat {path} | slurm-watchdog … -")
    if (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)) and not path.startswith(_OPEN_FILES):
        raise Unreadable(f"{path} is a device, not a file")
    if stat.S_ISSOCK(mode):
        raise Unreadable(f"{path} is a socket, not a file")


def _unpack(file: Any, path: str) -> Any:
    if not hasattr(file, "peek"):
        file = io.BufferedReader(file)
    head = file.peek(8)[:8]
    for magic, module, opener in _MAGIC:
        if head.startswith(magic):
            return getattr(import_module(module), opener)(file)
    if not head.startswith(_ZSTD):
        return file
    import shutil

    program = shutil.which("zstd")
    if program is None:
        raise Unreadable(f"{path} is packed with zstd, and the program zstd, which unpacks it, is not here")
    if path == "-" or not file.seekable():
        import tempfile

        stream, file = file, tempfile.TemporaryFile()  # noqa: SIM115 - as long as it is read
        shutil.copyfileobj(stream, file)
    return _Unpacking(program, file)


class _Unpacking:
    """A file that a program unpacks beside us; it ends with us."""

    def __init__(self, program: str, file: IO[bytes]) -> None:
        import subprocess

        os.lseek(file.fileno(), 0, os.SEEK_SET)
        self._process = subprocess.Popen(
            [program, "-dcq"], stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def read1(self, size: int) -> bytes:
        """At most `size` bytes; none at the end. Raises EOFError if the program could not unpack all."""
        return self._whole(self._process.stdout.read1(size))  # type: ignore[union-attr]

    def readline(self, size: int) -> bytes:
        """The same of a line."""
        return self._whole(self._process.stdout.readline(size))  # type: ignore[union-attr]

    def _whole(self, data: bytes) -> bytes:
        if not data and self._process.wait() != 0:
            raise EOFError
        return data

    def close(self) -> None:
        """Ends the program, if it has not ended by itself."""
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.kill()
        self._process.wait()


def _chunks(file: IO[bytes], on_damage: Callable[[], None]) -> Iterator[bytes]:
    """The file's bytes in UTF-8 (or in something whose line ends are the same)."""
    decoder: codecs.IncrementalDecoder | None = None
    first = True
    while chunk := _chunk(file, on_damage):
        if first:
            first, encoding = False, _encoding(chunk[:_PROBE])
            decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding else None
        if decoder is not None:
            yield decoder.decode(chunk).lstrip("\ufeff").encode("utf-8", "replace")
        else:
            yield chunk


def _damage() -> tuple[type[Exception], ...]:
    """What those who unpack raise for a file that is cut short or damaged; asked for only once something is raised."""
    import lzma
    import zlib

    return EOFError, zlib.error, lzma.LZMAError


def _chunk(file: Any, on_damage: Callable[[], None]) -> bytes:
    """The next bytes, BLOCK_BYTES where there are so many; of a packed file that is cut short what can be unpacked."""
    parts, size = [], 0
    while size < BLOCK_BYTES:
        try:
            part = file.read1(BLOCK_BYTES - size)
        except _damage():
            on_damage()
            break
        except OSError as error:
            if error.errno is not None:
                raise
            on_damage()
            break
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _encoding(head: bytes) -> str | None:
    """Of what is not read as it stands: UTF-16, with or without its mark, and UTF-8's mark."""
    for bom, name in _BOMS:
        if head.startswith(bom):
            return name
    # Text of ASCII letters in UTF-16: every second byte is zero. Holes in sparse logs are runs of zeros instead.
    odd, even = head[1::2].count(0), head[0::2].count(0)
    half = len(head) // 2
    if half >= 32 and odd > 0.8 * half and even < 0.1 * half:
        return "utf-16-le"
    if half >= 32 and even > 0.8 * half and odd < 0.1 * half:
        return "utf-16-be"
    return None


def _blocks(file: IO[bytes], on_damage: Callable[[], None]) -> Iterator[Block]:
    """Blocks of whole lines; a last line without an end is in the last of them, so that a small document is one."""
    rest, held, number = b"", b"", 1
    for chunk in _chunks(file, on_damage):
        if held:
            yield _block(held, number)
            number += held.count(b"\n")
            held = b""
        end = chunk.rfind(b"\n") + 1
        if not end and len(rest) + len(chunk) < LONGEST_LINE:
            rest += chunk
            continue
        end = end or len(chunk)
        held = b"".join((rest, memoryview(chunk)[:end])) if rest or end < len(chunk) else chunk
        rest = chunk[end:]
    if held or rest:
        yield _block(held + rest if rest else held, number)


def _block(data: bytes, number: int) -> Block:
    if b"\x00" in data:
        data = data.replace(b"\x00", b"")
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    glued = _places_of_glue(data)
    if b"\r" not in data and not glued:
        return Block(data, number)
    if glued:
        data = b"\r".join(data[begin:end] for begin, end in pairwise([0, *glued, len(data)]))
    numbers = array("q")
    for line in data.split(b"\n"):
        numbers.extend([number] * (line.count(b"\r") + 1))
        number += 1
    return Block(data.replace(b"\r", b"\n"), numbers[0], numbers)


def _places_of_glue(data: bytes) -> list[int]:
    """Where another writer's line begins behind one that has no end of its own, such as a bar that is drawn."""
    places: set[int] = set()
    brackets = [match.start() for match in _BEHIND_BRACKET.finditer(data)]
    if brackets and (b"/s" in data or b"s/" in data):  # there are seldom any, and to look for these takes longer
        for bracket in brackets:
            bar = data[max(0, bracket - _BAR_BYTES, data.rfind(b"\n", 0, bracket) + 1) : bracket]
            if (b"/s" in bar or b"s/" in bar) and _BAR_ENDS.search(bar):
                places.add(bracket + 1)
    if any(word in data for word in _OF_SLURM):
        places |= {match.end() for match in _BEFORE_SLURM.finditer(data)}
    return sorted(places)[:MAX_GLUED]
