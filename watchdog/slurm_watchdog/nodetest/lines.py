"""Lines that a node test prints (deploy/node-test/node_test.py says what is in them), as values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from slurm_watchdog.base.structs import Struct

MAX_LINE: Final = 1 << 20
Text = Annotated[str, Meta(max_length=4096)]


class Figure(Struct, frozen=True, kw_only=True):
    """What a part has measured, and how it is compared."""

    name: Text
    value: float
    title: Text = ""
    unit: Text = ""
    column: Text = ""
    about: Text = ""
    place: Text = ""
    more: bool = True
    least: float = 0.1
    absolute: float = 0.0
    spread: float = 0.0
    disturbed: bool = False
    like: Text = ""
    against: tuple[Text, ...] = ("peers", "past")
    siblings: bool = False
    sole: bool = False

    @property
    def key(self) -> str:
        """Names it among the figures of a node: `mount_write /scratch`."""
        return f"{self.name} {self.about}".strip()

    def shown(self, value: float | None = None) -> str:
        """Its value, or another one of its kind: three digits and the unit."""
        number = self.value if value is None else value
        digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 2
        text = f"{number:.2g}" if 0 < abs(number) < 0.1 else f"{number:,.{digits}f}"
        return f"{text} {self.unit}".strip()


class Fault(Struct, frozen=True, kw_only=True):
    """What a part itself has found wrong."""

    what: Text
    place: Text = ""
    sure: bool = True
    same: Text = ""
    """Names the same on other nodes; empty: `what` does."""


class Line(Struct, frozen=True, kw_only=True):
    """A part has begun, or ended."""

    node: Text
    part: Text
    state: Literal["begun", "ok", "late", "failed"]
    about: Text = ""
    said: Text = ""
    skipped: Text = ""
    like: Text = ""
    figures: tuple[Figure, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def where(self) -> str:
        """The part, in words."""
        return f"{self.part} {self.about}".strip()


class Measured(Struct, frozen=True, kw_only=True):
    """What is known of one node, or of one pair (`name` is then `a b`)."""

    name: str
    like: str = ""
    figures: Mapping[str, Figure] = {}
    disturbed: tuple[str, ...] = ()
    """Parts of which other programs disturbed a figure."""
    problems: tuple[Line, ...] = ()
    """Parts that did not end well."""
    faults: tuple[Fault, ...] = ()
    missing: str = ""
    """Why there is nothing, or not all, a part of a sentence."""

    @property
    def hangs(self) -> bool:
        """Whether a part of it has no end."""
        return any(each.state == "late" for each in self.problems)


def parse_line(text: str) -> Line | None:
    """What a line of a job's output says; None: it is none of ours."""
    if not text.startswith("{") or len(text) > MAX_LINE:
        return None
    try:
        return msgspec.json.decode(text, type=Line)
    except (msgspec.MsgspecError, RecursionError):
        return None


def measured(name: str, lines: Iterable[Line], missing: str = "") -> Measured:
    """All lines of one node or pair together. A part that has begun and never ended is late when the job is over."""
    begun: dict[tuple[str, str], Line] = {}
    figures: dict[str, Figure] = {}
    faults: dict[tuple[str, str], Fault] = {}
    problems, disturbed, like = list[Line](), list[str](), ""
    for line in lines:
        like = like or line.like
        if line.state == "begun":
            begun[line.node, line.where] = line
            continue
        begun.pop((line.node, line.where), None)
        if line.state != "ok":
            problems.append(line)
        for each in line.figures:
            if each.disturbed:
                disturbed.append(each.place or each.name)
            else:
                figures[each.key] = each
        faults |= {(each.place, each.what): each for each in line.faults}
    said = "it had begun when the job ended"
    problems += [Line(node=e.node, part=e.part, about=e.about, state="late", said=said) for e in begun.values()]
    return Measured(
        name=name, like=like, figures=figures, disturbed=tuple(dict.fromkeys(disturbed)), problems=tuple(problems),
        faults=tuple(faults.values()), missing=missing,
    )  # fmt: skip


def better(first: Measured, second: Measured) -> Measured:
    """Of two measurements the better figure each, and the problems and faults that both had: what holds twice
    remains."""
    figures = {**first.figures, **second.figures}
    for key in first.figures.keys() & second.figures.keys():
        one, other = first.figures[key], second.figures[key]
        best = max if one.more else min
        best_one = one if best(one.value, other.value) == one.value else other
        figures[key] = msgspec.structs.replace(best_one, spread=max(one.spread, other.spread))
    again = {each.where for each in second.problems}
    same = {each.what for each in second.faults}
    kept = second.missing != ""
    return Measured(
        name=first.name, like=first.like or second.like, figures=figures,
        disturbed=tuple(each for each in first.disturbed if each in second.disturbed or kept),
        problems=tuple(each for each in first.problems if kept or each.where in again),
        faults=tuple(each for each in first.faults if kept or each.sure or each.what in same),
        missing=first.missing and second.missing,
    )  # fmt: skip
