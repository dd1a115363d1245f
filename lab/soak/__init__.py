"""Random faults on a real Slurm with a real watchdog in mode act, for as long as asked, and a history checker
that reads what happened."""
