"""What the helper's children can do, by name: see watchdog.agent.tasks for who may ask for it, and with what."""

from __future__ import annotations

from typing import Final

from watchdog.agent import call_looks, checkpoints, end_process, file_actions, identify, open_mounts, tail
from watchdog.agent.evidence import cores, found_files, last_lines, process_state, stacks
from watchdog.agent.probe_child import Function

HELPER_FUNCTIONS: Final[dict[str, Function]] = {
    "identify": identify.identify,
    "resolve": identify.resolve,
    "list_mounts": identify.list_mounts,
    "list_open_logs": identify.list_open_logs,
    "list_open_mounts": open_mounts.list_open_mounts,
    "look_at_calls": call_looks.look_at_calls,
    "follow": tail.follow,
    "dump_stacks": stacks.dump_stacks,
    "end_process": end_process.end_process,
    "look_at_processes": process_state.look_at_processes,
    "last_kernel_lines": last_lines.last_kernel_lines,
    "last_lines": last_lines.last_lines,
    "find_files": found_files.find_files,
    "read_core": cores.read_core,
    "look_at_checkpoints": checkpoints.look,
    "probe_mount": file_actions.probe_mount,
    "write_kill_switch": file_actions.write_kill_switch,
    "remove_kill_switch": file_actions.remove_kill_switch,
    "prepare_directory": file_actions.prepare_directory,
    "remove_directory": file_actions.remove_directory,
    "empty_directory": file_actions.empty_directory,
}
