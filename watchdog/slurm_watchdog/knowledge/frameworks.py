"""Which framework wrote a log, and what its user can do so that steps can be read from it: the rows of
`data/frameworks.conf`.

Of value where nothing counts: several frameworks write no step at their defaults (bars of Rich that are drawn
once at the end, DeepSpeed's quiet logger).
"""

from __future__ import annotations

import msgspec

from slurm_watchdog.knowledge.entries import Fields, read_shipped


class Framework(msgspec.Struct, frozen=True):
    """One row."""

    name: str
    title: str
    signs: tuple[bytes, ...]  # Of the lower-cased text of a log: one is enough.
    advice: str


ANY_FRAMEWORK = (
    "print a line with the step every minute or more often (`step 120/1000 loss 2.31`), unbuffered (`python -u`, `flush=True`), or name its own form in "
    "`progress_patterns`"
)
"""What to do where the framework is not known, or has no row."""


def framework_row(fields: Fields) -> Framework:
    """The row of a section [framework NAME]."""
    signs = tuple(needle.encode() for needle in fields.needles())
    advice = fields.text("advice", required=True).replace("{ANY_FRAMEWORK}", ANY_FRAMEWORK)
    return Framework(fields.name(), fields.text("title", required=True), signs, advice)


FRAMEWORKS: tuple[Framework, ...] = read_shipped("frameworks.conf", {"framework": framework_row})["framework"]
_PLACE = {row.name: place for place, row in enumerate(FRAMEWORKS)}


def recognise(text: bytes, known: str | None = None) -> str | None:
    """The name of the framework whose signs are in a part of a log; `known` is what earlier parts showed, and
    stays unless a row that stands before it is found. None: not known."""
    lower = text.lower()
    limit = _PLACE.get(known or "", len(FRAMEWORKS))
    for row in FRAMEWORKS[:limit]:
        if any(sign in lower for sign in row.signs):
            return row.name
    return known


def title_of(name: str | None) -> str | None:
    """As its people write it; None of one without a row."""
    place = _PLACE.get(name or "")
    return None if place is None else FRAMEWORKS[place].title


def what_to_do(name: str | None) -> str:
    """What the user of framework `name` can do so that the progress of a job can be read: the rest of a
    sentence that begins "Its progress cannot be read: …". `name` as `recognise` gives it, or a progress
    pattern's framework; None: not known."""
    place = _PLACE.get(name or "")
    return ANY_FRAMEWORK if place is None else FRAMEWORKS[place].advice
