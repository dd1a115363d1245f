"""What a trainer's command line and environment say: where its checkpoints and its kill switch are, and after how long
its library gives a collective up. Pure.

A row of a directory is (framework, option, template). An option stands without its dashes; `-` and `_` in it are the same,
and `+name=` and `++name=` (Hydra) are `name=`. The template says where below the value the checkpoints lie:
`{name}` is the value of that option, `{name|words}` has a default, and a row whose template needs an option
that is not given says nothing. A directory for each run or version below it need not be named: a scan that looks
there looks one level deeper.
Sources: the argument parsers and configuration classes of the frameworks that are named, and where these write.
Values that only a program or a configuration file holds (axolotl's and GPT-NeoX's YAML, torchtitan's TOML,
`init_process_group(timeout=…)`) are not visible here.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from slurm_watchdog.base.late_regex import late_regex

OPTIONS = tuple(
    line.split()
    for line in """\
    megatron save {save}
    huggingface output_dir {output_dir}
    torchtitan checkpoint.folder {job.dump_folder|outputs}/{checkpoint.folder}
    torchtitan job.dump_folder {job.dump_folder}/{checkpoint.folder|checkpoint}
    torchtitan dump_folder {dump_folder}/{checkpoint.folder|checkpoint}
    nemo exp_manager.explicit_log_dir {exp_manager.explicit_log_dir}/checkpoints
    nemo exp_manager.exp_dir {exp_manager.exp_dir}/{exp_manager.name|default}
    nemo exp_manager.checkpoint_callback_params.dirpath {exp_manager.checkpoint_callback_params.dirpath}
    nemo log.log_dir {log.log_dir}/{log.name|default}
    lightning trainer.default_root_dir {trainer.default_root_dir}/checkpoints
    lightning trainer.default_root_dir {trainer.default_root_dir}/lightning_logs
    lightning default_root_dir {default_root_dir}/checkpoints
    lightning default_root_dir {default_root_dir}/lightning_logs
    lightning callbacks.model_checkpoint.dirpath {callbacks.model_checkpoint.dirpath}
    composer save_folder {save_folder}
    olmo trainer.save_folder {trainer.save_folder}
    fairseq save_dir {save_dir}
    fairseq checkpoint.save_dir {checkpoint.save_dir}
    maxtext base_output_directory {base_output_directory}/{run_name}/checkpoints
    t5x gin.MODEL_DIR {gin.MODEL_DIR}
    verl trainer.default_local_dir {trainer.default_local_dir}
    openrlhf ckpt_path {ckpt_path}
    levanter trainer.checkpointer.base_path {trainer.checkpointer.base_path}
    lingua dump_dir {dump_dir}/checkpoints
    nanogpt out_dir {out_dir}
    torchtune checkpointer.output_dir {checkpointer.output_dir}
    openmmlab work_dir {work_dir}
    icefall exp_dir {exp_dir}
    deepspeed checkpoint_dir {checkpoint_dir}
    generic checkpoints_dir {checkpoints_dir}
    generic ckpt_dir {ckpt_dir}
    generic save_path {save_path}
    generic checkpoint_folder {checkpoint_folder}
