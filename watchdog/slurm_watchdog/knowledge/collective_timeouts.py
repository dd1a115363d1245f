"""After how long a trainer's own library gives a collective up, as its command line or its environment says. Pure.

What a run does when that time is over (it aborts) destroys the evidence: stacks have to be taken before.
Values that only a program or a configuration file holds (`init_process_group(timeout=…)`, torchtitan's TOML)
are not visible here.
Sources: the argument parsers and configuration classes of the frameworks that are named;
torch/distributed/constants.py (10 minutes for NCCL since 2.2, 30 for all other backends and before);
deepspeed/constants.py (`DEEPSPEED_TIMEOUT`, in minutes); torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp for
the variables. `NCCL_TIMEOUT`, which people like to set, no one reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from slurm_watchdog.base.late_regex import late_regex

OPTIONS: tuple[tuple[str, str, float], ...] = (
    ("megatron", "distributed_timeout_minutes", 60.0),
    ("megatron", "distributed_timeout_seconds_after_init", 1.0),
    ("huggingface", "ddp_timeout", 1.0),
    ("torchtitan", "comm.train_timeout_seconds", 1.0),
    ("composer", "dist_timeout", 1.0),
    ("verl", "actor_rollout_ref.nccl_timeout", 1.0),
    ("lightning", "trainer.strategy.timeout", 1.0),
    ("lightning", "trainer.strategy.init_args.timeout", 1.0),
)
"""Framework, option, seconds of its unit. An option stands without dashes, `-` and `_` are the same;
`1:30:00` is a time in all."""

VARIABLES: tuple[tuple[str, str, float], ...] = (("deepspeed", "DEEPSPEED_TIMEOUT", 60.0),)
"""Likewise, of the environment. The command line is the trainer's own and goes before."""

NCCL_DEFAULT_S = 600.0
"""torch's own for NCCL. Assumed where a rank is told how to meet the others (MASTER_ADDR) and nothing says
how long they wait."""
MAX_S = 30 * 86400.0

MEETING = "MASTER_ADDR"
HEARTBEAT, MONITORING = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_ENABLE_MONITORING"
HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
NAMES = frozenset({MEETING, HEARTBEAT, MONITORING, *HANDLING, *BLOCKING, *(name for _, name, _ in VARIABLES)})
"""Of the environment, all that is looked at."""
MAX_WORDS = 4096  # Of a command line.

_CLOCK = late_regex(r"(?:(\d{1,3}):)?(\d{1,2}):(\d{1,2})")
_OFF = frozenset({"0", "n", "no", "false", "off"})


class Timeout(NamedTuple):
    seconds: float
    assumed: bool  # Nothing says it: it is torch's own default, and the program may have asked for another.


def timeout_in(environ: Mapping[str, str], argv: Sequence[str]) -> Timeout | None:
    """The time-out of collectives that these variables (NAMES) and words of a command line tell of; None:
    nothing points to one.

    The shortest of several options: Megatron waits longer while it starts. Where the environment switches
    NCCL's time-outs off, there is none.
    """
    named = _of_options(argv) or _of_variables(environ)
    if named:
        return Timeout(min(named), assumed=False)
    if MEETING not in environ or _is_switched_off(environ):
        return None
    beat_s = _seconds(environ.get(HEARTBEAT, ""), 1.0)
    if beat_s is None or environ.get(MONITORING, "1").lower() in _OFF:
        return Timeout(NCCL_DEFAULT_S, assumed=True)
    # Where its own watchdog thread hangs as well, the monitor ends the process after that time.
    return Timeout(min(NCCL_DEFAULT_S, beat_s), assumed=True)


def _of_options(argv: Sequence[str]) -> list[float]:
    scales = {name: scale for _, name, scale in OPTIONS}
    found: dict[str, float] = {}
    words = list(argv[:MAX_WORDS])
    for at, word in enumerate(words):
        dashed = word.startswith("--")
        name, given, value = (word[2:] if dashed else word).partition("=")
        name = name.lstrip("+").replace("-", "_")
        if name not in scales or not (given or dashed):
            continue
        if not given:
            value = words[at + 1] if at + 1 < len(words) else ""
        seconds = _seconds(value, scales[name])
        if seconds is not None:
            found[name] = seconds
    return list(found.values())


def _of_variables(environ: Mapping[str, str]) -> list[float]:
    found = (_seconds(environ.get(name, ""), scale) for _, name, scale in VARIABLES)
    return [seconds for seconds in found if seconds is not None]


def _is_switched_off(environ: Mapping[str, str]) -> bool:
    """Without error handling a collective waits indefinitely, unless the caller waits with a time-out."""
    handling = next((environ[name] for name in HANDLING if name in environ), "1")
    blocking = next((environ[name] for name in BLOCKING if name in environ), "0")
    return handling.lower() in _OFF and blocking.lower() in _OFF


def _seconds(text: str, scale: float) -> float | None:
    text = text.strip("'\" ")
    clock = _CLOCK.fullmatch(text)
    if clock is not None:
        seconds = 3600.0 * int(clock[1] or 0) + 60.0 * int(clock[2]) + int(clock[3])
    else:
        try:
            seconds = float(text) * scale
        except ValueError:
            return None
    return seconds if isfinite(seconds) and 0 < seconds <= MAX_S else None
