"""One collection of evidence: what stays of each rank while it is made, and how it is shown when it is judged.

A thousand ranks share most of their stacks: each frame is kept once. Nothing is asked and nothing written
here: `collect` does both, `diagnose` judges.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from msgspec.structs import replace

from slurm_watchdog.analysis.ras_records import JobProcesses, ras_facts, ras_records
from slurm_watchdog.base.structs import picked
from slurm_watchdog.base.text import duration
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.controller.state.run import has_ranks
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.diagnose.job import Diagnosis, JobEvidence
from slurm_watchdog.diagnose.outliers import RankFacts
from slurm_watchdog.diagnose.stacks.vote import vote
from slurm_watchdog.model import documents
from slurm_watchdog.model.cluster_view import JobView, StackSnapshot
from slurm_watchdog.model.collective_records import CollectiveRecord, RasAnswer, RecordSet
from slurm_watchdog.model.evidence import LockWait, OwnWords, ProcessStack, RankEvidence, ThreadStack
from slurm_watchdog.model.incidents import Culprit, Incident, IncidentKind
from slurm_watchdog.model.observations import Role
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.parse.flight_recorder import MAX_COMMUNICATORS, MAX_MEMBERS, MAX_PEERS, MAX_WAITS
from slurm_watchdog.parse.nccl_ras import bounded

T = TypeVar("T")
FLIGHT_RECORDER = "the Flight Recorder"
RAS = "NCCL's RAS"
MAX_OWN_WORDS = 64  # Of a run; who failed first is what is asked.
DUMPS = 3  # Of each process, so far apart that what moves is seen to move.
KNOWN_COUNT = 2  # So many may have been taken before, for the detectors: one at least is the evidence's own.


@dataclass(eq=False)
class Collected:
    """One collection: its progress while it runs, its diagnosis when it is over."""

    id: str
    job: SlurmJob
    began: float  # On the monotonic clock: when the nodes were asked; until then, when it was wanted.
    began_at: float  # The same as a date.
    nodes: dict[str, documents.NodeRow]
    dumps_asked: int = DUMPS  # Fewer where some are known already: see `dumps_to_ask`.
    known: tuple[StackSnapshot, ...] = ()  # Those, with their ages when the nodes were asked.
    incident_id: str | None = None  # With which incident it is stored.
    shared_with: set[str] = field(default_factory=set)  # Other incidents that it counts for.
    begun: bool = False  # Nodes were asked. Until then whatever it will find is newer than now.
    hurry: asyncio.Event = field(default_factory=asyncio.Event)  # Someone waits: it begins after the one before it.
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    diagnosis: Diagnosis | None = None
    took_s: float | None = None
    error: str | None = None  # Why it was given up.
    kept_bytes: int = 0
    not_kept: int = 0  # Nodes whose answer was judged, and was too much to be kept.
    lost: bool = False  # The journal could not take a part of it: it is no evidence that anybody could look at.
    packed: list[str] = field(default_factory=list)  # What came before there was an incident to keep it with.
    rows: list[RankRow] = field(default_factory=list)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    dumps: dict[tuple[str, int], tuple[float, CollectiveRecord]] = field(default_factory=dict)
    """(node, rank) -> when its Flight Recorder dump was written (monotonic, at the earliest), and what it says."""
    own_words: list[tuple[str, int, float, str]] = field(default_factory=list)
    """(node, rank, when on the monotonic clock, why it ended)."""
    ras: RasAnswer | None = None  # What NCCL's RAS said of the whole job.
    ras_nodes: list[str] = field(default_factory=list)  # Nodes that may ask it, the first first.
    ras_failed: bool = False  # The first found it, and got no answer.
    addresses: dict[str, set[str]] = field(default_factory=dict)  # Node -> addresses at which ranks have connections.
    shared: SharedFrames | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.job.job_id, self.job.restarts

    def note(self, node: str, **changes: Any) -> None:
        """How far a node is now."""
        self.nodes[node] = replace(self.nodes[node], **changes)

    def counts_for(self, opened_at: float) -> bool:
        """Whether it is evidence of a trouble that began at this date: what was taken before it shows another state."""
        return self.error is None and not self.lost and (not self.begun or self.began_at >= opened_at)

    def sentence(self) -> str:
        """What came, in one line for a timeline."""
        answered = [node for node in self.nodes.values() if node.state == "answered"]
        ranks = sum(node.ranks for node in answered)
        undumped = sum(node.undumped for node in answered)
        text = f"evidence of {ranks} rank{'' if ranks == 1 else 's'} from {len(answered)} of {len(self.nodes)} nodes"
        if undumped:
            text += f", {undumped} of them could not be dumped"
        if self.not_kept:
            text += f" (of {self.not_kept} of these nodes too much to be kept in the journal)"
        failed = [f"{name}: {node.error}" for name, node in self.nodes.items() if node.state == "failed"]
        return text + (f"; {'; '.join(failed[:3])}{' …' if len(failed) > 3 else ''}" if failed else "")


@dataclass(frozen=True)
class RankRow:
    """What stays of one process."""

    node: str
    evidence: RankEvidence  # Without what is only kept, and with frames that all share.
    syscall: str | None = None  # In which its main thread was.


class SharedFrames:
    """A thousand ranks stand in a few places: equal frames, stacks, variables and lists of ranks are kept once."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def _once(self, value: T) -> T:
        return cast("T", self._kept.setdefault(value, value))

    def of(self, rank: RankEvidence) -> RankEvidence:
        dumps = tuple(replace(d, threads=tuple(self._thread(t) for t in d.threads)) for d in rank.dumps[:DUMPS])
        kept = {"dumps": dumps, "environment": tuple(map(self._once, rank.environment))}
        return replace(rank, **kept, sockets=(), threads=(), status=(), problems=())

    def record(self, record: CollectiveRecord) -> CollectiveRecord:
        """The same, of which a node may say more than an agent does."""
        places = tuple(
            replace(
                each,
                waits=each.waits[:MAX_WAITS],
                members=self._once(each.members) if len(each.members) <= MAX_MEMBERS else (),
            )
            for each in record.communicators[:MAX_COMMUNICATORS]
        )
        return replace(record, communicators=places, peers=record.peers[:MAX_PEERS])

    def _thread(self, thread: ThreadStack) -> ThreadStack:
        return replace(thread, frames=self._once(tuple(map(self._once, thread.frames))))


