"""The controller as a service: its doors, its cadence, its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pwd
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import uvloop

from slurm_watchdog import __version__
from slurm_watchdog.base import clock
from slurm_watchdog.base.loop import sd_notify
from slurm_watchdog.base.text import one_line
from slurm_watchdog.config.knowledge_files import put_in_force
from slurm_watchdog.config.schema import Config
from slurm_watchdog.config.types import split_address
from slurm_watchdog.controller.api.doors import MAX_OF_PAGE, UserDoor, few, local_port, open_socket
from slurm_watchdog.controller.api.web_page import make_page
from slurm_watchdog.controller.controller import Controller, Outside
from slurm_watchdog.controller.evidence.reach import SlurmdPort
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.controller.ingest.endpoint import (
    AgentCredentials,
    Identity,
    OwnUser,
    ReportEndpoint,
    read_page_token,
)
from slurm_watchdog.controller.node_history.node_tests import tester_of
from slurm_watchdog.controller.standby import RESTART, Standby, await_signals
from slurm_watchdog.identity.munge_library import BadCredential, MungeLibrary, MungeUnavailable
from slurm_watchdog.identity.secret_files import IdentityError, TlsFiles
from slurm_watchdog.identity.tls import Context
from slurm_watchdog.journal.database import Database, address_of
from slurm_watchdog.journal.error import NewerRelease
from slurm_watchdog.journal.journal import Journal, JournalError
from slurm_watchdog.journal.lease import Alone, Lease
from slurm_watchdog.notify.dispatcher import Notifier, make_notifier
from slurm_watchdog.notify.programs import SendFailed, post_json, read_url
from slurm_watchdog.recording.recorder import Recorder
from slurm_watchdog.slurm.client import SlurmUnavailable
from slurm_watchdog.slurm.command_line import CommandLineSlurm
from slurm_watchdog.slurm.commands import ALWAYS, Right
from slurm_watchdog.slurm.pyslurm_client import make_client
from slurm_watchdog.wire.port import Port

log = logging.getLogger(__name__)

TURN_S = 0.0005  # A thread (munged's answer, a listing of Slurm) waits so long for its turn; the default is 5 ms.
NO_CREDENTIAL = "MUNGE:AAAA:"  # Asks munged for an answer, which is no.


def uid_of(user: str) -> int | None:
    """The number of a user given by name or number; None where there is no such name."""
    if user.isdecimal():
        return int(user)
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        return None


async def open_munge(config: Config) -> AgentCredentials:
    """Who decodes credentials, and which are believed. Raises IdentityError."""
    security = config.security
    own = os.geteuid()
    if uid_of(security.controller_user) != own:
        raise IdentityError(
            f"the controller runs as user {own}, and security.controller_user is "
            f"{security.controller_user}: agents' credentials would "
            "be for another user"
        )
    agents = uid_of(security.agent_user)
    if agents is None:
        log.warning(
            "there is no user %s here: only root's agents are believed (security.agent_user)", security.agent_user
        )
    munge = MungeLibrary(security.munge_socket)
    try:
        await munge.decode(NO_CREDENTIAL)
    except BadCredential:
        pass
    except MungeUnavailable as error:
        if "libmunge" in str(error):
            raise IdentityError(
                f"nodes prove themselves by MUNGE, and {error}: install munge, or set security.tls_directory"
            ) from error
        log.error("MUNGE does not answer (%s): no agent can prove itself until it does", error)
    return AgentCredentials(own, frozenset({0} if agents is None else {0, agents}), munge)


RESERVATIONS_EVERY_S = 60.0  # Maintenance is announced hours before; who becomes an operator has a minute's patience.
COLLECT_AFTER = (200_000, 100_000, 100_000)
"""Objects and rounds between two runs of the collector of cycles by itself (700, 10, 10 by default): in bursts."""
YOUNG_EVERY_S, OLDER_EVERY, ALL_EVERY = 0.25, 40, 2400  # Runs: of all that has come in 10 s, of all in 10 min.
"""Each run holds everything up. What is young is little if it is looked at often, and what a request leaves is young; a
full run walks over all that is known of the cluster, which has no cycles."""


def run_controller(
    config: Config, *, once: bool = False, record: str | None = None, config_file: str | None = None
) -> int:
    """Runs the controller until SIGTERM or SIGINT; with `once` for one look at Slurm and one tick. Everything that it
    takes over is appended to the file `record`. At SIGHUP `config_file` is read again. Returns the exit
    code: 0; after saying why, 2 when it can't start like this, 1 when it could not start now, which may pass (systemd
    tries again then, and only then); RESTART when it is to start with a new configuration."""
    put_in_force(config.site_texts)
    try:
        page_token = read_page_token(config.security.page_token_file)
    except (ValueError, OSError) as error:
        log.error("the controller cannot start: %s", error)
        return 2
    alone: Alone | None = None
    lease: Lease | None = None
    journal: Journal | None = None
    recorder: Recorder | None = None
    try:
        url = journal_url(config)
        backend = address_of(url).get_backend_name()
        if backend == "sqlite":
            alone = Alone(url)
        if backend == "postgresql":
            lease = Lease(url, f"{socket.gethostname()}:{split_address(config.controller.listen)[1]}")
            code = _become_active(config, lease, config_file, once=once)
            if code is not None:
                return code
        journal = Journal(url, partial(Database, check=None if lease is None else lease.check))
        recorder = None if record is None else Recorder(record)
        serving = _serve(config, journal, page_token, recorder, lease, once=once, config_file=config_file)
    except (ValueError, JournalError, OSError, IdentityError) as error:
        log.error("the controller cannot start: %s", error)
        return 1
    else:
        sys.setswitchinterval(TURN_S)
        return uvloop.run(serving)
    finally:
        for each in (recorder, journal, lease, alone):
            if each is not None:
                each.close()


def _become_active(config: Config, lease: Lease, config_file: str | None, *, once: bool) -> int | None:
    """Waits until the lease is ours; gives None then, otherwise what `run_controller` returns. Raises JournalError,
    OSError, IdentityError."""
    lease.prepare()
    try:
        taken = lease.take()
    except NewerRelease as error:
        log.error("%s", error)
        taken = False
    if not taken:
        standby = Standby(config, lease)
        if once:
            log.error("a controller is already active (%s): --once needs that none runs", lease.read().holder)
            return 2
        ended = uvloop.run(standby.wait(tls_context(config), config_file))
        if not ended:
            return RESTART if ended is None else 0
    lease.keep()
    return None


def journal_url(config: Config) -> str:
    """The journal's address; a directory for SQLite is made if it is missing. Raises OSError."""
    if config.controller.journal_url:
        return config.controller.journal_url
    directory = Path(config.controller.state_directory)
    directory.mkdir(parents=True, exist_ok=True, mode=0o750)
    return f"sqlite:///{directory / 'journal.sqlite'}"


