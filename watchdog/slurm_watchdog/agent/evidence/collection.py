"""One collection of evidence on one node: what is asked of which child and when, and the answer put together.

The loop only asks and takes. Every part has its deadline, and what looks into processes is done by other children than
what reads files; what does not come in time is a sentence in the answer. A child that hangs on one process is set
aside, and the others are asked about again in a fresh one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.children.answers import Listeners, LogEnd
from slurm_watchdog.agent.children.children import Answer, Children, Value
from slurm_watchdog.agent.children.requests import (
    DumpProcessStacks,
    FindFiles,
    FindListeners,
    LastLines,
    ParseRas,
    ReadNodeSettings,
    ReadProcessStates,
    Request,
)
from slurm_watchdog.agent.collectors.collector import CollectorContext
from slurm_watchdog.agent.evidence.found_files import KIND as OWN_WORDS
from slurm_watchdog.agent.evidence.found_files import names_of, pipe_of, places, prefixes, read_pattern
from slurm_watchdog.agent.evidence.last_lines import last_kernel_lines
from slurm_watchdog.agent.evidence.nccl_ras import ADDRESS_VARIABLE, loopback_of, ras_port
from slurm_watchdog.agent.evidence.stacks import choose
from slurm_watchdog.agent.proc.files import read_file
from slurm_watchdog.base.descriptors import describe
from slurm_watchdog.base.mounts import mount_of
from slurm_watchdog.base.structs import picked, printable
from slurm_watchdog.model.collective_records import RasAnswer
from slurm_watchdog.model.evidence import (
    FoundFile,
    NodeEvidence,
    ProcessStack,
    ProcessState,
    RankEvidence,
    StackDump,
    ThreadStack,
)
from slurm_watchdog.model.observations import Process, Role
from slurm_watchdog.model.protocol import CollectEvidence

PROCESSES, FILES, RAS, RAS_ANSWER = "processes", "files", "NCCL's RAS", "RAS's answer"
NODE = "node:settings"
PART_S = 15.0  # Deadline of one question to a child; a dump of stacks has its own.
DUMP_S = 25.0
END_MARGIN_S = 5.0  # Before the command expires: the answer has to travel, too.
MAX_DUMPS = 6
MAX_APART_S = 60.0
FILES_BYTES = 1 << 20  # Of all Flight Recorder dumps of a node, compressed.
MAX_FILES, MAX_RANKS = 1024, 256  # Of a node, that one question may name (FindFiles).
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
LOG_FILES = 8
NOT_ASKED = ProcessState(pid=0, problems=("the kernel was not asked about it in time",))


class Question(NamedTuple):
    """What is asked of one child, once."""

    key: str
    request: Request[Any]
    keep: Callable[[Any], object]  # Is given the answer; an error becomes a sentence of the evidence.
    uid: int = -1


class Collection(msgspec.Struct):
    """The state of one CollectEvidence. `advance` is called whenever the loop has a moment."""

    command: CollectEvidence
    context: CollectorContext
    uid: int  # The job's owner: files are read as this user; -1: as the agent's own.
    began: float
    processes: tuple[Process, ...]  # Those of the job on this node, as they were when it began.
    silent_mounts: frozenset[str] = frozenset()
    chosen: list[Process] = []
    left_out: int = 0
    _dumps: list[tuple[float, dict[tuple[int, int], ProcessStack]]] = []
    _seen: dict[int, ProcessState] = {}  # By pid: what the child found out about it.
    _unseen: list[Process] = []
    _settings: list[tuple[str, str]] = []
    _log_lines: list[tuple[str, tuple[str, ...]]] = []
    _files: list[FoundFile] = []
    _ras: list[RasAnswer] = []
    _problems: list[str] = []
    _todo: dict[str, Question] = {}  # By part of the evidence: those that no child has taken yet.
    _out: set[str] = set()  # Parts that were asked for and have not been answered.
    _begun: bool = False
    _files_at: float = 0.0
    _dumps_asked: int = 0
    _dump_tried_at: float = float("-inf")
    _end: float = 0.0

    def __post_init__(self) -> None:
        self.chosen = choose(self.processes)
        self.left_out = sum(1 for p in self.processes if p.role is not Role.HELPER) - len(self.chosen)
        self._unseen = list(self.chosen)
        self._end = self.began + max(10.0, self.command.expires_s) - END_MARGIN_S

    def _begin(self) -> None:
        self._begun = True
        if not self.command.only_ras:
            self._add_processes()
            self._todo["settings"] = Question(NODE, ReadNodeSettings(), self._settings.extend)
            self._todo[FILES] = Question(f"evidence:{self._owner}", self._find(), self._files.extend, self.uid)
            self._add_logs()
        if self.command.ras:
            self._add_ras()

    def advance(self, now: float) -> NodeEvidence | None:
        """Asks what can be asked now; the answer when everything has come, or its time is over."""
        if not self._begun:
            self._begin()
        if now < self._end:
            self._ask_dump(now)
            for part, question in list(self._todo.items()):
                then = partial(self._take, part, question.keep)
                if self._ask(question.key, question.request, now, then, question.uid):
                    del self._todo[part]
                    self._out.add(part)
                    self._files_at = now if part == FILES else self._files_at
            if self._todo or self._out or self._dumps_asked < self._dumps_wanted:
                return None
        for part in (*self._todo, *sorted(self._out)):
            self._problems.append(f"{part}: no answer in time")
        return self._join(now)

    def due_at(self) -> float:
        """When `advance` is to be called though no child has answered: for the next dump, unless its child is busy."""
        due_at = self._dump_due_at
        waits = self._dumps_asked >= self._dumps_wanted or "stacks" in self._out or self._dump_tried_at >= due_at
        return float("inf") if waits else due_at

    # -- asking ------------------------------------------------------------------------------------------------

    def _ask(
        self, key: str, request: Request[Value], now: float, then: Callable[[Answer[Value]], None], uid: int = -1,
        deadline_s: float = PART_S,
    ) -> bool:  # fmt: skip
        left_s = max(1.0, min(deadline_s, self._end - now))
        return self.context.children.ask(key, request, left_s, now, then, uid) is not None

    def _take(self, part: str, keep: Callable[[Any], object], answer: Answer[Any]) -> None:
        self._out.discard(part)
        if part == PROCESSES and answer.timed_out and 0 <= answer.place < len(self._unseen):
            self._set_aside(answer)
        elif answer.error is not None:
            self._problems.append(f"{part}: {answer.error}")
        if answer.value is not None:
            keep(answer.value)

    @property
    def _owner(self) -> int:
        """As whom processes are looked into."""
        return self.chosen[0].uid if self.chosen else self.uid

    @property
    def _dumps_wanted(self) -> int:
        return 0 if self.command.only_ras else max(1, min(self.command.dumps, MAX_DUMPS))

    @property
    def _dump_due_at(self) -> float:
        return self.began + self._dumps_asked * min(MAX_APART_S, max(0.0, self.command.apart_s))

    def _ask_dump(self, now: float) -> None:
        if self._dumps_asked >= self._dumps_wanted or "stacks" in self._out or now < self._dump_due_at:
            return
        self._dump_tried_at = now
        problem = why_no_dump(self.context.children, self._owner, now) if self.chosen else None
        if problem is not None:
            self._problems.append(f"stacks: {problem}")
        if problem is not None or not self.chosen:
            self._dumps_asked = self._dumps_wanted
            return
        budget_s = max(1.0, min(DUMP_S, self._end - now - 2.0))
        room = self.context.children.room(self._owner)
        request = DumpProcessStacks(node=self.context.node, budget_s=budget_s, processes=self.chosen, may_hang=room)
        then = partial(self._apply_dump, now - self.began)
        if self._ask(f"stacks:{self._owner}", request, now, then, self._owner, budget_s + 2.0):
            self._dumps_asked += 1
            self._out.add("stacks")

    def _apply_dump(self, after_s: float, answer: Answer[list[ProcessStack]]) -> None:
        self._dumps.append((after_s, {(stack.pid, stack.start_ticks): stack for stack in answer.value or ()}))
        self._take("stacks", lambda stacks: None, answer)

    def _add_processes(self) -> None:
        if self._unseen:
            request = ReadProcessStates([(each.pid, each.start_ticks) for each in self._unseen])
            self._todo[PROCESSES] = Question(f"state:{self._owner}", request, self._keep_processes, self._owner)

    def _keep_processes(self, states: list[ProcessState]) -> None:
        self._seen |= {found.pid: found for found in states}

    def _set_aside(self, answer: Answer[Any]) -> None:
        """The child hangs on one of them: the others are asked about again in a fresh one."""
        culprit = self._unseen.pop(answer.place)
        problem = f"the kernel did not answer about it within {answer.seconds:.0f} s"
        self._seen[culprit.pid] = ProcessState(pid=culprit.pid, problems=(problem,))
        if self._unseen and self.context.children.set_aside(answer.key, f"{answer.key}:{culprit.pid}"):
            self._add_processes()

    def _add_logs(self) -> None:
        """The job's logs that this node follows, by the child that follows them."""
        logs, found = self.context.logs, dict[str, list[str]]()
        for path in [each for each in logs.followed_of(self.command.job_id) if self._may_touch(each)][:LOG_FILES]:
            found.setdefault(logs.key_of(path, self.uid), []).append(path)
        for key, paths in found.items():
            if (silent := logs.why_silent(key, self.began)) is not None:
                self._problems.append(f"log {paths[0]}: {silent}")
                continue
            request = LastLines([(self.command.job_id, path) for path in paths])
            self._todo[f"log {key}"] = Question(key, request, self._keep_logs, self.uid)

    def _keep_logs(self, ends: list[LogEnd]) -> None:
        self._problems += [f"log {each.path}: {each.error}" for each in ends if each.error is not None]
        self._log_lines += [(each.path, each.lines) for each in ends if each.lines]

    def _find(self) -> FindFiles:
        """Files that ranks may have left. Those of ranks that have ended are looked up as another process does."""
        known_of, files, pipes = self.context.processes.details_of, [], []
        directories: dict[str, None] = {}
        roots: list[tuple[int | None, int, int]] = [(None, p.pid, p.start_ticks) for p in self.processes[:1]]
        uptime_s, oldest_s = float(read_file("/proc/uptime").split()[0]), 0.0
        for process in [each for each in self.processes if each.role is Role.RANK]:
            known = known_of(process.pid, process.start_ticks)
            age_s = uptime_s - process.start_ticks / CLOCK_TICKS
            oldest_s = max(oldest_s, age_s)
            settings: Mapping[str, str] = dict(known.settings) if known is not None else {}
            names = [name for prefix in prefixes(settings) for name in names_of(prefix, process.rank)]
            files += [(path, process.rank, age_s) for path in names]
            pipes += [(pipe_of(settings, process.rank) or "", process.rank)]
            roots.append((process.rank, process.pid, process.start_ticks))
            directories |= {known.cwd: None} if known is not None and known.cwd else {}
        pattern, uses_pid = read_pattern()
        words = self.context.processes.error_files_of(self.command.job_id)
        return FindFiles(
            files=[each for each in files if self._may_touch(each[0])][:MAX_FILES],
            uid=self._owner,
            max_bytes=FILES_BYTES,
            places=places(pattern, list(filter(self._may_touch, directories)), uses_pid),
            max_age_s=oldest_s + 60.0,
            pipes=[each for each in pipes if each[0] and self._may_touch(each[0])][:MAX_RANKS],
            roots=roots[:MAX_RANKS],
            error_files=[each for each in words.items() if self._may_touch(each[0])],
        )

    def _add_ras(self) -> None:
        rank = next((each for each in self.processes if each.role is Role.RANK), None)
        known = self.context.processes.details_of(rank.pid, rank.start_ticks) if rank is not None else None
        port = ras_port(dict(known.settings).get(ADDRESS_VARIABLE) if known is not None else None)
        if rank is not None and port is not None:
            request = FindListeners([(each.pid, each.start_ticks) for each in self.processes[:1024]], port)
            self._todo[RAS] = Question(f"state:{rank.uid}", request, partial(self._ask_ras, port), rank.uid)

    def _ask_ras(self, port: int, found: Listeners) -> None:
        if not found.addresses:
            return
        try:
            host = loopback_of(found, port)
        except OSError as error:
            self._problems.append(f"{RAS_ANSWER}: {describe(error)}")
            return
        self._out.add(RAS_ANSWER)
        self.context.courier.ask_ras(host, port, self._parse_ras)

    def _parse_ras(self, answer: bytes, why: str) -> None:
        self._out.discard(RAS_ANSWER)
        if why:
            self._problems.append(f"{RAS_ANSWER}: {why}")
        else:
            self._todo[RAS_ANSWER] = Question("node:ras", ParseRas(answer), self._ras.append)

    def _may_touch(self, path: str) -> bool:
        mount = mount_of(path, self.context.logs.mounts)
        return mount is None or (mount.point not in self.silent_mounts and mount.owner is None)

    # -- the answer --------------------------------------------------------------------------------------------

    def _join(self, now: float) -> NodeEvidence:
        return bounded(
            NodeEvidence(
                node=self.context.node,
                job_id=self.command.job_id,
                took_s=now - self.began,
                ranks=tuple(self._rank(process) for process in self.chosen),
                left_out=max(0, self.left_out),
                files=tuple(self._aged(each, now) for each in self._files),
                log_lines=tuple(self._log_lines),
                kernel_lines=tuple(last_kernel_lines(self.context.kernel_records)),
                settings=tuple(self._settings),
                ras=next(iter(self._ras), None),
                problems=tuple(dict.fromkeys(self._problems)),
            )
        )

    def _aged(self, file: FoundFile, now: float) -> FoundFile:
        """As old as it is when the answer leaves: who failed first is told by seconds."""
        return replace(file, age_s=file.age_s + now - self._files_at) if file.kind == OWN_WORDS else file

    def _rank(self, process: Process) -> RankEvidence:
        key = (process.pid, process.start_ticks)
        dumps = join_dumps([(after_s, stacks.get(key)) for after_s, stacks in self._dumps])
        seen = self._seen.get(process.pid, NOT_ASKED)
        known = self.context.processes.details_of(*key)
        last = dumps[-1] if dumps else StackDump(after_s=0.0, error="no dump came in time")
        settings = known.settings if known is not None and process.role is Role.RANK else ()
        return picked(
            RankEvidence, process, "pid", "start_ticks", "role", "comm", "rank", "local_rank", "blocked",
            state=seen.state or last.state or process.state, error=last.error, dumps=dumps,
            environment=tuple(sorted(settings)), problems=(*seen.problems, seen.error) if seen.error else seen.problems,
            **{name: getattr(seen, name) for name in ("threads", "threads_seen", "lock", "sockets", "sockets_seen",
                                                      "status")},
        )  # fmt: skip


