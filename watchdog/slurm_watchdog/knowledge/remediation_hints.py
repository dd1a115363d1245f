"""What a fault usually is and what to try next: the rows of `data/remediation_hints.conf`.

A row is for classes: of log lines (slurm_watchdog.knowledge.log_signatures), of stacks
(slurm_watchdog.knowledge.stack_frames.CLASSES), of the kernel's lines
(slurm_watchdog.knowledge.kernel_signatures) and kinds of incidents (slurm_watchdog.model.incidents.IncidentKind).
"""

from __future__ import annotations

import re

import msgspec

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.entries import Fields, read_shipped
from slurm_watchdog.knowledge.log_signatures import BOILERPLATE


class Hint(Struct):
    """One piece of advice. It may be wrong for this case: it says what it usually is."""

    usually: str
    try_next: str
    documented: str = ""  # Name of a document or an option, in words; empty if there is none.

    def as_json(self) -> dict[str, str]:
        """All three, for `--json`."""
        return {"usually": self.usually, "try_next": self.try_next, "documented": self.documented}


class HintRow(msgspec.Struct, frozen=True):
    """`classes` it is for; if `pattern` is given, only for a text in which it is found."""

    name: str
    classes: tuple[str, ...]
    hint: Hint
    pattern: re.Pattern[str] | None = None


MAX_HINTS = 3  # More no one reads under a verdict.
MAX_TEXT = 20_000  # Characters of the text that are searched.


def hint_row(fields: Fields) -> HintRow:
    """The row of a section [hint NAME]."""
    hint = Hint(
        usually=fields.text("usually", required=True),
        try_next=fields.text("try", required=True),
        documented=fields.text("documented"),
    )
    pattern = fields.expression(re.IGNORECASE) if fields.texts("pattern") else None
    return HintRow(fields.name(), fields.texts("class", required=True), hint, pattern)


HINTS: tuple[HintRow, ...] = read_shipped("remediation_hints.conf", {"hint": hint_row})["hint"]


def hints_for(class_name: str, text: str) -> tuple[Hint, ...]:
    """What a fault of this class usually is, at most `MAX_HINTS`: first what the words of `text` say, then
    what the class does.

    `class_name` is a class of a log line, a stack or a line of the kernel, or a kind of incident; for an
    unknown one there is nothing. `text` is the line, the stack or the summary that the class was found in,
    and may be empty.
    """
    searched = BOILERPLATE.sub("", text[:MAX_TEXT])
    rows = [row for row in HINTS if class_name in row.classes]
    telling = [row.hint for row in rows if row.pattern is not None and row.pattern.search(searched)]
    general = [row.hint for row in rows if row.pattern is None]
    return tuple((*telling, *general)[:MAX_HINTS])
