"""Processes that hold a GPU and belong to no job that runs here.

Who holds one: NVML's lists, and the links in /proc/PID/fd to /dev/nvidiaN, which DataLoader workers keep that inherited
them and that NVML does not list. nvidiactl, nvidia-uvm and nvidia-caps are no GPU. Only links are read, a few in each
tick, never those of a running job's processes; so on a healthy node this costs next to nothing.

An accusation is made only if everything is known: the jobs that Slurm has here, the process's own environment, and that
it has been without a job for the grace. Root's own processes and known daemons are no one's orphans, unless they came
from a job.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.children.children import Answer, Children
from slurm_watchdog.agent.children.requests import NameUsers
from slurm_watchdog.agent.proc.entry import Entry, Key
from slurm_watchdog.agent.proc.files import (
    DEVICES,
    gpu_pattern,
    is_in_first_pid_namespace,
    is_the_kernels,
    other_thread,
    read_file,
)
from slurm_watchdog.base.structs import picked
from slurm_watchdog.knowledge.gpu_daemons import is_daemon
from slurm_watchdog.model.observations import Gpu, GpuHolder, Role
from slurm_watchdog.model.protocol import EndProcess

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
AT_ONCE = 16  # Processes whose open files are read in one tick: some 100 us each, in children of their users.
ROUND_S = 30.0  # Time between two looks at the same process, at least.
NVML_AGE_S = 90.0  # NVML's lists may be so old: a process that is younger is another one than the one they meant.
UNSEEN_JOB_GRACE_S = 60.0  # The grace at least, of a job that the controller has not named yet: it may have just begun.
MAX_JOBS = 1024  # Ids of jobs that are remembered to have run here.
USERS = "node:users"
DevicesOf = Callable[[Sequence[tuple[int, int]]], list[tuple[str, ...] | None]]


class OrphanMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Since when who has been without a job, and which jobs were here, for the agent that this one becomes."""

    since: tuple[tuple[Key, float], ...] = ()
    seen_running: tuple[str, ...] = ()


