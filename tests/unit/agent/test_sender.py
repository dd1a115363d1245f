"""Reports on their way: kept within bounds, oldest first, aged when sent, dropped only when refused for good; and
what the controller says at any time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
import pytest
from msgspec import inspect
from msgspec.structs import replace

from slurm_watchdog.agent.courier.streams import AuthenticationFailed, Controller, TcpController, TlsController
from slurm_watchdog.agent.delivery.sender import backoff_s, encode
from slurm_watchdog.agent.delivery.spool import Spool, Waiting
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.identity.secret_files import TlsFiles
from slurm_watchdog.model.observations import LogFile
from slurm_watchdog.model.protocol import DumpStacks, Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import WireError, decode_reply, decode_report, encode_reply, encode_report, encode_state
from slurm_watchdog.wire.frames import (
    BYE,
    HELLO,
    LENGTH,
    MAGIC,
    OPENED,
    ORDERS,
    REPORT,
    TAKEN,
    WELCOME,
    Inbox,
    pack,
    words,
)
from tests.builders.identity_door import Port, listening, until, url
from tests.builders.sending import DrivenSender, link_to, sending
from tests.builders.wire_fill import filled

ASKED = DumpStacks(id="c1", job_id="4", restarts=0)


def report(sequence: int) -> Report:
    return Report(node="n1", boot_id="b", agent_id="a", sequence=sequence)


def test_a_spool_keeps_the_newest_within_its_bytes() -> None:
    size = len(encode_report(report(1)))
    spool = Spool(max_bytes=2 * size + 10, max_age_s=60)
    for sequence in range(5):
        spool.put(sequence, encode_report(report(sequence)), now=float(sequence))
    assert (len(spool), spool.size, spool.dropped) == (2, 2 * size, 3)
    first = spool.first()
    assert first is not None
    assert first.sequence == 3
    assert decode_report(first.aged(now=10.0)) == replace(report(3), age_s=7.0)
    assert decode_report(first.aged(now=3.01)) == report(3)
    fields = filled(inspect.type_info(Report))
    del fields["age_s"]
    whole = msgspec.convert(fields, Report)
    assert decode_report(Waiting(0.0, 3, encode_report(whole)).aged(now=2.0)) == replace(whole, age_s=2.0)


def test_a_spool_keeps_the_newest_however_large_and_old() -> None:
    spool = Spool(max_bytes=10, max_age_s=1)
    spool.put(1, b" " * 40, now=0.0)
    spool.expire(now=100.0)
    assert len(spool) == 1


def test_a_spool_drops_what_is_too_old() -> None:
    spool = Spool(max_bytes=1000, max_age_s=60)
    for sequence in range(5):
        spool.put(sequence, b" " * 40, now=sequence * 20.0)
    spool.expire(now=100.0)
    first = spool.first()
    assert first is not None
    assert first.sequence == 2


def test_what_was_sent_is_forgotten_once() -> None:
    spool = Spool(max_bytes=1000, max_age_s=60)
    spool.put(1, b" " * 40, now=0.0)
    spool.put(2, b" " * 40, now=0.0)
    spool.done(1)
    spool.done(1)
    assert (len(spool), spool.size) == (1, 40)


def test_waits_grow_to_five_seconds_and_no_further() -> None:
    assert [backoff_s(failures, 1.0) for failures in range(8)] == [0, 0.5, 1, 2, 4, 5, 5, 5]
    assert backoff_s(5, 0.0) == 2.5


def at(port: Port) -> Controller:
    return TcpController(url(port), "n1")


def sequences(port: Port) -> list[int]:
    return [each.sequence for each in port.reports]


def test_a_report_is_sent_and_its_reply_handed_over() -> None:
    said = Reply(controller_id="c", commands=(ASKED,))
    with listening(take=lambda report: said) as port, sending(at(port)) as (sender, _):
        sender.put(report(1))
        assert wait_readable([sender.fileno()], 5)
        assert sender.replies() == [said]
        assert sender.replies() == []


def test_a_report_that_says_that_all_is_as_before_waits_for_no_answer_and_its_news_comes() -> None:
    said = [Reply(controller_id="c", commands=(ASKED,))]
    with listening(take=lambda report: said[0]) as port, sending(at(port)) as (sender, counts):
        sender.put(report(1))
        until(lambda: counts["sent"] == 1)
        assert sender.replies() == said
        said[0] = Reply(controller_id="c")
        for sequence in (2, 3):
            sender.put(replace(report(sequence), same_as=1))
        until(lambda: sequences(port) == [1, 2, 3])
        until(lambda: sender.spool_bytes == 0)
        assert set(sender.replies()) == {Reply(controller_id="c")}, "what it was asked is not asked again"
        said[0] = Reply(controller_id="c", running=("7",))
        sender.put(replace(report(4), same_as=1))
        until(lambda: said[0] in sender.replies())


def test_what_one_stream_was_told_does_not_hold_on_the_next() -> None:
    spool = Spool()
    spool.put(1, encode_state(replace(report(1), same_as=7)), time.monotonic(), is_state=True)
    with listening(take=lambda report: Reply(controller_id="c")) as port, sending(at(port), spool=spool) as (sender, _):
        sender.put(report(2))
        until(lambda: sequences(port) == [2])
        said: list[Reply] = []
        until(lambda: bool(said.extend(sender.replies()) or said))
        assert set(said) == {Reply(controller_id="c")}, "no job is taken for one that is not watched any more"


def test_a_state_follows_its_report_and_says_how_long_it_waited() -> None:
    spool = Spool()
    spool.put(1, encode_report(report(1)), time.monotonic())
    spool.put(2, encode_state(replace(report(2), same_as=1, state=b"a")), time.monotonic() - 30.0, is_state=True)
    with listening() as port, sending(at(port), spool=spool):
        until(lambda: sequences(port) == [1, 2])
        whole, small = port.reports
        assert 30.0 <= small.age_s < 40.0
        assert (small.same_as, small.state, small.agent_id, small.boot_id) == (1, b"a", whole.agent_id, whole.boot_id)


def test_a_report_that_is_on_its_way_while_the_courier_is_renewed_goes_with_the_next_one_at_once() -> None:
    with listening() as port, sending(at(port)) as (sender, counts):
        sender.put(report(1))
        until(lambda: counts["sent"] == 1)
        for sequence in (2, 3, 4):
            began = time.monotonic()
            sender.put(report(sequence))
            sender.renew()
            until(lambda: sequences(port)[-1] == sequence)  # noqa: B023 - at once
            assert time.monotonic() - began < 10


def test_what_is_asked_comes_at_once_between_two_reports() -> None:
    with listening() as port, sending(at(port)) as (sender, counts):
        sender.put(report(1))
        until(lambda: counts["sent"] == 1)
        sender.replies()
        (stream,) = port.door._streams.values()
        began = time.monotonic()
        port.do(lambda: stream.send(ORDERS, encode_reply(Reply(commands=(ASKED,)))))
        assert wait_readable([sender.fileno()], 5)
        assert time.monotonic() - began < 0.2
        assert (sender.replies(), [each.commands for each in sender.orders()]) == ([], [(ASKED,)])


def test_what_is_refused_is_dropped_and_what_fails_is_sent_again() -> None:
    failing = [True]

    def take(report: Report) -> Reply:
        if report.sequence == 2 and failing.pop():
            raise RuntimeError("a defect")
        return Reply()

    spool = Spool()
    spool.put(1, b"no report", time.monotonic())
    failing.append(False)
    failing.reverse()
    with listening(take=take) as port, sending(at(port), spool=spool) as (sender, counts):
        for sequence in (2, 3):
            sender.put(report(sequence))
        until(lambda: counts["sent"] == 2)
        assert counts == {"rejected": 1, "failed": 1, "sent": 2}
        assert sender.lost == 1
        assert sequences(port) == [2, 2, 3]
        assert port.reports[1].age_s > 0.2
        assert (port.outcome("garbage"), port.outcome("failed")) == (1, 1)


def test_reports_wait_for_a_controller_that_comes_later_and_come_in_order_and_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.getsockname()[1]
    with ExitStack() as stack:
        sender, _ = stack.enter_context(sending(TcpController(f"http://127.0.0.1:{number}", "n1")))
        for sequence in (1, 2, 3):
            sender.put(report(sequence))
        until(lambda: "cannot be reached" in sender.problem)
        port = stack.enter_context(listening(number=number))
        until(lambda: sequences(port) == [1, 2, 3])


@pytest.mark.parametrize("data", [b"", b"[]", b"\x81\xa4node\x01", b"\x91" * 100_000, b"\x81\xa7version\x02"])
def test_what_is_no_report_is_refused_with_a_sentence(data: bytes) -> None:
    with pytest.raises(WireError, match="not a report"):
        decode_report(data)


def test_reports_and_replies_survive_the_wire() -> None:
    assert decode_report(encode_report(report(1))) == report(1)
    reply = Reply(commands=(ASKED,))
    assert decode_reply(encode_reply(reply)) == reply
    with pytest.raises(WireError, match="not a reply of a controller"):
        decode_reply(b"{")


def test_another_version_of_the_report_is_refused() -> None:
    with pytest.raises(WireError, match="report of version 2"):
        decode_report(encode_report(replace(report(1), version=2)))


def test_too_large_a_report_is_refused_before_it_is_read() -> None:
    with pytest.raises(WireError, match="the limit is"):
        decode_report(b" " * 9_000_000)


# ---------------------------------------------------------------------------------------- servers that behave badly


class Server:
    """Accepts, reads a HELLO and, once it is opened, reports; does with the socket what the test says."""

    def __init__(self, *behaviours: Callable[[socket.socket, bytes], None]) -> None:
        """`behaviours`: one for each stream, called with each frame's kind; the last one for all that follow."""
        self.behaviours = list(behaviours)
        self.sequences: list[int] = []
        self.streams = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.place = TcpController(f"http://127.0.0.1:{self.listener.getsockname()[1]}", "n1")
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            behave = self.behaviours[min(self.streams, len(self.behaviours) - 1)]
            self.streams += 1
            threading.Thread(target=self._answer, args=(client, behave), daemon=True).start()

    def _answer(self, client: socket.socket, behave: Callable[[socket.socket, bytes], None]) -> None:
        inbox = Inbox(10**7)
        with client:
            try:
                while True:
                    while (frame := inbox.take()) is None:
                        if not (data := client.recv(65536)):
                            return
                        inbox.data += data
                    kind, body = frame
                    if kind == HELLO:
                        assert words(body.removeprefix(MAGIC), 3)[1] == "n1"
                    else:
                        self.sequences.append(decode_report(body).sequence)
                    behave(client, kind)
            except OSError:
                pass  # the sender hung up: that is its right


