"""Detectors: pure functions from a view of the cluster to findings. They judge and never act. `registry` lists them.

Nothing is imported here: slurm_watchdog.diagnose reads views, and detectors read diagnoses.
"""
