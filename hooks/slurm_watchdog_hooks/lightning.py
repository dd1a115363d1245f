"""Lightning. lightning or pytorch_lightning >= 2.0.

from slurm_watchdog_hooks.lightning import WatchdogCallback, last_checkpoint

trainer = Trainer(..., callbacks=[WatchdogCallback("checkpoints")])
trainer.fit(model, ckpt_path=last_checkpoint("checkpoints"))
"""

import contextlib
import os
import re

try:
    from lightning.pytorch.callbacks import Callback
except ImportError:
    from pytorch_lightning.callbacks import Callback

from slurm_watchdog_hooks.loop import Watchdog


class WatchdogCallback(Callback):
    """Saves `directory`/kill-switch-step=N.ckpt and ends the training at the first batch after any rank saw the switch.

    directory  on a filesystem that all ranks share; made if it is not there.
    options    of Watchdog. Lightning itself uses SIGUSR1 for requeues (its plugin SLURMEnvironment): where it does,
               give signals=().
    """

    def __init__(self, directory, **options):
        self._directory = directory
        self._options = options
        self._watchdog = None

    def on_train_start(self, trainer, pl_module):
        steps = trainer.max_steps
        self._watchdog = Watchdog(total=steps if steps and steps > 0 else None, **self._options)

    def on_validation_start(self, trainer, pl_module):
        if self._watchdog is not None:
            self._watchdog.heartbeat.report(phase="evaluating")

    def on_validation_end(self, trainer, pl_module):
        if self._watchdog is not None:
            self._watchdog.heartbeat.report(phase="training")

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self._watchdog is None or self._watchdog.leaving or not self._watchdog.step(trainer.global_step):
            return
        name = "kill-switch-step={}.ckpt".format(trainer.global_step)
        # Renamed when it is whole: a run that was cut off while saving leaves nothing that looks like a checkpoint.
        temporary = os.path.join(self._directory, name + ".partial")
        with self._watchdog.phase("checkpointing"):
            trainer.save_checkpoint(temporary)  # on all ranks; it waits for all of them
        if trainer.is_global_zero:
            os.replace(temporary, os.path.join(self._directory, name))
            self._watchdog.announce(trainer.global_step)
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
