"""The watchdog beside real PyTorch jobs on a real Slurm: what breaks, how long the verdict takes, who is named."""
