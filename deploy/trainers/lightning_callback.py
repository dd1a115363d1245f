"""The kill switch for Lightning: a callback that saves and ends.

One file, nothing of ours is imported: copy it beside your script. Python >= 3.8, lightning or pytorch_lightning >= 2.0.

    from lightning_callback import KillSwitchCallback, last_checkpoint

    trainer = Trainer(..., callbacks=[KillSwitchCallback("checkpoints")])
    trainer.fit(model, ckpt_path=last_checkpoint("checkpoints"))
"""

import contextlib
import os
import re
import signal
import sys
import threading
import time

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    from pytorch_lightning.callbacks import Callback


class KillSwitchCallback(Callback):
    """Saves `directory`/kill-switch-step=N.ckpt and ends the training at the first batch after any rank saw the switch.

    directory  on a filesystem that all ranks share; made if it is not there.
    options    of KillSwitch: path, poll_seconds, signals, group. Lightning itself uses SIGUSR1 for requeues (its plugin
               SLURMEnvironment): where it does, give signals=().
    """

    def __init__(self, directory, **options):
        self._directory = directory
        self._options = options
        self._switch = None
        self._leaving = False

    def on_train_start(self, trainer, pl_module):
        self._switch = KillSwitch(**self._options)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self._leaving or self._switch is None or not self._switch.agreed():
            return
        self._leaving = True
        name = "kill-switch-step={}.ckpt".format(trainer.global_step)
        # Renamed when it is whole: a run that was cut off while saving leaves nothing that looks like a checkpoint.
        temporary = os.path.join(self._directory, name + ".partial")
        trainer.save_checkpoint(temporary)  # on all ranks; it waits for all of them
        if trainer.is_global_zero:
            os.replace(temporary, os.path.join(self._directory, name))
            seen = self._switch.reason or "another rank saw the switch"
            print(
                "kill switch: saved checkpoint at step {}: {}".format(trainer.global_step, seen), flush=True
            )
        trainer.should_stop = True


def last_checkpoint(directory):
    """The newest checkpoint of this callback or of ModelCheckpoint (`step=N` in its name) in `directory`, or None."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            match = re.search(r"step=(\d+)\S*\.ckpt$", name)
            if match:
                found.append((int(match.group(1)), os.path.join(directory, name)))
    return max(found)[1] if found else None


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
