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
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from slurm_watchdog.agent.courier.streams import UNIX
from slurm_watchdog.agent.settings import settings_of, write_settings
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
from slurm_watchdog.controller.ingest.endpoint import Identity, OwnUser
from slurm_watchdog.detect.registry import SPECS
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.notify.dispatcher import make_notifier
from slurm_watchdog.notify.notification import Caller
from slurm_watchdog.slurm.client import SlurmClient
from slurm_watchdog.standalone import own_runs, report
from slurm_watchdog.standalone.local_slurm import LocalLauncher, LocalSlurm
from slurm_watchdog.standalone.own_runs import PASSWORD_FILE
from slurm_watchdog.supervisor.parent import OTHER_SIGNALS, become_subreaper
from slurm_watchdog.supervisor.placement import Allocation
from slurm_watchdog.supervisor.service import Wanted

log = logging.getLogger(__name__)
S = TypeVar("S", bound=Section)

AGENT_ENDS_S = 5.0  # Between SIGTERM to an agent and SIGKILL.
AGENT_PAUSE_S = 5.0  # Before an agent that has ended is started again.
FINAL_WAIT_S = 4.0  # After the agent's next report: an end without a named cause is judged 6 s after it, and then told.
FINAL_SHARE = 0.1  # Of the time that the command took: it is not waited for longer once it has ended well.
INTERRUPTS = 2
"""So many SIGINTs are handed on, as torchrun and Python programs expect; one more ends the command with SIGTERM."""
TAIL_S = 0.2
TAIL_BYTES = 1 << 20
AGENTS_SOCKET = "agents.sock"
DETECTORS_OFF = (*(spec.kind for spec in SPECS if spec.needs_cluster), IncidentKind.AGENT_SILENT)
"""Detectors that are off here: they need other jobs or nodes; an agent that ends is started again, and said so."""


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
    # One node, so no culprit to find: a command that makes no progress beyond its limit is restarted.
    still = Except(match=Match(kind=("stalled_progress",)), ladder=(Rung.EVIDENCE, Rung.REQUEUE))
    return own_config(
        base, directory, act=wanted.mode == "act", page_listen=page_listen,
        cluster_name=node if base.cluster_name == Config().cluster_name else base.cluster_name,
        exceptions=(*base.exceptions, still),
        agent={"node_name": node, "state_directory": str(directory / "agent")},
        controller={"warm_up": min(10.0, base.controller.warm_up)},
        slurm={"poll_interval": 1.0},
        jobs={
            "kill_switch": str(directory / "kill-{job_id}.{restarts}" / "kill"),
            "checkpoint_directories": wanted.checkpoints or base.jobs.checkpoint_directories,
        },
    )  # fmt: skip


def own_config(base: Config, directory: Path, *, act: bool, page_listen: str, **own: Any) -> Config:
    """What every watchdog of one person's has in its directory, and `own` values on top, section by section."""
    common: dict[str, Any] = {
        "restart": "all" if act else "never",
        "agent": {"metrics_directory": "", "state_directory": ""},
        "controller": {
            "page_listen": page_listen, "socket": str(directory / own_runs.SOCKET), "socket_group": "",
            "state_directory": str(directory),
        },
        "jobs": {"kill_switch_prefixes": (str(directory),), "partitions": ()},
        "detectors": {kind: {"enabled": False} for kind in DETECTORS_OFF},
    }  # fmt: skip
    return with_values(with_values(base, common), own)