def why_no_dump(children: Children, uid: int, now: float) -> str | None:
    """Why no stacks of this user's processes are read now; None if they are."""
    if (since_s := children.hung_since(f"stacks:{uid}", now)) is not None:
        return f"the child that reads them has not returned for {since_s:.0f} s"
    return None if children.room(uid) > 0 else f"too many programs that look into processes of uid {uid} hang"


MAX_NODE_BYTES = 3 << 20  # As JSON. A report may have 8 MiB (see slurm_watchdog.wire.codec), and holds more than this.
FEW_THREADS = 8
FEW_FRAMES = 40


def join_dumps(dumps: Sequence[tuple[float, ProcessStack | None]]) -> tuple[StackDump, ...]:
    """The dumps of one process, oldest first, as (seconds after the first, stack); then only what changed."""
    joined: list[StackDump] = []
    before: dict[int, ThreadStack] = {}
    for after_s, stack in dumps:
        if stack is None:
            joined.append(StackDump(after_s=after_s, error="it was not dumped"))
            continue
        same = tuple(t.thread_id for t in stack.threads if before.get(t.thread_id) == t)
        joined.append(
            picked(
                StackDump,
                stack,
                *("error", "state", "cpu_s", "main_cpu_s"),
                after_s=after_s,
                threads=tuple(t for t in stack.threads if before.get(t.thread_id) != t),
                unchanged=same,
            )
        )
        if stack.threads:
            before = {thread.thread_id: thread for thread in stack.threads}
    return tuple(joined)


