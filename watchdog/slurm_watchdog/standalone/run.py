"""`slurm-watchdog run`: the command, an agent and a controller, together and for one person."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slurm_watchdog.agent.delivery.channel import UNIX
from slurm_watchdog.agent.reload.settings import Settings, settings_of, write_settings
from slurm_watchdog.analysis.good_checkpoint import resume_from
from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import wait_for
from slurm_watchdog.base.process_setup import die_with_parent
from slurm_watchdog.base.python310 import run_module
from slurm_watchdog.config.policy import Except, Match
from slurm_watchdog.config.schema import Config
from slurm_watchdog.config.types import Section
from slurm_watchdog.controller.app import live, open_doors
from slurm_watchdog.controller.controller import Controller
from slurm_watchdog.controller.health.metrics import ControllerMetrics
from slurm_watchdog.controller.ingest.endpoint import OwnUser
from slurm_watchdog.detect.registry import SPECS
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.notify.dispatcher import make_notifier
from slurm_watchdog.notify.notification import Caller
from slurm_watchdog.standalone import own_runs, report
from slurm_watchdog.standalone.local_slurm import LocalSlurm
from slurm_watchdog.standalone.own_runs import PASSWORD_FILE
from slurm_watchdog.standalone.placed import PlacedCommand
from slurm_watchdog.standalone.terminal import Terminal
from slurm_watchdog.supervisor.allocation import Allocation, node_count
from slurm_watchdog.supervisor.job_nodes import JobNodes
from slurm_watchdog.supervisor.job_questions import JobQuestions, JobTime
from slurm_watchdog.supervisor.launcher import Launcher
from slurm_watchdog.supervisor.lost_nodes import least_nodes
from slurm_watchdog.supervisor.parent import OTHER_SIGNALS, become_subreaper
from slurm_watchdog.supervisor.service import Wanted

log = logging.getLogger(__name__)
S = TypeVar("S", bound=Section)

AGENT_PAUSE_S = 5.0  # Before an agent that has ended is started again.
FINAL_WAIT_S = 4.0  # After the agent's next report: an end without a named cause is judged 6 s after it, and then told.
FINAL_SHARE = 0.1  # Of the time that the command took: it is not waited for longer once it has ended well.
INTERRUPTS = 2
"""So many SIGINTs are handed on, as torchrun and Python programs expect; one more ends the command with SIGTERM."""
TAIL_S = 0.2
NODES_S = 1.0  # Between two looks whether it is time to ask for the job's nodes.
TAIL_BYTES = 1 << 20
PAGE_LISTEN = "127.0.0.1:9767"
AGENTS_SOCKET = "agents.sock"
DETECTORS_OFF = (*(spec.kind for spec in SPECS if spec.needs_cluster), IncidentKind.AGENT_SILENT)
"""Detectors that are off here: they need other jobs or nodes; an agent that ends is started again, and said so."""


AS_ROOT = (
    "running as root: command, watchdog and everything they write belong to root. Prefer the user whose job "
    "it is, outside of a container that has only root"
)


@dataclass(frozen=True, kw_only=True)
class RunRequest(Wanted):
    """The same for a run with a watchdog of its own."""

    directory: Path  # For the log, the journal, the socket and the kill switch: of this run alone, on a local disk.
    mode: str = "act"
    page: bool = True
    quiet: bool = False  # The command's lines go to the file only.
    allocation: Allocation | None = None  # The job of Slurm that this is in; None: in none.


def config_for(base: Config, wanted: RunRequest, page_listen: str) -> Config:
    """The site's or the person's configuration, with everything that has a place put into the directory of this run."""
    directory = wanted.directory
    node = socket.gethostname().partition(".")[0]
    own: dict[str, Any] = {
        "cluster_name": node if base.cluster_name == Config().cluster_name else base.cluster_name,
        "restart": "all" if wanted.mode == "act" else "never",
        "agent": {"node_name": node, "metrics_listen": "", "state_directory": str(directory / "agent")},
        "controller": {
            "page_listen": page_listen,
            "socket": str(directory / "controller.sock"),
            "socket_group": "",
            "state_directory": str(directory),
            "warm_up": min(10.0, base.controller.warm_up),
        },
        "slurm": {"poll_interval": 1.0},
        "jobs": {
            "kill_switch": str(directory / "kill-{job_id}.{restarts}" / "kill"),
            "kill_switch_prefixes": (str(directory),),
            "partitions": (),
            "checkpoint_directories": wanted.checkpoints or base.jobs.checkpoint_directories,
        },
        "detectors": {kind: {"enabled": False} for kind in DETECTORS_OFF},
    }
    # One node, so no culprit to find: a command that makes no progress beyond its limit is restarted.
    still = Except(match=Match(kind=("stalled_progress",)), ladder=(Rung.EVIDENCE, Rung.REQUEUE))
    own["exceptions"] = (*base.exceptions, still)
    return _with_values(base, own)


def _with_values(section: S, own: Mapping[str, Any]) -> S:
    """A copy with some values replaced, section by section: these are ours, not a person's, and need no check."""
    update = {
        key: _with_values(getattr(section, key), value) if isinstance(value, Mapping) else value
        for key, value in own.items()
    }
    return msgspec.structs.replace(section, **update)


