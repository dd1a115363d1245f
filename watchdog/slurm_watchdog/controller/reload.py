"""SIGHUP: the configuration is read again, and taken whole or not at all.

A file that is taken is taken by a fresh start of the same process (its number stays): everything in the
controller is built from its configuration, and open incidents, actions under way and a pause continue from
the journal, as after any other restart. So what could keep it from starting is looked at before: the file,
its secrets and certificates, its addresses.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import NoReturn

from msgspec.structs import replace

from slurm_watchdog.base.descriptors import why_not_address
from slurm_watchdog.base.loop import HANDLED_SIGNALS
from slurm_watchdog.config.loading import ConfigError, load_config
from slurm_watchdog.config.schema import Config
from slurm_watchdog.config.types import split_address
from slurm_watchdog.controller.ingest.endpoint import read_page_token
from slurm_watchdog.identity.secret_files import IdentityError, TlsFiles
from slurm_watchdog.identity.tls import make_context

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
