"""`controller --record`: what is written comes back as it was, and no disk stops the controller."""

from __future__ import annotations

import errno
import io
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_watchdog.config.loading import parse_config
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from slurm_watchdog.recording.entries import (
    MAX_BYTES,
    Answer,
    Begin,
    Entry,
    State,
    Tally,
    Tick,
    Value,
    pack,
    read_entries,
    settings_of,
)
from slurm_watchdog.recording.recorder import Recorder
from tests.builders.views import slurm_job


def entries(data: bytes) -> tuple[list[Entry], dict[str, int]]:
    tally = Tally()
    return list(read_entries(io.BytesIO(data).readline, tally)), tally.skipped


def recorded(path: Path, *what: bytes | Value) -> list[Entry]:
    recorder = Recorder(str(path))
    for each in what:
        recorder.record(each)
    recorder.close()
    assert recorder.dropped == 0
    return entries(path.read_bytes())[0]


def wait_until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_comes_in_is_written_as_it_is_and_in_its_order(tmp_path: Path) -> None:
    job, node = slurm_job(job_id="7_3", comment="watchdog=off"), SlurmNode(name="n1", address="10.0.0.1", state="DOWN")
    what = (
        Begin(release="x"),
        b"r\x00\xff\n\x1a\x1an\x1ae",
        Tick(),
        b"",
        Answer(view=SlurmView(jobs=(job,), nodes=(node,))),
    )
    found = recorded(tmp_path / "r", *what, State(paused="maintenance"))
    assert [each.what for each in found] == [*what, State(paused="maintenance")]
    assert [each.at for each in found] == sorted(each.at for each in found)
    assert all(abs(each.wall - time.time()) < 60 for each in found)


def test_the_settings_have_no_password_and_no_address() -> None:
    config = parse_config("mode: act\nexpert: {controller: {journal_url: 'postgresql://us:secret@db/x'}}\n")
    text = str(settings_of(config))
    assert "secret" not in text and "warm_up" in text
    assert config.controller.listen not in text and config.controller.state_directory not in text


WHOLE = [Entry(float(n), 100.0 + n, bytes([n]) * n) for n in range(40)]


@given(st.integers(0, 40 * 40), st.binary(max_size=50), st.integers(0, 60))
def test_damage_costs_what_is_damaged_and_nothing_else(place: int, instead: bytes, length: int) -> None:
    data = b"".join(map(pack, WHOLE))
    place %= len(data)
    found, skipped = entries(data[:place] + instead + data[place + length :])
    ends = [sum(len(pack(each)) for each in WHOLE[: n + 1]) for n in range(len(WHOLE))]
    whole = [
        each for each, end in zip(WHOLE, ends, strict=True) if end <= place or end - len(pack(each)) >= place + length
    ]
    assert [each for each in found if each in whole] == whole
    assert len(found) <= len(WHOLE) and sum(skipped.values()) <= 1


def test_what_was_cut_short_before_is_skipped_and_what_follows_is_read(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_bytes(pack(WHOLE[9])[:-3])  # the controller before was killed while it wrote
    assert len(recorded(path, Tick())) == 1
    assert entries(path.read_bytes())[1] == {"damaged, or cut short": 1}


# ---------------------------------------------------------------------------------------------- disks


def test_a_pipe_that_nobody_reads_holds_nobody_up(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    recorder = Recorder(str(fifo), max_waiting=10)
    recorder.record(Tick())
    wait_until(recorder._waiting.empty)
    time.sleep(0.1)  # now the thread waits for a reader
    for _ in range(100):
        recorder.record(Tick())
    assert recorder.dropped == 90
    read = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)  # lets the thread go on
    recorder.close()
    os.close(read)


def test_frames_that_wait_are_bounded_in_bytes(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    recorder, frame = Recorder(str(fifo)), bytes(8 << 20)
    for _ in range(20):
        recorder.record(frame)
    assert recorder.dropped == 12
    read = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    os.close(read)
    recorder.close()


def test_a_full_disk_costs_entries_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder("/dev/full")
    for _ in range(5):
        recorder.record(Answer(view=SlurmView(jobs=(slurm_job(),), nodes=())))
        wait_until(recorder._waiting.empty)
    recorder.close()
    assert recorder.dropped == 5
    said = [r.getMessage() for r in caplog.records if "missing from /dev/full" in r.getMessage()]
    assert len(said) == 1
    assert os.strerror(errno.ENOSPC) in said[0]


def test_an_entry_that_is_too_long_is_dropped_and_counted(tmp_path: Path) -> None:
    recorder = Recorder(str(tmp_path / "r"))
    recorder.record(State(paused="x" * MAX_BYTES))
    recorder.record(Tick())
    recorder.close()
    assert recorder.dropped == 1
    assert [each.what for each in entries((tmp_path / "r").read_bytes())[0]] == [Tick()]


def test_a_file_that_cannot_be_opened_is_told_and_the_controller_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(str(tmp_path / "missing" / "file"))
    recorder.record(Tick())
    recorder.close()
    assert recorder.dropped == 1
    assert "No such file or directory" in caplog.text


def test_a_recording_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "r").touch(mode=0o644)
    recorded(tmp_path / "r", Tick())
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o600
