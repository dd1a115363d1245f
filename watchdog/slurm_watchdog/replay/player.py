"""A trace through the real state, detectors, correlation and policy, on the trace's own clock. It acts on nothing.

What differs from the service: no one answers what detectors want to know (a recording holds the stacks that
were taken), what is allowed is written down and not done, and time ends with the trace. Decisions are those
of the service's own Decider. Where a controller has recorded what it did itself, that is what has happened;
any other trace is of one that only watched, warm from the first line on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count, groupby, islice

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.sums import NodeSums
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.owned_paths import OwnedPaths
from slurm_watchdog.controller.incidents.judge import IncidentChange, Judge
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.actions import Decision
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.incidents import Finding, Incident, IncidentState, Truth
from slurm_watchdog.model.slurm import SlurmView
from slurm_watchdog.parse.training_log.site_patterns import compile_patterns
from slurm_watchdog.replay.decisions import OF_THE_CONTROLLER, ReplayDecisions
from slurm_watchdog.replay.slurm import SlurmListing
from slurm_watchdog.trace import records
from slurm_watchdog.trace.read import Moment, read_moments, typical_interval_s
from slurm_watchdog.trace.records import BadLine, ParseStats, Stack
from slurm_watchdog.trace.to_report import Node

DUMP_DEADLINE_S = 25.0  # Stacks later than that are missing from their dump (evidence.DUMP_DEADLINE_S).


@dataclass
class _Dump:
    begun_at: float
    stacks: dict[str, list[ProcessStack]] = field(default_factory=dict)  # By node.
    wanted: dict[str, int] = field(default_factory=dict)


@dataclass
class StackDumps:
    """Those that are not whole yet, by what agents call the job."""

    tally: ParseStats
    state: ClusterState
    listing: SlurmListing
    _open: dict[str, _Dump] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._open)

    def add_stack(self, record: Stack, now: float) -> None:
        """One process's stacks."""
        try:
            stack = msgspec.convert(record.stack, ProcessStack)
        except msgspec.ValidationError:
            self.tally.ignore("a stack of unknown format")
            return
        job_id, name = str(record.job_id), record.node
        dump = self._open.get(job_id)
        if dump is not None and len(dump.stacks.get(name, ())) >= dump.wanted.get(name, record.of):
            self._end(job_id, now)  # this node is in the next one already
            dump = None
        if dump is None:
            dump = self._open[job_id] = _Dump(now)
        dump.wanted[name] = record.of
        dump.stacks.setdefault(name, []).append(stack)

    def end_those_due(self, now: float) -> None:
        """Hands over the dumps that are whole, or have waited long enough."""
        for job_id in list(self._due(now)):
            self._end(job_id, min(now, self._open[job_id].begun_at + DUMP_DEADLINE_S))

    def _due(self, now: float) -> Iterator[str]:
        for job_id, dump in self._open.items():
            job = self.listing.running(job_id)
            whole = job is not None and all(
                len(dump.stacks.get(name, ())) >= dump.wanted.get(name, 1) for name in job.nodes
            )
            if whole or now - dump.begun_at >= DUMP_DEADLINE_S:
                yield job_id

    def _end(self, process_job_id: str, now: float) -> None:
        dump, job = self._open.pop(process_job_id), self.listing.running(process_job_id)
        if job is not None:
            stacks = tuple(stack for name in sorted(dump.stacks) for stack in dump.stacks[name])
            silent = tuple(name for name in job.nodes if name not in dump.stacks)
            self.state.runs.add_snapshot(job.job_id, job.restarts, stacks, silent, now)


LOOKED_AHEAD = 500  # Moments that are read before the first is judged, to see how often agents report.
SILENT_REPORTS = 3.0  # Silent after so many missing reports, and never sooner than the configuration says.
OF_A_NODE = (records.Proc, records.Gpu, records.Log)  # Most lines of every trace: of one node, and of nothing else.
OF_AN_AGENT = (records.Report, records.Kmsg, records.Mount, records.Checkpoint, *OF_A_NODE)
"""What an agent says again and again."""
NOT_OF_A_NODE = (records.Job, records.Node, records.Fault, BadLine, *OF_THE_CONTROLLER)
LAST_WORDS_S = 7.0  # A trace that ends with its job: what waits for a reason is judged as so much later.
FINE_S = 3600.0  # In a longer stretch without a line, time advances in larger steps.