""".splitlines()
)

KILL_SWITCH_OPTIONS = ("kill_switch_path", "kill_switch_file")
"""Of Megatron-LM forks: the file at which the trainer saves and exits."""
MAX_DIRECTORIES = 8
MAX_PATH = 4096  # linux/limits.h
MAX_WORDS = 4096
"""Of a command line that are looked at: the longest known ones (Megatron with lists of data files) have hundreds."""

_NOTHING = frozenset({"", "none", "null", "false", "true"})
_FILE = late_regex(r"\.(ckpt|pth?|bin|safetensors|tar|json|ya?ml|toml|txt|gin|distcp|npz|h5)$")
_PLACE = late_regex(r"\{([^{}|]+)(?:\|([^{}]*))?\}")


def _canonical(name: str) -> str:
    return name.lstrip("+").replace("-", "_")


_NAMES = frozenset(
    {_canonical(name) for _, option, template in OPTIONS for name in (option, *(m[1] for m in _PLACE.finditer(template)))}
)  # fmt: skip


def directories_in(argv: Sequence[str], cwd: str) -> tuple[str, ...]:
    """The directories of checkpoints that the words of a command line name: absolute, without detours, each once.

    `cwd` is the process's working directory, which relative ones are below; where it is not known (empty),
    they are left out. Of an option given twice the last counts, as every parser has it. Object stores
    (`s3://`), values that a program would expand itself (`~`, `$X`) and names of files are left out; a path
    is cut before a part that is a pattern (`{run_name}`). Whether there is such a directory, no one has
    looked.
    """
    values = _values(argv)
    found: dict[str, None] = {}
    for _, option, template in OPTIONS:
        path = _filled(template, values) if _canonical(option) in values else None
        if path is not None and (path := posixpath.join(cwd, path)).startswith("/"):
            found["/" + posixpath.normpath(path).lstrip("/")] = None
    return tuple(path for path in found if path != "/")[:MAX_DIRECTORIES]


def kill_switch_in(argv: Sequence[str], cwd: str) -> str:
    """The kill switch that the words of a command line name, absolute; empty if they name none."""
    values = _values(argv, frozenset(KILL_SWITCH_OPTIONS))
    path = next((posixpath.join(cwd, values[name]) for name in KILL_SWITCH_OPTIONS if name in values), "")
    return posixpath.normpath(path) if path.startswith("/") else ""


def _values(argv: Sequence[str], names: frozenset[str] = _NAMES) -> dict[str, str]:
    return {name: value for name, value in _given(argv, names) if _is_place(value)}


def _given(argv: Sequence[str], names: Container[str]) -> Iterator[tuple[str, str]]:
    """Each option of these names with its value, without quotes; a bare word is none."""
    words = list(argv[:MAX_WORDS])
    for at, word in enumerate(words):
        dashed = word.startswith("--")
        name, given, value = (word[2:] if dashed else word).partition("=")
        if (name := _canonical(name)) in names and (given or (dashed and at + 1 < len(words))):
            yield name, (value if given else words[at + 1]).strip("'\"")


def _is_place(value: str) -> bool:
    return (
        value.lower() not in _NOTHING
        and not value.startswith(("-", "~"))
        and "://" not in value
        and "$" not in value
        and value.isprintable()
        and len(value) < MAX_PATH
        and _FILE.search(value) is None
    )


def _filled(template: str, values: dict[str, str]) -> str | None:
    """The template with its values, joined as posixpath.join does. None: a value is missing."""
    path = ""
    for part in re.split(r"/(?![^{]*\})", template):
        place = _PLACE.fullmatch(part)
        value = values.get(_canonical(place[1]), place[2]) if place else part
        if value is None:
            return None
        whole = value.split("{", 1)[0]
        path = posixpath.join(path, whole if whole == value else whole.rpartition("/")[0])
        if whole != value:
            break  # a pattern of the trainer's own: what lies below is found by looking
    return path or None


# What a run does when the time of a collective is over (it aborts) destroys the evidence: stacks have to be taken before.
# Sources: torch/distributed/constants.py (10 minutes for NCCL since 2.2, 30 for all other backends and before);
# deepspeed/constants.py (`DEEPSPEED_TIMEOUT`, in minutes); torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp for the
# variables. `NCCL_TIMEOUT`, which people like to set, no one reads.
TIMEOUT_OPTIONS: tuple[tuple[str, str, float], ...] = (
    ("megatron", "distributed_timeout_minutes", 60.0),
    ("megatron", "distributed_timeout_seconds_after_init", 1.0),
    ("huggingface", "ddp_timeout", 1.0),
    ("torchtitan", "comm.train_timeout_seconds", 1.0),
    ("composer", "dist_timeout", 1.0),
    ("verl", "actor_rollout_ref.nccl_timeout", 1.0),
    ("lightning", "trainer.strategy.timeout", 1.0),
    ("lightning", "trainer.strategy.init_args.timeout", 1.0),
)
"""Framework, option, seconds of its unit; `1:30:00` is a time in all."""

VARIABLES: tuple[tuple[str, str, float], ...] = (("deepspeed", "DEEPSPEED_TIMEOUT", 60.0),)
"""Likewise, of the environment. The command line is the trainer's own and goes before."""

NCCL_DEFAULT_S = 600.0
"""torch's own for NCCL. Assumed where MASTER_ADDR tells a rank how to meet the others, and nothing how long."""
MAX_S = 30 * 86400.0

MEETING = "MASTER_ADDR"
HEARTBEAT, MONITORING = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_ENABLE_MONITORING"
HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
READ_VARIABLES = frozenset({MEETING, HEARTBEAT, MONITORING, *HANDLING, *BLOCKING, *(name for _, name, _ in VARIABLES)})
"""Of the environment, all that is looked at."""

_CLOCK = late_regex(r"(?:(\d{1,3}):)?(\d{1,2}):(\d{1,2})")
_OFF = frozenset({"0", "n", "no", "false", "off"})


class Timeout(NamedTuple):
    seconds: float
    assumed: bool  # Nothing says it: it is torch's own default, and the program may have asked for another.


def timeout_in(environ: Mapping[str, str], argv: Sequence[str]) -> Timeout | None:
    """The time-out of collectives that these variables (READ_VARIABLES) and words of a command line tell of; None:
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
    scales = {name: scale for _, name, scale in TIMEOUT_OPTIONS}
    found = ((name, _seconds(value, scales[name])) for name, value in _given(argv, scales))
    return list({name: seconds for name, seconds in found if seconds is not None}.values())


def _of_variables(environ: Mapping[str, str]) -> list[float]:
    found = (_seconds(environ.get(name, ""), scale) for _, name, scale in VARIABLES)
    return [seconds for seconds in found if seconds is not None]


def _is_switched_off(environ: Mapping[str, str]) -> bool:
    """Without error handling a collective waits indefinitely, unless the caller waits with a time-out."""
    handling = next((environ[name] for name in HANDLING if name in environ), "1")
    blocking = next((environ[name] for name in BLOCKING if name in environ), "0")
    return handling.lower() in _OFF and blocking.lower() in _OFF


def _seconds(text: str, scale: float) -> float | None:
    text = text.strip()
    clock = _CLOCK.fullmatch(text)
    if clock is not None:
        seconds = 3600.0 * int(clock[1] or 0) + 60.0 * int(clock[2]) + int(clock[3])
    else:
        try:
            seconds = float(text) * scale
        except ValueError:
            return None
    return seconds if isfinite(seconds) and 0 < seconds <= MAX_S else None
