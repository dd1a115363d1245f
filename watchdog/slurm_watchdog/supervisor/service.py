"""The supervisor's loop: what happened is handed to `machine`, and what that says is done. It waits for nothing that
may hang: no file outside of its own directory, no end of a process; for Slurm's answer alone where the job's time seems
to be over, for three seconds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.base.process_setup import set_name
from slurm_watchdog.model.kill_switch import HEARTBEAT, parse_line
from slurm_watchdog.model.supervisor import BATCH_STEP, WRITE_EVERY_S, SupervisorStatus, run_directory
from slurm_watchdog.slurm.node_names import fold_nodes
from slurm_watchdog.supervisor import machine, state
from slurm_watchdog.supervisor.allocation import Allocation, node_count
from slurm_watchdog.supervisor.endings import MARK, TAIL_BYTES, exit_code, stopped_by
from slurm_watchdog.supervisor.given_input import NO_INPUT
from slurm_watchdog.supervisor.job_nodes import FILE_S, JobNodes, log_files
from slurm_watchdog.supervisor.launcher import RESUME_FROM, Launcher
from slurm_watchdog.supervisor.lost_nodes import least_nodes
from slurm_watchdog.supervisor.mailbox import (
    is_our_switch,
    misses_agent,
    other_writer,
    read_orders,
    remove_switch,
    write_status,
)
from slurm_watchdog.supervisor.parent import ENDING_SIGNALS, SIGNALS, SharedPid, in_child, say, unblock
from slurm_watchdog.supervisor.placement import Placement
from slurm_watchdog.supervisor.state import Action, Phase, Settings, status_of

END_S = 1.0  # At the end, for what is still to be written.


class Voice:
    """Says lines, and is never held up by them: what the child has no room for is lost."""

    def __init__(self) -> None:
        """Nothing is started before the first line."""
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pids(self) -> set[int]:
        """The child, if there is one."""
        return {self._child.pid} if self._child is not None else set()

    def say(self, text: str) -> None:
        """One line, begun with our name."""
        line = f"slurm-watchdog: {' '.join(text.split())}\n".encode()
        with contextlib.suppress(OSError):
            if self._child is None:
                self._child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=2, start_new_session=True)
                assert self._child.stdin is not None
                os.set_blocking(self._child.stdin.fileno(), False)
            assert self._child.stdin is not None
            os.write(self._child.stdin.fileno(), line)

    def close(self) -> None:
        """Waits for the last line, if its file answers."""
        if self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(END_S)


POLL_S = 0.5  # Between two looks for orders: each is a list of a small directory in memory, a tenth of a millisecond.
QUICK_POLL_S = 0.2  # While something is under way.
STEP_FIRST_S = 0.3
STEP_MOST_S = 30.0
"""Slurm is asked for the step after so long, then after twice that, at last every 30 s until it is known."""
BATCH_AFTER_S = 6.0
"""A command of which Slurm has no step by then, and that has called no srun, runs in the batch script."""
NAME = "slurm-watchdog"
"""Of this process: it is in the batch step as the ranks may be, and no rank (knowledge.launchers.NEVER_A_RANK)."""
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


def is_supervisor(pid: int) -> bool:
    """Whether this process is one of this user."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == NAME and os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:
        return False


def supervise(wanted: Wanted, allocation: Allocation, environ: Mapping[str, str]) -> int:
    """Runs the command until it has ended for good; returns its exit code. Raises ValueError, OSError, NoSpare."""
    set_name(NAME)
    count = node_count(wanted.nodes, wanted.spares, allocation)
    settings = Settings(
        allocation=allocation, count=count, max_restarts=wanted.max_restarts,
        least=least_nodes(wanted.command, count),
    )  # fmt: skip
    launcher = Launcher(wanted.command, allocation, environ, check=wanted.check, checkpoints=wanted.checkpoints)
    own_pid = os.getpid()
    try:
        return in_child(lambda command: asyncio.run(_run(settings, launcher, environ, command)))
    finally:
        if os.getpid() == own_pid:  # a command that outlives its supervisor calls our srun still
            launcher.close()


async def _run(settings: Settings, launcher: Launcher, environ: Mapping[str, str], command: SharedPid) -> int:
    if settings.allocation.end_at is None:  # SLURM_JOB_END_TIME is there since 23.02
        allocation = replace(settings.allocation, end_at=await launcher.ask.end_at())
        settings = replace(settings, allocation=allocation)
    try:
        code = await _Service(settings, launcher, environ, command).run()
        command.put(0)  # no one waits for what is left behind of it
        return code
    except Exception:
        if command.get():  # asyncio would kill it: our error costs the supervision, and not the training
            say(traceback.format_exc())
            os._exit(ERROR_OF_OURS)
        raise


