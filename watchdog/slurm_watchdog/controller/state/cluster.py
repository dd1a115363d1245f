"""What the controller knows: fed by reports and by Slurm, read as frozen views.

Times are the controller's monotonic clock at receipt, less the ages that agents send. State belongs to one run
of one job, (job id, restart count): a restart drops all of it, so that nothing old is ever judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.controller.state.agents import Agents
from slurm_watchdog.controller.state.filesystems import Filesystems
from slurm_watchdog.controller.state.gpu_owners import GpuPids
from slurm_watchdog.controller.state.node_ownership import JobNodes, of_own_jobs, of_owners
from slurm_watchdog.controller.state.nodes import Nodes
from slurm_watchdog.controller.state.past_jobs import History
from slurm_watchdog.controller.state.report_bounds import within_bounds
from slurm_watchdog.controller.state.run import ProcessKey, Run, follow_training, new_run, reveal, started_at
from slurm_watchdog.controller.state.run_updates import (
    note_absent,
    note_event,
    note_log,
    note_on_disk,
    note_process,
    note_snapshot,
    trains,
)
from slurm_watchdog.controller.state.run_view import job_view
from slurm_watchdog.controller.state.scan_schedule import ScheduledJob, choose
from slurm_watchdog.controller.state.slurm_listing import jobs_now, process_ids, remembered
from slurm_watchdog.model.actions import Fence
from slurm_watchdog.model.cluster_view import ClusterView, FilesystemView, JobView, ProcessView
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.node_view import SlurmNodeView
from slurm_watchdog.model.observations import MountProbe, Process
from slurm_watchdog.model.past_runs import EndedJob
from slurm_watchdog.model.report import JobDirectives, Report
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.model.slurm_states import (
    ALIVE,
    FAILED,
    RUNNING,
    WAITING,
    is_away,
    is_known,
    is_lost,
    may_hold_nodes,
)

READ_ON_S = 60.0
"""A job's logs are followed this long after its end: the last lines tell why."""
TROUBLE_BREAK_S = 60.0
"""Trouble that comes back sooner is the same."""
KEPT_NODE_S = 86_400.0
"""A node that Slurm does not list (any more) is forgotten so long after its last report."""


