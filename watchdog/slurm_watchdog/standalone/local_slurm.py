"""One command as a Slurm of one job on one node: what the controller asks of Slurm is answered, in Slurm's words, by
the process that supervises the command. So everything above (incidents, ladder, journal, guards) is as on a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pwd
import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import NoReturn

from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.knowledge.launchers import HEARTBEAT_VARIABLE
from slurm_watchdog.model.slurm import Reservation, SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.model.slurm_states import OVER
from slurm_watchdog.slurm.client import Refusal, SignalTo, SlurmRefused
from slurm_watchdog.standalone.terminal import Terminal
from slurm_watchdog.supervisor import machine
from slurm_watchdog.supervisor.endings import TAIL_BYTES, code_words
from slurm_watchdog.supervisor.engine import QUICK_POLL_S, Supervisor
from slurm_watchdog.supervisor.launcher import Launcher, Streams, send
from slurm_watchdog.supervisor.placement import Allocation, Placement
from slurm_watchdog.supervisor.state import Phase, Run, Settings

log = logging.getLogger(__name__)

ONE_RANK = {"SLURM_WATCHDOG_RANK": "0", "SLURM_WATCHDOG_LOCAL_RANK": "0", "SLURM_WATCHDOG_WORLD_SIZE": "1"}
"""For a program that is alone; one that Slurm starts on several nodes has ranks of its own."""


class LocalLauncher(Launcher):
    """Its lines go to files, and its environment names a kill switch of its own at each start."""

    def __init__(
        self, command: Sequence[str], allocation: Allocation, environ: Mapping[str, str], *, output: Path,
        errors: Path, kill_switch: str, check: str = "", checkpoints: Sequence[str] = (),
    ):  # fmt: skip
        """`output`, `errors`: files that its lines are appended to. `kill_switch`: path template with {job_id} and
        {restarts}. On one node it has no step of Slurm's."""
        has_steps = len(allocation.nodes) > 1
        super().__init__(command, allocation, environ, check=check, checkpoints=checkpoints, has_steps=has_steps)
        self.command, self.output, self.errors = tuple(command), output, errors
        self.terminal = Terminal()  # Takes the place of its input and of these files, as far as ours are a terminal.
        self._kill_switch, self._job_id, self.errors_at = kill_switch, allocation.job_id, 0

    async def environment(self, placement: Placement, starts: int) -> dict[str, str]:
        path = Path(self._kill_switch.replace("{job_id}", self._job_id).replace("{restarts}", str(starts)))
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        own = {"SLURM_WATCHDOG_JOB_ID": self._job_id, "SLURM_WATCHDOG_KILL_SWITCH": str(path)}
        run = f"{self._job_id}.{starts}"
        if path.parent.name in (run, f"kill-{run}"):  # a directory of this start, which holds no other heartbeat
            own[HEARTBEAT_VARIABLE] = f"{path.parent}/heartbeat"
        return await super().environment(placement, starts) | ({} if self.has_steps else ONE_RANK) | own

    @contextlib.contextmanager
    def streams(self, starts: int) -> Iterator[Streams]:
        with contextlib.suppress(FileNotFoundError):
            self.errors_at = self.errors.stat().st_size
        with contextlib.ExitStack() as opened:
            given = [self.input.of_start(starts)]
            given += [opened.enter_context(each.open("ab")).fileno() for each in (self.output, self.errors)]
            terminal = self.terminal
            if not terminal.fds:
                yield given[0], given[1], given[2], None
                return
            slave = terminal.begin(given[1] if 1 in terminal.fds else given[2] if 2 in terminal.fds else 0)
            opened.callback(os.close, slave)
            for fd in terminal.fds:
                given[fd] = slave
            yield given[0], given[1], given[2], lambda: terminal.in_child(slave)

    def ended(self, process: asyncio.subprocess.Process, *, expected: bool) -> None:
        """A process that a signal ends has no last words: a line like a shell's, below its own."""
        super().ended(process, expected=expected)
        self.terminal.drain()
        number = -(process.returncode or 0)
        if number > 0 and not expected:
            words = signal.strsignal(number) or f"Signal {number}"
            with contextlib.suppress(OSError), self.errors.open("a") as lines:
                lines.write(f"slurm-watchdog run: line 1: {process.pid} {words:<22} {shlex.join(self.command)}\n")

    async def is_switched(self) -> bool:
        """No order follows: our own controller starts it again."""
        return False

    async def tail(self) -> str:
        with contextlib.suppress(OSError), self.errors.open("rb") as lines:
            lines.seek(max(self.errors_at, lines.seek(0, os.SEEK_END) - TAIL_BYTES))
            return lines.read(TAIL_BYTES).decode(errors="replace")
        return ""

    async def forward(self, number: int, steps: Sequence[str]) -> None:
        if number != signal.SIGINT:
            await super().forward(number, steps)
        elif self.has_steps and steps:
            await self.signal_steps("INT", steps)
        else:
            self.signal_foreground(number)

    def signal_foreground(self, number: int) -> None:
        """As a key of a terminal does: to the command's process group, or to that which has its terminal."""
        if not self.processes():
            return  # in the pause before a start the number may be another's
        if pid := self.terminal.group() or self.pid:
            with contextlib.suppress(OSError):
                os.killpg(pid, number)


