"""`slurm-watchdog run` inside a batch script: starts the command, follows it, and starts it again in the same
allocation without the nodes that are to blame, as the job's owner and without a right of its own."""
