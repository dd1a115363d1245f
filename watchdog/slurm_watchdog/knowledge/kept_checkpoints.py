"""Where a checkpoint is kept that a trainer would delete, and the option of each trainer that resumes from it. Pure.

It is kept beside the trainer's directory, not in it, under its own name. Sources, read for what a trainer finds by
itself, and deletes:
- transformers trainer.py and accelerate: `checkpoint-*` in the output directory, also with letters after the number,
  counts for save_total_limit. NeMo: every directory below its own is a checkpoint, and every *.ckpt at any depth.
- torchtitan: every name with step-N in its directory. Megatron-LM and DeepSpeed: what the tracker names. Lightning:
  names with `last` in its directory.
- Megatron-LM checkpointing.py: some releases load nothing from a directory without a tracker, also with --ckpt-step.
- DeepSpeed engine.py: with a tag `latest` is not read.
"""

from __future__ import annotations

from posixpath import dirname, split

KEPT_SUFFIX = ".kept-by-slurm-watchdog"
"""After the name of the trainer's directory: /data/run is beside /data/run.kept-by-slurm-watchdog."""


def resume_words(layout: str | None, original: str, kept: str, step: int) -> str:
    """How to resume from what is kept in `kept`, and lay in `original`: a part of a sentence."""
    where, name = split(kept)
    match layout:
        case "megatron":
            return f"--ckpt-step {step}, once it is moved back into {dirname(original)} if it is gone there"
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
