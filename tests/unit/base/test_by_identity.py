"""Results that are remembered for as long as the value lives that they were worked out from."""

from __future__ import annotations

from slurm_watchdog.base.by_identity import ByIdentity
from slurm_watchdog.base.structs import Struct


class Large(Struct, gc=True, weakref=True):
    name: str


def test_a_value_is_worked_out_once_and_forgotten_with_it() -> None:
    calls: list[str] = []
    upper = ByIdentity(lambda value: (calls.append(value.name), value.name.upper())[1])
    one, alike = Large(name="a"), Large(name="a")
    assert (upper(one), upper(one), upper(alike)) == ("A", "A", "A")
    assert calls == ["a", "a"], "equal values are not the same one"
    del one
    assert len(upper) == 1
    del alike
    assert len(upper) == 0


def test_a_value_at_the_address_of_one_that_is_gone_gets_its_own_result() -> None:
    upper = ByIdentity(lambda value: value.name.upper())
    for number in range(200):  # CPython gives the freed address to the next one
        assert upper(Large(name=f"n{number}")) == f"N{number}"
    assert len(upper) == 0