def with_values(section: S, own: Mapping[str, Any]) -> S:
    """A copy with some values replaced, section by section: these are ours, not a person's, and need no check."""
    update = {
        key: with_values(getattr(section, key), value) if isinstance(value, Mapping) else value
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
    """Runs the command until it has ended for good; returns its exit code, 128 + N after signal N. Raises OSError,
    JournalError, and ValueError for a directory with other files.

    Agent and controller trust each other for being one user's: the kernel says so of both ends of their socket."""
    if os.geteuid() == 0:
        log.warning(
            "running as root: command, watchdog and everything they write belong to root. Prefer the user whose job it "
            "is, outside of a container that has only root"
        )
    become_subreaper()
    directory = wanted.directory
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    is_a_runs = (directory / own_runs.JOURNAL).exists() or not directory.stat().st_mode & 0o077
    if not is_a_runs and any(directory.iterdir()):
        raise ValueError(f"{directory} has other files, and the run closes its directory to others: give a new one")
    directory.chmod(0o700)
    (directory / "agent").mkdir(exist_ok=True, mode=0o700)
    page_listen = f"127.0.0.1:{free_port(int(report.PAGE_LISTEN.rpartition(':')[2]))}" if wanted.page else ""
    config = config_for(base, wanted, page_listen)
    return asyncio.run(_run(config, wanted))


def _local_slurm(wanted: RunRequest, config: Config) -> LocalSlurm:
    """Raises OSError, and NoSpare where the job has too few nodes."""
    node, given = config.agent.node_name, os.environ.get("SLURM_JOB_ID", "")
    # Inside of a Slurm job its number, for its processes are known by that.
    found = wanted.allocation or Allocation(job_id=given if given.isdecimal() else str(os.getpid()), nodes=(node,))
    patient = len(found.nodes) == 1
    allocation = msgspec.structs.replace(found, batch_host=found.nodes[0]) if patient else found
    output = errors = wanted.directory / "output.log"
    with contextlib.suppress(OSError):
        if not os.path.samestat(os.fstat(1), os.fstat(2)):  # else the order of their lines is kept
            errors = wanted.directory / "errors.log"
    launcher = LocalLauncher(
        wanted.command, allocation, os.environ, output=output, errors=errors, check=wanted.check,
        kill_switch=config.jobs.kill_switch, checkpoints=wanted.checkpoints,
    )  # fmt: skip
    settings = wanted.settings(allocation, patient=patient, in_slurm=found is wanted.allocation)
    return LocalSlurm(settings, launcher, node)


@contextlib.asynccontextmanager
async def watched(
    caller: Caller, what: str, config: Config, slurm: SlurmClient, identity: Identity,
    result: Callable[[], tuple[str, int]],
) -> AsyncIterator[tuple[Controller, own_runs.OwnRun]]:  # fmt: skip
    """A controller that tells this person of incidents, in a run that other commands find; at its end a summary with
    its `result`: how the command or job has ended, and its restarts. Raises JournalError."""
    directory, began = Path(config.controller.state_directory), clock.monotonic()
    place = own_runs.state_home(own_runs.home_directory(), os.environ)
    started = own_runs.OwnRun(
        command=caller, what=what, directory=str(directory), host=socket.gethostname(), started_at=clock.wall()
    )
    journal = Journal(f"sqlite:///{directory / own_runs.JOURNAL}")
    own_runs.write_run(place, started)
    password, file = "", directory / PASSWORD_FILE
    if config.controller.page_listen:  # every user of the machine reaches that port, and only this one the file
        file.unlink(missing_ok=True)
        file.touch(mode=0o600)
        file.write_text(f"{(password := secrets.token_urlsafe(24))}\n")
    try:
        notifier = make_notifier(config, journal.outbox, caller)
        report.tell(notifier)
        controller = Controller(config, journal=journal, slurm=slurm, notifier=notifier, metrics=ControllerMetrics())
        doors = await open_doors(controller, password, identity)
        stop = asyncio.Event()
        watching = asyncio.create_task(live(controller, notifier, stop))
        try:
            yield controller, started
        finally:
            stop.set()
            await asyncio.gather(watching, return_exceptions=True)
            for door in doors:
                await door.cleanup()
            how, restarts = result()
            took_s = clock.monotonic() - began
            report.print_lines(report.summary(started, journal, how=how, took_s=took_s, restarts=restarts))
    finally:
        journal.close()
        own_runs.write_run(place, dataclasses.replace(started, ended_at=clock.wall()))


async def _run(config: Config, wanted: RunRequest) -> int:
    job, began = _local_slurm(wanted, config), clock.monotonic()
    agents = OwnUser(os.geteuid(), str(wanted.directory / AGENTS_SOCKET))
    what = report.command_line(wanted.command)
    shown = {} if wanted.quiet else {job.launcher.errors: 2, job.launcher.output: 1}
    async with watched(Caller.RUN, what, config, job, agents, job.result) as (controller, started):

        def last_good(named: str) -> str:
            view = controller.state.job_view(job.job_id, clock.monotonic())
            return named if view is None else resume_from(view, controller.judge.incidents, named)

        job.supervisor.good = last_good
        asked = _take_signals(job)
        agent = asyncio.create_task(_keep_agent(config, job))
        tails = [asyncio.create_task(_tail(file, fd)) for file, fd in shown.items()]
        try:
            await job.start()
            report.print_lines(report.greeting(started, config, job_id=job.job_id))
            await _until_over(job, controller, config, asked, began)
            # How it ended is for the journal, too.
            await controller.read_slurm()
            controller.tick()
            controller.runs.update(controller.judge.view, clock.wall(), at_end=True)
        finally:
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)
            await job.close()
            await asyncio.sleep(2 * TAIL_S if tails else 0)
            for tail in tails:
                tail.cancel()
    return job.exit_code