def fine(client: socket.socket, kind: bytes) -> None:
    client.sendall(pack(OPENED, b"") if kind == HELLO else pack(TAKEN, encode_reply(Reply())))


Behaviour = Callable[[socket.socket, bytes], None]


def greets_with(*parts: bytes, closes: bool = True) -> Behaviour:
    """Says this to a HELLO."""

    def behave(client: socket.socket, kind: bytes) -> None:
        for part in parts:
            client.sendall(part)
        if closes:
            client.shutdown(socket.SHUT_RDWR)

    return behave


def answers_with(*parts: bytes, closes: bool = True) -> Behaviour:
    """Opens the stream, and says this to a report."""
    said = greets_with(*parts, closes=closes)
    return lambda client, kind: fine(client, kind) if kind == HELLO else said(client, kind)


def trickles(client: socket.socket, kind: bytes) -> None:
    for byte in pack(OPENED, b""):
        client.sendall(bytes([byte]))
        time.sleep(0.2)


def bye(code: str) -> bytes:
    return pack(BYE, f"{code} because of {code}".encode())


PATIENCE_S = 0.4
OLD = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}"
BAD: dict[str, tuple[Behaviour, str]] = {
    "never answers": (greets_with(closes=False), "time"),
    "a byte every 0.2 s": (trickles, "time"),
    "hangs up at once": (greets_with(), "closed"),
    "hangs up in a frame": (greets_with(LENGTH.pack(9) + b"o"), "closed"),
    "half-closed": (greets_with(LENGTH.pack(9) + b"o", closes=False), "time"),
    "is of release 0.1": (greets_with(OLD), "speaks HTTP, as a controller of release 0.1 does: upgrade it"),
    "no controller at all": (greets_with(b"220 mail.example ESMTP\r\n\r\n"), "the limit is"),
    "binary": (greets_with(b"\xff" + os.urandom(3000)), "the limit is"),
    "a huge frame": (greets_with(LENGTH.pack(10**7) + b" " * 10**6), "the limit is"),
    "an empty frame": (greets_with(LENGTH.pack(0)), "empty"),
    "asks for MUNGE": (greets_with(pack(WELCOME, b"c")), "security.mode"),
    "refuses the node": (greets_with(bye("wrong_node")), "because of wrong_node"),
    "refuses it in a way that is about reports": (greets_with(bye("garbage")), "because of garbage"),
    "answers nothing to a report": (answers_with(closes=False), "time"),
    "hangs up in an answer": (answers_with(), "closed"),
    "answers garbage": (answers_with(pack(TAKEN, b"<html>login</html>")), "not a reply of a controller"),
    "answers a report with a report": (answers_with(pack(REPORT, b"")), "nothing asked for"),
    "is busy": (answers_with(bye("busy")), "because of busy"),
    "says bye in no words": (answers_with(pack(BYE, b"\x01")), "a frame of 1 words"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_server_that_misbehaves_holds_up_nobody_and_the_report_comes_again_as_it_was(name: str) -> None:
    behave, words = BAD[name]
    server = Server(behave, fine)
    with sending(server.place, answer_s=PATIENCE_S) as (sender, counts):
        began = time.monotonic()
        sender.put(report(1))
        sender.put(report(2))
        assert time.monotonic() - began < 0.2  # the loop never waits
        until(lambda: sender.problem)
        problem = sender.problem
        until(lambda: counts["sent"] == 2, 10)
        assert words in problem
        assert server.sequences[-2:] == [1, 2]
        assert server.sequences[:-2] in ([], [1])
        assert counts == {"failed": 1, "sent": 2}
    server.listener.close()


@pytest.mark.parametrize("code", ["garbage", "too_large"])
def test_a_report_that_is_refused_for_good_is_dropped_and_the_next_one_sent(code: str) -> None:
    server = Server(answers_with(bye(code)), fine)
    with sending(server.place) as (sender, counts):
        sender.put(report(1))
        sender.put(report(2))
        until(lambda: counts["sent"] == 1)
        assert server.sequences == [1, 2]
        assert (counts, sender.lost) == ({"rejected": 1, "sent": 1}, 1)


def test_a_stream_is_kept_and_one_that_ends_between_two_reports_is_said_and_costs_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with listening() as port, sending(at(port)) as (sender, counts):
        for sequence in (1, 2, 3):
            sender.put(report(sequence))
            until(lambda count=sequence: counts["sent"] == count)  # type: ignore[misc]
            if sequence == 2:
                port.do(next(iter(port.door._streams.values())).close)
                until(lambda: sender.problem)
        assert sequences(port) == [1, 2, 3]
        assert counts == {"sent": 3}
        assert "cannot be reached: it closed the connection" in caplog.text


def test_a_reply_that_says_nothing_new_is_there_all_the_same() -> None:
    said = [Reply(controller_id="c", running=("4",))]
    with listening(take=lambda report: said[0]) as port, sending(at(port)) as (sender, counts):
        sender.put(report(1))
        assert wait_readable([sender.fileno()], 5)
        assert sender.replies() == said
        sender.put(report(2))
        until(lambda: counts["sent"] == 2)
        until(lambda: sender.replies() == said)
        said[0] = Reply(controller_id="c", running=())
        sender.put(report(3))
        assert wait_readable([sender.fileno()], 5)


def test_a_command_that_comes_twice_wakes_twice() -> None:
    said = Reply(commands=(ASKED,))
    with listening(take=lambda report: said) as port, sending(at(port)) as (sender, _):
        for sequence in (1, 2):
            sender.put(report(sequence))
            assert wait_readable([sender.fileno()], 5)
            assert sender.replies() == [said]


def test_a_name_look_up_that_hangs_holds_up_neither_the_loop_nor_the_end() -> None:
    for_ever = threading.Event()

    class Hanging(Controller):
        def connect(self) -> socket.socket:
            for_ever.wait(20)
            raise OSError("never")

    sender = DrivenSender(Spool(1000, 60), link_to([Hanging("controller:9765", "n1")]))
    sender.start()
    began = time.monotonic()
    for sequence in range(200):
        sender.put(report(sequence))
    assert sender.spool_bytes <= 1000
    sender.stop(0.2)
    assert time.monotonic() - began < 2
    for_ever.set()


def test_nobody_listens_and_the_spool_stays_within_its_bytes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = TcpController(f"http://127.0.0.1:{listener.getsockname()[1]}", "n1")
    with sending(place, spool=Spool(5000, 60)) as (sender, counts):
        for sequence in range(1000):
            sender.put(report(sequence))
        assert 0 < sender.spool_bytes <= 5000
        assert counts["expired"] > 800


def test_a_file_name_that_is_no_utf8_keeps_no_report_from_being_sent() -> None:
    name = os.fsdecode(b"/shared/caf\xe9.log")
    odd = replace(report(1), logs=(LogFile(job_id="4", path=name),), problems=("caf\udce9",))
    assert decode_report(encode(odd)).logs[0].path == "/shared/caf?.log"


@pytest.mark.parametrize("why", ["standby", "busy", "wrong_node"])
def test_another_controller_is_asked_after_whatever_kept_one_from_taking_a_report(why: str) -> None:
    one, other = Server(greets_with(bye(why))), Server(fine)
    with sending(one.place, other.place) as (sender, counts):
        for sequence in (1, 2, 3):
            sender.put(report(sequence))
        until(lambda: counts["sent"] == 3)
        assert (one.streams, other.streams, other.sequences) == (1, 1, [1, 2, 3])


def test_a_url_that_does_not_fit_the_mode_is_said_before_anything_is_sent(tmp_path: object) -> None:
    with pytest.raises(AuthenticationFailed, match="begin with https://"):
        TlsController("http://127.0.0.1:1", "n1", TlsFiles("/nonexistent", "agent")).open(1.0)
