"""The loop of every supervisor: what happened is handed to `machine`, and what that says is done. It waits for nothing
that may hang: no file on a filesystem of others, no end of a process; for Slurm's answer alone where the job's time
seems to be over, for three seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.model.supervisor import BATCH_STEP
from slurm_watchdog.supervisor import machine, state
from slurm_watchdog.supervisor.endings import exit_code, stopped_by
from slurm_watchdog.supervisor.given_input import NO_INPUT
from slurm_watchdog.supervisor.launcher import Launcher
from slurm_watchdog.supervisor.lost_nodes import JobNodes
from slurm_watchdog.supervisor.parent import ENDING_SIGNALS
from slurm_watchdog.supervisor.placement import Placement
from slurm_watchdog.supervisor.state import Action, Phase, Settings

POLL_S = 0.5  # Between two looks at what ends, and at the kill switch.
QUICK_POLL_S = 0.2  # While something is under way.
STEP_FIRST_S = 0.3
STEP_MOST_S = 30.0
"""Slurm is asked for the step after so long, then after twice that, at last every 30 s until it is known."""
BATCH_AFTER_S = 6.0
"""A command of which Slurm has no step by then, and that has called no srun, runs in the batch script."""


class Supervisor:
    """One command; all of it belongs to one event loop."""

    def __init__(self, settings: Settings, launcher: Launcher, logs: Sequence[str]):
        """`logs`: files in which the command says how far it is."""
        self.launcher = launcher
        self._events: asyncio.Queue[machine.Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._run, self._actions = machine.first(settings, clock.monotonic())
        self._handling = asyncio.Lock()
        self._nodes = JobNodes(launcher.ask, logs, elastic=settings.least < settings.count)

    async def _prepare(self) -> None:
        if self._run.settings.in_slurm and self._run.settings.allocation.end_at is None:
            await self._read_end()  # SLURM_JOB_END_TIME is there since 23.02
        await self._do(self._actions)

    def _tell(self, happened: machine.Event) -> None:
        self._events.put_nowait(happened)

    async def _next(self) -> machine.Event:
        quick = self._run.phase in (Phase.ENDING, Phase.LOOKING) or not self._run.steps
        try:
            async with timeout(QUICK_POLL_S if quick else POLL_S):
                return await self._events.get()
        except TimeoutError:
            return machine.tick

    async def _handle(self, happened: machine.Event) -> None:
        async with self._handling:
            if machine.is_about_time(self._run, happened, clock.monotonic(), clock.wall()):
                await self._read_end()
            self._run, actions = machine.next_state(self._run, happened, clock.monotonic(), clock.wall())
            self._changed()  # that an order is taken is said before anything is done
            await self._do(actions)
        if happened is machine.tick:
            self._poll()

    async def _read_end(self) -> None:
        """`scontrol update TimeLimit=` and a suspension move it. Once an order, or an end: 3 s at most."""
        end_at = await self.launcher.ask.end_at()
        self._run = machine.with_end(self._run, end_at)

    def _changed(self) -> None:
        """The state is another one."""

    def _poll(self) -> None:
        self.launcher.reap()

    def _is_present(self, start: int) -> bool:
        return start == self._run.starts and self._run.phase is Phase.RUNNING

    async def _watch_steps(self, start: int) -> None:
        """Asks Slurm while a step is not known: none at all, or that of a new call of srun."""
        batch_at, ask_at, after_s = clock.monotonic() + BATCH_AFTER_S, 0.0, STEP_FIRST_S
        known: frozenset[int] = frozenset()
        while self._is_present(start):
            await asyncio.sleep(POLL_S if self._run.steps else QUICK_POLL_S)
            calls, now = self.launcher.waiting_calls(), clock.monotonic()
            if calls - known or not ask_at:
                ask_at, after_s = now + STEP_FIRST_S, STEP_FIRST_S
            known = calls
            if now < ask_at or (self._run.steps and not calls):
                continue
            steps, after_s = await self.launcher.find_steps(), min(STEP_MOST_S, 2 * after_s)
            ask_at = now + after_s if now >= batch_at else min(now + after_s, batch_at)
            if not self._is_present(start):
                return
            if steps:
                self._tell(machine.event(machine.steps_seen, steps, tuple(self.launcher.step_nodes)))
            elif steps is not None and now >= batch_at and not self.launcher.waiting_calls():
                self._tell(machine.event(machine.steps_seen, (BATCH_STEP,)))

    async def _watch_nodes(self, start: int) -> None:
        """Asks which nodes are lost."""
        nodes = self._nodes
        nodes.begun()
        while self._is_present(start):
            await asyncio.sleep(nodes.wait_s)
            used = (*self._run.placement.nodes, *self._run.elsewhere)
            runs_on = self.launcher.step_nodes
            found = await nodes.look([node for node in used if not runs_on or node in runs_on])
            if found and self._is_present(start):
                self._tell(machine.event(machine.lost, found))

    async def _requeue(self) -> None:
        """Where Slurm does not answer, the next look asks it again."""
        if await self.launcher.ask.requeue():
            self._tell(machine.not_requeued)

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
                    self._spawn(self.launcher.signal_steps(name, steps))
                case state.SignalTree(name):
                    self.launcher.signal_tree(name)
                case state.Requeue():
                    self._spawn(self._requeue())
                case state.Forward(number):
                    self._forward(number)

    def _say(self, text: str) -> None:
        raise NotImplementedError

    def _forward(self, number: int) -> None:
        self.launcher.forward(number, ends=number in ENDING_SIGNALS)

    async def _look(self, nodes: tuple[str, ...]) -> None:
        suspects = await self.launcher.look(nodes, len(nodes) - self._run.settings.count)
        self._tell(machine.event(machine.looked, suspects))

    async def _begin(self, placement: Placement, in_batch: bool, resume_from: str) -> None:
        start = self._run.starts
        if self.launcher.input.is_lost(start - 1):
            self._say(NO_INPUT)
        try:
            process = await self.launcher.start(placement, start - 1, resume_from)
        except OSError as error:
            self._tell(machine.event(machine.not_begun, str(error)))
            return
        self._begun(process.pid)
        self._run = replace(self._run, begun_ticks=self.launcher.begun_ticks())
        if in_batch:
            self._tell(machine.event(machine.steps_seen, (BATCH_STEP,)))
        if self.launcher.has_steps:
            self._spawn(self._watch_steps(start))
            self._spawn(self._watch_nodes(start))
        self._spawn(self._wait(process, start))

    async def _wait(self, process: asyncio.subprocess.Process, start: int) -> None:
        code = await process.wait()
        # All that belongs to the end is read before it is judged; each has its deadline.
        by_itself = self._run.phase is Phase.RUNNING
        await self._gone(process, by_itself)
        switched = by_itself and await self._is_switched()
        stopped = stopped_by(await self._tail()) if by_itself and code != 0 else ""
        self._tell(machine.event(machine.ended, start, exit_code(code), switched=switched, stopped=stopped))
        while self._run.phase is Phase.WAITING or not self._events.empty():
            await asyncio.sleep(POLL_S)
            if self._run.phase is Phase.WAITING:
                self._tell(machine.event(machine.switch_seen, await self._is_switched()))

    def _begun(self, pid: int) -> None:
        """The command runs as this process."""

    async def _gone(self, process: asyncio.subprocess.Process, by_itself: bool) -> None:
        """It has ended."""

    async def _is_switched(self) -> bool:
        """Whether the command was told to end by a kill switch of ours, and an order follows."""
        return False

    async def _tail(self) -> str:
        """The end of the log in which srun says who ended a step."""
        return ""
