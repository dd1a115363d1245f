"""What several detectors ask about nodes: Slurm's words for them, who runs there, how many are silent."""

from __future__ import annotations

from watchdog.detect.view import ClusterView

DOWN_WORDS = frozenset({"DOWN", "FAIL", "ERROR", "NOT_RESPONDING"})
"""States in which Slurm itself has lost a node (slurm.conf(5), sinfo(1): node state codes)."""
PURPOSE_WORDS = frozenset(
    {
        "DRAINED", "MAINT", "MAINTENANCE", "REBOOT", "REBOOT_ISSUED", "REBOOT_REQUESTED", "POWER_DOWN", "POWERED_DOWN",
        "POWERING_DOWN", "POWERING_UP", "POWER_UP", "FUTURE", "PLANNED", "CLOUD",
    }
)  # fmt: skip
"""States in which somebody has taken the node away, or it is on its way."""
SUFFIXES = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "!": "POWER_DOWN", "%": "POWERING_DOWN",
            "$": "MAINT", "@": "REBOOT", "^": "REBOOT"}  # fmt: skip
"""What sinfo appends to a state."""


def state_words(state: str | None) -> frozenset[str]:
    """`IDLE*+DRAIN` or `idle+drain+not_responding` as a set of words in capitals; empty where Slurm says nothing."""
    words = set()
    for word in (state or "").upper().replace(",", "+").split("+"):
        bare = word.rstrip("".join(SUFFIXES) + "-")
        words.add(bare)
        words |= {SUFFIXES[mark] for mark in word[len(bare) :] if mark in SUFFIXES}
    if {"DRAIN", "IDLE"} <= words:
        words.add("DRAINED")  # nothing runs there any more
    return frozenset(words - {""})


def is_down(state: str | None) -> bool:
    """Whether Slurm has lost the node."""
    return bool(state_words(state) & DOWN_WORDS)


def away_on_purpose(state: str | None) -> bool:
    """Whether a node in this state may rightly have no agent."""
    return bool(state_words(state) & PURPOSE_WORDS)


def jobs_by_node(view: ClusterView) -> dict[str, tuple[str, ...]]:
    """Node -> the jobs that Slurm runs there."""
    found: dict[str, tuple[str, ...]] = {}
    for job in view.jobs:
        for name in job.job.nodes:
            found[name] = (*found.get(name, ()), job.job.job_id)
    return found


def share_silent(view: ClusterView) -> tuple[int, int]:
    """(silent nodes, nodes that have ever reported), without those that Slurm has as taken away."""
    states = {node.name: node.state for node in view.slurm_nodes}
    here = [node.name for node in view.nodes if not away_on_purpose(states.get(node.name, "?"))]
    silent = set(view.silent_nodes)
    return sum(1 for name in here if name in silent), len(here)


def expected_away(share: tuple[int, int]) -> str:
    """A fact: how many others are silent, too."""
    return f"{share[0]} of {share[1]} agents are silent"
