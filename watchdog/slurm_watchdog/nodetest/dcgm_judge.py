"""What `dcgmi diag` found on a node: its word counts where it says that hardware is broken. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from slurm_watchdog.knowledge.node_figures import LEAST_PEERS
from slurm_watchdog.nodetest.results import Fact, Fault, Finding, Measured

PHASE: Final = "gpu_dcgm"
BROKEN: Final = frozenset({2, 6})
"""DCGM_ERROR_ISOLATE ("cannot perform workload, GPU should be isolated") and DCGM_ERROR_RESET ("drain and reset GPU")
of dcgmErrorSeverity_t (dcgm_errors.h)."""
HARDWARE: Final = range(9, 16)
"""DCGM_FR_EC_HARDWARE_THERMAL to DCGM_FR_EC_HARDWARE_OTHER of dcgmErrorCategory_t. The others are software, its
configuration, and thresholds."""
MOST_OTHERS: Final = 0.25
"""Share of the other nodes on which the same test may fail: with more it is how the site is set up (a judgement)."""


def dcgm_findings(node: Measured, others: Sequence[Measured]) -> list[Finding]:
    """Broken hardware is certain. Any other failure is a doubt, if the same test passes on most other nodes."""
    ran = [each for each in others if "tests" in each.facts.get(PHASE, {})]
    found = []
    for failure in _failures(node):
        test = str(failure.get("test"))
        card = _card(node, failure)
        where = (
            f"GPU {card.removeprefix('gpu_')}" if card else f"DCGM's {failure.get('entity')} {failure.get('number')}"
        )
        warning = f": {failure['warning']}" if failure.get("warning") else ""
        known = node.facts.get("gpu_health before", {}).get(card)
        place = str(known["uuid"]) if isinstance(known, dict) and known.get("uuid") else "gpu"
        fault = Fault(place=place, what=f"{where.strip()}: dcgmi's test {test} fails{warning}")
        if failure.get("severity") in BROKEN and failure.get("category") in HARDWARE:
            found.append(Finding(fault=fault, is_certain=True))
            continue
        same = sum(any(str(other.get("test")) == test for other in _failures(each)) for each in ran)
        if len(ran) >= LEAST_PEERS and same <= MOST_OTHERS * len(ran):
            found.append(Finding(fault=fault, is_certain=False))
    return found


def _failures(node: Measured) -> list[Mapping[str, Fact]]:
    facts = node.facts.get(PHASE, {})
    return [each for name, each in facts.items() if name.startswith("fail_") and isinstance(each, dict)]


def _card(node: Measured, failure: Mapping[str, Fact]) -> str:
    """NVML's card with the serial that DCGM gives; empty: not known. DCGM's numbers are its own."""
    serial = failure.get("serial")
    cards = node.facts.get("gpu_health before", {})
    same = [name for name, each in cards.items() if isinstance(each, dict) and serial and each.get("serial") == serial]
    return same[0] if len(same) == 1 else ""
