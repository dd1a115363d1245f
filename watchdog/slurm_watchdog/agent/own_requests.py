"""What the agent's own workers do besides the helper's share: nothing of it takes rights, so no helper does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta

from slurm_watchdog.agent.evidence import node_settings
from slurm_watchdog.agent.files import as_owner
from slurm_watchdog.agent.gpu import nvml
from slurm_watchdog.agent.helper.requests import TASKS, Task
from slurm_watchdog.agent.kernel import position
from slurm_watchdog.agent.processes import identify
from slurm_watchdog.agent.reload import validate_in_child
from slurm_watchdog.agent.workers.request_types import CheckConfig, Path, ProbeDirectory, ReadGpus

OWN_TASKS: Final[Mapping[str, Task]] = {
    **TASKS,
    "read_node_settings": Task(None, node_settings.read_node_settings),
    "look_at_mount": Task(ProbeDirectory, as_owner.probe_mount),
    "name_users": Task(Annotated[list[int], Meta(max_length=64)], identify.name_users),
    "read_gpus": Task(ReadGpus, nvml.read_gpus),
    "read_state": Task(Path, position.read_state),
    "write_state": Task(tuple[Path, str], position.write_state),
    "check_config": Task(CheckConfig, validate_in_child.check_config),
}
"""Everything that an agent's own workers do: the helper's share too, where there is no helper."""
