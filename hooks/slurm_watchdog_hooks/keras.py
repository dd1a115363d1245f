"""Keras 3, or tf.keras.

from slurm_watchdog_hooks.keras import WatchdogCallback

model.fit(..., callbacks=[keras.callbacks.BackupAndRestore("backup"),
WatchdogCallback("checkpoints/kill-switch.keras")])
"""

import sys

if "keras" in sys.modules or "tensorflow" not in sys.modules:
    from keras.callbacks import Callback
else:
    from tensorflow.keras.callbacks import Callback

from slurm_watchdog_hooks.heartbeat import is_first_rank
from slurm_watchdog_hooks.loop import Watchdog


class WatchdogCallback(Callback):
    """Saves the model at `path` and ends `fit` after the batch at which the switch was seen.

    path     for model.save, written by rank 0; None: nothing is saved here.
    options  of Watchdog.
    """

    def __init__(self, path=None, **options):
        super().__init__()
        self._path = path
        self._options = options
        self._watchdog = None
        self._epoch = 0

    def on_train_begin(self, logs=None):
        self._watchdog = Watchdog(**self._options)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_test_begin(self, logs=None):
        if self._watchdog is not None:
            self._watchdog.heartbeat.report(phase="evaluating")

    def on_test_end(self, logs=None):
        if self._watchdog is not None:
            self._watchdog.heartbeat.report(phase="training")

    def on_train_batch_end(self, batch, logs=None):
        if self._watchdog is None or self._watchdog.leaving:
            return
        steps, epochs = self.params.get("steps"), self.params.get("epochs")
        step = self._epoch * (steps or 0) + batch + 1
        total = steps * epochs if steps and epochs else None
        if not self._watchdog.step(step, loss=(logs or {}).get("loss"), total=total):
            return
        if self._path is not None and is_first_rank():
            with self._watchdog.phase("checkpointing"):
                self.model.save(self._path)
            self._watchdog.announce(step)
        self.model.stop_training = True
