"""The processes that whole reports list, taken to the runs of their jobs: which are there, on which GPUs they compute,
and how many are known to be missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from slurm_watchdog.base.capped import LeftOut
from slurm_watchdog.controller.state.filesystems import Filesystems
from slurm_watchdog.controller.state.run import Run, follow_training, is_of_earlier_start
from slurm_watchdog.controller.state.run_updates import note_absent, note_look, note_process, only_trains
from slurm_watchdog.controller.state.runs import Runs
from slurm_watchdog.controller.state.wait_tally import Idle
from slurm_watchdog.diagnose.stacks.waiting import ProcessKey
from slurm_watchdog.model.incidents import Culprit, Finding
from slurm_watchdog.model.observations import Gpu, Process, Role
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.model.slurm_states import RUNNING

OnGpus = tuple[tuple[str, ...], Idle | None]
NOWHERE: OnGpus = ((), None)
LIVES = frozenset("RSDIT")  # States of a process that is there; what is in another one is looked at more closely.


def on_gpus(gpus: tuple[Gpu, ...]) -> Mapping[int, OnGpus]:
    """Pid -> the GPUs on which it computes, and the share in which the least busy of them did nothing since the report
    before, in how many looks; None: one of them does not say."""
    found: dict[int, OnGpus] = {}
    for gpu in gpus:
        if gpu.pids:
            uuids = (gpu.uuid,) if gpu.uuid else ()
            idle = None if gpu.idle_ratio is None or not gpu.looks else (gpu.idle_ratio, gpu.looks)
            for pid in gpu.pids:
                others, before = found.get(pid, ((), idle))
                found[pid] = (*others, *uuids), None if idle is None or before is None else max(idle, before)
    return found


class ReportedProcesses:
    """Which jobs have processes on which node. `job_of`: the job that agents know by an id."""

    def __init__(
        self, runs: Runs, filesystems: Filesystems, left_out: LeftOut, job_of: Callable[[str], SlurmJob | None]
    ):
        self._runs, self._filesystems, self._left_out, self._job_of = runs, filesystems, left_out, job_of
        self._runs_on: dict[str, tuple[str, ...]] = {}  # Node -> the jobs with processes remembered there.
        self._unlisted_on: dict[str, list[Run]] = {}  # Node -> runs of which its newest report lacks processes.

    def forget(self, node: str) -> None:
        """Nothing of this node is remembered."""
        self._runs_on.pop(node, None)
        self._unlisted_on.pop(node, None)

    def _known(self, node: str) -> list[Run]:
        found = map(self._runs.get, self._runs_on.get(node, ()))
        return [run for run in found if run is not None and run.on_node.get(node)]

    def known_on(self, node: str) -> set[tuple[int, int]]:
        """(pid, start ticks) of the processes that are remembered there."""
        return {key[1:] for run in self._known(node) for key in run.on_node[node]}

    def apply(self, report: Report, made_at: float) -> bool:
        """Of the runs that Slurm lists: which of their processes are there, and which are not any more. Returns whether
        one computes elsewhere than before."""
        node, on, moved = report.node, on_gpus(report.gpus), False
        rows: dict[str, list[Process]] = {}
        for process in report.processes:
            rows.setdefault(process.job_id, []).append(process)
        present = {run.job.job_id: (run, set[ProcessKey]()) for run in self._known(node)}
        for process_job_id, mine in rows.items():
            run = self._run(process_job_id)
            if run is not None:
                if run.job.component_ids and process_job_id not in (known := run.components.setdefault(node, set())):
                    known.add(process_job_id)
                    moved = True
                seen = present.setdefault(run.job.job_id, (run, set()))[1]
                moved |= self._take(run, mine, seen, report, on, made_at)
        for _, (run, seen) in sorted(present.items()):
            note_absent(run, node, seen, made_at, frozenset(report.unread))
            if seen and not only_trains(run, run.on_node[node]):
                follow_training(run, made_at, report.interval_s)
        self._runs_on[node] = tuple(sorted(present))
        return moved

    def _take(
        self,
        run: Run,
        rows: list[Process],
        seen: set[ProcessKey],
        report: Report,
        on: Mapping[int, OnGpus],
        made_at: float,
    ) -> bool:
        job_id, runs, moved = run.job.job_id, run.job.state in RUNNING, False
        trains = run.stepped_at is not None and run.phase(made_at) is None
        for process in rows:
            key = (report.node, process.pid, process.start_ticks)
            if key in run.left_over or (run.begun_ticks and is_of_earlier_start(run, key, process)):
                continue
            seen.add(key)
            if not runs:
                continue
            if process.job_id != job_id:
                process = replace(process, job_id=job_id)
            if key in run.processes and process.blocked is None and process.state in LIVES and not run.blocked:
                run.processes[key] = (process, made_at, None)  # as most often: only numbers are new
            else:
                note_process(run, key, process, made_at)
            uuids, idle = on.get(process.pid, NOWHERE)
            if uuids and run.computes_on.get(key) != uuids:
                run.computes_on[key], run.is_due, moved = uuids, True, True
            if process.role is Role.RANK and run.stepped_at is not None:
                note_look(run, key, process, idle, made_at, trains=trains)
            if process.blocked is not None:
                self._filesystems.note_blocked(report.node, report.boot_id, process, made_at)
        return moved

    def note_unlisted(self, report: Report, missing: Mapping[str, int]) -> None:
        """Of each run here how many processes are not among those of the report, or had no room."""
        node, found = report.node, dict(missing)
        for before in self._unlisted_on.pop(node, ()):
            before.unlisted.pop(node, None)
            before.note(True)
        for row in report.left_out:
            job = self._job_of(row.job_id) if row.job_id is not None else None
            named = job.job_id if job is not None else None  # of a job that Slurm does not list nothing is repeated
            self._left_out.note("processes", node, max(0, row.count), row.uid, named)
            if row.job_id is not None:
                found[row.job_id] = found.get(row.job_id, 0) + max(0, row.count)
        for job_id, count in found.items():
            if (run := self._run(job_id)) is not None and node in run.job.nodes:
                run.unlisted[node] = run.unlisted.get(node, 0) + count
                run.note(True)
                self._unlisted_on.setdefault(node, []).append(run)

    def with_gpus(self, finding: Finding) -> Finding:
        """The finding, with the GPU of every culprit whose process is named and known to compute on that one alone."""
        if all(each.gpu_uuid or each.pid is None for each in finding.culprits):
            return finding
        found = tuple(replace(each, gpu_uuid=each.gpu_uuid or self._gpu_of(each)) for each in finding.culprits)
        return replace(finding, culprits=found)

    def _gpu_of(self, culprit: Culprit) -> str | None:
        node, newest, found = culprit.node or "", -1, tuple[str, ...]()
        for run in self._known(node):
            for key in run.on_node[node]:
                if key[1] == culprit.pid and key[2] > newest:
                    newest, found = key[2], run.computes_on.get(key, ())
        return found[0] if len(found) == 1 else None

    def _run(self, process_job_id: str) -> Run | None:
        job = self._job_of(process_job_id)
        return self._runs.get(process_job_id if job is None else job.job_id)
