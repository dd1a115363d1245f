"""DeepSpeed with a loop of one's own.

    from slurm_watchdog_hooks.deepspeed import watch

    engine, _, _, _ = deepspeed.initialize(...)
    watch(engine, "checkpoints", total=last_step)

Then `engine.step()` saves with `engine.save_checkpoint` on all ranks, and ends the program with 0, once any
rank saw the switch.
"""

import sys

from slurm_watchdog_hooks.loop import Watchdog


def watch(engine, directory, total=None, client_state=None, **options):
    """Makes `engine.step()` report each optimizer step and obey the kill switch; returns the engine.

    client_state  a function without arguments: what `engine.save_checkpoint` is given besides the step.
    options       of Watchdog.
    """
    watchdog = Watchdog(total=total, **options)
    step = engine.step

    def step_and_look(*args, **kwargs):
        before = engine.global_steps
        made = step(*args, **kwargs)
        if engine.global_steps == before:  # one of several micro-batches: no step yet
            return made
        if watchdog.step(engine.global_steps):
            state = dict(client_state() if client_state is not None else {}, step=engine.global_steps)
            with watchdog.phase("checkpointing"):
                engine.save_checkpoint(directory, tag="step{}".format(engine.global_steps), client_state=state)
            watchdog.announce(engine.global_steps)
            sys.exit(0)
        return made

    engine.step = step_and_look
    return engine
