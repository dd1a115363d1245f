"""`slurm-watchdog group-stacks`: groups the stacks in files and finds the rank that the others wait for."""

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
from typing import TYPE_CHECKING, Any, Final

import click

from slurm_watchdog.cli.diagnosis_text import advice, print_list
from slurm_watchdog.cli.options import (
    EXIT_FINE,
    EXIT_FOUND,
    EXIT_USAGE,
    json_option,
    knowledge_option,
    print_json,
)
from slurm_watchdog.cli.terminal import clean, count, fold_nodes, sentence, table

if TYPE_CHECKING:
    from slurm_watchdog.diagnose.stacks.verdict import StackVerdict
    from slurm_watchdog.diagnose.stacks.wording import StackGroup
    from slurm_watchdog.knowledge.remediation_hints import Hint
    from slurm_watchdog.model.incidents import Culprit
    from slurm_watchdog.parse.stacks.dump import Dump

MAX_FILES: Final = 20_000
MAX_FILE_BYTES: Final = 64 << 20
MAX_TOTAL_BYTES: Final = 2 << 30
MAX_DEPTH: Final = 6
MAX_DUMPS: Final = 200_000
MAX_WORDS: Final = 65_536
"""Characters of a file without stacks in which its first words are looked for."""
FRAMES_SHOWN: Final = 4
GROUPS_SHOWN: Final = 40
GZIP_MAGIC: Final = b"\x1f\x8b"
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"


@click.command("group-stacks", short_help="Group the stacks of all ranks: which one differs.")
@click.argument("paths", metavar="PATH…", nargs=-1, required=True, type=click.Path(allow_dash=True))
@click.option(
    "--ranks",
    type=click.IntRange(1, 10_000_000),
    metavar="N",
    help="How many ranks the job has: names the missing ones.",
)
@click.option(
    "--since-last-step",
    type=click.FloatRange(0),
    metavar="S",
    help="Seconds since the last step when the stacks were taken.",
)
@click.option("--typical-step", type=click.FloatRange(0), metavar="S", help="Seconds that a step takes.")
@click.option(
    "--topology",
    metavar="SIZES",
    help="Sizes of tensor, pipeline and context parallelism in Megatron's order of ranks, tp=4,pp=8: "
    "compares ranks with those that normally look like them. [default: as the ranks' command lines say]",
)
@knowledge_option
@json_option
def group_stacks(
    paths: tuple[str, ...],
    ranks: int | None,
    since_last_step: float | None,
    typical_step: float | None,
    topology: str | None,
    as_json: bool,
) -> None:
    """Reads stacks and says whether they show a hang, and which rank keeps the others waiting, if one does.

    A PATH is a file, a directory with a file for each rank or node, or `-` for standard input: what `py-spy
    dump` prints (text or
    --json, --native, --locals), faulthandler, gdb, pystack; plain or gzip; many dumps in one file; with the
    prefixes of srun --label
    or pdsh; pasted into a document. Nothing is asked and nothing is touched. Several dumps of the same ranks,
    taken some 20 s apart,
    tell stuck from busy; so does the time since the last step. Exit code 0 nothing wrong, 1 something found,
    2 nothing could be read.

    \b
    Examples:
      slurm-watchdog group-stacks trace-*.out
      slurm-watchdog group-stacks stacks/ --ranks 64 --since-last-step 1800 --typical-step 12
      slurm-watchdog group-stacks stacks/ --since-last-step 1800 --topology tp=4,pp=8
      srun --overlap --label … py-spy dump … | slurm-watchdog group-stacks -
    """
    from slurm_watchdog.diagnose.stacks.case import Options
    from slurm_watchdog.diagnose.stacks.verdict import diagnose_dumps

    dumps, unreadable = _read(paths)
    if not dumps:
        for line in unreadable:
            click.echo(line, err=True)
        names = ", ".join(clean(path) for path in paths[:3]) + (", …" if len(paths) > 3 else "")
        click.echo(f"No stacks were found in {names}.", err=True)
        click.echo(
            "Expected is what `py-spy dump --pid PID` prints (or --json), faulthandler's or gdb's backtraces.",
            err=True,
        )
        sys.exit(EXIT_USAGE)
    given = Options(ranks=ranks, since_last_step_s=since_last_step, typical_step_s=typical_step, topology=topology)
    verdict = diagnose_dumps(dumps, given)
    _check_topology(topology, verdict.ranks)
    for line in unreadable:
        click.echo(line, err=True)
    if as_json:
        print_json(_document(verdict))
    else:
        _print(verdict)
    unknown = unreadable or not verdict.dumped
    sys.exit(EXIT_USAGE if unknown else EXIT_FOUND if verdict.is_hang else EXIT_FINE)


def _check_topology(text: str | None, world: int) -> None:
    from slurm_watchdog.diagnose.stacks.topology import parse_topology

    if text is not None and parse_topology(text, world) is None:
        click.echo(
            f"--topology {clean(text)} was not used: it is written tp=4,pp=8 (and cp=2), and has to divide "
            f"the {world} ranks.",
            err=True,
        )


# ------------------------------------------------------------------------------------------ reading


