"""Reservations: read, and made to keep nodes for one user, which takes an operator of Slurm."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slurm_watchdog.model.slurm import Reservation
from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable
from slurm_watchdog.slurm.commands import Answer, Commands, first_line
from slurm_watchdog.slurm.fields import ParseError
from slurm_watchdog.slurm.node_names import expand_nodes

DEADLINE_S = 20.0
"""Of a request, as slurm.deadline is shipped."""


def creation(name: str, nodes: Sequence[str], user: str, minutes: int) -> tuple[str, ...]:
    """The words of scontrol for a reservation from now on; jobs that run there continue."""
    return (
        "create", "reservation", f"ReservationName={name}", f"Nodes={','.join(nodes)}", f"Users={user}",
        "StartTime=now", f"Duration={minutes}", "Flags=MAINT,IGNORE_JOBS",
    )  # fmt: skip


def deletion(name: str) -> tuple[str, ...]:
    """The words of scontrol that give its nodes back to everybody."""
    return ("delete", f"reservation={name}")


def parse_reservations(text: str) -> tuple[Reservation, ...]:
    """The answer of `scontrol --oneliner show reservation`, times as seconds since the epoch. Raises ParseError."""
    found = []
    for line in text.splitlines():
        row = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
        if not line.strip() or line.startswith("No reservations"):
            continue
        try:
            name, begin, end = row["ReservationName"], float(row["StartTime"]), float(row["EndTime"])
        except (KeyError, ValueError) as error:
            raise ParseError(f"no reservation with its times: {line[:80]!r}") from error
        nodes, flags = expand_nodes(row.get("Nodes", "")), tuple(row.get("Flags", "").split(","))
        found.append(Reservation(name=name, start_at=begin, end_at=end, nodes=nodes, flags=flags))
    return tuple(found)


class Reservations:
    """Those of one user; each request raises SlurmRefused, SlurmUnavailable."""

    def __init__(self, commands: Commands, user: str) -> None:
        self._commands, self._user = commands, user

    async def create(self, name: str, nodes: Sequence[str], minutes: int) -> None:
        """From now on, so long; jobs that run there continue."""
        await self._ask(*creation(name, nodes, self._user, minutes))

    async def delete(self, name: str) -> None:
        """Gives the nodes back to everybody."""
        await self._ask(*deletion(name))

    async def _ask(self, *words: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer: Answer = await self._commands.run("scontrol", *words)
        except TimeoutError as error:
            raise SlurmUnavailable(f"scontrol {words[0]} does not answer within {DEADLINE_S:g} s") from error
        if answer.code:
            raise SlurmRefused(f"scontrol {words[0]}: {first_line(answer.stderr)}")
