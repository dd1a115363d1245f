"""Simulated time: a heap of things that happen, and an asyncio loop that lives by it.

The world (agents, network, Slurm, jobs, faults) is events on the timeline; the controller's real coroutines
run on a `SimLoop`, which never sleeps: where it would wait it lets the world go on, until its next timer or
until somebody speaks to it. Killing the controller is leaving the loop from the middle of whatever it did;
stopping it (SIGSTOP) is not returning from a wait while the world continues. Models: FoundationDB's
simulation, TigerBeetle's VOPR.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import selectors
from collections.abc import Callable
from typing import Any


class Killed(KeyboardInterrupt):
    """kill -9, at this point. asyncio lets nothing but this and SystemExit through at once, from wherever it
    is raised."""


class Timeline:
    """What happens when. Two things at one moment happen in the order in which they were put here."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, t: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (max(t, self.now), self._count, what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.now + seconds, what)

    def next_at(self) -> float:
        return self._heap[0][0] if self._heap else float("inf")

    def advance(self, target: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Lets everything happen until `target`; no further than the moment at which `stop` holds."""
        while self._heap and self._heap[0][0] <= target:
            self.now, _, what = heapq.heappop(self._heap)
            what()
            if stop():
                return
        self.now = max(self.now, target)


class _Selector(selectors.SelectSelector):
    """Nothing is ever readable here. Waiting is letting the timeline go on."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline
        self.ready: Callable[[], bool] = lambda: False
        self.kill = False
        self.kill_after_waits: int | None = None
        self.frozen_until = 0.0
        self.while_frozen: Callable[[float], None] = lambda until: timeline.advance(until, lambda: self.kill)
        """What the world does until then."""
        self.paused_at = float("inf")
        self.pause: Callable[[], None] = lambda: None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.kill_after_waits is not None:
            self.kill_after_waits -= 1
            self.kill |= self.kill_after_waits <= 0
        if self.frozen_until > self._timeline.now:
            self.while_frozen(self.frozen_until)
        elif self._timeline.now >= self.paused_at:
            self.pause()
        elif timeout is None or timeout > 0:
            target = self._timeline.now + timeout if timeout is not None else self._timeline.next_at()
            target = min(target, self.paused_at)
            self._timeline.advance(target, lambda: self.kill or self.ready() or self._frozen())
        if self.kill:
            raise Killed
        return []

    def _frozen(self) -> bool:
        return self.frozen_until > self._timeline.now


class SimLoop(asyncio.SelectorEventLoop):
    """The loop of one life of the controller."""

    def __init__(self, timeline: Timeline) -> None:
        self._simulated = timeline
        self._waits = _Selector(timeline)
        super().__init__(self._waits)
        self._waits.ready = lambda: bool(self._ready)  # type: ignore[attr-defined]
        self.set_exception_handler(_report)

    def time(self) -> float:
        return self._simulated.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """No threads: what they would do is done at once."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # handed over to the coroutine that awaits it
            future.set_exception(error)
        return future

    def _check_closed(self) -> None:
        """What dies with a killed process may still try to wake somebody: nobody is there, and nothing is said."""

    def kill(self) -> None:
        """At the next await."""
        self._waits.kill = True

    def kill_after(self, waits: int) -> None:
        """After so many turns of the loop from now."""
        self._waits.kill_after_waits = waits

    def freeze(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long: what was sent meanwhile is read then."""
        self._waits.frozen_until = self._simulated.now + seconds

    def while_frozen(self, what: Callable[[float], None]) -> None:
        """In the place of letting the world go on until it moves again: `what(until)`."""
        self._waits.while_frozen = what

    def run_until(self, t: float) -> None:
        """Runs on from where it was, until then or until it is stopped, killed or over: another loop may have
        the thread meanwhile, or have it now."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        self._waits.paused_at, self._waits.pause = t, self.stop
        try:
            self.run_forever()
        finally:
            asyncio._set_running_loop(outer)

    def bury(self) -> None:
        """After the kill: nothing of it runs on."""
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine: Any = task.get_coro()
            with contextlib.suppress(BaseException):  # what a dead process would have done at its end is not done
                coroutine.close()
        self.close()


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    if not isinstance(context.get("exception"), KeyboardInterrupt):
        loop.default_exception_handler(context)