class ClusterState:
    """Everything that reports and Slurm said, and that still counts. Not thread-safe: one loop owns it."""

    def __init__(self, *, silent_after_s: float, report_lifetime_s: float, partitions: Iterable[str] = ()):
        self._report_lifetime_s = report_lifetime_s
        self.left_out = LeftOut()
        """What of all that reports say had no room here."""
        self.agents = Agents(silent_after_s, self.left_out)
        self._partitions = frozenset(partitions)
        self._runs: dict[str, Run] = {}
        self.filesystems = Filesystems(self.left_out)
        self.nodes = Nodes(self.left_out)
        self.history = History()
        self._job_ids: dict[str, str] = {}
        """What agents call a job -> what Slurm's commands call it."""
        self._job_nodes = JobNodes()
        self.only_own = False
        """Whether a node is heard only about jobs that it has or had: where nodes have proven who they are."""
        self.dropped = 0
        """Of what reports said, what was about other nodes' jobs, or of users whose job it is not."""
        self.gpus = GpuPids(self.left_out)
        self.jobs: dict[str, SlurmJob] = {}
        """Every job of Slurm's newest listing, finished ones included."""
        self._before: dict[str, str] | None = None
        """Job -> its state in the listing before the newest; None: there was none."""
        self._acted_on: dict[str, int] = {}
        """Job -> restart count, of actions that an earlier controller left open: how such a job ended counts, too."""
        self._on_node: dict[str, set[str]] = {}
        """Node -> what its processes call the jobs that have it."""
        self._runs_on: dict[str, list[Run]] | None = None
        """Node -> runs of the jobs that have it, or had it lately; None: to be worked out anew."""
        self.node_addresses: dict[str, str] = {}
        self._slurm_nodes: tuple[SlurmNodeView, ...] = ()
        self._wishes: dict[str, JobDirectives] = {}
        """SLURM_JOB_ID -> what its environment asks of the watchdog."""
        self.slurm_nodes: tuple[SlurmNode, ...] = ()
        """Of the newest listing: what a job could be placed on."""
        self._jobs_seen_on: dict[str, set[str]] = {}
        """Node -> the jobs of whom processes are remembered there."""
        self._unlisted_on: dict[str, list[Run]] = {}
        """Node -> the runs of which its newest report does not hold every process."""
        self._anywhere: set[str] = set()
        """What their processes call the jobs of which it is not known where they run."""
        self.slurm_at: float | None = None
        self._slurm_excused = False
        """`slurm_at` is no listing, but the end of a stall of this controller."""
        self.slurm_partial = ""
        """Why jobs may exist that the newest listing does not show; empty if it is whole."""
        self.slurm_problem = ""
        """Why the newest answer of Slurm was of no use, where there was one."""
        self._watched_from: float | None = None

    # ------------------------------------------------------------------------------------ feeding

    def apply_slurm(self, view: SlurmView, now: float, wall: float | None = None) -> None:
        """Takes over one complete listing: new runs begin, runs that are over are forgotten.

        `wall` is the date of `now`: with it, what was logged before a run's start time is known to be older than it.
        """
        self._before = None if self.slurm_at is None else {name: job.state for name, job in self.jobs.items()}
        self.slurm_at, self._slurm_excused = now, False
        self.slurm_problem, self.slurm_partial = "", view.partial
        self.jobs = jobs_now(self.jobs, view)
        self._job_ids = {name: job.job_id for job in self.jobs.values() for name in process_ids(job)}
        self._job_nodes.note(self.jobs.values())
        self.node_addresses = {node.name: node.address for node in view.nodes}
        self.slurm_nodes = view.nodes
        self._wishes = {job_id: wish for job_id, wish in self._wishes.items() if job_id in self._job_ids}
        self._note_slurm_nodes(view, now)
        self._forget_nodes(now)
        self._on_node = {}
        self._runs_on = None
        self._anywhere = {job.process_id for job in self.jobs.values() if "nodes" in job.unreadable}
        for job in self.jobs.values():
            for name in job.nodes if may_hold_nodes(job.state) else ():
                self._on_node.setdefault(name, set()).update(process_ids(job))
        for job in view.jobs:
            self.apply_job(self.jobs[job.job_id], now, wall)
        for job_id in [job_id for job_id in self._runs if job_id not in self.jobs]:
            self.history.leave(self._runs.pop(job_id), now)

    def _forget_nodes(self, now: float) -> None:
        """Nodes of a cloud have a new name each time they are started."""
        for name in self.agents.forget_older_than(now - KEPT_NODE_S, self.node_addresses):
            self._jobs_seen_on.pop(name, None)
            self._unlisted_on.pop(name, None)
            self.nodes.forget(name)
            self.gpus.forget(name)

    def _note_slurm_nodes(self, view: SlurmView, now: float) -> None:
        """Slurm's words about nodes, and since when each is not away any more, for those that were."""
        before = {node.name: node for node in self._slurm_nodes}
        in_use = {name for job in view.jobs if job.state in RUNNING for name in job.nodes}
        found = []
        for node in view.nodes:
            old, runs_job = before.get(node.name), node.name in in_use
            back_at = old.back_at if old is not None else None
            if old is not None and is_away(old.state, old.runs_job) and not is_away(node.state, runs_job):
                back_at = now
            lost = 1 + (old.lost_listings or 0 if old is not None else 0) if is_lost(node.state) else 0
            found.append(
                SlurmNodeView(
                    name=node.name,
                    state=node.state,
                    reason=node.reason,
                    runs_job=runs_job,
                    back_at=back_at,
                    lost_listings=lost,
                )
            )
        self._slurm_nodes = tuple(found)

    def apply_job(self, job: SlurmJob, now: float, wall: float | None = None) -> None:
        """Takes over what Slurm says of one job."""
        self._runs_on = None
        job = remembered(job, self.jobs.get(job.job_id))
        self.jobs[job.job_id] = job
        self._job_ids.update(dict.fromkeys(process_ids(job), job.job_id))
        if self._partitions and job.partition not in self._partitions:
            return
        run = self._runs.get(job.job_id)
        if not is_known(job.state) or "restarts" in job.unreadable:
            return  # which run it is, or how it stands, is not known: all stays as it was, and nothing is done (policy: unsure)
        if job.state not in RUNNING:
            if run is not None and run.job.restarts != job.restarts:
                self._runs[job.job_id] = self._new_run(job, now, run, wall)
            elif run is not None:
                if not run.started and job.state not in ALIVE and job.state != "CANCELLED":
                    reveal(run)
                run.inactive_since = now if run.inactive_since is None else run.inactive_since
                run.job = job
            elif job.restarts > 0 and job.state in WAITING:
                self._runs[job.job_id] = self._new_run(
                    job, now, None, wall
                )  # the run before was too short to be seen
            elif self._acted_on.get(job.job_id) == job.restarts and job.state != "PENDING":
                run = self._runs[job.job_id] = self._new_run(job, now, None, wall)
                run.started, run.valid_from, run.inactive_since = True, started_at(job, now, wall), now
            elif self._was_too_short(job):
                run = self._runs[job.job_id] = self._new_run(job, now, None, wall)
                run.started, run.unseen, run.inactive_since = True, True, now
                run.valid_from = started_at(job, now, wall)
            return
        if run is None or run.job.restarts != job.restarts:
            self._runs[job.job_id] = self._new_run(job, now, run, wall)
            self.history.returned(job.job_id)
        else:
            if run.inactive_since is not None or (job.state == "RUNNING" and run.job.state != "RUNNING"):
                run.grace_from = now  # it waited in the queue, or was suspended: no step was due in that time
                run.forget_dumps()
            if not run.started:
                run.began_at, run.started = now, True
                run.valid_from = max(run.valid_from, started_at(job, now, wall))
            run.job, run.inactive_since = job, None

    def _was_too_short(self, job: SlurmJob) -> bool:
        """Whether the job began and failed between two listings: it waited in the one before, or was not
        there at all."""
        if self._before is None or job.state not in FAILED or not job.nodes:
            return False
        return self._before.get(job.job_id, "PENDING") in (*WAITING, "CONFIGURING")

    def _new_run(self, job: SlurmJob, now: float, before: Run | None, wall: float | None) -> Run:
        return new_run(job, now, before, wall, self.left_out)

    def apply_report(self, report: Report, now: float) -> str:
        """Takes over one full report. Returns what became of it: `accepted`, `duplicate` or `expired`.

        A report older than its lifetime proves that the node is there and says nothing about now.
        """
        made_at = now - max(0.0, report.age_s)
        self.left_out.at = now
        if not self.agents.has_room(report.node, self.node_addresses):
            return "no_room"
        if not self.agents.take(report, made_at):
            return "duplicate"
        if report.age_s > self._report_lifetime_s:
            return "expired"
        if self.only_own:
            report, dropped = of_own_jobs(report, self._job_nodes.stranger)
            self.dropped += dropped
        report, dropped = of_owners(report, self._job_of)
        self.dropped += dropped
        report, missing = within_bounds(
            report, self.left_out, lambda: self._known_on(report.node), self._nodes_of
        )
        self._apply_processes(report, made_at)
        self._note_unlisted(report, missing)
        self._wishes |= {wish.job_id: wish for wish in report.wishes}
        self.gpus.apply(report, made_at)
        self.nodes.apply(report, made_at)
        for log in report.logs:
            run = self._run(log.job_id)
            if run is not None:
                note_log(run, report.node, log, made_at)
        for checkpoint in report.checkpoints:
            run = self._run(checkpoint.job_id)
            if run is not None:
                note_on_disk(run, report.node, checkpoint, made_at)
        for event in report.events:
            run = self._run(event.job_id)
            if run is not None:
                note_event(run, report.node, event, made_at)
        for probe in report.mounts:
            self.apply_probe(report.node, probe, now)
        return "accepted"

    def _known_on(self, node: str) -> set[tuple[int, int]]:
        """(pid, start ticks) of the processes that are remembered there."""
        runs = (self._runs.get(job_id) for job_id in self._jobs_seen_on.get(node, ()))
        return {key[1:] for run in runs if run is not None for key in run.on_node.get(node, ())}

    def _nodes_of(self, process_job_id: str) -> int:
        run = self._run(process_job_id)
        return 1 if run is None else len(run.job.nodes)

    def _note_unlisted(self, report: Report, missing: Mapping[str, int]) -> None:
        """Of each run here how many processes are not among those of the report, or had no room."""
        node, found = report.node, dict(missing)
        for row in report.left_out:
            if row.job_id is not None:
                found[row.job_id] = found.get(row.job_id, 0) + max(0, row.count)
        for before in self._unlisted_on.pop(node, ()):
            before.unlisted.pop(node, None)
        for job_id, count in found.items():
            run = self._run(job_id)
            if run is not None and node in run.job.nodes:
                run.unlisted[node] = run.unlisted.get(node, 0) + count
                self._unlisted_on.setdefault(node, []).append(run)
        for row in report.left_out:
            job = self._job_of(row.job_id) if row.job_id is not None else None
            named = (
                job.job_id if job is not None else None
            )  # of a job that Slurm does not list nothing is repeated
            self.left_out.note("processes", node, max(0, row.count), row.uid, named)

    def _job_of(self, process_job_id: str) -> SlurmJob | None:
        """The job that agents know by this id, as Slurm listed it last."""
        return self.jobs.get(self._job_ids.get(process_job_id, process_job_id))

    def _run(self, process_job_id: str) -> Run | None:
        """The run of the job that agents know by this id."""
        return self._runs.get(self._job_ids.get(process_job_id, process_job_id))

    def _apply_processes(self, report: Report, made_at: float) -> None:
        present: dict[str, set[ProcessKey]] = {}
        name, run, run_of = report.node, None, None
        for process in report.processes:
            if process.job_id != run_of:
                run, run_of = self._run(process.job_id), process.job_id
            key = (name, process.pid, process.start_ticks)
            if run is None or key in run.left_over:
                continue
            job = run.job
            present.setdefault(job.job_id, set()).add(key)
            if process.job_id != job.job_id:
                process = replace(process, job_id=job.job_id)
            if job.state in RUNNING:
                note_process(run, key, process, made_at)
                if process.blocked is not None:
                    self.filesystems.note_blocked(name, report.boot_id, process, made_at)
        before = self._jobs_seen_on.get(report.node, set())
        for job_id in sorted(before | present.keys()):
            run = self._runs.get(job_id)
            seen = present.get(job_id, set())
            if run is None:
                continue
            note_absent(run, report.node, seen, made_at)
            if seen and not any(trains(run, key) for key in run.on_node[report.node]):
                follow_training(run, made_at, report.interval_s)
        self._jobs_seen_on[report.node] = {
            job_id
            for job_id in before | present.keys()
            if job_id in self._runs and self._runs[job_id].on_node.get(report.node)
        }

    def apply_probe(self, node: str, probe: MountProbe, now: float) -> None:
        """The answer of a node about a mount."""
        self.filesystems.apply_probe(node, self.agents.boot_id(node) or "", probe, now)

    def add_snapshot(
        self,
        job_id: str,
        restarts: int,
        stacks: tuple[ProcessStack, ...],
        silent: tuple[str, ...],
        now: float,
    ) -> None:
        """One dump of all ranks; dropped if the job has restarted since it was asked for."""
        run = self._runs.get(job_id)
        if run is not None and run.job.restarts == restarts:
            note_snapshot(run, stacks, silent, now)

    def grant_grace(self, now: float, job_ids: Iterable[str] | None = None) -> None:
        """Starts the clocks of these jobs (all by default) anew: a cause has gone, or the controller slept."""
        for job_id in self._runs if job_ids is None else job_ids:
            if job_id in self._runs:
                run = self._runs[job_id]
                run.grace_from = now
                run.restless = True
                run.forget_dumps()

    def note_trouble(self, job_ids: Iterable[str], now: float) -> None:
        """These jobs have an open incident at this moment."""
        for job_id in job_ids:
            if job_id in self._runs:
                run = self._runs[job_id]
                if now - run.troubled_at > TROUBLE_BREAK_S:
                    run.troubled_from = now
                run.troubled_at = now
                run.restless = True

    def note_action(self, job_id: str, restarts: int, at: float | None) -> None:
        """An action of ours touched this run at that moment, also of a run that is over by now; None: the run
        continues without the action."""
        run = self._runs.get(job_id)
        if run is None:
            return
        if run.job.restarts == restarts:
            run.touched_at = at if at is None or run.touched_at is None else min(at, run.touched_at)
            run.restless = True
        elif at is not None:
            run.past = tuple(
                replace(past, touched_at=at if past.touched_at is None else min(at, past.touched_at))
                if past.restarts == restarts
                else past
                for past in run.past
            )

    def forget_silence(self, now: float) -> None:
        """After the controller's own pause no agent counts as silent: they all get their time again."""
        self.agents.forget_silence(now)
        if self.slurm_at is not None:
            self.slurm_at, self._slurm_excused = now, True

    # ------------------------------------------------------------------------------------ reading

    @property
    def restless(self) -> bool:
        """Whether anything that may be told of a job has happened since it was looked at last."""
        return any(run.restless for run in self._runs.values() if run.job.state in RUNNING)

    def complete(self, report: Report, size: int = 0) -> Report | None:
        """A report of changes as the full one it stands for, any other as it is; None if it builds on one
        that is not known here.
        `size` is that on the wire."""
        return self.agents.complete(report, size)

    def processes_on(self, node: str, job: SlurmJob) -> tuple[Process, ...]:
        """What a node's newest report says of the processes of a job, of whichever run."""
        names = process_ids(job)
        return tuple(each for each in self.agents.processes(node) if each.job_id in names)

    def reporting_nodes(self, now: float) -> tuple[str, ...]:
        """Who has reported lately, by name."""
        return self.agents.reporting(now)

    def known_nodes(self) -> tuple[str, ...]:
        """Everybody who has ever reported, by name."""
        return self.agents.known()

    def owner_of(self, job_id: str) -> int | None:
        """The uid of a job's owner, as Slurm says; None for a job that it does not list."""
        job = self.jobs.get(job_id)
        return None if job is None else job.uid

    def address_of(self, node: str) -> str | None:
        """The address that Slurm has for a node; None for a node that it does not know."""
        return self.node_addresses.get(node)

    def variables_of(self, job: SlurmJob) -> dict[str, str]:
        """What the environment of this run of the job asks of the watchdog; empty if nothing, or not known."""
        wish = self._wishes.get(job.process_id)
        return dict(wish.variables) if wish is not None and wish.restarts == job.restarts else {}

    def jobs_on(self, node: str, now: float) -> list[tuple[SlurmJob, dict[str, int]]]:
        """The jobs that run on a node, or ended there lately, with the offsets at which their logs begin."""
        if self._runs_on is None:
            self._runs_on = {}
            for run in self._runs.values():
                for name in run.job.nodes:
                    self._runs_on.setdefault(name, []).append(run)
        return [
            (run.job, run.log_starts)
            for run in self._runs_on.get(node, ())
            if run.inactive_since is None or now - run.inactive_since < READ_ON_S
        ]

    def running_on(self, node: str, now: float, max_age_s: float) -> tuple[str, ...] | None:
        """SLURM_JOB_ID of every job that has `node` now, of whatever partition; None if Slurm's listing is
        older than `max_age_s`,
        or does not show all jobs."""
        if self.slurm_at is None or now - self.slurm_at > max_age_s or self.slurm_partial:
            return None
        return tuple(sorted(self._on_node.get(node, set()) | self._anywhere))

    def view(self, now: float) -> ClusterView:
        """Everything that detectors need, frozen, as it is at this moment."""
        return self._view(now, {job_id: self._job_view(run, now) for job_id, run in self._active()})

    def next_view(self, now: float, asked: frozenset[str]) -> tuple[ClusterView, frozenset[str]]:
        """The same, and the jobs that were looked at for it: the others, where there are too many, are as
        they were some
        seconds ago. `asked` are the subjects of the open incidents."""
        jobs = dict(self._active())
        turns = (
            ScheduledJob(
                job_id=job_id,
                size=max(1, len(run.processes)),
                restless=run.restless,
                looked_at=float("-inf") if run.looked is None else run.looked[0],
            )
            for job_id, run in jobs.items()
        )
        chosen = choose(turns)
        views, looked_at = {}, set()
        for job_id, run in jobs.items():
            if run.looked is None or job_id in chosen:
                run.looked, run.restless = (now, self._job_view(run, now)), False
                looked_at.add(job_id)
            views[job_id] = run.looked[1]
        return replace(self._view(now, views), asked=asked), frozenset(looked_at)

    def _active(self) -> list[tuple[str, Run]]:
        return [(job_id, run) for job_id, run in sorted(self._runs.items()) if run.job.state in RUNNING]

    def _view(self, now: float, jobs: Mapping[str, JobView]) -> ClusterView:
        reporting = self.agents.reporting(now)
        here = frozenset(reporting)
        self._watched_from = now if self._watched_from is None else self._watched_from
        return ClusterView(
            now=now,
            watched_s=now - self._watched_from,
            jobs=tuple(jobs.values()),
            filesystems=self.filesystem_views(now),
            reporting_nodes=reporting,
            silent_nodes=tuple(name for name in self.agents.known() if name not in here),
            silent_after_s=self.agents.silent_after_s,
            nodes=self.nodes.views(),
            slurm_nodes=self._slurm_nodes,
            ended=tuple(self._ended(now)),
            waiting=tuple(
                self._job_view(run, now)
                for _, run in sorted(self._runs.items())
                if (run.past or run.started) and run.job.state in ALIVE and run.job.state not in RUNNING
            ),
            slurm_age_s=self.slurm_age_s(now),
            slurm_excused=self._slurm_excused,
            excused_nodes=self.agents.excused(),
            slurm_problem=self.slurm_problem,
        )

    def filesystem_views(self, now: float) -> tuple[FilesystemView, ...]:
        """The filesystems in trouble as they are at this moment, between two looks at everything."""
        return tuple(self.filesystems.views(self._blocked(now), now))

    def slurm_age_s(self, now: float) -> float | None:
        """Since Slurm's newest listing; None if there was none."""
        return None if self.slurm_at is None else now - self.slurm_at

    def job_view(self, job_id: str, now: float) -> JobView | None:
        """One job alone, also while it is pending between two runs."""
        run = self._runs.get(job_id)
        return None if run is None else self._job_view(run, now)

    def _job_view(self, run: Run, now: float) -> JobView:
        silent = tuple(node for node in run.job.nodes if not self.agents.reports(node, now))
        return job_view(run, now, self.nodes, self.gpus, silent)

    def _ended(self, now: float) -> Iterable[EndedJob]:
        """Jobs that were seen running and that Slurm says are over, with what waits or runs in their place."""
        successors: dict[tuple[str, str], list[SlurmJob]] = {}
        dependent: dict[str, list[SlurmJob]] = {}
        for job in self.jobs.values():
            if job.state in ALIVE:
                successors.setdefault((job.user, job.name), []).append(job)
                if job.reason.startswith("Dependency"):  # on which job, Slurm's listing does not tell
                    dependent.setdefault(job.user, []).append(job)
        for run in [*self._runs.values(), *self.history.gone(now)]:
            if run.inactive_since is None or run.job.state in ALIVE or not run.started:
                continue
            job, past = run.job, self.history.past(run, now)
            behind = [*successors.get((job.user, job.name), ()), *dependent.get(job.user, ())]
            succeeded_by = tuple(dict.fromkeys(each.job_id for each in behind if each.job_id != job.job_id))
            self.history.note(job, past, succeeded_by)
            yield EndedJob(
                job=job,
                ended_at=run.inactive_since,
                last_step=past.last_step,
                total_steps=past.total_steps,
                succeeded_by=succeeded_by,
                preceded_by=self.history.preceded_by(job, past),
                run=past,
                past=run.past,
            )

    def _blocked(self, now: float) -> Iterable[tuple[ProcessView, str]]:
        """Every process that waits on a mount, with the boot id of its node."""
        for run in self._runs.values():
            for key in sorted(run.blocked):
                name, (process, seen_at, gone_at) = key[0], run.processes[key]
                boot_id = self.agents.boot_id(name)
                waits = process.blocked is not None and process.blocked.mount is not None
                if gone_at is None and waits and boot_id is not None:
                    yield ProcessView(node=name, process=process, seen_age_s=now - seen_at), boot_id

    def remember_action(
        self, fence: Fence, nodes: Iterable[str] = (), process_job_id: str | None = None
    ) -> None:
        """This run may have ended because of an action, while nobody listened: agents tell the recent past again."""
        self._acted_on[fence.job_id] = fence.restarts
        self._job_nodes.remember(fence.job_id if process_job_id is None else process_job_id, nodes)
