"""A supervisor and the agent of its node, over a real socket: also over a restart of the agent, and a stop of the
supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.processes.supervisor_link import SupervisorLink
from slurm_watchdog.base import clock
from slurm_watchdog.model.supervisor import FromAgent, RestartOrder
from slurm_watchdog.supervisor.service import AgentLink
from tests.builders.supervisor_links import JOB, RUN, STATUS, link_at, rows

ORDER = RestartOrder(decision="d1", step_id="0", start=1)


class Pair:
    """The supervisor's end, and the agents that come and go."""

    def __init__(self, place: Path):
        self.place, self.heard = place, list[FromAgent]()
        self.link = AgentLink(str(place / "agent"), RUN, self.heard.append, most_pause_s=0.5)
        self.agent: SupervisorLink | None = None

    async def until(self, holds: Callable[[], object], what: str) -> None:
        for _ in range(500):
            found = rows(self.agent) if self.agent is not None else []
            self.status = found[0].status if found else None
            if holds():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"not in time: {what}: {self.status} {self.heard}")

    def says(self, starts: int, words: str) -> bool:
        return self.status is not None and (self.status.starts, self.status.words) == (starts, words)

    @property
    def decisions(self) -> list[str]:
        return [each.order.decision for each in self.heard if each.order is not None]


def play(place: Path, story: Callable[[Pair], Awaitable[None]]) -> None:
    async def told() -> None:
        pair = Pair(place)
        keeping = asyncio.create_task(pair.link.keep())
        try:
            await story(pair)
        finally:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping
            if pair.agent is not None:
                pair.agent.close()

    asyncio.run(told())


def test_what_is_said_before_there_is_an_agent_is_said_when_it_comes_and_after_each_of_its_restarts(
    tmp_path: Path,
) -> None:
    async def story(pair: Pair) -> None:
        pair.link.say(STATUS)
        await asyncio.sleep(0.3)
        assert not pair.link.was_connected
        for starts in (1, 2, 3):
            pair.link.say(replace(STATUS, starts=starts))
            pair.agent = link_at(tmp_path)
            await pair.until(partial(pair.says, starts, ""), "the status")
            pair.link.say(replace(STATUS, starts=starts, words="more"))
            await pair.until(partial(pair.says, starts, "more"), "what is said later")
            pair.agent.close()
        assert pair.link.was_connected

    play(tmp_path, story)


def test_an_order_is_heard_at_once_and_again_after_a_reconnection_for_as_long_as_it_counts(tmp_path: Path) -> None:
    """That it is obeyed once is the supervisor's (machine.ordered): here it must not be lost."""

    async def story(pair: Pair) -> None:
        pair.agent = link_at(tmp_path)
        pair.link.say(STATUS)
        await pair.until(lambda: pair.status, "the status")
        pair.agent.give(JOB, RUN, ORDER, clock.monotonic())
        await pair.until(lambda: pair.decisions == ["d1"], "the order")
        peer = next(iter(pair.agent._peers.values()))
        peer.sock.shutdown(socket.SHUT_RDWR)
        await pair.until(lambda: pair.decisions == ["d1", "d1"], "the order, by another connection")

    play(tmp_path, story)


def test_an_order_that_was_withdrawn_while_the_supervisor_was_stopped_is_none(tmp_path: Path) -> None:
    async def story(pair: Pair) -> None:
        pair.agent = link_at(tmp_path)
        pair.link.say(STATUS)
        await pair.until(lambda: pair.status, "the status")
        pair.agent.give(JOB, RUN, ORDER, clock.monotonic())  # nothing is read between these two
        pair.agent.withdraw("d1", clock.monotonic())
        pair.agent.give(JOB, RUN, replace(ORDER, decision="d2"), clock.monotonic())
        await pair.until(lambda: pair.decisions, "the next order")
        assert pair.decisions == ["d2"]

    play(tmp_path, story)


def test_a_status_that_is_too_large_for_a_line_names_no_nodes(tmp_path: Path) -> None:
    async def story(pair: Pair) -> None:
        pair.agent = link_at(tmp_path)
        many = tuple(f"a-node-with-a-long-name-{number}" for number in range(4000))
        pair.link.say(replace(STATUS, nodes=many, starts=9))
        await pair.until(lambda: pair.status is not None, "the status")
        assert pair.status == replace(STATUS, nodes=(), starts=9)

    play(tmp_path, story)


def test_an_agent_that_does_not_read_holds_nothing_up_and_gets_the_newest_word_when_it_does(tmp_path: Path) -> None:
    async def story(pair: Pair) -> None:
        pair.agent = agent = link_at(tmp_path)
        pair.link.say(STATUS)
        await pair.until(lambda: pair.status, "the status")
        pair.agent = None
        for starts in range(5000):
            pair.link.say(replace(STATUS, starts=starts, words="x" * 500))
            await asyncio.sleep(0)
        pair.agent = agent

        def says_it_again() -> bool:
            pair.link.say(replace(STATUS, starts=5001))  # as each WRITE_EVERY_S
            return pair.status is not None and pair.status.starts == 5001

        await pair.until(says_it_again, "the newest word")

    play(tmp_path, story)


@pytest.mark.parametrize("said", [b"garbage\n" * 1000, b"[" * 200_000, b'{"order": {"decision": "d"}}\n'])
def test_whatever_an_agent_says_ends_no_supervisor(tmp_path: Path, said: bytes) -> None:
    async def story(pair: Pair) -> None:
        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(said)
            with contextlib.suppress(OSError):
                await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(impostor, tmp_path / "agent")
        await asyncio.sleep(0.5)
        server.close()
        assert pair.heard == []
        pair.link.say(STATUS)
        pair.agent = link_at(tmp_path)
        await pair.until(lambda: pair.status, "the status, at a real agent")

    play(tmp_path, story)
