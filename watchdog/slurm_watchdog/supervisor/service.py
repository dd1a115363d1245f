"""The supervisor of a batch script's command: over its connection to the node's agent it sends its status and gets
orders; the kill switch is a file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_watchdog.base import clock
from slurm_watchdog.base.process_setup import set_name
from slurm_watchdog.model.supervisor import AGENT_SOCKET, WRITE_EVERY_S, FromAgent, SupervisorStatus
from slurm_watchdog.slurm.node_names import fold_nodes
from slurm_watchdog.supervisor import machine
from slurm_watchdog.supervisor.agent_link import AgentLink
from slurm_watchdog.supervisor.allocation import Allocation, node_count
from slurm_watchdog.supervisor.endings import MARK
from slurm_watchdog.supervisor.engine import Supervisor
from slurm_watchdog.supervisor.launcher import RESUME_FROM, Launcher
from slurm_watchdog.supervisor.parent import ENDING_SIGNALS, SIGNALS, SharedPid, in_child, say
from slurm_watchdog.supervisor.placement import least_nodes
from slurm_watchdog.supervisor.state import Run, Settings, status_of

NAME = "slurm-watchdog"
"""Of this process: it is in the batch step as the ranks may be, and no rank (knowledge.launchers.NEVER_A_RANK)."""
END_S = 1.0  # At the end, for what is still to be written.
NO_AGENT_S = 60.0
"""Without a connection after so long no one is thought to watch: a dozen of the agent's ticks of 5 s. A judgement."""
ERROR_OF_OURS = 70  # sysexits.h: EX_SOFTWARE
SAME_SIGNAL_S = 1.0  # What Slurm sends to all processes of a batch script comes to us twice: once through our parent.
NO_AGENT = (
    "no agent has been seen on this node: only a command that fails is started again; `slurm-watchdog run --alone` "
    "watches for hangs itself"
)


class Voice:
    """Says lines, and is never held up by them: what the child has no room for is lost."""

    def __init__(self) -> None:
        """A machine on which no child can be started has none of these lines."""
        self.child: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self.child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=2, start_new_session=True, bufsize=0)
            os.set_blocking(self.child.stdin.fileno(), False)  # type: ignore[union-attr]

    def say(self, text: str) -> None:
        """One line, begun with our name."""
        if self.child is not None and self.child.stdin is not None:
            with contextlib.suppress(OSError):
                self.child.stdin.write(f"slurm-watchdog: {' '.join(text.split())}\n".encode())

    def close(self) -> None:
        """Waits for the last line, if its file answers."""
        if self.child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.communicate(timeout=END_S)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the person asked for."""

    command: tuple[str, ...]
    nodes: int | None = None  # Of a start; None: all of the allocation but the spares.
    spares: int = 0
    max_restarts: int = 3
    check: str = ""  # The site's command on each node before a start.
    checkpoints: tuple[str, ...] = ()

    def settings(self, allocation: Allocation, *, patient: bool = False, in_slurm: bool = True) -> Settings:
        """Raises ValueError with a sentence."""
        count = 1 if patient else node_count(self.nodes, self.spares, allocation)
        return Settings(
            allocation=allocation, count=count, least=least_nodes(self.command, count), patient=patient,
            max_restarts=self.max_restarts, in_slurm=in_slurm,
        )  # fmt: skip


def supervise(wanted: Wanted, allocation: Allocation, environ: Mapping[str, str]) -> int:
    """Runs the command until it has ended for good; returns its exit code. Raises ValueError, OSError, NoSpare."""
    set_name(NAME)
    settings = wanted.settings(allocation)
    launcher = Launcher(wanted.command, allocation, environ, check=wanted.check, checkpoints=wanted.checkpoints)
    own_pid = os.getpid()

    def run(command: SharedPid) -> int:
        launcher.running = command
        return asyncio.run(_run(JobSupervisor(settings, launcher)))

    try:
        return in_child(run)
    finally:
        if os.getpid() == own_pid:  # a command that outlives its supervisor calls our srun still
            launcher.close()


async def _run(job: JobSupervisor) -> int:
    try:
        code = await job.follow()
        job.launcher.running.value = 0  # no one waits for what is left behind of it
        return code
    except Exception:
        if job.launcher.running.value:  # asyncio would kill it: our error costs the supervision, and not the training
            say(traceback.format_exc())
            os._exit(ERROR_OF_OURS)
        raise


class JobSupervisor:
    """In a batch script: orders come from the node's agent."""

    def __init__(self, settings: Settings, launcher: Launcher):
        self.launcher, self.voice = launcher, Voice()
        self.supervisor = Supervisor(settings, launcher, self.voice.say, self.changed)
        self.link = AgentLink(AGENT_SOCKET, settings.allocation.restarts, self.hear)
        if self.voice.child is not None:
            launcher.helpers.add(self.voice.child.pid)
        self._signalled_at = dict[int, float]()
        self._said: SupervisorStatus | None = None
        self._said_at = 0.0
        self._starts = 0

    async def follow(self) -> int:
        """Until the command is over; its exit code."""
        loop, supervisor = asyncio.get_running_loop(), self.supervisor
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        beside = [asyncio.create_task(self.link.keep()), asyncio.create_task(self.miss_agent())]
        await supervisor.begin()
        self.changed(supervisor.run)
        await supervisor.follow()
        supervisor.cancel()
        for task in beside:
            task.cancel()
        self.voice.close()
        return supervisor.run.exit_code

    async def miss_agent(self, after_s: float = NO_AGENT_S) -> None:
        """Says once that no one watches."""
        await asyncio.sleep(after_s)
        if not self.link.was_connected:
            self.voice.say(NO_AGENT)

    def _signalled(self, number: int) -> None:
        now, before = clock.monotonic(), self._signalled_at.get(number)
        if before is None or now - before >= SAME_SIGNAL_S:
            self._signalled_at[number] = now
            self.supervisor.tell(machine.event(machine.asked, number, number in ENDING_SIGNALS))

    def hear(self, said: FromAgent) -> None:
        """What the agent says."""
        run = self.supervisor.run
        if said.beside is not None and said.beside != run.beside:
            self.supervisor.tell(machine.event(machine.beside, said.beside))
        if said.order is not None and said.order.decision not in run.seen:
            self.supervisor.tell(machine.event(machine.ordered, said.order, said.given_at))

    def changed(self, run: Run) -> None:
        """Says to the agent what is so, and to people that the command is started."""
        status, now = status_of(run, os.getpid()), clock.monotonic()
        if status != self._said or now - self._said_at >= WRITE_EVERY_S:
            self.link.say(status)
            self._said, self._said_at = status, now
        if run.starts != self._starts:
            self._starts, nodes = run.starts, run.placement
            spares = f", {fold_nodes(nodes.spares)} to spare" if nodes.spares else ""
            more = f", with {RESUME_FROM}={run.resume_from}" if run.resume_from else ""
            self.voice.say(f"{MARK.partition(': ')[2]}{run.starts} on {fold_nodes(nodes.nodes)}{spares}{more}")
