"""The processes that reports list: brought to the runs of their jobs, with what is known to be missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.controller.state.filesystems import Filesystems
from slurm_watchdog.controller.state.run import Run, follow_training, is_of_earlier_start
from slurm_watchdog.controller.state.run_updates import note_absent, note_look, note_process, only_trains
from slurm_watchdog.controller.state.runs import Runs
from slurm_watchdog.controller.state.wait_tally import idle_shares
from slurm_watchdog.diagnose.stacks.waiting import ProcessKey
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import RUNNING


class ReportedProcesses:
    """Which jobs have processes on which node. `job_of`: the job that agents know by an id."""

    def __init__(
        self, runs: Runs, filesystems: Filesystems, left_out: LeftOut, job_of: Callable[[str], SlurmJob | None]
    ):
        self._runs, self._filesystems, self._left_out, self._job_of = runs, filesystems, left_out, job_of
        self._jobs_seen_on: dict[str, tuple[str, ...]] = {}
        """Node -> the jobs with processes that are remembered there."""
        self._unlisted_on: dict[str, list[Run]] = {}
        """Node -> the runs of which its newest report does not hold every process."""

    def forget(self, node: str) -> None:
        """Nothing of this node is remembered."""
        self._jobs_seen_on.pop(node, None)
        self._unlisted_on.pop(node, None)

    def known_on(self, node: str) -> set[tuple[int, int]]:
        """(pid, start ticks) of the processes that are remembered there."""
        runs = (self._runs.get(job_id) for job_id in self._jobs_seen_on.get(node, ()))
        return {key[1:] for run in runs if run is not None for key in run.on_node.get(node, ())}

    def apply(self, report: Report, made_at: float) -> None:
        """Of the runs that Slurm lists: which of their processes are there, and which are not any more."""
        present: dict[str, set[ProcessKey]] = {}
        name, run, run_of = report.node, None, None
        idle = idle_shares(report.gpus)
        for process in report.processes:
            if process.job_id != run_of:
                run, run_of = self._run(process.job_id), process.job_id
            key = (name, process.pid, process.start_ticks)
            if run is None or key in run.left_over or is_of_earlier_start(run, key, process):
                continue
            job = run.job
            present.setdefault(job.job_id, set()).add(key)
            if job.component_ids:
                run.components.setdefault(name, set()).add(process.job_id)
            if process.job_id != job.job_id:
                process = replace(process, job_id=job.job_id)
            if job.state in RUNNING:
                note_process(run, key, process, made_at)
                note_look(run, key, process, idle.get(process.pid), made_at)
                if process.blocked is not None:
                    self._filesystems.note_blocked(name, report.boot_id, process, made_at)
        known = sorted(present.keys() | self._jobs_seen_on.get(report.node, ()))
        for job_id in known:
            run = self._runs.get(job_id)
            seen = present.get(job_id, set())
            if run is None:
                continue
            note_absent(run, report.node, seen, made_at)
            if seen and not only_trains(run, run.on_node[report.node]):
                follow_training(run, made_at, report.interval_s)
        self._jobs_seen_on[report.node] = tuple(
            job_id for job_id in known if (run := self._runs.get(job_id)) is not None and run.on_node.get(report.node)
        )

    def note_unlisted(self, report: Report, missing: Mapping[str, int]) -> None:
        """Of each run here how many processes are not among those of the report, or had no room."""
        node, found = report.node, dict(missing)
        for row in report.left_out:
            if row.job_id is not None:
                found[row.job_id] = found.get(row.job_id, 0) + max(0, row.count)
        for before in self._unlisted_on.pop(node, ()):
            before.unlisted.pop(node, None)
        for job_id, count in found.items():
            if (run := self._run(job_id)) is not None and node in run.job.nodes:
                run.unlisted[node] = run.unlisted.get(node, 0) + count
                self._unlisted_on.setdefault(node, []).append(run)
        for row in report.left_out:
            job = self._job_of(row.job_id) if row.job_id is not None else None
            named = job.job_id if job is not None else None  # of a job that Slurm does not list nothing is repeated
            self._left_out.note("processes", node, max(0, row.count), row.uid, named)

    def _run(self, process_job_id: str) -> Run | None:
        job = self._job_of(process_job_id)
        return self._runs.get(process_job_id if job is None else job.job_id)
