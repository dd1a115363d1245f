"""How much of a container a node, a user or a job may fill, and what was left out. Pure bookkeeping.

Reports are bounded at the door (slurm_watchdog.controller.state.door), and what gathers over time by itself, so that no
node and no user can end the controller, or displace what is known of others. What was left out is counted (a metric)
and reported for a while with its owner (`status`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from slurm_watchdog.base.structs import Struct

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

CAPS: Final[dict[str, str]] = {
    "processes": "processes in a node's report: by the node's share, the user's, and the job's on that node",
    "left_out": "jobs and users whose processes a node counts",
    "unread": "processes in a node's report that were not read yet",
    "wishes": "jobs with directives in a node's report",
    "logs": "log files in a node's report",
    "events": "lines of logs in a node's report",
    "checkpoints": "directories with checkpoints in a node's report",
    "supervisors": "supervisors in a node's report",
    "usages": "limits and their use in a node's report",
    "pressures": "waits for resources in a node's report",
    "gpus": "GPUs in a node's report",
    "gpu_holders": "processes without a job that hold a GPU, in a node's report",
    "mounts": "mounts in a node's report",
    "hung_probes": "children that hang, in a node's report",
    "links": "network links in a node's report",
    "node_events": "lines of the kernel in a node's report",
    "problems": "failed collectors in a node's report",
    "results": "answers in a node's report",
    "nodes": "nodes that Slurm does not list",
    "filesystems": "filesystems that processes wait for",
    "probes": "filesystems that nodes are asked about at the same time",
    "evidence": "evidence beyond the share of its job's owner",
    "timeline": "lines in the timeline of one incident",
    "incidents": "open incidents of one job, or of one node",
}  # What is capped -> in words. These are all the labels of the metric.
REPORTED_S = 600.0  # How long an omission is reported.
MAX_OWNERS = 4096  # Owners that are reported: a few per node.
MAX_USERS = 64  # Users, with their jobs, that are counted separately for one node.
UNKNOWN = -1


class Shortage(Struct):
    """What did not fit of one owner's, lately."""

    what: str  # A key of CAPS.
    whose: str  # Node, or `job ID`.
    uid: int | None  # The user with most of it, where that is known.
    job_id: str | None = None  # The job with which he has it, where that is known.
    count: int  # In one report, the newest one that had too much.
    age_s: float


@dataclass
class LeftOut:
    """What did not fit, of everything. One loop owns it, and sets `at` before it accepts a report."""

    at: float = 0.0  # The moment of the report that is taken now.
    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAPS, 0))
    _recent: dict[tuple[str, str], tuple[float, Counter[tuple[int, str | None]]]] = field(default_factory=dict)
    """(what, whose) -> when last, and how much then by user (-1: not known) and, where it is known, his job."""

    def note(self, what: str, whose: str, count: int = 1, uid: int | None = None, job_id: str | None = None) -> None:
        """`count` entries of `whose` were left out. Raises KeyError for what is not in CAPS."""
        self.totals[what] += count
        at, counts = self._recent.get((what, whose), (None, Counter[tuple[int, str | None]]()))
        if at != self.at:
            counts = Counter()
            put_newest(self._recent, (what, whose), (self.at, counts), MAX_OWNERS)
        user = (UNKNOWN if uid is None else uid, job_id)
        counts[user if user in counts or len(counts) < MAX_USERS else (UNKNOWN, None)] += count

    def lately(self, now: float) -> tuple[Shortage, ...]:
        """What was left out within REPORTED_S, the most first."""
        found = []
        for (what, whose), (at, counts) in self._recent.items():
            if now - at <= REPORTED_S:
                uid, job_id = max(counts, key=lambda user: (user[0] != UNKNOWN, counts[user]))
                known = None if uid == UNKNOWN else uid
                found.append(
                    Shortage(what=what, whose=whose, uid=known, job_id=job_id, count=counts.total(), age_s=now - at)
                )
        return tuple(sorted(found, key=lambda each: (-each.count, each.what, each.whose)))


def put_newest(known: dict[K, V], key: K, value: V, most: int) -> None:
    """Takes an entry over as the newest one; of more than `most` the oldest goes."""
    known.pop(key, None)
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]
