"""Processes that the kernel killed for memory, and which rank of which run each was. Pure.

The kernel names the process by its number, and the control group that had no memory left; a step that ends with the
kill has no counter any more by the next look. Who it was is known by the number, else by Slurm's place in the path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from slurm_watchdog.analysis.job_state import has_stepped_since
from slurm_watchdog.analysis.slurm_nodes import nodes_to_judge
from slurm_watchdog.base.late_regex import late_regex
from slurm_watchdog.base.structs import Struct
from slurm_watchdog.base.text import size
from slurm_watchdog.knowledge.launchers import step_of_group
from slurm_watchdog.model.cluster_view import READ_LATER_S, ClusterView, JobView, ProcessView
from slurm_watchdog.model.incidents import Culprit
from slurm_watchdog.model.node_view import NodeView, SeenUsage
from slurm_watchdog.model.observations import Resource, Role, Usage
from slurm_watchdog.model.past_runs import PastRun
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import ENDED_FROM_OUTSIDE

OOM_KILL = "oom_kill"
SLACK_S = 30.0  # A run may be seen to end, or the next to begin, so much earlier or later: two listings and a report.
ENDS_S = 15.0  # A rank that is killed is seen to be gone within two reports, and once its memory is given back.
ALL_OF_IT = 0.9  # Who held so much of the limit is the one who reached it.
RISE_S = 60.0  # A counter is read every 30 s, and in the report after that; a line about the same kill is as near.
SAME_S = 2.0  # Lines about one process within this time are one kill: two at once, and one for a whole group.
ENDS_WITHIN_S = 300.0  # It takes its run with it within this: collectives wait 10 min, an error of a loader none.
_WHOSE = (
    ("oom-kill:constraint=CONSTRAINT_MEMCG,", True),
    ("Memory cgroup out of memory", True),
    ("oom-kill:constraint=CONSTRAINT_NONE,", False),
    ("Out of memory", False),
)
"""How a line begins -> whether a control group had no memory left; else the node had none (mm/oom_kill.c)."""
_FULL = late_regex(r"\boom_memcg=(/[^,]*),")  # The group without memory; Linux 4.19 to 5.1: CONSTRAINT_NONE, too.
_SLURMS = late_regex(r"/job_\d+(?:/step_[^/]+(?:/(?:user|slurm))?(?:/task_[^/]+)?)?$")
"""How the path of a group ends that Slurm makes for a job, a step, or a task of it."""
_HELD = late_regex(r"\b(?:anon|file|shmem)-rss:(\d+)kB")


class MemoryKill(Struct):
    """One process that the kernel killed for memory."""

    node: str
    pid: int | None  # None: numbered differently by agent and kernel, or known by a counter alone.
    at: float  # On the clock of `ClusterView.now`.
    comm: str = ""
    process_job: str | None = None  # The job that its control group names; None: the kernel did not say.
    step_id: str | None = None  # The step whose limit was reached; None: the job's own, or the kernel did not say.
    own_group: bool = False  # A group that the job made below Slurm's had none left: a container's, say.
    limited: bool | None = None  # True: its job, or a step of it, had none left; False: the node; None: not said.
    held_bytes: int | None = None  # What it had in memory itself.
    limit_bytes: int | None = None  # The least that its job or step may have there.
    lines: tuple[str, ...] = ()
    rank: int | None = None
    role: Role | None = None  # None: it is not known what it was to its job.

    @property
    def culprit(self) -> Culprit:
        """It, with the reason for which it is named."""
        worker = self.role is Role.WORKER
        return Culprit(node=self.node, rank=self.rank, pid=self.pid, reason=f"was {self.words}", is_worker=worker)

    @property
    def words(self) -> str:
        """`killed by the kernel for memory: …`, as far as it is known."""
        who = {True: "its job", False: self.node, None: "its job or its node"}[self.limited]
        had = f"{'a control group that its job made' if self.own_group else who} had none left"
        if self.limited and self.limit_bytes is not None and not self.own_group:
            had = f"its job had used up the {size(self.limit_bytes)} that it may have there"
            if self.held_bytes is not None and self.held_bytes >= ALL_OF_IT * self.limit_bytes:
                return f"killed by the kernel for memory: {size(self.held_bytes)} of {size(self.limit_bytes)}"
        held = "" if self.held_bytes is None else f"it held {size(self.held_bytes)}, and "
        return f"killed by the kernel for memory: {held}{had}"


Who = Mapping[tuple[str, int | None], tuple[int | None, Role | None]]  # (node, pid) -> rank, and role in its job.
Kills = Mapping[str, tuple[MemoryKill, ...]]  # Node -> the kills there that are remembered, oldest first.


def memory_kills(view: ClusterView) -> Kills:
    """Of all nodes that have something to tell."""
    return {node.name: found for node in nodes_to_judge(view) if (found := _of_node(node))}


def _of_node(node: NodeView) -> tuple[MemoryKill, ...]:
    found: list[MemoryKill] = []
    for seen in node.events:
        event = seen.event
        if event.name != OOM_KILL:
            continue
        line, group = event.line, step_of_group(event.mount or "")
        held = sum(int(size) for size in _HELD.findall(line)[-3:]) * 1024
        limited = next((is_limit for begin, is_limit in _WHOSE if line.startswith(begin)), None)
        full = _FULL.search(line)
        full_in = None if full is None else step_of_group(full[1])
        if full is not None and group is not None:  # else it is a group above that of the job, which all jobs share
            limited = full_in is not None and full_in[0] == group[0]
        kill = MemoryKill(
            node=node.name, pid=event.pid, at=seen.at, comm=event.process or "", limited=limited, lines=(line,),
            process_job=None if group is None else group[0], step_id=None if full_in is None else full_in[1],
            held_bytes=held or None, own_group=bool(limited and full and not _SLURMS.search(full[1])),
        )  # fmt: skip
        alike = (n for n, old in enumerate(found) if (old.pid, old.comm) == (kill.pid, kill.comm))
        same = next((n for n in alike if kill.at - found[n].at <= SAME_S), None)
        if same is None:
            found.append(kill)
        else:
            found[same] = _joined(found[same], kill)
    found = [replace(each, limit_bytes=_limit(node, each.process_job, each.step_id)) for each in found]
    for counted in _counted(node):
        if not any(each.process_job == counted.process_job and abs(each.at - counted.at) <= RISE_S for each in found):
            found.append(counted)
    return tuple(found)


def _limit(node: NodeView, process_job: str | None, *steps: str | None) -> int | None:
    """The least of what the job and these steps of it may have."""
    rows = _memory_of(node, process_job) if process_job is not None else []
    return min((row.limit for row in rows if row.step_id in (None, *steps) and row.limit is not None), default=None)


def _memory_of(node: NodeView, process_job: str) -> list[Usage]:
    rows = (seen.usage for seen in node.usages)
    return [row for row in rows if row.resource is Resource.MEMORY and row.job_id == process_job]


def _counted(node: NodeView) -> Iterator[MemoryKill]:
    """Jobs of which a counter of kills rose: of the step, where it tells of one, else of the job's own group."""
    rose: dict[str, list[SeenUsage]] = {}
    for seen in node.usages:
        if seen.usage.resource is Resource.MEMORY and seen.usage.job_id is not None and seen.refused_at is not None:
            rose.setdefault(seen.usage.job_id, []).append(seen)
    for job_id, counters in rose.items():
        line = f"the count of its processes that were killed for memory rose on {node.name}"
        yield MemoryKill(
            node=node.name, pid=None, at=max(each.refused_at or 0.0 for each in counters), process_job=job_id,
            limited=_is_limited(_memory_of(node, job_id)), lines=(line,),
            limit_bytes=_limit(node, job_id, *(each.usage.step_id for each in counters)),
        )  # fmt: skip


