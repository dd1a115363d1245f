"""The site's own check of a node: a shell command. Exit code 0 is well. Standard library only."""

from __future__ import annotations

import subprocess
from typing import Any

NOT_RUN = (126, 127)
"""What a shell ends with where a command cannot be executed, or is not found (POSIX, sh, Exit Status)."""


def measure_site_check(asked: dict[str, Any]) -> dict[str, Any]:
    """Runs `asked["command"]`; its output's last line is a fact (`said`), or why it could not run (`not_run`): that
    says nothing about the node. Raises OSError where it ends with another code than 0: that is what it has to say."""
    done = subprocess.run(
        ["/bin/sh", "-c", asked["command"]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    last = lines[-1][:300] if lines else ""
    if done.returncode in NOT_RUN:
        return {"figures": {}, "facts": {"not_run": f"it ended with {done.returncode}: {last}"}}
    if done.returncode:
        raise OSError(f"it ended with {done.returncode}: {last}")
    return {"figures": {}, "facts": {"said": last}}
