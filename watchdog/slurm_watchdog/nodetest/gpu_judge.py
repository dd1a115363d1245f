"""What NVML said of a node's GPUs before and after its tests: what is wrong. Pure.

Judged on values made by a stand-in library; never on a GPU so far (docs/limits.md).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from slurm_watchdog.knowledge.node_figures import LEAST_PEERS
from slurm_watchdog.knowledge.xids import describe_xid
from slurm_watchdog.nodetest.dcgm_judge import dcgm_findings
from slurm_watchdog.nodetest.results import Fact, Fault, Finding, Measured, place_of
from slurm_watchdog.parse.kernel_log.line import parse_message

BEFORE, AFTER = "gpu_health before", "gpu_health after"
RISING: Final = {"uncorrected": "memory errors that ECC could not correct", "pcie_replays": "PCIe replays"}
REPLAYS: Final = 1000
"""PCIe replays during a test of seconds: single ones are usual; so many mean a bad lane or slot (a judgement)."""

SLOWED_SHARE: Final = 0.5
"""Of a load during which the hardware slows the clocks down (heat, power brake); moments of it are usual (a
judgement)."""
MOST_AGREE: Final = 0.75
"""Share of the peers that have the usual number of GPUs: with less the partition is mixed (a judgement)."""

Card = Mapping[str, str | int | float | bool | None]


def gpu_reasons(node: Measured, peers: Sequence[Measured], others: Sequence[Measured]) -> list[Fault]:
    """What is wrong with its GPUs. `peers`: of the same CPU and GPU model; `others`: all other nodes."""
    before, after = node.facts.get(BEFORE, {}), _health(node)
    found: list[Fault] = []

    def add(place: str, what: str) -> None:
        found.append(Fault(place=place, what=what))

    present, expected = after.get("gpus"), after.get("expected")
    if isinstance(present, int) and isinstance(expected, int) and present < expected:
        add("gpu", f"NVML sees {present} GPUs, and Slurm gave the job {expected}")
    found += [each.fault for each in _findings(node, others) if each.is_certain]
    usable = node.facts.get("gpu_rate", {}).get("gpus")
    if isinstance(usable, int) and isinstance(expected, int) and usable < expected and _torch_works(others):
        add("gpu", f"torch can use {usable} GPUs, and Slurm gave the job {expected}")
    usual = [links for peer in peers for links in _links(peer)]
    for name, now in _cards(after).items():
        then = _cards(before).get(name, {})
        where = f"GPU {name.removeprefix('gpu_')}"
        place = place_of("gpu", name.removeprefix("gpu_"), node.facts)
        for counter, words in RISING.items():
            rise = _whole(now.get(counter)) - _whole(then.get(counter))
            if counter in then and rise > (REPLAYS if counter == "pcie_replays" else 0):
                add(place, f"{where}: {rise} {words} during the test")
        if now.get("remap_failed"):
            add(place, f"{where}: a row of its memory could not be remapped")
        share = _cards(node.facts.get("gpu_rate", {})).get(name, {}).get("slowed_share")
        if isinstance(share, float) and share > SLOWED_SHARE:
            add(place, f"{where}: the hardware slows its clocks down during {share:.0%} of the load")
        elif now.get("slowed"):
            add(place, f"{where}: the hardware slows its clocks down")
        if 0 < _whole(now.get("pcie_width")) < _whole(now.get("pcie_width_most")):
            add(place, f"{where}: PCIe has {now['pcie_width']} of {now['pcie_width_most']} lanes")
        if len(usual) >= LEAST_PEERS and _whole(now.get("nvlinks_up")) < (most := int(statistics.median(usual))):
            add(place, f"{where}: {_whole(now.get('nvlinks_up'))} NVLinks are up, and {most} on its peers")
    return found


def gpu_doubts(node: Measured, others: Sequence[Measured]) -> list[str]:
    """What keeps a node whose GPUs have nothing wrong with certainty from being called well, parts of sentences."""
    return [each.fault.what for each in _findings(node, others) if not each.is_certain]


def _findings(node: Measured, others: Sequence[Measured]) -> list[Finding]:
    found = [*new_xids(node), *dcgm_findings(node, others)]
    if fewer := fewer_than_peers(node, others):
        found.append(fewer)
    if wrong := _whole(node.facts.get("gpu_nccl", {}).get("wrong")):
        what = f"nccl-tests got {wrong} values of an all-reduce over its GPUs wrong"
        found.append(Finding(fault=Fault(place="gpu", what=what), is_certain=False))
    return found


def _torch_works(others: Sequence[Measured]) -> bool:
    """Whether it can use GPUs on another node, or was tried on none: where it can nowhere, torch or its driver is the
    wrong one for all."""
    counts = [each.facts["gpu_rate"].get("gpus") for each in others if "gpu_rate" in each.facts]
    return not counts or any(counts)


def new_xids(node: Measured) -> list[Finding]:
    """Those behind the last record that the kernel's log had before the load. What a program causes by itself, and what
    follows from something else (a process that was killed), is left out. Certain are those whose number alone says that
    hardware is broken (knowledge/xids.py). None where the log could not be read."""
    before, after = node.facts.get(BEFORE, {}), node.facts.get(AFTER, {})
    last = before.get("kernel_log_at")
    if not isinstance(last, int):
        return []
    found = []
    for line in after.values():
        if not isinstance(line, dict) or _whole(line.get("sequence")) <= last:
            continue
        fact = parse_message(str(line.get("text")))
        if fact is None or fact.xid is None or fact.consequence or describe_xid(fact.xid).blame == "application":
            continue
        number = next((name for name, card in _cards(before).items() if _is_at(card, fact.pci_bus_id)), "")
        place = place_of("gpu", number.removeprefix("gpu_"), node.facts) if number else _gpu_at(fact.pci_bus_id)
        what = f"GPU {number.removeprefix('gpu_') or fact.pci_bus_id}: Xid {fact.xid} during the test"
        row = describe_xid(fact.xid)
        fault = Fault(place=place, what=f"{what} ({row.name})")
        found.append(Finding(fault=fault, is_certain=fact.may_exclude_node))
    return found


def _gpu_at(bus: str | None) -> str:
    return f"gpu:{bus}" if bus else "gpu"


def _is_at(card: Card, bus: str | None) -> bool:
    """Whether the card has this PCI address. NVML writes the domain with eight digits, the kernel with four."""
    own = str(card.get("bus") or "").lower()
    return bool(bus and own) and own[-12:] == str(bus).lower()[-12:]


def fewer_than_peers(node: Measured, others: Sequence[Measured]) -> Finding | None:
    """Where Slurm did not state how many GPUs the job has: fewer than the number that most of at least four nodes of
    the same CPU model have. The GPU model is not compared: a node that has lost all GPUs shows none. Not certain where
    another node has as few, or no driver is loaded: the node may be built so."""
    facts = _health(node)
    own = facts.get("gpus")
    if not isinstance(own, int) or isinstance(facts.get("expected"), int):
        return None
    alike = [each for each in others if each.name != node.name and _cpu_model(each) == _cpu_model(node)]
    counts = [count for each in alike if isinstance(count := _health(each).get("gpus"), int)]
    if len(counts) < LEAST_PEERS:
        return None
    usual, nodes = Counter(counts).most_common(1)[0]
    if own >= usual or nodes < MOST_AGREE * len(counts):
        return None
    what = f"NVML sees {own} GPUs, and {usual} on {nodes} of {len(counts)} peers"
    if facts.get("skipped"):
        return Finding(fault=Fault(place="gpu", what=f"{what}: {facts['skipped']}"), is_certain=False)
    if own in counts:
        return Finding(fault=Fault(place="gpu", what=f"{what}; others have {own} as well"), is_certain=False)
    return Finding(fault=Fault(place="gpu", what=what), is_certain=True)


def _health(node: Measured) -> Mapping[str, Fact]:
    return node.facts.get(AFTER) or node.facts.get(BEFORE, {})


def _cpu_model(node: Measured) -> object:
    return node.facts.get("state", {}).get("model")


def _cards(facts: Mapping[str, Fact]) -> dict[str, Card]:
    return {name: value for name, value in facts.items() if name.startswith("gpu_") and isinstance(value, dict)}


def _links(node: Measured) -> list[int]:
    return [_whole(card["nvlinks_up"]) for card in _cards(_health(node)).values() if "nvlinks_up" in card]


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
