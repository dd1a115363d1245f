"""What a checkpoint looks like on disk, framework by framework: names, trackers, and what is written last. Pure.

Sources, read for how a complete checkpoint is told from one that is being written:
- Megatron-LM checkpointing.py: the tracker is written after the last shard; metadata.json is the last file of a
  distributed checkpoint. DeepSpeed engine.py: `latest` is written after all ranks have saved.
- PyTorch distributed.checkpoint filesystem.py: `.metadata` is written by the coordinator after all have finished, under
  another name first; torchtitan takes a step-N for one if it has `.metadata` or model.safetensors.index.json.
- transformers trainer.py: weights, optimizer and random states first, trainer_state.json after them. accelerate: the
  random states are the last that each process writes.
- Lightning: one file through a temporary one; directories have meta.pt (FSDP) or latest (DeepSpeed) at the end. NeMo puts
  a file NAME-unfinished beside one that is being written, and takes it away when all ranks are done.
- Orbax: a directory has `.orbax-checkpoint-tmp` in its name until it is renamed, or gets commit_success.txt at last.
- torch.save: a zip archive, whose directory is its end. safetensors: the header says how long the file is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex

NUMBER = r"(?P<step>[0-9]{1,18})"
_FILE = r"\.(?:pt|pth|ckpt|bin|safetensors|tar|pkl|npz|msgpack|h5)(?:\.tar)?"
_WORDS = r"(?:step|global_step|iter|iteration|checkpoint|ckpt|model|snapshot|epoch_?\d+[-_]step)"

DIRECTORIES: tuple[tuple[str, str], ...] = (
    ("megatron", r"iter_(?P<step>\d{7,18})"),
    ("deepspeed", rf"global_step_?{NUMBER}"),
    ("huggingface", rf"checkpoint-{NUMBER}"),
    ("composer", rf"ep(?P<epoch>\d{{1,9}})-ba{NUMBER}"),
    ("lightning", rf".*(?<![A-Za-z])step={NUMBER}(?!\d).*"),
    ("numbered", rf"(?:step|{_WORDS})[-_]?{NUMBER}(?:-unsharded)?"),
    ("digits", NUMBER),
)
"""(layout, whole name). What `numbered` ones and mere `digits` are, shows by what is inside: DCP, Orbax, or nothing."""

FILES: tuple[tuple[str, str], ...] = (
    ("composer", rf"ep(?P<epoch>\d{{1,9}})-ba{NUMBER}-rank\d+{_FILE}"),
    ("lightning", rf".*(?<![A-Za-z])step={NUMBER}(?!\d).*\.ckpt"),
    ("lightning", r".*\bepoch=(?P<epoch>\d{1,9})(?!\d).*\.ckpt"),
    ("plain", rf"checkpoint_?(?P<epoch>\d{{1,9}})_{NUMBER}\.pt"),
    ("plain", rf"(?:[\w.]+[-_])?epoch[-_=]?(?P<epoch>\d{{1,9}}){_FILE}"),
    ("plain", rf"(?:[\w.]+[-_])?{_WORDS}[-_=]?{NUMBER}(?:[-_]?rank[-_]?\d+)?{_FILE}"),
)
"""(layout, whole name). fairseq counts epochs and updates; a number of epochs is no step."""

_ONE = r"(?:ckpt|last|latest|checkpoint|model|snapshot|state|train_state|training_state|resume)"
SINGLE = late_regex(rf"{_ONE}(?:[-_](?:ckpt|last|latest|checkpoint|model|state))?(?:-v\d+|-EMA)?{_FILE}")
"""One file that is written over and over (nanoGPT's ckpt.pt): nothing in its name says which step it is of."""

TRACKERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("latest_checkpointed_iteration.txt", ("megatron", "deepspeed")),
    ("latest", ("deepspeed",)),
)
"""(file, layouts that it speaks for): it names the newest complete one, and the trainer resumes from what it says."""
TRACKED_NAMES = {"megatron": ("iter_{:07d}",), "deepspeed": ("global_step{}", "global_step_{}")}
"""How a step's directory is called, to find it where too many names are in the way."""

MARKERS = {
    "megatron": "metadata.json .metadata",
    "deepspeed": "complete",
    "huggingface": "trainer_state.json random_states_0.pkl",
    "composer": ".metadata",
    "lightning": "meta.pt latest",
    "nemo": "metadata.json weights/metadata.json weights/.metadata model_weights/metadata.json",
    "dcp": ".metadata model.safetensors.index.json model_and_optim/.metadata .metadata.json",
    "orbax": "commit_success.txt _CHECKPOINT_METADATA _METADATA default/_METADATA items/_METADATA state/_METADATA params/_METADATA",
    "plain": "complete metadata.json trainer_state.json",
}
"""Layout -> files: a directory of it that has one is complete, for it is written last (Orbax: under the final name)."""
LAYOUTS_OF = {
    "lightning": ("lightning", "nemo"),
    "nemo": ("nemo", "lightning"),
    "numbered": ("dcp", "orbax", "plain"),
    "digits": ("dcp", "orbax", "plain"),
}
"""Which rows of MARKERS are looked for, where that is not the layout's own name."""
SETTLES = frozenset({"numbered", "plain"})
"""Of these no one knows what is written last: complete is what does not change any more."""

