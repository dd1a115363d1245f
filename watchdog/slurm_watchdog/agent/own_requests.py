"""What the agent's own workers do besides the helper's share: nothing of it takes rights, so no helper does it."""

from __future__ import annotations

from typing import Final

from slurm_watchdog.agent.evidence import nccl_ras, node_settings
from slurm_watchdog.agent.files import as_owner, links
from slurm_watchdog.agent.files import kernel_log_position as position
from slurm_watchdog.agent.gpu import nvml
from slurm_watchdog.agent.helper.requests import TASKS, Task, tasks_by_name
from slurm_watchdog.agent.processes import identify
from slurm_watchdog.agent.reload import validate_in_child
from slurm_watchdog.agent.workers.request_types import (
    AskRas,
    CheckConfig,
    NameUsers,
    ProbeMountPoint,
    ReadGpus,
    ReadLinks,
    ReadNodeSettings,
    ReadState,
    WriteState,
)

OWN_TASKS: Final = tasks_by_name(
    *TASKS.values(),
    Task(AskRas, nccl_ras.ask_ras),
    Task(ReadNodeSettings, node_settings.read_node_settings),
    Task(ProbeMountPoint, as_owner.probe_mount),
    Task(NameUsers, identify.name_users),
    Task(ReadGpus, nvml.read_gpus),
    Task(ReadLinks, links.read_links),
    Task(ReadState, position.read_state),
    Task(WriteState, position.write_state),
    Task(CheckConfig, validate_in_child.check_config),
)
"""Everything that an agent's own workers do: the helper's share too, where there is no helper."""
