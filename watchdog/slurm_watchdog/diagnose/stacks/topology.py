"""How ranks are laid out over tensor, context, data and pipeline parallelism, and who among ranks that all
wait differs from those that normally look like it. Pure.

The order is Megatron-LM's (`--order tp-cp-ep-dp-pp`): ranks of one tensor-parallel group are neighbours, the
pipeline's stages lie furthest apart. It is known only if the command lines of all ranks say the same, or if
the caller does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.stacks.places import RankPlace
from slurm_watchdog.diagnose.stacks.waiting import collective_of
from slurm_watchdog.knowledge.stack_frames import Place

MIN_AGREEING = 3  # So many that agree make the one that does not the odd one; of two no one knows which is.
MAX_SIZE = 1 << 20

_OPTIONS = {
    "tensor": late_regex(r"--tensor[-_]model[-_]parallel[-_]size[= ](\d{1,5})\b"),
    "pipeline": late_regex(r"--pipeline[-_]model[-_]parallel[-_]size[= ](\d{1,5})\b"),
    "context": late_regex(r"--context[-_]parallel[-_]size[= ](\d{1,5})\b"),
}
_OTHER_ORDER = late_regex(r"--use[-_]tp[-_]pp[-_]dp[-_]mapping\b")
_WORDS = {"tp": "tensor", "pp": "pipeline", "cp": "context"}


class Topology(Struct):
    """Sizes of the groups; what is left of all ranks is data parallelism."""

    world: int
    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    @property
    def data(self) -> int:
        return self.world // (self.tensor * self.context * self.pipeline)

    def tensor_group(self, rank: int) -> int:
        """The number of a rank's tensor-parallel group: its members run the same collectives at the same time."""
        return rank // self.tensor

    def replica(self, rank: int) -> int:
        """Which copy of the model a rank holds a part of: 0 to data - 1."""
        return rank // (self.tensor * self.context) % self.data

    def seat(self, rank: int) -> tuple[int, int]:
        """(pipeline stage, place in its stage): ranks of different copies in the same seat do the same."""
        inner = self.tensor * self.context
        return rank // (inner * self.data), rank % inner


def parse_topology(text: str, world: int) -> Topology | None:
    """`tp=4,pp=8` (and `cp=2`) as a person writes it; None if that is no such text, or does not divide `world`."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(tp|pp|cp)\s*=\s*(\d{1,5})\s*", part)
        if match is None:
            return None
        sizes[_WORDS[match[1]]] = int(match[2])
    return _fitting(sizes, world)


def topology_of(commands: Iterable[str], world: int) -> Topology | None:
    """What the command lines say; None if they differ, say nothing, use another order, or do not fit the
    number of ranks."""
    sizes_found = set()
    for command in commands:
        if _OTHER_ORDER.search(command):
            return None
        found = {name: int(match[1]) for name, regex in _OPTIONS.items() if (match := regex.search(command))}
        if found:
            sizes_found.add(tuple(sorted(found.items())))
    return _fitting(dict(sizes_found.pop()), world) if len(sizes_found) == 1 else None


def _fitting(sizes: dict[str, int], world: int) -> Topology | None:
    product = 1
    for size in sizes.values():
        product *= size
    if not 0 < world <= MAX_SIZE or product <= 1 or world % product:
        return None
    return Topology(world=world, **sizes)


def odd_in_tensor_group(waiting: Sequence[RankPlace], topology: Topology) -> RankPlace | None:
    """The one rank that waits in another collective than all others of its tensor-parallel group; None if
    there is none, or if another group does not agree either."""
    if not _all_there(waiting, topology) or topology.tensor < MIN_AGREEING + 1:
        return None
    groups: dict[int, dict[str, list[RankPlace]]] = {}
    for place in waiting:
        by_name = groups.setdefault(topology.tensor_group(place.rank), {})
        by_name.setdefault(collective_of(place), []).append(place)
    split = [by_name for by_name in groups.values() if len(by_name) > 1]
    if len(split) != 1 or len(split[0]) != 2:
        return None
    few, most = sorted(split[0].values(), key=len)
    return few[0] if len(few) == 1 and len(most) >= MIN_AGREEING else None


def late_replica(waiting: Sequence[RankPlace], topology: Topology) -> tuple[RankPlace, ...]:
    """The ranks of the one copy of the model whose pipeline has not finished, while all other copies wait for
    it in a collective of all copies; empty if it is not so."""
    if not _all_there(waiting, topology) or topology.data < MIN_AGREEING or topology.pipeline < 2:
        return ()
    copies: dict[int, dict[tuple[int, int], RankPlace]] = {}
    for place in waiting:
        copies.setdefault(topology.replica(place.rank), {})[topology.seat(place.rank)] = place
    behind = [copy for copy in copies.values() if any(place.place is Place.P2P for place in copy.values())]
    if len(behind) != 1:
        return ()
    others = [copy for copy in copies.values() if copy is not behind[0]]
    first = {seat: collective_of(place) for seat, place in others[0].items()}
    if any({seat: collective_of(place) for seat, place in copy.items()} != first for copy in others):
        return ()
    return tuple(sorted((p for p in behind[0].values() if p.place is Place.P2P), key=lambda p: p.rank))


def _all_there(waiting: Sequence[RankPlace], topology: Topology) -> bool:
    return sorted(place.rank for place in waiting) == list(range(topology.world))