def free_port(preferred: int = 0) -> int:
    """A free port of the loopback address: `preferred` if it is free."""
    for port in (preferred, 0):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise OSError("no port is free on the loopback address")


def run(base: Config, wanted: RunRequest) -> int:
    """Runs the command until it has ended for good; returns its exit code, 128 + N after signal N. Raises
    OSError and JournalError.

    Agent and controller trust each other for being one user's: the kernel says so of both ends of their
    socket."""
    if os.geteuid() == 0:
        log.warning(AS_ROOT)
    become_subreaper()
    directory = wanted.directory
    make_private(directory)
    (directory / "agent").mkdir(exist_ok=True, mode=0o700)
    page_listen = f"127.0.0.1:{free_port(int(PAGE_LISTEN.rpartition(':')[2]))}" if wanted.page else ""
    config = config_for(base, wanted, page_listen)
    with remembered("run", report.command_line(wanted.command), directory) as (started, journal):
        return asyncio.run(_run(config, wanted, journal, started))


@contextlib.contextmanager
def remembered(command: str, what: str, directory: Path) -> Iterator[tuple[own_runs.OwnRun, Journal]]:
    """A run that other commands find, and its journal; at the end of this it has ended. Raises JournalError."""
    place = own_runs.state_home(own_runs.home_directory(), os.environ)
    started = own_runs.OwnRun(
        command=command, what=what, directory=str(directory), host=socket.gethostname(), started_at=clock.wall()
    )
    journal = Journal(f"sqlite:///{directory / own_runs.JOURNAL}")
    own_runs.write_run(place, started)
    try:
        yield started, journal
    finally:
        journal.close()
        own_runs.write_run(place, dataclasses.replace(started, ended_at=clock.wall()))


def make_private(directory: Path) -> None:
    """Makes the directory of a run, which its user alone reads. Raises OSError, and ValueError for one with other
    files: those who read them would be shut out."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    is_a_runs = (directory / own_runs.JOURNAL).exists() or not directory.stat().st_mode & 0o077
    if not is_a_runs and any(directory.iterdir()):
        raise ValueError(f"{directory} has other files, and the run closes its directory to others: give a new one")
    directory.chmod(0o700)


def _placed(wanted: RunRequest) -> PlacedCommand | None:
    """In a job with several nodes, what starts and ends the command's steps there."""
    allocation = wanted.allocation
    if allocation is None or len(allocation.nodes) == 1:
        return None
    launcher = Launcher(wanted.command, allocation, os.environ, check=wanted.check, checkpoints=wanted.checkpoints)
    count = node_count(wanted.nodes, wanted.spares, allocation)
    return PlacedCommand(launcher, allocation, count, least_nodes(wanted.command, count))


