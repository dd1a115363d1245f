"""The file that shows every setting with its default: config.example.yaml."""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import yaml

from slurm_watchdog.config.schema import Config
from slurm_watchdog.config.types import Section


def example_config() -> str:
    """The text of `config.example.yaml`: every key with its default and what it means. It loads as it is."""
    out = [
        "# slurm-watchdog: every setting with its default. Generated from "
        "watchdog/slurm_watchdog/config/schema.py by `make example`.",
        "# Check a changed file with: slurm-watchdog check-config FILE",
        "# Durations need a unit (ms, s, min, h, d), sizes too (B, KiB, MiB, GiB).",
        "",
    ]
    _write_section(Config(), out, indent=0)
    return "\n".join(out) + "\n"


def _write_section(section: Section, out: list[str], indent: int) -> None:
    from textwrap import wrap

    pad = "  " * indent
    plain = section.model_dump()
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            if indent == 0:
                out.append("")
            out.extend(f"{pad}# {line}" for line in wrap(" ".join((type(value).__doc__ or "").split()), 100))
            out.append(f"{pad}{name}:")
            _write_section(value, out, indent + 1)
            continue
        choices = _choices(field.annotation)
        text = (field.description or "") + (f" One of: {', '.join(choices)}." if choices and indent else "")
        out.extend(f"{pad}# {line}" for line in wrap(text, 108))
        out.append(f"{pad}{name}: {_scalar(plain[name])}")


def _choices(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    found = [_choices(each) for each in get_args(annotation)]
    return next((each for each in found if each), ())


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")