def _is_limited(rows: Iterable[Usage]) -> bool | None:
    """Whether the job or a step of it had used up its limit; False where all of its groups say that it never had."""
    known = {row.by_limit for row in rows}
    return True if True in known else False if known == {False} else None


def _joined(one: MemoryKill, other: MemoryKill) -> MemoryKill:
    return replace(
        one,
        lines=tuple(dict.fromkeys((*one.lines, *other.lines))),
        process_job=one.process_job or other.process_job,
        step_id=one.step_id or other.step_id,
        own_group=one.own_group or other.own_group,
        limited=other.limited if one.limited is None else one.limited,
        held_bytes=one.held_bytes or other.held_bytes,
    )


def kills_in_job(kills: Kills, job: JobView, now: float) -> tuple[MemoryKill, ...]:
    """Those of the present run of a job, with what each process was to it, ranks first."""
    there = [name for name in job.job.nodes if name in kills]
    if not there:
        return ()
    who: Who = {
        (each.node, each.process.pid): (each.process.rank, each.process.role)
        for each in job.processes
        if each.node in there
    }
    found = _of_run(kills, job.job, there, now - job.run_age_s, now, who)
    # Several slurmd of one host share a kernel: a process of another of them is no one here.
    numbers = {each.process.pid for each in job.processes}
    return tuple(each if each.role is not None or each.pid in numbers else _with_dead(each, job, now) for each in found)


