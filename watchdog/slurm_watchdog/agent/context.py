"""What an agent's collectors share, made once at its start from the configuration and from the rights that
this process has."""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from slurm_watchdog.agent.children.become_user import may_become_others
from slurm_watchdog.agent.children.children import Children
from slurm_watchdog.agent.collectors.collector import CollectorContext, Sections
from slurm_watchdog.agent.delivery.courier_link import CourierLink, Starter, courier_command
from slurm_watchdog.agent.files.mount_probing import MountProber
from slurm_watchdog.agent.gpu.orphan_processes import OrphanGpuProcesses
from slurm_watchdog.agent.gpu.reader import GpuReader
from slurm_watchdog.agent.logs.job_logs import JobLogs
from slurm_watchdog.agent.memory import Memory
from slurm_watchdog.agent.proc.kmsg import TAIL
from slurm_watchdog.agent.proc.table import MAX_PLACES, ProcessTable
from slurm_watchdog.agent.processes.reader import ProcessReader
from slurm_watchdog.agent.processes.supervisor_link import SupervisorLink
from slurm_watchdog.agent.processes.user_looks import UserLooks
from slurm_watchdog.agent.settings import Settings
from slurm_watchdog.agent.tasks import TASKS
from slurm_watchdog.base.mounts import read_mounts
from slurm_watchdog.model.supervisor import AGENT_SOCKET


def make_context(
    config: Settings, node: str, boot_id: str, once: bool, before: Memory, keep_position: Callable[[int, float], None]
) -> CollectorContext:
    """`before` is what the agent before this one knew; `keep_position` is given the kernel log's, and now, when it
    changes."""
    settings, jobs = config.agent, before.jobs
    _allow_descriptors(2 * MAX_PLACES)
    becomes = not config.personal and may_become_others()
    table = ProcessTable()
    children = Children(TASKS, former=before.hung, is_here=table.is_here if becomes else lambda uid, now: True)
    looks = UserLooks(children, table)
    logs = JobLogs(looks, read_mounts(), node, settings.log_patterns, become_owner=becomes, here=jobs)
    courier = Starter(courier_command(node, config.security, config.controller_urls), is_child=not becomes)
    processes = ProcessReader(
        looks, lambda: logs.mounts, owners=jobs.owners, read_seats=logs.seats, read_helpers=courier.pids
    )
    return CollectorContext(
        children=children,
        settings=settings,
        node=node,
        boot_id=boot_id,
        once=once,
        sections=Sections(),
        jobs=jobs,
        processes=processes,
        logs=logs,
        mounts=MountProber(
            children, node, settings.mount_probe_interval, frozenset(settings.mount_probe_write), stagger=not once
        ),
        gpus=GpuReader(children),
        orphan_gpu_processes=OrphanGpuProcesses(children, settings.orphan_grace, processes.reads.devices_of),
        supervisors=SupervisorLink("" if once or not becomes else AGENT_SOCKET, jobs, processes.table.entries),
        courier=CourierLink(courier, courier.bury),
        kernel_records=deque(maxlen=TAIL),
        kernel_log_position=before.kernel_log,
        keep_position=keep_position,
    )  # fmt: skip


def _allow_descriptors(wanted: int) -> None:
    """An open directory of /proc for each process of the node, as far as this process may have so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(wanted, hard)), hard))
