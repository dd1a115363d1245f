"""Tests of drained nodes: Slurm starts no job on one, whatever reserves it. So the nodes are reserved, their drain is
lifted inside of the reservation, and put back with its reason before the reservation is deleted.

If the process dies in between, the reservation keeps other jobs away for a day, and a file remembers the drains.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.uncancelled import to_its_end
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.model.slurm_states import is_drained
from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable

MINUTES: Final = 24 * 60
"""Of the reservation: longer than any test, and long enough for a person to notice."""
TRIES, PAUSE_S = 5, 2.0
FILE: Final = "undrained-for-a-test.json"

Say = Callable[[str], None]


class Reservations(Protocol):
    """Makes and deletes reservations; each raises SlurmRefused, SlurmUnavailable."""

    async def create(self, name: str, nodes: Sequence[str], minutes: int) -> None: ...

    async def delete(self, name: str) -> None: ...


class Levers(Protocol):
    """Of slurm.client.SlurmClient; each raises SlurmRefused, SlurmUnavailable."""

    async def read_node(self, node: str) -> SlurmNode | None: ...

    async def drain_node(self, node: str, reason: str) -> None: ...

    async def undrain_node(self, node: SlurmNode) -> None: ...


class Left(Struct, frozen=True, kw_only=True):
    """What has to be put back."""

    reservation: str
    reasons: dict[str, str]
    """Node to the reason of its drain."""


@contextlib.asynccontextmanager
async def lifted(
    levers: Levers, reservations: Reservations, nodes: Sequence[SlurmNode], name: str, place: Path | None, say: Say
) -> AsyncIterator[None]:
    """Inside of it the nodes, drained or not, can be tested in reservation `name`, by nobody else. Without a
    `place` nothing is remembered: the caller knows the drains. Raises SlurmRefused, SlurmUnavailable, OSError; then
    nothing is changed, or it is put back."""
    drained = [node for node in nodes if is_drained(node.state)]
    left = Left(reservation=name, reasons={node.name: node.reason for node in drained})
    making = asyncio.ensure_future(reservations.create(name, [node.name for node in nodes], MINUTES))
    try:
        await to_its_end(making)
        if place is not None:
            await asyncio.to_thread(remember, place, left)
        for node in drained:
            await levers.undrain_node(node)
        yield
    finally:
        if making.exception() is None:
            await to_its_end(put_back(levers, reservations, left, place, say))


def remember(place: Path, left: Left) -> None:
    """Writes down what has to be put back. Raises OSError."""
    place.mkdir(parents=True, exist_ok=True)
    (place / FILE).write_bytes(msgspec.json.encode(left))


async def put_back(
    levers: Levers, reservations: Reservations, left: Left, place: Path | None, say: Say, *, pause_s: float = PAUSE_S
) -> bool:
    """Drains the nodes again and deletes the reservation; True if all is done. What fails stays reserved, and is said.

    A node that is drained already, keeps its reason.
    """

    async def drain(node: str, reason: str) -> None:
        now = await levers.read_node(node)
        if now is not None and not is_drained(now.state):
            await levers.drain_node(node, reason)

    undone = dict(left.reasons)
    with contextlib.suppress(SlurmUnavailable):  # no answer: the others are not tried, for nothing interrupts this
        for node, reason in left.reasons.items():
            if await _done(pause_s, drain, node, reason):
                del undone[node]
    if undone:
        say(f"{', '.join(undone)} could not be drained again; reservation {left.reservation} keeps jobs away for a day")
        return False
    if place is not None:
        (place / FILE).unlink(missing_ok=True)
    deleted = False
    with contextlib.suppress(SlurmUnavailable):
        deleted = await _done(pause_s, reservations.delete, left.reservation)
    if not deleted:
        say(f"Delete it when Slurm answers: scontrol delete reservation={left.reservation}")
    return True


async def put_back_what_was_left(levers: Levers, reservations: Reservations, place: Path, say: Say) -> None:
    """What an earlier test that was killed has left; nothing where there is none."""
    try:
        left = msgspec.json.decode((place / FILE).read_bytes(), type=Left)
    except (OSError, msgspec.MsgspecError):
        return
    if await put_back(levers, reservations, left, place, say):
        say(f"An earlier test was killed: {', '.join(left.reasons)} drained again")


async def _done(pause_s: float, request: Callable[..., Awaitable[None]], *arguments: str) -> bool:
    """Whether it was not refused. Raises SlurmUnavailable after TRIES without an answer, `pause_s` apart."""
    for attempt in range(1, TRIES + 1):
        try:
            await request(*arguments)
            return True
        except SlurmRefused:
            return False
        except SlurmUnavailable:
            if attempt == TRIES:
                raise
            await asyncio.sleep(pause_s)
    return False
