"""`show --bundle`: an incident with all its evidence as one file, for a colleague, a vendor, or the day after.

Readable text where people look, JSON beside it for programs. What looks like a secret is masked again on
its way out; the names of files are made of harmless letters only.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import zlib
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

from slurm_watchdog import __version__
from slurm_watchdog.base import clock
from slurm_watchdog.base.failure import Failure
from slurm_watchdog.base.redact import mask_line, masked
from slurm_watchdog.parse.stacks.py_spy_json import whole_dumps
from slurm_watchdog.report.words import moment

MAX_NAME = 80
MAX_UNPACKED = 32 << 20  # Of one Flight Recorder dump.
INDEXED = ("at", "kind", "number", "incident", "taken")  # What `incident.json` has of each piece of evidence.
ENDINGS = (".tar.zst", ".tar.gz", ".tgz", ".tar")
README = """\
Incident {id} as slurm-watchdog {version} kept it, packed at {at}.

incident.json          who, since when, why, what was done; timeline.txt is the same as lines
diagnosis.json         groups of ranks, which one differs, and how
job.json               what the controller knew of the job when the incident began
stacks/NODE/rank-N.txt the newest dump of each rank, as py-spy prints it: slurm-watchdog group-stacks THIS_FOLDER/stacks
NODE/rank-N/state.txt  its state in the kernel, connections, variables; beside it what its Flight Recorder kept, for
                       slurm-watchdog diagnose: else such a file can run code, as any pickle
NODE/log-NAME.txt      the end of a log; kernel.txt: of the node's kernel log
NODE/node.txt          versions, settings, core files and the rest of its answer; node.json has all, for programs
"""
Fetch = Callable[[Any], Any]  # The document of one piece of an explanation's evidence.
File = tuple[str, bytes]  # Its name in the bundle, and what is in it.


def check_name(path: str) -> None:
    """Raises Failure for a name whose ending says no kind of file that can be written here, or that is taken."""
    problem, todo = "", ""
    if not path.endswith(ENDINGS):
        problem = f"{path!r} is not a bundle's name: it ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}."
    elif path.endswith(".zst") and shutil.which("zstd") is None:
        problem = "The program zstd, which writes .tar.zst, is not here."
        todo = "Install zstd, or take a name that ends in .tar.gz"
    elif os.path.lexists(path):
        problem, todo = f"{path} is there already.", "Take another name, or remove it first"
    if problem:
        raise Failure(problem, todo, is_usage=True)


def write_bundle(path: str, explanation: Any, fetch: Fetch) -> int:
    """Writes the bundle of one incident, readable for its writer alone; returns how many files are in it. Raises
    Failure; leaves no half of a file."""
    made_at, incident_id, partial, count = clock.wall(), str(explanation["incident"]["id"]), f"{path}.partial", 0
    text = README.format(id=incident_id, version=__version__, at=moment(made_at))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with (
            os.fdopen(os.open(partial, flags, 0o600), "wb") as raw,
            tarfile.open(fileobj=raw, mode="w:gz" if path.endswith("gz") else "w") as tar,
        ):
            for name, data in chain([("README.txt", text.encode())], bundle_files(explanation, fetch)):
                about = tarfile.TarInfo(f"incident-{safe_name(incident_id)}/{name}")
                about.size, about.mtime, about.mode = len(data), int(made_at), 0o600
                tar.addfile(about, io.BytesIO(data))
                count += 1
        if path.endswith(".zst"):
            subprocess.run(["zstd", "-q", partial, "-o", path], check=True, capture_output=True)
        else:
            os.rename(partial, path)
    except (OSError, tarfile.TarError, subprocess.SubprocessError) as error:
        raise Failure(f"The bundle {path} could not be written: {error}.") from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial)
    return count


def bundle_files(explanation: Any, fetch: Fetch) -> Iterator[File]:
    """Every file of the bundle but the README; one node's evidence in memory at a time."""
    pieces = explanation.get("evidence", [])
    index = [{key: piece[key] for key in INDEXED if key in piece} for piece in pieces]
    yield "incident.json", _json(explanation | {"evidence": index})
    yield "timeline.txt", _lines(f"{moment(at['at'])}  {at['text']}" for at in explanation.get("timeline", []))
    taken: Counter[str] = Counter()
    for piece in pieces:
        document = piece.get("document")
        if document is None and piece.get("number") is not None:
            document = fetch(piece)
        of_node = piece["kind"] == "node" and isinstance(document, dict)
        place = safe_name(str(document.get("node", "node") if of_node else piece["kind"]))
        taken[place] += 1
        if taken[place] > 1:  # two collections of one incident do not hide each other
            place += f"-{taken[place]}"
        if of_node:
            yield from node_files(place, document)
        else:
            yield f"{place}.json", _json(document)


