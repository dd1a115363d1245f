"""How Slurm is queried and controlled: a Protocol, a client on its commands, pure parsers of what they print."""
