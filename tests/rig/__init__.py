"""A real Slurm on one machine, a trainer that breaks on demand, and a stand-in NVML: what demo and live tests
run on."""
