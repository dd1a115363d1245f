"""Which nodes are slow or broken, from what was measured on each and between them. Pure.

A figure is held against floors that the site set, against nodes of the same model, and against the node's own past.
What is missing, disturbed, or the same everywhere convicts nobody.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.knowledge.node_figures import KINDS, LEAST_PAST, LEAST_PEERS, MADS, SCALE, SPREADS, Kind, split_key
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.nodetest.gpu_judge import gpu_doubts, gpu_reasons
from slurm_watchdog.nodetest.results import Fault, Measured, Problem, place_of

TINY = 1e-9
"""In place of a figure of nothing, which has no logarithm."""
TOOLS = frozenset({"fio", "gpu_dcgm", "gpu_nccl"})
"""Phases in which a tool of the site's does the work: what it says counts, that it fails does not."""
SHARED = "mount_"
"""Figures of a filesystem that others use: how fast it is now is nothing that a node was faster at before."""
Floors = Mapping[str, float]
"""Name of a figure to the worst value that the site accepts, in the figure's unit."""
Past = Mapping[str, Sequence[Mapping[str, float]]]
"""Node to the figures of its earlier tests, of the same model."""


class Verdict(Struct, frozen=True, kw_only=True):
    """Of one node."""

    node: str
    truth: Truth
    faults: tuple[Fault, ...] = ()
    """BAD: what is wrong."""
    unsure: tuple[str, ...] = ()
    """UNKNOWN: why it was not judged, parts of sentences."""
    peers: int = 0
    """With which its figures were compared."""

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not well, in words."""
        return tuple(each.what for each in self.faults) or self.unsure


def judge_nodes(nodes: Sequence[Measured], floors: Floors, past: Past, again: Sequence[Measured] = ()) -> list[Verdict]:
    """A verdict for each node, from its own figures alone: the links are `pairs.judge_pairs`.

    `again`: what a second look measured of some of the nodes, all at that later time. A node is worse than its peers
    only if it is worse than what they had in either look: what they share (a filesystem, a host) may be slower for a
    while."""
    return [_judge(node, nodes, floors, past.get(node.name, ()), again) for node in nodes]


def _judge(
    node: Measured, nodes: Sequence[Measured], floors: Floors, past: Sequence[Mapping[str, float]],
    again: Sequence[Measured],
) -> Verdict:  # fmt: skip
    others = [each for each in nodes if each.name != node.name]
    peers, later = peers_of(node, nodes), peers_of(node, again)
    bad = [*_problems(node.problems, others), *gpu_reasons(node, peers, others)]
    compared = False
    for key, value in node.figures.items():
        kind = KINDS[split_key(key)[0]]
        shared = kind.shared_by_guests and is_guest(node)
        worse, was_compared = worse_than(key, node, kind, [] if shared else values_of(key, node, peers), floors)
        if worse and not shared and len(now := values_of(key, node, later)) >= LEAST_PEERS:
            worse, _ = worse_than(key, node, kind, now, floors)
        was = [each[key] for each in past if key in each and not shared and not split_key(key)[0].startswith(SHARED)]
        if not worse and len(was) >= LEAST_PAST and _all_worse(value, kind, values_of(key, node, peers)):
            worse = _against(value, kind, was, node.spreads.get(key, 0.0), "in its earlier tests")
        compared = compared or was_compared or len(was) >= LEAST_PAST
        bad += (
            [Fault(place=place_of(*split_key(key), node.facts), what=f"{_title(key, kind)} is {worse}")]
            if worse
            else []
        )
    if bad:
        return Verdict(node=node.name, truth=Truth.BAD, faults=tuple(bad), peers=len(peers))
    unsure = unsure_reasons(node, compared=compared, peers=len(peers))
    unsure += gpu_doubts(node, others)
    truth = Truth.UNKNOWN if unsure else Truth.OK
    return Verdict(node=node.name, truth=truth, unsure=tuple(unsure), peers=len(peers))


def peers_of(node: Measured, nodes: Iterable[Measured]) -> list[Measured]:
    """The others of its model of which something was measured."""
    return [each for each in nodes if each.name != node.name and each.model == node.model and each.figures]


def unsure_reasons(node: Measured, *, compared: bool, peers: int) -> list[str]:
    """Why a node against which nothing was found is not said to be well."""
    if node.missing:
        return [node.missing]
    found = [f"{each.phase} {each.subject}".strip() + f": {each.said}" for each in node.problems]
    if not_run := node.facts.get("site_check", {}).get("not_run"):
        found.append(f"site_check did not run: {not_run}")
    if node.disturbed:
        names = ", ".join(sorted({split_key(key)[0].partition("_")[0] for key in node.disturbed}))
        found.append(f"other programs used its CPUs or disks meanwhile, so its {names} figures do not count")
    if not compared and not found:
        found.append(
            f"nothing to compare it with: {peers} peers of its model, and {LEAST_PEERS} are needed, or "
            f"{LEAST_PAST} earlier tests"
        )
    return found


def values_of(key: str, node: Measured, peers: Iterable[Measured]) -> list[float]:
    """What the peers have for this figure; of a GPU also its neighbours, where the slot plays no part."""
    family = split_key(key)[0]
    if "/" not in key.partition(" ")[0] or not KINDS[family].alike:
        return [each.figures[key] for each in peers if key in each.figures]
    own = [value for other, value in node.figures.items() if other != key and split_key(other)[0] == family]
    return own + [value for each in peers for other, value in each.figures.items() if split_key(other)[0] == family]


def worse_than(key: str, found: Measured, kind: Kind, others: Sequence[float], floors: Floors) -> tuple[str, bool]:
    """(in what it is worse, a part of a sentence, or nothing; whether there was something to compare it with)."""
    value = found.figures[key]
    name, subject = split_key(key)
    floor = floors.get(f"{name} {subject}", floors.get(name))
    if floor is not None and (value < floor if kind.more_is_better else value > floor):
        bound = "at least" if kind.more_is_better else "at most"
        return f"{shown(value, kind)}, and the site wants {bound} {shown(floor, kind)}", True
    if len(others) < LEAST_PEERS:
        return "", floor is not None
    return _against(value, kind, others, found.spreads.get(key, 0.0), f"on {len(others)} peers"), True


def _against(value: float, kind: Kind, others: Sequence[float], spread: float, where: str) -> str:
    """In ratios, by logarithms: rates of disks differ by factors, none is below zero. `spread`: of its repetitions."""
    middle = statistics.median(others)
    if middle <= 0 or value < 0 or min(others) <= 0:
        return ""
    behind = math.log(middle / max(value, TINY) if kind.more_is_better else value / middle)
    deviation = SCALE * statistics.median(abs(math.log(each / middle)) for each in others)
    if behind <= max(_least(kind), MADS * deviation, SPREADS * spread) or abs(value - middle) <= kind.absolute:
        return ""
    how = f"{1 - value / middle:.0%} less than" if kind.more_is_better else f"{value / middle:.1f} times"
    return f"{shown(value, kind)}, {how} the {shown(middle, kind)} {where}"


def is_guest(node: Measured) -> bool:
    """Whether it is a virtual machine."""
    return bool(node.facts.get("state", {}).get("virtual"))


def _least(kind: Kind) -> float:
    """Its least difference as a logarithm."""
    return -math.log(1 - kind.relative) if kind.more_is_better else math.log(1 + kind.relative)


def _all_worse(value: float, kind: Kind, others: Sequence[float]) -> bool:
    """Whether its past may count: where it is as good as its peers now, it is not slow, whatever it was."""
    if len(others) < LEAST_PEERS:
        return True
    middle = statistics.median(others)
    behind = middle - value if kind.more_is_better else value - middle
    return behind > kind.relative * middle / 2


def _problems(problems: Sequence[Problem], others: Sequence[Measured]) -> list[Fault]:
    """Phases that ended badly here. What fails for most of the others as well is no node's fault; a directory that
    fails is a node's only where it answers another one."""
    found = []
    for each in problems:
        where = f"{each.phase} {each.subject}".strip()
        same = [any((p.phase, p.subject) == (each.phase, each.subject) for p in other.problems) for other in others]
        answered = len(others) - sum(same) - sum(bool(other.missing) for other in others)
        if each.phase in TOOLS or 2 * sum(same) > len(others) or (2 * sum(same) == len(others) and sum(same)):
            continue
        alone = each.phase in ("site_check", "gpu_health") or (each.state == "late" and each.phase != "mount")
        if alone or answered > 0:
            found.append(Fault(place=place_of(each.phase, each.subject, {}), what=f"{where}: {each.said}"))
    return found


def _title(key: str, kind: Kind) -> str:
    subject = split_key(key)[1]
    return f"{kind.title} {subject}" if subject else kind.title


def shown(value: float, kind: Kind) -> str:
    """Three digits and the unit."""
    if 0 < abs(value) < 0.1:
        return f"{value:.2g} {kind.unit}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f} {kind.unit}"
