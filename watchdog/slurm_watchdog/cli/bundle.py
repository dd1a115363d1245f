"""`explain --bundle`: an incident with all its evidence as one file, for a colleague, a vendor, or the day after.

Readable text where people look, JSON beside it for programs. What looks like a secret is masked again on
its way out; the names of files are made of harmless letters only.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import zlib
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from typing import IO, Any, Final

from slurm_watchdog import __version__
from slurm_watchdog.base import clock
from slurm_watchdog.base.redact import mask_line
from slurm_watchdog.cli.client import ClientError
from slurm_watchdog.cli.terminal import moment

MAX_NAME: Final = 80
MAX_UNPACKED: Final = 32 << 20
"""Of one Flight Recorder dump."""
INDEXED: Final = ("at", "kind", "number", "incident", "taken")
"""What `incident.json` has of each piece of evidence."""
ENDINGS: Final = (".tar.zst", ".tar.gz", ".tgz", ".tar")

File = tuple[str, bytes]
Fetch = Callable[[Any], Any]
"""The document of one piece of an explanation's evidence."""

HEAD: Final = """\
Incident {id} as slurm-watchdog kept it. What is in this folder, every file of it:

"""
FOOT: Final = """
stacks/ holds the newest dump of every rank, a file each: slurm-watchdog group-stacks THIS_FOLDER/stacks
"""
WHAT_IT_IS: Final = (
    ("README.txt", "this list"),
    ("manifest.json", "names and sizes, for programs"),
    ("incident.json", "who, since when, why, what was decided and done"),
    ("timeline.txt", "the same as lines"),
    ("diagnosis*.json", "groups of ranks, who stands out, what differs"),
    ("job*.json", "what the controller knew of the job when the incident began"),
    ("stacks/*", "newest dump of this rank, for group-stacks"),
    ("*/stacks*.txt", "newest dump, as py-spy prints it"),
    ("*/state*.txt", "its threads in the kernel"),
    ("*/sockets*.txt", "its connections"),
    ("*/environment*.txt", "its variables, those that look like secrets masked"),
    ("*/evidence*.json", "everything of this process, with all dumps"),
    (
        "*/flight_recorder*.pickle",
        "slurm-watchdog diagnose reads it; else it can run code, as any pickle",
    ),
    ("*/kernel*.txt", "last lines of the node's kernel log"),
    ("*/settings*.txt", "versions and settings of the node"),
    ("*/log-*.txt", "the end of a log"),
    ("*.core*.txt", "what a core file says"),
    ("*/node*.json", "the rest of what the node answered"),
)
"""(pattern, what such a file is); the first that matches a name describes it."""


def check_name(path: str) -> None:
    """Raises ClientError for a name whose ending says no kind of file that can be written here, or that is taken."""
    if not path.endswith(ENDINGS):
        raise ClientError(
            f"{path!r} is no name of a bundle: it ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}.",
            http_status=400,
        )
    if path.endswith(".zst") and _zstd() is None:
        raise ClientError(
            "There is neither Python 3.14 nor the program zstd here to write .tar.zst.",
            "Install zstd, or take a name that ends in .tar.gz",
            http_status=400,
        )
    if os.path.lexists(path):
        raise ClientError(f"{path} is there already.", "Take another name, or remove it first", http_status=400)


def write_bundle(path: str, explanation: Any, fetch: Fetch) -> int:
    """Writes the bundle of one incident; returns how many files are in it. Raises ClientError; leaves no half
    of a file."""
    check_name(path)
    made_at = clock.wall()
    incident_id = explanation["incident"]["id"]
    top = f"incident-{safe_name(str(incident_id))}"
    listed: list[dict[str, Any]] = []
    partial = f"{path}.partial"
    try:
        with _open(partial, path) as raw, tarfile.open(fileobj=raw, mode="w|") as tar:
            for name, data in bundle_files(explanation, fetch):
                _add(tar, f"{top}/{name}", data, made_at)
                listed.append({"name": name, "bytes": len(data)})
            about = readme(incident_id, [each["name"] for each in listed])
            _add(tar, f"{top}/README.txt", about, made_at)
            listed.append({"name": "README.txt", "bytes": len(about)})
            manifest = {
                "incident": incident_id, "made_at": made_at, "made_by": f"slurm-watchdog {__version__}",
                "files": listed,
            }  # fmt: skip
            _add(tar, f"{top}/manifest.json", _json(manifest), made_at)
        os.rename(partial, path)
    except (OSError, tarfile.TarError) as error:
        raise ClientError(f"The bundle {path} could not be written: {error}.") from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial)
    return len(listed) + 1


