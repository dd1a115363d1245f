"""Requests to children: a type for each, with the bounds of its fields, and with the type of its answer.

The function that does each, and the kind of child, are in slurm_watchdog.agent.tasks.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from slurm_watchdog.agent.children.answers import (
    FollowedLogs,
    Footprints,
    GpuReading,
    IdentifiedProcess,
    LinkCounters,
    Listeners,
    LogEnd,
    OpenFiles,
    ResolvedCall,
    ScannedPlace,
    SeenThreads,
)
from slurm_watchdog.base import clock
from slurm_watchdog.base.mounts import Mount
from slurm_watchdog.base.structs import dataclass_transform  # type: ignore[attr-defined]
from slurm_watchdog.model.collective_records import RasAnswer
from slurm_watchdog.model.evidence import FoundFile, ProcessStack, ProcessState
from slurm_watchdog.model.kill_switch import MAX_FIELD, MAX_PATH
from slurm_watchdog.model.observations import MountProbe, Process, Role
from slurm_watchdog.model.protocol import ProcessEnd

Pid = Annotated[int, Meta(ge=1, le=2**22)]  # PID_MAX_LIMIT, linux/threads.h
Ticks = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0.0, le=600.0)]
Word = Annotated[str, Meta(max_length=256)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Node = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")]
Path = Annotated[str, Meta(pattern=r"^/[^\0]*\Z", max_length=MAX_PATH - 1)]
HomePath = Annotated[str, Meta(pattern=r"^~?/[^\0]*\Z", max_length=MAX_PATH - 1)]
Pattern = Annotated[str, Meta(max_length=2048)]
Field = Annotated[str, Meta(max_length=MAX_FIELD)]
Value = TypeVar("Value")
LOOK_S = 0.25  # Of wall-clock time for the processes of one request: thousands take that long.
PLACE = struct.Struct("=i")  # What is in the page that a child shares with the agent.


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Request(msgspec.Struct, Generic[Value], frozen=True, forbid_unknown_fields=True):
    """One request, and in brackets what its answer is. Checked against its type before any function sees it."""

    task: ClassVar[str]  # Its name.


@cache
def answer_type(request: type[Request[Any]]) -> Any:
    """The type in brackets."""
    (value,) = get_args(request.__orig_bases__[0])  # type: ignore[attr-defined]
    return value


# -- about processes of one user -----------------------------------------------------------------------------------


class IdentifyProcesses(Request[list[IdentifiedProcess]]):
    """Processes of one user to be identified; the answer is in the same order, and holds the first ones at least."""

    task = "identify"
    pids: Annotated[list[Pid], Meta(max_length=512)]


class BlockedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thread in a system call."""

    pid: Pid
    thread: Pid
    syscall: Annotated[str, Meta(max_length=64)] | None
    args: Annotated[list[int], Meta(max_length=6)]


class ResolveCalls(Request[list[ResolvedCall]]):
    """Calls whose files are wanted; the answer is in the same order."""

    task = "resolve_calls"
    calls: Annotated[list[BlockedCall], Meta(max_length=512)]


class ReadTitles(Request[list[IdentifiedProcess]]):
    """Processes of root's or the system's, among them slurmstepd; the answer is in the same order."""

    task = "read_titles"
    pids: Annotated[list[Pid], Meta(max_length=512)]


class ListMounts(Request[list[Mount]]):
    """The agent's own mounts."""

    task = "list_mounts"


class ListOpenFiles(Request[dict[str, OpenFiles]]):
    """(job, pid, role, whether mapped files count) of processes; the answer is by job."""

    task = "list_open_files"
    processes: Annotated[list[tuple[Word, Pid, Role, bool]], Meta(max_length=256)]


class ReadSharedMemory(Request[list[tuple[int, int] | None]]):
    """Processes; the answer has (bytes in use, size) of a /dev/shm of its own, in the same order, or None."""

    task = "read_shared_memory"
    pids: Annotated[list[Pid], Meta(max_length=64)]


ThreadFile = tuple[Literal["io", "cpu", "call", "devices"], Pid, Pid]  # What is wanted, process, thread.


