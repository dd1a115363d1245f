"""Everything that the agent's children can do, by name."""

from __future__ import annotations

from typing import Final

from watchdog.agent import config_check, file_actions, identify, nvml
from watchdog.agent.collectors import kernel_log
from watchdog.agent.evidence import node_settings
from watchdog.agent.helper_functions import HELPER_FUNCTIONS
from watchdog.agent.probe_child import Function

FUNCTIONS: Final[dict[str, Function]] = {
    **HELPER_FUNCTIONS,
    "read_node_settings": node_settings.read_node_settings,
    "look_at_mount": file_actions.probe_mount,
    "name_users": identify.name_users,
    "read_gpus": nvml.read_gpus,
    "read_state": kernel_log.read_state,
    "write_state": kernel_log.write_state,
    "check_config": config_check.check_config,
}
"""What is beyond the helper's share takes no rights: the agent does it in children of its own."""
