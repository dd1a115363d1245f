"""The loop of every supervisor: what happened is handed to `machine`, and what that says is done, by a back end (a step
of Slurm's: `launcher`; a process of this machine: `standalone.local_process`). It waits for nothing that may hang: no
file on a filesystem of others, no end of a process; for Slurm's answer alone where the job's time seems to be over, for
three seconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout
from slurm_watchdog.model.supervisor import BATCH_STEP
from slurm_watchdog.supervisor import machine, state
from slurm_watchdog.supervisor.endings import exit_code, stopped_by
from slurm_watchdog.supervisor.given_input import NO_INPUT
from slurm_watchdog.supervisor.launcher import Launcher
from slurm_watchdog.supervisor.placement import Placement
from slurm_watchdog.supervisor.state import Action, Phase, Run, Settings

POLL_S = 0.5  # Between two looks at what ends, and at the kill switch.
QUICK_POLL_S = 0.2  # While something is under way.
STEP_FIRST_S = 0.3
STEP_MOST_S = 30.0
"""Slurm is asked for the step after so long, then after twice that, at last every 30 s until it is known."""
BATCH_AFTER_S = 6.0
"""A command of which Slurm has no step by then, and that has called no srun, runs in the batch script."""


class Supervisor:
    """One command; all of it belongs to one event loop."""

    def __init__(
        self, settings: Settings, launcher: Launcher, say: Callable[[str], None], changed: Callable[[Run], None]
    ):
        """`say` gets lines for people, `changed` the state after each event, before what it leads to is done."""
        self.launcher, self._say, self._changed = launcher, say, changed
        self.good: Callable[[str], str] = lambda named: named
        """The checkpoint to name to the next start, given the one that was named to this; empty: none."""
        self._events: asyncio.Queue[machine.Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self.run, self._actions = machine.first(settings, clock.monotonic())
        self._handling = asyncio.Lock()

    async def begin(self) -> None:
        """Does what comes before the first start."""
        if self.run.settings.in_slurm and self.run.settings.allocation.end_at is None:
            await self.read_end()  # SLURM_JOB_END_TIME is there since 23.02
        await self._do(self._actions)

    async def follow(self) -> None:
        """Handles what happens until the command is over."""
        while self.run.phase is not Phase.OVER:
            await self.next()

    async def next(self) -> None:
        """Handles what happens next, or that nothing did."""
        quick = self.run.phase in (Phase.ENDING, Phase.LOOKING) or not self.run.steps
        try:
            async with timeout(QUICK_POLL_S if quick else POLL_S):
                happened = await self._events.get()
        except TimeoutError:
            happened = machine.tick
            self.launcher.reap()
        await self.handle(happened)

    def tell(self, happened: machine.Event) -> None:
        """It is handled soon."""
        self._events.put_nowait(happened)

    async def handle(self, happened: machine.Event) -> None:
        """It is handled now."""
        async with self._handling:
            if machine.is_about_time(self.run, happened, clock.monotonic(), clock.wall()):
                await self.read_end()
            self.run, actions = machine.next_state(self.run, happened, clock.monotonic(), clock.wall())
            self._changed(self.run)
            await self._do(actions)

    async def read_end(self) -> None:
        """`scontrol update TimeLimit=` and a suspension move it. Once an order, or an end: 3 s at most."""
        end_at = await self.launcher.ask.end_at()
        self.run = machine.with_end(self.run, end_at)  # what is so after the answer

    def cancel(self) -> None:
        """Leaves all that is under way."""
        for task in self._tasks:
            task.cancel()

    def _is_present(self, start: int) -> bool:
        return start == self.run.starts and self.run.phase is Phase.RUNNING

    async def _watch_steps(self, start: int) -> None:
        """Asks Slurm while a step is not known: none at all, or that of a new call of srun."""
        batch_at, ask_at, after_s = clock.monotonic() + BATCH_AFTER_S, 0.0, STEP_FIRST_S
        known: frozenset[int] = frozenset()
        while self._is_present(start):
            await asyncio.sleep(POLL_S if self.run.steps else QUICK_POLL_S)
            calls, now = self.launcher.waiting_calls(), clock.monotonic()
            if calls - known or not ask_at:
                ask_at, after_s = now + STEP_FIRST_S, STEP_FIRST_S
            known = calls
            if now < ask_at or (self.run.steps and not calls):
                continue
            steps, after_s = await self.launcher.find_steps(), min(STEP_MOST_S, 2 * after_s)
            ask_at = now + after_s if now >= batch_at else min(now + after_s, batch_at)
            if not self._is_present(start):
                return
            if steps:
                self.tell(machine.event(machine.steps_seen, steps, tuple(self.launcher.step_nodes)))
            elif steps is not None and now >= batch_at and not self.launcher.waiting_calls():
                self.tell(machine.event(machine.steps_seen, (BATCH_STEP,)))

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
                    self._spawn(self.launcher.forward(number, self.run.steps))

    async def _requeue(self) -> None:
        """Slurm ends this process, too; where it does not answer, it is asked again after the next look."""
        if await self.launcher.ask.requeue():
            self.tell(machine.not_requeued)

    async def _look(self, nodes: tuple[str, ...]) -> None:
        settings, starts = self.run.settings, self.run.starts
        # On one machine no start stands beside what is left of the one before, which has as long to end as it had.
        told_s = 0.0 if self.run.phase is Phase.ENDING else settings.restart_delay_s  # since SIGTERM
        kill_at = clock.monotonic() + settings.kill_wait_s - told_s
        while settings.patient and starts and starts == self.run.starts and self.launcher.processes():
            if clock.monotonic() >= kill_at:
                self.launcher.signal_tree("KILL")
            await asyncio.sleep(QUICK_POLL_S)
            self.launcher.reap()
        if starts == self.run.starts:  # else another look was first
            suspects, lost = dict[str, str](), frozenset[str]()
            try:
                suspects, lost = await self.launcher.look(nodes, len(nodes) - settings.count)
            except OSError as error:
                self._say(f"the nodes could not be looked at before the start: {error}")
            self.tell(machine.event(machine.looked, suspects, lost))

    async def _begin(self, placement: Placement, in_batch: bool, resume_from: str) -> None:
        start = self.run.starts
        if self.launcher.input.is_lost(start - 1):
            self._say(NO_INPUT)
        try:
            process = await self.launcher.start(placement, start - 1, resume_from, ordered=self.run.order is not None)
        except OSError as error:
            self.tell(machine.event(machine.not_begun, str(error)))
            return
        self.run = replace(self.run, begun_ticks=self.launcher.begun_ticks())
        if in_batch:
            self.tell(machine.event(machine.steps_seen, (BATCH_STEP,)))
        if self.launcher.has_steps:
            self._spawn(self._watch_steps(start))
        self._spawn(self._wait(process, start))

    async def _wait(self, process: asyncio.subprocess.Process, start: int) -> None:
        code = await process.wait()
        # All that belongs to the end is read before it is judged; each has its deadline.
        by_itself = self.run.phase is Phase.RUNNING
        expected = not by_itself or self.run.asked_at is not None or machine.is_interrupted(self.run, clock.monotonic())
        self.launcher.ended(process, expected=expected)
        # What it has started has as long as it had: a shell hears SIGTERM at once, and its trainer saves.
        ending = self.run.settings.patient and (not by_itself or self.run.asked_at is not None)
        while ending and self.launcher.pid == process.pid and self.launcher.processes():
            self.launcher.reap()
            await asyncio.sleep(QUICK_POLL_S)
        if by_itself or not self.run.requeued:
            self.run = replace(self.run, resume_from=self.good(self.run.resume_from))
        switched = by_itself and await self.launcher.is_switched()
        if start == self.run.starts:
            self.launcher.has_finished = by_itself and code == 0 and not switched
        stopped = stopped_by(await self.launcher.tail()) if by_itself and code and self.run.settings.in_slurm else ""
        fails = code and not expected and not stopped and self.run.settings.in_slurm
        if fails and (lost := await self.launcher.lost(self.run.placement.nodes)):
            self.tell(machine.event(machine.taken_out, lost))
        self.tell(machine.event(
            machine.ended, start, exit_code(code), switched=switched, stopped=stopped, by_itself=by_itself
        ))  # fmt: skip
        while self.run.phase is Phase.WAITING or not self._events.empty():
            await asyncio.sleep(POLL_S)
            if self.run.phase is Phase.WAITING:
                self.tell(machine.event(machine.switch_seen, await self.launcher.is_switched()))