def collectives_of(found: Collected, view: JobView, now: float) -> tuple[RecordSet, ...]:
    """What the ranks recorded of their collectives, each written since the last step of the job. A node speaks for the
    ranks that are known to be on it. Where two programs of a job number their ranks alike, no one knows whose
    dump is in a file."""
    alive = Counter(rank.process.rank for rank in view.living_ranks)
    known = {(rank.node, rank.process.rank) for rank in view.ranks if alive[rank.process.rank] < 2}
    age_s = view.progress.age_s if view.progress is not None else view.run_age_s
    fresh = [record for key, (at, record) in found.dumps.items() if key in known and now - at <= age_s]
    sets = [RecordSet(source=FLIGHT_RECORDER, records=tuple(fresh))] if fresh else []
    if found.ras is not None:
        processes = processes_of(view, found.addresses)
        answer = replace(found.ras, communicators=bounded(found.ras.communicators))
        facts = ras_facts(answer, processes)
        sets.append(RecordSet(source=RAS, records=ras_records(answer, processes), facts=facts))
    return tuple(sets)


def processes_of(view: JobView, addresses: Mapping[str, Set[str]]) -> JobProcesses:
    """The ranks as NCCL's RAS knows processes. An address that two nodes have (of a bridge) is of neither."""
    ranks = {
        rank.process.rank: (rank.node, rank.process.container_pid or rank.process.pid)
        for rank in view.ranks
        if rank.process.rank is not None
    }
    shared = Counter(host for hosts in addresses.values() for host in hosts)
    return JobProcesses(ranks, {host: node for node, hosts in addresses.items() for host in hosts if shared[host] == 1})


def addresses_of(ranks: Iterable[RankEvidence]) -> set[str]:
    """Of a node, in its ranks' network: where their connections begin, which is where NCCL says that they are."""
    hosts = {each.local.rpartition(":")[0].strip("[]") for rank in ranks for each in rank.sockets}
    return {host for host in hosts if host not in ("::", "::1", "0.0.0.0") and not host.startswith("127.")}