class _Service:
    """One supervisor; all of it belongs to one event loop."""

    def __init__(self, settings: Settings, launcher: Launcher, environ: Mapping[str, str], command: SharedPid):
        self._directory = run_directory(settings.allocation.job_id, settings.allocation.restarts)
        self._switch = environ.get("SLURM_WATCHDOG_KILL_SWITCH") or f"{self._directory}/kill"
        self._launcher, self._voice = launcher, Voice()
        self._command, self._signalled_at = command, dict[int, float]()
        self._events: asyncio.Queue[machine.Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._run, self._actions = machine.first(settings, clock.monotonic())
        self._written: SupervisorStatus | None = None
        self._written_at = 0.0
        self._asking = False
        self._ask_at, self._ask_after_s = 0.0, STEP_FIRST_S
        self._calls: frozenset[int] = frozenset()
        logs = [*log_files(), f"{self._directory}/{HEARTBEAT}"]
        self._nodes = JobNodes(launcher.ask, logs, elastic=settings.least < settings.count)
        self._began_at: float | None = clock.monotonic()
        """Until an agent has been seen, or was said to be missing."""

    async def run(self) -> int:
        """Until the command is over."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)
        unblock()
        self._look_beside()
        await self._do(self._actions)
        self._write()
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
            self._events.put_nowait(machine.event(machine.asked, number, number in ENDING_SIGNALS))

    async def _next(self) -> machine.Event:
        quick = self._run.phase in (Phase.ENDING, Phase.LOOKING) or not self._run.steps
        try:
            async with timeout(QUICK_POLL_S if quick else POLL_S):
                return await self._events.get()
        except TimeoutError:
            return machine.tick

    async def _handle(self, happened: machine.Event) -> None:
        if machine.is_about_time(self._run, happened, clock.monotonic(), clock.wall()):
            # `scontrol update TimeLimit=` and a suspension move it. Once an order, or an end: 3 s at most.
            self._run = machine.with_end(self._run, await self._launcher.ask.end_at())
        self._run, actions = machine.next_state(self._run, happened, clock.monotonic(), clock.wall())
        self._write()  # that an order is taken is said before anything is done
        await self._do(actions)
        if happened is machine.tick:
            self._poll()

    def _poll(self) -> None:
        self._look_for_agent()
        self._look_beside()
        for found in read_orders(self._directory):
            if found.order.decision not in self._run.seen:
                self._events.put_nowait(machine.event(machine.ordered, found.order, found.written_at))
        if self._run.phase is Phase.RUNNING:
            self._ask_for_steps()
            if self._nodes.is_due():
                self._spawn(self._look_for_lost(self._run.starts))
        self._launcher.reap()

    def _look_for_agent(self) -> None:
        """Says once that no one watches: the directory above lies there wherever the package is installed."""
        if self._began_at is None:
            return
        missing = misses_agent(self._directory, clock.monotonic() - self._began_at)
        if missing:
            self._say(NO_AGENT)
        if missing is not None:
            self._began_at = None

    def _look_beside(self) -> None:
        """Another `run` of this job, which writes the same file: found by what it has written there last."""
        known = self._run.beside
        pid = known if known and is_supervisor(known) else other_writer(self._directory, os.getpid(), is_supervisor)
        if pid != known:
            self._events.put_nowait(machine.event(machine.beside, pid))

    def _ask_for_steps(self) -> None:
        """If one is not known yet: no step at all, or that of a new call of srun."""
        calls, now = self._launcher.waiting_calls(), clock.monotonic()
        if calls - self._calls:
            self._ask_at, self._ask_after_s = now + STEP_FIRST_S, STEP_FIRST_S
        self._calls = calls
        if self._asking or now < self._ask_at or (self._run.steps and not calls):
            return
        self._ask_after_s = min(STEP_MOST_S, 2 * self._ask_after_s)
        self._ask_at, self._asking = now + self._ask_after_s, True
        if now < (batch_at := self._run.since + BATCH_AFTER_S):
            self._ask_at = min(self._ask_at, batch_at)
        self._spawn(self._find_steps())

    async def _find_steps(self) -> None:
        try:
            since, steps = self._run.since, await self._launcher.find_steps()
        finally:
            self._asking = False
        if steps:
            await self._events.put(machine.event(machine.steps_seen, steps, tuple(self._launcher.step_nodes)))
            return
        late = since == self._run.since and clock.monotonic() - since >= BATCH_AFTER_S
        if steps is not None and late and not self._launcher.waiting_calls():
            await self._events.put(machine.event(machine.steps_seen, (BATCH_STEP,)))

    async def _look_for_lost(self, start: int) -> None:
        used = (*self._run.placement.nodes, *self._run.elsewhere)
        runs_on = self._launcher.step_nodes
        found = await self._nodes.look([node for node in used if not runs_on or node in runs_on])
        if found and start == self._run.starts:
            await self._events.put(machine.event(machine.lost, found))

    async def _requeue(self) -> None:
        """Where Slurm does not answer, the next look asks it again."""
        if await self._launcher.ask.requeue():
            await self._events.put(machine.not_requeued)

    def _write(self) -> None:
        status, now = status_of(self._run, os.getpid()), clock.monotonic()
        if self._run.beside and self._run.phase is Phase.OVER:
            return  # the file is the other one's now
        if status != self._written or now - self._written_at >= WRITE_EVERY_S:
            write_status(self._directory, status)
            self._written, self._written_at = status, now

    # ------------------------------------------------------------------------------------ actions

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case state.Say(text):
                    self._say(text)
                case state.Look(nodes):
                    self._spawn(self._look(nodes))
                case state.Begin(placement, in_batch, resume_from):
                    await self._begin(placement, in_batch, resume_from)
                case state.SignalSteps(name, steps):
                    self._spawn(self._launcher.signal_steps(name, steps))
                case state.SignalTree(name):
                    self._launcher.signal_tree(name)
                case state.Requeue():
                    self._spawn(self._requeue())
                case state.Forward(number):
                    self._launcher.forward(number, ends=number in ENDING_SIGNALS)

    def _say(self, text: str) -> None:
        self._voice.say(text)
        self._launcher.helpers |= self._voice.pids

    async def _look(self, nodes: tuple[str, ...]) -> None:
        await self._events.put(
            machine.event(machine.looked, await self._launcher.look(nodes, len(nodes) - self._run.settings.count))
        )

    async def _begin(self, placement: Placement, in_batch: bool, resume_from: str) -> None:
        start = self._run.starts
        spares = f", {fold_nodes(placement.spares)} to spare" if placement.spares else ""
        more = f", with {RESUME_FROM}={resume_from}" if resume_from else ""
        self._say(f"{MARK.partition(': ')[2]}{start} on {fold_nodes(placement.nodes)}{spares}{more}")
        if self._run.order is not None:
            await self._remove_switch()
        if self._launcher.input.is_lost(start - 1):
            self._say(NO_INPUT)
        try:
            process = await self._launcher.start(placement, start - 1, resume_from)
        except OSError as error:
            self._events.put_nowait(machine.event(machine.not_begun, str(error)))
            return
        self._command.put(process.pid)
        self._nodes.begun()
        self._calls, self._ask_at, self._ask_after_s = frozenset(), clock.monotonic() + STEP_FIRST_S, STEP_FIRST_S
        self._events.put_nowait(machine.event(machine.begun, self._launcher.begun_ticks()))
        if in_batch:
            self._events.put_nowait(machine.event(machine.steps_seen, (BATCH_STEP,)))
        self._spawn(self._wait(process, start))

    async def _wait(self, process: asyncio.subprocess.Process, start: int) -> None:
        code = exit_code(await process.wait())
        self._command.clear(process.pid)
        # All that belongs to the end is read before it is judged; each has its deadline.
        by_itself = self._run.phase is Phase.RUNNING
        switched = by_itself and await self._is_switched()
        stopped = stopped_by(await self._tail()) if by_itself and code != 0 else ""
        await self._events.put(machine.event(machine.ended, start, code, switched=switched, stopped=stopped))
        while self._run.phase is Phase.WAITING or not self._events.empty():
            await asyncio.sleep(POLL_S)
            if self._run.phase is Phase.WAITING:
                await self._events.put(machine.event(machine.switch_seen, await self._is_switched()))

    async def _is_switched(self) -> bool:
        """Whether the kill switch is there, and ours. In a directory of our own it is read at once, on a machine under
        load, too: a command that has left by it would be taken for one that has ended well. Elsewhere it may lie on any
        filesystem."""
        if os.path.dirname(self._switch) == self._directory:
            return is_our_switch(self._switch)
        answer = await self._launcher.ask.run("head", "-c", "4096", "--", self._switch, deadline_s=FILE_S)
        return answer.code == 0 and parse_line(answer.output) is not None

    async def _remove_switch(self) -> None:
        """A start with our switch still there would end at once."""
        if os.path.dirname(self._switch) == self._directory:
            remove_switch(self._switch)
        elif await self._is_switched():
            await self._launcher.ask.run("rm", "-f", "--", self._switch, deadline_s=FILE_S)

    async def _tail(self) -> str:
        """The end of the job's log, where our standard error is a file."""
        path = log_files((2,))
        if not path:
            return ""
        argv = ("tail", "-c", str(TAIL_BYTES), "--", *path)
        return (await self._launcher.ask.run(*argv, deadline_s=FILE_S)).output
