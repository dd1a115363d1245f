"""Writes docs/detectors.md, what each detector reports and when, from the detectors themselves: `python -m
tools.docs detectors`.

A detector's page is its module's docstring: a sentence, why, and lines that begin with `Fires:`, `Names:`,
`Acts:` or `Note:`; its ladder and what to try next come from the tables that the program uses. The
page has the sentence and these lines.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from slurm_watchdog.detect.registry import REQUEST, SPECS
from slurm_watchdog.knowledge.remediation_hints import HINTS, Hint
from slurm_watchdog.model.actions import Rung

FILE = Path(__file__).parents[2] / "docs/detectors.md"

HEAD = """# Detectors

Generated from the detectors by `make docs`. [How it judges](how-it-judges.md) has what all of them share: progress, limits, missing data.

A detector reports one kind of incident. Its name is the key below `detectors:` ([options](options.md#detectors)), the label `kind` of the metrics, and
the word that `slurm-watchdog incidents` shows. An incident resolves when its condition has been
gone for two reports, or its job has ended. Detectors are listed in the order in which they run, from causes to consequences: an
incident that an earlier one about the same job explains is kept and not announced; `explain` says which.

Jobs with long first steps or rare log lines: raise `startup_grace` and `floor` of `collective_hang`, which hold for all detectors of hangs; keep
`floor` below the collectives' timeout, or the evidence is gone before it is collected.

| [ladder](acting.md#the-ladder) | kinds |
|---|---|
{ladders}
"""
OPERATOR_RESTART = """## operator_restart

Not a detector: a person asked for a restart with `slurm-watchdog restart JOB`.

- Names: the nodes that the person wants excluded, if any.
- Ladder: {ladder}.
"""
LABEL = re.compile(r"^(Fires|Names|Acts|Note): ", re.MULTILINE)


class Row(NamedTuple):
    """What is known of one detector."""

    kind: str
    docstring: str
    shipped: tuple[Rung, ...]
    may_act: bool
    hint: Hint | None


def read_registry() -> list[Row]:
    """A row for each detector, in the order in which they run. The only function that knows where these facts
    are kept."""
    return [
        Row(
            kind=spec.kind,
            docstring=inspect.getdoc(inspect.getmodule(spec.detect)) or "",
            shipped=spec.ladder,
            may_act=spec.may_act,
            hint=spec.hint or next((row.hint for row in HINTS if spec.kind in row.classes and not row.pattern), None),
        )
        for spec in SPECS
    ]


def write() -> str:
    """The whole page."""
    rows = read_registry()
    restart = ladder_words(REQUEST.ladder)
    head = HEAD.format(ladders="\n".join(overview(rows)))
    first: dict[Hint, str] = {}
    for row in rows:
        if row.hint:
            first.setdefault(row.hint, row.kind)
    return "\n".join([head, *(section(row, first) for row in rows), OPERATOR_RESTART.format(ladder=restart)])


def overview(rows: list[Row]) -> Iterator[str]:
    """A row for each ladder, with the kinds that have it."""
    ladders = {
        row.shipped: [f"`{each.kind}`" for each in rows if each.shipped == row.shipped] for row in rows if row.shipped
    }
    for ladder, kinds in ladders.items():
        yield f"| {ladder_words(ladder)} is shipped | {', '.join(kinds)} |"
    for may, words in ((True, "none is shipped; `policy.kinds.KIND` may have one"), (False, "none: reported only")):
        yield f"| {words} | {', '.join(f'`{row.kind}`' for row in rows if not row.shipped and row.may_act is may)} |"


def ladder_words(ladder: tuple[Rung, ...]) -> str:
    """As it is written in the configuration."""
    return f"`[{', '.join(ladder)}]`"


def summary(docstring: str) -> str:
    """The first sentences of a docstring, without the name before them, beginning with a capital."""
    first = " ".join(docstring.partition("\n\n")[0].split()).partition(": ")[2]
    return first[:1].upper() + first[1:]


def section(row: Row, first: Mapping[Hint, str]) -> str:
    """One detector; a hint stands below the first kind that has it."""
    lines = [f"## {row.kind}", "", summary(row.docstring), ""]
    lines += [f"- {label}: {text}" for label, text in facts(row.docstring).items()]
    if row.hint and first[row.hint] != row.kind:
        lines.append(f"- Try next: as for [`{first[row.hint]}`](#{first[row.hint]}).")
    elif row.hint:
        lines.append(f"- Try next: {row.hint.try_next}")
    return "\n".join(lines) + "\n"


def facts(docstring: str) -> Mapping[str, str]:
    """`Fires`, `Names`, `Acts`, `Note` of a docstring -> their text on one line."""
    found = LABEL.split(docstring)[1:]
    return {label: " ".join(text.split()) for label, text in zip(found[::2], found[1::2], strict=True)}
