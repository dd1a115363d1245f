"""Where a checkpoint is kept that a trainer would delete, and the option of each trainer that resumes from it. Pure.

It is kept beside the trainer's directory, not in it, under its own name. Sources, read for what a trainer finds by
itself, and deletes:
- transformers trainer.py and accelerate: `checkpoint-*` in the output directory, also with letters after the number,
  counts for save_total_limit. NeMo: every directory below its own is a checkpoint, and every *.ckpt at any depth.
- torchtitan: every name with step-N in its directory. Megatron-LM and DeepSpeed: what the tracker names. Lightning:
  names with `last` in its directory.
- Megatron-LM checkpointing.py: some releases load nothing from a directory without a tracker, also with --ckpt-step, and
  start from random weights: the directory gets one. DeepSpeed engine.py: with a tag `latest` is not read, without one it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from posixpath import split
from typing import Final

KEPT_SUFFIX = ".kept-by-slurm-watchdog"
"""After the name of the trainer's directory: /data/run is beside /data/run.kept-by-slurm-watchdog."""


SHELF_TRACKERS: Mapping[str, tuple[str, str]] = {
    "megatron": ("latest_checkpointed_iteration.txt", "{step}"),
    "deepspeed": ("latest", "{name}"),
}
"""Layout -> (file beside the checkpoint, what it says) by which its trainer finds it where it is kept."""
KEPT: Final = "kept the checkpoint"
"""Begins the note of an incident that says so: nothing more is to be done for it."""
_KEPT_IN = re.compile(rf"{KEPT} of step [0-9]+, from before it: (?P<path>/.+?) \(hard links")


def kept_words(layout: str | None, kept: str, step: int) -> str:
    """The note: where it is kept, and how to resume from it."""
    return (
        f"{KEPT} of step {step}, from before it: {kept} (hard links: no space until the trainer deletes its "
        f"own). To resume from it: {resume_words(layout, kept)}. It is yours to "
        "delete; until then no other one of this directory is kept"
    )


def kept_path(note: str) -> str:
    """The path in such a note; empty: it is another one."""
    found = _KEPT_IN.match(note)
    return "" if found is None else found["path"]


def resume_words(layout: str | None, kept: str) -> str:
    """How to resume from what is kept in `kept`: a part of a sentence."""
    where, name = split(kept)
    match layout:
        case "megatron":
            return f"--load {where}"
        case "deepspeed":
            return f"load_checkpoint({where!r}, tag={name!r})"
        case "huggingface":
            return f"resume_from_checkpoint={kept!r}"
        case "lightning" | "nemo":
            return f"ckpt_path={kept!r}"
        case "composer":
            return f"load_path={kept!r}"
        case _:
            return "the trainer's option for a checkpoint that is named"
