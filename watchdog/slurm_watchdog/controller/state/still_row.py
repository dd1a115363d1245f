"""Dump after dump since the step was late: does every rank stand where it stood? Pure bookkeeping."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slurm_watchdog.diagnose.stacks.places import locate
from slurm_watchdog.diagnose.stacks.waiting import ProcessKey, frames_key
from slurm_watchdog.model.cluster_view import StackSnapshot, StillRow
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.observations import Role

Dump = tuple[float, tuple[ProcessStack, ...], tuple[str, ...]]  # (when, stacks, nodes that gave none).


@dataclass(frozen=True)
class Row:
    """The first of them and the last two."""

    dumps: int
    kept: tuple[Dump, ...]
    over: bool = False


def follow(row: Row | None, dump: Dump) -> Row:
    """`row` and one more dump."""
    places = _places(dump)
    if row is None:
        return Row(1, (dump,), over=places is None)
    kept = (row.kept[0], *row.kept[1:][-1:], dump)
    return replace(
        row, dumps=row.dumps + 1, kept=kept, over=row.over or places is None or places != _places(row.kept[-1])
    )


def view(row: Row, now: float) -> StillRow:
    """As detectors see it."""
    kept = tuple(StackSnapshot(age_s=now - at, stacks=stacks, silent_nodes=silent) for at, stacks, silent in row.kept)
    return StillRow(dumps=row.dumps, snapshots=kept, over=row.over)


def _places(dump: Dump) -> dict[ProcessKey, tuple[str, ...]] | None:
    """Where each rank stands; None where that is not known of all of them."""
    if dump[2]:
        return None
    found = {}
    for stack in dump[1]:
        if stack.role is not Role.RANK or stack.rank is None:
            continue
        place = locate(stack)
        if place.error is not None:
            return None
        found[stack.node, stack.pid, stack.start_ticks] = frames_key(place)
    return found or None
