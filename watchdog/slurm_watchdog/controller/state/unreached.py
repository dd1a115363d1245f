"""Nodes whose machines do not answer, while others do. Pure bookkeeping."""

from __future__ import annotations

from slurm_watchdog.model.node_view import UnreachedNode


class UnreachedNodes:
    """The state owns it."""

    def __init__(self) -> None:
        self._tries: dict[str, tuple[float, int]] = {}
        """Node -> since when it was asked in vain, and how often."""

    def note(self, node: str, now: float) -> None:
        """It did not answer once more."""
        at, tries = self._tries.get(node, (now, 0))
        self._tries[node] = at, tries + 1

    def forget(self, node: str) -> None:
        """It answers, or reports, or nobody can tell."""
        self._tries.pop(node, None)

    def views(self, now: float) -> tuple[UnreachedNode, ...]:
        """All of them."""
        return tuple(UnreachedNode(name, tries, now - at) for name, (at, tries) in self._tries.items())