def bundle_files(explanation: Any, fetch: Fetch) -> Iterator[File]:
    """(name, content) of every file of the bundle but README and manifest; one node's evidence in memory at a time."""
    pieces = explanation.get("evidence", [])
    index = [{key: piece[key] for key in INDEXED if key in piece} for piece in pieces]
    yield "incident.json", _json(explanation | {"evidence": index})
    yield (
        "timeline.txt",
        _lines(f"{moment(each['at'])}  {each['text']}" for each in explanation.get("timeline", [])),
    )
    numbers: dict[str, int] = {}
    for piece in pieces:
        document = piece.get("document")
        if document is None and piece.get("number") is not None:
            document = fetch(piece)
        kind = safe_name(str(piece["kind"]))
        if piece["kind"] == "node" and isinstance(document, dict):
            yield from _unique(node_files(document), numbers)
        else:
            yield from _unique([(f"{kind}.json", _json(document))], numbers)


def readme(incident_id: str, written: Sequence[str]) -> bytes:
    """The README of a bundle: each file in it with a description."""
    names = ["README.txt", "manifest.json", *written]
    width = max(len(name) for name in names)
    lines = (f"{name:{width}}  {what_it_is(name)}".rstrip() + "\n" for name in names)
    foot = FOOT if any(name.startswith("stacks/") for name in written) else ""
    return (HEAD.format(id=incident_id) + "".join(lines) + foot).encode()


def what_it_is(name: str) -> str:
    """A few words about a file of the bundle, by its name."""
    return next((words for pattern, words in WHAT_IT_IS if fnmatch(name, pattern)), "")


def _unique(files: Iterator[File] | list[File], numbers: dict[str, int]) -> Iterator[File]:
    """A name that was given before gets a number: two collections of one incident do not hide each other."""
    for name, data in files:
        seen = numbers[name] = numbers.get(name, 0) + 1
        if seen > 1:
            stem, dot, ending = name.rpartition(".")
            name = f"{stem}-{seen}{dot}{ending}"
        yield name, data


def node_files(node: dict[str, Any]) -> Iterator[File]:
    """What one node answered, as files below its name."""
    place = safe_name(str(node.get("node", "node")))
    by_rank: dict[Any, str] = {}
    for each in node.get("ranks", []):
        folder = f"{place}/{folder_of(each)}"
        by_rank[each.get("rank")] = folder if each.get("role") == "rank" else by_rank.get(each.get("rank"), folder)
        yield f"{folder}/stacks.txt", _lines(stack_lines(each))
        if each.get("role") == "rank":  # by themselves: beside other text, its reader takes that text for processes
            yield f"stacks/{folder}.txt", _lines(stack_lines(each))
        yield f"{folder}/state.txt", _lines(state_lines(each))
        if each.get("sockets"):
            yield f"{folder}/sockets.txt", _lines(socket_lines(each))
        if each.get("environment"):
            yield (
                f"{folder}/environment.txt",
                _lines(f"{name}={value}" for name, value in each["environment"]),
            )
        yield f"{folder}/evidence.json", _json(each)
    for file in node.get("files", []):
        folder = by_rank.get(file.get("rank"), place)
        if file.get("content"):
            yield f"{folder}/flight_recorder.pickle", unpacked(file["content"])
        if file.get("kind") == "core":
            yield (
                f"{place}/{safe_name(os.path.basename(file['path']))}.core.txt",
                _lines(
                    [
                        f"{file['path']}, {file['size_bytes']} bytes, written {file['age_s']:.0f} s before",
                        file.get("error") or "",
                        *file.get("frames", []),
                    ]
                ),
            )
    for path, lines in node.get("log_lines", []):
        yield f"{place}/log-{safe_name(os.path.basename(path))}.txt", _lines([f"# the end of {path}", *lines])
    if node.get("kernel_lines"):
        yield f"{place}/kernel.txt", _lines(node["kernel_lines"])
    yield f"{place}/settings.txt", _lines(f"{name}: {value}" for name, value in node.get("settings", []))
    rest = {key: value for key, value in node.items() if key not in ("ranks", "log_lines", "kernel_lines", "settings")}
    rest["files"] = [{k: v for k, v in file.items() if k != "content"} for file in node.get("files", [])]
    yield f"{place}/node.json", _json(rest)


def folder_of(rank: dict[str, Any]) -> str:
    """`rank-3`, `rank-3-worker-4711`."""
    number = rank.get("rank")
    name = f"rank-{int(number)}" if number is not None else f"pid-{int(rank['pid'])}"
    return name if rank.get("role") == "rank" else f"{name}-worker-{int(rank['pid'])}"


def stack_lines(rank: dict[str, Any]) -> Iterator[str]:
    """The newest dump as py-spy prints one; a process that could not be dumped has its reason there."""
    yield f"Process {rank['pid']}: {rank.get('comm', '')}"
    dumps = rank.get("dumps", [])
    if not dumps or dumps[-1].get("error"):
        yield f"Error: {dumps[-1]['error'] if dumps else rank.get('error') or 'no dump came in time'}"
        return
    for thread in newest_threads(dumps):
        yield ""
        state = "active" if thread.get("active") else "idle"
        name = f': "{thread["name"]}"' if thread.get("name") else ""
        yield f"Thread {thread['thread_id']} ({state}){name}"
        for frame in thread.get("frames", []):
            yield f"    {frame['function']} ({frame['file']}:{frame.get('line', 0)})"


