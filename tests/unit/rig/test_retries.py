"""How often a live test may be repeated in one `make test`: in a pytest of its own, with tests that fail the
first time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import RETRIES_ALLOWED

CHECKOUT = Path(__file__).resolve().parents[3]
FAILS_ONCE = """
import pathlib, pytest
@pytest.mark.parametrize("number", range({count}))
def test_{name}(number):
    mark = pathlib.Path(__file__).with_suffix(f".{{number}}")
    if not mark.exists():
        mark.touch()
        raise AssertionError("the first time")
"""


def part_of_a_run(place: Path, name: str, count: int, *options: str) -> tuple[int, str]:
    """Exit code and output of a part in which `count` tests have to be repeated."""
    (place / "conftest.py").write_text(
        f"import sys\nsys.path.insert(0, {str(CHECKOUT)!r})\nfrom tests.conftest import *\n"
    )
    test = place / f"test_{name}.py"
    test.write_text(FAILS_ONCE.format(name=name, count=count))
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--reruns",
        "2",
        *options,
        str(test),
    ]
    environment = os.environ | {"RETRIED_TESTS": str(place / "build" / "retried")}
    done = subprocess.run(argv, cwd=place, env=environment, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def test_a_run_fails_once_more_of_its_tests_were_repeated_in_all_parts_together_than_are_allowed(
    tmp_path: Path,
) -> None:
    allowed = RETRIES_ALLOWED
    code, said = part_of_a_run(tmp_path, "live", allowed, "-n", "1")
    assert (code, f"repeated: {allowed} (allowed)" in said) == (0, True), said
    code, said = part_of_a_run(tmp_path, "exclusive", 1)
    assert (code, f"repeated: {allowed + 1} (more than {allowed}: the run fails)" in said) == (1, True), said
    assert "test_live.py::test_live[2]: " in said and "AssertionError: the first time" in said
    assert "1 passed" in said
