"""SIGHUP: the configuration is read again, and taken whole or not at all.

It is checked by the program that would start with it (slurm_watchdog.agent.validate_config), beside the loop. One that
is valid is taken by a restart of this process, whose number stays; see slurm_watchdog.agent.memory for what the
restarted agent knows. Certificates alone take no restart.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from slurm_watchdog.agent.settings import Settings
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import describe
from slurm_watchdog.base.loop import sd_notify
from slurm_watchdog.base.python310 import run_module

log = logging.getLogger(__name__)
DEADLINE_S = 60.0  # A second on an idle node, with the agent's priority on a busy one a few.
LOOK_S = 0.1  # Between two looks at whether the check has ended.
COMMANDS_S = 60.0  # So long a new configuration waits for commands of the controller that are under way.


class Reload:
    """What became of SIGHUP. `settings` are those that are to be taken, once there are some."""

    def __init__(self, file: str, running: Settings, look_at_files: Callable[[], None]):
        """`file` is absolute; empty: the settings came from elsewhere, and only certificates are looked at again."""
        self.file, self.running = file, running
        self.settings: Settings | None = None
        self.since = 0.0  # When `settings` were found good.
        self._look_at_files = look_at_files
        self._check: subprocess.Popen[bytes] | None = None
        self._answer = -1  # A file in memory with what the check prints: it never waits for a reader.
        self._asked_at, self._ask_again = 0.0, False

    def ask(self, now: float) -> None:
        """Has the file checked; `follow` takes what comes of it."""
        if not self.file:
            self._look_at_files()
            return
        if self._check is not None:
            self._ask_again = True  # it may have been written after it was read
            return
        sd_notify(f"RELOADING=1\nMONOTONIC_USEC={int(clock.monotonic() * 1e6)}\nSTATUS=checking the configuration")
        self.settings, self._asked_at, self._answer = None, now, os.memfd_create("settings")
        try:
            self._check = subprocess.Popen(
                [*run_module("slurm_watchdog.agent.validate_config"), self.file],
                stdin=subprocess.DEVNULL,
                stdout=self._answer,
            )
        except OSError as error:
            os.close(self._answer)
            self._refuse(f"the check of {self.file} cannot be started: {describe(error)}")

    def due_at(self, now: float) -> float:
        """When `follow` is to be called though nothing wakes the loop."""
        return float("inf") if self._check is None else now + LOOK_S

    def follow(self, now: float) -> None:
        """Takes the outcome of the check, once there is one. Its errors are in the log already."""
        check = self._check
        if check is None or (check.poll() is None and now - self._asked_at < DEADLINE_S):
            return
        self._check = None
        with open(self._answer, "rb") as file:
            file.seek(0)
            answer = file.read()
        if check.returncode is None:
            check.kill()
        if self._ask_again:
            self._ask_again = False
            self.ask(now)
        elif check.returncode is None:
            self._refuse(f"{self.file} was not checked within {DEADLINE_S:g} s: try again when the node has time")
        elif check.returncode != 0:
            self._refuse(f"{self.file} is not valid, or the installed version does not start: see the lines above")
        else:
            self._take(msgspec.json.decode(answer, type=Settings), now)

    def wants_restart(self, now: float, *, busy: bool) -> bool:
        """Whether it is time to start with `settings`: not while something is under way (`busy`), but not for long."""
        return self.settings is not None and (not busy or now - self.since >= COMMANDS_S)

    def _take(self, settings: Settings, now: float) -> None:
        settings = replace(settings, personal=self.running.personal)
        if settings == self.running:
            self._look_at_files()
            log.warning("%s changes nothing for the agent; certificates were looked at again", self.file)
            sd_notify("READY=1\nSTATUS=")
            return
        log.warning("%s is taken: the agent restarts with it", self.file)
        self.settings, self.since = settings, now

    def _refuse(self, why: str) -> None:
        log.error("%s", why)
        log.error("the configuration is not taken; the one before stays, whole. Correct it and reload again")
        sd_notify("READY=1\nSTATUS=a new configuration was not taken, see the journal: the one before stays")
