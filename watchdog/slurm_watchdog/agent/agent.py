"""The agent: a tick gives one report; between ticks it listens to its children and to the controller's replies."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import slurm_watchdog
from slurm_watchdog.agent.checkpoints.schedule import CheckpointSchedule
from slurm_watchdog.agent.collectors.kernel_log import KernelLog
from slurm_watchdog.agent.commands import Commands
from slurm_watchdog.agent.functions import FUNCTIONS
from slurm_watchdog.agent.gpu.holders import GpuHolders
from slurm_watchdog.agent.gpu.reader import GpuReader
from slurm_watchdog.agent.helper.requests import TASKS, CheckedFunctions
from slurm_watchdog.agent.kernel.kmsg import KmsgFile
from slurm_watchdog.agent.logs.job_logs import JobLogs
from slurm_watchdog.agent.mounts.open_mounts import OpenMounts
from slurm_watchdog.agent.mounts.probing import MountProber, Wanted, wanted_mounts
from slurm_watchdog.agent.proc.files import Files
from slurm_watchdog.agent.processes.delegated_proc import FarFiles
from slurm_watchdog.agent.processes.reader import ProcessReader
from slurm_watchdog.agent.processes.report_rows import choose
from slurm_watchdog.agent.reload.handover import Handover, write_handover
from slurm_watchdog.agent.workers.become_user import may_become_others, why_too_mighty
from slurm_watchdog.agent.workers.child import FIRST_TRIM, TRIM_EVERY, give_back_memory
from slurm_watchdog.agent.workers.helper_client import HelperLink, is_usable
from slurm_watchdog.agent.workers.pool import SpawnerDied, WorkerPool
from slurm_watchdog.base import clock, loop
from slurm_watchdog.base.mounts import Mount, read_mounts
from slurm_watchdog.config.agent_settings import Settings
from slurm_watchdog.model.observations import (
    Checkpoint,
    Event,
    Gpu,
    GpuHolder,
    LogFile,
    MountProbe,
    NodeEvent,
    Process,
    Role,
)
from slurm_watchdog.model.protocol import EndProcess
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.redact_values import masked

if TYPE_CHECKING:
    from slurm_watchdog.agent.delivery.spool import Waiting

log = logging.getLogger(__name__)

RUNNING_LIFETIME_S = 60.0
"""The controller's word about which jobs run here is good for so long."""
SLOW_NVML_S = 3.0
"""Its first answer may take seconds, where the driver has to wake the GPUs; then it is said that it is waited for."""

_NO_PROCESSES: tuple[Process, ...] = ()
_NO_LOGS: tuple[tuple[LogFile, ...], tuple[Event, ...], int] = ((), (), 0)
_NO_MOUNTS: tuple[MountProbe, ...] = ()
_NO_CHECKPOINTS: tuple[tuple[Checkpoint, ...], tuple[Event, ...]] = ((), ())
_NO_GPUS: tuple[Gpu, ...] = ()
_NO_HOLDERS: tuple[GpuHolder, ...] = ()
_NO_NODE_EVENTS: tuple[tuple[NodeEvent, ...], int] = ((), 0)
"""What a part that failed leaves in the report."""


def node_name(config: Settings) -> str:
    """Slurm's name of this node: as configured, else SLURMD_NODENAME, else the short host name."""
    if config.agent.node_name != "auto":
        return config.agent.node_name
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]


def read_boot_id() -> str:
    """The kernel's random name of this boot; empty where it can't be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def guarded(config: Settings, own: int | None) -> CheckedFunctions:
    """What the agent's own children can do where there is no helper: checked as the helper checks it. `own`: see process_owner.OWN."""
    return CheckedFunctions(
        FUNCTIONS, True, lambda reason: log.warning("refused: %s", reason), config.kill_switch_prefixes, own,
        {name: function for name, function in FUNCTIONS.items() if name not in TASKS},
    )  # fmt: skip


