"""The `srun` in the PATH of commands that 0.1 has started and that still run: it goes with the next release."""

from slurm_watchdog.supervisor.srun import main

__all__ = ["main"]
