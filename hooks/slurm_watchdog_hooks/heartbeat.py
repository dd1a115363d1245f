"""The heartbeat: one line of JSON with step, total, phase and loss, which the agent on the node reads before
any log."""

import json
import math
import os
import sys
import threading
import time

RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
PHASES = ("starting", "training", "evaluating", "checkpointing", "finishing")


def is_first_rank():
    """Whether this process is rank 0: by torch.distributed or JAX where they are initialised, else by the
    launcher's variables."""
    try:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank() == 0
        jax = sys.modules.get("jax")
        if jax is not None and jax.process_count() > 1:
            return jax.process_index() == 0
    except Exception:  # whatever a framework raises here, the training goes on
        pass
    given = next((os.environ[name] for name in RANKS if os.environ.get(name)), "0")
    return given == "0"


class Heartbeat(object):
    """Rank 0 keeps the file up to date, in a thread: `report` only remembers, waits for no filesystem and never raises.

    path     default: SLURM_WATCHDOG_HEARTBEAT, which Slurm's task prolog or `slurm-watchdog run` sets. Without one:
             nothing.
    every_s  seconds between two lines, at least.
    writes   whether this process writes; default: rank 0 does.
    """

    def __init__(self, path=None, every_s=1.0, writes=None):
        self.path = path or os.environ.get("SLURM_WATCHDOG_HEARTBEAT", "")
        self._every_s = max(1.0, every_s)
        self._writes = writes
        self._now = {"step": None, "total_steps": None, "phase": "starting", "loss": None}
        self._written = None
        self._thread = None
        self._changed = threading.Event()

    def report(self, step=None, total=None, phase=None, loss=None):
        """Remembers what is given, to be written within a second. `loss` may be a tensor on the CPU or a
        number; None: as before."""
        if not self.path:
            return
        try:
            if self._writes is None:
                self._writes = is_first_rank()
            if self._writes:
                self._remember(step, total, phase, loss)
        except Exception:  # a heartbeat is no reason to end a training
            pass

    def _remember(self, step, total, phase, loss):
        now = dict(self._now)
        now["loss"] = now["loss"] if loss is None else _number(loss)
        now["step"] = now["step"] if step is None else int(step)
        now["total_steps"] = now["total_steps"] if total is None else int(total)
        now["phase"] = phase or ("training" if step is not None else now["phase"])
        self._now = now
        self._changed.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="heartbeat", daemon=True)
            self._thread.start()

    def _keep(self):
        while True:
            self._changed.wait()
            self._changed.clear()
            try:
                self.write()
            except Exception:  # no room, no directory yet: tried again with the next step
                pass
            time.sleep(self._every_s)

    def write(self):
        """Writes the line, whole or not at all: a temporary name first, renamed at the end. Raises OSError."""
        line = dict(self._now, slurm_watchdog_heartbeat=1, pid=os.getpid(), at=round(time.time(), 3))
        temporary = "{}.{}".format(os.path.join(os.path.dirname(self.path), ".heartbeat"), os.getpid())
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
        with os.fdopen(fd, "w") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")
        os.replace(temporary, self.path)


def _number(loss):
    # A tensor on a GPU would make the step wait for it: what is no plain number is left out unless it lies in
    # the CPU's memory.
    device = getattr(loss, "device", None)
    if device is not None and getattr(device, "type", device) != "cpu":
        return None
    value = float(loss)
    return value if math.isfinite(value) else "nan"