class LocalSlurm:
    """The command, and what the controller may ask of Slurm about it."""

    def __init__(self, settings: Settings, launcher: LocalLauncher, node: str):
        """`node`: what this machine is called."""
        self.launcher, self.job_id, self.node = launcher, settings.allocation.job_id, node
        self.supervisor = Supervisor(settings, launcher, lambda text: log.warning("%s", text), self._changed)
        self.start_at: float | None = None
        self.over = asyncio.Event()  # Set while the job has ended and will not be restarted.
        self._starts = self.interrupts = 0
        self._follows: asyncio.Task[None] | None = None
        self._user = f"uid {os.getuid()}"  # of a container that has no names
        with contextlib.suppress(KeyError):
            self._user = pwd.getpwuid(os.getuid()).pw_name

    @property
    def _run(self) -> Run:
        return self.supervisor.run

    # ------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Starts the command, and follows it from then on. Raises OSError if it cannot be started at all."""
        await self.supervisor.begin()
        while self.launcher.pid is None and self._run.phase is not Phase.OVER:
            await self.supervisor.next()
        if self.launcher.pid is None:
            raise OSError(self._run.words)
        self._follows = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            await self.supervisor.next()

    async def close(self) -> None:
        """Nothing that the command has started outlives it: SIGTERM to all, SIGKILL after a while."""
        self.supervisor.cancel()
        if self._follows is not None:
            self._follows.cancel()
        end, name = clock.monotonic() + self._run.settings.kill_wait_s, "TERM"
        while self.launcher.processes():
            if name:
                self.launcher.signal_tree(name)
            name = "KILL" if clock.monotonic() >= end else ""
            await asyncio.sleep(QUICK_POLL_S)
            self.launcher.reap()
        self.launcher.terminal.close()
        self.launcher.close()

    def _changed(self, run: Run) -> None:
        if run.starts != self._starts:
            self._starts, self.start_at = run.starts, clock.wall()
        if run.phase is Phase.OVER:
            self.over.set()
        else:
            self.over.clear()

    def is_interrupted(self) -> bool:
        """Whether Ctrl-C came not long ago: an end of the command is the answer to that."""
        return machine.is_interrupted(self._run, clock.monotonic())

    def ask(self, number: int, *, ends: bool) -> None:
        """A signal came, which asks for the end or does not."""
        self.interrupts += number == signal.SIGINT
        self.supervisor.tell(machine.event(machine.asked, number, ends))

    # ------------------------------------------------------------------------------------ questions

    @property
    def state(self) -> str:
        """Slurm's word for what the command is at."""
        run = self._run
        if run.phase is Phase.OVER and (run.cancelled or run.asked_at is not None):
            return "CANCELLED"
        if run.phase is Phase.OVER and run.exit_code == 0:
            return "COMPLETED"
        if run.phase is Phase.RUNNING:
            return "RUNNING"
        if run.requeued and run.phase is not Phase.OVER:
            return "PENDING" if run.looked and run.phase is Phase.LOOKING else "COMPLETING"
        return "FAILED" if run.starts else "PENDING"

    @property
    def restarts(self) -> int:
        return max(0, self._run.starts - 1) + self._run.requeued

    @property
    def exit_code(self) -> int:
        return self._run.exit_code

    def result(self) -> tuple[str, int]:
        """How it ended, for a sentence with the command as its subject, and its restarts."""
        if self._run.told == signal.SIGINT and self._run.cancelled:
            return f"was interrupted by you and ended with exit code {self.exit_code}", self.restarts
        return f"ended with {code_words(self.exit_code)}", self.restarts

    def _job(self) -> SlurmJob:
        state = self.state
        return SlurmJob(
            job_id=self.job_id,
            state="REQUEUE_HOLD" if state == "PENDING" and self._run.held else state,
            name=os.path.basename(self.launcher.command[0]),
            user=self._user,
            uid=os.getuid(),
            nodes=(self.node,),
            batch_host=self.node,
            restarts=self.restarts,
            start_at=self.start_at,
            requeueable=True,
            counted_at_once=True,
            starts_again=self._run.failed if state == "FAILED" and self._run.phase is not Phase.OVER else "",
            ended_with=code_words(self.exit_code) if state in OVER else "",
            held=self._run.held,
            stdout=str(self.launcher.output),
            stderr=str(self.launcher.errors),
            workdir=os.getcwd(),
            node_count=1,
        )

    def notes(self) -> tuple[str, ...]:
        """Nothing: there is no Slurm."""
        return ()

    async def read_view(self) -> SlurmView:
        node = SlurmNode(name=self.node, address="127.0.0.1", state="ALLOCATED")
        return SlurmView(jobs=(self._job(),), nodes=(node,))

    async def read_job(self, job_id: str) -> SlurmJob | None:
        return self._job() if job_id == self.job_id else None

    async def read_node(self, node: str) -> SlurmNode | None:
        return (await self.read_view()).nodes[0] if node == self.node else None

    async def read_reservations(self) -> tuple[Reservation, ...]:
        return ()

    # ------------------------------------------------------------------------------------ levers

    async def requeue_hold(self, job_id: str, *, only_unfinished: bool) -> None:
        if machine.late(self._run, clock.wall()):
            await self.supervisor.read_end()
        run = self._run
        if run.requeued and run.phase is not Phase.ENDING:
            return
        if late := machine.late(run, clock.wall()):
            raise SlurmRefused(f"it is {late}", Refusal.FINISHED)
        if only_unfinished and (self.state in OVER or self.launcher.has_finished):
            raise SlurmRefused("the command has ended", Refusal.FINISHED)
        if run.phase is Phase.ENDING or run.asked_at is not None:
            raise SlurmRefused("the command is being ended", Refusal.NOT_NOW)
        named = self.supervisor.good(run.resume_from) if run.phase is Phase.RUNNING else run.resume_from
        if run.phase is Phase.OVER:
            self.supervisor.run = replace(run, phase=Phase.PAUSING)
        await self.supervisor.handle(machine.event(machine.requeued, named))

    async def release(self, job_id: str) -> None:
        await self.supervisor.handle(machine.released)  # who asks looks at once whether it is held still

    async def cancel(self, job_id: str) -> None:
        self.ask(signal.SIGTERM, ends=True)

    async def send_signal(self, job_id: str, signal: str, to: SignalTo) -> None:
        if self._run.phase is not Phase.RUNNING:
            raise SlurmRefused("the command does not run", Refusal.NOT_RUNNING)
        processes = sorted(self.launcher.processes(), key=lambda each: each.pid != self.launcher.pid)
        chosen = {SignalTo.BATCH: processes[:1], SignalTo.STEPS: processes[1:] or processes}.get(to, processes)
        send(chosen, Signals["SIG" + signal.removeprefix("SIG")])

    async def _no_lever(self, *_: object) -> NoReturn:
        """What no machine without Slurm can do."""
        raise SlurmRefused("one command on one machine has no queue, no script and no other node", Refusal.NOT_BATCH)

    hold = read_script = submit = set_excluded_nodes = set_node_down = _no_lever
    drain_node = undrain_node = reserve_nodes = delete_reservation = _no_lever
