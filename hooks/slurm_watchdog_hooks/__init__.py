"""The trainer's side of slurm-watchdog: save and leave when asked to, and report each step. No dependencies,
Python >= 3.8.

    from slurm_watchdog_hooks import Watchdog

    watchdog = Watchdog(total=last_step)           # after init_process_group, on all ranks
    for step in watchdog.steps(first_step, last_step):
        loss = train_step()
        watchdog.report(step, loss=loss)
    if watchdog.leaving:                           # the same on all ranks, after the same step
        save_checkpoint(step)
        sys.exit(0)

Callbacks of frameworks are modules of their own: huggingface, lightning, deepspeed, composer, keras, jax.
Without a watchdog nothing is looked for and nothing is written.
"""

from slurm_watchdog_hooks.heartbeat import Heartbeat
from slurm_watchdog_hooks.loop import Watchdog
from slurm_watchdog_hooks.switch import KillSwitch

__all__ = ["Heartbeat", "KillSwitch", "Watchdog"]
__version__ = "0.1.0"
