"""Texts with stacks into dumps, and what a verdict says for programs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base.text import plural
from slurm_watchdog.diagnose.stacks.verdict import StackVerdict
from slurm_watchdog.knowledge.remediation_hints import Hint, hints_for
from slurm_watchdog.knowledge.stack_frames import CLASSES
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.parse.stacks.headers import Dump, header_of_file
from slurm_watchdog.parse.stacks.py_spy_json import why_broken
from slurm_watchdog.parse.stacks.text import parse_stacks

MAX_DUMPS = 200_000
MAX_WORDS = 65_536  # Characters of a file without stacks in which its first words are looked for.
GROUPS_READ = 40


def dumps_of(texts: Mapping[str, str], nodes_of: Callable[[str], Sequence[str]]) -> tuple[list[Dump], list[str]]:
    """The dumps in the texts of files, by name, whatever their order; what is broken, and was read in part, or not.
    `nodes_of` a set of nodes gives their names, or raises ValueError."""
    dumps: list[Dump] = []
    spoilt: list[str] = []
    parsed = {name: parse_stacks(texts[name], name) for name in sorted(texts)}
    headers = {name: header_of_file(name) for name in parsed}
    whose = {name: (each.host, each.rank, each.label, each.local_rank) for name, each in headers.items()}
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
    return list(islice((each for dump in dumps for each in _of_each_node(dump, nodes_of)), MAX_DUMPS)), spoilt


def _first_words(text: str) -> str:
    """Those of a file without stacks, which may say why."""
    words = next((line.strip() for line in text[:MAX_WORDS].splitlines() if line.strip()), "")
    plain = words.isprintable() and "\ufffd" not in words
    return words[:200] if words and plain else "its file holds no stack" if text else "its file is empty"


def _of_each_node(dump: Dump, nodes_of: Callable[[str], Sequence[str]]) -> Iterator[Dump]:
    """A dump that several nodes wrote alike (`gpu[01-02]`, as `clush -b` and `dshbak -c` print it) is one of each."""
    nodes: Sequence[str] = (dump.header.host,)
    if "[" in dump.header.host or "," in dump.header.host:
        with suppress(ValueError):
            nodes = nodes_of(dump.header.host)
    for node in nodes:
        yield replace(dump, header=replace(dump.header, host=node)) if len(nodes) > 1 else dump


def document_of(verdict: StackVerdict) -> dict[str, Any]:
    """In the shape of `group-stacks --json`."""

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
        "hints": [hint.as_json() for hint in hints_of(verdict)],
    }


def hints_of(verdict: StackVerdict) -> tuple[Hint, ...]:
    """What this usually is and what to try next, from the knowledge of the house. May be wrong for the case:
    it is said so."""
    if not verdict.is_hang:
        return ()
    text = "\n".join([verdict.summary, *(frame for group in verdict.groups[:GROUPS_READ] for frame in group.frames)])
    return hints_for(verdict.cls, text)
