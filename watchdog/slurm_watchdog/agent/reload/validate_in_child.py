"""In a child: has a new configuration checked by a fresh interpreter, whose memory is given back when it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

import msgspec

from slurm_watchdog.agent.workers.answer_types import ConfigCheck
from slurm_watchdog.agent.workers.request_types import CheckConfig
from slurm_watchdog.agent.workers.worker_state import WorkerState

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_SAID = 500


def check_config(request: CheckConfig, worker: WorkerState) -> ConfigCheck:
    """The answer of slurm_watchdog.agent.validate_config. Raises OSError."""
    me = os.getpid()
    libc = ctypes.CDLL(None)

    def die_with_me() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != me:
            os._exit(1)

    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "slurm_watchdog.agent.validate_config", request.file],
            input=request.running.encode(),
            capture_output=True,
            check=False,
            timeout=request.deadline_s,
            preexec_fn=die_with_me,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"no answer within {error.timeout:g} s: try again when the node has time") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-MAX_SAID:]
        return ConfigCheck(problems=(f"what is installed now does not start: {said}",))
    return msgspec.json.decode(done.stdout, type=ConfigCheck)
