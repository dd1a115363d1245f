"""`slurm-watchdog run --job`: one job of one's own on a real cluster. Its agents are a step in it (`srun --overlap`),
which may read the stacks of its ranks, being the same user's; the controller is where it was called. Both sides meet in
one directory that all nodes see."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from slurm_watchdog.agent.settings import settings_of
from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import wait_for
from slurm_watchdog.base.process_setup import die_with_parent
from slurm_watchdog.base.python310 import run_module
from slurm_watchdog.base.text import one_line, plural
from slurm_watchdog.config.loading import load_config
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.app import open_identity
from slurm_watchdog.controller.controller import Controller
from slurm_watchdog.doctor.cluster import read_slurm_config
from slurm_watchdog.knowledge.launchers import LOCAL_RANK_VARIABLES, RANK_VARIABLES, WORLD_SIZE_VARIABLES
from slurm_watchdog.model.kill_switch import problem_of_prefix
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.model.slurm_states import ALIVE, RUNNING
from slurm_watchdog.notify.notification import Caller
from slurm_watchdog.slurm.client import SlurmUnavailable
from slurm_watchdog.slurm.command_line import CommandLineSlurm
from slurm_watchdog.standalone import report
from slurm_watchdog.standalone.run import ended, free_port, own_config, watched

log = logging.getLogger(__name__)

POLL_S = 2.0
AGENTS_RETRY_S = 10.0  # Between two tries to start agents in a job: a step that is refused is refused for some time.
AGENTS_SETTINGS = "agents.json"
STEP_ENDS_S = 10.0  # For srun to end its agents.
GIVE_UP_AFTER_S = 600.0
"""For agents without their controller: it may have been killed, and srun with it, without a word to them."""
FINAL_WAIT_S = 10.0  # After the end of the job: its last lines are read, an action that waited for its end continues.


class SingleJob(CommandLineSlurm):
    """What Slurm says of one job only, and of all nodes: it may be moved to any."""

    job_id = ""

    async def read_view(self) -> SlurmView:
        view = await super().read_view()
        return msgspec.structs.replace(view, jobs=tuple(job for job in view.jobs if job.job_id == self.job_id))


@dataclass(frozen=True)
class AttachRequest:
    """What the person asked for."""

    job_id: str
    directory: Path  # Seen by all nodes of the job: below the home directory, as a rule.
    act: bool
    listen: str  # HOST:PORT that the nodes reach; empty: this machine's address on the way to them, and a free port.
    config_file: str | None
    page_listen: str
    kill_switch: str = ""
    """Path template of what the trainer looks for; empty: the configuration file's, or a default one that the
    job does not know."""


def run(wanted: AttachRequest) -> int:
    """Watches until the job is over. Returns 0, or 1 if it is not there (any more). Raises OSError, ConfigError,
    JournalError; IdentityError without MUNGE."""
    wanted.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return asyncio.run(_run(wanted))


async def _run(wanted: AttachRequest) -> int:
    slurm = SingleJob()
    slurm.job_id = wanted.job_id
    view = await slurm.read_view()
    job = view.jobs[0] if view.jobs else None
    if job is None or job.state not in ALIVE:
        found = "not known to Slurm" if job is None else job.state
        log.error("job %s is %s: there is nothing to watch", wanted.job_id, found)
        return 1
    config = _configuration(wanted, wanted.listen or f"{_address_towards(view.nodes)}:{free_port()}")
    what = f"job {job.job_id} ({one_line(job.name, 60)})"
    agents, asked, identity = Agents(wanted, job), asyncio.Event(), await open_identity(config)
    async with watched(Caller.ATTACH, what, config, slurm, identity, agents.result) as (controller, started):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, asked.set)
        report.print_lines(report.greeting(started, config))
        try:
            await agents.follow(slurm, controller, asked)
        finally:
            await agents.stop()
    return 0


def _configuration(wanted: AttachRequest, listen: str) -> Config:
    """The person's file with what has a place put into the directory; what agents need of it is written down there."""
    base = load_config(wanted.config_file) if wanted.config_file else Config()
    # Where Slurm's munged listens (AuthInfo=socket= of slurm.conf).
    words = read_slurm_config("")[0].get("AuthInfo", "").split(",")
    munged = next((word.removeprefix("socket=") for word in words if word.startswith("socket=")), "")
    directory, own_uid = wanted.directory, str(os.geteuid())
    jobs: dict[str, Any] = {"kill_switch": str(directory / "kill-{job_id}.{restarts}")}
    if wanted.kill_switch or base.jobs.kill_switch != Config().jobs.kill_switch:
        template = wanted.kill_switch or base.jobs.kill_switch
        # Who attaches names the place himself, and writes there with no right but his own.
        place = os.path.dirname(template.partition("{")[0])
        named = (place,) if problem_of_prefix(place, hidden=True) is None else ()
        prefixes = (str(directory), *base.jobs.kill_switch_prefixes, *named)
        jobs |= {"kill_switch": template, "kill_switch_prefixes": prefixes}
    config = own_config(
        base, directory, act=wanted.act, page_listen=wanted.page_listen, jobs=jobs,
        controller_urls=(f"http://{listen}",),
        agent={"node_name": "auto", "give_up_after": GIVE_UP_AFTER_S},
        controller={"listen": listen},
        security={
            "mode": "munge", "controller_user": own_uid, "agent_user": own_uid,
            "munge_socket": base.security.munge_socket or munged,
        },
    )  # fmt: skip
    (directory / AGENTS_SETTINGS).write_bytes(msgspec.json.encode(settings_of(config)))
    return config


