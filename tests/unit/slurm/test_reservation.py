"""Reservations as scontrol prints them, in the words of Slurm 22.05 with times as seconds."""

from __future__ import annotations

import pytest

from slurm_watchdog.model.slurm import Reservation
from slurm_watchdog.slurm.command_line import list_reservations
from slurm_watchdog.slurm.node_names import ParseError

ONE = (
    "ReservationName=maint StartTime=1795500000 EndTime=1795507200 Duration=02:00:00 Nodes=n[1-3] NodeCnt=3 CoreCnt=6 "
    "Features=(null) PartitionName=main Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=6 Users=root Groups=(null) "
    "Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null) Watts=n/a MaxStartDelay=(null) "
)

OF_25_11 = (
    "ReservationName=maint StartTime=1795883042 EndTime=1795886642 Duration=01:00:00 Nodes=n[1-3] NodeCnt=3 CoreCnt=12 "
    "Features=(null) PartitionName=(null) Flags=MAINT,IGNORE_JOBS,SPEC_NODES TRES=cpu=12 AllowedPartitions=(null) "
    "QOS=(null) Users=root Groups=(null) Accounts=(null) Licenses=(null) State=INACTIVE BurstBuffer=(null) "
    "MaxStartDelay=(null) Comment=words Flags=DAILY\n"
)
"""As 25.11.7 printed it."""


def read(text: str) -> tuple[Reservation, ...]:
    found, left_out = list_reservations(text)
    assert not left_out
    return found


def test_name_times_nodes_and_flags_are_read() -> None:
    (found,) = read(ONE + "\n")
    assert (found.name, found.start_at, found.end_at) == ("maint", 1795500000.0, 1795507200.0)
    assert (found.nodes, found.is_maintenance) == (("n1", "n2", "n3"), True)
    assert not read(ONE.replace("MAINT,", ""))[0].is_maintenance
    assert read(ONE.replace("n[1-3]", "(null)"))[0].nodes == ()


def test_one_of_25_11_is_read_too() -> None:
    flags = ("MAINT", "IGNORE_JOBS", "SPEC_NODES")
    assert read(OF_25_11) == (
        Reservation(name="maint", start_at=1795883042.0, end_at=1795886642.0, nodes=("n1", "n2", "n3"), flags=flags),
    )


def test_none_is_none_and_what_is_no_listing_is_no_answer() -> None:
    assert read("No reservations in the system\n") == ()
    with pytest.raises(ParseError):
        list_reservations("slurm_load_reservations error\n")


@pytest.mark.parametrize(
    "odd",
    [
        ONE.replace("EndTime=1795507200", "EndTime=NONE"),
        ONE.replace("1795500000", "soon"),
        ONE.replace("1795500000", "nan"),
        ONE.replace("StartTime=1795500000 ", ""),
        ONE.replace("n[1-3]", "n[1-"),
    ],
)
def test_one_that_cannot_be_read_is_left_out_alone_and_named(odd: str) -> None:
    others = [ONE.replace("=maint ", f"={name} ") for name in ("first", "last")]
    found, (sentence,) = list_reservations("\n".join([others[0], odd, others[1]]) + "\n")
    assert [each.name for each in found] == ["first", "last"]
    assert "reservation maint is left out" in sentence


def test_words_of_a_comment_replace_nothing() -> None:
    (found,) = read(ONE + "Comment=moved from Nodes=n9 Flags=DAILY StartTime=1\n")
    assert (found.nodes, found.start_at, found.is_maintenance) == (("n1", "n2", "n3"), 1795500000.0, True)
