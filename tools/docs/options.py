"""Writes docs/options.md and config.example.yaml, every option of the configuration, from its schema: `python -m
tools.docs options example`. The text of an option is the docstring below it, or what a detector declares."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal, get_args, get_origin

import yaml
from msgspec import Struct
from msgspec.structs import FieldInfo

from slurm_watchdog.config.converting import options_of, way_of
from slurm_watchdog.config.detectors import Detector
from slurm_watchdog.config.policy import Match, Override, Treatment
from slurm_watchdog.config.schema import Config, Expert
from slurm_watchdog.detect import registry
from slurm_watchdog.knowledge import limits

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs/options.md"
EXAMPLE = ROOT / "config.example.yaml"
HEAD = """# Options

Generated from the configuration's schema by `make docs`. [config.example.yaml](../config.example.yaml) has the same as a file that loads, with the whole
text and the bounds of each option.

- The file is YAML, `/etc/slurm-watchdog/config.yaml`, the same on all machines. What it does not name has its default. An unknown key, a number without
  its unit or a contradiction refuses the whole file, with every error at once: `slurm-watchdog doctor --config FILE`.
- Durations: a number and `ms`, `s`, `min`, `h` or `d`, also joined (`1h30min`). Sizes: `B`, `KiB`, `MiB`, `GiB`. A mode is `off`, `observe` or `act`.
- A default of `-` is empty: what that means, the line says. Every detector has `mode` and `hold` besides its own options. What it reports, and when: [Detectors](detectors.md). Rules, rungs and guards:
  [Acting](acting.md). What to set first: [Installing](install.md#worth-setting).
"""
PLACES: dict[type[Struct], str] = {
    Treatment: "expert.policy.kinds.KIND",
    Override: "expert.policy.overrides[]",
    Match: "expert.policy.overrides[].match",
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
    for whole, before in ((Config(), ""), (Expert(), "expert.")):
        for path, block in sections(whole, ""):
            top, _, below = path.partition(".")
            heading = f"{before}{top}".rstrip(".") or "Top level"
            tables.setdefault(heading, []).extend(rows_of(type(block), f"{below}." if below else ""))
    for model, name in PLACES.items():
        tables[name] = rows_of(model)
    return "\n".join([HEAD, *(table(name, rows) for name, rows in tables.items() if rows)])


def sections(section: Struct, path: str) -> Iterator[tuple[str, Struct]]:
    """(dotted path, block) of a block and of all blocks in it."""
    yield path, section
    for name, field in options_of(type(section)).items():
        value = getattr(section, field.name)
        if isinstance(value, Struct):
            yield from sections(value, f"{path}.{name}" if path else name)


def table(name: str, rows: list[str]) -> str:
    """A heading, and a row for each option below it."""
    more = "\nTakes every option of `expert.policy.kinds.KIND`, and:\n" if name == PLACES[Override] else ""
    return "\n".join([f"## {name}", more, "| option | default | meaning |", "|---|---|---|", *rows]) + "\n"


def rows_of(model: type[Struct], before: str = "") -> list[str]:
    """A row for each option of a block, without those that another block has already described; `before` its name."""
    described = options_of(Treatment) if model is Override else {}
    if issubclass(model, Detector):
        described = {name: field for name, field in options_of(Detector).items() if not own_default(model, name)}
    texts = texts_of(model)
    options = {name: field for name, field in options_of(model).items() if name not in described}
    return [row for name, field in options.items() if (row := row_of(before + name, field, texts.get(field.name, "")))]


def own_default(model: type[Struct], name: str) -> bool:
    """Whether a detector has another default than all others."""
    return bool(options_of(model)[name].default != options_of(Detector)[name].default)


def texts_of(section: type[Struct]) -> dict[str, str]:
    """Option -> its text."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        declared = [each.settings for each in registry.SPECS if each.settings.__name__ == base.__name__]
        if declared:
            found |= {name: option.text for name, option in limits.options_of(declared[0]).items()}
        elif base.__module__.startswith("slurm_watchdog.config") and not base.__name__.startswith("_"):
            (tree,) = ast.parse(inspect.getsource(base)).body
            for before, node in zip(tree.body, tree.body[1:], strict=False):
                if isinstance(before, ast.AnnAssign) and isinstance(node, ast.Expr):
                    found[before.target.id] = " ".join(node.value.value.split())
    return found


def row_of(name: str, field: FieldInfo, text: str) -> str:
    """The row of one option; empty for a block."""
    if isinstance(field.default, Struct):
        return ""
    empty = field.required or default_of(field) in (None, "", (), {})
    default = "required" if field.required else "-" if empty else f"`{written(field, default_of(field))}`"
    cells = (f"`{name}`", default, short(text, whole=get_origin(field.type) is Literal))
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def default_of(field: FieldInfo) -> Any:
    """The default of an option."""
    return field.default_factory() if callable(field.default_factory) else field.default


def short(description: str, *, whole: bool) -> str:
    """Its first sentence; of a long one what is in no brackets, of a longer one its first part, unless it
    explains words that may be chosen."""
    sentence = SENTENCE.split(description)[0].removesuffix(".")
    if len(sentence) >= LONG:
        sentence = BRACKETS.sub("", sentence)
    return sentence if whole or len(sentence) <= TOO_LONG or ": {" in sentence else sentence.partition("; ")[0]


def written(field: FieldInfo, value: Any) -> str:
    """A value as it is written in the file."""
    value = write(value) if (write := way_of(field.type, "write")) else value
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def example() -> str:
    """The text of `config.example.yaml`: every key with its default and what it means. It loads as it is."""
    out = [
        "# slurm-watchdog: every setting with its default. Generated from "
        "watchdog/slurm_watchdog/config/schema.py by `make example`.",
        "# Check a changed file with: slurm-watchdog doctor --config FILE",
        "# Durations need a unit (ms, s, min, h, d), sizes too (B, KiB, MiB, GiB).",
        "",
    ]
    write_section(Config(), out, indent=0)
    out += ["", f"# {Expert.__doc__}", "expert:"]
    write_section(Expert(), out, indent=1)
    return "\n".join(out) + "\n"


def write_section(section: Struct, out: list[str], indent: int) -> None:
    """Its keys with their texts, as lines below what `out` has."""
    pad, texts = "  " * indent, texts_of(type(section))
    for name, field in options_of(type(section)).items():
        value = getattr(section, field.name)
        if isinstance(value, Struct):
            if indent == 0:
                out.append("")
            out.extend(f"{pad}# {line}" for line in wrap(" ".join((type(value).__doc__ or "").split()), 100))
            out.append(f"{pad}{name}:")
            write_section(value, out, indent + 1)
            continue
        choices = choices_of(field.type)
        text = texts[field.name] + (f" One of: {', '.join(choices)}." if choices and indent else "")
        out.extend(f"{pad}# {line}" for line in wrap(text, 108))
        out.append(f"{pad}{name}: {written(field, value)}")


def choices_of(kind: Any) -> tuple[str, ...]:
    """The words that may be chosen."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    found = [choices_of(each) for each in get_args(kind)]
    return next((each for each in found if each), ())
