"""The agent's process: `python -m watchdog.agent FD [--once] [--json]`, as `slurm-watchdog agent` becomes it by exec.

FD is an inherited descriptor with the settings (see watchdog.agent.settings). A fresh interpreter, because memory that was
once used for checking a configuration and a command line is never given back.
"""

from __future__ import annotations

import sys

from watchdog import log
from watchdog.agent.app import run_agent
from watchdog.agent.manners import be_unobtrusive, set_name
from watchdog.agent.settings import read_settings

NAME = "slurm-watchdog"
"""What `ps` and `top` show: without it every agent is called python3."""


def main(argv: list[str]) -> int:
    """Runs the agent; returns its exit code."""
    set_name(NAME)
    be_unobtrusive()
    log.set_up()
    return run_agent(read_settings(int(argv[0])), once="--once" in argv, as_json="--json" in argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
