"""What of a report is taken over: rows of jobs that its node has, of their owners, and so many of each kind. Pure.

Root of a node could else have anybody's job restarted, or hide that it hangs, by what he says of it; a user with a
process on a node could do the same to any other user's job by an environment of his own making; and a report has at
most 8 MiB (slurm_watchdog.wire.codec), which may be 100,000 rows, every few seconds.

What holds the rows of the newest report of each node needs no bound of its own: Slurm lists the nodes and the jobs, and
`agents` takes few others. What gathers rows of many reports has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec.structs import replace

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.base.fair_share import fair_share
from slurm_watchdog.model.observations import BY_SLURM, Role
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import may_hold_nodes

PROCESSES_OF_JOB = 1024  # Of one job on one node: 8 ranks with 64 loaders each, and what they started.
PROCESSES_OF_LARGE = 262_144  # … and on all its nodes, but never less than PROCESSES_AT_LEAST on each.
PROCESSES_AT_LEAST = 128
INNER = 4096  # Entries of a list within a row, such as the processes of a GPU; NVML lists no more to an agent.
ORDER = {Role.RANK: 0, Role.WORKER: 1, Role.HELPER: 2}

JobOf = Callable[[str], SlurmJob | None]  # What agents call a job -> the job as Slurm listed it.
Known = Callable[[str], Collection[tuple[int, int]]]  # Node -> (pid, start ticks) of its processes that are remembered.
Stranger = Callable[[str, str], bool]  # Whether a node has nothing to do with what agents call a job.


def process_ids(job: SlurmJob) -> tuple[str, ...]:
    """What the job's processes may have as SLURM_JOB_ID: of a heterogeneous job each component's number."""
    return (job.process_id, *job.component_ids)


class JobNodes:
    """Which nodes each listed job has been seen to have. Of a job that never had any no one speaks."""

    def __init__(self) -> None:
        self._had: dict[str, set[str]] = {}

    def update(self, jobs: Iterable[SlurmJob]) -> None:
        """One listing; jobs that are in it no more are forgotten."""
        found: dict[str, set[str]] = {}
        for job in jobs:
            had = self._had.get(job.process_id) or set()
            had.update(job.nodes)
            found |= dict.fromkeys(process_ids(job), had)
        self._had = found

    def remember(self, process_job_id: str, nodes: Iterable[str]) -> None:
        """What an earlier controller has written down: of a job that has ended since, Slurm may list no node."""
        self._had.setdefault(process_job_id, set()).update(nodes)

    def stranger(self, node: str, process_job_id: str) -> bool:
        """Whether this node has nothing to do with that job, as far as Slurm has said."""
        return node not in self._had.get(process_job_id, ())


def _is_of_job(uid: int, member_by: str, job: SlurmJob | None) -> bool:
    """Whether a process of this user is one of the job: the owner's, or Slurm itself has put it there. Where either
    user is not known nothing is proven, and nothing is held against it."""
    return job is None or job.uid < 0 or uid < 0 or uid == job.uid or member_by == BY_SLURM


def _is_wish(node: str, uid: int, restarts: int, job: SlurmJob | None) -> bool:
    """Whether it is of the job's owner, from a node that this very run has."""
    if job is None or not may_hold_nodes(job.state) or node not in job.nodes or restarts != job.restarts:
        return False
    return uid == job.uid or job.uid < 0


def _is_own_process(node: str, claim: tuple[str, int, str], job: SlurmJob | None) -> bool:
    return _is_of_job(*claim[1:], job)


def _is_own_wish(node: str, claim: tuple[str, int, int], job: SlurmJob | None) -> bool:
    return _is_wish(node, *claim[1:], job)


May = Callable[[str, Any, SlurmJob | None], bool]


class Bound(NamedTuple):
    """How many rows of a kind are taken of one node's report, in equal shares of the jobs, else users, whose they are;
    and what of a row decides whether the node may speak of it: its job's id, alone or first."""

    rows: int
    claim: Callable[[Any], Any] | None = None
    may: May | None = None  # None: of any user.
    lists: Callable[[Any], Iterable[Any]] | None = None
    """The lists that a row holds, of INNER entries at most: a longer one costs its row."""


