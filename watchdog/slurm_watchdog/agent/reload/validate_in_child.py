"""In a child: has a new configuration checked by a fresh interpreter, whose memory is given back when it ends."""

from __future__ import annotations

import os
import subprocess
from functools import partial

import msgspec

from slurm_watchdog.agent.workers.answer_types import ConfigCheck
from slurm_watchdog.agent.workers.child import die_with_parent
from slurm_watchdog.agent.workers.request_types import CheckConfig
from slurm_watchdog.agent.workers.worker_state import WorkerState
from slurm_watchdog.base.python310 import run_module

MAX_SAID = 500


def check_config(request: CheckConfig, worker: WorkerState) -> ConfigCheck:
    """The answer of slurm_watchdog.agent.validate_config. Raises OSError."""
    try:
        done = subprocess.run(
            [*run_module("slurm_watchdog.agent.validate_config"), request.file],
            input=request.running.encode(),
            capture_output=True,
            check=False,
            timeout=request.deadline_s,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"no answer within {error.timeout:g} s: try again when the node has time") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-MAX_SAID:]
        return ConfigCheck(problems=(f"the installed version does not start: {said}",))
    return msgspec.json.decode(done.stdout, type=ConfigCheck)
