"""What the watchdog does, as an administrator would tell it: the real rules, policy, ladder, drivers and
journal, a scripted Slurm."""