def _take_signals(job: LocalSlurm) -> asyncio.Event:
    """Set once one of them asks for the end."""
    asked, loop = asyncio.Event(), asyncio.get_running_loop()

    def end() -> None:
        asked.set()
        job.ask(signal.SIGTERM, ends=True)

    for number, do in {
        signal.SIGTERM: end,
        signal.SIGHUP: end,
        # The first Ctrl-C, and a second one, are the command's own business; a third one ends it.
        signal.SIGINT: lambda: job.ask(signal.SIGINT, ends=False) if job.interrupts < INTERRUPTS else end(),
        signal.SIGQUIT: lambda: job.launcher.signal_foreground(signal.SIGQUIT),
    }.items():
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup; a script's `run … &`
            loop.add_signal_handler(number, do)
    for number in OTHER_SIGNALS:
        loop.add_signal_handler(number, lambda number=number: job.ask(number, ends=False))  # type: ignore[misc]
    return asked


async def _until_over(
    job: LocalSlurm, controller: Controller, config: Config, asked: asyncio.Event, began: float
) -> None:
    """Returns when the command has ended, has been judged if no one asked for the end, and is not about to be started
    again."""
    while True:
        await job.over.wait()
        if asked.is_set() or job.is_interrupted():
            return
        # Its last lines are on their way; an action that waited for its end continues.
        judged_s = config.agent.interval + FINAL_WAIT_S
        if job.exit_code == 0:  # of what has ended well, and soon, there is little to be said
            judged_s = min(judged_s, (clock.monotonic() - began) * FINAL_SHARE)
        with contextlib.suppress(TimeoutError):
            await wait_for(asked.wait(), judged_s)
        if job.over.is_set() and not controller.actions.acting():
            return


async def _keep_agent(config: Config, job: LocalSlurm) -> None:
    """An agent of our own user, started again if it ends; it dies with us."""
    url = f"{UNIX}{Path(config.controller.state_directory) / AGENTS_SOCKET}"
    # It watches its own user's processes only, also as root in a container, and whatever the file says about nodes.
    settings = msgspec.structs.replace(settings_of(config), controller_urls=(url,), personal=True)
    with (Path(config.controller.state_directory) / "agent.log").open("ab") as lines:
        while True:
            fd = write_settings(settings)
            try:
                process = await job.launcher.ask.spawn(
                    *run_module("slurm_watchdog.agent"), str(fd), pass_fds=(fd,), stdin=asyncio.subprocess.DEVNULL,
                    stdout=lines, stderr=lines, preexec_fn=die_with_parent,
                )  # fmt: skip
            finally:
                os.close(fd)
            try:
                code = await process.wait()
            except asyncio.CancelledError:
                await ended(process, AGENT_ENDS_S)
                raise
            job.launcher.helpers.discard(process.pid)
            log.error("the agent has ended with %d (see %s); it is started again", code, lines.name)
            await asyncio.sleep(AGENT_PAUSE_S)


async def ended(process: asyncio.subprocess.Process, within_s: float) -> None:
    """SIGTERM, and SIGKILL to what has not ended by then."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await wait_for(process.wait(), within_s)
    except TimeoutError:
        process.kill()
        await process.wait()


async def _tail(output: Path, out: int) -> None:
    """Shows the command's lines as they come. The command itself writes to the file: a blocked terminal delays
    nothing."""
    with contextlib.suppress(OSError), output.open("a+b") as lines:  # the reader is gone; the file has all lines
        lines.seek(0)
        while True:
            while data := lines.read(TAIL_BYTES):
                while data:
                    data = data[await asyncio.to_thread(os.write, out, data) :]
            await asyncio.sleep(TAIL_S)