async def _serve(
    config: Config,
    journal: Journal,
    page_token: str,
    recorder: Recorder | None,
    lease: Lease | None,
    *,
    once: bool,
    config_file: str | None = None,
) -> int:
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
    metrics = ControllerMetrics()
    is_active = (lambda: True) if lease is None else lease.is_held  # the one controller on SQLite is the active one
    if lease is not None:
        epoch = lease.epoch
        metrics.show_role(active=True, epoch=lambda: epoch, age_s=lease.age_s)
    slurm = make_client(
        config.slurm.client,
        pyslurm_python=config.slurm.pyslurm_python,
        token_file=config.slurm.token_file,
        bin_directory=config.slurm.bin_directory,
        deadline_s=config.slurm.deadline,
        observe=lambda call, outcome: metrics.slurm_requests.labels(call, outcome).inc(),
        right=ALWAYS if lease is None else Right(lease.is_held, lease.confirm),
    )
    notifier = make_notifier(config, journal.outbox)
    controller = Controller(
        config, journal=journal, slurm=slurm, notifier=notifier, metrics=metrics, recorder=recorder,
        outside=Outside(SlurmdPort(config.slurm.slurmd_port), tester_of(config, slurm)),
    )  # fmt: skip
    if once:
        await controller.read_slurm()
        controller.tick()
        good, sentence = controller.healthy()
        log.warning(
            "%s; %d jobs, %d incidents", sentence, len(controller.judge.view.jobs), len(controller.judge.incidents)
        )
        return 0 if good else 1
    stop, restart = await_signals(config_file, config)
    runners: list[Port] = []
    try:
        runners = await open_doors(controller, page_token, await open_identity(config), is_active)
    except (OSError, IdentityError) as error:
        log.error("the controller cannot start: %s", error)
        return 1
    log.warning("controller %s on %s, mode %s", __version__, config.controller.listen, config.mode)
    reading = asyncio.create_task(_every(RESERVATIONS_EVERY_S, lambda: read_rarely(controller, slurm), stop))
    url_file = config.notify.heartbeat.url_file
    collecting = asyncio.create_task(_collect_cycles(stop))
    heart = Heartbeat(url_file, config.cluster_name, controller.healthy)
    beating = asyncio.create_task(_every(BEAT_EVERY_S, heart.beat, stop)) if url_file else None
    await live(controller, notifier, stop, restart)
    for task in (reading, collecting, beating):
        if task is not None:
            task.cancel()
    for runner in runners:
        await runner.cleanup()
    return RESTART if restart.is_set() else 0


