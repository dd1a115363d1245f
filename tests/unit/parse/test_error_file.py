"""What a rank wrote of its own end: torchelastic's error file and faulthandler's words, as real ones, and as nonsense."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_watchdog.parse.error_file import MAX_BYTES, parse_error_file, parse_fatal_error

CAPTURES = Path(__file__).parents[2] / "captures" / "own_words"


def test_an_exception_is_said_with_the_place_in_which_it_was_raised() -> None:
    data = (CAPTURES / "exception.json").read_bytes()
    assert parse_error_file(data) == "ValueError: bad shard 17 (train.py:9 in step)"


def test_a_crash_is_said_with_the_place_in_which_the_thread_stood() -> None:
    data = (CAPTURES / "segfault_stderr.log").read_bytes()
    assert parse_fatal_error(data) == "Fatal Python error: Segmentation fault (__init__.py:519 in string_at)"
    assert parse_fatal_error(b"iteration 5\n" + data[:39]) == "Fatal Python error: Segmentation fault"
    bare = (
        b"Fatal Python error: Aborted\n\nCurrent thread 0x1 [python] (most recent call first):\n  <no Python frame>\n"
    )
    others = b'\nThread 0x2 (most recent call first):\n  File "/opt/other.py", line 3 in idle\n'
    assert parse_fatal_error(bare + others) == "Fatal Python error: Aborted", "another thread is not the place"
    assert parse_fatal_error(b"step 5 of 9\nenabled faulthandler for fatal Python errors\n") is None


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"message": "Signal 9 (SIGKILL) received by PID 5"}', "Signal 9 (SIGKILL) received by PID 5"),
        (b'{"message": {"message": "A: b\\nsecond line\\u001b[31m"}}', "A: b"),
        (b'{"message": {"message": ""}}', "no reason is given"),
        (b'{"message": {"message": "A: b", "extraInfo": null}}', "A: b"),
        (b'{"message": {"message": "A: b", "extraInfo": {"py_callstack": null}}}', "A: b"),
    ],
)
def test_other_shapes_are_one_plain_line(data: bytes, said: str) -> None:
    assert parse_error_file(data) == said


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'{"message": 5}',
        b'{"message": {"text": "x"}}',
        b"[" * 100_000,
        b"\xff\xfe",
        b" " * (MAX_BYTES + 1),
    ],
)
def test_what_is_no_error_file_is_refused_with_a_reason(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"it is not an error file|it has more"):
        parse_error_file(data)