def node_files(place: str, node: dict[str, Any]) -> Iterator[File]:
    """What one node answered, as files below `place`."""
    for each in node.get("ranks", []):
        number, pid, is_rank = each.get("rank"), int(each["pid"]), each.get("role") == "rank"
        folder = f"{place}/pid-{pid}" if number is None else f"{place}/rank-{int(number)}"
        folder += "" if is_rank else f"-worker-{pid}"
        # A rank's stacks are by themselves: beside other text, their reader takes that text for processes.
        yield f"stacks/{folder}.txt" if is_rank else f"{folder}/stacks.txt", _lines(stack_lines(each))
        yield f"{folder}/state.txt", _lines(plain({key: each[key] for key in each if key != "dumps"}))
    for file in node.get("files", []):
        if file.get("content"):
            folder = place if file.get("rank") is None else f"{place}/rank-{int(file['rank'])}"
            yield f"{folder}/flight_recorder.pickle", unpacked(file["content"])
    for path, lines in node.get("log_lines", []):
        end = _lines([f"# the end of {path}", *lines])
        yield f"{place}/log-{safe_name(os.path.basename(path))}.txt", end
    if node.get("kernel_lines"):
        yield f"{place}/kernel.txt", _lines(node["kernel_lines"])
    files = [{key: file[key] for key in file if key != "content"} for file in node.get("files", [])]
    rest = {key: node[key] for key in node if key not in ("ranks", "log_lines", "kernel_lines")}
    yield f"{place}/node.txt", _lines(plain(rest | {"files": files}))
    yield f"{place}/node.json", _json(node | {"files": files})


def plain(document: dict[str, Any], margin: str = "") -> Iterator[str]:
    """Any document as lines for people: `key: value`, what is inside further to the right."""
    for key, value in document.items():
        if isinstance(value, dict | list) and value:
            yield f"{margin}{key}:"
            for each in [value] if isinstance(value, dict) else value:
                if isinstance(each, dict):
                    yield from plain(each, f"{margin}  ")
                else:
                    yield f"{margin}  {': '.join(map(str, each)) if isinstance(each, list) else each}"
        elif value not in (None, "", [], {}):
            yield f"{margin}{key}: {value}"


def stack_lines(rank: dict[str, Any]) -> Iterator[str]:
    """The newest dump as py-spy prints one; a process that could not be dumped has its reason there."""
    yield f"Process {rank['pid']}: {rank.get('comm', '')}"
    *_, newest = ({"error": rank.get("error") or "no dump came in time"}, *whole_dumps(rank.get("dumps", [])))
    if newest.get("error"):
        yield f"Error: {newest['error']}"
    for thread in newest.get("threads", []) if not newest.get("error") else ():
        yield ""
        state = "active" if thread.get("active") else "idle"
        name = f': "{thread["name"]}"' if thread.get("name") else ""
        yield f"Thread {thread['thread_id']} ({state}){name}"
        for frame in thread.get("frames", []):
            yield f"    {frame['function']} ({frame['file']}:{frame.get('line', 0)})"


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
    return json.dumps(masked(document), indent=1).encode() + b"\n"


def _lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{mask_line(line)}\n" for line in lines).encode(errors="replace")
