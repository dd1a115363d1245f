"""Hugging Face Trainer, and TRL's, which are made of it. transformers >= 4.30.

from slurm_watchdog_hooks.huggingface import WatchdogCallback, last_checkpoint

trainer = Trainer(..., callbacks=[WatchdogCallback()])
trainer.train(resume_from_checkpoint=last_checkpoint(training_args.output_dir))
"""

import contextlib
import os
import re

from transformers import TrainerCallback

from slurm_watchdog_hooks.loop import Watchdog


class WatchdogCallback(TrainerCallback):
    """Saves a checkpoint and ends the training at the first step after the switch was seen by any rank.
    `options`: of Watchdog."""

    def __init__(self, **options):
        self._options = options
        self._watchdog = None

    def on_train_begin(self, args, state, control, **kwargs):
        self._watchdog = Watchdog(total=state.max_steps or None, **self._options)

    def on_step_end(self, args, state, control, **kwargs):
        if self._watchdog is not None and self._watchdog.step(state.global_step):
            control.should_save = True
            control.should_training_stop = True
        return control

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self._watchdog is not None and "loss" in (logs or {}):
            self._watchdog.report(state.global_step, loss=logs["loss"])

    def on_prediction_step(self, args, state, control, **kwargs):
        if self._watchdog is not None:
            self._watchdog.heartbeat.report(phase="evaluating")

    def on_save(self, args, state, control, **kwargs):
        if self._watchdog is not None and self._watchdog.leaving and state.is_world_process_zero:
            self._watchdog.announce(state.global_step)


def last_checkpoint(output_dir):
    """The directory of the newest whole checkpoint below `output_dir`, None if there is none.

    Trainer writes trainer_state.json last: a checkpoint without it was cut off.
    """
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(output_dir):
            match = re.fullmatch(r"checkpoint-(\d+)", name)
            if match and os.path.isfile(os.path.join(output_dir, name, "trainer_state.json")):
                found.append((int(match.group(1)), os.path.join(output_dir, name)))
    return max(found)[1] if found else None
