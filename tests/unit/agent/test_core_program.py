"""Which program left a core file, read from the file itself."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.agent.evidence import cores
from slurm_watchdog.agent.evidence.cores import notes_of, parse_program, read_program
from slurm_watchdog.agent.workers.request_types import ReadCore
from slurm_watchdog.agent.workers.worker_state import WorkerState


def note(kind: int, body: bytes) -> bytes:
    return struct.pack("<III", 5, len(body), kind) + b"CORE\0\0\0\0" + body + b"\0" * (-len(body) % 4)


def files(*rows: tuple[int, int, str]) -> bytes:
    table = b"".join(struct.pack("<QQQ", start, end, 0) for start, end, _ in rows)
    return struct.pack("<QQ", len(rows), 4096) + table + b"".join(name.encode() + b"\0" for *_, name in rows)


AUXV = struct.pack("<QQQQQQ", 6, 4096, 9, 0x5010, 0, 0)
MAPPED = files((0x1000, 0x2000, "/lib/libc.so"), (0x5000, 0x6000, "/opt/x/python3"), (0x7000, 0x8000, "/o/t"))


def core(notes: bytes) -> bytes:
    header = bytearray(64)
    header[:6], header[16:18] = b"\x7fELF\x02\x01", b"\x04\x00"
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<HH", header, 54, 56, 2)
    load = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, 0, 0, 0)
    told = struct.pack("<IIQQQQQQ", 4, 4, 64 + 112, 0, 0, len(notes), 0, 0)
    return bytes(header) + load + told + notes


def test_the_program_is_the_file_that_holds_the_entry(tmp_path: Path) -> None:
    path = tmp_path / "core"
    path.write_bytes(core(note(1, b"x" * 7) + note(6, AUXV) + note(0x46494C45, MAPPED)))
    assert read_program(str(path)) == "/opt/x/python3"


@pytest.mark.parametrize(
    "notes",
    [b"", note(6, AUXV), note(0x46494C45, MAPPED), note(6, AUXV) + note(0x46494C45, files((0, 16, "/a")))],
)
def test_notes_that_do_not_tell_give_none(notes: bytes) -> None:
    assert parse_program(notes) is None


@given(st.binary(max_size=400), st.integers(0, 400))
def test_a_damaged_file_never_fails(noise: bytes, cut: int) -> None:
    whole = core(note(6, AUXV) + note(0x46494C45, MAPPED))
    for data in (noise, whole[:cut] + noise, b"\x7fELF\x02\x01" + noise):
        notes_of(data)
        parse_program(data)


@pytest.mark.parametrize(
    ("neighbours", "program"), [(sys.executable, sys.executable), (None, None), ("/no/such", None)]
)
def test_why_frames_have_no_names_is_said(tmp_path: Path, neighbours: str | None, program: str | None) -> None:
    path = tmp_path / "core"
    path.write_bytes(core(note(6, AUXV) + note(0x46494C45, MAPPED)))
    found, why_not = cores._program_of(str(path), neighbours)
    assert found == program
    assert (why_not is None) == (program is not None)
    assert why_not is None or "/opt/x/python3, the program that left this core file, is not readable" in why_not


@pytest.mark.skipif(shutil.which("gdb", path="/usr/bin:/bin:/usr/local/bin") is None, reason="gdb is not installed")
def test_a_core_file_of_a_rank_that_has_no_living_neighbour_has_frames_with_names(tmp_path: Path) -> None:
    crash = "import ctypes, resource; resource.setrlimit(resource.RLIMIT_CORE, (-1, -1)); ctypes.string_at(0)"
    crashed = subprocess.run([sys.executable, "-c", crash], cwd=tmp_path, capture_output=True, timeout=180)
    assert crashed.returncode == -signal.SIGSEGV
    found = sorted(tmp_path.glob("core*"))
    if not found:
        pytest.skip("this kernel leaves no core file in the working directory")
    assert os.path.samefile(read_program(str(found[0])) or "", os.path.realpath(sys.executable))
    lines = cores.read_core(ReadCore(str(found[0]), None), WorkerState())
    assert any(line.startswith("#") and "??" not in line for line in lines)
