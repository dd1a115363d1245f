"""One machine without Slurm and without root: a command takes the place of a job, this machine that of the cluster."""