async def _watch_nodes(job: LocalSlurm, placed: PlacedCommand, ask: JobQuestions) -> None:
    """Slurm leaves the rest of a job under --no-kill to run when it has lost a node of it: see `lost_nodes`."""
    logs = [str(job.output), str(job.errors)]
    nodes = JobNodes(ask, logs, elastic=placed.is_elastic)
    run = job.restarts
    while True:
        await asyncio.sleep(NODES_S)
        if job.restarts != run:
            run = job.restarts
            nodes.begun()
        found = await nodes.look(placed.nodes) if job.state == "RUNNING" and nodes.is_due() else ()
        if found and job.restarts == run:
            await job.lose(found, ask.requeue)


def page_notes(config: Config) -> list[str]:
    """What a person has to know of this run beside where it is looked at."""
    listen = config.controller.page_listen
    taken = listen and listen != PAGE_LISTEN
    return [f"{PAGE_LISTEN} is in use, so the page is at {listen}"] if taken else []


async def _run(config: Config, wanted: RunRequest, journal: Journal, started: own_runs.OwnRun) -> int:
    placed, terminal = _placed(wanted), Terminal()
    ask = placed.launcher.ask if placed is not None else JobQuestions(own_job_id(os.environ), os.environ)
    job = LocalSlurm(
        wanted.command,
        job_id=own_job_id(os.environ),
        node=config.agent.node_name,
        output=wanted.directory / "output.log",
        environ=os.environ,
        kill_switch=config.jobs.kill_switch,
        max_restarts=wanted.max_restarts,
        placed=placed,
    )
    job.not_ours, job.terminal = ask.helpers, terminal
    if wanted.allocation is not None:
        job.job_time = JobTime(wanted.allocation.end_at, ask.end_at)
    if not is_one_stream():
        job.errors = wanted.directory / "errors.log"
    notifier = make_notifier(config, journal.outbox, Caller.RUN)
    report.tell(notifier)
    controller = Controller(config, journal=journal, slurm=job, notifier=notifier, metrics=ControllerMetrics())
    job.last_good = lambda named: _last_good(controller, job.job_id, named)
    agents = OwnUser(os.geteuid(), str(wanted.directory / AGENTS_SOCKET))
    doors = await open_doors(controller, page_password(config, wanted.directory), agents)
    stop, asked, began = asyncio.Event(), asyncio.Event(), clock.monotonic()
    loop = asyncio.get_running_loop()
    for number, do in {
        signal.SIGTERM: asked.set,
        signal.SIGHUP: asked.set,
        # The first Ctrl-C, and a second one, are the command's own business; a third one ends it.
        signal.SIGINT: lambda: job.spawn(job.interrupt()) if job.interrupts < INTERRUPTS else asked.set(),
        signal.SIGQUIT: lambda: job.signal_foreground(signal.SIGQUIT),
    }.items():
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup; a script's `run … &`
            loop.add_signal_handler(number, do)
    for number in OTHER_SIGNALS:
        loop.add_signal_handler(number, job.hand_on, number)
    agent = asyncio.create_task(_keep_agent(config, job))
    watching = asyncio.create_task(live(controller, notifier, stop))
    if placed is not None:
        job.spawn(_watch_nodes(job, placed, ask))
    tails = [] if wanted.quiet else [asyncio.create_task(_tail(job.output, 1))]
    if not wanted.quiet and job.errors != job.output:
        tails.append(asyncio.create_task(_tail(job.errors, 2)))
    try:
        await job.start()
        report.print_lines(
            report.greeting(
                started,
                mode=config.mode,
                page=config.controller.page_listen,
                job_id=job.job_id,
                notes=page_notes(config),
            )
        )
        await _until_over(job, controller, config, asked, began)
        if asked.is_set():
            log.warning("stopping: SIGTERM is sent to the command")
            await job.stop()
        # How it ended is for the journal, too.
        await controller.read_slurm()
        controller.tick()
        controller.runs.update(controller.judge.view, clock.wall(), at_end=True)
    finally:
        stop.set()
        agent.cancel()
        await asyncio.gather(watching, agent, return_exceptions=True)
        for door in doors:
            await door.cleanup()
        if placed is not None:
            placed.launcher.close()
        terminal.close()
        await asyncio.sleep(2 * TAIL_S if tails else 0)
        for tail in tails:
            tail.cancel()
        took_s = clock.monotonic() - began
        report.print_lines(
            report.summary(started, journal, how=job.how_it_ended(), took_s=took_s, restarts=job.restarts)
        )
    return 128 + signal.SIGTERM if asked.is_set() and job.exit_code is None else job.exit_code or 0


