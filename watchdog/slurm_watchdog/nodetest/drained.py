"""Tests of drained nodes: which of them are tested, and how their drain is lifted meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.uncancelled import to_its_end
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.model.slurm_states import USED, is_drained, node_words, starts_jobs
from slurm_watchdog.nodetest.conduct import Say
from slurm_watchdog.slurm.client import SlurmClient, SlurmRefused, SlurmUnavailable
from slurm_watchdog.slurm.reservation import Reservations

UNDRAINED: Final = "undrained-for-a-test.json"
DRAIN_MARK: Final = "slurm-watchdog:"
"""Begins the reason of every drain of ours."""
NOT_OURS: Final = "it is not drained or reserved by slurm-watchdog, or is in use"
MINUTES, TRIES, PAUSE_S = 24 * 60, 2, 2.0
"""Of a reservation: longer than any test. Requests without an answer."""


def why_not(node: SlurmNode, *, idle: bool, drained_by_us: bool, reserved: Collection[str], named: bool) -> str:
    """Why a node is not tested; empty: it is. `named` nodes that are idle are peers of those that we have drained."""
    is_idle = starts_jobs(node.state) and "IDLE" in node_words(node.state)
    if drained_by_us:
        ours = node.reason.startswith(DRAIN_MARK) if is_drained(node.state) else node.name in reserved
        return "" if (ours and not node_words(node.state) & USED) or (named and is_idle) else NOT_OURS
    if not starts_jobs(node.state):
        return f"Slurm starts no job there: {node.state.lower()}{f' ({node.reason})' if node.reason else ''}"
    return "it is not idle" if idle and not is_idle else ""


class Left(Struct, frozen=True, kw_only=True):
    """What has to be put back: node to the reason of its drain."""

    reservation: str
    reasons: dict[str, str]


def remember(place: Path, left: Left) -> None:
    """Writes down what has to be put back. Raises OSError."""
    place.mkdir(parents=True, exist_ok=True)
    (place / UNDRAINED).write_bytes(msgspec.json.encode(left))


@contextlib.asynccontextmanager
async def lifted(
    client: SlurmClient, reservations: Reservations, nodes: Sequence[SlurmNode], name: str, place: Path | None, say: Say
) -> AsyncIterator[None]:
    """Slurm starts no job on a drained node, whatever reserves it: so the nodes are reserved, and their drain is lifted
    inside of the reservation, and put back with its reason before that is deleted. If this process dies in between, the
    reservation keeps other jobs away, and a file in `place` remembers the drains (None: the caller does). Raises
    SlurmRefused, SlurmUnavailable, OSError; then nothing is changed, or it is put back."""
    drained = [node for node in nodes if is_drained(node.state)]
    left = Left(reservation=name, reasons={node.name: node.reason for node in drained})
    making = asyncio.ensure_future(reservations.create(name, [node.name for node in nodes], MINUTES))
    try:
        await to_its_end(making)
        if place is not None:
            await asyncio.to_thread(remember, place, left)
        for node in drained:
            await client.undrain_node(node)
        yield
    finally:
        if making.exception() is None:
            await to_its_end(put_back(client, reservations, left, place, say))


async def put_back(
    client: SlurmClient, reservations: Reservations, left: Left, place: Path | None, say: Say, pause_s: float = PAUSE_S
) -> None:
    """Drains the nodes again and deletes the reservation. What fails stays reserved, and is said. A node that somebody
    has drained keeps its reason."""

    async def drain(node: str) -> None:
        now = await client.read_node(node)
        if now is not None and not is_drained(now.state):
            await client.drain_node(node, left.reasons[node])

    async def done(request: Callable[[str], Any], name: str) -> bool:
        for _ in range(TRIES):
            with contextlib.suppress(SlurmUnavailable):
                try:
                    await request(name)
                except SlurmRefused:
                    return False
                return True
            await asyncio.sleep(pause_s)
        return False

    for node in left.reasons:
        if not await done(drain, node):  # the others are not tried, for nothing interrupts this
            say(f"{node} could not be drained again; reservation {left.reservation} keeps jobs away for a day")
            return
    if place is not None:
        (place / UNDRAINED).unlink(missing_ok=True)
    if not await done(reservations.delete, left.reservation):
        say(f"Delete it when Slurm answers: scontrol delete reservation={left.reservation}")


async def put_back_what_was_left(client: SlurmClient, reservations: Reservations, place: Path, say: Say) -> None:
    """What an earlier test that was killed has left; nothing where there is none."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        left = msgspec.json.decode((place / UNDRAINED).read_bytes(), type=Left)
        say(f"An earlier test was killed: {', '.join(left.reasons)} is drained again")
        await put_back(client, reservations, left, place, say)
