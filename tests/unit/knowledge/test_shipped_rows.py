"""Each row of the package's knowledge files: its examples are judged as it says, its look-alikes are not, and
it names its source."""

from __future__ import annotations

import re
from typing import Any

import pytest

from slurm_watchdog.knowledge.entries import DATA, Entry, Rows, read_rows, shown
from slurm_watchdog.knowledge.kernel_signatures import kernel_row
from slurm_watchdog.knowledge.launcher_exits import ending_of, ending_row
from slurm_watchdog.knowledge.log_signatures import READERS as LOG_READERS
from slurm_watchdog.knowledge.log_signatures import SIGNATURES
from slurm_watchdog.knowledge.progress_patterns import PATTERNS, SIGNS
from slurm_watchdog.knowledge.progress_patterns import READERS as PROGRESS_READERS
from slurm_watchdog.knowledge.stack_frames import CLASSES, FRAMES, NATIVE, THREADS
from slurm_watchdog.knowledge.stack_frames import READERS as FRAME_READERS
from slurm_watchdog.knowledge.xids import XIDS, nvlink_row, xid_row
from slurm_watchdog.parse.kernel_log.line import parse_message
from slurm_watchdog.parse.training_log.line import parse_line
from slurm_watchdog.parse.training_log.text import split_prefix

READERS = {
    **LOG_READERS,
    **PROGRESS_READERS,
    "kernel": kernel_row,
    "xid": xid_row,
    "nvlink": nvlink_row,
    **FRAME_READERS,
    "ending": ending_row,
}


UNSOURCED = {
    "remediation_hints.conf",
    "frameworks.conf",
    "syscalls.conf",
}  # Each has a source of its own, or is advice.


def _with_sources(text: str) -> str:
    """A row without `source` has that of the row above."""
    sections, source = [], ""
    for section in re.split(r"(?m)^(?=\[)", text):
        own = re.search(r"(?m)^source: .*$", section)
        source = own[0] if own is not None else source
        sections.append(
            section if own is not None or not section.startswith("[") else f"{section.rstrip()}\n{source}\n\n"
        )
    return "".join(sections)


def shipped() -> Rows:
    """Of all files, each read for itself: they share no parts."""
    by_kind: dict[str, list[tuple[Entry, Any]]] = {}
    for path in sorted(DATA.glob("*.conf")):
        if path.name in UNSOURCED:
            continue
        rows = read_rows(_with_sources(path.read_text()), path.name, READERS)
        assert rows.problems == ()
        for kind, found in rows.by_kind.items():
            by_kind.setdefault(kind, []).extend(found)
    return Rows({kind: tuple(found) for kind, found in by_kind.items()})


ROWS = shipped()


def entries(*kinds: str) -> list[Any]:
    return [
        pytest.param(entry, row, id=f"{entry.file}:{entry.line} {entry.name}")
        for kind in kinds
        for entry, row in ROWS.by_kind[kind]
    ]


def lines(entry: Entry, key: str) -> list[str]:
    found = [shown(line) for line in entry.values.get(key, ())]
    assert found, f"{entry.place}: no line `{key}: …`"
    return found


def test_the_files_hold_all_rows_that_the_program_has() -> None:
    held = {kind: len(found) for kind, found in ROWS.by_kind.items()}
    assert {
        kind: held[kind]
        for kind in held
        if kind not in {"ending", "nvlink", "expression", "words", *FRAME_READERS} - {"frame", "native"}
    } == {
        "log": len(SIGNATURES),
        "sign": len(SIGNS),
        "progress": len(PATTERNS),
        "kernel": held["kernel"],
        "xid": len(XIDS),
        "frame": len(FRAMES),
        "native": len(NATIVE),
    }


@pytest.mark.parametrize("entry", [entry for found in ROWS.by_kind.values() for entry, _ in found])
def test_a_row_names_its_source(entry: Entry) -> None:
    assert all(lines(entry, "source"))


