"""Watches large training jobs on Slurm: says which rank of which node stopped, why, and restarts the job without it."""

__version__ = "0.2.0.dev0"
