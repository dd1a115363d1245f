"""Elements of an array that wait, as Slurm lists them together."""

import pytest

from slurm_watchdog.model.slurm import can_be_named, elements_of


@pytest.mark.parametrize(
    ("job_id", "elements"),
    [
        ("6", {"6"}),
        ("6_2", {"6_2"}),
        ("6_[2]", {"6_2"}),
        ("6_[2,4-6]", {"6_2", "6_4", "6_5", "6_6"}),
        ("6_[2-9%2]", {"6_[2-9%2]"}),
        ("6_[0,2,...]", {"6_[0,2,...]"}),
    ],
)
def test_elements_of_an_id(job_id: str, elements: set[str]) -> None:
    assert elements_of(job_id) == elements


def test_a_rest_that_is_not_written_out_or_has_a_limit_is_no_name_for_scontrol() -> None:
    names = ("6", "6_2", "6_[2,4-6]", "6_[0,2,...]", "6_[2-9%2]")
    assert [can_be_named(name) for name in names] == [True, True, True, False, False]


def test_an_array_of_millions_is_not_written_out() -> None:
    assert not can_be_named("6_[0-4000000]")
    assert elements_of("6_[0-4000000]") == {"6_[0-4000000]"}
