"""The controller that waits for the place of the active one: it answers who that is, and does nothing else. And SIGHUP,
for both: the configuration is read again, and taken whole or not at all.

A file that is taken is taken by a fresh start of the same process (its number stays): everything is built from the
configuration, and incidents, actions under way and a pause continue from the journal. So what could keep it from
starting is looked at before: the file, its secrets and certificates, its addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from math import nan
from typing import NoReturn

from aiohttp import web
from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import wait_for
from slurm_watchdog.base.descriptors import why_not_address
from slurm_watchdog.base.loop import HANDLED_SIGNALS, sd_notify
from slurm_watchdog.config.loading import ConfigError, load_config
from slurm_watchdog.config.schema import Config
from slurm_watchdog.config.types import split_address
from slurm_watchdog.controller.api.doors import few, open_socket
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.controller.ingest.endpoint import StandbyDoor, read_page_token, watching_app
from slurm_watchdog.identity.munge_protocol import STANDBY
from slurm_watchdog.identity.secret_files import IdentityError, TlsFiles
from slurm_watchdog.identity.tls import Context, make_context
from slurm_watchdog.journal.error import JournalError, NewerRelease
from slurm_watchdog.journal.lease import Held, Lease
from slurm_watchdog.wire.port import Port

log = logging.getLogger(__name__)

RESTART = -1  # What `run_controller` returns in the place of an exit code when a new configuration is to be taken.


def reload_config(file: str, running: Config) -> bool:
    """Whether `file` holds another configuration than `running`, with which the controller could start; the
    log says what became of it."""
    try:
        config = load_config(file)
        same = replace(config, warnings=running.warnings) == running
        problems = [] if same else why_not(config, running)
        for line in config.warnings:
            log.warning("%s", line)
    except ConfigError as error:
        same, problems = False, error.lines()
    for line in problems:
        log.error("%s", line)
    if problems:
        log.error("the configuration is not taken (%d errors); the one before stays, whole", len(problems))
        return False
    if same:
        log.warning("%s is unchanged", file)
        return False
    log.warning("%s is taken: the controller restarts with it", file)
    return True


def why_not(config: Config, running: Config) -> list[str]:
    """Why a controller could not start with a configuration that is right by itself, a line each."""
    found = []
    try:
        read_page_token(config.security.page_token_file)
    except (ValueError, OSError) as error:
        found.append(str(error))
    if config.security.identity() == "tls":
        try:
            make_context(TlsFiles(config.security.tls_directory, "controller"), server=True)
        except IdentityError as error:
            found.append(f"security.tls_directory: {error}")
    mine = {running.controller.listen, running.controller.page_listen}
    for name in ("listen", "page_listen"):
        address = getattr(config.controller, name)
        if not address or address in mine:
            continue
        if (problem := why_not_address(*split_address(address))) is not None:
            found.append(f"controller.{name}: {address} {problem}")
    directory = config.controller.state_directory
    if not config.controller.journal_url and os.path.isdir(directory) and not os.access(directory, os.W_OK):
        found.append(f"controller.state_directory: {directory} cannot be written")
    return found


def await_signals(file: str | None, running: Config) -> tuple[asyncio.Event, asyncio.Event]:
    """(the end, the restart), set by signals: SIGTERM and SIGINT ask for the end, and so does a SIGHUP after which the
    configuration in `file` is taken, whose end is a restart."""
    loop, stop, restart = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def read_again() -> None:
        if file is not None and not stop.is_set() and reload_config(file, running):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # it is the fresh one's: see restart_process
            restart.set()
            stop.set()

    for number, handler in ((signal.SIGTERM, stop.set), (signal.SIGINT, stop.set), (signal.SIGHUP, read_again)):
        loop.add_signal_handler(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)  # a controller that has restarted still holds them
    return stop, restart


def restart_process() -> NoReturn:
    """Replaces this process by a fresh one that was called the same way. Raises OSError if it cannot be started."""
    # A signal in between waits for the fresh one's handlers: SIGHUP would end it before.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 -- a list, and no shell is wanted


LOOK_EVERY_S = 0.5  # Of the 10 s within which it takes over, those in which it does not know that it may.
NOT_KNOWN = Held(0, "", nan)  # Of the active one, before the database was asked, and while it does not answer.


class Standby:
    """Waits with doors that refuse, until the lease is taken or a signal ends it."""

    def __init__(self, config: Config, lease: Lease):
        self._config, self._lease = config, lease
        self._held = NOT_KNOWN
        self._problem = ""  # Why it could not take the place of the active one now.
        self._blind = ""  # Why it does not know whether there is an active one; empty: it does.
        self._metrics = ControllerMetrics()
        self._metrics.show_role(active=False, epoch=lambda: self._held.epoch, age_s=lambda: self._held.age_s)

    def sentence(self) -> str:
        """For people: which controller is the active one."""
        standby = f"This controller ({self._lease.name}) is the standby"
        if self._blind:
            return f"{standby}; whether there is an active one is not known: {self._blind}"
        active = f"{standby}; the active one is {self._held.holder or 'none at this moment'}: ask it."
        return f"{active} It could not take its place: {self._problem}" if self._problem else active

    async def wait(self, tls: Context | None, config_file: str | None) -> bool | None:
        """True: the lease is ours. False: a signal asked for the end; None: for a restart with another
        configuration, which `config_file` holds. Raises OSError if a door can't be opened."""
        stop, restart = await_signals(config_file, self._config)
        doors: list[Port] = []
        try:
            await self._open(doors, tls)
            while not stop.is_set():
                if await asyncio.to_thread(self.look):
                    log.warning("this controller is the active one from now on (epoch %d)", self._lease.epoch)
                    return True
                self._metrics.last_tick.set(clock.wall())
                sd_notify(f"READY=1\nWATCHDOG=1\nSTATUS={self.sentence()}")
                with contextlib.suppress(TimeoutError):
                    await wait_for(stop.wait(), LOOK_EVERY_S)
            sd_notify("RELOADING=1" if restart.is_set() else "STOPPING=1")
            return None if restart.is_set() else False
        finally:
            for door in doors:
                await door.cleanup()

    def is_ready(self) -> bool:
        """Whether it could take the place of the active one now."""
        return not (self._blind or self._problem)

    def look(self) -> bool:
        """Asks the database once: whether the lease is ours now. Logs what has changed."""
        before, was_blind = self.sentence(), bool(self._blind)
        held, problem, blind, taken = NOT_KNOWN, "", "", False
        try:
            try:
                taken = self._lease.take()
            except NewerRelease as error:
                problem = str(error)
            held = held if taken else self._lease.read()
        except JournalError as error:
            problem, blind = "", str(error)
        self._held, self._problem, self._blind = held, problem, blind
        self._metrics.ready.set(self.is_ready())
        if self._blind and not was_blind:
            log.error("%s", self.sentence())
        elif not (taken or self._blind) and self.sentence() != before:
            log.warning("%s", self.sentence())
        return taken

    async def _open(self, doors: list[Port], tls: Context | None) -> None:
        config = self._config.controller
        metrics, door = self._metrics, StandbyDoor(self._metrics, self.sentence)

        agents = Port(watching_app(metrics, self.health), admit=self.admit, tls=tls, streams=door)
        await agents.start(*split_address(config.listen))
        doors.append(agents)
        local = Port(web.Application(), admit=self.refuse, limits=few())
        doors.append(local)
        await open_socket(local, config.socket, config.socket_group)
        for name, address in (("page_listen", config.page_listen), ("user_listen", config.user_listen)):
            if not address:
                continue
            try:
                other = Port(web.Application(), admit=self.refuse, limits=few())
                await other.start(*split_address(address))
                doors.append(other)
            except OSError as error:
                log.error("controller.%s %s is not served: %s", name, address, error)

    def health(self) -> tuple[bool, str]:
        """Whether it is healthy: it is there to take over, and has to be able to."""
        return self.is_ready(), "standby" if self.is_ready() else self.sentence()

    def admit(self, request: web.Request) -> web.Response | None:
        """Of an agents' port: its metrics and its health, and nothing else."""
        if request.path in ("/metrics", "/healthz"):
            return None
        self._metrics.reports.labels(STANDBY).inc()
        return self.refuse(request)

    def refuse(self, request: web.Request) -> web.Response:
        """Which controller is the active one."""
        return web.json_response({"error": self.sentence(), "code": STANDBY}, status=503)
