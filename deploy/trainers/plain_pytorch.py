"""The kill switch for a training loop in plain PyTorch, DeepSpeed or anything else that has a loop of its own.

One file, nothing of ours is imported: copy it beside your trainer. Python >= 3.8, PyTorch >= 1.13.

    from plain_pytorch import KillSwitch

    switch = KillSwitch()                      # after init_process_group, on all ranks
    for step in range(first_step, last_step):
        train_step()
        if switch.agreed():                    # the same answer on all ranks
            save_checkpoint(step)              # whole and complete: a temporary name first, renamed at the end
            print(f"saved at step {step} for: {switch.reason or 'another rank saw the switch'}", flush=True)
            sys.exit(0)

With DeepSpeed `save_checkpoint` is `engine.save_checkpoint(directory, tag)`, which all ranks have to call.
"""

import contextlib
import os
import signal
import sys
import threading
import time


class KillSwitch:
    """The same answer on all ranks at the same step: shall we save now and leave?

    Make one after `init_process_group`, on all ranks. Call `agreed` once a step, on all ranks, equally often.

    path             the file that is looked for; "" or None: SLURM_WATCHDOG_KILL_SWITCH, which Slurm's task prolog sets.
                     Without a path only the signals count.
    poll_seconds     how often a thread looks. It is a thread so that a filesystem that stopped answering stops only it.
    signals          they mean the same as the file; handlers that were there before are called as well.
    group            a process group whose tensors may lie in the CPU's memory (gloo). Default: the default group if it is
                     gloo, else one is made, so that asking never makes the CPU wait for the GPU.
    """

    def __init__(self, path=None, poll_seconds=1.0, signals=(signal.SIGUSR1,), group=None):
        self.path = path or os.environ.get("SLURM_WATCHDOG_KILL_SWITCH", "")
        self.reason = ""  # on ranks that saw it themselves: what the file said, or which signal came
        self._poll_seconds = poll_seconds
        self._group = group
        self._asked = None  # (the collective on its way, its tensor)
        self._left_over = None if self._names_this_run() else self._identity()
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                self._listen(number)
        if self.path:
            threading.Thread(target=self._watch, name="kill-switch", daemon=True).start()

    def agreed(self):
        """Whether any rank saw the file or a signal before its last call. The same on all ranks; then stop calling.

        The answer is one step old: it was asked for at the last call and came while the step was made.
        """
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_initialized() or distributed.get_world_size() == 1:
            return bool(self.reason)
        if self._asked is not None and self._wait_for_all_ranks():
            return True
        self._ask(distributed)
        return False

    def clear(self):
        """Remove the file. For scripts that start the next run themselves; the watchdog removes what it wrote."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _wait_for_all_ranks(self):
        work, seen = self._asked
        work.wait()
        return bool(seen.item())

    def _ask(self, distributed):
        torch = sys.modules["torch"]
        if self._group is None:
            gloo = distributed.get_backend() == "gloo"
            self._group = distributed.group.WORLD if gloo else distributed.new_group(backend="gloo")
        seen = torch.tensor([int(bool(self.reason))], dtype=torch.int32)
        work = distributed.all_reduce(seen, op=distributed.ReduceOp.MAX, group=self._group, async_op=True)
        self._asked = (work, seen)

    def _names_this_run(self):
        run = "{}.{}".format(os.environ.get("SLURM_JOB_ID", "?"), os.environ.get("SLURM_RESTART_COUNT", "0"))
        return run in self.path.split(os.sep)

    def _identity(self):
        # A file under a fixed name that was there before us was meant for the run before: it would end this one at once.
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        sys.stderr.write("kill switch: {} was there before this run and is ignored\n".format(self.path))
        return (found.st_ino, found.st_mtime_ns)

    def _watch(self):
        while not self.reason:
            try:
                found = os.stat(self.path)
                if (found.st_ino, found.st_mtime_ns) != self._left_over:
                    with open(self.path, encoding="utf-8", errors="replace") as file:
                        self.reason = file.readline(1000).strip() or self.path
            except OSError:
                pass  # not there: the rule. Or it cannot be read: looked at again.
            time.sleep(self._poll_seconds)

    def _listen(self, number):
        before = signal.getsignal(number)

        def handler(received, frame):
            self.reason = self.reason or "signal {}".format(received)
            if callable(before) and before is not signal.default_int_handler:
                before(received, frame)

        signal.signal(number, handler)
