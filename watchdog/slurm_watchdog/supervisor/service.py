"""The supervisor of a batch script's command: over its connection to the node's agent it sends its status and gets
orders; the kill switch is a file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.process_setup import set_name
from slurm_watchdog.model.supervisor import (
    AGENT_SOCKET,
    MAX_LINE_BYTES,
    WRITE_EVERY_S,
    FromAgent,
    FromSupervisor,
    RestartOrder,
    SupervisorStatus,
    from_agent,
)
from slurm_watchdog.slurm.node_names import fold_nodes
from slurm_watchdog.supervisor import machine
from slurm_watchdog.supervisor.endings import MARK
from slurm_watchdog.supervisor.engine import Supervisor
from slurm_watchdog.supervisor.launcher import RESUME_FROM, Launcher
from slurm_watchdog.supervisor.parent import ENDING_SIGNALS, SIGNALS, SharedPid, in_child, say
from slurm_watchdog.supervisor.placement import Allocation, least_nodes, node_count
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


FIRST_PAUSE_S, MOST_PAUSE_S = 0.2, 5.0  # Before it is connected to again: twice as long each time.


class AgentLink:
    """One supervisor's; all of it belongs to one event loop."""

    def __init__(self, path: str, restarts: int, hear: Callable[[FromAgent], None], most_pause_s: float = MOST_PAUSE_S):
        """`restarts`: the run of the job. `hear` gets each line of the agent, but no order that was withdrawn."""
        self._path, self._restarts, self._hear = path, restarts, hear
        self._writer: asyncio.StreamWriter | None = None
        self._line, self._most_pause_s = b"", most_pause_s
        self.was_connected = False

    def say(self, status: SupervisorStatus) -> None:
        """Sends it, now or with the next connection. While the agent does not read, what was said before is enough: the
        next line says everything."""
        said = FromSupervisor(restarts=self._restarts, status=status)
        self._line = msgspec.json.encode(said)
        if len(self._line) >= MAX_LINE_BYTES:
            self._line = msgspec.json.encode(replace(said, status=replace(status, nodes=(), spares=(), avoided=())))
        self._send()

    def _send(self) -> None:
        if self._line and self._writer is not None and not self._writer.transport.get_write_buffer_size():
            self._writer.write(self._line + b"\n")

    async def keep(self) -> None:
        """Keeps the connection, until it is cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            began = clock.monotonic()
            with contextlib.suppress(OSError):
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                self.was_connected = True
                try:
                    self._send()
                    await self._read(reader)
                finally:
                    self._writer.close()
                    self._writer = None
            most_s = self._most_pause_s
            pause_s = FIRST_PAUSE_S if clock.monotonic() - began > most_s else min(most_s, 2 * pause_s)
            await asyncio.sleep(pause_s)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Until the agent ends the connection. An order that comes together with its withdrawal, for this process was
        stopped, is none."""
        rest = b""
        while data := await reader.read(MAX_LINE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            said = []
            for line in lines:
                with contextlib.suppress(ValueError):
                    said.append(from_agent(line))
            withdrawn = {each.withdrawn for each in said}
            for each in said:
                if each.order is None or each.order.decision not in withdrawn:
                    self._hear(each)
            if len(rest) > MAX_LINE_BYTES:
                return


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
            self.supervisor.tell(partial(self._ordered, said.order, said.given_at))

    def _ordered(self, order: RestartOrder, given_at: float, run: Run, now: float, wall: float) -> machine.Next:
        """Its command may have ended since the order came."""
        return machine.ordered(run, now, wall, order, given_at, has_finished=self.launcher.has_finished)

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
