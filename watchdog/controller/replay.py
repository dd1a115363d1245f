"""A trace through the real state, detectors, correlation and policy, on the trace's own clock. It acts on nothing.

What differs from the service: nobody answers what detectors want to know (a recording holds the stacks that were taken), the
controller counts as warm from the first line on, and time ends with the trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice

import msgspec
from msgspec.structs import replace

from watchdog.config import Config
from watchdog.controller.judge import Change, Judge
from watchdog.controller.policy import ACTIONS, Limits, Situation, decide, is_final, is_news
from watchdog.controller.run import ACTIVE_STATES
from watchdog.controller.state import ClusterState
from watchdog.model import (
    Action,
    Decision,
    Incident,
    IncidentState,
    Kind,
    ProcessStack,
    SlurmJob,
    SlurmNode,
    SlurmView,
    Truth,
    Verdict,
)
from watchdog.trace import records
from watchdog.trace.read import Moment, in_order, moments, read_lines, read_records, typical_interval_s
from watchdog.trace.records import Damage, Tally
from watchdog.trace.reports import Node

LOOKED_AHEAD = 500
"""Moments that are read before the first is judged, to see how often agents report."""
SILENT_REPORTS = 3.0
"""A node is silent after so many reports that did not come, and never sooner than the configuration says."""
FINE_S = 3600.0
"""In a longer stretch without a line, time goes on in larger steps."""
DUMP_PATIENCE_S = 25.0
"""Stacks of a dump that have not come by then are missing from it."""
JOBLESS = "FUTURE"
"""The state of a node that no running job has and of which a trace says no more: it may rightly have no agent."""


@dataclass(frozen=True)
class Outcome:
    """What a trace gave."""

    incidents: tuple[Incident, ...]
    """That fired, or were pending at the end; in the order of their opening."""
    decisions: dict[str, tuple[Decision, ...]]
    """By incident."""
    tally: Tally
    silent_after_s: float
    ended_at: float


@dataclass
class _Dump:
    begun_at: float
    stacks: dict[str, list[ProcessStack]] = field(default_factory=dict)
    wanted: dict[str, int] = field(default_factory=dict)


def replay(read: Callable[[int], bytes], config: Config, new_id: Callable[[], str]) -> Outcome:
    """Replays the trace that `read(n)` gives in pieces of at most n bytes. Raises what `read` raises."""
    tally = Tally()
    flow = moments(in_order(read_records(read_lines(read), tally), tally))
    early = list(islice(flow, LOOKED_AHEAD))
    interval_s = typical_interval_s(early) or config.agent.interval
    player = Player(config, tally, new_id, interval_s)
    for moment in chain(early, flow):
        player.play(moment)
    return player.outcome()


class Player:
    """One trace while it is played. Moments have to come in order."""

    def __init__(self, config: Config, tally: Tally, new_id: Callable[[], str], interval_s: float):
        self.config = config
        self.tally = tally
        self._interval_s = interval_s
        self.silent_after_s = max(config.controller.agent_silent_after, SILENT_REPORTS * interval_s)
        self.state = ClusterState(
            silent_after_s=self.silent_after_s,
            report_lifetime_s=max(config.controller.report_lifetime, SILENT_REPORTS * interval_s),
            partitions=config.jobs.partitions,
        )
        self.judge = Judge(config, self.state, (), new_id, self._count_failure)
        self._book = _Book(config, self.state, self.judge)
        self._new_id = new_id
        self._jobs: dict[str, SlurmJob] = {}
        self._told_nodes: dict[str, SlurmNode] = {}
        self._used_nodes: dict[str, set[str]] = {}
        """Job -> nodes, of jobs whose line does not name any."""
        self._active_since: dict[str, float] = {}
        self._nodes: dict[str, Node] = {}
        self._mounts: set[str] = set()
        self._dumps: dict[str, _Dump] = {}
        self._faults: list[records.Fault] = []
        self._seen: dict[str, Incident] = {}
        self._now: float | None = None
        self._recorded = False
        """Whether a controller wrote this trace: then it has everything that there was."""
        self._looked_at = float("-inf")

    # ------------------------------------------------------------------------------------ time

    def play(self, moment: Moment) -> None:
        """Lets the time until this moment go by, takes it over, and judges."""
        if self._now is not None:
            self._wait(self._now, moment.t)
        self._now = now = moment.t
        self._apply(moment)
        if not self._quiet():
            self._judge(now)

    def _quiet(self) -> bool:
        return not self.judge.incidents and not self._dumps

    def _wait(self, since: float, until: float) -> None:
        """The judgement of the last moment and of the ticks from there to the next one.

        While nothing is wrong, one look at the end is enough: what was wrong before and is not mended by a report is wrong then,
        too, as long as nobody has fallen silent.
        """
        tick_s, before = self.config.controller.tick, until - 0.001
        if self._recorded and until - since > self.judge.slurm_patience_s:
            # Neither an agent nor Slurm said a word: the controller stood still, or was not running.
            self._judge(since)
            self.state.grant_grace(until)
            self.state.forget_silence(until)
            self._looked_at = until
            return
        if self._quiet():
            if until - self._looked_at < tick_s:
                return
            fine = not self._goes_bad(since, before)
            if not fine or until - since > self._interval_s + tick_s:
                self._judge(since)
            self._looked_at = until
            if fine and self._quiet():
                return
        at = since
        while (at := at + _step_s(at - since, tick_s)) < until:
            self._flush_dumps(at)
            self._ask_slurm(at)
            self._judge(at)

    def _goes_bad(self, since: float, until: float) -> bool:
        """Whether anything would be wrong by then, with what is known up to here."""
        if any(since < at + self.silent_after_s <= until for at in self._active_since.values()):
            return True  # nodes that have not reported yet begin to count as silent
        last = self.state.slurm_at
        self.state.slurm_at = last if self._recorded else until
        findings = self.judge.look(until)
        self.state.slurm_at = last
        return any(finding.truth is Truth.BAD for finding in findings)

    def outcome(self) -> Outcome:
        """Everything there is to say at the end of the trace."""
        if self._now is not None:
            self._flush_dumps(self._now)
            self._judge(self._now)
        for incident in self.judge.incidents:
            self._seen[incident.id] = incident
        incidents = sorted(self._seen.values(), key=lambda each: (each.opened_at, each.id))
        return Outcome(
            incidents=tuple(_shown(_measured(each, self._faults)) for each in incidents),
            decisions={each.id: tuple(self._book.decisions.get(each.id, ())) for each in incidents},
            tally=self.tally,
            silent_after_s=self.silent_after_s,
            ended_at=self._now or 0.0,
        )

    # ------------------------------------------------------------------------------------ taking over

    def _apply(self, moment: Moment) -> None:
        by_node: dict[str, list[records.Any_]] = {}
        damaged: set[str | None] = set()
        jobs_said = False
        for record in moment.records:
            if isinstance(record, records.Job):
                self._take_job(record)
                jobs_said = True
            elif isinstance(record, records.Node):
                self._told_nodes[record.node] = SlurmNode(
                    name=record.node, address="", state=record.state, reason=record.reason
                )
                jobs_said = True
            elif isinstance(record, records.Fault):
                self._faults.append(record)
            elif isinstance(record, Damage):
                damaged.add(record.node)
            else:
                by_node.setdefault(record.node, []).append(record)
                if isinstance(record, records.Report) and record.processes is not None:
                    self._recorded = True
                if isinstance(record, records.Mount):
                    self._mounts.add(record.mount)
        self._note_used_nodes(by_node)
        self._ask_slurm(moment.t, force=jobs_said)
        restarts = {job.process_id: job.restarts for job in self._jobs.values()}
        reports = []
        for name in sorted(by_node):
            node = self._nodes.get(name)
            if node is None:
                node = self._nodes[name] = Node(name, self.tally, self._interval_s)
            hurt = None in damaged or name in damaged
            reports.append(
                node.reports(by_node[name], moment.t, damaged=hurt, restarts=restarts, mounts=self._mounts)
            )
        # A filesystem is taken up when somebody is blocked on it: who says so comes before those who answer for it.
        reports.sort(key=lambda each: not any(process.blocked for process in each[-1].processes))
        for report in chain.from_iterable(reports):
            self.state.apply_report(report, moment.t)
        self._take_stacks(by_node, moment.t)

    def _take_job(self, record: records.Job) -> None:
        job_id = str(record.job_id)
        old = self._jobs.get(job_id)
        if old is None and record.state is None:
            self.tally.ignore("a job whose state was never said")
            return
        said = {
            "state": None if record.state is None else record.state.upper(),
            "nodes": None if record.nodes is None else tuple(record.nodes),
            "restarts": record.restarts,
            "name": record.name,
            "user": record.user,
            "batch_host": record.batch_host,
        }
        fields = {name: value for name, value in said.items() if value is not None}
        job = SlurmJob(job_id=job_id, **fields) if old is None else replace(old, **fields)  # type: ignore[arg-type]
        if record.more:
            try:
                job = msgspec.convert({**msgspec.to_builtins(job), **record.more, "job_id": job_id}, SlurmJob)
            except msgspec.ValidationError:
                self.tally.ignore("`more` that is no SlurmJob of ours")
        over = old is not None and (old.restarts != job.restarts or job.state not in ACTIVE_STATES)
        if over:
            for node in self._nodes.values():
                node.forget(job.process_id)
        self._jobs[job_id] = job

    def _note_used_nodes(self, by_node: dict[str, list[records.Any_]]) -> None:
        """Where a job without a list of nodes has processes, and what is said of jobs that nobody knows."""
        known = {job.process_id: job for job in self._jobs.values()}
        for name, said in by_node.items():
            for record in said:
                if isinstance(record, (records.Proc, records.Log)) and record.job_id is not None:
                    job = known.get(str(record.job_id))
                    if job is None:
                        self.tally.ignore(
                            f"a {_kind(record)} line about a job that no job line has named yet"
                        )
                    elif not job.nodes:
                        self._used_nodes.setdefault(job.job_id, set()).add(name)

    def _ask_slurm(self, now: float, *, force: bool = False) -> None:
        """Slurm's listing as the trace has it, as often as the controller would ask. A recording has a line for each answer."""
        last = self.state.slurm_at
        due = last is None or now - last >= self.config.slurm.poll_interval
        if not force and (self._recorded or not due):
            return
        jobs = []
        states = dict.fromkeys(self._nodes, JOBLESS)
        for job in self._jobs.values():
            if not job.nodes and job.job_id in self._used_nodes:
                job = replace(job, nodes=tuple(sorted(self._used_nodes[job.job_id])))
            jobs.append(job)
            if job.state in ACTIVE_STATES:
                since = self._active_since.setdefault(job.job_id, now)
                states.update(dict.fromkeys(self._expected(job.nodes, since, now), "ALLOCATED"))
            else:
                self._active_since.pop(job.job_id, None)
        nodes = {name: SlurmNode(name=name, address="", state=state) for name, state in states.items()}
        nodes.update(self._told_nodes)
        self.state.apply_slurm(SlurmView(jobs=tuple(jobs), nodes=tuple(nodes.values())), now, now)

    def _expected(self, nodes: Sequence[str], since: float, now: float) -> Iterator[str]:
        """Those of a job's nodes that should have reported by now: in many traces nodes only speak while a job runs there."""
        for name in nodes:
            node = self._nodes.get(name)
            if now - since > self.silent_after_s or (node is not None and node.heard_at >= since):
                yield name

    def _take_stacks(self, by_node: dict[str, list[records.Any_]], now: float) -> None:
        for name, said in by_node.items():
            for record in said:
                if not isinstance(record, records.Stack):
                    continue
                try:
                    stack = msgspec.convert(record.stack, ProcessStack)
                except msgspec.ValidationError:
                    self.tally.ignore("a stack that is none of ours")
                    continue
                job_id = str(record.job_id)
                dump = self._dumps.get(job_id)
                if dump is not None and len(dump.stacks.get(name, ())) >= dump.wanted.get(name, record.of):
                    self._end_dump(job_id, now)  # this node is in the next one already
                    dump = None
                if dump is None:
                    dump = self._dumps[job_id] = _Dump(now)
                dump.wanted[name] = record.of
                dump.stacks.setdefault(name, []).append(stack)
        self._flush_dumps(now)

    def _flush_dumps(self, now: float) -> None:
        """Dumps that are whole, or have waited long enough."""
        jobs = {job.process_id: job for job in self._jobs.values()}
        for job_id, dump in list(self._dumps.items()):
            job = jobs.get(job_id)
            whole = job is not None and all(
                len(dump.stacks.get(name, ())) >= dump.wanted.get(name, 1) for name in job.nodes
            )
            if whole or now - dump.begun_at >= DUMP_PATIENCE_S:
                self._end_dump(job_id, min(now, dump.begun_at + DUMP_PATIENCE_S))

    def _end_dump(self, process_job_id: str, now: float) -> None:
        dump = self._dumps.pop(process_job_id)
        for job in self._jobs.values():
            if job.process_id == process_job_id:
                stacks = tuple(stack for name in sorted(dump.stacks) for stack in dump.stacks[name])
                silent = tuple(name for name in job.nodes if name not in dump.stacks)
                self.state.add_snapshot(job.job_id, job.restarts, stacks, silent, now)

    # ------------------------------------------------------------------------------------ judging

    def _judge(self, now: float) -> None:
        self._looked_at = now
        findings = self.judge.look(now)
        for change in self.judge.conclude(findings, now, now):
            self._note(change, now)
        self._book.decide(now, self._new_id)

    def _note(self, change: Change, now: float) -> None:
        incident = change.after
        if incident.state is not IncidentState.PENDING:
            self._seen[incident.id] = incident
        if incident.state is IncidentState.RESOLVED:
            self.judge.settle(change, now)

    def _count_failure(self, kind: Kind) -> None:
        self.tally.ignore(f"{kind} failed at a moment of this trace: a defect of ours")


