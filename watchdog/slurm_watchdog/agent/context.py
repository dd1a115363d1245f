"""What an agent's collectors share, made once at its start from the configuration and from the rights that
this process has."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial

from slurm_watchdog.agent.collectors import link
from slurm_watchdog.agent.collectors.collector import CollectorContext, Sections
from slurm_watchdog.agent.delivery.courier_link import CourierLink, Starter, courier_command
from slurm_watchdog.agent.evidence import nccl_ras, node_settings
from slurm_watchdog.agent.files import as_owner
from slurm_watchdog.agent.files.mount_probing import MountProber
from slurm_watchdog.agent.gpu import nvml
from slurm_watchdog.agent.gpu.orphan_processes import OrphanGpuProcesses
from slurm_watchdog.agent.gpu.reader import GpuReader
from slurm_watchdog.agent.helper.requests import TASKS, Dispatch, Task, tasks_by_name
from slurm_watchdog.agent.logs.job_logs import JobLogs
from slurm_watchdog.agent.memory import Memory
from slurm_watchdog.agent.proc.files import links_of
from slurm_watchdog.agent.proc.kmsg import KmsgFile
from slurm_watchdog.agent.processes import identify
from slurm_watchdog.agent.processes.delegated_proc import DelegatedFiles
from slurm_watchdog.agent.processes.reader import ProcessReader
from slurm_watchdog.agent.processes.supervisor_link import SupervisorLink
from slurm_watchdog.agent.settings import Settings
from slurm_watchdog.agent.workers.become_user import may_become_others, why_too_mighty
from slurm_watchdog.agent.workers.pool import WorkerPool
from slurm_watchdog.agent.workers.request_types import (
    NameUsers,
    ParseRas,
    ProbeMountPoint,
    ReadGpus,
    ReadLinks,
    ReadNodeSettings,
)
from slurm_watchdog.agent.workers.spawner import HelperLink, is_usable
from slurm_watchdog.base.mounts import read_mounts
from slurm_watchdog.model.supervisor import AGENT_SOCKET

log = logging.getLogger(__name__)

OWN_TASKS = tasks_by_name(
    *TASKS.values(),
    Task(ParseRas, nccl_ras.parse_answer),
    Task(ReadNodeSettings, node_settings.read_node_settings),
    Task(ProbeMountPoint, as_owner.probe_mount),
    Task(NameUsers, identify.name_users),
    Task(ReadGpus, nvml.read_gpus),
    Task(ReadLinks, link.read_links),
)
"""Everything that an agent's own workers do: the helper's share too, where there is no helper."""


def make_context(
    config: Settings, node: str, boot_id: str, once: bool, before: Memory, keep_position: Callable[[int, float], None]
) -> CollectorContext:
    """Forks the parent of all workers: to be called from the main thread, before any other thread. `before` is what
    the agent before this one knew; `keep_position` is given the kernel log's, and now, when it changes."""
    settings, jobs = config.agent, before.jobs
    helper = HelperLink(settings.helper_socket) if is_usable(settings.helper_socket) else None
    personal = config.personal or (helper is None and why_too_mighty() is None)
    dispatch = Dispatch(
        OWN_TASKS,
        True,
        partial(log.warning, "refused: %s"),
        config.kill_switch_prefixes,
        os.getuid() if personal else None,
    )
    workers = WorkerPool(dispatch, helper=helper, helped=TASKS, former=before.hung)
    far = DelegatedFiles(workers) if helper is not None else None
    becomes = helper is not None or (not personal and may_become_others())
    logs = JobLogs(workers, read_mounts(), node, settings.log_patterns, become_owner=becomes, here=jobs)
    processes = ProcessReader(workers, lambda: logs.mounts, files=far, owners=jobs.owners, read_seats=logs.seats)
    courier = Starter(courier_command(node, config.security, config.controller_urls), is_child=personal)
    return CollectorContext(
        workers=workers,
        settings=settings,
        node=node,
        boot_id=boot_id,
        once=once,
        sections=Sections(),
        jobs=jobs,
        processes=processes,
        logs=logs,
        mounts=MountProber(
            workers, node, settings.mount_probe_interval, frozenset(settings.mount_probe_write), stagger=not once
        ),
        gpus=GpuReader(workers),
        orphan_gpu_processes=OrphanGpuProcesses(workers, settings.orphan_grace,
        links_of=far.devices_of if far else links_of),
        supervisors=SupervisorLink("" if once or personal else AGENT_SOCKET, jobs, processes.table.entries),
        courier=CourierLink(courier, courier.bury),
        open_kernel_log=KmsgFile if helper is None else helper.open_kernel_log,
        kernel_log_position=before.kernel_log,
        keep_position=keep_position,
    )  # fmt: skip
