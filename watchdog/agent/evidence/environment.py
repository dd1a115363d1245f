"""Which environment variables are kept of a rank, and what in them is masked. Pure.

An environment holds passwords, so there is an allow-list and nothing else; and what is allowed may still hold a secret, in an
address or by mistake, so values that look like one are masked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Final

PREFIXES: Final = (
    "NCCL_", "RCCL_", "TORCH_", "PYTORCH_", "CUDA_", "NVIDIA_", "OMP_", "KMP_", "MKL_", "GLOO_", "UCX_", "FI_", "OMPI_MCA_",
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
MASK: Final = "(masked)"

_SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKENS?|SECRETS?|PASS(?:WORD|WD|PHRASE)?|KEYS?|CREDENTIALS?|AUTH|COOKIES?|SESSION|DSN|WEBHOOK|APIKEY)(?:_|$)"
)
_SECRET_VALUE = re.compile(
    r"[a-z][a-z0-9+.-]*://[^/\s:@]*:[^/\s@]+@"  # user:password in an address
    r"|(?i:bearer|basic)\s+[\w.~+/-]{8,}"
    r"|-----BEGIN"
    r"|\beyJ[\w-]{8,}\.[\w-]+"  # a JSON web token
    r"|\b(?:hf_|sk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|wandb_)[\w-]{8,}"  # tokens that say what they are
    r"|(?i:(?:token|secret|password|passwd|api_?key|signature)=)[^\s&]{4,}"
)
_RANDOM = re.compile(r"[A-Za-z0-9+_=-]{32,}")
_UUID = re.compile(r"(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
"""Names GPUs and runs, and opens nothing."""


def is_wanted(name: str) -> bool:
    """Whether a variable of this name is kept at all."""
    return name in NAMES or name.startswith(PREFIXES)


def masked(name: str, value: str) -> str:
    """`value`, or the mask if the variable's name or the value itself looks like a secret."""
    if _SECRET_NAME.search(name.upper()) and not value.isdecimal() and value.lower() not in ("true", "false"):
        return MASK
    return MASK if looks_secret(value) else value


def looks_secret(text: str) -> bool:
    """Whether `text` holds an address with a password, a token of a known form, or a long random word."""
    return bool(_SECRET_VALUE.search(text)) or any(_is_random(word) for word in _RANDOM.findall(text))


def _is_random(word: str) -> bool:
    """A long word of letters and digits in no order, as keys are: it changes between kinds of letters all the time."""
    if _UUID.fullmatch(word):
        return False
    kinds = ["d" if c.isdigit() else "u" if c.isupper() else "l" if c.islower() else "-" for c in word]
    changes = sum(1 for one, two in pairwise(kinds) if one != two)
    return "d" in kinds and ("l" in kinds or "u" in kinds) and changes >= len(word) / 3


def mask_line(text: str) -> str:
    """A line of a log with whatever looks like a secret in it masked."""
    text = _SECRET_VALUE.sub(MASK, text)
    return _RANDOM.sub(lambda found: MASK if _is_random(found[0]) else found[0], text)


def choose(environ: Mapping[str, str]) -> dict[str, str]:
    """What of a whole environment is kept: wanted, masked, bounded, in the order of names."""
    kept = sorted((name, value) for name, value in environ.items() if is_wanted(name))[:MAX_VARIABLES]
    return {name: masked(name, value)[:MAX_VALUE] for name, value in kept}


def parse_settings(data: bytes) -> dict[str, str]:
    """What is kept of the text of /proc/PID/environ; of a variable given twice, the first, as getenv has it."""
    found: dict[str, str] = {}
    for entry in data.split(b"\0"):
        name, separator, value = entry.partition(b"=")
        key = name.decode(errors="replace")
        if separator and key not in found and is_wanted(key):
            found[key] = value.decode(errors="replace")
    return choose(found)