def _last_good(controller: Controller, job_id: str, named: str) -> str:
    view = controller.state.job_view(job_id, clock.monotonic())
    return named if view is None else resume_from(view, controller.judge.incidents, named)


def page_password(config: Config, directory: Path) -> str:
    """A new password of the page, if there is one, in a file of `directory`.

    The page is on a port, which every user of the machine reaches: so it asks for what only this one can read.
    """
    if not config.controller.page_listen:
        return ""
    file = directory / PASSWORD_FILE
    file.unlink(missing_ok=True)
    file.touch(mode=0o600)
    password = secrets.token_urlsafe(24)
    file.write_text(f"{password}\n")
    return password


def agent_settings(config: Config) -> Settings:
    """Of the agent beside this controller: its channel is the socket in our own directory, whatever the file
    says about nodes."""
    settings = settings_of(config)
    url = f"{UNIX}{Path(config.controller.state_directory) / AGENTS_SOCKET}"
    return msgspec.structs.replace(settings, controller_urls=(url,))


def own_job_id(environ: Mapping[str, str]) -> str:
    """Inside of a Slurm job its number, for its processes are known by that; otherwise our own pid."""
    given = environ.get("SLURM_JOB_ID", "")
    return given if given.isdecimal() else str(os.getpid())


def is_one_stream() -> bool:
    """Whether our standard output and error are one file, pipe or terminal: then the order of their lines is kept."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(1), os.fstat(2))
    return False


async def _until_over(
    job: LocalSlurm, controller: Controller, config: Config, asked: asyncio.Event, began: float
) -> None:
    """Returns when a signal asks us to end, or when the command has ended, has been judged, and is not about
    to be started again."""
    asking = asyncio.create_task(asked.wait())
    while not asked.is_set():
        over = asyncio.create_task(job.over.wait())
        await asyncio.wait({over, asking}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if asked.is_set():
            break
        if job.is_interrupted():
            break
        # Its last lines are on their way; an action that waited for its end continues.
        judged_s = config.agent.interval + FINAL_WAIT_S
        if job.exit_code == 0:  # of what has ended well, and soon, there is little to be said
            judged_s = min(judged_s, (clock.monotonic() - began) * FINAL_SHARE)
        await asyncio.sleep(judged_s)
        if controller.actions.acting():
            continue
        if job.over.is_set():
            break
    asking.cancel()


async def _keep_agent(config: Config, job: LocalSlurm) -> None:
    """An agent of our own user, started again if it ends; it dies with us."""
    settings = agent_settings(config)
    with (Path(config.controller.state_directory) / "agent.log").open("ab") as lines:
        while True:
            # The agent watches its own user's processes only, also as root in a container.
            fd = write_settings(msgspec.structs.replace(settings, personal=True))
            try:
                process = await asyncio.create_subprocess_exec(
                    *run_module("slurm_watchdog.agent"), str(fd), pass_fds=(fd,),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=lines, stderr=lines, start_new_session=True, preexec_fn=die_with_parent,
                )  # fmt: skip
            finally:
                os.close(fd)
            job.not_ours.add(process.pid)
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                with contextlib.suppress(TimeoutError):
                    await wait_for(process.wait(), 5)
                raise
            job.not_ours.discard(process.pid)
            log.error("the agent has ended with %d (see %s); it is started again", code, lines.name)
            await asyncio.sleep(AGENT_PAUSE_S)


async def _tail(output: Path, out: int) -> None:
    """Shows the command's lines as they come. The command itself writes to the file: a blocked terminal delays
    nothing."""
    offset = 0
    while True:
        with contextlib.suppress(FileNotFoundError), output.open("rb") as lines:
            lines.seek(offset)
            while data := lines.read(TAIL_BYTES):
                offset += len(data)
                try:
                    await asyncio.to_thread(_write_all, out, data)
                except OSError:
                    return  # the reader is gone; the file has all lines
        await asyncio.sleep(TAIL_S)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