def _address_towards(nodes: Sequence[SlurmNode]) -> str:
    """The address of this machine from which packets to the nodes go out; nothing is sent to find out."""
    for node in nodes:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((node.address, 9))
            return str(probe.getsockname()[0])
    return socket.gethostname()


class Agents:
    """The step that holds them: one agent a node, for one run of the job at a time."""

    def __init__(self, wanted: AttachRequest, job: SlurmJob):
        self._wanted, self._first, self._newest = wanted, job, job
        self._how = ""
        self._step: asyncio.subprocess.Process | None = None
        self._run: tuple[int, float | None] | None = None
        self._tried_at = float("-inf")

    def result(self) -> tuple[str, int]:
        """How the job has ended, for a sentence with it as its subject, and its restarts meanwhile."""
        how = self._how or f"is no longer watched (it is {self._newest.state})"
        return how, self._newest.restarts - self._first.restarts

    async def follow(self, slurm: CommandLineSlurm, controller: Controller, asked: asyncio.Event) -> None:
        """Keeps agents on the nodes of every run of the job, until a signal has asked for the end, or the job has
        ended for good."""
        over_since: float | None = None
        while not asked.is_set():
            with contextlib.suppress(TimeoutError):
                await wait_for(asked.wait(), POLL_S)
            try:
                job = await slurm.read_job(self._first.job_id)
            except SlurmUnavailable:
                continue
            self._newest = job or self._newest
            if job is not None and job.state in ALIVE:
                over_since = None
                await self._keep(job if job.state in RUNNING else None)
                continue
            over_since = over_since or clock.monotonic()
            if clock.monotonic() - over_since > FINAL_WAIT_S and not controller.actions.acting():
                self._how = "is no longer known to Slurm" if job is None else f"is {job.state}"
                log.warning("job %s %s: it is not watched any more", self._first.job_id, self._how)
                return

    async def _keep(self, job: SlurmJob | None) -> None:
        """Starts agents in this run of the job; None: it does not run, and remaining agents are ended."""
        run = None if job is None else (job.restarts, job.start_at)
        lives = self._step is not None and self._step.returncode is None
        if lives and run != self._run:
            await self.stop()
            lives = False
        now = clock.monotonic()
        if job is None or lives or now - self._tried_at < AGENTS_RETRY_S:
            return
        self._tried_at, self._run = now, run
        log.warning("agents are started on %s of job %s", plural(len(job.nodes), "node"), job.job_id)
        with (self._wanted.directory / "agents.log").open("ab") as lines:
            self._step = await asyncio.create_subprocess_exec(
                *command(job, self._wanted.directory), stdin=asyncio.subprocess.DEVNULL, stdout=lines, stderr=lines,
                start_new_session=True, cwd="/", preexec_fn=die_with_parent,
            )  # fmt: skip

    async def stop(self) -> None:
        """SIGTERM to srun, which hands it on; SIGKILL after a while."""
        if self._step is not None and self._step.returncode is None:
            await ended(self._step, STEP_ENDS_S)


def command(job: SlurmJob, directory: Path) -> list[str]:
    """The step that starts an agent on every node: beside the training, without any share of it (`--mem=0`: of its
    memory), and without variables by which it would be taken for a rank."""
    nodes = str(len(job.nodes))
    unset = [f"--unset={name}" for name in {*RANK_VARIABLES, *LOCAL_RANK_VARIABLES, *WORLD_SIZE_VARIABLES}]
    return [
        "srun", "--overlap", f"--jobid={job.process_id}", f"--nodes={nodes}", f"--ntasks={nodes}",
        "--ntasks-per-node=1", "--mem=0",
        "--mpi=none", "--cpu-bind=none", "--kill-on-bad-exit=0", "--job-name=slurm-watchdog",
        "env", *unset, "sh", "-c", 'exec "$@" 3< "$0"', str(directory / AGENTS_SETTINGS),
        *run_module("slurm_watchdog.agent"), "3",
    ]  # fmt: skip