@pytest.mark.parametrize(("entry", "row"), entries("log", "sign", "progress"))
def test_a_row_of_logs_matches_its_examples_and_not_what_looks_alike(entry: Entry, row: Any) -> None:
    own = getattr(row, "signature", getattr(row, "pattern", row))
    for line in lines(entry, "example"):
        text = split_prefix(re.sub(r"\x1b\[[\d;]*m", "", line))[0]
        assert own.regex.search(text), "its own expression does not match"
        assert any(needle in text.lower() for needle in own.needles)
        fact = parse_line(line)
        assert fact is not None and fact.pattern == entry.name, "another row takes it"
    for line in lines(entry, "not"):
        fact = parse_line(line)
        assert fact is None or fact.pattern != entry.name


@pytest.mark.parametrize(("entry", "row"), entries("kernel"))
def test_a_row_of_the_kernel_matches_its_examples_and_not_what_looks_alike(entry: Entry, row: Any) -> None:
    for line in lines(entry, "example"):
        assert row.regex.match(line)
        fact = parse_message(line)
        assert fact is not None and fact.name == entry.name
    for line in lines(entry, "not"):
        fact = parse_message(line)
        assert fact is None or fact.name != entry.name


def frame(line: str) -> tuple[str, str]:
    """`function (file)`, as py-spy writes it."""
    function, _, file = line.partition(" (")
    return function, file.removesuffix(")")


@pytest.mark.parametrize(("entry", "row"), entries("frame"))
def test_a_frame_is_its_example_and_not_what_looks_alike(entry: Entry, row: Any) -> None:
    def first(function: str, file: str) -> tuple[Any, ...] | None:
        return next((each for each in FRAMES if matches(each, function, file)), None)

    def matches(each: tuple[Any, str, str], function: str, file: str) -> bool:
        return re.fullmatch(each[1], function) is not None and re.fullmatch(each[2], file) is not None

    assert CLASSES[row[0]] == entry.name
    for line in lines(entry, "example"):
        assert first(*frame(line)) == row
    for line in lines(entry, "not"):
        assert not matches(row, *frame(line))


@pytest.mark.parametrize(("entry", "row"), entries("native"))
def test_a_native_function_is_its_example_and_not_what_looks_alike(entry: Entry, row: Any) -> None:
    for line in lines(entry, "example"):
        assert next(each for each in NATIVE if re.fullmatch(each[1], line)) == row
    for line in lines(entry, "not"):
        assert not re.fullmatch(row[1], line)


@pytest.mark.parametrize(("entry", "row"), entries("context", "not_a_rank", "idle_loop", "momentary"))
def test_a_frame_with_a_meaning_of_its_own_is_its_example_and_not_what_looks_alike(entry: Entry, row: Any) -> None:
    def matches(line: str) -> bool:
        function, file = frame(line)
        return bool(re.fullmatch(row[-2], function) and re.fullmatch(row[-1], file))

    assert all(matches(line) for line in lines(entry, "example"))
    assert not any(matches(line) for line in lines(entry, "not"))


@pytest.mark.parametrize(("entry", "row"), entries("not_a_rank_command"))
def test_a_command_of_no_rank_is_its_example_and_not_what_looks_alike(entry: Entry, row: Any) -> None:
    assert all(re.search(row[1], line) for line in lines(entry, "example"))
    assert not any(re.search(row[1], line) for line in lines(entry, "not"))


@pytest.mark.parametrize(("entry", "row"), entries("thread"))
def test_a_thread_with_a_role_is_its_example_and_not_what_looks_alike(entry: Entry, row: Any) -> None:
    for line in lines(entry, "example"):
        assert next(role for role, name, _ in THREADS if re.fullmatch(name, line, re.IGNORECASE)) == row[0]
    assert not any(re.fullmatch(row[1], line, re.IGNORECASE) for line in lines(entry, "not"))


@pytest.mark.parametrize(("entry", "row"), entries("ending"))
def test_an_ending_is_its_example_and_not_what_looks_alike(entry: Entry, row: Any) -> None:
    for line in lines(entry, "example"):
        assert row.regex.search(line)
        assert ending_of(line) is not None
    assert not any(row.regex.search(line) for line in lines(entry, "not"))
