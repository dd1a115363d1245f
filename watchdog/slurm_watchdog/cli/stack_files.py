"""Files with stacks, as people have them: directories, archives, packed, of any encoding; into the dumps in them."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.cli.terminal import clean, count

if TYPE_CHECKING:
    from slurm_watchdog.parse.stacks.dump import Dump

MAX_FILES: Final = 20_000
MAX_FILE_BYTES: Final = 64 << 20
MAX_TOTAL_BYTES: Final = 2 << 30
MAX_DEPTH: Final = 6
MAX_DUMPS: Final = 200_000
MAX_WORDS: Final = 65_536
"""Characters of a file without stacks in which its first words are looked for."""
GZIP_MAGIC: Final = b"\x1f\x8b"
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"


class StackFiles(Struct, frozen=True, kw_only=True):
    """What files hold."""

    dumps: list[Dump]
    """In an order that does not depend on the order of the paths."""
    unreadable: list[str]
    """What could not be read, and why."""
    spoilt: list[str]
    """What was read in part, or not, because it is broken, and how. The other files are not affected."""
    recorded: int = 0
    """Files that hold no stacks, but what a rank recorded of its collectives."""


def read_stack_files(paths: Sequence[str]) -> StackFiles:
    """Every dump in files, in directories of them, or on standard input (`-`)."""
    from slurm_watchdog.parse.stacks.text import parse_stacks

    texts: dict[str, str] = {}
    unreadable: list[str] = []
    recorded = total = 0
    for name, path in files_in(paths, unreadable):
        try:
            data = _bytes_of(path)
        except OSError as error:
            unreadable.append(f"{clean(path)} can't be read: {clean(error.strerror or error)}")
            continue
        total += len(data)
        if total > MAX_TOTAL_BYTES:
            unreadable.append(f"{clean(path)} and what follows was left out: more than {MAX_TOTAL_BYTES >> 30} GiB")
            break
        for part, content in _parts(name, data):
            if _is_flight_record(content):
                recorded += 1
                continue
            texts[part if part not in texts else f"{path}/{part}"] = _text_of(content)
    dumps: list[Dump] = []
    parsed = {name: parse_stacks(texts[name], name) for name in sorted(texts)}
    told = {_labels_of_file(name) for name, found in parsed.items() if found}
    spoilt = [f"{clean(name)}: {why}" for name, found in parsed.items() if (why := _spoilt(texts[name], found))]
    for name, found in parsed.items():
        # Beside a rank's stacks there may be other files of it: they are no ranks.
        dumps += found or ([] if _labels_of_file(name) in told else _no_dump(name, texts[name], len(texts)))
    dumps = list(islice((each for dump in dumps for each in _of_each_node(dump)), MAX_DUMPS))
    return StackFiles(dumps=dumps, unreadable=unreadable, spoilt=spoilt, recorded=recorded)


def _spoilt(text: str, found: Sequence[Dump]) -> str:
    """How a file of JSON is broken; empty if it is whole, or none."""
    from slurm_watchdog.parse.stacks.py_spy_json import why_broken

    whole = found and text.rstrip().endswith(("]", "}"))
    why = "" if whole else why_broken(text)
    return f"{why}; of what is whole in it {count(len(found), 'dump was', 'dumps were')} read" if why and found else why


def _is_flight_record(data: bytes) -> bool:
    """Whether it is a dump of PyTorch's Flight Recorder: a pickle, or JSON with entries of communicators."""
    pickled = data[:1] == b"\x80" and data[1:2] in b"\x02\x03\x04\x05"
    return (pickled or data[:1] == b"{") and b"entries" in data and (b"pg_config" in data or b"process_group" in data)


def _of_each_node(dump: Dump) -> Iterator[Dump]:
    """A dump that several nodes wrote alike (`gpu[01-02]`, as `clush -b` and `dshbak -c` print it) is one of each."""
    from msgspec.structs import replace

    from slurm_watchdog.slurm.fields import ParseError
    from slurm_watchdog.slurm.node_names import expand_nodes

    if "[" not in dump.header.host and "," not in dump.header.host:
        yield dump
        return
    try:
        nodes = expand_nodes(dump.header.host)
    except ParseError:
        nodes = (dump.header.host,)
    for node in nodes:
        yield replace(dump, header=replace(dump.header, host=node))


