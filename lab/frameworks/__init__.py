"""Real releases of training frameworks, at their defaults, with real faults, under `slurm-watchdog run`:
`make frameworks`."""
