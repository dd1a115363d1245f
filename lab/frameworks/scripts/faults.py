"""What a training does wrong, and what it truly does. Imported by every script beside it; needs nothing but Python.

The environment says which fault (`FAULT`), of which rank (`FAULT_RANK`), at which step (`FAULT_STEP`), for
how long (`FAULT_SECONDS`), and where the truth is kept (`FAULT_PLACE`). A fault happens in the first run
only. SIGSTOP and SIGKILL are no business of the process that gets them: the runner sends them.

The truth is one small mapped file for each run and rank: writing to it is no system call, so that no watcher
can take it for progress.
"""

import contextlib
import functools
import mmap
import os
import struct
import threading
import time

KIND = os.environ.get("FAULT", "none")
FAULTY = int(os.environ.get("FAULT_RANK", "1"))
STEP = int(os.environ.get("FAULT_STEP", "85"))
SECONDS = float(os.environ.get("FAULT_SECONDS", "60"))
PLACE = os.environ.get("FAULT_PLACE", ".")
RUN = int(os.environ.get("SLURM_WATCHDOG_RESTARTS", "0"))
STEPS = int(os.environ.get("FAULT_STEPS", "130"))
"""Of the whole training."""
SAVE_EVERY = 20
EVALUATE_EVERY = 30
STEP_SECONDS = float(os.environ.get("FAULT_STEP_SECONDS", "0.25"))
ROW = struct.Struct("<qqqddd")
"""pid, first step, last step, when they were made (seconds since 1970), when the fault began (0: not in this run)."""


_backward = []


def rank():
    """Of this process, as launchers tell it."""
    return int(os.environ.get("RANK", "0"))


@functools.cache
def _open():
    path = os.path.join(PLACE, f"run{RUN}.rank{rank()}")
    with open(path, "w+b") as file:
        file.write(ROW.pack(os.getpid(), -1, -1, 0.0, 0.0, 0.0))
        file.flush()
        return mmap.mmap(file.fileno(), ROW.size)


def _read():
    return list(ROW.unpack(_open()[:]))


def _due(kind):
    """True where this fault is to happen, here and now, for the first time; says so in the truth."""
    if kind != KIND or RUN > 0:
        return False
    row = _read()
    if row[2] < STEP or row[5]:
        return False
    row[5] = time.time()
    _open()[:] = ROW.pack(*row)
    return True


def begin():
    """At the start of the main process of a rank, before any worker is forked: its place in the truth."""
    _open()


def made(step):
    """The step of this number is made, the first being 1. Takes as long as a step of a real model, unless its
    backward pass does."""
    row = _read()
    now = time.time()
    if row[1] < 0:
        row[1], row[3] = step, now
    row[0], row[2], row[4] = os.getpid(), step, now
    _open()[:] = ROW.pack(*row)
    if not _backward:
        work()


def work():
    """What a step takes."""
    time.sleep(STEP_SECONDS)


def steps_take_their_time_in_backward():
    """From now on `made` takes none: the model calls `work`."""
    _backward.append(True)


def sample():
    """Called for each sample of the training's data, in whatever process makes it."""
    if rank() == FAULTY and _due("loader"):
        inside, outside = os.pipe()
        os.read(inside, 1)
        os.close(outside)


def forward():
    """Called in each forward pass of the training."""
    if rank() != FAULTY:
        return
    if _due("lock"):
        guard = threading.Lock()
        guard.acquire()
        guard.acquire()
    if _due("exception"):
        threading.Thread(target=threading.Event().wait, name="uploader").start()
        raise RuntimeError("bad sample in shard 17")


def evaluated():
    """Called for each sample of an evaluation: a long one in the case of that name, in every rank."""
    if KIND == "evaluation" and RUN == 0 and (_due("evaluation") or _evaluating()):
        time.sleep(0.05)


def evaluation_samples(short):
    """How many samples a rank evaluates: `short`, or so many that it takes FAULT_SECONDS."""
    return int(SECONDS / 0.05) if KIND == "evaluation" and RUN == 0 else short


def _evaluating():
    """One evaluation is long, not each that follows."""
    return 0 < time.time() - _read()[5] < SECONDS


class SlowFile:
    """A file on a filesystem that takes its time: each piece is written for real."""

    def __init__(self, path, seconds):
        self.file = open(path, "wb")  # noqa: SIM115 -- closed by close()
        self.left = int(seconds / 0.25)

    def write(self, data):
        view = memoryview(data).cast("B")
        pieces = max(1, min(self.left, 40 if len(view) > 400 else 2))
        self.left -= pieces
        size = max(1, -(-len(view) // pieces))
        for at in range(0, len(view), size):
            self.file.write(view[at : at + size])
            self.file.flush()
            if self.left > -pieces:
                time.sleep(0.25)
        return len(view)

    def flush(self):
        self.file.flush()

    def close(self):
        while self.left > 0:  # what is small is slow, too
            self.file.flush()
            os.fsync(self.file.fileno())
            time.sleep(0.25)
            self.left -= 1
        self.file.close()


def slow_torch_save():
    """From now on torch.save takes FAULT_SECONDS once, at the fault's step, in whatever rank saves."""
    import torch

    fast = torch.save

    def save(what, to, *args, **more):
        if rank() != 0 or not _due("save"):
            return fast(what, to, *args, **more)
        if hasattr(to, "write"):
            slow_save()
            return fast(what, to, *args, **more)
        with contextlib.closing(SlowFile(to, SECONDS)) as file:
            return fast(what, file, *args, **more)

    if KIND == "save":
        torch.save = save


def slow_save(path="checkpoint.partial"):
    """Where a framework does not save by torch.save: the same slow writes, beside its checkpoint."""
    end = time.time() + SECONDS
    with open(path, "wb") as file:
        while time.time() < end:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.25)
    os.unlink(path)


def save_is_slow():
    """True once, in the rank that saves, at the fault's step: `slow_save` is to be called."""
    return rank() == 0 and _due("save")
