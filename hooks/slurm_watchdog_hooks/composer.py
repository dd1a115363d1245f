"""MosaicML Composer.

    from slurm_watchdog_hooks.composer import WatchdogCallback

    trainer = Trainer(..., save_folder="checkpoints", autoresume=True, callbacks=[WatchdogCallback()])

`state.stop_training()` ends the fit after this batch, and the checkpoint that `save_folder` asks for at the
end is saved then.
"""

from composer.core import Callback

from slurm_watchdog_hooks.loop import Watchdog


class WatchdogCallback(Callback):
    """Stops the training after the batch at which any rank saw the switch. `options`: of Watchdog."""

    def __init__(self, **options):
        self._options = options
        self._watchdog = None

    def fit_start(self, state, logger):
        self._watchdog = Watchdog(**self._options)

    def eval_start(self, state, logger):
        if self._watchdog is not None:
            self._watchdog.heartbeat.report(phase="evaluating")

    def eval_end(self, state, logger):
        if self._watchdog is not None:
            self._watchdog.heartbeat.report(phase="training")

    def batch_end(self, state, logger):
        if self._watchdog is not None and self._watchdog.step(int(state.timestamp.batch)):
            state.stop_training()
