"""What the controller knows: fed by reports and by Slurm, read as frozen views.

Times are the controller's monotonic clock at receipt, less the ages that agents send. State belongs to one run
of one job, (job id, restart count): a restart drops all of it, so that nothing old is ever judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.base.memo import Series
from slurm_watchdog.controller.state.agents import Agents, Supervisors, share_texts
from slurm_watchdog.controller.state.door import JobNodes, admit, process_ids
from slurm_watchdog.controller.state.filesystems import Filesystems
from slurm_watchdog.controller.state.nodes import Nodes, node_views
from slurm_watchdog.controller.state.progress_clock import main_counter
from slurm_watchdog.controller.state.reported_processes import ReportedProcesses
from slurm_watchdog.controller.state.run import Run, follow_start
from slurm_watchdog.controller.state.run_updates import note_event, note_log, note_on_disk
from slurm_watchdog.controller.state.run_view import Moment, job_view, later, log_view, progress_view
from slurm_watchdog.controller.state.runs import Runs, jobs_now, remembered
from slurm_watchdog.model.actions import Fence
from slurm_watchdog.model.cluster_view import READ_LATER_S, ClusterView, FilesystemView, JobView, ProcessView
from slurm_watchdog.model.node_view import SlurmNodeView, UnreachedNode
from slurm_watchdog.model.observations import MountProbe, Process
from slurm_watchdog.model.report import JobDirectives, Report, State
from slurm_watchdog.model.slurm import Reservation, SlurmJob, SlurmNode, SlurmPerson, SlurmView
from slurm_watchdog.model.slurm_states import is_lost, may_hold_nodes
from slurm_watchdog.model.supervisor import in_use, left_behind

SAME_CLOCK_S = 0.5  # What is due by date is judged again where the clock was set by more.
READ_ON_S = 60.0  # A job's logs are followed this long after its end: the last lines tell why.
UNREAD_S = 30.0  # A node that has returned and reads no log counts as silent for so long.
TOLD_EVERY_S = 30.0  # A listing with nothing new counts, too: that a job has ended a while ago is said to its nodes.
KEPT_NODE_S = 86_400.0  # A node that Slurm does not list (any more) is forgotten so long after its last report.


class ClusterState:
    """Everything that reports and Slurm said, and that still counts. Not thread-safe: one loop owns it."""

    def __init__(
        self, *, silent_after_s: float, report_lifetime_s: float, partitions: Iterable[str] = (),
        report_interval_s: float = READ_LATER_S,
    ):  # fmt: skip
        self._report_lifetime_s = report_lifetime_s
        self.report_interval_s = report_interval_s  # Of each agent.
        self.left_out = LeftOut()  # What of all that reports say had no room here.
        self.agents = Agents(silent_after_s, self.left_out)
        self._partitions = frozenset(partitions)
        self.runs = Runs()
        self.filesystems = Filesystems(self.left_out)
        self.nodes = Nodes()
        self.processes = ReportedProcesses(self.runs, self.filesystems, self.left_out, self._job_of)
        self._job_ids: dict[str, str] = {}  # What agents call a job -> what Slurm's commands call it.
        self._job_nodes = JobNodes()
        self.require_node_ownership = False  # Whether a node is heard only about jobs that it has or had.
        self.dropped = 0  # Of what reports said, what was about other nodes' jobs, or of users whose job it is not.
        self.unsure_of: set[str] = set()  # Nodes whose small reports build on what is not known here.
        self.jobs: dict[str, SlurmJob] = {}  # Every job of Slurm's newest listing, finished ones included.
        self._on_node: dict[str, frozenset[str]] = {}  # Node -> what its processes call the jobs that have it.
        self._names_on: dict[str, tuple[str, ...]] = {}  # The same in order, with those that may be anywhere.
        self._runs_on: dict[str, list[Run]] | None = None  # Node -> runs that have it, or had it lately; None: stale.
        self.node_addresses: dict[str, str] = {}
        self._slurm_nodes: tuple[SlurmNodeView, ...] = ()
        self._lost: dict[str, SlurmNodeView] = {}  # Those of them that Slurm has lost.
        self.changes = 0  # Counts what may change what is said of more than one running job, or to a node.
        self._told_at = -math.inf  # When a listing was counted among these.
        self.supervisors = Supervisors()
        self._wishes: dict[str, JobDirectives] = {}  # SLURM_JOB_ID -> what its environment asks of the watchdog.
        self.slurm_nodes: tuple[SlurmNode, ...] = ()  # Of the newest listing: what a job could be placed on.
        self.reservations: tuple[Reservation, ...] = ()  # Of the newest listing of these, where someone reads it.
        self.people: tuple[SlurmPerson, ...] = ()  # Operators and coordinators, as accounting named them last.
        self._anywhere: set[str] = set()  # What their processes call the jobs of which it is not known where they run.
        self.slurm_at: float | None = None
        self._slurm_excused = False  # `slurm_at` is no listing, but the end of a stall of this controller.
        self.slurm_partial = ""  # Why jobs may exist that the newest listing does not show; empty if it is whole.
        self.slurm_problem = ""  # Why the newest answer of Slurm was of no use, where there was one.
        self._date_ahead: float | None = None  # Of the date before the clock of `now`.
        self._watched_from: float | None = None
        self.unreached: dict[str, tuple[float, int]] = {}  # Node -> since when its machine answers no one, how often.

    def apply_slurm(self, view: SlurmView, now: float, wall: float | None = None) -> None:
        """Takes over one complete listing: new runs begin, runs that are over are forgotten. `wall` is the date of
        `now`: with it, what was logged before a run's start time is known to be older than it."""
        self.runs.begin_listing(None if self.slurm_at is None else self.jobs)
        self.slurm_at, self._slurm_excused = now, False
        ahead_s = None if wall is None else wall - now
        if self._date_ahead is not None and ahead_s is not None and abs(ahead_s - self._date_ahead) > SAME_CLOCK_S:
            self.runs.judge_all()
        self._date_ahead = ahead_s
        known, runs_before, nodes_before, partial = self.jobs, list(self.runs), self._slurm_nodes, self.slurm_partial
        self.slurm_problem, self.slurm_partial = "", view.partial
        self.jobs = jobs_now(known, view)
        self._job_ids = {name: job.job_id for job in self.jobs.values() for name in process_ids(job)}
        self._job_nodes.update(self.jobs.values())
        self.node_addresses = {node.name: node.address for node in view.nodes}
        self.slurm_nodes = view.nodes
        self._wishes = {job_id: wish for job_id, wish in self._wishes.items() if job_id in self._job_ids}
        self.supervisors.keep(self._job_ids)
        nodes = node_views(view, nodes_before, now)
        self._slurm_nodes = nodes_before if nodes == nodes_before else Series(nodes)
        lost = {each.name: each for each in self._slurm_nodes if is_lost(each.state)}
        for name in lost.keys() ^ self._lost.keys():
            self._note_news(name)
        self._lost = lost
        self._forget_nodes(now)
        self._on_node, self._names_on = {}, {}
        self._anywhere = {job.process_id for job in self.jobs.values() if "nodes" in job.unreadable}
        for job in self.jobs.values():
            names = frozenset(process_ids(job))  # one for all nodes that have no other job
            for name in job.nodes if may_hold_nodes(job.state) else ():
                self._on_node[name] = names | self._on_node[name] if name in self._on_node else names
        for job in view.jobs:
            self.apply_job(self.jobs[job.job_id], now, wall)
        self.runs.drop_unlisted(self.jobs, now)
        same = self._slurm_nodes is nodes_before and self.slurm_partial == partial and self.jobs == known
        same = same and [*map(id, self.runs)] == [*map(id, runs_before)]
        if not same or not 0.0 <= now - self._told_at < TOLD_EVERY_S:
            self.changes, self._runs_on, self._told_at = self.changes + 1, None, now

    def _forget_nodes(self, now: float) -> None:
        """Nodes of a cloud have a new name each time they are started."""
        for name in self.agents.forget_older_than(now - KEPT_NODE_S, self.node_addresses):
            self.processes.forget(name)
            self.unreached.pop(name, None)
            self.nodes.forget(name)
            self.unsure_of.discard(name)
            self.runs.judge_all()

    def apply_job(self, job: SlurmJob, now: float, wall: float | None = None) -> None:
        """Takes over what Slurm says of one job."""
        before = self.jobs.get(job.job_id)
        job = remembered(job, before)
        if job != before:
            self.changes, self._runs_on = self.changes + 1, None
        self.jobs[job.job_id] = job
        self._job_ids.update(dict.fromkeys(process_ids(job), job.job_id))
        if self._partitions and job.partition not in self._partitions:
            return
        self.runs.apply(job, now, wall)

    def apply_report(self, report: Report, now: float) -> str:
        """Takes over one report. Returns what became of it: `accepted`, `unknown` (a small one that builds on what is
        not known here), `duplicate` or `expired`. A report older than its lifetime proves that the node is there and
        says nothing about now."""
        node = report.node
        self.left_out.at = now
        if not self.agents.has_room(node, self.node_addresses):
            return "no_room"
        was_here = self.agents.reports(node, now)
        made_at = self.agents.hear(node, report.agent_id, report.boot_id, report, now)
        if made_at is None:
            return "duplicate"
        if not was_here:
            self._note_news(node)
        if report.age_s > self._report_lifetime_s:
            return "expired"
        self.unreached.pop(node, None)
        if self.agents.take(node, made_at):
            self._note_return(node, made_at)
        stranger = self._job_nodes.stranger if self.require_node_ownership else None
        report, dropped, missing = admit(report, self._job_of, stranger, self.processes.known_on, self.left_out)
        self.dropped += dropped
        outcome = "accepted"
        if not report.same_as:
            self._take_whole(report, missing, made_at, now)
        elif not self.nodes.is_as(node, report.agent_id, report):
            outcome = "unknown"
            self.unsure_of.add(node)
        else:
            self.nodes.hold(node, made_at)
        if report.same_as and report.node_events:
            self.nodes.note_events(node, report.node_events, made_at)
            self._note_news(node)
        self._take_rows(report, made_at)
        return outcome

    def hold(self, node: str, agent: tuple[str, str], said: State, now: float) -> bool:
        """Takes over that all of a node that reports is as before. False: there is more to it, and nothing is done.
        `agent`: boot and agent id."""
        odd = node in self.unreached or node in self.unsure_of or said.age_s > self._report_lifetime_s
        if odd or not self.agents.reports(node, now) or not self.nodes.is_as(node, agent[1], said):
            return False
        made_at = self.agents.hear(node, agent[1], agent[0], said, now)
        if made_at is None:
            return False
        if self.agents.take(node, made_at):
            self._note_return(node, made_at)
        self.nodes.hold(node, made_at)
        return True

    def _take_rows(self, report: Report, made_at: float) -> None:
        """What each report says of jobs."""
        node = report.node
        for supervisor, is_news in self.supervisors.apply(report, made_at, self._job_of):
            if is_news and (run := self._run(supervisor.job_id)) is not None:
                follow_start(run, supervisor.status, made_at, report.interval_s)
        for log in report.logs:
            if (run := self._run_of(log.job_id)) is not None:
                run.note(note_log(run, node, log, made_at))
        for found in report.checkpoints:
            if (run := self._run_of(found.job_id)) is not None:
                run.note(note_on_disk(run, node, found, made_at))
        for event in report.events:
            if (run := self._run_of(event.job_id)) is not None:
                run.note(note_event(run, node, event, made_at))
                self.changes += run.inactive_since is not None  # its last words

    def _take_whole(self, report: Report, missing: Mapping[str, int], made_at: float, now: float) -> None:
        """How the node is, by a whole report; `missing`: of each job how many of its processes had no room."""
        node = report.node
        share_texts(report)
        report = replace(report, events=(), logs=(), results=())  # it is kept
        self.unsure_of.discard(node)
        as_before = self.nodes.is_alike(report) and not report.node_events
        for run in self._with_node(node):
            run.note(as_before)
        moved = self.processes.apply(report, made_at)
        self.processes.note_unlisted(report, missing)
        for wish in report.wishes:  # ranks of one node that ask for nothing take back no wish read on another one
            before = self._wishes.get(wish.job_id)
            if wish != before and (wish.variables or before is None or before.restarts != wish.restarts):
                self._wishes[wish.job_id] = wish
                self.changes += 1
                self._run(wish.job_id)
        if self.nodes.apply(report, made_at) or report.node_events:
            self.changes += 1
        if moved:
            self._note_news(node)
        for probe in report.mounts:
            self.apply_probe(node, probe, now)

    def _note_return(self, node: str, made_at: float) -> None:
        """A node that was silent reports again. What was written meanwhile is not known before its logs are read again,
        which the first report of an agent that was started again has not done."""
        for job, _ in self.jobs_on(node, made_at):
            run = self.runs.get(job.job_id)
            main = None if run is None else main_counter(run.clocks)
            if run is not None and main is not None and (node, main[0][0]) in run.logs:
                run.unread[node] = made_at
                run.is_due = True

    def _job_of(self, process_job_id: str) -> SlurmJob | None:
        """The job that agents know by this id, as Slurm listed it last."""
        return self.jobs.get(self._job_ids.get(process_job_id, process_job_id))

    def _run_of(self, process_job_id: str) -> Run | None:
        """The run of the job that agents know by this id."""
        return self.runs.get(self._job_ids.get(process_job_id, process_job_id))

    def _run(self, process_job_id: str) -> Run | None:
        """The same, to which something is added."""
        run = self._run_of(process_job_id)
        if run is not None:
            run.is_due = True
        return run

    def apply_probe(self, node: str, probe: MountProbe, now: float) -> None:
        """The answer of a node about a mount."""
        whole = self.nodes.report(node)
        self.filesystems.apply_probe(node, "" if whole is None else whole.boot_id, probe, now)

    def forget_silence(self, now: float) -> None:
        """After the controller's own pause no agent counts as silent: they all get their time again."""
        self.agents.forget_silence(now)
        self.runs.judge_all()
        if self.slurm_at is not None:
            self.slurm_at, self._slurm_excused = now, True

    def processes_on(self, node: str, job: SlurmJob) -> tuple[Process, ...]:
        """What a node's newest report says of the processes of a job, of whichever run."""
        names, whole = process_ids(job), self.nodes.report(node)
        return () if whole is None else tuple(each for each in whole.processes if each.job_id in names)

    def address_of(self, node: str) -> str | None:
        """The address that Slurm has for a node, as of its newest listing; None for a node that it does not list."""
        return self.node_addresses.get(node)

    def wish_of(self, job: SlurmJob) -> JobDirectives | None:
        """What was read last in the environment of this job, of whichever run; None: nothing was."""
        return self._wishes.get(job.process_id)

    def variables_of(self, job: SlurmJob) -> dict[str, str]:
        """What the environment of this run of the job asks of the watchdog; empty if nothing, or not known."""
        wish = self._wishes.get(job.process_id)
        return dict(wish.variables) if wish is not None and self.is_read(job) else {}

    def is_read(self, job: SlurmJob) -> bool:
        """Whether an agent that knows whose job it is has read the environment and the command line of a process of
        this run: it hears of the owner after it has met the ranks."""
        wish = self._wishes.get(job.process_id)
        return wish is not None and wish.restarts == job.restarts

    def jobs_on(self, node: str, now: float) -> list[tuple[SlurmJob, dict[str, int]]]:
        """The jobs that run on a node, or ended there lately, with the offsets at which their logs begin."""
        return [
            (run.job, run.log_starts)
            for run in self._with_node(node)
            if run.inactive_since is None or now - run.inactive_since < READ_ON_S
        ]

    def _with_node(self, node: str) -> Sequence[Run]:
        """The runs that have a node, or had it lately."""
        if self._runs_on is None:
            self._runs_on = {}
            for run in self.runs:
                for name in run.job.nodes:
                    self._runs_on.setdefault(name, []).append(run)
        return self._runs_on.get(node, ())

    def running_on(self, node: str, now: float, max_age_s: float) -> tuple[str, ...] | None:
        """SLURM_JOB_ID of every job that has `node` now, of whatever partition; None if Slurm's listing is
        older than `max_age_s`, or does not show all jobs."""
        if self.slurm_at is None or now - self.slurm_at > max_age_s or self.slurm_partial:
            return None
        found = self._names_on.get(node)
        if found is None:
            found = self._names_on[node] = tuple(sorted(self._on_node.get(node, frozenset()) | self._anywhere))
        return found

    def view(self, now: float) -> ClusterView:
        """Everything that detectors need, frozen, as it is at this moment."""
        jobs = tuple(self.view_of(run, now) for _, run in self.runs.active())
        return replace(self.surroundings(now), jobs=jobs)

    def _note_news(self, node: str) -> None:
        self.changes += 1
        for run in self._with_node(node):
            run.is_due = True

    def later(self, job_id: str, view: JobView, at: float, now: float) -> JobView:
        """A view that was made of a ticking `at`, as it is at `now` in plain numbers, with the steps that have come."""
        found, run = later(view, now - at), self.runs.get(job_id)
        if run is None or not run.has_numbers or run.job.restarts != view.job.restarts:
            return found
        fresh = replace(found, progress=progress_view(run, Moment(now, now, now)), log=log_view(run, now))
        fresh.__dict__.update(found.__dict__)
        return fresh

    def lost_among(self, nodes: Iterable[str]) -> tuple[SlurmNodeView, ...]:
        """Those of these nodes that Slurm has lost."""
        return tuple(self._lost[name] for name in nodes if name in self._lost) if self._lost else ()

    def surroundings(self, now: float) -> ClusterView:
        """The same without the jobs that run."""
        self._watched_from = now if self._watched_from is None else self._watched_from
        return ClusterView(
            now=now,
            watched_s=now - self._watched_from,
            filesystems=self.filesystem_views(now),
            reporting_nodes=self.agents.reporting(now),
            silent_nodes=self.agents.silent(now),
            silent_after_s=self.agents.silent_after_s,
            unreached=tuple(UnreachedNode(name, tries, now - at) for name, (at, tries) in self.unreached.items()),
            nodes=self.nodes.views(now),
            heard_at=self.agents.heard_at(),
            slurm_nodes=self._slurm_nodes,
            ended=tuple(self.runs.ended(now, self.jobs.values())),
            waiting=tuple(self.view_of(run, now) for run in self.runs.waiting()),
            slurm_age_s=None if self.slurm_at is None else now - self.slurm_at,
            slurm_excused=self._slurm_excused,
            excused_nodes=self.agents.excused(),
            slurm_problem=self.slurm_problem,
            reservations=self.reservations,
            date=None if self._date_ahead is None else now + self._date_ahead,
        )

    def filesystem_views(self, now: float) -> tuple[FilesystemView, ...]:
        """The filesystems in trouble as they are at this moment, between two looks at everything."""
        return tuple(self.filesystems.views(self._blocked(now), now))

    def job_view(self, job_id: str, now: float) -> JobView | None:
        """One job alone, also while it is pending between two runs."""
        run = self.runs.get(job_id)
        return None if run is None else self.view_of(run, now)

    def view_of(self, run: Run, at: float | Moment) -> JobView:
        """One run as detectors see it."""
        moment = at if isinstance(at, Moment) else Moment(at, at, at)
        now = moment.now
        supervisor = self.supervisors.of(run.job, now)
        nodes = in_use(run.job, supervisor)
        job = run.job if nodes == run.job.nodes else replace(run.job, nodes=nodes)
        silent = tuple(
            node
            for node in nodes
            if not self.agents.reports(node, now) or (node in run.unread and now - run.unread[node] < UNREAD_S)
        )
        without_ranks = left_behind(run.job, supervisor).intersection(nodes)
        view = job_view(
            run, job, moment, self.nodes, silent, supervisor=supervisor, without_ranks=without_ranks
        )  # fmt: skip
        later_s = self.report_interval_s
        return replace(view, read_later_s=later_s) if later_s > READ_LATER_S else view

    def _blocked(self, now: float) -> Iterable[tuple[ProcessView, str]]:
        """Every process that waits on a mount, with the boot id of its node. What a restart has left behind on a node
        that it does not use any more is no one's trouble."""
        for run in self.runs:
            left = left_behind(run.job, self.supervisors.of(run.job, now)) if run.blocked else frozenset()
            for key in sorted(key for key in run.blocked if key[0] not in left):
                name, (process, seen_at, gone_at) = key[0], run.processes[key]
                whole_at, held_s = self.nodes.held(name)
                seen_at += held_s if seen_at == whole_at else 0.0
                whole = self.nodes.report(name)
                waits = process.blocked is not None and process.blocked.mount is not None
                if gone_at is None and waits and whole is not None:
                    yield ProcessView(node=name, process=process, seen_age_s=now - seen_at), whole.boot_id

    def remember_action(self, fence: Fence, nodes: Iterable[str] = (), process_job_id: str | None = None) -> None:
        """This run may have ended because of an action while no controller ran: agents report the recent past again."""
        self.runs.remember_action(fence)
        self._job_nodes.remember(fence.job_id if process_job_id is None else process_job_id, nodes)
