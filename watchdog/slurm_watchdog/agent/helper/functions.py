"""What the helper's children can do, by name: see slurm_watchdog.agent.helper.requests for who may ask for it, and with what."""

from __future__ import annotations

from typing import Final

from slurm_watchdog.agent.checkpoints import scan
from slurm_watchdog.agent.evidence import cores, last_lines, leftover_files, process_state, stacks
from slurm_watchdog.agent.files import as_owner
from slurm_watchdog.agent.logs import follow
from slurm_watchdog.agent.processes import identify, open_mounts, terminate, thread_calls
from slurm_watchdog.agent.workers.child import Function

HELPER_FUNCTIONS: Final[dict[str, Function]] = {
    "identify": identify.identify,
    "resolve": identify.resolve,
    "list_mounts": identify.list_mounts,
    "list_open_logs": identify.list_open_logs,
    "list_open_mounts": open_mounts.list_open_mounts,
    "look_at_calls": thread_calls.look_at_calls,
    "follow": follow.follow,
    "dump_stacks": stacks.dump_stacks,
    "end_process": terminate.end_process,
    "look_at_processes": process_state.look_at_processes,
    "last_kernel_lines": last_lines.last_kernel_lines,
    "last_lines": last_lines.last_lines,
    "find_files": leftover_files.find_files,
    "read_core": cores.read_core,
    "look_at_checkpoints": scan.look,
    "probe_mount": as_owner.probe_mount,
    "write_kill_switch": as_owner.write_kill_switch,
    "remove_kill_switch": as_owner.remove_kill_switch,
    "prepare_directory": as_owner.prepare_directory,
    "remove_directory": as_owner.remove_directory,
    "empty_directory": as_owner.empty_directory,
}
