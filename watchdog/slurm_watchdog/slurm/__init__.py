"""How Slurm is asked and told: a Protocol, a client on its commands, pure parsers of what they print."""
