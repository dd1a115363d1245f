"""Numbers as writers of logs and of JSON put them: counts, losses, what is no number. Pure; nothing raises."""

from __future__ import annotations

from math import isfinite, nan

MAX_DIGITS = 18
"""Of a whole number: what is longer counts nothing, and has no place in 64 bits (slurm_watchdog.wire.codec)."""
MAX_WHOLE = 2**62  # Whole numbers are below it: sums of two still fit into 64 bits.
UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}


def written_count(text: str | None) -> int | None:
    """A count as people write it: 1,234 or 12_000 or 12.0."""
    value = parse_number(text or "")
    return count_of(value) if value is not None and isfinite(value) and value >= 0 else None


def count_of(value: object) -> int | None:
    """A count in a value of JSON: a whole number from 0, also as text or as 12.0; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        value = value.partition("/")[0]  # "5/873"
        return whole_number(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < MAX_WHOLE else None
    return value if isinstance(value, int) and 0 <= value < MAX_WHOLE else None


def whole_number(text: str | None) -> int | None:
    """The whole number that these digits are, unless they are none, or too many."""
    return int(text) if text and text.isdecimal() and len(text) <= MAX_DIGITS else None


def float_of(value: object) -> float | None:
    """A value of JSON as a float, also from text; None for anything else."""
    if isinstance(value, str):
        return parse_number(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # Python's whole numbers have no end
        return None


def parse_number(text: str) -> float | None:
    """What `float` makes of it: 1e999 is infinite. It raises for no length of text."""
    if "#" in text:  # 1.#QNAN, -1.#IND, 1.#INF of Windows' C library
        return nan
    try:
        return float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return None


def scaled(text: str, factor: float) -> float | None:
    """The number in `text` times `factor`; None if it is no number."""
    value = parse_number(text)
    return None if value is None else value * factor