def newest_threads(dumps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The threads of the last dump, put together from what changed since the first."""
    current: dict[int, dict[str, Any]] = {}
    for dump in dumps:
        if dump.get("error"):
            continue
        kept = {number: current[number] for number in dump.get("unchanged", []) if number in current}
        current = kept | {thread["thread_id"]: thread for thread in dump.get("threads", [])}
    return list(current.values())


def state_lines(rank: dict[str, Any]) -> Iterator[str]:
    """What the kernel said about the process."""
    yield (
        f"pid {rank['pid']} ({rank.get('comm', '')}), state {rank.get('state', '?')}, "
        f"{rank.get('threads_seen', '?')} threads"
    )
    if blocked := rank.get("blocked"):
        yield (
            f"blocked for {blocked['seconds']:.0f} s in {blocked.get('syscall')} on "
            f"{blocked.get('path')} (mount {blocked.get('mount')})"
        )
    if lock := rank.get("lock"):
        yield (
            f"waits for a file lock: {lock['kind']} on {lock['file']}, held by "
            f"{lock.get('holder') or 'nobody here'} (pid {lock.get('holder_pid')})"
        )
    yield from (f"open on a filesystem that does not answer: {path}" for path in rank.get("silent_files", []))
    yield from (f"not known: {problem}" for problem in rank.get("problems", []))
    yield from (f"{name}: {value}" for name, value in rank.get("status", []))
    for thread in rank.get("threads", []):
        yield ""
        yield (
            f"thread {thread['thread_id']} {thread.get('comm', '')} state {thread.get('state', '?')}, "
            f"{thread.get('syscall')}, waits in {thread.get('wchan')}"
        )
        yield from (f"    {function}" for function in thread.get("kernel_stack", []))


def socket_lines(rank: dict[str, Any]) -> Iterator[str]:
    """One line a connection: queues in bytes, as ss prints them."""
    yield f"{'STATE':12} {'RECV-Q':>10} {'SEND-Q':>10} {'RETRANS':>7}  {'LOCAL':28} PEER"
    for each in rank["sockets"]:
        queues = (
            f"{each.get('receive_queue_bytes', 0):10} {each.get('send_queue_bytes', 0):10} "
            f"{each.get('retransmits', 0):7}"
        )
        yield f"{each['state']:12} {queues}  {each['local']:28} {each['peer']}"


def unpacked(content: str) -> bytes:
    """The bytes of a file that was carried compressed; what is damaged stays as it is."""
    packed = b64decode(content)
    try:
        return zlib.decompressobj().decompress(packed, MAX_UNPACKED)
    except zlib.error:
        return packed


def safe_name(text: str) -> str:
    """A name of a file that can do no harm: letters, digits, dot, dash, underscore; never hidden, never
    empty, never long."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-")[:MAX_NAME] or "unnamed"


def _json(document: object) -> bytes:
    return json.dumps(_masked(document), indent=1).encode() + b"\n"


def _masked(value: object) -> object:
    if isinstance(value, str):
        return mask_line(value)
    if isinstance(value, list):
        return [_masked(each) for each in value]
    if isinstance(value, dict):
        return {key: each if key == "content" else _masked(each) for key, each in value.items()}
    return value


def _lines(lines: Iterator[str] | list[str]) -> bytes:
    return "".join(f"{mask_line(line)}\n" for line in lines).encode(errors="replace")


def _add(tar: tarfile.TarFile, name: str, data: bytes, at: float) -> None:
    about = tarfile.TarInfo(name)
    about.size, about.mtime, about.mode = len(data), int(at), 0o600
    tar.addfile(about, io.BytesIO(data))


# ---------------------------------------------------------------------------------------- compression


def _zstd() -> Any:
    """What writes zstd here: the module of Python 3.14, else the path of the program; None if there is neither."""
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return shutil.which("zstd")
    return zstd


@contextmanager
def _open(partial: str, path: str) -> Iterator[IO[bytes]]:
    """A file to write the tar into, compressed as the name of `path` says, readable for its writer alone.
    Raises OSError."""
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        if path.endswith((".gz", ".tgz")):
            with gzip.GzipFile(fileobj=file, mode="wb", filename=Path(path).name) as packed:
                yield packed  # type: ignore[misc]
        elif path.endswith(".zst"):
            with _open_zstd(file) as packed_zst:
                yield packed_zst
        else:
            yield file


@contextmanager
def _open_zstd(file: IO[bytes]) -> Iterator[IO[bytes]]:
    zstd = _zstd()
    if not isinstance(zstd, str):
        with zstd.ZstdFile(file, "w") as packed:
            yield packed
        return
    with subprocess.Popen(
        [zstd, "-q", "-T1", "-c"], stdin=subprocess.PIPE, stdout=file, stderr=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        yield child.stdin
        child.stdin.close()
        assert child.stderr is not None
        problem = child.stderr.read().decode(errors="replace").strip()
    if child.returncode != 0:
        raise OSError(0, f"zstd failed: {problem[:200]}")
