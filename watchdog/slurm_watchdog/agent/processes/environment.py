"""Which environment variables are kept of a rank, and what in them is masked. Pure.

An environment holds passwords, so there is an allow-list and nothing else; and what is allowed may still hold
a secret, in an address or by mistake, so values that look like one are masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from slurm_watchdog.base.redact import MARGIN, masked_value

PREFIXES: Final = (
    "NCCL_", "RCCL_", "TORCH_", "PYTORCH_", "CUDA_", "NVIDIA_", "OMP_", "KMP_", "MKL_", "GLOO_", "UCX_", "FI_",
    "OMPI_MCA_",
    "SHARP_", "HSA_", "HIP_", "ROCR_", "XLA_", "JAX_", "TF_", "DEEPSPEED_", "MEGATRON_", "ACCELERATE_", "TORCHELASTIC_",
    "TORCHINDUCTOR_", "TRITON_", "TOKENIZERS_", "AWS_OFI_", "EFA_", "MELLANOX_", "SLURM_WATCHDOG_",
)  # fmt: skip
"""Families of variables that decide how a rank computes and communicates."""
NAMES: Final = frozenset(
    """
    MASTER_ADDR MASTER_PORT RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK
    SLURM_JOB_ID SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS SLURM_NNODES SLURM_STEP_ID SLURM_RESTART_COUNT
    SLURM_JOB_PARTITION SLURM_CPUS_PER_TASK SLURM_CPU_BIND SLURM_JOB_NODELIST SLURMD_NODENAME
    LD_PRELOAD LD_LIBRARY_PATH VIRTUAL_ENV CONDA_DEFAULT_ENV CONDA_PREFIX PYTHONPATH PYTHONHASHSEED PYTHONUNBUFFERED
    MALLOC_ARENA_MAX TMPDIR XDG_CACHE_HOME HF_HOME HF_HUB_OFFLINE TRANSFORMERS_OFFLINE LANG TZ
    """.split()  # noqa: SIM905  a table of words
)
MAX_VARIABLES: Final = 96
MAX_VALUE: Final = 300
MAX_SEARCHED: Final = MAX_VALUE + MARGIN
"""Characters of a value that are decoded and searched for secrets: a variable may hold 128 KiB
(MAX_ARG_STRLEN), an environment MiBs."""


def is_wanted(name: str) -> bool:
    """Whether a variable of this name is kept at all."""
    return name in NAMES or name.startswith(PREFIXES)


def choose(environ: Mapping[str, str]) -> dict[str, str]:
    """What of a whole environment is kept: wanted, masked, bounded, in the order of names."""
    kept = sorted((name, value) for name, value in environ.items() if is_wanted(name))[:MAX_VARIABLES]
    return {name: masked_value(name, value[:MAX_SEARCHED])[:MAX_VALUE] for name, value in kept}


def parse_settings(data: bytes) -> dict[str, str]:
    """What is kept of the text of /proc/PID/environ; of a variable given twice, the first, as getenv has it."""
    found: dict[str, str] = {}
    for entry in data.split(b"\0"):
        name, separator, value = entry.partition(b"=")
        key = name.decode(errors="replace")
        if separator and key not in found and is_wanted(key):
            found[key] = value[:MAX_SEARCHED].decode(errors="replace")
    return choose(found)
