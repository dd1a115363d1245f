"""Commands to agents, and which nodes are to report closely: pushed at once where there is a stream, else in the answer
to the next report; their results come in the report after."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from slurm_watchdog.base.deadline import wait_for
from slurm_watchdog.model.protocol import Command, CommandResult

MAX_WAITING = 64  # Commands that wait for one node; a new one is refused beyond that, so a dead node costs no memory.
OF_ONE_USER = 16  # … of them questions about jobs of one user: others are asked about there, too.


class CommandQueue:
    """Who has been asked what, and who has not answered yet. One event loop owns it."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Command]] = {}
        self._futures: dict[str, asyncio.Future[CommandResult]] = {}
        self._of_user: dict[str, int] = {}  # Command that waits -> whose job it is about, for shares.
        self.close: frozenset[str] = frozenset()  # Nodes of which each report is to be whole.
        self.on_asked: Callable[[str], None] = lambda node: None  # Called with a node for which a command waits now.
        self.on_ask: Callable[[str, Command], None] = lambda node, command: None  # Called with each command.

    async def ask(self, node: str, command: Command, deadline_s: float, uid: int | None = None) -> CommandResult:
        """The node's answer, or a result that says why there is none. Never raises, never waits longer. `uid`: the user
        whose job it is about, for questions; None for a part of an action, which has been allowed already."""
        queue = self._waiting.setdefault(node, deque())
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
        self.on_ask(node, command)
        self.on_asked(node)
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

    def waits(self, node: str) -> bool:
        """Whether there is a command for a node."""
        return node in self._waiting

    def pop(self, node: str) -> tuple[Command, ...]:
        """The commands for a node, handed out once."""
        return tuple(self._waiting.pop(node, ()))

    def look_closely(self, nodes: frozenset[str]) -> None:
        """Each report of these nodes is to be whole from now on; of others again in the answer to their next one."""
        new, self.close = nodes - self.close, nodes
        for node in new:
            self.on_asked(node)

    def resolve(self, result: CommandResult) -> None:
        """An answer has come; one that no one waits for any more is dropped."""
        future = self._futures.get(result.command_id)
        if future is not None and not future.done():
            future.set_result(result)
