"""Nodes that alone have lost a filesystem which others reach: a restart avoids them, whatever the job died of. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from slurm_watchdog.knowledge.local_filesystems import LOCAL_TYPES
from slurm_watchdog.model.node_view import NodeView, SeenMount

LOST_S: Final = 30.0
"""So long a look has to be out: servers fail over in less."""
FRESH_S: Final = 120.0
"""A look that is older says nothing about now: each mount is looked at every 30 s."""


def lost_mounts(
    nodes: Iterable[NodeView], every: Callable[[], Iterable[NodeView]], now: float
) -> tuple[tuple[str, str], ...]:
    """(node, sentence) for each of `nodes` whose own look at a shared filesystem does not return, while more
    of the others reach it than do not. `every`: all nodes there are, asked for only where one of these is in
    trouble.

    A user's child counts for nobody, nor does a disk of the node's own: it is as lost to the next job there,
    but no other node can tell.
    """
    out = [
        (node, seen)
        for node in nodes
        for seen in node.mounts
        if _is_current(seen, now) and not seen.probe.responding and seen.probe.seconds >= LOST_S
    ]
    if not out:
        return ()
    everybody = tuple(every())
    found: dict[str, str] = {}
    for node, seen in out:
        words = [
            (each.name, other)
            for each in everybody
            if each.name != node.name
            for other in each.mounts
            if _is_same_filesystem(other, seen, now)
        ]
        reach = [name for name, other in words if other.probe.responding]
        if len(reach) > len(words) - len(reach):
            why = f"its mount of {seen.probe.mount} has not answered for {seen.probe.seconds:.0f} s"
            found.setdefault(node.name, f"{why}, and {_few(reach)} reach{'es' if len(reach) == 1 else ''} it")
    return tuple(sorted(found.items()))


def _is_current(seen: SeenMount, now: float) -> bool:
    probe = seen.probe
    return probe.uid is None and now - seen.at <= FRESH_S and probe.fs_type not in (None, *LOCAL_TYPES)


def _is_same_filesystem(other: SeenMount, seen: SeenMount, now: float) -> bool:
    """Whether it is word about the same filesystem: the place, its type and its server."""
    a, b = other.probe, seen.probe
    return _is_current(other, now) and (a.mount, a.fs_type, a.device) == (b.mount, b.fs_type, b.device)


def _few(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} other nodes"
