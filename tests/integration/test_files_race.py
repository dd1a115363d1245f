"""A share of `make race`: names that change under the children's hands lead nobody outside."""

from __future__ import annotations

import os

import pytest

from lab.race.run import race

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: files of three users, mounts")


def test_swapped_names_lead_nobody_outside_and_leave_nothing_of_roots() -> None:
    figures = race(1000)
    assert figures.violations == []
    assert figures.swaps >= 1000
    # It was a race, and not only refusals: some logs were read, some switches written.
    assert figures.done["logs read"] > 0
    assert figures.done["written"] > 0
