"""A time zone of this process, whose clocks are changed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

CENTRAL_EUROPE = "CET-1CEST,M3.5.0,M10.5.0/3"
"""In words that need no database of time zones."""


@contextmanager
def time_zone(name: str = CENTRAL_EUROPE) -> Iterator[None]:
    """Local times are those of this zone."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = name
    time.tzset()
    try:
        yield
    finally:
        os.environ.pop("TZ")
        if before is not None:
            os.environ["TZ"] = before
        time.tzset()
