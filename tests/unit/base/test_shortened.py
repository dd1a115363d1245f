"""Lines of logs in sentences: never cut without a sign of it."""

from __future__ import annotations

import pytest

from slurm_watchdog.base.text import shortened


@pytest.mark.parametrize(
    ("text", "limit", "short"),
    [
        ("  RuntimeError: bad  ", 20, "RuntimeError: bad"),
        ("RuntimeError: bad sample", 24, "RuntimeError: bad sample"),
        ("RuntimeError: bad sample", 23, "RuntimeError: bad…"),
        ("RuntimeError: bad sample", 18, "RuntimeError: bad…"),
        ("see /very/long/path/without/any/blank", 20, "see /very/long/path…"),
        ("x" * 50, 10, "x" * 9 + "…"),
    ],
)
def test_shortened_ends_at_a_word_with_a_sign_and_keeps_what_fits(text: str, limit: int, short: str) -> None:
    assert shortened(text, limit) == short
    assert len(short) <= limit
