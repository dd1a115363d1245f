"""What is written as a user can never be a program: whatever is asked, wherever it is asked for."""

from __future__ import annotations

import json
import string
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_watchdog.model.kill_switch import (
    FIELDS,
    KILL_SWITCH_BASE,
    MAX_FIELD,
    PROGRAM_PLACES,
    clean_field,
    compose_line,
    parse_line,
    problem_of_path,
    problem_of_prefix,
)
from tests.builders.program_paths import PROGRAM_PATHS

ALPHABET = set(string.ascii_letters + string.digits + " .,:_/-")
HOSTILE = st.text(max_size=400) | st.text("$`\\\"'();&|<>{}[]*?!#~\n\r\0", max_size=60)


@given(st.fixed_dictionaries(dict.fromkeys(FIELDS, HOSTILE)))
def test_whatever_the_values_are_the_line_is_one_of_a_closed_alphabet(fields: dict[str, str]) -> None:
    line = compose_line(fields)
    assert line.endswith("}\n") and line.count("\n") == 1
    said = json.loads(line)
    assert tuple(said) == FIELDS
    for value in said.values():
        assert set(value) <= ALPHABET and len(value) <= MAX_FIELD
    assert set(line) <= ALPHABET | set('{}"\n')
    assert compose_line(said) == line, "composed again, as the remover does, it is the same"
    assert parse_line(line) == (said if said["by"] else None)


def test_a_shell_that_takes_it_for_a_script_finds_no_command_in_it(tmp_path: Path) -> None:
    """As sshd gives ~/.ssh/rc to sh, and a shell reads ~/.bashrc.d."""
    attack = f'$(touch {tmp_path}/owned)`touch {tmp_path}/owned`"; touch {tmp_path}/owned; "'
    script = tmp_path / "rc"
    script.write_text(compose_line(dict.fromkeys(FIELDS, attack)))
    subprocess.run(["/bin/sh", script], env={"PATH": str(tmp_path)}, capture_output=True, check=False)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("path", PROGRAM_PATHS)
@pytest.mark.parametrize("prefixes", [(), ("/home",), ("/home/ann",), ("/home/ann/", "/scratch")])
def test_no_place_of_programs_is_one_for_a_switch_even_where_homes_are_allowed(
    path: str, prefixes: tuple[str, ...]
) -> None:
    assert problem_of_path(f"/home/ann/{path}", prefixes) is not None


def test_a_switch_lies_in_its_runs_directory_or_below_what_root_allows() -> None:
    assert problem_of_path(f"{KILL_SWITCH_BASE}/7.0/kill") is None
    for path in (
        f"{KILL_SWITCH_BASE}/kill",
        f"{KILL_SWITCH_BASE}/7.0/a/kill",
        f"{KILL_SWITCH_BASE}/x/kill",
        "/scratch/run7/stop",
    ):
        assert "no kill switch is written elsewhere" in (problem_of_path(path) or ""), path  # fmt: skip
    assert problem_of_path("/scratch/run7/stop", ("/scratch",)) is None
    for path in ("/scratch", "/scratch/", "/scratchy/stop", "/scratch/../etc/x", "/scratch//stop", "/etc/x"):
        assert problem_of_path(path, ("/scratch",)) is not None, path
    assert all(problem_of_path(f"/scratch/{each}/stop", ("/scratch",)) for each in PROGRAM_PLACES)
    for prefix in ("/", "", "scratch", "/a/../b", "/a//b", "/home/ann/.cache"):
        assert problem_of_prefix(prefix) is not None, prefix
        if "." not in prefix.rpartition("/")[2]:
            assert problem_of_path(f"{prefix.rstrip('/')}/x/y", (prefix,)) is not None, prefix


PARTS = st.lists(st.sampled_from(["a", "run7", "..", ".", "", ".ssh", "bin", "jobs", "7.0", "slurm-watchdog"]) | st.text(max_size=5), max_size=6)  # fmt: skip


@settings(max_examples=300)
@given(PARTS, st.sampled_from(["/scratch", KILL_SWITCH_BASE, "/run", "/home", ""]))
def test_whatever_path_is_accepted_has_no_hidden_part_and_lies_below_a_fixed_one(parts: list[str], begin: str) -> None:
    path = "/".join([begin, *parts])
    if problem_of_path(path, ("/scratch",)) is None:
        assert path.startswith((f"{KILL_SWITCH_BASE}/", "/scratch/"))
        assert not any(part.startswith(".") or not part for part in path.split("/")[1:])
        assert "\0" not in path


def test_a_value_has_an_end() -> None:
    assert len(clean_field("x" * 10_000)) == MAX_FIELD
