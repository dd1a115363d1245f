"""Writes docs/options.md, every option of the configuration, from its schema: `python -m tools.docs options`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from slurm_watchdog.config.detectors import Detector
from slurm_watchdog.config.policy import Match, Override, Treatment
from slurm_watchdog.config.schema import Config
from slurm_watchdog.config.types import parse_duration, parse_size
from slurm_watchdog.model.actions import Rung

FILE = Path(__file__).parents[2] / "docs/options.md"
HEAD = """# Options

Generated from the configuration's schema by `make docs`; [config.example.yaml](../config.example.yaml) has the same as a file that loads.

- The file is YAML, `/etc/slurm-watchdog/config.yaml`. What it does not name has its default. An unknown key, a number without its unit or a
  contradiction refuses the whole file, with every error at once: `slurm-watchdog check-config FILE`.
- *duration*: a number and `ms`, `s`, `min`, `h` or `d`, also joined (`1h30min`). *size*: a number and `B`, `KiB`, `MiB` or `GiB`. *mode*:
  `off`, `observe` or `act`. Lists are written `[a, b]`. An empty text or list (`''`, `[]`) means what the line says.
- What each detector reports, and when: [Detectors](detectors.md). What rules, rungs and guards do: [Acting](acting.md).
- Which options are worth setting first: [Installing](install.md#worth-setting).
"""
PLACES: dict[type[BaseModel], str] = {
    Treatment: "policy.kinds.KIND",
    Override: "policy.overrides[]",
    Match: "policy.overrides[].match",
}
"""Blocks that may stand several times: they hang on no default, so they are named here."""
WORDS = {bool: "true or false", str: "text", int: "number", float: "number"}


def write() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, section in sections(Config(), ""):
        parts.append(table(name, type(section)))
    for model, name in PLACES.items():
        parts.append(table(name, model))
    return "\n".join(parts)


def sections(section: BaseModel, path: str) -> Iterator[tuple[str, BaseModel]]:
    """(dotted path, block) of a block and of all blocks in it."""
    yield path, section
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from sections(value, f"{path}.{name}" if path else name)


def table(path: str, model: type[BaseModel]) -> str:
    """One block: its heading, what it is, and a row for each of its options."""
    rows = rows_of(model)
    lines = [f"## {path or 'Top level'}", "", " ".join((model.__doc__ or "").split()), ""]
    if model is Override:
        lines[2] += " It takes every option of `policy.kinds.KIND`, and:"
    elif issubclass(model, Detector):
        lines[2] += " Besides: `mode`, `hold`."
    if not rows:
        return "\n".join(lines[:-1]) + "\n"
    return "\n".join([*lines, "| option | default | type | meaning |", "|---|---|---|---|", *rows]) + "\n"


def rows_of(model: type[BaseModel]) -> list[str]:
    """A row for each option of a block, without those that another block has already described."""
    described = Treatment.model_fields if model is Override else {}
    if issubclass(model, Detector):
        described = {name: field for name, field in Detector.model_fields.items() if not own_default(model, name)}
    return [row for name, field in model.model_fields.items() if name not in described and (row := row_of(name, field))]


def own_default(model: type[BaseModel], name: str) -> bool:
    """Whether a detector has another default than all others."""
    return bool(model.model_fields[name].default != Detector.model_fields[name].default)


def row_of(name: str, field: FieldInfo) -> str:
    """The row of one option; empty for a block, which has a heading of its own."""
    if isinstance(field.default, BaseModel):
        return ""
    default = "required" if field.is_required() else f"`{text_of(field)}`" if field.default is not None else "-"
    cells = (f"`{name}`", default, kind_of(field), field.description or "")
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def text_of(field: FieldInfo) -> str:
    """The default as it is written in the file."""
    from slurm_watchdog.config.types import format_duration, format_size

    kind = kind_of(field).split(",")[0]
    if kind == "duration":
        return format_duration(field.default) if field.default else "0s"
    if kind == "size":
        return format_size(field.default)
    return yaml.safe_dump(field.default, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def kind_of(field: FieldInfo) -> str:
    """The type of an option, in words, with its bounds."""
    found = [field.annotation, *(each for each in field.metadata)]
    bounds = [f"{sign} {value:g}" for each in field.metadata for sign, value in bounds_of(each)]
    return ", ".join([word_for(found), *bounds])


def bounds_of(given: Any) -> Iterator[tuple[str, float]]:
    """Bounds that a piece of metadata sets; a length is none."""
    for name, sign in (("gt", "above"), ("ge", "at least"), ("lt", "below"), ("le", "at most")):
        value = getattr(given, name, None)
        if isinstance(value, int | float):
            yield sign, value


def word_for(parts: list[Any]) -> str:
    """The word for an annotation with what was said about it."""
    validators = [getattr(each, "func", None) for each in parts]
    annotation = parts[0]
    if parse_duration in validators:
        return "duration"
    if annotation is Rung:
        return "rung"
    if parse_size in validators:
        return "size"
    arguments = get_args(annotation)
    if any(isinstance(each, str) for each in arguments):
        choices = tuple(str(each) for each in arguments)
        return "mode" if choices == ("off", "observe", "act") else " or ".join(f"`{each}`" for each in choices)
    origin = get_origin(annotation)
    if origin is list:
        return "list of " + {"text": "texts", "rung": "rungs", "block": "blocks"}.get(
            inner := word_for_annotation(arguments[0]), inner
        )
    if origin is dict:
        return "mapping"
    if origin is not None and type(None) in arguments:
        return word_for_annotation(next(each for each in arguments if each is not type(None)))
    return WORDS.get(annotation, "block")


def word_for_annotation(annotation: Any) -> str:
    """The word for an annotation that may carry metadata itself."""
    metadata = getattr(annotation, "__metadata__", None)
    return word_for([annotation] if metadata is None else [get_args(annotation)[0], *metadata])
