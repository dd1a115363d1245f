"""The stacks of a job's ranks while they are judged: who waits, is elsewhere, is missing; their layout. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.stacks.places import WAITS_FOR_PEERS, RankPlace, is_gone, is_native, locate
from slurm_watchdog.diagnose.stacks.ranks import RankAssignment, RankProcess
from slurm_watchdog.diagnose.stacks.waiting import ENDLESS, UNHURRIED, collective_of, frames_key, sides
from slurm_watchdog.knowledge.limits import SHIPPED, PhaseLimits
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.incidents import Culprit

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
    """What the command lines say; None if they differ, say nothing, use another order, or do not fit the ranks."""
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


GONE = "its process had ended"


class Options(Struct):
    """What the caller knows besides the stacks."""

    ranks: int | None = None
    since_last_step_s: float | None = None
    typical_step_s: float | None = None
    topology: str | None = None
    """As a person writes it: `tp=4,pp=8`; without it the command lines of the ranks are asked."""
    limits: PhaseLimits = SHIPPED  # The configuration's `detectors.collective_hang`.


class StackCase(Struct):
    """All that the rules look at."""

    given: Options
    cast: RankAssignment
    places: tuple[RankPlace, ...]
    undumped: tuple[Culprit, ...]
    gone: tuple[Culprit, ...]  # Whose process had ended when it was to be dumped.
    missing: tuple[int, ...]
    repeated: bool | None
    """True if several dumps of every rank are alike, False if a rank moved, None if there is one dump of each."""
    waiting: tuple[RankPlace, ...]
    outside: tuple[RankPlace, ...]
    crowd: bool = False  # Whether more stand outside than wait.
    topology: Topology | None = None

    @property
    def base_s(self) -> float:
        """Below so many seconds since the last step nothing is a hang."""
        return max(self.given.limits.floor, self.given.limits.factor * (self.given.typical_step_s or 0.0))

    @property
    def late(self) -> bool:
        return self.given.since_last_step_s is not None and self.given.since_last_step_s >= self.base_s

    @property
    def recent(self) -> bool:
        return self.given.since_last_step_s is not None and self.given.since_last_step_s < self.base_s


Ruling = tuple[bool, str, Sequence[RankPlace | Culprit], str]
"""(is it a hang, class, culprits, what the sentence says)."""


def case_of(found: RankAssignment, given: Options, commands: Sequence[str] = ()) -> StackCase:
    """Everything that the rules look at, from who was dumped and what the caller knows."""
    placed = [(each, locate(each.dumps[-1]) if each.dumps else None) for each in found.ranks]
    places = [place for _, place in placed if place is not None and place.error is None]
    undumped = [
        Culprit(node=each.host, rank=each.rank, pid=each.pid or None, reason=each.error or "no Python frames")
        for each, place in placed
        if each.error is not None or (place is not None and place.error is not None)
    ]
    gone = tuple(replace(each, reason=GONE) for each in undumped if is_gone(each.reason))
    undumped = [each for each in undumped if not is_gone(each.reason)]
    repeated = _repeated([each for each, place in placed if place is not None and place.error is None])
    case = StackCase(
        given=given, cast=found, places=tuple(places), undumped=tuple(undumped), gone=gone, missing=_missing(found),
        repeated=repeated, waiting=(), outside=(),
    )  # fmt: skip
    still = frozenset(p.key for p in places) if case.late or repeated else frozenset()
    waiting, outside, crowd = sides(places, still)
    world = found.world or len(found.ranks)
    topology = parse_topology(given.topology, world) if given.topology else topology_of(commands, world)
    return replace(case, waiting=tuple(waiting), outside=tuple(outside), crowd=crowd, topology=topology)


def _missing(found: RankAssignment) -> tuple[int, ...]:
    known = {each.rank for each in found.ranks if each.rank is not None}
    if not known or len(known) < len(found.ranks):
        return ()
    return tuple(sorted(set(range(found.world or max(known) + 1)) - known))[:100_000]


def _repeated(processes: Sequence[RankProcess]) -> bool | None:
    """Whether the dumps of a rank are alike. A wait that is polled may show other frames of the same wait."""
    if any(_moved(each) for each in processes):
        return False
    return True if processes and all(len(each.dumps) > 1 for each in processes) else None


def _moved(process: RankProcess) -> bool:
    seen = [locate(each) for each in process.dumps]
    seen = [each for each in seen if each.error is None]
    if len({each.place for each in seen}) > 1:
        return True
    if not seen or seen[0].place in ENDLESS | UNHURRIED | {Place.DEVICE, Place.SUBPROCESS, Place.SLEEP}:
        return False
    lines = (tuple(f.line for f in p.frames if not is_native(f.file)) for p in seen)
    working = seen[0].place not in WAITS_FOR_PEERS
    return len({frames_key(p) for p in seen}) > 1 or (working and len(set(lines)) > 1)
