"""Reservations as scontrol prints them, in the words of Slurm 22.05 with times as seconds."""

from __future__ import annotations

import pytest

from slurm_watchdog.slurm.fields import ParseError
from slurm_watchdog.slurm.reservation import parse_reservations

ONE = (
    "ReservationName=maint StartTime=1795500000 EndTime=1795507200 Duration=02:00:00 Nodes=n[1-3] NodeCnt=3 CoreCnt=6 "
    "Features=(null) PartitionName=main Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=6 Users=root Groups=(null) "
    "Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null) "
)


def test_name_times_nodes_and_flags_are_read() -> None:
    (found,) = parse_reservations(ONE + "\n")
    assert (found.name, found.start_at, found.end_at) == ("maint", 1795500000.0, 1795507200.0)
    assert (found.nodes, found.is_maintenance) == (("n1", "n2", "n3"), True)
    assert not parse_reservations(ONE.replace("MAINT,", ""))[0].is_maintenance
    assert parse_reservations(ONE.replace("n[1-3]", "(null)"))[0].nodes == ()


def test_none_is_none_and_what_cannot_be_read_is_no_answer() -> None:
    assert parse_reservations("No reservations in the system\n") == ()
    for text in ("slurm_load_reservations error\n", ONE.replace("1795500000", "soon")):
        with pytest.raises(ParseError):
            parse_reservations(text)