def _read(paths: Sequence[str]) -> tuple[list[Dump], list[str]]:
    """(every dump, in an order that does not depend on the order of the paths; what could not be read and why)."""
    from slurm_watchdog.parse.stacks.text import parse_stacks

    texts: dict[str, str] = {}
    unreadable: list[str] = []
    total = 0
    for name, path in _files(paths, unreadable):
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
            texts[part if part not in texts else f"{path}/{part}"] = _text_of(content)
    dumps: list[Dump] = []
    parsed = {name: parse_stacks(texts[name], name) for name in sorted(texts)}
    told = {_labels_of_file(name) for name, found in parsed.items() if found}
    for name, found in parsed.items():
        # Beside a rank's stacks there may be other files of it: they are no ranks.
        dumps += found or ([] if _labels_of_file(name) in told else _no_dump(name, texts[name], len(texts)))
    return list(islice((each for dump in dumps for each in _of_each_node(dump)), MAX_DUMPS)), unreadable


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


def _files(paths: Sequence[str], unreadable: list[str]) -> Iterator[tuple[str, str]]:
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

    header = header_of_file(name)
    if files < 2 or (header.rank is None and not header.host and header.label is None):
        return []
    words = next((line.strip() for line in text[:MAX_WORDS].splitlines() if line.strip()), "")
    plain = words.isprintable() and "\ufffd" not in words
    error = words[:200] if words and plain else "its file holds no stack" if text else "its file is empty"
    return [Dump(source=name, error=error)]


# ------------------------------------------------------------------------------------------- output


def _document(verdict: StackVerdict) -> dict[str, Any]:
    return {
        "ranks": verdict.ranks,
        "dumped": verdict.dumped,
        "missing": list(verdict.missing),
        "groups": [
            {
                "frames": list(group.frames),
                "ranks": [m.rank for m in group.members if m.rank is not None],
                "hosts": sorted({m.node for m in group.members if m.node}),
                "count": len(group.members),
                "place": str(group.place),
                "class": _class(group),
                "members": [{"rank": m.rank, "host": m.node, "pid": m.pid} for m in group.members],
                "threads": dict(group.threads),
            }
            for group in verdict.groups
        ],
        "is_hang": verdict.is_hang,
        "class": verdict.cls,
        "culprits": [_culprit_json(each) for each in verdict.culprits],
        "summary": verdict.summary,
        "odd": [_culprit_json(each) for each in verdict.odd],
        "undumped": [_culprit_json(each) for each in verdict.undumped],
        "others": dict(verdict.others),
        "todo": list(verdict.todo),
        "hints": [hint.as_json() for hint in _hints(verdict)],
    }


def _class(group: StackGroup) -> str:
    from slurm_watchdog.knowledge.stack_frames import CLASSES

    return CLASSES[group.place]


def _culprit_json(each: Culprit) -> dict[str, Any]:
    return {"rank": each.rank, "host": each.node, "pid": each.pid, "reason": each.reason}


def _hints(verdict: StackVerdict) -> tuple[Hint, ...]:
    """What this usually is and what to try next, from the knowledge of the house. May be wrong for the case:
    it is said so."""
    from slurm_watchdog.knowledge.remediation_hints import hints_for

    if not verdict.is_hang:
        return ()
    text = "\n".join([verdict.summary, *(frame for group in verdict.groups[:GROUPS_SHOWN] for frame in group.frames)])
    return hints_for(verdict.cls, text)


def _print(verdict: StackVerdict) -> None:
    sentence(verdict.summary, "bold red" if verdict.is_hang else "green")
    if len(verdict.culprits) > 1:
        _print_culprits("Named", verdict.culprits)
    if verdict.odd:
        _print_culprits("Elsewhere than the others, which proves nothing by itself", verdict.odd)
    if verdict.undumped:
        _print_culprits("Could not be dumped", verdict.undumped)
    if verdict.missing:
        from slurm_watchdog.diagnose.stacks.wording import fold

        sentence(f"No dump at all: rank {fold(verdict.missing)}.")
    sentence("")
    rows = [_row(group) for group in verdict.groups[:GROUPS_SHOWN]]
    table(("COUNT", "RANKS", "NODES", "PLACE", "INNERMOST FRAMES"), rows)
    if len(verdict.groups) > GROUPS_SHOWN:
        sentence(f"… {len(verdict.groups) - GROUPS_SHOWN} more groups: --json has them")
    if verdict.others:
        sentence("Left out, for they hold no rank: " + ", ".join(f"{n} x {what}" for what, n in verdict.others) + ".")
    print_list("What to do next", verdict.todo)
    print_list("What it usually is (it may be something else here)", [advice(each) for each in _hints(verdict)])


def _print_culprits(heading: str, people: Sequence[Culprit]) -> None:
    from slurm_watchdog.diagnose.stacks.wording import culprit_words

    sentence(f"{heading}:")
    for each in people[:16]:
        sentence(f"  {culprit_words(each, False)}: {each.reason}")
    if len(people) > 16:
        sentence(f"  … {count(len(people) - 16, 'more', 'more')}: --json has them")


def _row(group: StackGroup) -> tuple[str, ...]:
    from slurm_watchdog.diagnose.stacks.wording import fold

    known = [m.rank for m in group.members if m.rank is not None]
    unknown = len(group.members) - len(known)
    pids = sorted({m.pid for m in group.members if m.rank is None and m.pid})
    ranks = fold(known)
    if unknown:
        shown = ",".join(str(pid) for pid in pids[:4]) + ("…" if len(pids) > 4 else "")
        ranks = ", ".join(part for part in (ranks, f"pid {shown}" if shown else f"{unknown} unknown") if part)
    hosts = fold_nodes(sorted({m.node for m in group.members if m.node})) if any(m.node for m in group.members) else "-"
    return str(len(group.members)), ranks, hosts, str(group.place), " < ".join(group.frames[:FRAMES_SHOWN])
