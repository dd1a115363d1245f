"""How often the ranks of a run were found waiting, in every report of their nodes; and since the step was
late, dump after dump: does every rank stand where it stood? Pure bookkeeping."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import msgspec

from slurm_watchdog.base.memo import Series
from slurm_watchdog.diagnose.stacks.places import WAITS_FOR_PEERS, call_of, locate
from slurm_watchdog.diagnose.stacks.waiting import ProcessKey, frames_key
from slurm_watchdog.knowledge.stack_frames import Place
from slurm_watchdog.model.cluster_view import StackSnapshot, StillRow
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.past_runs import WHOLE, DumpedRank, RankKey, WaitBlock, WaitDump

BLOCK_S = 60.0  # Of one block. How long a rank has run is read every 12 ticks: a minute.
MOST = 255  # Seconds, or looks, of one block: what a byte holds.
LONGEST_S = 200.0  # Between two such readings: over a longer gap nothing is known.
KEPT_BLOCKS = 180  # Three hours: one before the change, two to tell a small one from chance. 720 bytes a rank.
LEAST_KEPT = 75  # An hour before the change, and a quarter of one: enough for any but a small change.
MAX_BYTES = 24 * 1024**2  # Of all runs together: of more than 35,000 ranks fewer blocks are kept.
KEPT_DUMPS = 48
ASLEEP = frozenset("SDI")
SAME_READING_S = 1.0  # Each report repeats the newest one, with its age.

Idle = tuple[float, int]  # (share in which a GPU did nothing, in so many looks).


class _Count(msgspec.Struct, gc=False):
    """Of one rank in the block that is open."""

    rank: int
    seconds: float = 0.0
    asleep_s: float = 0.0
    gpu_looks: int = 0
    gpu_idle: float = 0.0
    noted: bool = False  # Someone has looked at it in this block.
    read_at: float | None = None  # When it was read last; None: no sleep is known from the next reading.
    runnable_s: float = 0.0  # What was read then.


@dataclass(slots=True)
class WaitTally:
    """Of one run."""

    _open_at: float | None = None
    _counts: dict[ProcessKey, _Count] = field(default_factory=dict)
    """Of this block, and of the one before where no one has looked at the rank since."""
    kept: int = KEPT_BLOCKS  # So many blocks at most; see `kept_blocks`.
    _blocks: deque[WaitBlock] = field(default_factory=deque)
    _handed_out: tuple[WaitBlock, ...] | None = ()
    _dumps: deque[WaitDump] = field(default_factory=lambda: deque(maxlen=KEPT_DUMPS))

    @property
    def ranks(self) -> int:
        """How many it counts."""
        return len(self._counts)

    def note(
        self, key: ProcessKey, rank: int, at: float, runnable_s: float | None, read_age_s: float, idle: Idle | None
    ) -> bool:
        """What is known of a rank at `at`: how long it had run `read_age_s` before, and in which share of how many
        looks since it was noted last its GPU did nothing. Returns whether a block is full."""
        if self._open_at is None:
            self._open_at = at
        is_full = at - self._open_at >= BLOCK_S
        if is_full:
            self._close(at)
        count = self._counts.get(key)
        if count is None:
            count = self._counts[key] = _Count(rank)
        count.noted = True
        read_at = at - read_age_s
        if runnable_s is not None and (count.read_at is None or read_at - count.read_at > SAME_READING_S):
            self._note_sleep(count, runnable_s, read_at)
        if idle is not None:
            looks = min(idle[1], MOST - count.gpu_looks)
            count.gpu_looks += looks
            count.gpu_idle += looks * idle[0]
        return is_full

    def interrupt(self, key: ProcessKey) -> None:
        """The training does something else: what a rank slept since its last reading is no wait of a step."""
        if key in self._counts:
            self._counts[key].read_at = None

    def _note_sleep(self, count: _Count, runnable_s: float, at: float) -> None:
        before_at, before_s = count.read_at, count.runnable_s
        count.read_at, count.runnable_s = at, runnable_s
        if before_at is None or not 0 < at - before_at <= min(LONGEST_S, MOST - count.seconds):
            return
        passed_s = at - before_at
        count.seconds += passed_s
        count.asleep_s += min(passed_s, max(0.0, passed_s - (runnable_s - before_s)))

    def note_dump(self, stacks: tuple[ProcessStack, ...], at: float) -> None:
        """One dump of all ranks."""
        ranks = tuple(_dumped(each) for each in stacks if each.role is Role.RANK and each.rank is not None)
        self._dumps.append(WaitDump(at=at, ranks=tuple(each for each in ranks if each is not None)))

    def blocks(self) -> tuple[WaitBlock, ...]:
        """Those that are full, oldest first; the same tuple until one more is."""
        if self._handed_out is None:
            self._handed_out = Series(self._blocks)
        return self._handed_out

    def dumps(self) -> tuple[WaitDump, ...]:
        """Oldest first."""
        return tuple(self._dumps)

    def _close(self, at: float) -> None:
        assert self._open_at is not None
        noted = ((key, count) for key, count in self._counts.items() if count.noted)
        rows = sorted(noted, key=lambda row: (row[1].rank, *row[0]))
        keys = tuple(RankKey(count.rank, *key) for key, count in rows)
        if self._blocks and self._blocks[-1].ranks == keys:
            keys = self._blocks[-1].ranks  # one tuple for all of them
        counts = [count for _, count in rows]
        self._blocks.append(
            WaitBlock(
                begin_at=self._open_at, end_at=at, ranks=keys,
                seconds=bytes(int(each.seconds) for each in counts),
                asleep=bytes(_share(each.asleep_s, each.seconds) for each in counts),
                gpu_looks=bytes(each.gpu_looks for each in counts),
                gpu_idle=bytes(_share(each.gpu_idle, each.gpu_looks) for each in counts),
            )
        )  # fmt: skip
        while len(self._blocks) > self.kept:
            self._blocks.popleft()
        for count in counts:
            count.seconds = count.asleep_s = count.gpu_idle = 0.0
            count.gpu_looks, count.noted = 0, False
        self._counts = dict(rows)
        self._open_at, self._handed_out = at, None


def kept_blocks(ranks: int) -> int:
    """How many blocks each of the runs keeps that have so many ranks together: 4 bytes a rank and block."""
    return max(LEAST_KEPT, min(KEPT_BLOCKS, MAX_BYTES // (4 * max(1, ranks))))


def _share(part: float, whole: float) -> int:
    return round(WHOLE * part / whole) if whole else 0


def _dumped(stack: ProcessStack) -> DumpedRank | None:
    place = locate(stack)
    if place.error is not None or stack.state is None:
        return None
    return DumpedRank(
        key=RankKey(stack.rank or 0, stack.node, stack.pid, stack.start_ticks),
        asleep=stack.state in ASLEEP,
        with_peers=place.place in WAITS_FOR_PEERS,
        in_backward=place.place is Place.BACKWARD,
        call=call_of(place.frames[0]) if place.frames else "",
    )


Dump = tuple[float, tuple[ProcessStack, ...], tuple[str, ...]]  # (when, stacks, nodes that gave none).


@dataclass(frozen=True)
class Row:
    """The first of them and the last two."""

    dumps: int
    kept: tuple[Dump, ...]
    over: bool = False


def follow_row(row: Row | None, dump: Dump) -> Row:
    """`row` and one more dump."""
    places = _places(dump)
    if row is None:
        return Row(1, (dump,), over=places is None)
    kept = (row.kept[0], *row.kept[1:][-1:], dump)
    return replace(
        row, dumps=row.dumps + 1, kept=kept, over=row.over or places is None or places != _places(row.kept[-1])
    )


def row_view(row: Row, now: float) -> StillRow:
    """As detectors see it."""
    kept = tuple(StackSnapshot(age_s=now - at, stacks=stacks, silent_nodes=silent) for at, stacks, silent in row.kept)
    return StillRow(dumps=row.dumps, snapshots=kept, over=row.over)


def _places(dump: Dump) -> dict[ProcessKey, tuple[str, ...]] | None:
    """Where each rank stands; None where that is not known of all of them."""
    if dump[2]:
        return None
    found = {}
    for stack in dump[1]:
        if stack.role is not Role.RANK or stack.rank is None:
            continue
        place = locate(stack)
        if place.error is not None:
            return None
        found[stack.node, stack.pid, stack.start_ticks] = frames_key(place)
    return found or None
