"""Finds checkpoints of jobs and tells which are complete."""