@dataclass
class OrphanGpuProcesses:
    """Remembers who was seen holding what, and since when without a job."""

    probes: Children
    grace_s: float
    devices_of: DevicesOf
    """Given (pid, thread) of several: how many files each has open, and which are devices; None where that can't be
    seen."""
    devices: str = DEVICES  # What the name of a GPU's device begins with; its number follows.
    trusts_nvml: bool | None = None  # Whether NVML's pids are our /proc's; None: only in the first PID namespace.
    _held: dict[Key, tuple[int, ...] | None] = field(default_factory=dict)
    """Numbers of the devices that the links of a process lead to; None: they may not be read."""
    _round: list[Key] = field(default_factory=list)
    _next_round: float = 0.0
    _since: dict[Key, float] = field(default_factory=dict)
    _seen_running: dict[str, None] = field(default_factory=dict)
    _daemons: dict[tuple[Key, str], bool] = field(default_factory=dict)
    _users: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.trusts_nvml is None:
            self.trusts_nvml = is_in_first_pid_namespace()
        self._has_uptime = is_the_kernels("/proc/uptime")
        self._is_gpu = gpu_pattern(self.devices)

    def memory(self) -> OrphanMemory:
        """What `remember` of the next agent takes."""
        return OrphanMemory(since=tuple(self._since.items()), seen_running=tuple(self._seen_running))

    def remember(self, memory: OrphanMemory) -> None:
        """Before the first look: an orphan that was reported is not dropped for a grace and reported again."""
        self._since |= dict(memory.since)
        self._seen_running |= dict.fromkeys(memory.seen_running)

    def collect(
        self, now: float, table: Mapping[int, Entry], ours: frozenset[int], gpus: tuple[Gpu, ...],
        running: frozenset[str] | None,
    ) -> tuple[GpuHolder, ...]:  # fmt: skip
        """Who holds a GPU without a job, the longest first. `table` is every process of the node by pid, `ours` the
        agent's own; `running` the ids of all jobs that Slurm has on this node, None while that is not known: then those
        of jobs are left out, and no one is said to be an orphan."""
        self._note_running(running)
        listed = _listed_by_nvml(gpus) if self.trusts_nvml else {}
        suspects: dict[Key, Entry] = {}
        busy_uids: set[int] = set()
        for pid, entry in table.items():
            member, uid = entry.member, entry.known.uid
            if member is None and uid == 0:
                continue  # most of a node's processes: kernel threads, the system's own
            if member is not None and not member.left_over and (running is None or member.job_id in running):
                busy_uids.add(uid)
            elif (member is None or running is not None) and not (
                entry.is_kernel_thread or not entry.has_living_thread or pid in ours
            ):
                suspects[entry.key] = entry  # something of it is left that could hold a GPU, and it is not ours
        has_gpus = gpus or self._held or any(os.path.exists(f"{self.devices}{minor}") for minor in (0, 1))
        if not suspects or not has_gpus:
            self._held.clear()
            self._since.clear()
            return ()
        self._forget(suspects)
        self._read_links(suspects, listed, now)
        uptime_s = float(read_file("/proc/uptime").split()[0]) if self._has_uptime else 0.0
        found = []
        for key, entry in suspects.items():
            if not self._is_known_well(entry, busy_uids):
                self._since.pop(key, None)
                continue
            lasted_s = now - self._since.setdefault(key, now)
            holder = self._describe(entry, gpus, listed.get(key[0]), uptime_s)
            seen_running = entry.member is not None and entry.member.job_id in self._seen_running
            grace_s = self.grace_s if seen_running else max(self.grace_s, UNSEEN_JOB_GRACE_S)
            if holder is not None and lasted_s >= grace_s:
                orphan_for_s = None if running is None else lasted_s
                found.append(replace(holder, orphan_for_s=orphan_for_s))
        self._ask_users({holder.uid for holder in found}, now)
        return tuple(sorted(found, key=lambda holder: -(holder.orphan_for_s or 0.0)))

    # -- who may be one ----------------------------------------------------------------------------------------

    def _note_running(self, running: frozenset[str] | None) -> None:
        for job_id in running or ():
            self._seen_running.pop(job_id, None)
            self._seen_running[job_id] = None
        while len(self._seen_running) > MAX_JOBS:
            del self._seen_running[next(iter(self._seen_running))]

    def _is_known_well(self, entry: Entry, busy_uids: set[int]) -> bool:
        """Whether its having no job is knowledge, and not a lack of it."""
        if self._is_daemon(entry):
            return False
        # All else rests on an environment, which anybody may clear or copy: a user who has a job here may be in that.
        return self._was_in_job(entry) or (entry.known.environ is not None and entry.known.uid not in busy_uids)

    def _was_in_job(self, entry: Entry) -> bool:
        """Whether its job is known by its control group, or because that job was seen here when it ran."""
        member = entry.member
        return entry.known.cgroup is not None or (
            member is not None and (member.left_over or member.job_id in self._seen_running)
        )

    def objection(
        self, asked: EndProcess, table: Mapping[int, Entry], ours: frozenset[int], running: frozenset[str] | None
    ) -> str | None:
        """Why this process is not to be ended, as far as this agent knows; None if nothing speaks against it. Arguments
        as in `collect`. Who may end it looks once more by himself: see slurm_watchdog.agent.processes.terminate."""
        if running is None:
            return "which jobs run here is not known"
        if asked.job_id in running:
            return f"Slurm has job {asked.job_id} here"
        entry = table.get(asked.pid)
        if entry is None or entry.known.start_ticks != asked.start_ticks:
            return None  # it has ended, or is too new to be it: the one who looks will say so
        if asked.pid in ours or entry.is_kernel_thread or self._is_daemon(entry):
            return "it is the system's or ours"
        member = entry.member
        if member is not None and member.job_id in running:
            return f"it is part of job {member.job_id}, which Slurm has here"
        others = (each.member.job_id for each in table.values() if each.member and each.known.uid == asked.uid)
        job_id = next((each for each in others if each in running), None) if entry.known.cgroup is None else None
        return None if job_id is None else f"its user has job {job_id} here now, which may be using it"

    def _is_daemon(self, entry: Entry) -> bool:
        if entry.member is not None:
            return False
        key = (entry.key, entry.known.comm)
        if key not in self._daemons:
            try:
                cgroup = read_file(f"/proc/{entry.known.pid}/cgroup").decode(errors="replace")
            except OSError:
                return True  # it is ending: nothing is said about it
            self._daemons[key] = is_daemon(entry.known.comm, entry.known.uid, cgroup)
        return self._daemons[key]

    def _forget(self, suspects: Mapping[Key, Entry]) -> None:
        self._held = {key: held for key, held in self._held.items() if key in suspects}
        self._since = {key: since for key, since in self._since.items() if key in suspects}
        self._daemons = {key: known for key, known in self._daemons.items() if key[0] in suspects}

    # -- what they hold ----------------------------------------------------------------------------------------

    def _read_links(self, suspects: Mapping[Key, Entry], listed: Mapping[int, object], now: float) -> None:
        """First those that are new and came from a job or are on NVML's list, then everybody in turn."""
        new = [key for key in suspects if key not in self._held]
        new.sort(key=lambda key: (suspects[key].member is None, key[0] not in listed))
        chosen = dict.fromkeys(new[:AT_ONCE])
        if not self._round and now >= self._next_round:
            self._round, self._next_round = list(suspects), now + ROUND_S
        while self._round and len(chosen) < AT_ONCE:
            if (key := self._round.pop()) in suspects:
                chosen[key] = None
        threads = []
        for key in chosen:
            # After the end of a main thread another one still has the descriptors.
            ended, thread = suspects[key].stat.state in ("Z", "X"), key[0]
            with suppress(OSError):
                thread = other_thread(key[0]) if ended else thread
            threads.append((key[0], thread))
        for key, found in zip(chosen, self.devices_of(threads) if threads else (), strict=False):
            minors = {int(match[1]) for name in found or () if (match := self._is_gpu.fullmatch(name))}
            self._held[key] = None if found is None else tuple(sorted(minors))

    def _describe(
        self, entry: Entry, gpus: tuple[Gpu, ...], listed: list[tuple[Gpu, int | None]] | None, uptime_s: float
    ) -> GpuHolder | None:
        """None: it holds no GPU, or no one knows."""
        if entry.key not in self._held:
            return None
        minors = self._held[entry.key]
        age_s = max(0.0, uptime_s - entry.known.start_ticks / CLOCK_TICKS)
        if minors is None and (listed is None or age_s < NVML_AGE_S):
            return None
        if minors == ():
            return None  # if NVML lists it nevertheless, its list is old, or the number is another's now
        on_list = listed or []
        uuids = {gpu.uuid for gpu in gpus if gpu.minor is not None and gpu.minor in (minors or ())}
        uuids |= {gpu.uuid for gpu, _ in on_list}
        sizes = [size for _, size in on_list if size is not None]
        known, member = entry.known, entry.member
        return picked(
            GpuHolder,
            known,
            *("pid", "start_ticks", "uid", "comm"),
            user=self._users.get(known.uid, str(known.uid)),
            state=entry.stat.state,
            job_id=member.job_id if member is not None else None,
            rank=member.rank if member is not None and member.role is Role.RANK else None,
            gpu_uuids=tuple(sorted(uuid for uuid in uuids if uuid)),
            minors=minors or (),
            memory_bytes=sum(sizes) if sizes else None,
            listed_by_nvml=bool(on_list),
            age_s=age_s,
            in_job_group=known.cgroup is not None,
            was_in_job=self._was_in_job(entry),
        )

    def _ask_users(self, uids: set[int], now: float) -> None:
        """From a child, for the site's directory may hang; until it answers the number stands for itself."""
        unknown = sorted(uids - self._users.keys())[:64]
        if unknown:
            then = partial(self._apply_users, unknown)
            self.probes.ask(USERS, NameUsers(unknown), 10.0, now, then)

    def _apply_users(self, asked: list[int], answer: Answer[dict[str, str]]) -> None:
        if answer.error is None:
            self._users = {uid: self._users[uid] for uid in list(self._users)[-256:]}
            self._users |= {uid: (answer.value or {}).get(str(uid), str(uid)) for uid in asked}


def _listed_by_nvml(gpus: tuple[Gpu, ...]) -> dict[int, list[tuple[Gpu, int | None]]]:
    """Pid to the GPUs on whose lists it stands, and what it holds there."""
    listed: dict[int, list[tuple[Gpu, int | None]]] = {}
    for gpu in gpus:
        for pid, size in zip(gpu.pids or (), gpu.process_memory_bytes or repeat(None), strict=False):
            listed.setdefault(pid, []).append((gpu, size))
    return listed
