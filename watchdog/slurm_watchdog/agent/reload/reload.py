"""SIGHUP: the configuration is read again, and taken whole or not at all.

It is checked in a child, by the very program that would start with it (slurm_watchdog.agent.validate_config): the loop
continues meanwhile. What is taken, is taken by a fresh start of the same process (its number stays), which begins with
what the one before knew (Handover). Certificates alone take no new start.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.delivery.spool import Waiting
from slurm_watchdog.agent.gpu.orphan_processes import OrphanMemory
from slurm_watchdog.agent.logs.open_logs import LogMemory
from slurm_watchdog.agent.processes.jobs_here import JobsHere
from slurm_watchdog.agent.processes.reader import ProcessMemory
from slurm_watchdog.agent.reload.settings import Settings, write_in_memory
from slurm_watchdog.agent.workers.answer_types import ConfigCheck
from slurm_watchdog.agent.workers.child import decode, die_with_parent, encode
from slurm_watchdog.agent.workers.pool import WorkerPool
from slurm_watchdog.agent.workers.request_types import CheckConfig, WorkerState
from slurm_watchdog.agent.workers.worker import Answer, InheritedWorker
from slurm_watchdog.base import clock
from slurm_watchdog.base.loop import sd_notify
from slurm_watchdog.base.python310 import run_module


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """Times are of the monotonic clock, which continues over exec."""

    children: tuple[InheritedWorker, ...] = ()  # Those that had something to do, or hung.
    reports: tuple[Waiting, ...] = ()  # Encoded, and not taken by the controller yet.
    processes: ProcessMemory = ProcessMemory()
    logs: LogMemory = LogMemory()
    orphans: OrphanMemory = OrphanMemory()
    jobs: JobsHere = msgspec.field(default_factory=JobsHere)
    commands: tuple[str, ...] = ()  # Ids of those that were done or refused.
    controller_id: str = ""
    sums: dict[str, Any] = {}  # slurm_watchdog.agent.sums.NodeSums


def write_handover(handover: Handover) -> int:
    """Puts it into a file in memory; returns its descriptor. Raises OSError."""
    data = encode(msgspec.to_builtins(handover, str_keys=True))  # file names may be no UTF-8, and it knows what to do
    return write_in_memory("handover", data)


def read_handover(fd: int) -> Handover:
    """What `write_handover` put there; closes `fd`. A part that another release wrote differently is left out."""
    parts: dict[str, Any] = {}
    try:
        with open(fd, "rb") as file:
            given = msgspec.convert(decode(file.read()), dict[str, Any])
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        log.warning("what the agent before this one knew cannot be read (%s): it starts without that", error)
        return Handover()
    for part in msgspec.structs.fields(Handover):
        try:
            if part.name in given:
                parts[part.name] = msgspec.convert(given[part.name], part.type, str_keys=True)
        except msgspec.ValidationError as error:
            log.warning("%s of the agent before this one cannot be read (%s): it starts without that", part.name, error)
    return Handover(**parts)


log = logging.getLogger(__name__)

MAX_SAID = 500


def check_config(request: CheckConfig, worker: WorkerState) -> ConfigCheck:
    """The answer of slurm_watchdog.agent.validate_config. Raises OSError."""
    try:
        done = subprocess.run(
            [*run_module("slurm_watchdog.agent.validate_config"), request.file],
            input=request.running.encode(),
            capture_output=True,
            check=False,
            timeout=request.deadline_s,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"no answer within {error.timeout:g} s: try again when the node has time") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-MAX_SAID:]
        return ConfigCheck(problems=(f"the installed version does not start: {said}",))
    return msgspec.json.decode(done.stdout, type=ConfigCheck)


KEY = "config"
DEADLINE_S = 60.0  # A second on an idle node, with the agent's priority on a busy one a few.
COMMANDS_S = 60.0  # So long a new configuration waits for commands of the controller that are under way.


class Reload:
    """What became of SIGHUP. `settings` are those that are to be taken, once there are some."""

    def __init__(self, file: str, running: Settings, probes: WorkerPool, look_at_files: Callable[[], None]):
        """`file` is absolute; empty: the settings came from elsewhere, and only certificates are looked at again."""
        self.file, self.running = file, running
        self.settings: Settings | None = None
        self.since = 0.0  # When `settings` were found good.
        self._probes, self._look_at_files = probes, look_at_files
        self._asking = self._ask_again = False

    def ask(self, now: float) -> None:
        """Has the file checked; `settings`, or the log, say later what came of it."""
        if not self.file:
            self._look_at_files()
            return
        if self._asking or self.settings is not None:
            self._ask_again = True  # it may have been written after it was read
            return
        sd_notify(f"RELOADING=1\nMONOTONIC_USEC={int(clock.monotonic() * 1e6)}\nSTATUS=checking the configuration")
        running = msgspec.json.encode(self.running).decode()
        request = CheckConfig(file=self.file, running=running, deadline_s=DEADLINE_S)
        number = self._probes.ask(KEY, request, DEADLINE_S + 5.0, now, self._apply, idle_s=0.0)
        self._asking = number is not None
        if not self._asking:
            self._refuse(["no child is free to read it now: try again"])

    def wants_restart(self, now: float, *, busy: bool) -> bool:
        """Whether it is time to start with `settings`: not while something is under way (`busy`), but not for long."""
        return self.settings is not None and (not busy or now - self.since >= COMMANDS_S)

    def _apply(self, answer: Answer[ConfigCheck]) -> None:
        self._asking = False
        if self._ask_again:
            self._ask_again = False
            self.ask(clock.monotonic())
            return
        if answer.value is None:
            self._refuse([f"{self.file} could not be checked: {answer.error}"])
            return
        if answer.value.problems:
            self._refuse(list(answer.value.problems))
            return
        settings = msgspec.json.decode(answer.value.settings, type=Settings)
        settings = replace(settings, personal=self.running.personal)
        if settings == self.running:
            self._look_at_files()
            log.warning("%s changes nothing for the agent; certificates were looked at again", self.file)
            sd_notify("READY=1\nSTATUS=")
            return
        log.warning("%s is taken: the agent restarts with it", self.file)
        self.settings, self.since = settings, clock.monotonic()

    def _refuse(self, problems: list[str]) -> None:
        for line in problems:
            log.error("%s", line)
        log.error(
            "the configuration is not taken (%d error%s); the one before stays, whole. Correct it and reload again",
            len(problems),
            "s" * (len(problems) != 1),
        )
        sd_notify("READY=1\nSTATUS=a new configuration was not taken, see the journal: the one before stays")
