"""Commands to agents: they travel in the answer to a report, and their results in the next report."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import wait_for
from slurm_watchdog.model.protocol import CollectEvidence, Command, CommandResult

MAX_WAITING = 64  # Commands that wait for one node; a new one is refused beyond that, so a dead node costs no memory.
OF_ONE_USER = 16  # … of them questions about jobs of one user: others are asked about there, too.


class CommandQueue:
    """Who has been asked what, and who has not answered yet. One event loop owns it."""

    def __init__(self, now: Callable[[], float] = clock.monotonic) -> None:
        self._now = now
        self._waiting: dict[str, deque[Command]] = {}
        self._futures: dict[str, asyncio.Future[CommandResult]] = {}
        self._out: dict[str, dict[str, float]] = {}  # Node -> commands fetched and not answered, and from when on.
        self._arrivals: dict[str, asyncio.Event] = {}  # Node -> whose answer is held until something is asked of it.
        self._of_user: dict[str, int] = {}  # Command that waits -> whose job it is about, for shares.
        self._asked_at: dict[str, float] = {}  # Node -> when it was asked for something last.

    async def ask(self, node: str, command: Command, deadline_s: float, uid: int | None = None) -> CommandResult:
        """The node's answer, or a result that says why there is none. Never raises, never waits longer. `uid`: the user
        whose job it is about, for questions; None for a part of an action, which has been allowed already."""
        queue = self._waiting.setdefault(node, deque())
        self._asked_at[node] = self._now()
        if len(queue) >= MAX_WAITING:
            return CommandResult(command_id=command.id, ok=False, error=f"{node} has not fetched its commands for long")
        if uid is not None:
            if sum(self._of_user.get(each.id) == uid for each in queue) >= OF_ONE_USER:
                error = f"{OF_ONE_USER} questions about jobs of uid {uid} wait for {node} already"
                return CommandResult(command_id=command.id, ok=False, error=error)
            self._of_user[command.id] = uid
        future: asyncio.Future[CommandResult] = asyncio.get_running_loop().create_future()
        self._futures[command.id] = future
        queue.append(command)
        if node in self._arrivals:
            self._arrivals[node].set()
        try:
            return await wait_for(future, deadline_s)
        except TimeoutError:
            return CommandResult(
                command_id=command.id, ok=False, error=f"{node} did not answer within {deadline_s:.0f} s"
            )
        finally:
            self._futures.pop(command.id, None)
            self._of_user.pop(command.id, None)
            if command in queue:
                queue.remove(command)

    def pop(self, node: str) -> tuple[Command, ...]:
        """The commands for a node, handed out once."""
        commands = tuple(self._waiting.pop(node, ()))
        if commands:
            left = {each: at for each, at in self._out.get(node, {}).items() if self._is_awaited(each)}
            for each in commands:
                takes_s = each.apart_s * (each.dumps - 1) if isinstance(each, CollectEvidence) else 0.0  # at least
                left[each.id] = self._now() + takes_s
            self._out[node] = left
        return commands

    def asked_age_s(self, node: str) -> float:
        """Since the node was asked for something last."""
        return self._now() - self._asked_at.get(node, float("-inf"))

    def silent_s(self, node: str) -> float:
        """For so long no report with an answer to a command is to be expected from the node; 0 or less: it may be on
        its way."""
        out = [at for each, at in self._out.get(node, {}).items() if self._is_awaited(each)]
        return min(out) - self._now() if out else float("inf")

    def _is_awaited(self, command_id: str) -> bool:
        future = self._futures.get(command_id)
        return future is not None and not future.done()

    async def arrival(self, node: str, limit_s: float) -> tuple[Command, ...]:
        """The commands for a node as soon as there are any, handed out once; none after `limit_s`."""
        arrived = self._arrivals.setdefault(node, asyncio.Event())
        try:
            await wait_for(arrived.wait(), limit_s)
        except TimeoutError:
            pass
        finally:
            if self._arrivals.get(node) is arrived:
                del self._arrivals[node]
        return self.pop(node)

    def resolve(self, result: CommandResult) -> None:
        """An answer has come; one that no one waits for any more is dropped."""
        future = self._futures.get(result.command_id)
        if future is not None and not future.done():
            future.set_result(result)
