"""JAX (Flax, Equinox, Orbax …) with a loop of one's own, on one host or on several.

    from slurm_watchdog_hooks.jax import Watchdog

    watchdog = Watchdog(total=last_step)            # after jax.distributed.initialize, in all processes
    for step in range(first_step, last_step):
        state, loss = train_step(state, batch)
        if watchdog.step(step):                     # the same in all processes: every 20th step they agree
            manager.save(step, args=ocp.args.StandardSave(state), force=True)
            manager.wait_until_finished()
            sys.exit(0)

A loss is read only where that does not make the step wait: give `loss=float(loss)` where your loop has it anyway.
"""

from slurm_watchdog_hooks.loop import Watchdog

__all__ = ["Watchdog"]