_TEMPORARY = late_regex(
    r"(?:tmp[-_.]|\.)?(?P<name>.+?)(?P<mark>\.orbax-checkpoint-tmp.*|[-._](?:tmp|temp|part|partial|incomplete)(?:[-._].*)?)?"
)
_PART = late_regex(
    r"(?i)(?<![a-z])(?:ckpts?|checkpoints?|snapshots?)(?![a-z])|\.(?:distcp|safetensors|ckpt|orbax)\b|(?:model|optim)_states\b"
)
_NUMBERED = late_regex(r"\d")
_SUFFIX = late_regex(_FILE)
UNFINISHED = "-unfinished"
_DIRECTORIES = tuple((layout, late_regex(pattern)) for layout, pattern in DIRECTORIES)
_FILES = tuple((layout, late_regex(pattern)) for layout, pattern in FILES)


class Candidate(msgspec.Struct, frozen=True):
    """Names in one directory that may be one checkpoint: a directory, or the files of a step."""

    layout: str
    names: tuple[str, ...]
    is_directory: bool
    order: tuple[int, int] = (0, 0)  # Newest is what is largest: step and epoch as the name says.
    step: int | None = None
    unfinished: bool = False  # The name, or a marker beside it, says that it is being written.


def recognise(entries: Iterable[tuple[str, bool]]) -> list[Candidate]:
    """The checkpoints among (name, is a directory) of a directory, newest first by number. Links must not be there."""
    listed = list(entries)
    unfinished = {name.removesuffix(UNFINISHED) for name, _ in listed if name.endswith(UNFINISHED)}
    found: dict[tuple[str, tuple[int, int], bool, str], Candidate] = {}
    for name, is_directory in listed:
        candidate = _recognise_one(name, is_directory)
        if candidate is None:
            continue
        if unfinished and name.removesuffix(".ckpt").removesuffix("-EMA") in unfinished:
            candidate = replace(candidate, layout="nemo", unfinished=True)
        # Of a step's files each rank may have written one; everything else of the same number is a copy of its own.
        shared = not is_directory and candidate.layout in ("composer", "plain") and candidate.order != (0, 0)
        key = (candidate.layout, candidate.order, candidate.unfinished, "" if shared else name)
        if key in found:
            candidate = replace(candidate, names=(*found[key].names, name))
        found[key] = candidate
    return sorted(found.values(), key=lambda each: (each.order, not each.unfinished, each.names), reverse=True)


def _recognise_one(name: str, is_directory: bool) -> Candidate | None:
    if (_NUMBERED if is_directory else _SUFFIX).search(name) is None:
        return None  # nearly all names of a long directory
    match = _TEMPORARY.fullmatch(name)
    if match is None or name.endswith(UNFINISHED):
        return None
    for bare, temporary in ((name, False), (match["name"], True)):
        for layout, pattern in _DIRECTORIES if is_directory else _FILES:
            fits = pattern.fullmatch(bare)
            if fits is None:
                continue
            groups = fits.groupdict()
            step = int(groups["step"]) if groups.get("step") else None
            order = (step or 0, int(groups.get("epoch") or 0))
            if match["mark"] and match["mark"].startswith(".orbax"):
                layout = "orbax"
            return Candidate(layout, (name,), is_directory, order, step, temporary)
    for bare, temporary in ((name, False), (match["name"], True)):
        if not is_directory and SINGLE.fullmatch(bare):
            return Candidate("lightning" if bare.endswith(".ckpt") else "plain", (name,), False, unfinished=temporary)
    return None


def names_checkpoint(path: str) -> bool:
    """Whether a file with this path is part of a checkpoint, as far as its names say."""
    *folders, name = path.split("/")
    inside = recognise([(each, True) for each in folders if not each.isdecimal()])
    return bool(_PART.search(path) or inside or recognise([(name, False)]))


def markers_of(layout: str) -> tuple[tuple[str, str], ...]:
    """The rows of MARKERS for a layout: with the first that is there, the directory is complete, and of its layout."""
    wanted = LAYOUTS_OF.get(layout, (layout,))
    return tuple((name, marker) for name in wanted for marker in MARKERS.get(name, "").split())


def parse_tracker(text: str) -> int | None:
    """The step in a tracker file: `1200`, `global_step1200`, `iter_0001200`, `checkpoint-1200`; None: anything else."""
    fits = re.fullmatch(rf"(?:global_step_?|iter_|checkpoint-|step-)?{NUMBER}", text.strip(), re.ASCII)
    return int(fits["step"]) if fits else None


def has_zip_end(tail: bytes) -> bool:
    """Whether a file's last 22 bytes are a zip archive's end of central directory, without comment (torch.save)."""
    return len(tail) == 22 and tail.startswith(b"PK\x05\x06") and tail.endswith(b"\0\0")
