"""Everything that children do: a closed table. A request that is not here reaches no function.

What looks into processes of a user is done by a child that is this user and opens no file of his; what touches files by
a child that is their owner: whatever path it gets, it can do no more than that user. All else takes no rights at all.
"""

from __future__ import annotations

from slurm_watchdog.agent.checkpoints import scan
from slurm_watchdog.agent.children.become_user import Kind
from slurm_watchdog.agent.children.child import Task
from slurm_watchdog.agent.children.requests import (
    DumpProcessStacks,
    FindFiles,
    FindListeners,
    Follow,
    IdentifyProcesses,
    LastLines,
    ListMounts,
    ListOpenFiles,
    NameUsers,
    ParseRas,
    ProbeDirectory,
    ProbeMountPoint,
    ReadGpus,
    ReadLinks,
    ReadNodeSettings,
    ReadProcessStates,
    ReadSharedMemory,
    ReadThreads,
    ReadTitles,
    RemoveSwitch,
    ResolveCalls,
    ScanCheckpoints,
    SignalProcess,
    WriteSwitch,
)
from slurm_watchdog.agent.collectors import link
from slurm_watchdog.agent.evidence import found_files, last_lines, nccl_ras, node_settings, process_state, stacks
from slurm_watchdog.agent.files import as_owner
from slurm_watchdog.agent.gpu import nvml
from slurm_watchdog.agent.logs import follow
from slurm_watchdog.agent.processes import identify, open_mounts, terminate, thread_calls

TASKS = (
    Task(IdentifyProcesses, identify.identify, Kind.PROCESSES),
    Task(ResolveCalls, identify.resolve_calls, Kind.PROCESSES),
    Task(ListOpenFiles, open_mounts.list_open_files, Kind.PROCESSES),
    Task(ReadSharedMemory, open_mounts.read_shared_memory, Kind.PROCESSES),
    Task(ReadThreads, thread_calls.read_threads, Kind.PROCESSES),
    Task(ReadProcessStates, process_state.read_process_states, Kind.PROCESSES),
    Task(DumpProcessStacks, stacks.dump_stacks, Kind.PROCESSES),
    Task(FindListeners, nccl_ras.find_listeners, Kind.PROCESSES),
    Task(SignalProcess, terminate.end_process, Kind.PROCESSES),
    Task(Follow, follow.follow, Kind.FILES),
    Task(LastLines, last_lines.last_lines, Kind.FILES),
    Task(FindFiles, found_files.find_files, Kind.FILES),
    Task(ScanCheckpoints, scan.scan_checkpoints, Kind.FILES),
    Task(ProbeDirectory, as_owner.probe_mount, Kind.FILES),
    Task(WriteSwitch, as_owner.write_kill_switch, Kind.FILES),
    Task(RemoveSwitch, as_owner.remove_kill_switch, Kind.FILES),
    Task(ReadTitles, identify.read_titles, Kind.OWN),
    Task(ListMounts, identify.list_mounts, Kind.OWN),
    Task(NameUsers, identify.name_users, Kind.OWN),
    Task(ProbeMountPoint, as_owner.probe_mount, Kind.OWN),
    Task(ReadNodeSettings, node_settings.read_node_settings, Kind.OWN),
    Task(ReadLinks, link.read_links, Kind.OWN),
    Task(ReadGpus, nvml.read_gpus, Kind.OWN),
    Task(ParseRas, nccl_ras.parse_answer, Kind.OWN),
)
