"""What the controller asks for: each command is done at most once and answered exactly once, refusals included.

The children do the work; here it is decided whether it may be done, whose child does it, and what the answer is.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slurm_watchdog.agent.children.become_user import refusal_as, refusal_to_become
from slurm_watchdog.agent.children.child import give_back_memory
from slurm_watchdog.agent.children.children import Answer
from slurm_watchdog.agent.children.requests import (
    DumpProcessStacks,
    KillSwitch,
    RemoveSwitch,
    SignalProcess,
    WorkerState,
    WriteSwitch,
)
from slurm_watchdog.agent.collectors.collector import CollectorContext
from slurm_watchdog.agent.delivery.replies import MAX_COMMANDS
from slurm_watchdog.agent.evidence.collection import Collection, why_no_dump
from slurm_watchdog.agent.evidence.stacks import choose
from slurm_watchdog.agent.files.as_owner import remove_kill_switch, write_kill_switch
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import describe
from slurm_watchdog.base.structs import picked
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.kill_switch import (
    KILL_SWITCH_BASE,
    RUN_NAME,
    is_absolute_path,
    parse_line,
    problem_of_path,
)
from slurm_watchdog.model.observations import Process
from slurm_watchdog.model.protocol import (
    CollectEvidence,
    Command,
    CommandResult,
    DumpStacks,
    EndProcess,
    GiveOrder,
    JobWatch,
    ProbeMount,
    ProcessEnd,
    RemoveKillSwitch,
    WithdrawOrder,
    WriteKillSwitch,
)
from slurm_watchdog.model.report import MountSection, ProcessSection


class OwnSwitches:
    """Kill switches in the default place: files of the agent's, in a directory for each run that everybody may read.
    They lie in memory, which never hangs."""

    def __init__(self, base: str = KILL_SWITCH_BASE):
        self.base = base

    def do(self, request: KillSwitch) -> str | None:
        """Writes or removes one; returns what was wrong."""
        directory = os.path.dirname(request.path)
        try:
            if isinstance(request, WriteSwitch):
                with suppress(FileExistsError):
                    os.mkdir(directory)
                    os.chmod(directory, 0o755)  # noqa: S103 -- the job reads it as its own user
                write_kill_switch(request, WorkerState())
            else:
                remove_kill_switch(request, WorkerState())
        except OSError as error:
            return describe(error)
        return None

    def clear(self, watch: Iterable[JobWatch], running: frozenset[str]) -> None:
        """Removes those of runs that are over. `running`: the jobs that Slurm has here. The switch of a job of which no
        more is known yet stays: it may not have seen it."""
        runs = {each.job_id: str(each.restarts) for each in watch}
        with suppress(OSError):
            for name in filter(RUN_NAME.fullmatch, os.listdir(self.base)):
                job_id, _, run = name.partition(".")
                if job_id not in running or runs.get(job_id, run) != run:
                    self._remove(f"{self.base}/{name}")

    def _remove(self, directory: str) -> None:
        with suppress(OSError):
            for name in os.listdir(directory):
                os.unlink(f"{directory}/{name}")
            os.rmdir(directory)


log = logging.getLogger(__name__)

REMEMBERED = 1000
COLLECTIONS = 4  # Jobs of which evidence is collected at the same time.
STACKS_BUDGET_S = 50.0
END_S = 10.0  # For a look at one process and all others, a signal, and the moment in which most end.
BLOCKED_S = 10.0  # A mount in which a process has been blocked so long is not touched for evidence.


class Refused(Exception):
    """Why a command is not carried out, in one sentence."""


@dataclass
class Commands:
    """Commands on their way."""

    context: CollectorContext
    switch_prefixes: tuple[str, ...] = ()
    """Directories below which kill switches may lie, besides KILL_SWITCH_BASE."""
    _collections: list[Collection] = field(default_factory=list)
    _seen: OrderedDict[str, bool] = field(default_factory=OrderedDict)  # Id -> whether its answer was taken.
    _waiting: list[tuple[Command, float]] = field(default_factory=list)
    _results: list[CommandResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.children, self.logs, self.node = self.context.children, self.context.logs, self.context.node
        self.sections, self.deadline_s = self.context.sections, self.context.settings.probe_deadline
        self.switches = OwnSwitches()

    def watch_jobs(self, watch: tuple[JobWatch, ...], now: float, running: frozenset[str] | None = None) -> None:
        """The jobs that the controller wants watched; what is left of others goes. While it is not known which are
        `running`, nothing is removed."""
        if self.logs.become_owner:
            self.context.jobs.awaiting_checkpoints &= {each.job_id for each in watch}
            if running is not None:
                self.switches.clear(watch, running)

    @property
    def processes(self) -> tuple[Process, ...]:
        """Of jobs on this node, as they were seen last."""
        return self.sections.of(ProcessSection).processes

    def accept(self, commands: tuple[Command, ...], now: float) -> None:
        """Takes commands of a reply; those that were seen before are left out, whatever became of them."""
        for command in commands:
            if command.id in self._seen:
                continue
            self._seen[command.id] = False
            if len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
            if len(self._waiting) >= MAX_COMMANDS:
                self._refuse(command, f"{MAX_COMMANDS} commands wait already")
            else:
                self._waiting.append((command, now))
        self.advance(now)

    def advance(self, now: float) -> None:
        """Starts what can be started, and answers what is refused or too late."""
        waiting, self._waiting = self._waiting, []
        for collection in list(self._collections):
            self._advance(collection, now)
        for command, since in waiting:
            try:
                if now - since > command.expires_s:
                    raise Refused(f"expired: it could not be started within {command.expires_s:.0f} s")
                if not self._start(command, now, command.expires_s - (now - since)):
                    self._waiting.append((command, since))
            except Refused as reason:
                self._refuse(command, str(reason))

    def _advance(self, collection: Collection, now: float) -> None:
        """One that fails ends alone: what it failed on may be in what a user has, and would be met again."""
        evidence, error = None, None
        try:
            evidence = collection.advance(now)
        except Exception as failure:  # the boundary: commands for other jobs go on
            log.exception("evidence of job %s failed", collection.command.job_id)
            error = f"it failed: {type(failure).__name__}: {failure}"
        if evidence is not None or error is not None:
            self._collections.remove(collection)
            self._answer(collection.command.id, error, evidence=evidence)
            give_back_memory()

    def due_at(self) -> float:
        """When `advance` is to be called though nothing wakes the loop."""
        return min((each.due_at() for each in self._collections), default=float("inf"))

    def _refuse(self, command: Command, reason: str) -> None:
        log.warning("command %s (%s) refused: %s", command.id, type(command).__name__, reason)
        self._answer(command.id, reason)

    def _answer(self, command_id: str, error: str | None = None, **found: Any) -> None:
        self._results.append(CommandResult(command_id=command_id, ok=error is None, error=error, **found))

    @property
    def has_results(self) -> bool:
        """Whether there is something to send at once."""
        return bool(self._results)

    def take_results(self) -> tuple[CommandResult, ...]:
        """The answers since the last call."""
        results = tuple(self._results)
        self._results.clear()  # and not a new list: who answers later has the method of this one
        self._seen.update((result.command_id, True) for result in results if result.command_id in self._seen)
        return results

    @property
    def under_way(self) -> list[str]:
        """Ids of those that were begun, or wait, and have no answer yet."""
        done = {result.command_id for result in self._results}
        return [each for each, taken in self._seen.items() if not taken and each not in done]

    def answer_pending(self) -> None:
        """Answers those that are under way: no one knows what became of them, and none is done twice."""
        for each in self.under_way:
            self._answer(each, "the agent took a new configuration meanwhile: whether it was done is not known")

    def memory(self) -> tuple[str, ...]:
        """Ids of all that were seen, for `remember` of the next agent."""
        return tuple(self._seen)

    def remember(self, seen: tuple[str, ...]) -> None:
        """Those are not done again."""
        self._seen.update(dict.fromkeys(seen, True))

    # -- the commands -------------------------------------------------------------------------------------

    def _start(self, command: Command, now: float, left_s: float) -> bool:
        """Gives `command` to its child; False if the child is busy. Raises Refused."""
        match command:
            case DumpStacks():
                return self._start_stacks(command, now, left_s)
            case ProbeMount():
                return self._start_probe(command, now)
            case CollectEvidence():
                return self._start_collection(command, now)
            case EndProcess():
                return self._start_ending(command, now)
            case GiveOrder():
                self._check_run(command)
                self.context.supervisors.give(command.job_id, command.restarts, command.order, now)
            case WithdrawOrder():
                self.context.supervisors.withdraw(command.decision, now)
            case _:
                return self._start_kill_switch(command, now)
        self._answer(command.id)
        return True

    def _start_stacks(self, command: DumpStacks, now: float, left_s: float) -> bool:
        chosen = list(choose(self._processes_of(command)))
        uid = chosen[0].uid if chosen else os.getuid()
        if (problem := why_no_dump(self.children, uid, now)) is not None:
            raise Refused(problem)
        budget_s = max(1.0, min(STACKS_BUDGET_S, left_s - 2.0))
        request = DumpProcessStacks(self.node, budget_s, chosen, may_hang=self.children.room(uid))

        def then(answer: Answer[list[ProcessStack]]) -> None:
            self._answer(command.id, answer.error, stacks=tuple(answer.value or ()))

        return self.children.ask(f"stacks:{uid}", request, budget_s + 2.0, now, then, uid) is not None

    def _start_collection(self, command: CollectEvidence, now: float) -> bool:
        """A few at a time, for jobs that share the node: each mostly waits between its dumps."""
        if len(self._collections) >= COLLECTIONS:
            return False
        mine, uid = self._processes_of(command), self._uid(self._owner(command.job_id))
        silent = {probe.mount for probe in self.sections.of(MountSection).mounts if not probe.responding}
        blocked = [each.blocked for each in self.processes if each.blocked is not None]
        silent |= {each.mount for each in blocked if each.mount and each.seconds >= BLOCKED_S}
        collection = Collection(command, self.context, uid, now, mine, frozenset(silent))
        self._collections.append(collection)
        self._advance(collection, now)
        return True

    def _start_probe(self, command: ProbeMount, now: float) -> bool:
        for path in (command.mount, command.directory):
            if not is_absolute_path(path):
                raise Refused(f"an absolute path is wanted, and {path[:100]!r} is not a file name here")
        uid = self._uid(command.uid)
        mount = next((each for each in reversed(self.logs.mounts) if each.point == command.mount), None)
        if (untouched := self.logs.why_untouched(command.directory)) is not None:
            raise Refused(untouched)
        device, fs_type = (mount.device, mount.fs_type) if mount is not None else (None, None)
        return self.context.mounts.command(command, now, self.deadline_s, uid, device, self._results.append, fs_type)

    def _start_kill_switch(self, command: WriteKillSwitch | RemoveKillSwitch, now: float) -> bool:
        path, fields = command.path, parse_line(command.content)
        if (problem := problem_of_path(path, self.switch_prefixes)) is not None:
            raise Refused(problem)
        if fields is None:
            raise Refused("a kill switch says in one line of JSON who wrote it, why, and for which incident")
        uid = self._uid(command.uid)
        request: KillSwitch = RemoveSwitch(path=path, node=self.node, **fields)
        # Removing needs no job: it may have ended, and only a file that holds our very words is removed.
        if isinstance(command, WriteKillSwitch):
            self._check_run(command)
            until_s = clock.monotonic() + self.deadline_s
            request = WriteSwitch(path=path, node=self.node, until_s=until_s, **fields)
        if path.startswith(f"{self.switches.base}/"):
            self._end_kill_switch(command, self.switches.do(request))
            return True
        key = self.logs.key_of(path, uid)
        self._check_child(key, f"the filesystem of {path} has not answered", now)

        def then(answer: Answer[None]) -> None:
            self._end_kill_switch(command, answer.error)

        return self.children.ask(key, request, self.deadline_s, now, then, uid) is not None

    def _end_kill_switch(self, command: WriteKillSwitch | RemoveKillSwitch, error: str | None) -> None:
        kind, outcome, awaiting = type(command).__name__, error or "done", self.context.jobs.awaiting_checkpoints
        log.info("%s %s for job %s: %s", kind, command.path, command.job_id, outcome)
        if isinstance(command, RemoveKillSwitch):
            awaiting.discard(command.job_id)
        elif error is None:
            awaiting.add(command.job_id)
        self._answer(command.id, error)

    def _start_ending(self, command: EndProcess, now: float) -> bool:
        """A refusal is an answer like any other here: the caller has to know that nothing was sent."""
        processes, running = self.context.processes, self.context.jobs.running(now)
        holders, key = self.context.orphan_gpu_processes, f"end:{command.uid}"
        refusal, gone = "", command.boot_id != self.context.boot_id
        if not gone:
            if command.how != "look":
                refusal = holders.objection(command, processes.table.entries, processes.ours, running) or ""
            if not refusal and (since_s := self.children.hung_since(key, now)) is not None:
                refusal = f"the child that ends processes has not returned for {since_s:.0f} s"
            refusal = refusal or refusal_to_become(command.uid) or ""
        if gone or refusal:
            self._end_ending(command, Answer(0, key, ProcessEnd(gone=gone, refusal=refusal)))
            return True
        request = picked(SignalProcess, command, minors=list(command.minors))  # the worker refuses any other `how`
        then = partial(self._end_ending, command)
        return self.children.ask(key, request, END_S, now, then, command.uid, idle_s=0.0) is not None

    def _end_ending(self, command: EndProcess, answer: Answer[ProcessEnd]) -> None:
        said = answer.value
        if answer.error is not None or said is None:
            log.warning("whether process %d was ended is not known: %s", command.pid, answer.error)
            self._answer(command.id, answer.error or "")
            return
        if command.how != "look":
            log.warning(
                "process %d (%s) of uid %d, of job %s, which is over: %s %s", command.pid, command.comm, command.uid,
                command.job_id,
                command.how, "sent" if said.sent else f"not sent: {said.refusal or 'it has exited'}",
            )  # fmt: skip
        self._answer(command.id, said.refusal or None, process=said)

    # -- may it be done ----------------------------------------------------------------------------------------

    def _processes_of(self, command: DumpStacks | CollectEvidence) -> tuple[Process, ...]:
        """Those of its job. Raises Refused if there is none here, and none left word, or if they are of another run."""
        mine = tuple(process for process in self.processes if process.job_id == command.job_id)
        if not mine and (isinstance(command, DumpStacks) or not self.context.processes.error_files_of(command.job_id)):
            raise Refused(f"no process of job {command.job_id} is on {self.node}")
        self._check_restarts(command.job_id, command.restarts)
        return mine

    def _check_child(self, key: str, silent: str, now: float) -> None:
        """Raises Refused, in the words of `silent`, while the child of this key hangs."""
        if (since_s := self.children.hung_since(key, now)) is not None:
            raise Refused(f"{silent} for {since_s:.0f} s")

    def _uid(self, uid: int) -> int:
        """Who the child becomes, -1: itself, where it cannot become others. Nothing is done as a system user."""
        if not self.logs.become_owner:
            return -1
        if (refusal := refusal_as(uid)) is not None:
            raise Refused(refusal)
        return uid

    def _owner(self, job_id: str) -> int:
        """Whose the job is, as Slurm says: what its processes run as, or claim, is no one's word."""
        watch = self.logs.watch.get(job_id)
        if watch is None:
            raise Refused(f"job {job_id} is not known on {self.node}: Slurm has not listed it here yet")
        return watch.uid

    def _check_run(self, command: WriteKillSwitch | GiveOrder) -> None:
        """Raises Refused where the job is another user's, or in another run."""
        if command.uid != self._owner(command.job_id):
            raise Refused(f"job {command.job_id} does not belong to uid {command.uid}")
        self._check_restarts(command.job_id, command.restarts)

    def _check_restarts(self, job_id: str, restarts: int) -> None:
        text = self.context.processes.environ_of(job_id).get("SLURM_RESTART_COUNT", "")
        watch = self.logs.watch.get(job_id)
        here = int(text) if text.isdecimal() and len(text) < 10 else watch.restarts if watch is not None else None
        if here is not None and here != restarts:
            raise Refused(f"job {job_id} is in run {here} on {self.node}, the command is about run {restarts}")