def _with_dead(kill: MemoryKill, job: JobView, now: float) -> MemoryKill:
    """A kill of a process that is not known by its number, with the rank that ended there at that time, if it was one
    alone."""
    apart_s = RISE_S if not kill.comm else ENDS_S
    gone = [
        rank
        for rank in job.ranks
        if rank.node == kill.node and rank.gone_s is not None and abs(now - rank.gone_s - kill.at) <= apart_s
    ]
    if len(gone) != 1 or kill.comm not in ("", gone[0].process.comm):
        return kill
    process = gone[0].process
    return replace(kill, pid=process.pid, rank=process.rank, role=Role.RANK)


def how_killed(kills: Kills, job: JobView, rank: ProcessView, now: float) -> str:
    """`was killed by the kernel for memory: …`, of this rank; empty where the kernel did not say so."""
    for each in kills_in_job(kills, job, now):
        if (each.node, each.pid) == (rank.node, rank.process.pid) and not why_not(each, job, now):
            return f"was {each.words},"
    return ""


def why_not(kill: MemoryKill, run: JobView | PastRun, now: float) -> str:
    """Why this kill is not what the run ended with, or stands for, in words; empty where nothing speaks against it."""
    if isinstance(run, JobView):
        return f"job {run.job.job_id} has made steps since" if has_stepped_since(run, now - kill.at) else ""
    if run.touched_at is not None and run.touched_at < kill.at:
        return "the run was being ended by slurm-watchdog"
    if run.state == "COMPLETED" or (run.state in ENDED_FROM_OUTSIDE and kill.role is not Role.RANK):
        return f"the run is {run.state}"
    if run.rose_at is not None and run.rose_at > kill.at + READ_LATER_S:
        return "the run made steps since"
    return "" if run.ended_at - kill.at <= ENDS_WITHIN_S else "the run did not end with it"


def kills_in_run(kills: Kills, job: SlurmJob, run: PastRun) -> tuple[MemoryKill, ...]:
    """Those of a run that is over."""
    there = [name for name in run.nodes or job.nodes if name in kills]
    who: Who = {(seat.node, seat.pid): (seat.rank, Role.RANK) for seat in run.seats}
    return _of_run(kills, job, there, run.began_at, run.ended_at + SLACK_S, who)


def _of_run(
    kills: Kills, job: SlurmJob, there: list[str], since: float, until: float,
    who: Who,
) -> tuple[MemoryKill, ...]:  # fmt: skip
    found = []
    for each in (each for node in there for each in kills[node] if each.at <= until):
        rank, role = who.get((each.node, each.pid), (None, None))
        if role is None and (each.process_job is None or each.at < since):
            continue
        if each.process_job in (None, job.process_id):
            found.append(replace(each, rank=rank, role=role))
    return tuple(sorted(found, key=lambda each: (each.role is not Role.RANK, each.at, each.node, each.pid or 0)))
