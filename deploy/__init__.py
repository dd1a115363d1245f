"""What surrounds the watchdog: demo, Slurm snippets, trainer integrations."""
