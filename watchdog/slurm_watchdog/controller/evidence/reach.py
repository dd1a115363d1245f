"""Whether the machines of agents that have fallen silent are still there: a connection to their slurmd's port, and
at the same moment to those of others, which show that the way there is open.

Slurm itself notices a node without power after a ping in vain: they are SlurmdTimeout / 3 apart, 100 s as shipped. A
port that refuses is a machine that lives. Nothing is sent.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable

from slurm_watchdog.analysis.slurm_nodes import jobs_by_node
from slurm_watchdog.base import clock
from slurm_watchdog.base.deadline import timeout, wait_for
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.cluster_view import ClusterView

LATE_S = 20.0  # Four reports did not come: several tries are in when `agent_silent_after` is over.
EVERY_S = 5.0
FIRST_TRIES, LATER_EVERY_S = 12, 60.0
ANSWER_S = 3.0  # A second try of TCP (1 s after the first) is in it.
RESOLVED_S = 600.0  # A cloud gives a name another address with each start of the node.
NO_NAMES_S = 60.0  # After a name without an answer none is looked up.
GONE = frozenset({errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})
WITNESSES = 2
AT_ONCE = 32

Answers = Callable[[str], Awaitable[bool | None]]  # Whether someone is at an address; None: it cannot be asked.


async def nobody_knows(address: str) -> bool | None:
    """Where no machine is asked."""
    return None


class SlurmdPort:
    """Asks by a TCP connection to this port. One event loop owns it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._known: dict[str, tuple[float, str]] = {}  # Name -> when it was looked up, and its address.
        self._no_names_until = float("-inf")
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self, address: str) -> bool | None:
        number = await self._resolve(address)
        if number is None:
            return None
        try:
            async with timeout(ANSWER_S):
                _, writer = await asyncio.open_connection(number, self._port)
        except (ConnectionRefusedError, ConnectionResetError):
            return True
        except TimeoutError:
            return False
        except OSError as error:  # our own network, or too many open files: that says nothing about the node
            return False if error.errno in GONE else None
        writer.close()
        return True

    async def _resolve(self, name: str) -> str | None:
        """A resolver that hangs holds up one thread a minute, and convicts no node."""
        async with self._one_at_a_time:
            now = clock.monotonic()
            at, number = self._known.get(name, (float("-inf"), ""))
            if now - at < RESOLVED_S:
                return number
            if now < self._no_names_until:
                return None
            try:
                asked = asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
                found = await wait_for(asked, ANSWER_S)
            except (OSError, TimeoutError):
                self._no_names_until = now + NO_NAMES_S
                return None
            self._known[name] = now, str(found[0][4][0])
            return self._known[name][1]


class Reach:
    """One event loop owns it; what it finds is kept in the state."""

    def __init__(self, state: ClusterState, answers: Answers):
        self._state, self._answers = state, answers
        self._asked: dict[str, tuple[float, int]] = {}  # Node -> when it was asked last, and how often in a row.
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._late: set[str] = set()  # At the last look at all nodes,
        self._looked_at, self._next_at = 0.0, float("-inf")  # when that was, and when another one may be late.

    def serve(self, view: ClusterView) -> None:
        """Asks after the nodes of jobs whose agents are late; never waits."""
        late = self._late_ones(view)
        self._asked = {name: asked for name, asked in self._asked.items() if name in late}
        busy = jobs_by_node(view) if late else {}
        for name in sorted(late & busy.keys()):
            at, tries = self._asked.get(name, (float("-inf"), 0))
            every_s = EVERY_S if tries < FIRST_TRIES else LATER_EVERY_S
            if name in self._tasks or len(self._tasks) >= AT_ONCE or view.now - at < every_s:
                continue
            others = [each for each in view.reporting_nodes if each not in late]
            same_job = [each for each in others if set(busy.get(each, ())) & set(busy[name])]
            witnesses = list(dict.fromkeys((*same_job, *others)))[:WITNESSES]
            self._asked[name] = view.now, tries + 1
            self._tasks[name] = asyncio.create_task(self._ask(name, witnesses, view.now))

    def _late_ones(self, view: ClusterView) -> set[str]:
        """All are looked through only once another one may be late."""
        heard, now = view.heard_at, view.now
        if not self._looked_at <= now < self._next_at:
            late = {name for name, at in heard.items() if now - at >= LATE_S}
            self._next_at = min((at for name, at in heard.items() if name not in late), default=now) + LATE_S
            self._looked_at, self._late = now, late
        return {name for name in self._late if name in heard and now - heard[name] >= LATE_S}

    async def _ask(self, node: str, witnesses: list[str], now: float) -> None:
        try:
            there, *others = await asyncio.gather(*(self._is_there(name) for name in (node, *witnesses)))
            if there is False and True in others:
                since, tries = self._state.unreached.get(node, (now, 0))
                self._state.unreached[node] = since, tries + 1
            elif there is not False:
                self._state.unreached.pop(node, None)
        finally:
            del self._tasks[node]

    async def _is_there(self, node: str) -> bool | None:
        address = self._state.address_of(node)
        return await self._answers(address) if address else None

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