async def read_rarely(controller: Controller, slurm: CommandLineSlurm) -> None:
    """One listing of reservations, and one of who is what in Slurm's accounting, each by itself: without an answer
    those of its last one stay."""
    try:
        controller.state.reservations = await slurm.read_reservations()
        controller.metrics.slurm_unreadable.labels("reservation").inc(len(slurm.left_out_reservations))
    except SlurmUnavailable as error:
        log.warning("Slurm's reservations are not known: %s", error)
    if not controller.config.security.asks_slurm():
        return
    try:
        controller.state.people = await slurm.read_people()
    except SlurmUnavailable as error:
        log.warning("Who is what in Slurm's accounting is not known: %s", error)


async def live(
    controller: Controller, notifier: Notifier, stop: asyncio.Event, restart: asyncio.Event | None = None
) -> None:
    """A controller's life while its doors are open: it looks at Slurm, ticks, sends messages and acts until `stop` is
    set. With `restart` set, too, systemd learns that this is no end: a service that said it stops would be helped to.
    The simulator calls it as well, under a clock of its own."""
    tasks = [
        asyncio.create_task(_every(controller.config.slurm.poll_interval, controller.read_slurm, stop)),
        asyncio.create_task(notifier.run()),
        asyncio.create_task(_tick_until_stopped(controller, stop)),
    ]
    controller.actions.resume_open_actions()
    await stop.wait()
    sd_notify("STOPPING=1" if restart is None or not restart.is_set() else "RELOADING=1")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await controller.actions.close()
    await controller.evidence.close()
    await controller.reach.close()
    await controller.collector.close()


def tls_context(config: Config) -> Context | None:
    """The controller's certificate and its authority, where agents prove themselves so. Raises IdentityError."""
    if config.security.identity() != "tls":
        return None
    security = config.security
    files = TlsFiles(security.tls_directory, "controller")
    return Context(files, server=True, domain=security.certificate_domain)


async def open_identity(config: Config) -> Identity:
    """What agents prove themselves by, as a service. Raises IdentityError."""
    return tls_context(config) or await open_munge(config)


