"""Slurm's reservations, as scontrol lists them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from slurm_watchdog.model.slurm import Reservation
from slurm_watchdog.slurm.fields import ParseError
from slurm_watchdog.slurm.node_names import expand_nodes

TIMES = ("StartTime", "EndTime")


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