def own_words_of(found: Collected, view: JobView, now: float) -> tuple[OwnWords, ...]:
    """What ranks wrote of their own ends since the last step, the first one first; of ranks that are known to be, or to
    have been, on that node."""
    known = {(rank.node, rank.process.rank) for rank in view.ranks}
    age_s = view.progress.age_s if view.progress is not None else view.run_age_s
    since = now - age_s - view.read_later_s
    fresh = [each for each in found.own_words if each[:2] in known and each[2] >= since]
    return tuple(
        OwnWords(node=node, rank=rank, age_s=max(0.0, now - at), text=text)
        for node, rank, at, text in sorted(fresh, key=lambda each: each[2])[:MAX_OWN_WORDS]
    )


def main_call(rank: RankEvidence) -> str | None:
    """The system call in which the main thread was; None if no one saw it."""
    return next((thread.syscall for thread in rank.threads if thread.thread_id == rank.pid), None)


def dumps_to_ask(view: JobView | None) -> tuple[int, tuple[StackSnapshot, ...]]:
    """How many dumps a collection still needs, and those that are known and count: unless someone moved in them, for
    then what they show is over."""
    if view is None:
        return DUMPS, ()
    # What detectors have had dumped since the last step, oldest first.
    known = view.snapshots if view.row is None or view.row.over else view.row.snapshots
    if not known or vote(known, view.ranks).moving:
        return DUMPS, ()
    return DUMPS - min(len(known), KNOWN_COUNT), known


def gathered_of(found: Collected, view: JobView, now: float) -> JobEvidence:
    """All that the nodes answered, as the vote wants it."""
    ranks = [row for row in found.rows if row.evidence.role is Role.RANK and row.evidence.rank is not None]
    gpus = {(each.rank, each.pid): each.view.gpu for each in view.gpus}
    facts = [
        RankFacts(
            rank=row.evidence.rank or 0,
            node=row.node,
            gpu=gpus.get((row.evidence.rank or 0, row.evidence.pid)),
            environment=row.evidence.environment,
        )
        for row in ranks
    ]
    locks: dict[tuple[str, int], LockWait] = {
        (row.node, row.evidence.pid): row.evidence.lock for row in found.rows if row.evidence.lock is not None
    }
    silent = {name: node.error or "no answer" for name, node in found.nodes.items() if node.state == "failed"}
    collectives = collectives_of(found, view, now)
    return JobEvidence(
        snapshots=_with_known(found, view, now), facts=tuple(facts), settings=found.settings, locks=locks,
        silent=silent, collectives=collectives,
    )  # fmt: skip


def _with_known(found: Collected, view: JobView, now: float) -> tuple[StackSnapshot, ...]:
    """The dumps that were known when the nodes were asked, and those that they took; the former alone where the others
    add nothing but a rank that could not be compared any more."""
    later_s = now - found.began
    known = tuple(replace(each, age_s=each.age_s + later_s) for each in found.known)
    whole = (*known, *_snapshots(found, now))
    return known if known and _is_whole(known, view) and not _is_whole(whole, view) else whole


def _is_whole(snapshots: tuple[StackSnapshot, ...], view: JobView) -> bool:
    voted = vote(snapshots, view.ranks)
    return voted.moving is not None and not voted.missing


def _snapshots(found: Collected, now: float) -> list[StackSnapshot]:
    """The dumps of all ranks, put together again, oldest first."""
    dumps: list[list[ProcessStack]] = []
    ages: list[float] = []
    for row in found.rows:
        rank, current = row.evidence, dict[int, ThreadStack]()
        for at, dump in enumerate(rank.dumps):
            if at == len(dumps):
                dumps.append([])
                ages.append(now - found.began - dump.after_s)
            kept = {number: current[number] for number in dump.unchanged if number in current}
            current = kept | {thread.thread_id: thread for thread in dump.threads}
            dumps[at].append(
                picked(
                    ProcessStack, rank, *("pid", "start_ticks", "role", "rank", "local_rank"),
                    node=row.node, job_id=found.job.job_id, threads=tuple(current.values()), error=dump.error,
                    state=dump.state, cpu_s=dump.cpu_s, main_cpu_s=dump.main_cpu_s, syscall=row.syscall,
                )
            )  # fmt: skip
    silent = tuple(name for name, node in found.nodes.items() if node.state == "failed")
    return [
        StackSnapshot(age_s=max(0.0, age_s), stacks=tuple(stacks), silent_nodes=silent)
        for age_s, stacks in zip(ages, dumps, strict=True)
    ]


