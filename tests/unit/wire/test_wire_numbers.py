"""Whole numbers of a report: the short look that spares most of them being gone through misses none."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_watchdog.wire import codec
from slurm_watchdog.wire.codec import WireError, decode_report

LAYOUTS = ({}, {"separators": (",", ":")}, {"indent": 0}, {"indent": "\t"}, {"indent": 3})
LONG = 2**63


PLACES = 4


def body(number: int, age_s: float, name: str, layout: int, place: int = 0) -> bytes:
    """A report with the number as a value, in a list, or first or last in a list of lists, and with fractions
    and a name beside it."""
    at = [number if each == place else 7 for each in range(PLACES)]
    process = {"pid": 1, "start_ticks": 1, "job_id": "7", "role": "rank", "comm": "x", "state": "S", "uid": 1,
               "io_bytes": at[0]}  # fmt: skip
    report = {
        "node": name, "boot_id": "b", "agent_id": "a", "sequence": 1, "age_s": age_s, "processes": [process],
        "gpus": [{"uuid": "GPU-1", "index": 0, "pids": [at[1], 4]}],
        "changes": {"since": 1, "gone": [[at[2], 1], [2, at[3]]]},
    }  # fmt: skip
    return json.dumps(report, **LAYOUTS[layout]).encode().replace(b"\n", b"\r\n")  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(
    number=st.integers() | st.integers(-(10**40), 10**40) | st.integers(LONG - 5, LONG + 5),
    age_s=st.floats(0, 1) | st.just(0.00012345678901234567),
    name=st.text("0123456789abc:-,[ ", min_size=1, max_size=60),
    layout=st.integers(0, len(LAYOUTS) - 1),
    place=st.integers(0, PLACES - 1),
)
@example(number=LONG, age_s=0.0, name="n1", layout=1, place=2)
@example(number=-LONG - 1, age_s=0.0, name="n1", layout=3, place=1)
@example(number=7, age_s=0.00012345678901234567, name="0" * 32, layout=0, place=0)
def test_a_report_is_refused_exactly_where_one_of_its_whole_numbers_is_too_long(
    number: int, age_s: float, name: str, layout: int, place: int
) -> None:
    data = body(number, age_s, name, layout, place)
    if -LONG <= number < LONG:
        assert decode_report(data).processes[0].io_bytes == (7 if place else number)
        return
    with pytest.raises(WireError, match="64 bits"):
        decode_report(data)


def test_fractions_and_ids_are_not_gone_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone_through(value: object) -> bool:
        raise AssertionError("gone through")

    monkeypatch.setattr(codec, "_moderate", gone_through)
    decode_report(body(7, 0.00012345678901234567, "0" * 40, 1))
