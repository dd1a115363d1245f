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
from pathlib import Path

from slurm_watchdog.base import clock
from slurm_watchdog.base.process_setup import set_name
from slurm_watchdog.model.kill_switch import KILL_SWITCH_BASE, parse_line
from slurm_watchdog.model.supervisor import AGENT_SOCKET, WRITE_EVERY_S, FromAgent, SupervisorStatus, run_directory
from slurm_watchdog.slurm.node_names import fold_nodes
from slurm_watchdog.supervisor import machine
from slurm_watchdog.supervisor.agent_link import AgentLink
from slurm_watchdog.supervisor.allocation import Allocation, node_count
from slurm_watchdog.supervisor.endings import MARK, TAIL_BYTES
from slurm_watchdog.supervisor.engine import Supervisor
from slurm_watchdog.supervisor.launcher import RESUME_FROM, Launcher
from slurm_watchdog.supervisor.lost_nodes import FILE_S, least_nodes, log_files
from slurm_watchdog.supervisor.parent import ENDING_SIGNALS, SIGNALS, SharedPid, in_child, say
from slurm_watchdog.supervisor.placement import Placement
from slurm_watchdog.supervisor.state import Phase, Settings, status_of

END_S = 1.0  # At the end, for what is still to be written.


class Voice:
    """Says lines, and is never held up by them: what the child has no room for is lost."""

    def __init__(self) -> None:
        """A machine on which no child can be started has none of these lines."""
        self.child: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self.child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        self._into = self.child.stdin if self.child is not None else None
        if self._into is not None:
            os.set_blocking(self._into.fileno(), False)

    def say(self, text: str) -> None:
        """One line, begun with our name."""
        with contextlib.suppress(OSError):
            if self._into is not None:
                os.write(self._into.fileno(), f"slurm-watchdog: {' '.join(text.split())}\n".encode())

    def close(self) -> None:
        """Waits for the last line, if its file answers."""
        if self.child is not None and self._into is not None:
            self._into.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(END_S)


