"""How well the watchdog judges: simulated training jobs with and without faults, through the real judgement.

Everything here is simulated: nodes, ranks, GPUs, logs, Slurm's word. What judges is the product as it is. See
`make accuracy`.
"""
