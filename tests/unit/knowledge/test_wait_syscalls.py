"""Every row of what system calls wait for: the call exists."""

from __future__ import annotations

import pytest

from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.knowledge.syscalls import AARCH64, PLACES_OF_CALLS, X86_64


@pytest.mark.parametrize(("call", "place"), PLACES_OF_CALLS.items())
def test_a_call_that_tells_what_is_waited_for_is_one_of_the_kernel(call: str, place: Place) -> None:
    assert call in X86_64.values() or call in AARCH64.values()
    assert place not in (Place.OTHER, Place.COLLECTIVE, Place.P2P), (
        "no call by itself says that a rank waits for its peers"
    )
