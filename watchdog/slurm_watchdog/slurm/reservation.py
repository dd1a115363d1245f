"""Reservations that keep nodes for one user: made and deleted with scontrol. Takes an operator of Slurm."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable
from slurm_watchdog.slurm.commands import Answer, Commands, first_line

DEADLINE_S = 20.0
"""Of a request, as slurm.deadline is shipped."""


class Reservations:
    """Those of one user; each request raises SlurmRefused, SlurmUnavailable."""

    def __init__(self, commands: Commands, user: str) -> None:
        self._commands, self._user = commands, user

    async def create(self, name: str, nodes: Sequence[str], minutes: int) -> None:
        """From now on, so long; jobs that run there continue."""
        await self._ask(
            "create", "reservation", f"ReservationName={name}", f"Nodes={','.join(nodes)}", f"Users={self._user}",
            "StartTime=now", f"Duration={minutes}", "Flags=MAINT,IGNORE_JOBS",
        )  # fmt: skip

    async def delete(self, name: str) -> None:
        """Gives the nodes back to everybody."""
        await self._ask("delete", f"reservation={name}")

    async def _ask(self, *words: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                answer: Answer = await self._commands.run("scontrol", *words)
        except TimeoutError as error:
            raise SlurmUnavailable(f"scontrol {words[0]} does not answer within {DEADLINE_S:g} s") from error
        if answer.code:
            raise SlurmRefused(f"scontrol {words[0]}: {first_line(answer.stderr)}")
