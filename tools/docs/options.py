"""Writes docs/options.md, every option of the configuration, from its schema: `python -m tools.docs options`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slurm_watchdog.config.detectors import Detector
from slurm_watchdog.config.policy import Match, Override, Treatment
from slurm_watchdog.config.schema import Config
from slurm_watchdog.config.types import parse_duration, parse_size

FILE = Path(__file__).parents[2] / "docs/options.md"
HEAD = """# Options

Generated from the configuration's schema by `make docs`. [config.example.yaml](../config.example.yaml) has the same as a file that loads, with the whole
text and the bounds of each option.

- The file is YAML, `/etc/slurm-watchdog/config.yaml`, the same on all machines. What it does not name has its default. An unknown key, a number without
  its unit or a contradiction refuses the whole file, with every error at once: `slurm-watchdog check-config FILE`.
- Durations: a number and `ms`, `s`, `min`, `h` or `d`, also joined (`1h30min`). Sizes: `B`, `KiB`, `MiB`, `GiB`. A mode is `off`, `observe` or `act`.
- A default of `-` is empty: what that means, the line says. Every detector has `mode` and `hold` besides its own options. What it reports, and when: [Detectors](detectors.md). Rules, rungs and guards:
  [Acting](acting.md). What to set first: [Installing](install.md#worth-setting).
"""
PLACES: dict[type[BaseModel], str] = {
    Treatment: "policy.kinds.KIND",
    Override: "policy.overrides[]",
    Match: "policy.overrides[].match",
}
"""Blocks that may stand several times: they hang on no default, so they are named here."""
SENTENCE = re.compile(r"(?<=[\w)\]}'`])\. (?=[A-Z])")
"""The page has the first sentence of each text."""
BRACKETS = re.compile(r" \((?!\?)[^()]{12,}\)")
LONG = 100
TOO_LONG = 140
"""Characters; what such a sentence says behind a semicolon, config.example.yaml has."""


def write() -> str:
    """The whole page."""
    tables: dict[str, list[str]] = {}
    for path, block in sections(Config(), ""):
        top, _, below = path.partition(".")
        tables.setdefault(top or "Top level", []).extend(rows_of(type(block), f"{below}." if below else ""))
    for model, name in PLACES.items():
        tables[name] = rows_of(model)
    return "\n".join([HEAD, *(table(name, rows) for name, rows in tables.items() if rows)])


def sections(section: BaseModel, path: str) -> Iterator[tuple[str, BaseModel]]:
    """(dotted path, block) of a block and of all blocks in it."""
    yield path, section
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from sections(value, f"{path}.{name}" if path else name)


def table(name: str, rows: list[str]) -> str:
    """A heading, and a row for each option below it."""
    more = "\nTakes every option of `policy.kinds.KIND`, and:\n" if name == PLACES[Override] else ""
    return "\n".join([f"## {name}", more, "| option | default | meaning |", "|---|---|---|", *rows]) + "\n"


def rows_of(model: type[BaseModel], before: str = "") -> list[str]:
    """A row for each option of a block, without those that another block has already described; `before` its name."""
    described = Treatment.model_fields if model is Override else {}
    if issubclass(model, Detector):
        described = {name: field for name, field in Detector.model_fields.items() if not own_default(model, name)}
    options = {name: field for name, field in model.model_fields.items() if name not in described}
    return [row for name, field in options.items() if (row := row_of(before + name, field))]


def own_default(model: type[BaseModel], name: str) -> bool:
    """Whether a detector has another default than all others."""
    return bool(model.model_fields[name].default != Detector.model_fields[name].default)


def row_of(name: str, field: FieldInfo) -> str:
    """The row of one option; empty for a block."""
    if isinstance(field.default, BaseModel):
        return ""
    empty = field.default in (None, "", [], {})
    default = "required" if field.is_required() else "-" if empty else f"`{text_of(field)}`"
    cells = (f"`{name}`", default, short(field.description or "", whole=get_origin(field.annotation) is Literal))
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def short(description: str, *, whole: bool) -> str:
    """Its first sentence; of a long one what is in no brackets, of a longer one its first part, unless it
    explains words that may be chosen."""
    sentence = SENTENCE.split(description)[0].removesuffix(".")
    if len(sentence) >= LONG:
        sentence = BRACKETS.sub("", sentence)
    return sentence if whole or len(sentence) <= TOO_LONG or ": {" in sentence else sentence.partition("; ")[0]


def text_of(field: FieldInfo) -> str:
    """The default as it is written in the file."""
    from slurm_watchdog.config.types import format_duration, format_size

    if is_written_by(field, parse_duration):
        return format_duration(field.default) if field.default else "0s"
    if is_written_by(field, parse_size):
        return format_size(field.default)
    return yaml.safe_dump(field.default, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def is_written_by(field: FieldInfo, parser: Callable[..., object]) -> bool:
    """Whether an option is read by this parser of quantities with a unit."""
    return any(getattr(each, "func", None) is parser for each in field.metadata)