NAME = "slurm-watchdog"
"""Of this process: it is in the batch step as the ranks may be, and no rank (knowledge.launchers.NEVER_A_RANK)."""
NO_AGENT_S = 60.0
"""Without a connection after so long no one is thought to watch: a dozen of the agent's ticks of 5 s. A judgement."""
ERROR_OF_OURS = 70  # sysexits.h: EX_SOFTWARE
SAME_SIGNAL_S = 1.0  # What Slurm sends to all processes of a batch script comes to us twice: once through our parent.


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the person asked for."""

    command: tuple[str, ...]
    nodes: int | None = None  # Of a start; None: all of the allocation but the spares.
    spares: int = 0
    max_restarts: int = 3
    check: str = ""  # The site's command on each node before a start.
    checkpoints: tuple[str, ...] = ()


NO_AGENT = (
    "no agent has been seen on this node: only a command that fails is started again; `slurm-watchdog run --alone` "
    "watches for hangs itself"
)


def supervise(wanted: Wanted, allocation: Allocation, environ: Mapping[str, str]) -> int:
    """Runs the command until it has ended for good; returns its exit code. Raises ValueError, OSError, NoSpare."""
    set_name(NAME)
    count = node_count(wanted.nodes, wanted.spares, allocation)
    least = least_nodes(wanted.command, count)
    settings = Settings(allocation=allocation, count=count, least=least, max_restarts=wanted.max_restarts)
    launcher = Launcher(wanted.command, allocation, environ, check=wanted.check, checkpoints=wanted.checkpoints)
    own_pid = os.getpid()
    try:
        return in_child(lambda command: asyncio.run(_run(settings, launcher, environ, command)))
    finally:
        if os.getpid() == own_pid:  # a command that outlives its supervisor calls our srun still
            launcher.close()


async def _run(settings: Settings, launcher: Launcher, environ: Mapping[str, str], command: SharedPid) -> int:
    try:
        code = await JobSupervisor(settings, launcher, environ, command).run()
        command.value = 0  # no one waits for what is left behind of it
        return code
    except Exception:
        if command.value:  # asyncio would kill it: our error costs the supervision, and not the training
            say(traceback.format_exc())
            os._exit(ERROR_OF_OURS)
        raise


class JobSupervisor(Supervisor):
    """In a batch script: orders come from the node's agent."""

    def __init__(self, settings: Settings, launcher: Launcher, environ: Mapping[str, str], command: SharedPid):
        heartbeat = environ.get("SLURM_WATCHDOG_HEARTBEAT", "")
        super().__init__(settings, launcher, [*log_files(), *([heartbeat] if heartbeat else [])])
        directory = run_directory(settings.allocation.job_id, settings.allocation.restarts)
        self._switch = environ.get("SLURM_WATCHDOG_KILL_SWITCH") or f"{directory}/kill"
        self.link = AgentLink(AGENT_SOCKET, settings.allocation.restarts, self._hear)
        self._voice, self._command = Voice(), command
        if self._voice.child is not None:
            launcher.helpers.add(self._voice.child.pid)
        self._signalled_at = dict[int, float]()
        self._said: SupervisorStatus | None = None
        self._said_at = 0.0
        self._missed_at: float | None = clock.monotonic() + NO_AGENT_S
        """When an agent is missing; None: one has been seen, or was said to be missing."""

    async def run(self) -> int:
        """Until the command is over."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self._spawn(self.link.keep())
        await self._prepare()
        self._changed()
        while self._run.phase is not Phase.OVER:
            await self._handle(await self._next())
        for task in self._tasks:
            task.cancel()
        self._voice.close()
        return self._run.exit_code

    def _signalled(self, number: int) -> None:
        now, before = clock.monotonic(), self._signalled_at.get(number)
        if before is None or now - before >= SAME_SIGNAL_S:
            self._signalled_at[number] = now
            self._tell(machine.event(machine.asked, number, number in ENDING_SIGNALS))

    def _poll(self) -> None:
        if self._missed_at is not None and (self.link.was_connected or clock.monotonic() >= self._missed_at):
            if not self.link.was_connected:
                self._say(NO_AGENT)
            self._missed_at = None
        super()._poll()

    def _hear(self, said: FromAgent) -> None:
        if said.beside is not None and said.beside != self._run.beside:
            self._tell(machine.event(machine.beside, said.beside))
        if said.order is not None and said.order.decision not in self._run.seen:
            self._tell(machine.event(machine.ordered, said.order, said.given_at))

    def _changed(self) -> None:
        status, now = status_of(self._run, os.getpid()), clock.monotonic()
        if status != self._said or now - self._said_at >= WRITE_EVERY_S:
            self.link.say(status)
            self._said, self._said_at = status, now

    def _say(self, text: str) -> None:
        self._voice.say(text)

    async def _begin(self, placement: Placement, in_batch: bool, resume_from: str) -> None:
        spares = f", {fold_nodes(placement.spares)} to spare" if placement.spares else ""
        more = f", with {RESUME_FROM}={resume_from}" if resume_from else ""
        self._say(f"{MARK.partition(': ')[2]}{self._run.starts} on {fold_nodes(placement.nodes)}{spares}{more}")
        if self._run.order is not None and await self._is_switched():  # by which the start would end at once
            await self.launcher.ask.run("rm", "-f", "--", self._switch, deadline_s=FILE_S)
        await super()._begin(placement, in_batch, resume_from)

    def _begun(self, pid: int) -> None:
        self._command.value = pid

    async def _gone(self, process: asyncio.subprocess.Process, by_itself: bool) -> None:
        if self._command.value == process.pid:
            self._command.value = 0

    async def _is_switched(self) -> bool:
        """Whether the kill switch is there, and ours. The agent's own file is read at once, on a machine under load,
        too: a command that has left by it would be taken for one that has ended well. Elsewhere it may lie on any
        filesystem."""
        if self._switch.startswith(f"{KILL_SWITCH_BASE}/"):
            return is_our_switch(self._switch)
        answer = await self.launcher.ask.run("head", "-c", "4096", "--", self._switch, deadline_s=FILE_S)
        return answer.code == 0 and parse_line(answer.output) is not None

    async def _tail(self) -> str:
        """Where our standard error is a file."""
        argv = ("tail", "-c", str(TAIL_BYTES), "--", *(path := log_files((2,))))
        return (await self.launcher.ask.run(*argv, deadline_s=FILE_S)).output if path else ""


def is_our_switch(path: str) -> bool:
    """Whether a kill switch of ours lies there, in memory."""
    try:
        return parse_line(Path(path).read_text(errors="replace")) is not None
    except OSError:
        return False
