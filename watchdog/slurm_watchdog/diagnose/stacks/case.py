"""The stacks of a job's ranks while they are judged: who waits, who stands elsewhere, who is missing, what
else is known. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.diagnose.stacks.places import WAITS_FOR_PEERS, RankPlace, is_gone, is_native, locate
from slurm_watchdog.diagnose.stacks.ranks import RankAssignment, RankProcess
from slurm_watchdog.diagnose.stacks.topology import Topology, parse_topology, topology_of
from slurm_watchdog.diagnose.stacks.waiting import ENDLESS, UNHURRIED, frames_key, sides
from slurm_watchdog.knowledge.limits import SHIPPED, PhaseLimits
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.incidents import Culprit

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
