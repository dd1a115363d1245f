"""The agent's process: `python -m watchdog.agent FD [--once] [--json]`, as `slurm-watchdog agent` becomes it by exec.

FD is an inherited descriptor with the settings (see watchdog.agent.settings). A fresh interpreter, because memory that was
once used for checking a configuration and a command line is never given back.
"""

from __future__ import annotations

import os
import sys

from watchdog import log
from watchdog.agent.app import run_agent
from watchdog.agent.settings import read_settings

NAME = "slurm-watchdog"
"""What `ps` and `top` show: without it every agent is called python3."""


def set_name(name: str) -> None:
    """Gives this process, and those it forks, a name of at most 15 bytes."""
    try:
        with open("/proc/self/comm", "w") as file:
            file.write(name)
    except OSError:
        pass  # only a name


def be_unobtrusive() -> None:
    """From now on neither this process nor those it forks takes the core from a thread that computes just because it woke up.

    SCHED_BATCH (see sched(7)) changes no weight: on a core that is busy we wait for the end of a slice, some milliseconds,
    and get our share. Our deadlines are seconds.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:
        pass  # not allowed here: then as everybody else


def main(argv: list[str]) -> int:
    """Runs the agent; returns its exit code."""
    set_name(NAME)
    be_unobtrusive()
    log.set_up()
    return run_agent(read_settings(int(argv[0])), once="--once" in argv, as_json="--json" in argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
