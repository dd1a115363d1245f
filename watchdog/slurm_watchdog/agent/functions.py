"""Everything that the agent's children can do, by name."""

from __future__ import annotations

from typing import Final

from slurm_watchdog.agent.evidence import node_settings
from slurm_watchdog.agent.files import as_owner
from slurm_watchdog.agent.gpu import nvml
from slurm_watchdog.agent.helper.functions import HELPER_FUNCTIONS
from slurm_watchdog.agent.kernel import position
from slurm_watchdog.agent.processes import identify
from slurm_watchdog.agent.reload import validate_in_child
from slurm_watchdog.agent.workers.child import Function

FUNCTIONS: Final[dict[str, Function]] = {
    **HELPER_FUNCTIONS,
    "read_node_settings": node_settings.read_node_settings,
    "look_at_mount": as_owner.probe_mount,
    "name_users": identify.name_users,
    "read_gpus": nvml.read_gpus,
    "read_state": position.read_state,
    "write_state": position.write_state,
    "check_config": validate_in_child.check_config,
}
"""What is beyond the helper's share takes no rights: the agent does it in children of its own."""
