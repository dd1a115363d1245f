"""Streams of agents over time: what is asked is pushed, a lost one is a fact with its reason, and all come back at once."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

from slurm_watchdog.base import clock
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.model.protocol import CommandResult, DumpStacks, Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import decode_reply, encode_reply, encode_report, encode_state
from slurm_watchdog.wire.connection import Connection
from slurm_watchdog.wire.frames import HELLO, NEWS, OPENED, ORDERS, REPORT, STATE, TAKEN, Inbox, hello, pack
from slurm_watchdog.wire.stream_server import SILENT_S
from tests.builders.identity_door import Agent, Port, agent, body_of, listening, lost, until

STORM = 400


def ask(port: Port, queue: CommandQueue, node: str, name: str) -> None:
    """Asks a node, and does not wait for what it answers."""

    async def begin() -> None:
        port.asked = asyncio.ensure_future(  # type: ignore[attr-defined]
            queue.ask(node, DumpStacks(id=name, job_id="7", restarts=0), 20.0)
        )
        await asyncio.sleep(0)

    port.wait(begin())


def test_what_is_asked_is_pushed_at_once_and_before_the_first_report_it_waits_for_its_answer() -> None:
    queue = CommandQueue()
    with listening(commands=queue, take=lambda report: Reply(commands=queue.pop(report.node))) as port:
        ask(port, queue, "n1", "early")
        stream = agent(port).controller.open(20.0)
        stream.send(REPORT, body_of("n1"))
        frame = stream.receive()
        assert frame is not None and frame[0] == TAKEN
        assert [each.id for each in decode_reply(frame[1]).commands] == ["early"]
        port.do(lambda: queue.resolve(CommandResult(command_id="early", ok=True)))
        began = time.monotonic()
        ask(port, queue, "n1", "late")
        frame = stream.receive()
        assert time.monotonic() - began < 0.2
        assert frame is not None and frame[0] == ORDERS
        assert [each.id for each in decode_reply(frame[1]).commands] == ["late"]
        assert queue.pop("n1") == ()
        port.do(lambda: queue.resolve(CommandResult(command_id="late", ok=True)))
        stream.close()


def state(sequence: int) -> bytes:
    return encode_state(
        Report(node="n1", boot_id="b", agent_id="a", sequence=sequence, same_as=1, made_s=1.0, state=b"a")
    )


def test_a_state_without_a_report_before_it_or_that_names_none_ends_its_stream() -> None:
    for sent in (
        [(STATE, state(1))],
        [(REPORT, body_of("n1")), (STATE, encode_state(Report(node="n1", boot_id="b", agent_id="a", sequence=2)))],
    ):
        with listening() as port:
            stream = agent(port).controller.open(20.0)
            for kind, body in sent:
                stream.send(kind, body)
            until(lambda: port.outcome("garbage") == 1)
            stream.close()


def test_what_says_that_all_is_as_before_is_answered_only_with_news() -> None:
    said = [Reply(controller_id="c")]
    with listening(take=lambda report: said[0]) as port:
        stream = agent(port).controller.open(20.0)
        stream.send(REPORT, body_of("n1"))
        assert stream.receive() == (TAKEN, encode_reply(said[0]))
        for sequence in range(2, 6):
            stream.send(STATE, state(sequence))
        until(lambda: len(port.reports) == 5)
        said[0] = Reply(controller_id="c", running=("7",))
        stream.send(STATE, state(6))
        frames = [stream.receive()]
        said[0] = Reply(controller_id="c", running=("7",), commands=(DumpStacks(id="a", job_id="7", restarts=0),))
        stream.send(STATE, state(7))
        frames.append(stream.receive())
        assert [frame and (frame[0], decode_reply(frame[1]).running) for frame in frames] == [(NEWS, ("7",))] * 2
        assert [each.sequence for each in port.reports] == [*range(1, 8)]
        stream.close()


def test_an_answer_that_is_as_the_one_before_has_no_body() -> None:
    said = [Reply(controller_id="c")]
    with listening(take=lambda report: said[0]) as port:
        stream = agent(port).controller.open(20.0)
        for sequence, answer in ((1, encode_reply(said[0])), (2, b""), (3, b"")):
            stream.send(REPORT, encode_report(Report(node="n1", boot_id="b", agent_id="a", sequence=sequence)))
            assert stream.receive() == (TAKEN, answer)
        stream.close()


def test_what_a_connection_leaves_is_freed_at_its_end_and_waits_for_no_collector() -> None:
    def left(port: Port) -> int:
        return sum(isinstance(each, Connection) for each in port.do(gc.get_objects))

    with listening() as port:
        gc.disable()
        try:
            for _ in range(3):
                stream = agent(port).controller.open(20.0)
                stream.close()
                until(lambda: not port.do(lambda: port.server.connections))
            until(lambda: left(port) == 0)
        finally:
            gc.enable()


def test_nothing_is_pushed_by_a_controller_that_may_not_be_the_active_one() -> None:
    queue, active = CommandQueue(), [True]
    with listening(commands=queue, is_active=lambda: active[0]) as port:
        one = agent(port)
        assert one.report() == "taken"
        active[0] = False
        ask(port, queue, "n1", "c")
        assert len(queue.pop("n1")) == 1
        assert one.report("n1", 2) == "standby"
        assert agent(port).report() == "standby"
        assert port.outcome("standby") == 2 and len(port.reports) == 1
        port.do(lambda: queue.resolve(CommandResult(command_id="c", ok=True)))


def look(port: Port, seconds: float) -> None:
    """As the port looks for streams that take too long, so much later."""
    port.do(lambda: [each.check(port.server.now() + seconds) for each in list(port.server.connections)] and None)


@pytest.mark.parametrize(("interval_s", "limit_s"), [(5.0, SILENT_S), (60.0, 180.0)])
def test_a_half_open_stream_ends_by_a_deadline_of_its_agents_interval(interval_s: float, limit_s: float) -> None:
    with listening() as port:
        one = agent(port)
        report = Report(node="n1", boot_id="b", agent_id="a", sequence=1, interval_s=interval_s)
        assert one.say(encode_report(report)) == "taken"
        look(port, limit_s - 1.0)
        assert lost(port, "silent") == 0
        look(port, limit_s + 1.0)
        assert lost(port, "silent") == 1
        until(lambda: not port.do(lambda: port.server.connections))
        assert one.report("n1", 2) == "silent", "it hears why, where it still listens"
        assert one.report("n1", 2) == "taken"


def test_a_controller_that_was_stopped_for_a_minute_blames_nobody() -> None:
    with listening() as port:
        one = agent(port)
        assert one.report() == "taken"
        port.do(lambda: port.server.record_lag(60.0))
        look(port, 60.0 + SILENT_S - 1.0)
        assert one.report("n1", 2) == "taken"
        assert lost(port, "silent") == 0


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_jumps_ends_no_stream(jump_s: float) -> None:
    with listening() as port:
        one = agent(port)
        assert one.report() == "taken"
        with clock.simulated(time.monotonic, lambda: time.time() + jump_s):
            look(port, 0.0)
            assert one.report("n1", 2) == "taken"
        look(port, 0.0)
        assert one.report("n1", 3) == "taken"
        assert len(port.door._streams) == 1


def resets(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


ENDS: dict[str, Callable[[Agent, Port], Any]] = {
    "reset": lambda one, port: resets(one.link._sock),  # type: ignore[union-attr]
    "closed_by_agent": lambda one, port: None,
    "closed_by_us": lambda one, port: port.do(port.door._streams["n1"].close),
    "replaced": lambda one, port: agent(port).report("n1", 2),
}


@pytest.mark.parametrize("reason", ENDS)
def test_a_lost_stream_is_counted_by_its_reason_and_said_once(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with listening() as port:
        for _ in range(3):
            one = agent(port)
            assert one.report() == "taken"
            ENDS[reason](one, port)
            one.close()
            until(lambda: not port.do(lambda: port.server.connections))
        assert lost(port, reason) == 3
        said = [each.message for each in caplog.records if "the connection of n1" in each.message]
        assert len(said) == {"closed_by_us": 0, "replaced": 2}.get(reason, 1), "those that were replaced close theirs"


def test_a_node_has_one_stream_and_the_newer_one_counts() -> None:
    with listening() as port:
        first, second = agent(port), agent(port)
        assert (first.report(), second.report("n1", 2)) == ("taken", "taken")
        assert first.report("n1", 3) == "replaced"
        assert lost(port, "replaced") == 1
        assert second.report("n1", 3) == "taken"


async def storm(number: int, sequence: int) -> float:
    """All nodes at once, each with a new stream and a report. How long until the last one was taken."""

    async def one(index: int) -> None:
        node = f"n{index}"
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(pack(HELLO, hello(node)) + pack(REPORT, body_of(node, sequence)))
        inbox, kinds = Inbox(10**6), []
        while len(kinds) < 2:
            if (frame := inbox.take()) is not None:
                kinds.append(frame[0])
                continue
            data = await reader.read(1 << 16)
            assert data, kinds
            inbox.data += data
        assert kinds == [OPENED, TAKEN]
        writer.transport.abort()

    began = time.monotonic()
    await asyncio.gather(*(one(index) for index in range(STORM)))
    return time.monotonic() - began


def test_hundreds_that_come_back_at_once_are_all_taken() -> None:
    with listening() as port:
        for sequence in (1, 2, 3):
            took_s = asyncio.run(storm(port.number, sequence))
            assert took_s < 20.0
            assert len(port.reports) == STORM * sequence
        until(lambda: port.do(lambda: (len(port.server.connections), port.server.limits.total)) == (0, 0))
        assert sum(port.all_refused().values()) == 0
