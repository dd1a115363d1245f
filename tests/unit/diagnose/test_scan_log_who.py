"""Whom `scan-log` names where the first line of a failure does not say whose it is, and what only looks like
a cause."""

from __future__ import annotations

import pytest

from tests.builders.failed_logs import SPEAKERS, Expected, verdict_of


@pytest.mark.parametrize(("text", "expected"), [case[1:] for case in SPEAKERS], ids=[case[0] for case in SPEAKERS])
def test_a_log_gives_its_verdict(text: str, expected: Expected) -> None:
    assert verdict_of(text) == expected
