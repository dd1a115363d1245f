"""A text with several excerpts of logs (Markdown with fences, a letter), each as a log of its own. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from slurm_watchdog.diagnose.logs.digest import Digest, put_on_clock

MOST: Final = 60
"""More excerpts have no one's patience, and each is judged."""


def excerpts_of(digest: Digest) -> list[Digest]:
    """Each excerpt as what would have been kept of it alone, in their order; empty where there is but one, or none."""
    places = sorted(set(digest.segments.values())) if digest.segments else []
    return [_excerpt(digest, place) for place in places[:MOST]] if len(places) > 1 else []


def _excerpt(digest: Digest, place: int) -> Digest:
    segments = digest.segments or {}
    lines = [line for line in digest.lines if segments.get(line.number) == place]
    facts = [replace(fact, at=None) for fact in digest.facts if segments.get(fact.line) == place]
    if facts and facts[-1].stamp is None:
        later = (line.stamp for line in lines if line.number > facts[-1].line and line.stamp is not None)
        facts[-1].until = next(later, None)
    own = Digest(facts, lines, headings=digest.headings)
    put_on_clock(own)
    return own
