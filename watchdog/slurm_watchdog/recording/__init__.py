"""A *recording* (docs/recordings.md): frames of agents, answers of Slurm and ticks as they came, written by `controller
--record`; `replay` feeds them to a controller without levers."""
