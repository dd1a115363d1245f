"""One command as a Slurm of one job on one node: what the controller asks of Slurm is answered, and done, by
the process that started it.

The words are Slurm's, so everything above (incidents, ladder, journal, guards) is the same as on a cluster: a
requeue counts a restart at once and ends the run, a held job starts when it is released, a job that has ended
can be requeued if that is what was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pwd
import shlex
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import psutil

from slurm_watchdog.base import clock
from slurm_watchdog.model.kill_switch import heartbeat_beside
from slurm_watchdog.model.slurm import Reservation, SlurmJob, SlurmNode, SlurmView
from slurm_watchdog.model.slurm_states import OVER, REQUEUED
from slurm_watchdog.slurm.client import Refusal, SignalTo, SlurmRefused
from slurm_watchdog.standalone.placed import PlacedCommand
from slurm_watchdog.standalone.terminal import Terminal
from slurm_watchdog.supervisor.endings import (
    INTERRUPTED,
    KILL_WAIT_S,
    RESTART_DELAY_S,
    TAIL_BYTES,
    TOLD_S,
    again_words,
    exit_code,
    not_again_words,
    restarting_words,
    stopped_by,
    told_words,
    used_up_words,
)
from slurm_watchdog.supervisor.given_input import NO_INPUT, GivenInput
from slurm_watchdog.supervisor.job_questions import JobTime
from slurm_watchdog.supervisor.launcher import FUNCTION_SHELL, RESUME_FROM, is_function, reap, receivers, send, started

log = logging.getLogger(__name__)

POLL_S = 0.2
STEP_GRACE_S = 5.0  # Between a signal to steps and that to the processes here, which would end them at once.
ONE_RANK = {"SLURM_WATCHDOG_RANK": "0", "SLURM_WATCHDOG_LOCAL_RANK": "0", "SLURM_WATCHDOG_WORLD_SIZE": "1"}
"""For a program that is alone; one that Slurm starts on several nodes has ranks of its own."""


def _own_name() -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return f"uid {os.getuid()}"  # of a container that has no names


class LocalSlurm:
    """The command and its runs. All methods belong to one event loop."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        job_id: str,
        node: str,
        output: Path,
        environ: Mapping[str, str],
        kill_switch: str,
        max_restarts: int,
        placed: PlacedCommand | None = None,
    ):
        """`output`: file that the command's lines are appended to. `kill_switch`: path template with {job_id}
        and {restarts}. `placed`: for a command on several nodes of a job of Slurm's."""
        self.command, self.job_id, self.node, self.output = tuple(command), job_id, node, output
        self.errors = output
        """File for its standard error."""
        self.terminal: Terminal | None = None
        """Takes the place of its input and of these files, as far as ours are a terminal."""
        self.state, self.held, self.restarts = "PENDING", False, 0
        self.start_at: float | None = None
        self.exit_code: int | None = None
        self.over = asyncio.Event()
        """Set while the job has ended and will not be restarted."""
        self._environ, self._kill_switch = dict(environ), kill_switch
        self._max_restarts = max_restarts
        self.kill_wait_s, self.settle_s = KILL_WAIT_S, RESTART_DELAY_S
        self._placed, self._input = placed, GivenInput()
        self.job_time: JobTime | None = None
        """Of the job of Slurm's that this is in; None: in none."""
        self._told_at: float | None = None
        """When a signal was handed to the present run; None: none was."""
        self._interrupted_at: float | None = None
        """When SIGINT was; None: it was not."""
        self.interrupts = 0
        self._lost = ""
        """A clause: nodes of the present run that Slurm has lost, for which it is ended."""
        self._errors_at = 0
        """Size of `errors` when the present run began."""
        self._last = False
        """Its last run has ended: it is not started again, though it failed."""
        self.not_ours: set[int] = placed.launcher.helpers if placed is not None else set()
        """Children of this process that are no part of the command: the agent."""
        self.last_good: Callable[[str], str] = lambda named: named
        """The checkpoint to name to the next start, given the one that was named to this; empty: none."""
        self._resume_from = ""
        self._process: asyncio.subprocess.Process | None = None
        self._work: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Starts the command in a session of its own. Raises OSError if it cannot be started at all."""
        path = Path(self._kill_switch.replace("{job_id}", self.job_id).replace("{restarts}", str(self.restarts)))
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        heartbeat = heartbeat_beside(str(path), self.job_id, self.restarts)
        own = {
            "SLURM_WATCHDOG_JOB_ID": self.job_id,
            "SLURM_WATCHDOG_RESTARTS": str(self.restarts),
            "SLURM_WATCHDOG_KILL_SWITCH": str(path),
            **({"SLURM_WATCHDOG_HEARTBEAT": heartbeat} if heartbeat else {}),
            **({RESUME_FROM: self._resume_from} if self._resume_from else {}),
        }
        if self._placed is None:
            shell = FUNCTION_SHELL if is_function(self.command[0], self._environ) else ()
            command, environ = (*shell, *self.command), self._environ | ONE_RANK
        else:
            command, environ = await self._placed.prepare(self.restarts)
        if self._input.is_lost(self.restarts):
            log.warning(NO_INPUT)
        with contextlib.suppress(FileNotFoundError):
            self._errors_at = self.errors.stat().st_size
        with self._streams() as (given, lines, errors, before):
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=given, stdout=lines, stderr=errors, env=environ | own,
                start_new_session=True, preexec_fn=before,
            )  # fmt: skip
        if self._placed is not None:
            self._placed.launcher.begun(self._process.pid)
        self.state, self.start_at, self.exit_code, self._told_at = "RUNNING", clock.wall(), None, None
        self._interrupted_at, self._lost = None, ""
        self.over.clear()
        self.spawn(self._watch(self._process, self.restarts))

    @contextlib.contextmanager
    def _streams(self) -> Iterator[tuple[int, int, int, Callable[[], None] | None]]:
        """Standard input, output and error of a start, and what its process does before it is executed."""
        with contextlib.ExitStack() as opened:
            given: list[int] = [opened.enter_context(self._input.of_start(self.restarts))]
            given += [opened.enter_context(each.open("ab")).fileno() for each in (self.output, self.errors)]
            terminal = self.terminal
            if terminal is None or not terminal.fds:
                yield given[0], given[1], given[2], None
                return
            slave = terminal.begin(given[1] if 1 in terminal.fds else given[2] if 2 in terminal.fds else 0)
            opened.callback(os.close, slave)
            for fd in terminal.fds:
                given[fd] = slave
            yield given[0], given[1], given[2], lambda: terminal.in_child(slave)

    def spawn(self, work: object) -> None:
        """Has it done beside everything else, until the command is stopped for good."""
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _watch(self, process: asyncio.subprocess.Process, run: int) -> None:
        code = await process.wait()
        if self.terminal is not None:
            self.terminal.drain()
        self.exit_code = exit_code(code)
        if self.state != "RUNNING" or self.restarts != run:
            return  # it was ended on purpose
        self._resume_from = self.last_good(self._resume_from)
        if self.is_interrupted():
            await self._end_interrupted()
            return
        if code < 0:
            self._write_signal_line(process.pid, -code)
        # It is judged before the state says FAILED: what failed is about to be started again.
        code = code or (1 if self._lost else 0)
        stopped, late = ("", "") if code == 0 else ("" if self._lost else self._stopped_by(), await self._lateness())
        if self.state != "RUNNING" or self.restarts != run:
            return  # an order came while Slurm was asked
        self._last = bool(stopped or late)
        self.state = "COMPLETED" if code == 0 else "CANCELLED" if stopped else "FAILED"
        if self._last:
            log.warning(not_again_words(self._exit_text(), stopped or f"it is {late}"))
        await self._end()  # as Slurm does: nothing that a job started outlives it
        if code == 0 or self._last or self.restarts >= self._max_restarts:
            if self.restarts == run and self.state in OVER:
                self.over.set()
            return
        log.warning(again_words(self._exit_text(), self.settle_s, run + 1, self._max_restarts))
        await asyncio.sleep(self.settle_s)
        if self.state == "FAILED" and self.restarts == run:
            self.restarts += 1
            await self._begin()

    def is_interrupted(self) -> bool:
        """Whether the present run was sent SIGINT not long ago: an end of it is the answer to that."""
        return self._interrupted_at is not None and clock.monotonic() - self._interrupted_at <= TOLD_S

    async def _end_interrupted(self) -> None:
        """Nothing is started again. A launcher that reports the interruption as an error of its own ends with 1."""
        self._last, self.state = True, "CANCELLED"
        code = self.exit_code
        await self._end()
        self.exit_code = INTERRUPTED if code == 1 else code
        self.over.set()

    def _stopped_by(self) -> str:
        """Who ended its step, where this is in a job of Slurm's: see `endings`; or that its time is nearly over."""
        if self.job_time is None:
            return ""
        if self._told_at is not None and (age_s := clock.monotonic() - self._told_at) <= TOLD_S:
            return told_words(age_s)
        try:
            with self.errors.open("rb") as lines:
                size = lines.seek(0, os.SEEK_END)
                lines.seek(max(self._errors_at, size - TAIL_BYTES))
                return stopped_by(lines.read(TAIL_BYTES).decode(errors="replace"))
        except OSError:
            return ""

    async def _lateness(self) -> str:
        """Why nothing is started any more, a part of a sentence; empty if it may be."""
        return "" if self.job_time is None else await self.job_time.lateness(clock.wall())

    def _write_signal_line(self, pid: int, number: int) -> None:
        """A process that a signal ends has no last words: a line like a shell's, below its own."""
        words = signal.strsignal(number) or f"Signal {number}"
        with contextlib.suppress(OSError), self.errors.open("a") as lines:
            lines.write(f"slurm-watchdog run: line 1: {pid} {words:<22} {shlex.join(self.command)}\n")

    def _exit_text(self) -> str:
        code = self.exit_code or 0
        return f"signal {signal.Signals(code - 128).name}" if 128 < code < 128 + signal.NSIG else f"exit code {code}"

    def how_it_ended(self) -> str:
        """For a sentence with the command as its subject."""
        if self._interrupted_at is not None and self._last:
            return f"was interrupted by you and ended with exit code {self.exit_code}"
        return "was stopped" if self.exit_code is None else f"ended with {self._exit_text()}"

    async def _begin(self) -> None:
        """Starts it once more; nothing in the last minute of the job's time, which may have begun since the order."""
        before = self.state
        late = await self._lateness()
        if self.state != before or self.held:
            return  # it was stopped or held while Slurm was asked
        if late:
            log.warning("the command is not started again: it is %s", late)
            self._last, self.state = True, "FAILED"
            self.over.set()
            return
        try:
            await self.start()
        except OSError as error:
            log.error("the command cannot be started again: %s", error)
            self.state, self.exit_code = "FAILED", 127
            self.over.set()

    def processes(self) -> list[psutil.Process]:
        """All living processes that the command has started, its own first. Orphans are included: this
        process is their subreaper."""
        main = self._process.pid if self._process else None
        reap({*self.not_ours, main})
        return sorted(filter(_lives, started(self.not_ours)), key=lambda each: each.pid != main)

    async def _end(self) -> None:
        """SIGTERM to all, SIGKILL after a while to those that are left; returns when none is.

        SIGCONT follows SIGTERM, as Slurm sends it: a stopped process gets no other signal before."""
        began, killed = clock.monotonic(), False
        await self._signal_steps("TERM")
        send(self.processes(), signal.SIGTERM, signal.SIGCONT)
        while self.processes():
            if clock.monotonic() - began > self.kill_wait_s:
                if not killed:
                    await self._signal_steps("KILL")
                send(self.processes(), signal.SIGKILL)
                if not killed:
                    log.warning("the command did not end within %.0f s of SIGTERM: SIGKILL", self.kill_wait_s)
                killed = True
            await asyncio.sleep(POLL_S)
        if self._process is not None:
            self.exit_code = exit_code(await self._process.wait())

    async def _signal_steps(self, name: str) -> None:
        """To the steps on all nodes, before what runs on this host: srun answers SIGTERM by killing them."""
        if self._placed is not None and self.processes():
            await self._placed.signal_steps(name)
            for _ in range(round(STEP_GRACE_S / POLL_S)):
                if not self.processes():
                    break
                await asyncio.sleep(POLL_S)

    def hand_on(self, number: int) -> None:
        """Hands a signal to the command that does not ask for its end, as SIGUSR1."""
        self._told_at = clock.monotonic()
        main = self._process.pid if self._process is not None else None
        function = is_function(self.command[0], self._environ)
        send(receivers(self.processes(), main, number, function=function), number)

    async def lose(self, nodes: Sequence[str], requeue: Callable[[], Awaitable[int | None]]) -> None:
        """Slurm has lost nodes of the command: it is started again without them, or the job requeued, or ended."""
        if self.state != "RUNNING" or self._placed is None or self._lost:
            return
        lost = f"Slurm has lost {', '.join(nodes)}"
        why = self._placed.leave_out(nodes) or await self._lateness()
        if self.restarts >= self._max_restarts:
            why = used_up_words(self._max_restarts)
        if not why:
            self._lost = lost
            log.warning("%s: the command is ended and started again without %s", lost, ", ".join(nodes))
            await self._end()  # its end is a failure of it: see _watch
            return
        code = await requeue()
        if code is None:
            return  # Slurm does not answer, and is asked again
        self._lost = lost
        end = "Slurm does not requeue the job: it is ended" if code else "the job is requeued"
        log.warning("%s, and the command cannot be started again here (%s): %s", lost, why, end)
        if code:
            await self.stop()

    async def interrupt(self) -> None:
        """Ctrl-C: SIGINT once to each process that a terminal would send it to. Whether it ends is the command's."""
        self.interrupts += 1
        if self.state != "RUNNING" or self._process is None:
            return
        self._interrupted_at = clock.monotonic()
        if self._placed is not None:
            await self._placed.signal_steps("INT")
        else:
            self.signal_foreground(signal.SIGINT)

    def signal_foreground(self, number: int) -> None:
        """As a key of a terminal does: to the command's process group, or to that which has its terminal."""
        group = self.terminal.group() if self.terminal is not None else None
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(group or self._process.pid, number)

    async def stop(self) -> None:
        """Ends the command for good."""
        if self.state not in OVER:
            self.state, self.held = "COMPLETING", False
            await self._end()
            self.state = "CANCELLED"
        for task in list(self._work):
            task.cancel()
        self.over.set()

    # ------------------------------------------------------------------------------------ questions

    def _job(self) -> SlurmJob:
        return SlurmJob(
            job_id=self.job_id,
            state="REQUEUE_HOLD" if self.state == "PENDING" and self.held else self.state,
            name=os.path.basename(self.command[0]),
            user=_own_name(),
            uid=os.getuid(),
            nodes=(self.node,),
            batch_host=self.node,
            restarts=self.restarts,
            start_at=self.start_at,
            requeueable=True,
            counted_at_once=True,
            starts_again=self._starts_again(),
            ended_with=self._exit_text() if self.state in OVER and self.exit_code is not None else "",
            held=self.held,
            stdout=str(self.output),
            stderr=str(self.errors),
            workdir=os.getcwd(),
            node_count=1,
        )

    def _starts_again(self) -> str:
        if self.state != "FAILED" or self._last or self.restarts >= self._max_restarts:
            return ""
        why = self._lost or f"its command ended with {self._exit_text()}"
        return f"{why}, {restarting_words(self.restarts + 1, self._max_restarts)}"

    def notes(self) -> tuple[str, ...]:
        """Nothing: there is no Slurm."""
        return ()

    async def read_view(self) -> SlurmView:
        node = SlurmNode(name=self.node, address="127.0.0.1", state="ALLOCATED")
        return SlurmView(jobs=(self._job(),), nodes=(node,))

    async def read_job(self, job_id: str) -> SlurmJob | None:
        return self._job() if job_id == self.job_id else None

    async def read_node(self, node: str) -> SlurmNode | None:
        view = await self.read_view()
        return view.nodes[0] if node == self.node else None

    # ------------------------------------------------------------------------------------ levers

    def _check(self, job_id: str) -> None:
        if job_id != self.job_id:
            raise SlurmRefused(f"there is no job {job_id}", Refusal.NO_SUCH_JOB)

    async def requeue_hold(self, job_id: str, *, only_unfinished: bool) -> None:
        self._check(job_id)
        late = await self._lateness()
        if self.state == "PENDING" and self.held:
            return
        if late:
            raise SlurmRefused(f"it is {late}", Refusal.FINISHED)
        if self.state in OVER and only_unfinished:
            raise SlurmRefused("the command has ended", Refusal.FINISHED)
        if self.state == "COMPLETING":
            raise SlurmRefused("the command is being ended", Refusal.NOT_NOW)
        if self.state == "RUNNING":
            self._resume_from = self.last_good(self._resume_from)
        self.restarts += 1
        self.held, self.state = True, "COMPLETING"
        self.over.clear()
        self.spawn(self._end_and_wait())

    async def _end_and_wait(self) -> None:
        await self._end()
        if self.state == "COMPLETING":
            self.state = "PENDING"
            if not self.held:
                await self._begin()

    async def read_reservations(self) -> tuple[Reservation, ...]:
        return ()

    async def release(self, job_id: str) -> None:
        self._check(job_id)
        was_held, self.held = self.held, False
        if was_held and self.state == "PENDING":
            await self._begin()

    async def hold(self, job_id: str) -> None:
        self._check(job_id)
        if self.state not in REQUEUED:
            raise SlurmRefused("the command is not waiting to be started", Refusal.NOT_PENDING)
        self.held = True

    async def cancel(self, job_id: str) -> None:
        self._check(job_id)
        if self.state not in OVER:
            self.spawn(self.stop())

    async def send_signal(self, job_id: str, signal: str, to: SignalTo) -> None:
        self._check(job_id)
        if self.state != "RUNNING":
            raise SlurmRefused("the command does not run", Refusal.NOT_RUNNING)
        processes = self.processes()
        chosen = {SignalTo.BATCH: processes[:1], SignalTo.STEPS: processes[1:] or processes}.get(to, processes)
        send(chosen, _number(signal))

    async def _no_lever(self, *_: object) -> NoReturn:
        """What no machine without Slurm can do."""
        raise SlurmRefused("one command on one machine has no queue, no script and no other node", Refusal.NOT_BATCH)

    read_script = submit = set_excluded_nodes = set_node_down = _no_lever
    drain_node = undrain_node = reserve_nodes = delete_reservation = _no_lever


def _number(name: str) -> int:
    return signal.Signals["SIG" + name.removeprefix("SIG")].value


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))
    except psutil.Error:
        return False