@dataclass(frozen=True)
class Outcome:
    """What a trace gave."""

    incidents: tuple[Incident, ...]  # That fired, or were pending at the end; in the order of their opening.
    decisions: dict[str, tuple[Decision, ...]]  # By incident.
    decided: tuple[Decision, ...]  # All of them, in the order in which they were made.
    tally: ParseStats
    silent_after_s: float
    ended_at: float


def replay(read: Callable[[int], bytes], config: Config, new_id: Callable[[], str]) -> Outcome:
    """Replays the trace that `read(n)` gives in pieces of at most n bytes. Raises what `read` raises."""
    tally = ParseStats()
    flow = read_moments(read, tally)
    early = list(islice(flow, LOOKED_AHEAD))
    interval_s = typical_interval_s(early) or config.agent.interval
    player = TracePlayer(config, tally, new_id, interval_s)
    for moment in chain(early, flow):
        player.play(moment)
    return player.outcome()


class TracePlayer:
    """One trace while it is played. Moments have to come in order."""

    def __init__(self, config: Config, tally: ParseStats, new_id: Callable[[], str], interval_s: float):
        self.config = config
        self.tally = tally
        self._interval_s = interval_s
        self.silent_after_s = max(config.controller.agent_silent_after, SILENT_REPORTS * interval_s)
        self.state = ClusterState(
            silent_after_s=self.silent_after_s,
            report_lifetime_s=max(config.report_lifetime_s, SILENT_REPORTS * interval_s),
            partitions=config.jobs.partitions,
        )
        patience_of = OwnedPaths(config.jobs, self.state).patience_s
        self.judge = Judge(config, self.state, (), new_id, self._count_failure, patience_of=patience_of)
        self._decisions = ReplayDecisions(
            config,
            self.state,
            self.judge,
            tally,
            new_id,
            on_change=self._keep_change,
        )
        self._listing = SlurmListing(tally, self.silent_after_s)
        self._nodes: dict[str, Node] = {}
        self._sums: dict[tuple[str, str], NodeSums] = {}  # (node, boot) -> what it would have summed up.
        self._listed = SlurmView(jobs=(), nodes=())
        self._mounts: set[str] = set()
        self._own = compile_patterns(config.jobs.progress_patterns)
        self._dumps = StackDumps(tally, self.state, self._listing)
        self._faults: list[records.Fault] = []
        self._seen: dict[str, Incident] = {}
        self._now: float | None = None
        self._recorded = False  # Whether a controller wrote this trace: then it has everything that there was.
        self._judged_until = float("-inf")
        self._over_at = float("-inf")  # When a run of a job was over last.

    # ------------------------------------------------------------------------------------ time

    def play(self, moment: Moment) -> None:
        """Lets the time until this moment go by, takes it over, and judges."""
        own = [record for record in moment.records if isinstance(record, OF_THE_CONTROLLER)]
        if len(own) == len(moment.records):  # between two ticks: there is nothing new to be judged
            self._decisions.follow_controller(own)
            return
        if self._now is not None:
            if self._stood_still(self._now, moment):
                self._judge_at(self._now)
                self.state.runs.grant_grace(moment.t)
                self.state.forget_silence(moment.t)
                self._judged_until = moment.t
            else:
                self._wait(self._now, moment.t)
        self._now = now = moment.t
        for of_controller, part in groupby(moment.records, lambda each: isinstance(each, OF_THE_CONTROLLER)):
            if of_controller:  # in their order: what was asked before Slurm answered was decided before that
                self._decisions.follow_controller(part)
            else:
                self._apply(Moment(now, list(part)))
        if own or not self._is_quiet():
            self._judge_at(now)

    def _is_quiet(self) -> bool:
        return not self.judge.incidents and not self._dumps

    def _stood_still(self, since: float, moment: Moment) -> bool:
        """Whether neither an agent nor Slurm said a word up to this moment: the controller was stalled, or not running.

        A trace that no controller wrote shows that where all nodes that reported fell silent at once, and one of them
        is the first that is heard again, or Slurm's word that a job was started again.
        """
        gap_s = moment.t - since
        if self._recorded:
            return gap_s > self.judge.slurm_patience_s
        again = any(isinstance(each, OF_AN_AGENT) or self._listing.is_new_run(each) for each in moment.records)
        if gap_s <= self.silent_after_s or not again:
            return False
        heard = [node.heard_at for node in self._nodes.values() if node.speaks]
        return bool(heard) and since - min(heard) <= self.silent_after_s

    def _wait(self, since: float, until: float) -> None:
        """The judgements of the ticks between two moments.

        While nothing is wrong one look at the end is enough: a healthy trace of 2,600 s takes 0.3 s so, and
        1.7 s with every tick.
        """
        tick_s = self.config.controller.tick
        if self._is_quiet():
            if until - self._judged_until < tick_s:
                return
            is_fine = self._is_fine_until(since, until - 0.001)
            if not is_fine or until - since > self._interval_s + tick_s:
                self._judge_at(since)
            self._judged_until = until
            if is_fine and self._is_quiet():
                return
        at = since
        while (at := at + _step_s(at - since, tick_s)) < until:
            self._dumps.end_those_due(at)
            self._ask_slurm(at)
            self._judge_at(at)

    def _is_fine_until(self, since: float, until: float) -> bool:
        """Whether nothing will be wrong by then, with what is known up to here."""
        if self._listing.patience_ends(since, until):
            return False
        last = self.state.slurm_at
        self.state.slurm_at = last if self._recorded else until
        findings = self._findings_at(until)
        self.state.slurm_at = last
        return all(finding.truth is not Truth.BAD for finding in findings)

    def outcome(self) -> Outcome:
        """Everything there is to say at the end of the trace."""
        if self._now is not None:
            self._dumps.end_those_due(self._now)
            self._judge_at(self._now)
            if not self._recorded and self._now - self._over_at < LAST_WORDS_S:
                self._judge_at(self._over_at + LAST_WORDS_S)
        for incident in self.judge.incidents:
            self._seen[incident.id] = incident
        decided, by_incident = self._decisions.numbered(), dict[str, list[Decision]]()
        for decision in decided:
            by_incident.setdefault(decision.incident_id, []).append(decision)
        incidents = sorted(self._seen.values(), key=lambda each: (each.opened_at, each.id))
        return Outcome(
            incidents=tuple(_shown(_measured(each, self._faults)) for each in incidents),
            decisions={each.id: tuple(by_incident.get(each.id, ())) for each in incidents},
            decided=decided,
            tally=self.tally,
            silent_after_s=self.silent_after_s,
            ended_at=self._now or 0.0,
        )

    # ------------------------------------------------------------------------------------ taking over

    def _apply(self, moment: Moment) -> None:
        by_node: dict[str, list[records.Any_]] = {}
        damaged: set[str | None] = set()
        slurm_said = False
        for record in moment.records:
            if not isinstance(record, OF_A_NODE):
                if self._take_over_record(record, by_node, damaged):
                    slurm_said = True
                if isinstance(record, NOT_OF_A_NODE):
                    continue
            lines = by_node.get(record.node)
            if lines is None:
                by_node[record.node] = [record]
            else:
                lines.append(record)
        self._listing.note_use(by_node, moment.t)
        for name in by_node.keys() & self._nodes.keys():
            self._nodes[name].heard_at = moment.t
        self._ask_slurm(moment.t, force=slurm_said)
        restarts = {job.process_id: job.restarts for job in self._listing.jobs.values()}
        reports = []
        for name in sorted(by_node):
            node = self._nodes.get(name)
            if node is None:
                node = self._nodes[name] = Node(name, self.tally, self._interval_s, own=self._own)
            node.over = self._listing.over()
            hurt = None in damaged or name in damaged
            reports.append(node.reports(by_node[name], moment.t, damaged=hurt, restarts=restarts, mounts=self._mounts))
        if any(each[-1].mounts for each in reports):
            # A filesystem is taken up when someone is blocked on it: who says so comes before those who answer for it.
            reports.sort(key=lambda each: not any(process.blocked for process in each[-1].processes))
        for report in chain.from_iterable(reports):
            sums = self._sums.setdefault((report.node, report.boot_id), NodeSums())
            self.state.apply_report(sums.add(report, moment.t - report.age_s), moment.t)
            sums.begin()
        for record in moment.records:
            if isinstance(record, records.Stack):
                self._dumps.add_stack(record, moment.t)
        self._dumps.end_those_due(moment.t)

    def _take_over_record(
        self, record: records.Any_ | BadLine, by_node: dict[str, list[records.Any_]], damaged: set[str | None]
    ) -> bool:
        """Takes over what a record says beyond its node. Returns whether it is Slurm's word."""
        if isinstance(record, records.Job):
            over = self._listing.take_job(record)
            if over is not None:
                self._over_at = record.t
                self._forget(over, by_node)
            return True
        if isinstance(record, records.Node):
            self._listing.take_node(record)
            return True
        if isinstance(record, records.Fault):
            self._faults.append(record)
        elif isinstance(record, BadLine):
            damaged.add(record.node)
        elif isinstance(record, records.Report) and record.listed is not None:
            self._recorded = True
        elif isinstance(record, records.Mount):
            self._mounts.add(record.mount)
        return False

    def _forget(self, job_id: str, by_node: dict[str, list[records.Any_]]) -> None:
        """A run of this job is over: who was listed before that, in the same moment, was of that run as well."""
        for node in self._nodes.values():
            node.forget(job_id)
        for name, lines in by_node.items():
            by_node[name] = [each for each in lines if not isinstance(each, records.Proc) or str(each.job_id) != job_id]

    def _ask_slurm(self, now: float, *, force: bool = False) -> None:
        """Slurm's listing, as often as the controller would ask; a recording has a line for each answer."""
        last = self.state.slurm_at
        due = last is None or now - last >= self.config.slurm.poll_interval
        if force or (due and not self._recorded):
            heard = {name: node.heard_at for name, node in self._nodes.items()}
            self._listed = self._listing.view(heard, now)
            self.state.apply_slurm(self._listed, now, now)
        # Only a recording has all nodes: of what would be left for a job a trace says nothing else.
        self.state.slurm_nodes = self._listed.nodes if self._recorded else ()

    # ------------------------------------------------------------------------------------ judging

    def _findings_at(self, now: float) -> list[Finding]:
        for name, node in self._nodes.items():
            if not node.speaks:
                self.state.excuse(name, now)
        return self.judge.detect(now)

    def _judge_at(self, now: float) -> None:
        self._judged_until = now
        for change in self.judge.conclude(self._findings_at(now), now, now, self._decisions.acting()):
            self._keep_change(change, now)
        self._decisions.decide(now)

    def _keep_change(self, change: IncidentChange, now: float) -> None:
        incident = change.after
        if incident.state is not IncidentState.PENDING:
            self._seen[incident.id] = incident
        if incident.state is IncidentState.RESOLVED:
            self.judge.settle(change, now)

    def _count_failure(self, kind: str) -> None:
        self.tally.ignore(f"{kind} failed at a moment of this trace: a defect of ours")


