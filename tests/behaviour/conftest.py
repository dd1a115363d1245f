"""`story`: makes a scenario; without words it acts, with shortened limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.behaviour.story import ACT, Story


@pytest.fixture
def tell(tmp_path: Path) -> Iterator[Callable[..., Story]]:
    """Begins a story under a configuration of its own."""
    told: list[Story] = []

    def begin(config: str = ACT) -> Story:
        told.append(Story(tmp_path, config))
        return told[-1]

    yield begin
    for each in told:
        each.close()


@pytest.fixture
def story(tell: Callable[..., Story]) -> Story:
    """A cluster of four nodes, and a watchdog that may act."""
    return tell()