JOB = attrgetter("job_id")
BOUNDS = {
    "processes": Bound(4096, attrgetter("job_id", "uid", "member_by"), _is_own_process),  # 256 ranks have about 1,000
    "left_out": Bound(64, JOB),
    "unread": Bound(4096),
    "wishes": Bound(1024, attrgetter("job_id", "uid", "restarts"), _is_own_wish, lambda row: (row.variables,)),
    "logs": Bound(1024, JOB),  # agents send 24 files and 3,000 lines a job
    "events": Bound(8192, JOB, lists=lambda row: (row.earlier,)),
    "checkpoints": Bound(64, JOB),
    "supervisors": Bound(512, JOB),
    "usages": Bound(1024, JOB),
    "pressures": Bound(64, JOB),
    "gpus": Bound(64, lists=attrgetter("mig", "throttled", "throttle", "pids", "process_memory_bytes")),
    "gpu_holders": Bound(512, lists=attrgetter("gpu_uuids", "minors")),  # their jobs are over
    "mounts": Bound(64),  # agents probe 16
    "hung_probes": Bound(64),
    "links": Bound(64),
    "node_events": Bound(1024),  # agents send 320
    "problems": Bound(64),
    "results": Bound(256),
}  # Field of a report -> its bound. A node has some dozen jobs at most.


class Admitted(NamedTuple):
    """What is taken over."""

    report: Report
    dropped: int  # Rows about other nodes' jobs, or of users whose job it is not.
    missing: Counter[str]  # Of each job how many processes had no room.


def admit(report: Report, job_of: JobOf, stranger: Stranger | None, known: Known, left_out: LeftOut) -> Admitted:
    """The report as far as it is taken over. `stranger` None: a node may speak of all jobs. `known` gives
    the processes of the node that are remembered: they come first, so that one that is left out was never there, and
    no one looks dead for want of room."""
    node, kept, dropped, missing = report.node, dict[str, tuple[Any, ...]](), 0, Counter[str]()
    for kind, (most, claim, may, lists) in BOUNDS.items():
        rows = getattr(report, kind)
        if not rows:
            continue
        own = rows
        if claim is not None:
            wrong = [each for each in set(map(claim, rows)) if not _is_own(node, each, may, job_of, stranger)]
            if wrong:
                own = tuple(row for row in rows if claim(row) not in wrong)
                dropped += len(rows) - len(own)
        taken = own
        if lists is not None and (
            swollen := {id(row) for row in own for each in lists(row) if each and len(each) > INNER}
        ):
            taken = tuple(row for row in own if id(row) not in swollen)
        if kind == "processes" and len(own) > PROCESSES_AT_LEAST:
            taken = _processes(own, most, job_of, known(node))
            missing = Counter(map(JOB, own)) - Counter(map(JOB, taken))
        elif len(taken) > most:
            taken, _ = fair_share(taken, most, _owner)
        if len(taken) < len(own):
            lost = Counter(map(_uid, own)) - Counter(map(_uid, taken))
            for uid, count in lost.items():
                left_out.note(kind, node, count, uid)
        if taken is not rows:
            kept[kind] = taken
    return Admitted(replace(report, **kept) if kept else report, dropped, missing)


def _is_own(node: str, claim: Any, may: May | None, job_of: JobOf, stranger: Stranger | None) -> bool:
    job_id = claim if may is None else claim[0]
    if job_id is None:
        return True
    return (stranger is None or not stranger(node, job_id)) and (may is None or may(node, claim, job_of(job_id)))


def _processes(rows: tuple[Any, ...], most: int, job_of: JobOf, there: Collection[tuple[int, int]]) -> tuple[Any, ...]:
    by_job = dict[str, list[Any]]()
    for row in rows:
        by_job.setdefault(row.job_id, []).append(row)

    def order(row: Any) -> tuple[bool, int]:
        return ((row.pid, row.start_ticks) not in there, ORDER[row.role])

    shares = ((mine, job_of(job_id)) for job_id, mine in by_job.items())
    found = tuple(chain(*(fair_share(mine, share_of(job), _uid, order)[0] for mine, job in shares)))
    taken, _ = fair_share(found, most, _uid, order)
    return taken if len(taken) < len(rows) else rows


def share_of(job: SlurmJob | None) -> int:
    """Processes of this job that are taken on each of its nodes."""
    nodes = 1 if job is None else max(1, len(job.nodes))
    return max(PROCESSES_AT_LEAST, min(PROCESSES_OF_JOB, PROCESSES_OF_LARGE // nodes))


def _uid(row: object) -> int | None:
    return getattr(row, "uid", None)


def _owner(row: object) -> Hashable:
    """Whose share a row is of: its job's, its user's, else the node's."""
    job = getattr(row, "job_id", None)
    return job if job is not None else getattr(row, "uid", None)