def numbered_ids() -> Callable[[], str]:
    """Ids that are the same in every replay: r1, r2, …"""
    numbers: Iterator[int] = count(1)
    return lambda: f"r{next(numbers)}"


def _step_s(waited_s: float, tick_s: float) -> float:
    return tick_s if waited_s < FINE_S else max(tick_s, 0.1 * waited_s)


def _measured(incident: Incident, faults: Iterable[records.Fault]) -> Incident:
    """The incident, found so long after the newest fault of its job and node; as it was where no fault is marked."""
    if incident.fired_at is None:
        return incident
    nodes = {culprit.node for culprit in incident.culprits} | set(incident.exclude_nodes)
    begun = [
        fault.t
        for fault in faults
        if fault.t <= incident.fired_at
        and (fault.job_id is None or not incident.job_ids or str(fault.job_id) in incident.job_ids)
        and (fault.node is None or not nodes or fault.node in nodes)
    ]
    if not begun:
        return incident
    return replace(incident, detected_after_s=incident.fired_at - max(begun))


_STAND_IN = re.compile(r"pid -\d+ (?=on )")


def _shown(incident: Incident) -> Incident:
    """The incident without the pids that stand for those that the trace does not tell."""
    if all(culprit.pid is None or culprit.pid >= 0 for culprit in incident.culprits):
        return incident
    return replace(
        incident,
        culprits=tuple(
            replace(each, pid=None) if each.pid is not None and each.pid < 0 else each for each in incident.culprits
        ),
        summary=_STAND_IN.sub("", incident.summary),
        facts=tuple(_STAND_IN.sub("", fact) for fact in incident.facts),
    )
