"""Shortens a log line for a sentence; a cut is marked with an ellipsis."""

from __future__ import annotations

EXCERPT_CHARS = 160  # Characters of an error's line that a sentence takes up beside other things.
SHORTEST_WORD_CUT = 0.7
"""A cut goes back to the end of a word, unless that takes away more than this leaves: then the word itself is cut."""


def shortened(text: str, limit: int) -> str:
    """`text` in at most `limit` characters; what was cut ends with `…`, at the end of a word where one is near."""
    text = text.strip()
    if len(text) <= limit:
        return text
    kept = text[: limit - 1]
    word = kept.rfind(" ") if text[limit - 1] != " " else len(kept)
    return (kept[:word] if word >= SHORTEST_WORD_CUT * limit else kept).rstrip() + "…"
