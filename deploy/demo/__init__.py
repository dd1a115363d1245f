"""The demo and the real Slurm cluster on one machine that it and the integration tests run on."""