@dataclass
class _Book:
    """What would have been done: the decisions, as the journal would hold them."""

    config: Config
    state: ClusterState
    judge: Judge
    decisions: dict[str, list[Decision]] = field(default_factory=dict)
    _allowed: list[Decision] = field(default_factory=list)

    def decide(self, now: float, new_id: Callable[[], str]) -> None:
        """Decides about every incident that fires and that nothing else explains, where there is news."""
        for incident in self.judge.incidents:
            if incident.state is not IncidentState.FIRING or incident.inhibited_by is not None:
                continue
            acts = ACTIONS.get(incident.kind, Action.NONE) is not Action.NONE
            jobs: Sequence[str | None] = incident.jobs_now if acts else incident.jobs_now[:1]
            for job_id in jobs or (None,):
                job = None if job_id is None else self.state.jobs.get(job_id)
                mine = self.decisions.setdefault(incident.id, [])
                earlier = [d for d in mine if d.fence is None or d.fence.job_id == job_id]
                if any(is_final(each) for each in earlier):
                    continue
                decision = decide(incident, self._situation(incident, job, now), limits_of(self.config), "")
                if is_news(decision, earlier):
                    decision = replace(decision, id=new_id())
                    mine.append(decision)
                    if decision.verdict is Verdict.ALLOWED and decision.action is not Action.NONE:
                        self._allowed.append(decision)

    def _situation(self, incident: Incident, job: SlurmJob | None, now: float) -> Situation:
        view = self.state.job_view(job.job_id, now) if job is not None else None
        open_ones = self.judge.incidents
        firing = [i for i in open_ones if i.kind is incident.kind and i.state is IncidentState.FIRING]
        nodes = self.state.known_nodes()
        return Situation(
            now_wall=now,
            mode=self.config.mode_of(incident.kind),
            job=job,
            paused=None,
            blind=None,
            recent=tuple(self._allowed),
            busy=False,
            running_jobs=sum(1 for each in self.state.jobs.values() if each.state in ACTIVE_STATES),
            jobs_in_trouble=len({job_id for i in firing if i.inhibited_by is None for job_id in i.job_ids}),
            nodes_known=len(nodes),
            nodes_silent=len(nodes) - len(self.state.reporting_nodes(now)),
            mounts_stalled=tuple(
                mount
                for other in open_ones
                if other.kind is Kind.FILESYSTEM_OUTAGE and set(other.job_ids) & set(incident.job_ids)
                for mount in other.mounts
            ),
            step=view.progress.step if view is not None and view.progress is not None else None,
        )


def limits_of(config: Config) -> Limits:
    """The policy's limits as the configuration has them."""
    policy = config.policy
    return Limits(
        cooldown_s=policy.cooldown,
        attempts=policy.attempts,
        budget=policy.budget,
        budget_percent=policy.budget_percent,
        budget_window_s=policy.budget_window,
        storm_jobs=policy.storm_jobs,
        storm_nodes_percent=policy.storm_nodes_percent,
        max_excluded_nodes=policy.max_excluded_nodes,
        opt_out_comment=config.jobs.opt_out_comment,
    )


def numbered_ids() -> Callable[[], str]:
    """Ids that are the same in every replay: r1, r2, …"""
    numbers: Iterator[int] = count(1)
    return lambda: f"r{next(numbers)}"


def _step_s(waited_s: float, tick_s: float) -> float:
    return tick_s if waited_s < FINE_S else max(tick_s, 0.1 * waited_s)


def _kind(record: records.Record) -> str:
    return str(record.__struct_config__.tag)


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
            replace(each, pid=None) if each.pid is not None and each.pid < 0 else each
            for each in incident.culprits
        ),
        summary=_STAND_IN.sub("", incident.summary),
        facts=tuple(_STAND_IN.sub("", fact) for fact in incident.facts),
    )
