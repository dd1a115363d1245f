"""The trainer's own option that resumes from a named checkpoint (`--resume-option`), and its words for one. Pure.

Its owner gives it with the command, and it is put behind its last word: `--resume_from_checkpoint {checkpoint}`
(transformers' scripts), `--ckpt_path {checkpoint}` (Lightning's CLI), `--load {directory}` (Megatron-LM).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from posixpath import split
from typing import Final

from slurm_watchdog.knowledge.checkpoint_layouts import recognise

PLACES: Final = ("checkpoint", "directory", "name", "step")
"""What stands in braces: the checkpoint's path, the directory in which it lies, its name there, its step."""
_BRACES = re.compile(r"\{([^{}]*)\}")


def parse_option(text: str) -> tuple[str, ...]:
    """The words of the option, as a shell would split them; none for an empty text. Raises ValueError, a sentence."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"--resume-option {text!r} cannot be split into words: {error}") from None
    named = [name for word in words for name in _BRACES.findall(word)]
    shown = ", ".join(f"{{{each}}}" for each in PLACES)
    if unknown := [name for name in named if name not in PLACES]:
        raise ValueError(f"--resume-option knows no {{{unknown[0]}}}: there are {shown}")
    if words and not named:
        raise ValueError(f"--resume-option {text!r} does not say where the checkpoint goes: it needs one of {shown}")
    return words


def words_for(option: Sequence[str], checkpoint: str) -> tuple[str, ...]:
    """The option's words for the checkpoint at this path. Raises ValueError where they need a step, and its name says
    none."""
    directory, name = split(checkpoint)
    step = _step_of(name)
    if step is None and any("{step}" in word for word in option):
        raise ValueError(f"the name {name} says no step, which --resume-option asks for")
    values = {"checkpoint": checkpoint, "directory": directory, "name": name, "step": str(step)}
    return tuple(_BRACES.sub(lambda found: values[found[1]], word) for word in option)


def _step_of(name: str) -> int | None:
    found = (each.step for is_directory in (True, False) for each in recognise([(name, is_directory)]))
    return next((step for step in found if step is not None), None)