def _labels_of_file(name: str) -> tuple[object, ...]:
    from slurm_watchdog.parse.stacks.headers import header_of_file

    header = header_of_file(name)
    return (header.host, header.rank, header.local_rank, header.label)


def files_in(paths: Sequence[str], unreadable: list[str]) -> Iterator[tuple[str, str]]:
    """(the part of its name that may say whose it is, its path), for each file."""
    given = sorted(set(paths))
    common = os.path.commonpath([str(Path(path).absolute().parent) for path in given if path != "-"] or ["/"])
    seen = 0
    for path in given:
        if path == "-":
            yield "standard input", path
            continue
        if not Path(path).is_dir():
            yield os.path.relpath(Path(path).absolute(), common), path
            continue
        base = Path(path).absolute()
        for folder, folders, files in os.walk(base, onerror=lambda e: unreadable.append(f"{clean(e)}")):
            depth = len(Path(folder).relative_to(base).parts)
            folders[:] = sorted(each for each in folders if not each.startswith(".")) if depth < MAX_DEPTH else []
            for file in sorted(each for each in files if not each.startswith(".")):
                seen += 1
                if seen > MAX_FILES:
                    unreadable.append(f"{clean(path)} holds more than {MAX_FILES} files: the others were left out")
                    return
                whole = Path(folder) / file
                if whole.is_file():
                    name = str(whole.relative_to(base))
                    yield (name if len(given) == 1 else f"{os.path.relpath(base, common)}/{name}"), str(whole)


def _bytes_of(path: str) -> bytes:
    """The beginning of a file, unpacked as far as it can be. Raises OSError."""
    if path == "-":
        data = sys.stdin.buffer.read(MAX_FILE_BYTES)
    else:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES)
    if data.startswith(ZSTD_MAGIC):
        return _without_zstd(data)
    if not data.startswith(GZIP_MAGIC):
        return data
    found = b""
    while data.startswith(GZIP_MAGIC) and len(found) < MAX_FILE_BYTES:
        unpacker = zlib.decompressobj(31)
        try:
            found += unpacker.decompress(data, MAX_FILE_BYTES)
        except zlib.error:
            break
        data = unpacker.unused_data
    return found


def _without_zstd(data: bytes) -> bytes:
    """Unpacked by the program zstd. Raises OSError if there is none or it fails."""
    program = shutil.which("zstd")
    if program is None:
        raise OSError("it is packed with zstd, and the program zstd is not here")
    try:
        done = subprocess.run([program, "-dcq"], input=data, capture_output=True, timeout=60.0, check=False)
    except subprocess.TimeoutExpired:
        raise OSError("zstd did not come back") from None
    if not done.stdout:
        raise OSError("zstd can't unpack it")
    return done.stdout[:MAX_FILE_BYTES]


def _parts(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """The file itself, or if it is an archive (a bundle of an incident) the files in it."""
    if data[257:262] != b"ustar":
        yield name, data
        return
    with suppress(tarfile.TarError, EOFError, OSError), tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for index, member in enumerate(archive):
            file = archive.extractfile(member) if member.isfile() and index < MAX_FILES else None
            if file is not None:
                yield member.name, file.read(MAX_FILE_BYTES)


def _text_of(data: bytes) -> str:
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8-sig", errors="replace")


def _no_dump(name: str, text: str, files: int) -> list[Dump]:
    """A file of one rank or node without any stack is a rank that could not be dumped, if its name says whose it is."""
    from slurm_watchdog.parse.stacks.dump import Dump
    from slurm_watchdog.parse.stacks.headers import header_of_file
    from slurm_watchdog.parse.stacks.py_spy_json import why_broken

    header = header_of_file(name)
    if files < 2 or (header.rank is None and not header.host and header.label is None):
        return []
    if broken := why_broken(text):
        return [Dump(source=name, error=broken)]
    words = next((line.strip() for line in text[:MAX_WORDS].splitlines() if line.strip()), "")
    plain = words.isprintable() and "\ufffd" not in words
    error = words[:200] if words and plain else "its file holds no stack" if text else "its file is empty"
    return [Dump(source=name, error=error)]