class ReadThreads(Request[SeenThreads]):
    """Threads to be looked at, by what is wanted of each."""

    task = "read_threads"
    files: Annotated[list[ThreadFile], Meta(max_length=4096)]


class ReadProcessStates(Request[list[ProcessState]]):
    """What processes do, as far as the kernel says without stopping them; the answer is in the same order."""

    task = "read_process_states"
    processes: Annotated[list[tuple[Pid, Ticks]], Meta(max_length=256)]


class DumpProcessStacks(Request[list[ProcessStack]]):
    """Python stacks of processes, within `budget_s`; the answer is in the same order."""

    task = "dump_stacks"
    node: Name
    budget_s: Seconds
    processes: Annotated[list[Process], Meta(max_length=64)]
    may_hang: int = 1  # So many programs may be left behind that do not end when they are killed; then no more start.


class SignalProcess(Request[ProcessEnd]):
    """One process that outlived its job on a GPU; processes.terminate believes none of it."""

    task = "end_process"
    pid: Pid
    start_ticks: Ticks
    uid: int
    comm: Annotated[str, Meta(max_length=64)]
    boot_id: Annotated[str, Meta(max_length=64)]
    job_id: Annotated[str, Meta(pattern=r"^[0-9]{1,10}\Z")]
    minors: Annotated[list[Annotated[int, Meta(ge=0, le=1023)]], Meta(min_length=1, max_length=1024)]
    how: Literal["look", "term", "kill"]


# -- as the owner of the files -------------------------------------------------------------------------------------


class Follow(Request[FollowedLogs]):
    """News of log files; `taken` is the token of the last answer that was used."""

    task = "follow"
    files: Annotated[list[tuple[Word, Path, int | None]], Meta(max_length=4096)]
    """(job, path, where to begin unless that is not known)."""
    globs: Annotated[list[tuple[Word, Path]], Meta(max_length=4096)] = []
    own: Annotated[dict[Word, Annotated[list[Pattern], Meta(max_length=64)]], Meta(max_length=512)] = {}
    """Of each job, the site's patterns of progress."""
    closely: Annotated[list[Word], Meta(max_length=512)] = []
    """Jobs of which the log that carries the step is looked at each second, until the next request."""
    taken: Word | None = None


class LastLines(Request[list[LogEnd]]):
    """The last lines of logs, given as (job, path)."""

    task = "last_lines"
    files: Annotated[list[tuple[Word, Path]], Meta(max_length=64)]


class FindFiles(Request[list[FoundFile]]):
    """Core files, Flight Recorder dumps and error files of a job."""

    task = "find_files"
    files: Annotated[list[tuple[HomePath, int | None, float]], Meta(max_length=1024)]
    """(path, rank, seconds that it may be old) of dumps."""
    uid: int
    max_bytes: Annotated[int, Meta(ge=0, le=8 << 20)]  # Of all dumps together, compressed.
    places: Annotated[list[tuple[Path, Name]], Meta(max_length=256)]  # (directory, pattern of names) of core files.
    max_age_s: float
    pipes: Annotated[list[tuple[Path, int | None]], Meta(max_length=256)] = []
    """(path, rank): a rank that reads from its own writes its dump again when something is written into it."""
    error_files: Annotated[list[tuple[Path, int | None]], Meta(max_length=256)] = []
    """(path, rank) of files into which torchelastic writes why a rank ended."""
    roots: Annotated[list[tuple[int | None, Pid, Ticks]], Meta(max_length=256)] = []
    """(rank, pid, start ticks): the process below whose root files of this rank are; rank None: those of all others."""


class FindListeners(Request[Listeners]):
    """Whether processes of a job listen on a TCP port of this node, and they alone."""

    task = "find_listeners"
    processes: Annotated[list[tuple[Pid, Ticks]], Meta(max_length=1024)]  # (pid, start ticks) of all here.
    port: Annotated[int, Meta(ge=1, le=65535)]


