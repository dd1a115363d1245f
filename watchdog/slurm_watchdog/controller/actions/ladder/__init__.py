"""The next move of an action, as a pure function of the journal and of what Slurm says."""
