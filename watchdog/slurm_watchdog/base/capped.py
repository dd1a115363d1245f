"""Containers with a cap: how much of one a node, a user or a job may fill, and what was left out. Pure bookkeeping.

Every container of the controller that reports can fill is one of these, or is bounded by one that is, so that
no node and no user can end the controller, or displace what is known of others: shares belong to owners, and
an owner who has used up his share loses his own entries. What was left out is counted (a metric) and reported
for a while with its owner (`status`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, ItemsView, Iterator, ValuesView
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from slurm_watchdog.base.structs import Struct

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

CAPS: Final[dict[str, str]] = {
    "processes": "processes in a node's report: by the node's share, the user's, and the job's on that node",
    "gone_ranks": "ranks and workers of a run that have ended",
    "rows": "rows of a report, of any other kind than processes",
    "nodes": "nodes that Slurm does not list",
    "report_base": "reports too large to build reports of changes on",
    "log_offsets": "how far a node has read a log file",
    "logs": "log files of a run",
    "checkpoint_directories": "directories with checkpoints of a run",
    "gpus": "GPUs of a node with their past",
    "gpu_processes": "processes that compute on the GPUs of a node, those included that have ended",
    "mounts": "mounts of a node with what it answered about them",
    "filesystems": "filesystems that processes wait for",
    "error_ranks": "ranks that logged an error",
    "log_starts": "log files of the run before",
    "probes": "filesystems that nodes are asked about at the same time",
    "evidence": "evidence beyond the share of its job's owner",
    "timeline": "lines in the timeline of one incident",
    "incidents": "open incidents of one job, or of one node",
}
"""What is capped -> in words. These are all the labels of the metric."""
REPORTED_S = 600.0  # How long an omission is reported.
MAX_OWNERS = 4096  # Owners that are reported: a few per node.


class Shortage(Struct):
    """What did not fit of one owner's, lately."""

    what: str  # A key of CAPS.
    whose: str  # Node, or `job ID`.
    uid: int | None  # The user with most of it, where that is known.
    job_id: str | None = None  # The job with which he has it, where that is known.
    count: int  # In one report, the newest one that had too much.
    age_s: float


@dataclass(slots=True)
class _Lately:
    at: float
    count: int = 0
    by_user: dict[tuple[int, str | None], int] = field(default_factory=dict)  # User, and his job where it is known.


@dataclass
class LeftOut:
    """What did not fit, of everything. One loop owns it, and sets `at` before it accepts a report."""

    at: float = 0.0  # The moment of the report that is taken now.
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAPS, 0))
    _recent: OrderedDict[tuple[str, str], _Lately] = field(default_factory=OrderedDict)

    def note(self, what: str, whose: str, count: int = 1, uid: int | None = None, job_id: str | None = None) -> None:
        """`count` entries of `whose` were left out. Raises KeyError for what is not in CAPS."""
        self.totals[what] += count
        known = self._recent.get((what, whose))
        if known is None or known.at != self.at:
            known = self._recent[what, whose] = _Lately(self.at)
            self._recent.move_to_end((what, whose))
            if len(self._recent) > MAX_OWNERS:
                self._recent.popitem(last=False)
        known.count += count
        if uid is None:
            return
        user = (uid, job_id)
        if user in known.by_user or len(known.by_user) < MAX_USERS:
            known.by_user[user] = known.by_user.get(user, 0) + count

    def lately(self, now: float) -> tuple[Shortage, ...]:
        """What was left out within SHOWN_S, the most first."""
        found = []
        for (what, whose), each in self._recent.items():
            if now - each.at > REPORTED_S:
                continue
            uid, job_id = max(each.by_user, key=each.by_user.__getitem__, default=(None, None))
            found.append(
                Shortage(what=what, whose=whose, uid=uid, job_id=job_id, count=each.count, age_s=now - each.at)
            )
        return tuple(sorted(found, key=lambda each: (-each.count, each.what, each.whose)))


MAX_USERS = 64  # Users, with their jobs, that are counted separately for one node.


class Capped(Generic[K, V]):
    """A mapping in which each owner has a share.

    An owner is a path, from the wider to the narrower: `("n1", 1500)` is a user on a node, and counts for the
    share of the node as well. With `oldest_goes` a new entry takes the place of that owner's oldest one,
    otherwise it is refused.
    """

    __slots__ = ("_left_out", "_lost", "_of", "_oldest_goes", "_owners", "_shares", "_values", "_what")

    def __init__(
        self,
        what: str,
        left_out: LeftOut,
        *shares: int,
        oldest_goes: bool = False,
        lost: Callable[[K], object] = lambda key: None,
    ):
        """`shares`: entries of each owner, one number for each part of the owner's path; `lost` is called
        with the key of an entry that was displaced."""
        self._what, self._left_out, self._shares, self._oldest_goes = what, left_out, shares, oldest_goes
        self._lost = lost
        self._values: dict[K, V] = {}
        self._owners: dict[K, tuple[Hashable, ...]] = {}
        self._of: dict[tuple[Hashable, ...], dict[K, None]] = {}
        """(Part of) an owner's path -> its keys, the oldest first."""

    def put(self, key: K, value: V, *owner: Hashable) -> bool:
        """Takes an entry over; one that is there keeps its first owner. False: there was no room."""
        if key in self._values:
            self._values[key] = value
            return True
        paths = [owner[: depth + 1] for depth in range(len(self._shares))]
        for path, share in zip(paths, self._shares, strict=True):
            mine = self._of.get(path)
            if mine is not None and len(mine) >= share:
                self._left_out.note(self._what, str(owner[0]), uid=_uid(owner))
                if not self._oldest_goes:
                    return False
                oldest = next(iter(mine))
                self.pop(oldest)
                self._lost(oldest)
        self._values[key], self._owners[key] = value, owner
        for path in paths:
            self._of.setdefault(path, {})[key] = None
        return True

    def mark_newest(self, key: K) -> None:
        """This entry is its owner's newest again."""
        owner = self._owners.get(key)
        for depth in range(len(self._shares) if owner is not None else 0):
            mine = self._of[owner[: depth + 1]]  # type: ignore[index]
            del mine[key]
            mine[key] = None

    def pop(self, key: K) -> V | None:
        """Forgets an entry, and returns it."""
        if key not in self._values:
            return None
        owner = self._owners.pop(key)
        for depth in range(len(self._shares)):
            path = owner[: depth + 1]
            del self._of[path][key]
            if not self._of[path]:
                del self._of[path]
        return self._values.pop(key)

    def clear(self) -> None:
        self._values.clear()
        self._owners.clear()
        self._of.clear()

    def get(self, key: K) -> V | None:
        return self._values.get(key)

    def items(self) -> ItemsView[K, V]:
        return self._values.items()

    def values(self) -> ValuesView[V]:
        return self._values.values()

    def owner(self, key: K) -> tuple[Hashable, ...]:
        """Whose entry it is; empty if there is none."""
        return self._owners.get(key, ())

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[K]:
        return iter(self._values)


def _uid(owner: tuple[Hashable, ...]) -> int | None:
    return next((part for part in owner[1:] if isinstance(part, int)), None)
