"""Whom `scan-log` names where the first line of a failure does not say whose it is, and what only looks like
a cause."""

from __future__ import annotations

import pytest

from tests.builders.failed_logs import AROUND, SPEAKERS, Expected, verdict_of

CASES = [*SPEAKERS, *AROUND]


@pytest.mark.parametrize(("text", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_log_gives_its_verdict(text: str, expected: Expected) -> None:
    assert verdict_of(text) == expected
