"""Options by which launchers and trainers are told how many nodes and processes there are, and where rank 0 is.

In lower case, with `_` for `-`, without what stands before a dot (`--trainer.num_nodes`): as `name_of` makes them.
Variables of the same names in capitals (`WORLD_SIZE`, `MASTER_ADDR`) mean the same. From `--help` of torchrun 2.x
(torch/distributed/run.py), accelerate 1.x (commands/launch.py), DeepSpeed 0.1x (launcher/runner.py), Lightning 2.x
(Trainer), Megatron-LM (megatron/training/arguments.py), mpirun(1) and horovodrun.
"""

from __future__ import annotations

NODES = frozenset({"nnodes", "num_nodes", "num_machines"})  # torchrun; DeepSpeed and Lightning; accelerate.
PROCESSES = frozenset({"num_processes", "world_size", "np"})
"""accelerate; Megatron-LM and most scripts; mpirun and horovodrun."""
ADDRESSES = frozenset(
    {
        "master_addr", "rdzv_endpoint", "main_process_ip", "coordinator_address", "jax_coordinator_address", "dist_url",
        "init_method", "dist_init_method", "distributed_init_method",
    }
)  # fmt: skip
"""The host of rank 0, with or without a port, or a URL with it (`tcp://n1:29500`): torchrun and DeepSpeed; torchrun;
accelerate; JAX (jax.distributed.initialize); PyTorch's and detectron2's examples; torch.distributed, fairseq."""
VARIABLES = frozenset({"export", "env"})
"""Options whose value holds variables: srun --export=ALL,MASTER_ADDR=n1, apptainer --env=MASTER_ADDR=n1."""
VARIABLE = frozenset({"-genv", "-env"})
"""Options that take a variable and its value as two words: MPICH's and Intel's mpiexec."""
MPI = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun"})
"""Programs whose first option `-n` is the number of processes."""
SHELLS = frozenset({"bash", "sh", "dash", "zsh", "ksh"})


def name_of(word: str) -> str:
    """`--trainer.num-nodes` is `num_nodes`; but `data.np` is not an option of mpirun's, and stays what it is."""
    before, _, name = word.lstrip("-+").rpartition(".")
    return f"{before}.{name}" if before and name == "np" else name.replace("-", "_").lower()
