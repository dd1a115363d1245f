"""A command with a deadline."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Final

DEADLINE_S: Final = 10.0


def run(argv: Sequence[str], deadline_s: float = DEADLINE_S) -> tuple[int | None, str]:
    """(exit code, output) of a command; (None, why) for one that could not be run to its end. One that can't
    be ended is left."""
    try:
        process = subprocess.Popen(
            list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True
        )  # fmt: skip
    except OSError as error:
        return None, f"{argv[0]}: {error.strerror}"
    try:
        said, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return None, f"{argv[0]}: no answer within {deadline_s:g} s"
    return process.returncode, said.decode(errors="replace").strip()
