"""Options on a trainer's command line whose value is a directory of checkpoints, or its kill switch. Pure: words in,
paths out.

A row is (framework, option, template). An option stands without its dashes; `-` and `_` in it are the same,
and `+name=` and `++name=` (Hydra) are `name=`. The template says where below the value the checkpoints lie:
`{name}` is the value of that option, `{name|words}` has a default, and a row whose template needs an option
that is not given says nothing. A directory for each run or version below it need not be named: a scan that looks
there looks one level deeper.
Sources: the argument parsers and configuration classes of the frameworks that are named, and where these write.
Values that only a configuration file holds (axolotl's and GPT-NeoX's YAML, torchtitan's TOML) are not visible here.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

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
"""Of a command line that are looked at: the longest known ones (Megatron with a list of data files) have some
hundreds."""

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
    """The values of the options of these names, the last of each."""
    values: dict[str, str] = {}
    words = list(argv[:MAX_WORDS])
    for at, word in enumerate(words):
        dashed = word.startswith("--")
        name, given, value = (word[2:] if dashed else word).partition("=")
        if (name := _canonical(name)) not in names:
            continue
        if not given:
            if not dashed or at + 1 == len(words):
                continue  # a bare word is no option
            value = words[at + 1]
        value = value.strip("'\"")
        if _is_place(value):
            values[name] = value
    return values


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
    """The template with its values, joined as posixpath.join does: an absolute part replaces what is before
    it. None: a value is missing."""
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