class Agent:
    """What one agent knows and does. Made from the main thread, before any other thread: it forks its children's parent."""

    def __init__(self, config: Settings, once: bool = False, before: Handover | None = None):
        """With `once` everything is looked at in the first tick already, and nothing is remembered on disk. `before` is what the agent
        knew that this process was until now."""
        self.config = config
        self.node = node_name(config)
        self.boot_id = read_boot_id()
        self.agent_id = uuid.uuid4().hex
        self.sequence = 0
        settings = config.agent
        helper = HelperLink(settings.helper_socket) if is_usable(settings.helper_socket) else None
        before = before or Handover()
        personal = config.personal or (helper is None and why_too_mighty() is None)
        functions = guarded(config, os.getuid() if personal else None) if helper is None else FUNCTIONS
        self.probes = WorkerPool(functions, helper=helper, helped=TASKS, left=before.children)
        mounts: tuple[Mount, ...] = read_mounts()
        files = FarFiles(self.probes) if helper is not None else Files()
        self.processes = ProcessReader(self.probes, mounts, files=files)
        becomes = helper is not None or (not personal and may_become_others())
        self.logs = JobLogs(
            self.probes, mounts, self.node, tuple(settings.log_patterns), become_owner=becomes
        )
        self.gpus = GpuReader(self.probes)
        self.holders = GpuHolders(self.probes, settings.orphan_grace)
        if isinstance(files, FarFiles):
            self.holders.links_of = files.devices_of
        self.mounts = MountProber(
            self.probes,
            self.node,
            settings.mount_probe_interval,
            frozenset(settings.mount_probe_write),
            stagger=not once,
        )
        self.open_mounts = OpenMounts(self.probes)
        self.checkpoints = CheckpointSchedule(self.probes, self.logs, settings.checkpoint_interval)
        state_file = (
            f"{settings.state_directory}/kernel-log.json" if settings.state_directory and not once else ""
        )
        self.kernel = (
            KernelLog(
                settings.kernel_log,
                self.boot_id,
                state_file,
                self.probes,
                open_device=KmsgFile if helper is None else helper.open_kernel_log,
            )
            if settings.kernel_log
            else None
        )
        self.commands = Commands(
            self.probes,
            self.logs,
            self.node,
            settings.probe_deadline,
            self.processes.environ_of,
            mount_collector=self.mounts,
            details_of=self.processes.details_of,
            kernel_log=settings.kernel_log,
            switch_prefixes=config.kill_switch_prefixes,
            core_debugger=settings.core_debugger,
            boot_id=self.boot_id,
            objection_to_ending=self._objection_to_ending,
        )
        self.running: tuple[frozenset[str], float] | None = None
        """The jobs that Slurm has here, as the controller said, and when it did."""
        self.seen = loop.Isolated()
        self._wanted: dict[str, Wanted] = {}
        self._wanted_for: tuple[tuple[tuple[str, int], ...], tuple[Mount, ...]] = ((), ())
        self._told: frozenset[tuple[int, int]] = frozenset()
        """Processes that the last report named, where it could not name all."""
        """The places and mounts from which `_wanted` follows."""
        self._closed = False
        self.processes.remember(before.processes)
        self.logs.remember(before.logs)
        self.holders.remember(before.holders)
        self.commands.remember(before.commands)
        if before.running is not None:
            self.running = (frozenset(before.running[0]), before.running[1])

    def tick(self, now: float) -> Report:
        """One look at everything. A part that fails leaves its share empty and a sentence in `problems`."""
        seen = self.seen = loop.Isolated()
        deadline_s = self.config.agent.probe_deadline
        self.probes.check()
        self.probes.poll(now)
        self.gpus.ask(now, deadline_s)
        self.processes.owners = {watch.job_id: watch.uid for watch in self.logs.watch.values()}
        self.processes.seats = self.logs.seats()
        processes = loop.isolate(
            "process", lambda: self.processes.collect(now, deadline_s), _NO_PROCESSES, seen
        )
        processes = self.mounts.settled(processes, now)
        self.processes.mounts = self.logs.mounts
        logs, events, dropped = loop.isolate(
            "job_log", partial(self._collect_logs, processes, now, deadline_s), _NO_LOGS, seen
        )
        self.commands.processes = processes
        mounts = loop.isolate("mount", partial(self._collect_mounts, logs, processes, now), _NO_MOUNTS, seen)
        self.commands.mounts = mounts
        rows, saved = loop.isolate(
            "checkpoint", partial(self._collect_checkpoints, processes, now), _NO_CHECKPOINTS, seen
        )
        gpus = loop.isolate("gpu", partial(self.gpus.collect, now), _NO_GPUS, seen)
        self.gpus.suspect((p.pid for p in processes if p.blocked is not None and p.role is Role.RANK), now)
        holders = loop.isolate("orphans", partial(self._collect_holders, gpus, now), _NO_HOLDERS, seen)
        node_events, lost = loop.isolate(
            "kernel_log", partial(self._collect_node_events, gpus, now), _NO_NODE_EVENTS, seen
        )
        self._note_problems(seen, now)
        named, unnamed = choose(processes, self._told, crowd=self.processes.crowd)
        self._told = frozenset((row.pid, row.start_ticks) for row in named) if unnamed else frozenset()
        self.sequence += 1
        if self.sequence % TRIM_EVERY == FIRST_TRIM:
            give_back_memory()
        report = Report(
            node=self.node,
            boot_id=self.boot_id,
            agent_id=self.agent_id,
            sequence=self.sequence,
            interval_s=self.config.agent.interval,
            agent_version=slurm_watchdog.__version__,
            processes=named,
            left_out=unnamed,
            logs=logs,
            events=(*events, *saved),
            events_dropped=dropped,
            mounts=mounts,
            unanswered=self.mounts.take_unanswered(),
            hung_probes=self.probes.hung(now),
            gpus=gpus,
            node_events=node_events,
            node_events_dropped=lost + self.gpus.events_dropped,
            checkpoints=rows,
            gpu_holders=holders,
            wishes=loop.isolate("wishes", self.processes.wishes, (), seen),
            results=self.commands.take_results(),
            problems=tuple(seen.problems),
        )
        return masked(report)

    def tell_again(self) -> None:
        """The controller is new and knows nothing: the next report begins with the recent past."""
        self.logs.tell_again()
        self.checkpoints.tell_again()
        if self.kernel is not None:
            self.kernel.tell_again()

    @property
    def could_see(self) -> bool:
        """Whether the last tick knows which processes there are: without that, its report would say that all are gone."""
        return "process" not in self.seen.failed

    def close(self) -> None:
        """Keeps on disk what the next agent should know, and lets the children go."""
        if self._closed:
            return
        self._closed = True
        self._save()
        self.probes.close()

    def leave(self, reports: tuple[Waiting, ...], controller_id: str) -> int:
        """As `close`, for an agent that this process becomes by exec: returns the descriptor with all that it should know. Raises OSError."""
        self._save()
        fd = write_handover(self.memory(reports, controller_id))
        self._closed = True
        self.probes.close()
        return fd

    def memory(self, reports: tuple[Waiting, ...], controller_id: str) -> Handover:
        """What this agent knows; its children that have something to do are the next one's from now on."""
        running = self.running
        return Handover(
            children=self.probes.leave(),
            reports=reports,
            processes=self.processes.memory(),
            logs=self.logs.memory(),
            holders=self.holders.memory(),
            commands=self.commands.memory(),
            running=None if running is None else (tuple(sorted(running[0])), running[1]),
            controller_id=controller_id,
        )

    def _save(self) -> None:
        if self.kernel is not None:
            try:
                self.kernel.close(clock.monotonic())
            except SpawnerDied:
                pass  # they got the signal to end, too, and were faster: the position is as old as it was saved last

    def _collect_logs(
        self, processes: tuple[Process, ...], now: float, deadline_s: float
    ) -> tuple[tuple[LogFile, ...], tuple[Event, ...], int]:
        jobs = {process.job_id for process in processes} | set(self.logs.jobs)
        environs = {job_id: self.processes.environ_of(job_id) for job_id in jobs}
        return self.logs.collect(now, processes, environs, deadline_s)

    def _collect_mounts(
        self, logs: tuple[LogFile, ...], processes: tuple[Process, ...], now: float
    ) -> tuple[MountProbe, ...]:
        """The filesystems with logs, working directories and checkpoints of jobs that have processes here, then those on which these
        have files open."""
        self.commands.watch_jobs(tuple(self.logs.watch.values()), now, self.jobs_here(now))
        self.commands.advance(now)
        places = [(os.path.dirname(row.path), self.logs.owner_of(row.job_id)) for row in logs]
        for job_id in self.logs.jobs:
            uid = self.logs.owner_of(job_id)
            watch = self.logs.watch.get(job_id)
            named = (
                self.processes.working_directory_of(job_id),
                *(watch.checkpoint_directories if watch else ()),
                *self.processes.checkpoint_directories_of(job_id),
            )
            places += [(path, uid) for path in named if path]
        self.open_mounts.look(processes, now, self.config.agent.probe_deadline)
        blocked = (point for each in processes if each.blocked for point in each.blocked.candidates)
        places += [(point, -1) for point in (*blocked, *self.open_mounts.places())]
        question = (tuple(dict.fromkeys(places)), self.logs.mounts)
        if question != self._wanted_for:  # a node has hundreds of mounts, and neither changes in most ticks
            self._wanted_for = question
            self._wanted = wanted_mounts(*question, self.mounts.write_on)
        return self.mounts.collect(now, self.config.agent.probe_deadline, self._wanted)

    def _collect_checkpoints(
        self, processes: tuple[Process, ...], now: float
    ) -> tuple[tuple[Checkpoint, ...], tuple[Event, ...]]:
        """What the controller names is looked at where it says so; what command lines name, on the node of rank 0 alone."""
        directories = {
            job_id: list(watch.checkpoint_directories) for job_id, watch in self.logs.watch.items()
        }
        for job_id in {
            process.job_id for process in processes if process.rank == 0 and process.role is Role.RANK
        }:
            directories.setdefault(job_id, []).extend(self.processes.checkpoint_directories_of(job_id))
        return self.checkpoints.collect(
            now, self.config.agent.probe_deadline, directories, self.commands.awaiting_checkpoints
        )

    def _collect_holders(self, gpus: tuple[Gpu, ...], now: float) -> tuple[GpuHolder, ...]:
        table, ours = self.processes.table.entries, self.processes.ours
        return self.holders.collect(now, table, ours, gpus, self.jobs_here(now))

    def jobs_here(self, now: float) -> frozenset[str] | None:
        """The ids of all jobs that Slurm has on this node; None while that is not known."""
        if self.running is None or now - self.running[1] > RUNNING_LIFETIME_S:
            return None
        return self.running[0]

    def _objection_to_ending(self, command: EndProcess, now: float) -> str | None:
        table, ours = self.processes.table.entries, self.processes.ours
        return self.holders.objection(command, table, ours, self.jobs_here(now))

    def _collect_node_events(self, gpus: tuple[Gpu, ...], now: float) -> tuple[tuple[NodeEvent, ...], int]:
        """What NVML and the kernel said; a line that names a PCI address gets the UUID of the GPU there."""
        kernel, lost = self.kernel.collect(now) if self.kernel is not None else ((), 0)
        uuids = {gpu.pci_bus_id: gpu.uuid for gpu in gpus if gpu.pci_bus_id and gpu.uuid}
        joined = (
            msgspec.structs.replace(event, gpu_uuid=uuids[event.pci_bus_id])
            if event.gpu_uuid is None and event.pci_bus_id in uuids
            else event
            for event in kernel
        )
        return (*self.gpus.take_events(now), *joined), lost

    def _note_problems(self, seen: loop.Isolated, now: float) -> None:
        """Collectors that worked and could not see: said in the report, and no success in the metrics."""
        found = {
            "gpu": self.gpus.problem,
            "kernel_log": self.kernel.problem if self.kernel is not None else None,
        }
        for name, problem in found.items():
            if problem:
                seen.problems.append(f"{name}: {problem}")
                seen.failed.add(name)
        waiting_s = self.gpus.waiting_s(now)
        if waiting_s is not None and waiting_s >= SLOW_NVML_S:
            seen.problems.append(f"gpu: NVML has not answered for {waiting_s:.0f} s, and no GPU is known yet")
            seen.failed.add("gpu")
        for problem in (self.processes.problem, self.processes.unseen):
            if problem:
                seen.problems.append(f"process: {problem}")  # what it does see is good
        seen.problems.extend(f"process: {problem}" for problem in self.processes.identities.problems())
        seen.problems.extend(self.probes.problems())
