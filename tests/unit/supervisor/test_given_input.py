"""The standard input of `run`: the first start has it as it is, a later one what was in it at the beginning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_watchdog.supervisor.given_input import GivenInput

READ = "import sys; sys.stdout.write(sys.stdin.read())"


def reads(given: GivenInput, starts: int) -> str:
    """What the command of such a start reads."""
    stdin = given.of_start(starts)
    done = subprocess.run([sys.executable, "-c", READ], stdin=stdin, capture_output=True, text=True, check=True)
    return done.stdout


def test_a_file_is_read_from_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("#!/bin/bash\ntrain\n")
    with (tmp_path / "f").open("rb", buffering=0) as file:
        file.read(12)
        given = GivenInput(file.fileno())
        assert file.tell() == 12, "the shell that reads this script continues there"
        assert [reads(given, starts) for starts in (0, 1, 2)] == ["train\n"] * 3
        assert not given.is_lost(1)


@pytest.mark.parametrize("size", [0, 7, 65_536])
def test_a_here_document_in_a_pipe_is_there_for_every_start(size: int) -> None:
    reader, writer = os.pipe()
    assert os.write(writer, b"x" * size) == size
    os.close(writer)
    given = GivenInput(reader)
    assert [len(reads(given, starts)) for starts in (0, 1, 2)] == [size] * 3
    os.close(reader)


def test_what_the_command_does_not_read_stays_for_the_loop_around_it() -> None:
    script = (
        "import os, subprocess; from slurm_watchdog.supervisor.given_input import GivenInput; "
        "subprocess.run(['true'], stdin=GivenInput().of_start(0), check=True)"
    )
    loop = f'while read x; do echo "$x"; {sys.executable} -c "{script}"; done'
    done = subprocess.run(
        ["bash", "-c", f"printf 'a\nb\nc\n' | {{ sleep 0.2; {loop}; }}"], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("a\nb\nc\n", "")


def test_a_stream_is_the_first_start_s_alone() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"one")
    given = GivenInput(reader)
    os.write(writer, b" two")
    os.close(writer)
    assert [reads(given, starts) for starts in (0, 1)] == ["one two", ""]
    assert (given.is_lost(0), given.is_lost(1)) == (False, True)
    os.close(reader)


def test_a_device_is_no_input() -> None:
    with open("/dev/zero", "rb") as zero:
        given = GivenInput(zero.fileno())
        assert (reads(given, 0), given.is_lost(1)) == ("", False)
