"""Writes docs/detectors.md, what each detector reports and when, from the detectors themselves: `python -m
tools.docs detectors`.

A detector's page is its module's docstring: a sentence, why, and lines that begin with `Fires:`, `Names:`,
`Acts:` or `Note:`; its options, its ladder, what explains it and what to try next come from the tables that
the program uses.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

from slurm_watchdog.config.detectors import Detectors
from slurm_watchdog.detect.registry import REQUEST, SPECS, causes_of
from slurm_watchdog.knowledge.remediation_hints import HINTS, Hint
from slurm_watchdog.model.actions import Rung
from tools.docs.options import rows_of

FILE = Path(__file__).parents[2] / "docs/detectors.md"

HEAD = """# Detectors

Generated from the detectors by `make docs`.

A detector reports one kind of incident. Its name is the same everywhere: the key below `detectors:`, the label `kind` of the metrics,
the word that `slurm-watchdog incidents` shows. Every detector has `mode` (`off`, `observe`, `act`) and `hold` (time a verdict has to last
before it fires). An incident resolves when its condition has been gone for 10 s (`controller.resolve_after`), or its job has ended.
[How it judges](how-it-judges.md) has what all of them share: progress, limits, missing data. [Acting](acting.md) says what a ladder does.

Jobs with long first steps or rare log lines: raise `startup_grace` and `floor` of `collective_hang`, which hold for all detectors of hangs; keep
`floor` below the collectives' timeout, or the evidence is gone before it is collected.
"""
OPERATOR_RESTART = """## operator_restart

A person asked for a restart with `slurm-watchdog restart`. It is no detector, and has no options.

- **Fires:** when a person runs `slurm-watchdog restart JOB`.
- **Names:** the nodes that the person wants excluded, if any.
- **Ladder:** {ladder}.
"""
LABEL = re.compile(r"^(Fires|Names|Acts|Note): ", re.MULTILINE)


class Row(NamedTuple):
    """What is known of one detector."""

    kind: str
    docstring: str
    settings: BaseModel
    """Its block of the configuration, with its defaults."""
    shipped: tuple[Rung, ...]
    may_act: bool
    why_none: str
    explained_by: tuple[str, ...]
    hint: Hint | None


def read_registry() -> list[Row]:
    """A row for each detector, in the order in which they run. The only function that knows where these facts
    are kept."""
    defaults = Detectors()
    return [
        Row(
            kind=spec.kind,
            docstring=inspect.getdoc(inspect.getmodule(spec.detect)) or "",
            settings=getattr(defaults, spec.kind),
            shipped=spec.ladder,
            may_act=spec.may_act,
            why_none=spec.why_no_action or "its evidence is never good enough to act on",
            explained_by=tuple(other.kind for other in SPECS if other.kind in causes_of(spec.kind)),
            hint=spec.hint or next((row.hint for row in HINTS if spec.kind in row.classes and not row.pattern), None),
        )
        for spec in SPECS
    ]


def write() -> str:
    """The whole page."""
    rows = read_registry()
    acting = [row for row in rows if row.shipped]
    telling = [row for row in rows if not row.shipped]
    restart = ladder_words(REQUEST.ladder)
    parts = [
        HEAD,
        "## These may requeue a job, if `mode: act` says so\n\n" + overview(acting)
        + f"| [`operator_restart`](#operator_restart) | a person asked for it | {restart} |\n",
        "## These alert, and no job is touched unless you give them a ladder\n\n" + overview(telling),
        *(section(row) for row in rows),
        OPERATOR_RESTART.format(ladder=restart),
    ]  # fmt: skip
    return "\n".join(parts)


def overview(rows: list[Row]) -> str:
    """A table: kind, its sentence, its ladder."""
    lines = ["| kind | reports | ladder |", "|---|---|---|"]
    lines += [f"| [`{row.kind}`](#{row.kind}) | {summary(row.docstring)} | {short_ladder(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def short_ladder(row: Row) -> str:
    """Its shipped ladder; else whether it may have one."""
    return ladder_words(row.shipped) if row.shipped else ("yours" if row.may_act else "none")


def ladder_words(ladder: tuple[Rung, ...]) -> str:
    """As it is written in the configuration."""
    return f"`[{', '.join(ladder)}]`"


def summary(docstring: str) -> str:
    """The first sentences of a docstring, without the name before them, beginning with a capital."""
    first = " ".join(docstring.partition("\n\n")[0].split()).partition(": ")[2]
    return first[:1].upper() + first[1:]


def section(row: Row) -> str:
    """One detector."""
    paragraphs = [part for part in row.docstring.split("\n\n")[1:] if not LABEL.match(part)]
    lines = [f"## {row.kind}", "", summary(row.docstring), ""]
    for part in paragraphs:
        lines += [part, ""]
    lines += [f"- **{label}:** {text}" for label, text in facts(row.docstring).items()]
    lines.append(f"- **Ladder:** {long_ladder(row)}.")
    if row.explained_by:
        lines.append(f"- **Explained by:** {', '.join(f'`{kind}`' for kind in row.explained_by)}: if one of these "
            "is about the same job, this one is not announced.")  # fmt: skip
    if row.hint:
        lines += [f"- **Usually:** {row.hint.usually}", f"- **Try next:** {row.hint.try_next}"]
    options = rows_of(type(row.settings))
    if options:
        lines += ["", "| option | default | type | meaning |", "|---|---|---|---|", *options]
    return "\n".join(lines) + "\n"


def facts(docstring: str) -> Mapping[str, str]:
    """`Fires`, `Names`, `Acts`, `Note` of a docstring -> their text on one line."""
    found = LABEL.split(docstring)[1:]
    return {label: " ".join(text.split()) for label, text in zip(found[::2], found[1::2], strict=True)}


def long_ladder(row: Row) -> str:
    """What is shipped, or whether a site may set one, or why none is possible."""
    if row.shipped:
        return f"{ladder_words(row.shipped)} is shipped"
    if row.may_act:
        return f"none is shipped; `policy.kinds.{row.kind}` may have one"
    return f"none, for {row.why_none}"
