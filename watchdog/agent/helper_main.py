"""The helper's process: `python -m watchdog.agent.helper_main SOCKET USER [PREFIX…]`, as `slurm-watchdog helper` becomes it by exec."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from watchdog import log
from watchdog.agent import lean  # noqa: F401 -- before msgspec
from watchdog.agent.helper import run_helper
from watchdog.agent.helper_functions import HELPER_FUNCTIONS
from watchdog.agent.manners import be_unobtrusive, set_name

NAME = "slurm-wd-helper"


def become_helper(path: str, agent: str, prefixes: Sequence[str] = ()) -> NoReturn:
    """Replaces this process by the helper, a fresh interpreter that has never seen a command line. Raises OSError."""
    environment = {"MALLOC_ARENA_MAX": "1", **os.environ}
    command = [sys.executable, "-P", "-m", "watchdog.agent.helper_main", path, agent, *prefixes]
    os.execve(sys.executable, command, environment)  # noqa: S606 -- a list, and no shell is wanted


def main(argv: list[str]) -> int:
    """Runs the helper; returns its exit code."""
    set_name(NAME)
    be_unobtrusive()
    log.set_up()
    return run_helper(argv[0], argv[1], HELPER_FUNCTIONS, tuple(argv[2:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
