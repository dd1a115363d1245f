"""The helper's process: `python -m slurm_watchdog.agent.helper SOCKET USER [PREFIX…]`, as `slurm-watchdog
helper` becomes it by exec."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from slurm_watchdog.base.python310 import run_module

from slurm_watchdog.base import slim_imports  # noqa: F401  # isort: skip -- before msgspec
from slurm_watchdog.agent.helper.requests import TASKS
from slurm_watchdog.agent.helper.server import run_helper
from slurm_watchdog.base import log_setup
from slurm_watchdog.base.process_setup import be_unobtrusive, set_name
from slurm_watchdog.config.knowledge_files import put_in_force, read_texts

log = logging.getLogger(__name__)

NAME = "slurm-wd-helper"
KNOWLEDGE = "--knowledge="


def become_helper(path: str, agent: str, prefixes: Sequence[str] = (), *, knowledge: str = "") -> NoReturn:
    """Replaces this process by the helper, a fresh interpreter that has never seen a command line. Raises OSError."""
    environment = {"MALLOC_ARENA_MAX": "1", **os.environ}
    command = [*run_module("slurm_watchdog.agent.helper"), path, agent, *prefixes]
    command += [f"{KNOWLEDGE}{knowledge}"] if knowledge else []
    os.execve(sys.executable, command, environment)  # noqa: S606 -- a list, and no shell is wanted


def main(argv: list[str]) -> int:
    """Runs the helper; returns its exit code."""
    set_name(NAME)
    be_unobtrusive()
    log_setup.set_up()
    for each in argv[2:]:
        if each.startswith(KNOWLEDGE):
            texts, problems = read_texts(each.removeprefix(KNOWLEDGE))
            for problem in problems:
                log.error("%s", problem)
            put_in_force(() if problems else texts)
    prefixes = tuple(each for each in argv[2:] if not each.startswith(KNOWLEDGE))
    return run_helper(argv[0], argv[1], TASKS, prefixes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