async def open_doors(
    controller: Controller, page_token: str, identity: Identity, is_active: Callable[[], bool] = lambda: True
) -> list[Port]:
    """The port for agents and Prometheus, the local socket for the commands, and the page. Raises OSError,
    IdentityError. With an OwnUser as `identity` agents come by his socket, and there is no port for them."""
    config = controller.config
    own, state = isinstance(identity, OwnUser), controller.state
    controller.personal = own
    door = ReportEndpoint(
        identity=identity,
        address_of=state.address_of if config.security.check_node_address and not own else None,
        take=controller.take,
        hold=controller.hold,
        metrics=controller.metrics,
        healthy=controller.healthy,
        interval_s=config.agent.interval,
        knows_nodes=lambda: state.slurm_at is not None,
        is_active=is_active,
        commands=controller.commands,
        record=controller.record,
    )
    agents, address = door.server(), split_address(config.controller.listen)
    await (agents.start_unix(identity.socket) if isinstance(identity, OwnUser) else agents.start(*address))

    def count(reason: str) -> None:
        controller.metrics.refused_connections.labels(reason).inc()

    local = local_port(controller, count)
    await open_socket(local, config.controller.socket, config.controller.socket_group)
    doors = [agents, local]
    if config.controller.user_listen and not own:
        doors.append(UserDoor(controller, MungeLibrary(config.security.munge_socket)).server(count))
        await doors[-1].start(*split_address(config.controller.user_listen))
    if config.controller.page_listen:
        page = Port(make_page(controller, page_token), count=count, limits=few(MAX_OF_PAGE, by_address=False))
        try:
            await page.start(*split_address(config.controller.page_listen))
            doors.append(page)
        except OSError as error:
            log.error("the page on %s is not served, all else is: %s", config.controller.page_listen, error)
    return doors


async def _every(interval_s: float, work: Callable[[], Awaitable[object]], stop: asyncio.Event) -> None:
    while not stop.is_set():
        try:
            await work()
        except Exception:  # the boundary: a bad poll is a bad poll
            log.exception("a poll failed")
        await asyncio.sleep(interval_s)


async def _collect_cycles(stop: asyncio.Event) -> None:
    runs = 0
    while not stop.is_set():
        await asyncio.sleep(YOUNG_EVERY_S)
        runs += 1
        gc.collect(0 if runs % OLDER_EVERY else 1 if runs % ALL_EVERY else 2)


STATUS_CHARACTERS, STATUS_EVERY_S = 300, 5.0  # Of the headline that `systemctl status` shows.


REST = 0.25  # Of an interval, between two ticks: so much is always that of reports, and what they take within a tick.


async def _tick_until_stopped(controller: Controller, stop: asyncio.Event) -> None:
    """Ticks at a fixed cadence; systemd hears from us only after a whole tick."""
    interval_s, ready, said_at = controller.config.controller.tick, False, float("-inf")
    while not stop.is_set():
        began = clock.monotonic()
        try:
            for _ in controller.pieces():
                await asyncio.sleep(0)  # reports, questions and actions first
            sd_notify("WATCHDOG=1" if ready else "READY=1\nWATCHDOG=1")
            if began - said_at >= STATUS_EVERY_S:
                sd_notify(f"STATUS={one_line(controller.healthy()[1], STATUS_CHARACTERS)}")
                said_at = began
            ready = True
        except Exception:  # the boundary: no heartbeat goes out from a tick that did not complete
            log.exception("a tick failed")
        took_s = clock.monotonic() - began
        await asyncio.sleep(max(REST * interval_s, interval_s - took_s))


BEAT_EVERY_S = 60.0  # dead man's switches alarm after some minutes


class Heartbeat:
    """Sends one when asked to, only after a whole tick of a controller that sees: it proves more than that a process is
    there. Warns once that it cannot."""

    def __init__(self, url_file: str, cluster: str, healthy: Callable[[], tuple[bool, str]]) -> None:
        self._url_file, self._cluster, self._healthy, self._error = url_file, cluster, healthy, ""

    async def beat(self) -> bool:
        """Whether one was sent."""
        (good, sentence), known, self._error = self._healthy(), self._error, ""
        if not good:
            return False
        try:
            url = read_url(self._url_file, "notify.heartbeat.url_file")
            await post_json(url, {"cluster": self._cluster, "detail": sentence}, receiver="the heartbeat's receiver")
        except SendFailed as error:
            self._error = error.reason
            if error.reason != known:
                log.warning("the heartbeat is not delivered: %s", error.reason)
        return not self._error
