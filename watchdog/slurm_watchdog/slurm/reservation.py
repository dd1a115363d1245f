"""Reservations: read, and made to keep nodes for one user, which takes an operator of Slurm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.model.slurm import Reservation
from slurm_watchdog.slurm.client import SlurmRefused, SlurmUnavailable
from slurm_watchdog.slurm.commands import Answer, Commands, first_line
from slurm_watchdog.slurm.fields import ParseError
from slurm_watchdog.slurm.node_names import expand_nodes

TIMES = ("StartTime", "EndTime")
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


def list_reservations(text: str) -> tuple[tuple[Reservation, ...], tuple[str, ...]]:
    """The answer of `scontrol --oneliner show reservation`, times as seconds since the epoch: the reservations, and
    a sentence about each that cannot be read and is left out. Raises ParseError for what is no such answer."""
    found, left_out = [], []
    for line in text.splitlines():
        if not line.strip() or line.startswith("No reservations"):
            continue
        row = _values(line)
        if not row.get("ReservationName"):
            raise ParseError(f"no reservation: {line[:80]!r}")
        try:
            found.append(_reservation(row))
        except (KeyError, ValueError) as error:
            name, times = row["ReservationName"], " ".join(f"{key}={row.get(key, '')}" for key in TIMES)
            left_out.append(f"Slurm's reservation {name[:80]} is left out, it cannot be read ({times[:80]}): {error}")
    return tuple(found), tuple(left_out)


def _values(line: str) -> dict[str, str]:
    """The first value of each key: a Comment, free text, comes last, and may have any `Nodes=` in it."""
    found: dict[str, str] = {}
    for word in line.split():
        key, is_value, value = word.partition("=")
        if is_value:
            found.setdefault(key, value)
    return found


def _reservation(row: Mapping[str, str]) -> Reservation:
    """Raises KeyError and ValueError."""
    begin, end = (float(row[key]) for key in TIMES)
    if not (isfinite(begin) and isfinite(end)):
        raise ValueError("its times are no dates")
    flags = tuple(row.get("Flags", "").split(","))
    return Reservation(
        name=row["ReservationName"], start_at=begin, end_at=end, nodes=expand_nodes(row.get("Nodes", "")), flags=flags
    )


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
            async with timeout(DEADLINE_S):
                answer: Answer = await self._commands.run("scontrol", *words)
        except TimeoutError as error:
            raise SlurmUnavailable(f"scontrol {words[0]} does not answer within {DEADLINE_S:g} s") from error
        if answer.code:
            raise SlurmRefused(f"scontrol {words[0]}: {first_line(answer.stderr)}")