class ParseRas(Request[RasAnswer]):
    """What NCCL's RAS of a job has answered to the courier, compressed."""

    task = "parse_ras"
    answer: bytes


PlaceKind = Literal["directory", "tracker", "clock"]
"""A directory of checkpoints, a file that says a step, a file that changes with progress."""


class ScanCheckpoints(Request[list[ScannedPlace]]):
    """Places on one mount; the answer is in the same order."""

    task = "scan_checkpoints"
    mount: Path
    others: Annotated[list[Path], Meta(max_length=4096)]  # Mount points below it: nothing there is touched.
    budget_s: Seconds
    places: Annotated[list[tuple[PlaceKind, Word, Path, Footprints | None]], Meta(max_length=64)]
    """(kind, job, path, what the last scan of a directory gave back)."""


class ProbeDirectory(Request[MountProbe]):
    """Whether a mount answers, by a look or a write in a directory on it."""

    task = "probe_mount"
    directory: Path
    mount: Path
    write: bool
    node: Node


class KillSwitch(Request[None]):
    """A kill switch: its line is composed of these values by the child, and never handed to it."""

    path: Path
    node: Node
    by: Annotated[str, Meta(min_length=1, max_length=MAX_FIELD)]
    why: Field
    incident: Field
    decision: Field


class WriteSwitch(KillSwitch):
    """To be created, by `until_s` of the monotonic clock: later it was answered that it is not there."""

    task = "write_kill_switch"
    until_s: float | None = None


class RemoveSwitch(KillSwitch):
    """To be removed, if it says the same."""

    task = "remove_kill_switch"


# -- of the agent for itself ---------------------------------------------------------------------------------------


class ProbeMountPoint(ProbeDirectory):
    """The same by the agent's own user."""

    task = "probe_mount_point"


class NameUsers(Request[dict[str, str]]):
    """Numeric users; the answer has their names, by number in decimal, without those that no one knows."""

    task = "name_users"
    uids: Annotated[list[int], Meta(max_length=64)]


class ReadNodeSettings(Request[list[tuple[str, str]]]):
    """(name, value) of what may differ between two nodes."""

    task = "read_node_settings"


class ReadLinks(Request[list[LinkCounters]]):
    """Network links of this node with their counters."""

    task = "read_links"


class ReadGpus(Request[GpuReading]):
    """NVML's values of every GPU: what is due of them."""

    task = "read_gpus"
    now: float
    everything: bool = False  # Processes and health of every GPU, whatever it takes.
    missed: bool = False  # The agent knows GPUs that NVML does not list any more.


Memory = TypeVar("Memory")
Item = TypeVar("Item")


@dataclass
class WorkerState:
    """One child's: the functions that serve its requests get it with each of them."""

    uid: int = -1  # The user that it has become; -1: it stays the agent's.
    place: mmap.mmap | None = None  # Shared with the agent.
    left: list[int] = field(default_factory=list)  # Pids of programs that this request has left behind, killed in vain.
    is_limited: bool = False  # Its address space is bounded already.
    between: Callable[[], None] | None = None  # Called each second until the next request comes.
    _memories: dict[type[Any], Any] = field(default_factory=dict)

    @property
    def own(self) -> int:
        """Whose processes it may look into."""
        return self.uid if self.uid >= 0 else os.getuid()

    def note(self, index: int) -> None:
        """What follows is about the process of this place in the request."""
        if self.place is not None:
            PLACE.pack_into(self.place, 0, index)

    def each(self, items: Sequence[Item]) -> Iterator[Item]:
        """These, each noted before it is looked at. On a machine without CPU it ends after LOOK_S, and what is missing
        in the answer is asked for again: a child that could never finish before its deadline would learn nothing."""
        end = clock.monotonic() + LOOK_S
        for index, item in enumerate(items):
            if index and clock.monotonic() >= end:
                return
            self.note(index)
            yield item

    def memory(self, kind: type[Memory]) -> Memory:
        """The one value of this type that lasts as long as the child; made when it is first wanted."""
        if kind not in self._memories:
            self._memories[kind] = kind()
        memory: Memory = self._memories[kind]
        return memory
