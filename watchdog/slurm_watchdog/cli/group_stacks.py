"""`slurm-watchdog group-stacks`: groups the stacks in files and finds the rank that the others wait for."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base.text import plural
from slurm_watchdog.cli.files import MAX_FILES, configured, files_in
from slurm_watchdog.cli.options import EXIT_USAGE, JSON, KNOWLEDGE, Answer, Asked, Refusal, command, warn
from slurm_watchdog.cli.terminal import show
from slurm_watchdog.config.schema import Config
from slurm_watchdog.diagnose.stacks.case import Options, parse_topology
from slurm_watchdog.diagnose.stacks.sentences import culprit_words
from slurm_watchdog.diagnose.stacks.verdict import StackVerdict, diagnose_dumps
from slurm_watchdog.knowledge.remediation_hints import Hint, hints_for
from slurm_watchdog.knowledge.stack_frames import CLASSES
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.parse.stacks.headers import Dump, header_of_file
from slurm_watchdog.parse.stacks.py_spy_json import why_broken
from slurm_watchdog.parse.stacks.text import parse_stacks
from slurm_watchdog.parse.text_input import Unreadable, read_start, text_of
from slurm_watchdog.report.words import advice
from slurm_watchdog.slurm.node_names import ParseError, expand_nodes

MAX_FILE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 2 << 30
MAX_DUMPS = 200_000
MAX_WORDS = 65_536  # Characters of a file without stacks in which its first words are looked for.
GROUPS_SHOWN = 40


@command(
    """
    paths PATH…
    --ranks N<1..10000000>  How many ranks the job has: names the missing ones.
    --since-last-step S<0..>  Seconds since the last step when the stacks were taken.
    --typical-step S<0..>  Seconds that a step takes.
    --topology SIZES  Sizes of tensor, pipeline and context parallelism in Megatron's order of ranks, tp=4,pp=8:
      compares ranks with those that normally look like them. [default: as the ranks' command lines say]
    --config F  Configuration file: the limits of its detectors. [default: every setting's default]
    """,
    KNOWLEDGE,
    JSON,
)
def group_stacks(
    asked: Asked, paths: tuple[str, ...], since_last_step: float | None, typical_step: float | None, **given: Any
) -> Answer:
    """Reads stacks and says whether they show a hang, and which rank keeps the others waiting, if one does.

    A PATH is a file, a directory with a file for each rank or node, or `-` for standard input: what `py-spy dump`
    prints (text or --json, --native, --locals), faulthandler, gdb, pystack, /proc/PID/stack; plain or gzip; many dumps
    in one file; with the prefixes of srun --label or pdsh; pasted into a document. Several dumps of the same ranks,
    taken some 20 s apart, tell stuck from busy; so does the time since the last step. Nothing is asked or touched.
    Exit code 0 nothing wrong, 1 something found, 2 nothing could be read.

    \b
    Examples:
      slurm-watchdog group-stacks stacks/ --ranks 64 --since-last-step 1800 --typical-step 12 --topology tp=4,pp=8
      srun --overlap --label … py-spy dump … | slurm-watchdog group-stacks -
    """
    given |= {"since_last_step_s": since_last_step, "typical_step_s": typical_step}
    return read_stacks(paths, configured(asked.config), given)


def read_stacks(paths: Sequence[str], config: Config | None, given: dict[str, Any]) -> Answer:
    """What the stacks in files say; `given` is what else is known: see Options. Raises Refusal if there are none."""
    dumps, unreadable, spoilt, recorded = read_stack_files(paths)
    if recorded:
        what = f"{plural(recorded, 'file is a dump', 'files are dumps')} of PyTorch's Flight Recorder"
        warn(f"{what}: slurm-watchdog diagnose DIRECTORY says who did not come to which collective.")
    if not dumps:
        names = ", ".join(paths[:3]) + (", …" if len(paths) > 3 else "")
        expected = "Expected is what `py-spy dump --pid PID` prints (or --json), faulthandler's or gdb's backtraces."
        raise Refusal([*unreadable, *spoilt, f"No stacks were found in {names}."], expected)
    if config is not None:
        from slurm_watchdog.detect.collective_hang import CollectiveHang

        given = given | {"limits": config.detectors.of(CollectiveHang)}
    verdict = diagnose_dumps(dumps, Options(**given))
    topology = given.get("topology")
    if topology is not None and parse_topology(topology, verdict.ranks) is None:
        must = f"it is written tp=4,pp=8 (and cp=2), and has to divide the {verdict.ranks} ranks."
        warn(f"--topology {topology} was not used: {must}")
    for line in (*unreadable, *spoilt):
        warn(line)
    unknown = unreadable or not verdict.dumped
    return Answer(_document(verdict), lambda: _print(verdict), EXIT_USAGE if unknown else verdict.is_hang)


def read_stack_files(paths: Sequence[str]) -> tuple[list[Dump], list[str], list[str], int]:
    """Every dump in files, in directories of them, or on standard input (`-`), in an order that does not depend on that
    of the paths; what could not be read; what is broken, and was read in part, or not; and how many files hold no
    stacks, but what a rank recorded of its collectives."""
    texts: dict[str, str] = {}
    unreadable: list[str] = []
    recorded = total = 0
    for name, path in files_in(paths, unreadable):
        try:
            data = read_start(path, MAX_FILE_BYTES)
        except Unreadable as error:
            unreadable.append(str(error))
            continue
        total += len(data)
        if total > MAX_TOTAL_BYTES:
            unreadable.append(f"{path} and what follows was left out: more than {MAX_TOTAL_BYTES >> 30} GiB")
            break
        for part, content in _parts(name, data):
            if is_flight_record(content):
                recorded += 1
            else:
                texts[part if part not in texts else f"{path}/{part}"] = text_of(content)
    dumps: list[Dump] = []
    spoilt: list[str] = []
    parsed = {name: parse_stacks(texts[name], name) for name in sorted(texts)}
    whose = {
        name: (each.host, each.rank, each.label, each.local_rank)
        for name, each in ((name, header_of_file(name)) for name in parsed)
    }
    told = {whose[name] for name, found in parsed.items() if found}
    for name, found in parsed.items():
        broken = "" if found and texts[name].rstrip().endswith(("]", "}")) else why_broken(texts[name])
        if broken:
            was_read = f"; of what is whole in it {plural(len(found), 'dump was', 'dumps were')} read"
            spoilt.append(f"{name}: {broken}{was_read if found else ''}")
        if found:
            dumps += found
        elif len(texts) > 1 and whose[name] not in told and whose[name][:3] != ("", None, None):
            # A rank that could not be dumped. Beside a rank's stacks there may be other files of it: they are no ranks.
            dumps.append(Dump(source=name, error=broken or _first_words(texts[name])))
    of_nodes = islice((each for dump in dumps for each in _of_each_node(dump)), MAX_DUMPS)
    return list(of_nodes), unreadable, spoilt, recorded


def _first_words(text: str) -> str:
    """Those of a file without stacks, which may say why."""
    words = next((line.strip() for line in text[:MAX_WORDS].splitlines() if line.strip()), "")
    plain = words.isprintable() and "\ufffd" not in words
    return words[:200] if words and plain else "its file holds no stack" if text else "its file is empty"


def is_flight_record(data: bytes) -> bool:
    """Whether it is a dump of PyTorch's Flight Recorder: a pickle, or JSON with entries of communicators."""
    pickled = data[:1] == b"\x80" and data[1:2] in b"\x02\x03\x04\x05"
    return (pickled or data[:1] == b"{") and b"entries" in data and (b"pg_config" in data or b"process_group" in data)


def is_archive(data: bytes) -> bool:
    """Whether it is an archive of tar, such as the bundle of an incident."""
    return data[257:262] == b"ustar"


def _of_each_node(dump: Dump) -> Iterator[Dump]:
    """A dump that several nodes wrote alike (`gpu[01-02]`, as `clush -b` and `dshbak -c` print it) is one of each."""
    nodes: Sequence[str] = (dump.header.host,)
    if "[" in dump.header.host or "," in dump.header.host:
        with suppress(ParseError):
            nodes = expand_nodes(dump.header.host)
    for node in nodes:
        yield replace(dump, header=replace(dump.header, host=node)) if len(nodes) > 1 else dump


def _parts(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """The file itself, or if it is an archive the files in it."""
    if not is_archive(data):
        yield name, data
        return
    with suppress(tarfile.TarError, EOFError, OSError), tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in islice(archive, MAX_FILES):
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name, file.read(MAX_FILE_BYTES)


def _document(verdict: StackVerdict) -> dict[str, Any]:
    def person(each: Culprit, *more: str) -> dict[str, Any]:
        return {"rank": each.rank, "host": each.node, "pid": each.pid, **{key: getattr(each, key) for key in more}}

    groups = [
        {
            "frames": group.frames,
            "ranks": [m.rank for m in group.members if m.rank is not None],
            "hosts": sorted({m.node for m in group.members if m.node}),
            "count": len(group.members),
            "place": str(group.place),
            "class": CLASSES[group.place],
            "members": [person(each) for each in group.members],
            "threads": dict(group.threads),
        }
        for group in verdict.groups
    ]
    people = ("culprits", "odd", "undumped", "gone")
    return {
        **{key: getattr(verdict, key) for key in ("ranks", "dumped", "missing", "is_hang", "summary", "todo")},
        **{key: [person(each, "reason") for each in getattr(verdict, key)] for key in people},
        "class": verdict.cls,
        "groups": groups,
        "others": dict(verdict.others),
        "hints": [hint.as_json() for hint in _hints(verdict)],
    }


def _hints(verdict: StackVerdict) -> tuple[Hint, ...]:
    """What this usually is and what to try next, from the knowledge of the house. May be wrong for the case:
    it is said so."""
    if not verdict.is_hang:
        return ()
    text = "\n".join([verdict.summary, *(frame for group in verdict.groups[:GROUPS_SHOWN] for frame in group.frames)])
    return hints_for(verdict.cls, text)


def _print(verdict: StackVerdict) -> None:
    people = (
        ("Suspects", verdict.culprits if len(verdict.culprits) > 1 else ()),
        ("Elsewhere than the others, which alone proves nothing", verdict.odd),
        ("Ended", verdict.gone),
        ("Could not be dumped", verdict.undumped),
    )
    usually = [advice(each) for each in _hints(verdict)]
    lists = (("What to do next", verdict.todo), ("What it usually is (it may be something else here)", usually))
    show("stacks", found=verdict, people=people, lists=lists, words=lambda each: culprit_words(each, False))
