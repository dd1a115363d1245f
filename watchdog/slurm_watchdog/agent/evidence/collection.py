"""One collection of evidence on one node: what is asked of which child and when, and the answer put together.

The loop only asks and takes. Every part has its own child and its own deadline; what does not come in time is
a sentence in
the answer. A child that hangs on one process is set aside, and the others are asked about again in a fresh one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.evidence import cores
from slurm_watchdog.agent.evidence.flight_recorder import prefixes
from slurm_watchdog.agent.evidence.merge_dumps import bounded, join_dumps
from slurm_watchdog.agent.evidence.stacks import choose
from slurm_watchdog.agent.logs.job_logs import JobLogs
from slurm_watchdog.agent.proc.files import read_file
from slurm_watchdog.agent.proc.process_facts import ProcessFacts
from slurm_watchdog.agent.workers.pool import Answer, WorkerPool
from slurm_watchdog.agent.workers.request_types import (
    DumpProcessStacks,
    FindFiles,
    LastKernelLines,
    LastLines,
    LookAtProcesses,
    ReadCore,
)
from slurm_watchdog.base.mounts import mount_of
from slurm_watchdog.model.evidence import FoundFile, NodeEvidence, ProcessStack, RankEvidence
from slurm_watchdog.model.observations import Process, Role
from slurm_watchdog.model.protocol import CollectEvidence

PROCESSES, NODE, KERNEL = "evidence:processes", "evidence:node", "evidence:kernel"
PART_S: Final = 15.0
"""Deadline of one question to a child; a dump of stacks has its own."""
DUMP_S: Final = 25.0
END_MARGIN_S: Final = 5.0
"""Before the command expires: the answer has to travel, too."""
MAX_DUMPS: Final = 6
MAX_APART_S: Final = 60.0
FILES_BYTES: Final = 1 << 20
"""Of all Flight Recorder dumps of a node, compressed."""
IDLE_S: Final = 5.0
CLOCK_TICKS: Final = os.sysconf("SC_CLK_TCK")
LOG_FILES: Final = 8


@dataclass(frozen=True)
class Sources:
    """Where a collection gets what it needs."""

    probes: WorkerPool
    logs: JobLogs
    node: str
    details_of: Callable[[int, int], ProcessFacts | None]
    """What was learnt of a process (pid, start ticks) when it was met: environment, program, working directory."""
    kernel_log: str = ""
    core_debugger: bool = False
    """Whether a debugger may read the frames of a core file (agent.core_debugger)."""


@dataclass
class Collection:
    """The state of one CollectEvidence. `advance` is called whenever the loop has a moment."""

    command: CollectEvidence
    sources: Sources
    uid: int
    """The job's owner, as whom files are read; -1: as whoever the agent is."""
    began: float
    processes: tuple[Process, ...]
    """Those of the job on this node, as they were when it began."""
    silent_mounts: frozenset[str] = frozenset()
    chosen: list[Process] = field(default_factory=list)
    left_out: int = 0
    _dumps: list[tuple[float, dict[tuple[int, int], ProcessStack]]] = field(default_factory=list)
    _seen: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By pid: what the child found out about it."""
    _unseen: list[Process] = field(default_factory=list)
    _settings: list[list[str]] = field(default_factory=list)
    _kernel_lines: list[str] = field(default_factory=list)
    _log_lines: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    _files: list[FoundFile] = field(default_factory=list)
    _problems: list[str] = field(default_factory=list)
    _todo: dict[str, Callable[[float], bool]] = field(default_factory=dict)
    """Parts that were not asked for yet: each returns whether its child took the question."""
    _out: set[str] = field(default_factory=set)
    """Parts that were asked for and have not been answered."""
    _dumps_asked: int = 0

    def __post_init__(self) -> None:
        self.chosen = choose(self.processes)
        self.left_out = sum(1 for p in self.processes if p.role is not Role.HELPER) - len(self.chosen)
        self._unseen = list(self.chosen)
        self._end = self.began + max(10.0, self.command.expires_s) - END_MARGIN_S
        todo: dict[str, Callable[[float], bool]] = {
            "processes": self._ask_processes,
            "settings": self._ask_settings,
            "files": self._ask_files,
            **{f"log {key}": partial(self._ask_log, key, paths) for key, paths in self._logs().items()},
        }
        self._todo = todo
        if self.sources.kernel_log:
            self._todo["kernel log"] = self._ask_kernel_log

    def advance(self, now: float) -> NodeEvidence | None:
        """Asks what can be asked now; the answer when everything has come, or its time is over."""
        if now < self._end:
            self._ask_dump(now)
            for part, ask in list(self._todo.items()):
                self._out.add(part)
                if ask(now):
                    del self._todo[part]
                else:
                    self._out.discard(part)
            waiting = self._todo or self._out or self._dumps_asked < self._dumps_wanted
            if waiting:
                return None
        for part in (*self._todo, *sorted(self._out)):
            self._problems.append(f"{part}: no answer in time")
        return self._join(now)

    # -- asking ------------------------------------------------------------------------------------------------

    @property
    def _dumps_wanted(self) -> int:
        return max(1, min(self.command.dumps, MAX_DUMPS))

    def _ask(
        self, key: str, function: str, args: Any, now: float, then: Callable[[Answer], None], uid: int = -1,
        deadline_s: float = PART_S, on_part: Callable[[Any], None] | None = None,
    ) -> bool:  # fmt: skip
        left_s = max(1.0, min(deadline_s, self._end - now))
        asked = self.sources.probes.ask(
            key, function, args, left_s, now, then, uid, on_part=on_part, idle_s=IDLE_S if key.startswith("evidence:") else None
        )  # fmt: skip
        return asked is not None

    def _ask_dump(self, now: float) -> None:
        number = self._dumps_asked
        apart_s = min(MAX_APART_S, max(0.0, self.command.apart_s))
        if number >= self._dumps_wanted or "stacks" in self._out or now < self.began + number * apart_s:
            return
        probes = self.sources.probes
        since_s = probes.hung_since("stacks", now)
        if since_s is not None:
            self._problems.append(f"stacks: the child that reads them has not come back for {since_s:.0f} s")
            self._dumps_asked = self._dumps_wanted
            return
        budget_s = max(1.0, min(DUMP_S, self._end - now - 2.0))
        args = DumpProcessStacks(node=self.sources.node, budget_s=budget_s, processes=self.chosen)
        then = partial(self._take_dump, now - self.began)
        if self._ask("stacks", "dump_stacks", args, now, then, deadline_s=budget_s + 2.0):
            self._dumps_asked += 1
            self._out.add("stacks")

    def _take_dump(self, after_s: float, answer: Answer) -> None:
        self._out.discard("stacks")
        if answer.error is not None:
            self._problems.append(f"stacks: {answer.error}")
        stacks = [msgspec.convert(each, ProcessStack) for each in answer.value or ()]
        self._dumps.append((after_s, {(stack.pid, stack.start_ticks): stack for stack in stacks}))

    def _ask_processes(self, now: float) -> bool:
        questions = list(self._unseen)
        args = LookAtProcesses(
            processes=[(each.pid, each.start_ticks) for each in questions],
            silent_mounts=sorted(self.silent_mounts),
        )
        return self._ask(
            PROCESSES, "look_at_processes", args, now, self._end_processes, on_part=self._take_process
        )

    def _take_process(self, each: dict[str, Any]) -> None:
        self._seen[each["pid"]] = each
        self._unseen = [process for process in self._unseen if process.pid != each["pid"]]

    def _end_processes(self, answer: Answer) -> None:
        self._out.discard("processes")
        if not answer.timed_out or not self._unseen:
            if answer.error is not None:
                self._problems.append(f"processes: {answer.error}")
            return
        culprit = self._unseen.pop(0)
        self._seen[culprit.pid] = {
            "problems": [f"the kernel did not answer about it within {answer.seconds:.0f} s"]
        }
        if self._unseen and self.sources.probes.rename(PROCESSES, f"evidence:{culprit.pid}"):
            self._todo["processes"] = self._ask_processes

    def _ask_settings(self, now: float) -> bool:
        return self._ask(NODE, "read_node_settings", None, now, self._take_settings)

    def _take_settings(self, answer: Answer) -> None:
        self._settings = answer.value or []
        self._done("settings", answer)

    def _ask_kernel_log(self, now: float) -> bool:
        return self._ask(
            KERNEL, "last_kernel_lines", LastKernelLines(self.sources.kernel_log), now, self._take_kernel_log
        )

    def _take_kernel_log(self, answer: Answer) -> None:
        self._kernel_lines = answer.value or []
        self._done("kernel log", answer)

    def _done(self, part: str, answer: Answer) -> None:
        self._out.discard(part)
        if answer.error is not None:
            self._problems.append(f"{part}: {answer.error}")

    # -- logs and files ----------------------------------------------------------------------------------------

    def _logs(self) -> dict[str, list[str]]:
        """The job's logs that this node follows, by the child that follows them."""
        found: dict[str, list[str]] = {}
        followed = self.sources.logs.followed_of(self.command.job_id)
        for path in [each for each in followed if self._may_touch(each)][:LOG_FILES]:
            found.setdefault(self.sources.logs.key_of(path, self.uid), []).append(path)
        return found

    def _ask_log(self, key: str, paths: list[str], now: float) -> bool:
        since_s = self.sources.probes.hung_since(key, now)
        if since_s is not None:
            self._problems.append(f"log {paths[0]}: its filesystem has not answered for {since_s:.0f} s")
            self._out.discard(f"log {key}")
            return True
        args = LastLines([(self.command.job_id, path) for path in paths])
        return self._ask(key, "last_lines", args, now, partial(self._take_log, key), self.uid)

    def _take_log(self, key: str, answer: Answer) -> None:
        self._done(f"log {key}", answer)
        for path, lines, error in answer.value or ():
            if error is not None:
                self._problems.append(f"log {path}: {error}")
            elif lines:
                self._log_lines.append((path, tuple(lines)))

    def _ask_files(self, now: float) -> bool:
        owner = self.chosen[0].uid if self.chosen else self.uid
        wanted: list[tuple[str, int | None, float]] = []
        directories: dict[str, None] = {}
        uptime_s, oldest_s = float(read_file("/proc/uptime").split()[0]), 0.0
        for process in self.processes:
            if process.role is not Role.RANK:
                continue
            known = self.sources.details_of(process.pid, process.start_ticks)
            age_s = uptime_s - process.start_ticks / CLOCK_TICKS
            oldest_s = max(oldest_s, age_s)
            settings: Mapping[str, str] = dict(known.settings) if known is not None else {}
            paths = [f"{prefix}{process.rank}" for prefix in prefixes(settings)]
            wanted += [(path, process.rank, age_s) for path in paths if self._may_touch(path)]
            if known is not None and known.cwd and self._may_touch(known.cwd):
                directories[known.cwd] = None
        pattern, uses_pid = cores.read_pattern()
        args = FindFiles(
            files=wanted,
            uid=owner,
            max_bytes=FILES_BYTES,
            places=cores.places(pattern, list(directories), uses_pid),
            max_age_s=oldest_s + 60.0,
            pids=[process.pid for process in self.chosen],
        )
        return self._ask(f"evidence:{owner}", "find_files", args, now, self._take_files, self.uid, PART_S)

    def _may_touch(self, path: str) -> bool:
        mount = mount_of(path, self.sources.logs.mounts)
        return mount is None or (mount.point not in self.silent_mounts and mount.owner is None)

    def _take_files(self, answer: Answer) -> None:
        self._done("files", answer)
        found = answer.value or {"flight_recorder": [], "core": [], "program": None}
        for each in found["flight_recorder"]:
            content = bytes.fromhex(each["content"]) if each["content"] else None
            self._files.append(
                FoundFile(
                    kind="flight_recorder", path=each["path"], size_bytes=each["size_bytes"], age_s=each["age_s"],
                    rank=each["rank"], content=content, error=each["error"],
                )
            )  # fmt: skip
        for each in found["core"]:
            self._files.append(FoundFile(kind="core", **each))
        if found["core"] and not self.sources.core_debugger:
            self._files[-len(found["core"])] = replace(
                self._files[-len(found["core"])], error="frames are not read: agent.core_debugger is off"
            )
        elif found["core"]:
            self._todo["core file"] = partial(self._ask_core, found["core"][0]["path"], found["program"])

    def _ask_core(self, path: str, program: str | None, now: float) -> bool:
        owner = self.chosen[0].uid if self.chosen else self.uid
        deadline_s = cores.DEBUGGER_S + 5.0
        then = partial(self._take_core, path)
        return self._ask(
            f"evidence:{owner}",
            "read_core",
            ReadCore(path, program),
            now,
            then,
            self.uid,
            deadline_s,
        )

    def _take_core(self, path: str, answer: Answer) -> None:
        self._out.discard("core file")
        frames, error = tuple(answer.value or ()), answer.error
        self._files = [
            replace(each, frames=frames, error=error) if each.kind == "core" and each.path == path else each
            for each in self._files
        ]

    # -- the answer --------------------------------------------------------------------------------------------

    def _join(self, now: float) -> NodeEvidence:
        return bounded(
            NodeEvidence(
                node=self.sources.node,
                job_id=self.command.job_id,
                took_s=now - self.began,
                ranks=tuple(self._rank(process) for process in self.chosen),
                left_out=max(0, self.left_out),
                files=tuple(self._files),
                log_lines=tuple(self._log_lines),
                kernel_lines=tuple(self._kernel_lines),
                settings=tuple((name, value) for name, value in self._settings),
                problems=tuple(dict.fromkeys(self._problems)),
            )
        )

    def _rank(self, process: Process) -> RankEvidence:
        key = (process.pid, process.start_ticks)
        dumps = join_dumps([(after_s, stacks.get(key)) for after_s, stacks in self._dumps])
        seen = self._seen.get(process.pid, {"problems": ["the kernel was not asked about it in time"]})
        known = self.sources.details_of(*key)
        plain = {
            name: seen[name]
            for name in (
                "threads",
                "threads_seen",
                "silent_files",
                "sockets",
                "sockets_seen",
                "lock",
                "status",
                "state",
            )
            if name in seen
        }
        identity: dict[str, Any] = {
            "pid": process.pid,
            "start_ticks": process.start_ticks,
            "role": process.role,
        }
        row = msgspec.convert(identity | plain, RankEvidence)
        last = dumps[-1] if dumps else None
        problems = tuple(seen["problems"]) + ((seen["error"],) if seen.get("error") else ())
        return replace(
            row,
            comm=process.comm,
            rank=process.rank,
            local_rank=process.local_rank,
            state=row.state or (last.state if last is not None else None) or process.state,
            error=last.error if last is not None else "no dump came in time",
            dumps=dumps,
            blocked=process.blocked,
            environment=tuple(sorted(known.settings))
            if known is not None and process.role is Role.RANK
            else (),
            problems=problems,
        )
