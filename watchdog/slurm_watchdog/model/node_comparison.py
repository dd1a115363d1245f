"""What a test measured on each node, beside what its peers have: the picture that the page draws of it."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from slurm_watchdog.base.structs import Struct

MOST_NODES: Final = 64
"""That are drawn: the worst first. What is left out is counted."""
MOST_FIGURES: Final = 32
Word = Annotated[str, Meta(max_length=160)]
Sentence = Annotated[str, Meta(max_length=400)]
Share = Annotated[float, Meta(ge=0.0, le=100.0)]
"""Of what its peers have; less is worse, whatever the figure's unit."""


class ComparedNode(Struct, frozen=True, kw_only=True):
    """One that was tested."""

    name: Word
    verdict: Literal["bad", "ok", "unknown"]
    why: Sentence = ""


class ComparedFigure(Struct, frozen=True, kw_only=True):
    """One kind of figure, of all nodes."""

    title: Word
    unit: Word
    worst_share: Share
    """Below it a node differs by more than the least difference that counts."""
    values: Annotated[tuple[tuple[float, Share] | None, ...], Meta(max_length=MOST_NODES)]
    """Of each node, in their order: the figure in its unit, and its share; None: it has none, or no peer."""


class NodeComparison(Struct, frozen=True, kw_only=True):
    """One test."""

    began_at: float
    ended_at: float
    """Dates."""
    sentence: Sentence
    nodes: Annotated[tuple[ComparedNode, ...], Meta(max_length=MOST_NODES)]
    figures: Annotated[tuple[ComparedFigure, ...], Meta(max_length=MOST_FIGURES)] = ()
    left_out: Annotated[int, Meta(ge=0)] = 0
    """Nodes that are not drawn."""


class KeptComparison(Struct, frozen=True, kw_only=True):
    """The last one that the controller was given."""

    comparison: NodeComparison
    by: str
    """Who tested."""