def bounded(evidence: NodeEvidence, limit: int = MAX_NODE_BYTES) -> NodeEvidence:
    """`evidence` in at most `limit` bytes of JSON, as far as leaving things out can do it; what went is said
    in `problems`. Names of files that are no UTF-8 have their odd bytes replaced."""
    steps: tuple[tuple[str, Callable[[NodeEvidence], NodeEvidence]], ...] = (
        ("Flight Recorder dumps stay on the node", partial(_without, "content")),
        ("and what they say is left out", partial(_without, "record")),
        ("only the first threads of each process were kept", _with_few_threads),
        ("environment, sockets and the lines of logs were left out", _without_details),
        ("only stacks of ranks were kept", lambda e: replace(e, ranks=tuple(r for r in e.ranks if r.role == "rank"))),
    )
    try:
        size = len(msgspec.json.encode(evidence))
    except UnicodeEncodeError:
        evidence = printable(evidence)
        size = len(msgspec.json.encode(evidence))
    for what, step in steps:
        if size <= limit:
            break
        evidence = replace(step(evidence), problems=(*evidence.problems, f"too much for one report: {what}"))
        size = len(msgspec.json.encode(evidence))
    return evidence


def _without(field: str, evidence: NodeEvidence) -> NodeEvidence:
    return replace(evidence, files=tuple(replace(each, **{field: None}) for each in evidence.files))


def _with_few_threads(evidence: NodeEvidence) -> NodeEvidence:
    return replace(evidence, ranks=tuple(replace(each, dumps=_few(each)) for each in evidence.ranks))


def _few(rank: RankEvidence) -> tuple[StackDump, ...]:
    def order(thread: ThreadStack) -> bool:
        return thread.name != "MainThread" and thread.thread_id != rank.pid

    return tuple(
        replace(
            dump,
            threads=tuple(
                replace(t, frames=t.frames[:FEW_FRAMES]) for t in sorted(dump.threads, key=order)[:FEW_THREADS]
            ),
        )
        for dump in rank.dumps
    )


def _without_details(evidence: NodeEvidence) -> NodeEvidence:
    ranks = tuple(replace(each, environment=(), sockets=(), status=()) for each in evidence.ranks)
    return replace(evidence, ranks=ranks, log_lines=(), kernel_lines=())
