"""How an option of a detector is declared, and the limits of a job that makes no step: what `detectors.collective_hang`
has, and what holds where there is no configuration. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

NAN_STEPS = 3  # So many losses in a row are no number: mixed precision skips single steps.
_OPTION = "option"


def most_odd(of: int) -> int:
    """How many of so many ranks, nodes or GPUs may differ from the others, at most: one, or a quarter of them. More are
    two kinds, and none of them is the odd one."""
    return max(1, of // 4)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a detector, besides its default: its text, and which values are accepted."""

    text: str
    is_duration: bool = False  # Seconds in Python; written with a unit in the file.
    bounds: Mapping[str, Any]  # `gt`, `ge` and `le`, as msgspec.Meta has them.


def option(default: float, text: str, *, ge: float | None = None, le: float | None = None) -> Any:
    """A field of a settings class: a number from `ge` to `le`."""
    return field(
        default=default,
        metadata={_OPTION: Option(text=text, bounds={n: v for n, v in (("ge", ge), ("le", le)) if v is not None})},
    )


def span(default_s: float, text: str) -> Any:
    """A field of a settings class: a duration in seconds, longer than none."""
    return field(default=default_s, metadata={_OPTION: Option(text=text, is_duration=True, bounds={"gt": 0})})


def span_or_never(default_s: float, text: str) -> Any:
    """A field of a settings class: a duration in seconds; 0 switches something off."""
    return field(default=default_s, metadata={_OPTION: Option(text=text, is_duration=True, bounds={"ge": 0})})


def options_of(settings: type[Any]) -> dict[str, Option]:
    """Name -> option, of a settings class; a field without one is a constant that only tests give."""
    return {each.name: each.metadata[_OPTION] for each in fields(settings) if _OPTION in each.metadata}


@dataclass(frozen=True, kw_only=True)
class PhaseLimits:
    """Durations in seconds."""

    floor: float = span(60.0, "No job counts as hanging sooner than this after its last step.")
    factor: float = 3.0  # Limit = this x the slowest of the recent steps, never below `floor`.
    ceiling: float = span_or_never(
        0.0, "No limit of a job that trains is longer, nor below twice its slowest step; 0s = as learnt."
    )
    startup_grace: float = span(3600.0, "Limit until enough steps of this run were seen.")
    warmup_steps: int = option(5, "Steps of a run to see before its own speed counts.", ge=0)
    evaluation_floor: float = span(1800.0, "Floor while the log says that an evaluation runs.")
    checkpoint_floor: float = span(
        1800.0, "Floor while the log or the stacks show a checkpoint that is written, read or uploaded."
    )
    stepless_limit: float = span(600.0, "Limit of a run whose steps cannot be read, or 3 x its longest pause.")
    answer_limit: float = 300.0
    """Limit where the rank that the others wait for has asked a server that sends nothing: no byte on its connection;
    or saves or evaluates, and waits in a lock of its process while nothing runs there. Proxies and load balancers
    give up sooner (nginx and AWS ALB after 60 s, Azure's after 240 s). A transfer or a checkpoint is acted on after
    `checkpoint_floor`."""
    busy_limit: float = span(
        1800.0, "Limit while stacks move or a rank outside the collective computes, or without stacks."
    )


SHIPPED = PhaseLimits()
