"""In a child: has a new configuration checked by a fresh interpreter, whose memory is given back when it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from typing import Any

import msgspec

from slurm_watchdog.agent.workers.request_types import CheckConfig

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_SAID = 500


def check_config(args: CheckConfig, state: dict[str, Any]) -> dict[str, Any]:
    """Gives {"problems": [sentence…], "settings": JSON}. Raises OSError."""
    me = os.getpid()
    libc = ctypes.CDLL(None)

    def die_with_me() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != me:
            os._exit(1)

    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "slurm_watchdog.agent.validate_config", args.file],
            input=args.running.encode(),
            capture_output=True,
            check=False,
            timeout=args.deadline_s,
            preexec_fn=die_with_me,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(
            f"no answer within {error.timeout:g} s: try again when the node has time"
        ) from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-MAX_SAID:]
        return {"problems": [f"what is installed now does not start: {said}"], "settings": ""}
    found: dict[str, Any] = msgspec.json.decode(done.stdout)
    return found
