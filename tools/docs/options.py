"""Writes docs/options.md, the options above `expert:`, and config.example.yaml, all of them, from the schema: `python -m
tools.docs options example`. The text of an option is the docstring below it, or what a detector declares."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from msgspec import Struct
from msgspec.structs import FieldInfo

from slurm_watchdog.config.converting import options_of, way_of
from slurm_watchdog.config.detectors import Detector
from slurm_watchdog.config.schema import Config, Expert
from slurm_watchdog.detect import registry
from slurm_watchdog.knowledge import limits

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs/options.md"
EXAMPLE = ROOT / "config.example.yaml"
HEAD = """# Options

Generated from the configuration's schema by `make docs`. The file is YAML, `/etc/slurm-watchdog/config.yaml`, the same on all machines; what it does not
name has its default. An unknown key, a number without its unit or a contradiction refuses the whole file, with every error at once:
`slurm-watchdog doctor --config FILE`. Durations: `ms`, `s`, `min`, `h`, `d`, also joined (`1h30min`); sizes: `B`, `KiB`, `MiB`, `GiB`.
What to set first: [Installing](install.md#worth-setting). Rules, rungs and guards: [Acting](acting.md). What is below `expert:` is in
[config.example.yaml](../config.example.yaml): every key with its default and a sentence.
"""
SENTENCE = re.compile(r"(?<=[\w)\]}'`])\. (?=[A-Z{])")
"""Pages have the first sentence of each text."""
EXAMPLE_HEAD = """\
# slurm-watchdog: every setting with its default. Keep what you change; the rest follows the release.
# Check it: slurm-watchdog doctor --config FILE. Words: docs/glossary.md. Durations: 30s, 10min, 1h30min.
"""


class Option(NamedTuple):
    """A key of the file, or the heading of a block: then it has no default."""

    path: str
    default: str | None
    text: str

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rpartition(".")[2]


def options(section: Struct, path: str = "") -> Iterator[Option]:
    """All options of a block and of the blocks in it, each block after its heading. What every detector has stands
    once."""
    texts, kind = texts_of(type(section)), type(section)
    common = options_of(Detector) if isinstance(section, Detector) else {}
    for name, field in options_of(kind).items():
        value, at = getattr(section, field.name), f"{path}.{name}".lstrip(".")
        if isinstance(value, Struct):
            inside = list(options(value, at))
            yield from (Option(at, None, short(inspect.cleandoc(value.__doc__ or ""))), *inside) if inside else ()
        elif name not in common:
            yield Option(at, written(field, value), short(texts.get(field.name, "")))


def texts_of(section: type[Struct]) -> dict[str, str]:
    """Option -> its text."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        declared = [
            each.settings for each in registry.SPECS if each.settings and each.settings.__name__ == base.__name__
        ]
        if declared:
            found |= {name: option.text for name, option in limits.options_of(declared[0]).items()}
        elif base.__module__.startswith("slurm_watchdog.config") and not base.__name__.startswith("_"):
            (tree,) = ast.parse(inspect.getsource(base)).body
            for before, node in zip(tree.body, tree.body[1:], strict=False):
                if isinstance(before, ast.AnnAssign) and isinstance(node, ast.Expr):
                    found[before.target.id] = node.value.value
    return found


def short(text: str) -> str:
    """Its first sentence, on one line."""
    return SENTENCE.split(" ".join(text.split()))[0].removesuffix(".")


def written(field: FieldInfo, value: Any) -> str:
    """A value as it is written in the file."""
    value = write(value) if (write := way_of(field.type, "write")) else value
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")


def write() -> str:
    """The page: what people set."""
    rows = [row(each) for each in options(Config()) if each.default is not None]
    return "\n".join([HEAD, "| option | default | meaning |", "|---|---|---|", *rows]) + "\n"


def row(option: Option) -> str:
    """An option as a row."""
    return f"| `{option.path}` | `{option.default}` | {cell(option.text)} |"


def cell(text: str) -> str:
    """A text in a table."""
    return text.replace("|", "\\|")


def example() -> str:
    """The text of `config.example.yaml`: every key with its default and what it means. It loads as it is."""
    lines = [EXAMPLE_HEAD, *map(line, options(Config())), "", line(Option("expert", None, short(Expert.__doc__ or "")))]
    return "\n".join([*lines, *(line(each._replace(path=f"expert.{each.path}")) for each in options(Expert()))]) + "\n"


def line(option: Option) -> str:
    """An option as a line of the file."""
    value = "" if option.default is None else f" {option.default}"
    return f"{'  ' * option.path.count('.')}{option.name}:{value}  # {option.text}"
