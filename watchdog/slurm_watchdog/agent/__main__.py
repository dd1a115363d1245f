"""The agent's process: `python -m slurm_watchdog.agent FD [--once] [--json] [--config=FILE]`, as `slurm-watchdog agent`
becomes it by exec.

FD is an inherited descriptor with the settings (see slurm_watchdog.agent.settings), FILE where they came from. A fresh
interpreter, because memory that was once used for checking a configuration and a command line is never given back.
"""

from __future__ import annotations

import sys

from slurm_watchdog.base import slim_imports  # noqa: F401  # isort: skip -- before msgspec
from slurm_watchdog.agent.service import run_agent
from slurm_watchdog.agent.settings import read_settings
from slurm_watchdog.base import log_setup
from slurm_watchdog.base.process_setup import be_unobtrusive, set_name

NAME = "slurm-watchdog"  # What `ps` and `top` show: without it every agent is called python3.


def main(argv: list[str]) -> int:
    """Runs the agent; returns its exit code."""
    set_name(NAME)
    be_unobtrusive()
    log_setup.set_up()
    given = dict(word.partition("=")[::2] for word in argv[1:])
    return run_agent(
        read_settings(int(argv[0])),
        once="--once" in given,
        as_json="--json" in given,
        file=given.get("--config", ""),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