def diagnosis_of(found: Collected) -> documents.Diagnosis:
    """The diagnosis of a collection that is over."""
    diagnosis = found.diagnosis
    assert diagnosis is not None
    is_hang = diagnosis.kind == IncidentKind.COLLECTIVE_HANG
    return picked(
        documents.Diagnosis, diagnosis, "job_id", "ranks", "missing", "is_hang", "summary",
        kind=(is_hang and diagnosis.stack_class) or diagnosis.kind,
        incident_kind=diagnosis.kind,
        groups=tuple(picked(documents.Group, each, hosts=each.nodes) for each in diagnosis.groups),
        culprits=_suspects(diagnosis.culprits),
        undumped=_suspects(diagnosis.undumped),
        differences=tuple(picked(documents.Difference, each) for each in diagnosis.differences),
        filesystems=tuple(picked(documents.FilesystemVerdict, each) for each in diagnosis.filesystems),
        hints=tuple(picked(documents.Hint, each) for each in diagnosis.hints),
        nodes=tuple(found.nodes.values()),
        taken_at=found.began_at,
    )  # fmt: skip


def _suspects(culprits: Iterable[Culprit]) -> tuple[documents.Suspect, ...]:
    return tuple(picked(documents.Suspect, each, host=each.node) for each in culprits)


def progress_of(found: Collected, now: float) -> documents.DiagnosisProgress:
    """How far a collection is, node by node, with its diagnosis once it is over."""
    over = found.finished.is_set()
    return documents.DiagnosisProgress(
        id=found.id,
        job_id=found.job.job_id,
        state="done" if over else "collecting",
        age_s=now - found.began if found.took_s is None else found.took_s,
        nodes=tuple(found.nodes.values()),
        diagnosis=diagnosis_of(found) if over and found.diagnosis is not None else None,
    )


def follows(diagnosis: Diagnosis, incident: Incident, since_s: float) -> Diagnosis:
    """The diagnosis as what was seen after the verdict of an incident that began `since_s` seconds before. Of a job
    that stood, and makes steps or works by now, it says when that was seen: its stacks may be those of a job that is
    well. Where it identifies no one, or another rank, it says that the verdict did."""
    named = {(each.node, each.rank) for each in incident.culprits if each.rank is not None}
    now = {(each.node, each.rank) for each in diagnosis.culprits if each.rank is not None}
    summary = diagnosis.summary
    if diagnosis.is_hang is False and not spec_of(incident.kind).steps_continue:
        when = f"{duration(max(0.0, since_s))} after this incident began"
        summary += f" This was seen {when}: stacks that were taken by then may show nothing of it."
    elif diagnosis.lacks and incident.culprits:
        summary = f"What was collected after the verdict adds nothing to it: {diagnosis.lacks}."
    elif named and now and not named & now:
        summary += f" The verdict, from what was seen before, named {_ranks(named)}."
    return replace(diagnosis, summary=summary)


def _ranks(named: Set[tuple[str | None, int | None]]) -> str:
    return ", ".join(f"rank {rank} on {node}" for node, rank in sorted(named, key=lambda each: each[1] or 0))


def ras_nodes(found: Collected, cluster: ClusterState, incidents: Iterable[Incident], now: float) -> list[str]:
    """Nodes that may ask, the first first: they report and have a rank. One that `incidents` suspect comes last: what
    it has may hang."""
    run = cluster.runs.get(found.job.job_id)
    suspected = {culprit.node for incident in incidents for culprit in incident.culprits}
    nodes = [
        node for node in found.job.nodes if cluster.agents.reports(node, now) and (run is None or has_ranks(run, node))
    ]
    return sorted(nodes, key=lambda node: node in suspected)


def second_node(found: Collected) -> str | None:
    """Who asks once more; None where there is an answer, or no one listened on the first: the job has none."""
    if found.ras is not None or len(found.ras_nodes) < 2:
        return None
    first, second = found.ras_nodes[:2]
    return second if found.ras_failed or found.nodes[first].state == "failed" else None
