"""Views with facts taken out or shuffled, and what detectors report of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from slurm_watchdog.detect.registry import SPECS, findings_of
from slurm_watchdog.model.cluster_view import (
    ClusterView,
    ProcessView,
)
from slurm_watchdog.model.incidents import Finding, Truth
from slurm_watchdog.model.observations import Role

DEFAULTS = {spec.settings: spec.settings() for spec in SPECS if spec.settings}
CLEARS = frozenset(
    {
        # Whether there were steps at all, and the log's word for why none comes.
        "progress", "phase", "total_steps", "last_increase_age_s",
        # A filesystem that is in the way is told by its own name; without it the job simply stands.
        "blocked", "mount", "storage_age_s",
        # Whether the process is there at all, and whose it is.
        "gone_s", "rank",
        # A checkpoint that the log did not announce, or that cannot be looked at.
        "step", "error",
        # When a bad GPU was never seen busy it has no past of its own to compare with: its peers alone decide then.
        "usual_sm_clock_hz",
    }
)  # fmt: skip
"""Fields that speak for a job. Not to know them leaves what speaks against it; everything else that is lost
may only clear."""


SERIES = 20
"""What is longer is a series of steps, and stays whole: what a gap in it means is the progress clock's matter."""


def bad(view: ClusterView) -> dict[tuple[str, str], Finding]:
    found = [finding for spec in SPECS for finding in findings_of(spec, view, DEFAULTS)]
    return {(f.kind, f.subject): f for f in found if f.truth is Truth.BAD}


def cuts(value: Any) -> Iterator[Callable[[], Any]]:
    """Each gives `value` with one thing less that may be unknown: a field that may be None, one process, one GPU.

    Functions, for a view has thousands, and whoever draws a few need not make them all.
    """
    for each in msgspec.structs.fields(value):
        inside = getattr(value, each.name)
        if isinstance(inside, msgspec.Struct):
            yield from (partial(_changed, value, each.name, less) for less in cuts(inside))
        elif isinstance(inside, tuple) and inside and isinstance(inside[0], msgspec.Struct):
            for place, one in enumerate(inside if len(inside) < SERIES else ()):
                for less in cuts(one):
                    yield partial(_changed, value, each.name, partial(_with_one, inside, place, less))
                if each.name in ("processes", "gpus", "events", "mounts") and _is_here(one):
                    yield partial(_changed, value, each.name, partial(_without_one, inside, place))
        if inside is not None and each.default is None and each.name not in CLEARS:
            yield partial(_changed, value, each.name, lambda: None)


def holes(value: Any) -> Iterator[Any]:
    """Every one of them, made."""
    return (cut() for cut in cuts(value))


def _changed(value: Any, name: str, to: Callable[[], Any]) -> Any:
    return replace(value, **{name: to()})


def _with_one(inside: tuple[Any, ...], place: int, less: Callable[[], Any]) -> tuple[Any, ...]:
    return (*inside[:place], less(), *inside[place + 1 :])


def _without_one(inside: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    return (*inside[:place], *inside[place + 1 :])


def _is_here(one: Any) -> bool:
    """Whether it is something that has to be seen. A process that is gone is remembered; a worker may have ended."""
    return not isinstance(one, ProcessView) or (one.gone_s is None and one.process.role is Role.RANK)


def shuffled(value: Any, random: Any) -> Any:
    """`value` with its processes, nodes, their GPUs and directories in another order; ranks' GPUs and times
    stay in theirs."""
    changes: dict[str, Any] = {}
    for each in msgspec.structs.fields(value):
        inside = getattr(value, each.name)
        if isinstance(inside, msgspec.Struct):
            changes[each.name] = shuffled(inside, random)
        elif isinstance(inside, tuple) and inside and isinstance(inside[0], msgspec.Struct):
            items = [shuffled(one, random) for one in inside]
            if each.name in (
                "processes",
                "gpus",
                "nodes",
                "slurm_nodes",
                "jobs",
                "checkpoints_on_disk",
                "mounts",
                "holders",
            ):
                random.shuffle(items)
            changes[each.name] = tuple(items)
    return replace(value, **changes)
