"""Reports on their way: kept within bounds, oldest first, aged when sent, dropped only when refused for good."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.delivery.channel import DirectChannel, InTurn, Proven
from slurm_watchdog.agent.delivery.sender import Sender, Spool, backoff_s, encode
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.model.observations import LogFile
from slurm_watchdog.model.protocol import DumpStacks, Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import WireError, decode_reply, decode_report, encode_reply, encode_report
from slurm_watchdog.wire.http_client import Connection, InvalidResponse, Response, parse_head, parse_size
from tests.builders.views import process
from tests.trusting import trusting


def report(sequence: int) -> Report:
    return Report(node="n1", boot_id="b", agent_id="a", sequence=sequence)


def test_a_spool_keeps_the_newest_within_its_bytes() -> None:
    spool = Spool(max_bytes=130, max_age_s=60)
    for sequence in range(5):
        spool.put(sequence, encode_report(report(sequence)).ljust(60), now=float(sequence))
    assert (len(spool), spool.size, spool.dropped) == (2, 120, 3)
    first = spool.first()
    assert first is not None
    assert first.sequence == 3
    assert decode_report(first.aged(now=10.0)) == replace(report(3), age_s=7.0)
    assert decode_report(first.aged(now=3.01)) == report(3)


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


class Controller:
    """A controller that answers as the test says."""

    def __init__(self, port: int = 0) -> None:
        self.status = [200]
        self.reply = Reply(commands=(DumpStacks(id="c1", job_id="4", restarts=0),))
        self.reports: list[Report] = []
        controller = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = controller.status.pop(0) if len(controller.status) > 1 else controller.status[0]
                if status == 200:
                    controller.reports.append(decode_report(body))
                answer = encode_reply(controller.reply) if status == 200 else b"no"
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def controller() -> Iterator[Controller]:
    controller = Controller()
    yield controller
    controller.close()


def wait_for_reports(controller: Controller, count: int) -> list[int]:
    end = time.monotonic() + 10
    while len(controller.reports) < count and time.monotonic() < end:
        time.sleep(0.02)
    return [report.sequence for report in controller.reports]


def test_a_report_is_sent_and_its_reply_handed_over(controller: Controller) -> None:
    sender = Sender(controller.url, Spool(10**6, 60), trusting(controller.url))
    sender.start()
    sender.put(report(1))
    assert wait_readable([sender.fileno()], 5)
    assert sender.replies() == [controller.reply]
    assert sender.replies() == []
    sender.stop()


def test_what_is_refused_is_dropped_and_what_fails_is_sent_again(controller: Controller) -> None:
    counts: Counter[str] = Counter()
    controller.status = [400, 503, 200]
    sender = Sender(
        controller.url,
        Spool(10**6, 60),
        trusting(controller.url),
        count=lambda outcome: counts.update([outcome]),
    )
    sender.start()
    for sequence in (1, 2, 3):
        sender.put(report(sequence))
    assert wait_for_reports(controller, 2) == [2, 3]
    sender.stop()
    assert counts == {"rejected": 1, "failed": 1, "sent": 2}
    assert controller.reports[0].age_s > 0.2


def test_reports_wait_for_a_controller_that_comes_later(controller: Controller) -> None:
    port = controller.server.server_port
    controller.close()
    url = f"http://127.0.0.1:{port}"
    sender = Sender(url, Spool(10**6, 60), trusting(url))
    sender.start()
    for sequence in (1, 2, 3):
        sender.put(report(sequence))
    time.sleep(0.3)
    assert "cannot be reached" in sender.problem
    later = Controller(port)
    try:
        assert wait_for_reports(later, 3) == [1, 2, 3]
    finally:
        sender.stop()
        later.close()


@pytest.mark.parametrize("data", [b"", b"[]", b'{"node": 1}', b"[" * 100_000, json.dumps({"version": 2}).encode()])
def test_what_is_no_report_is_refused_with_a_sentence(data: bytes) -> None:
    with pytest.raises(WireError, match="not a report"):
        decode_report(data)


def test_reports_and_replies_survive_the_wire() -> None:
    assert decode_report(encode_report(report(1))) == report(1)
    reply = Reply(commands=(DumpStacks(id="1", job_id="4", restarts=0),))
    assert decode_reply(encode_reply(reply)) == reply
    with pytest.raises(WireError, match="not a reply of a controller"):
        decode_reply(b"{")


def test_another_version_of_the_wire_is_refused() -> None:
    with pytest.raises(WireError, match="report of version 2"):
        decode_report(encode_report(report(1)).replace(b'"node"', b'"version":2,"node"'))


def test_too_large_a_report_is_refused_before_it_is_read() -> None:
    with pytest.raises(WireError, match="the limit is"):
        decode_report(b" " * 9_000_000)


# ---------------------------------------------------------------------------------------- servers that behave badly


class Server:
    """Accepts, reads one request a connection, and does with the socket what the test says."""

    def __init__(self, *behaviours: Callable[[socket.socket], None]) -> None:
        self.behaviours = list(behaviours)
        """One for each connection; the last one for all that follow."""
        self.requests: list[bytes] = []
        self.open: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        count = 0
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            behave = self.behaviours[min(count, len(self.behaviours) - 1)]
            count += 1
            self.open.append(client)
            threading.Thread(target=self._answer, args=(client, behave), daemon=True).start()

    def _answer(self, client: socket.socket, behave: Callable[[socket.socket], None]) -> None:
        try:
            request = b""
            while not is_whole(request):
                data = client.recv(65536)
                if not data:
                    return
                request += data
            self.requests.append(request)
            behave(client)
        except OSError:
            pass  # the sender hung up: that is its right

    def sequences(self) -> list[int]:
        return [decode_report(request.partition(b"\r\n\r\n")[2]).sequence for request in self.requests]

    def close(self) -> None:
        self.listener.close()
        for client in self.open:
            client.close()


def is_whole(request: bytes) -> bool:
    head, end, body = request.partition(b"\r\n\r\n")
    lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    return bool(end) and len(body) >= int(lengths[0].split(b":")[1])


def says(*parts: bytes, then_close: bool = True) -> Callable[[socket.socket], None]:
    def behave(client: socket.socket) -> None:
        for part in parts:
            client.sendall(part)
        if then_close:
            client.close()

    return behave


def trickles(client: socket.socket) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}":
        client.sendall(bytes([byte]))
        time.sleep(0.2)


def never_answers(client: socket.socket) -> None:
    time.sleep(30)


def http(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


FINE = says(http("200 OK", b"{}", "Connection: close"))
PATIENCE_S = 0.4


BAD = {
    "never answers": (never_answers, "time"),
    "a byte every 0.2 s": (trickles, "time"),
    "hangs up at once": (says(), "closed"),
    "hangs up in the headers": (says(b"HTTP/1.1 200 OK\r\nContent-Le"), "broke off"),
    "hangs up in the body": (says(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"), "broke off"),
    "half-closed": (says(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", then_close=False), "time"),
    "no HTTP at all": (says(b"220 mail.example ESMTP\r\n\r\n"), "not HTTP"),
    "binary": (says(os.urandom(3000) + b"\r\n\r\n"), ""),
    "headers without end": (says(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000), "without an end"),
    "200 with garbage": (says(http("200 OK", b"<html>login</html>")), "not a reply of a controller"),
    "200 with a huge answer": (says(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n" + b" " * 9_000_000), "limit"),
    "a length that is none": (says(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}"), "length"),
    "a chunk that is none": (says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}"), "length"),
    "a redirect": (says(http("302 Found", b"", "Location: http://127.0.0.1:1/")), "302"),
    "an error of its own": (says(http("500 Internal Server Error", b"oops")), "500"),
    "too busy": (says(http("429 Too Many Requests", b"", "Retry-After: 0")), "429"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_server_that_misbehaves_holds_up_nobody_and_the_report_comes_again_as_it_was(name: str) -> None:
    behave, words = BAD[name]
    server = Server(behave, FINE)
    counts: Counter[str] = Counter()
    sender = Sender(
        server.url,
        Spool(10**6, 60),
        trusting(server.url),
        count=lambda outcome: counts.update([outcome]),
        answer_s=PATIENCE_S,
    )
    sender.start()
    try:
        began = time.monotonic()
        sender.put(report(1))
        sender.put(report(2))
        assert time.monotonic() - began < 0.2  # the loop never waits
        end = time.monotonic() + 10
        while not sender.problem and time.monotonic() < end:
            time.sleep(0.002)
        problem = sender.problem
        while counts["sent"] < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert words in problem
        assert server.sequences() == [1, 1, 2]
        assert counts == {"failed": 1, "sent": 2}
    finally:
        sender.stop()
        server.close()


@pytest.mark.parametrize("status", ["400 Bad Request", "413 Content Too Large", "403 Forbidden"])
def test_a_report_that_is_refused_for_good_is_dropped_and_the_next_one_sent(status: str) -> None:
    server = Server(says(http(status, b"no", "Connection: close")), FINE)
    counts: Counter[str] = Counter()
    sender = Sender(server.url, Spool(10**6, 60), trusting(server.url), count=lambda outcome: counts.update([outcome]))
    sender.start()
    sender.put(report(1))
    sender.put(report(2))
    sender.stop()
    server.close()
    assert server.sequences() == [1, 2]
    assert counts == {"rejected": 1, "sent": 1}


def test_a_controller_that_asks_for_patience_gets_it() -> None:
    server = Server(says(http("503 Service Unavailable", b"", "Retry-After: 2")), FINE)
    sender = Sender(server.url, Spool(10**6, 60), trusting(server.url))
    sender.start()
    sender.put(report(1))
    began = time.monotonic()
    assert wait_readable([sender.fileno()], 10)
    assert time.monotonic() - began > 1.8
    sender.stop()
    server.close()


def test_a_connection_is_kept_and_one_that_the_server_has_closed_costs_no_failure(
    controller: Controller,
) -> None:
    counts: Counter[str] = Counter()
    server = Server(says(http("200 OK", b"{}"), then_close=True))  # closes without saying that it will
    sender = Sender(server.url, Spool(10**6, 60), trusting(server.url), count=lambda outcome: counts.update([outcome]))
    sender.start()
    for sequence in (1, 2, 3):
        sender.put(report(sequence))
        time.sleep(0.1)
    sender.stop()
    server.close()
    assert (server.sequences(), counts) == ([1, 2, 3], {"sent": 3})


def test_an_answer_in_chunks_and_one_without_length_are_understood() -> None:
    chunked = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;x=y\r\n{\r\n1\r\n}\r\n0\r\nA: b\r\n\r\n"
    server = Server(says(chunked), says(b"HTTP/1.0 200 OK\r\n\r\n{}"), FINE)
    counts: Counter[str] = Counter()
    sender = Sender(server.url, Spool(10**6, 60), trusting(server.url), count=lambda outcome: counts.update([outcome]))
    sender.start()
    for sequence in (1, 2):
        sender.put(report(sequence))
    sender.stop()
    server.close()
    assert (server.sequences(), counts) == ([1, 2], {"sent": 2})


def test_a_reply_that_says_nothing_new_wakes_nobody_and_is_there_all_the_same(controller: Controller) -> None:
    controller.reply = Reply(controller_id="c", running=("4",))
    sender = Sender(controller.url, Spool(10**6, 60), trusting(controller.url))
    sender.start()
    sender.put(report(1))
    assert wait_readable([sender.fileno()], 5)
    assert sender.replies() == [controller.reply]
    sender.put(report(2))
    assert wait_for_reports(controller, 2) == [1, 2]
    assert not wait_readable([sender.fileno()], 0.2)
    assert sender.replies() == [controller.reply]
    controller.reply = Reply(controller_id="c", running=())
    sender.put(report(3))
    assert wait_readable([sender.fileno()], 5)
    sender.stop()


def test_a_command_that_comes_twice_wakes_twice(controller: Controller) -> None:
    sender = Sender(controller.url, Spool(10**6, 60), trusting(controller.url))
    sender.start()
    for sequence in (1, 2):
        sender.put(report(sequence))
        assert wait_readable([sender.fileno()], 5)
        assert sender.replies() == [controller.reply]
    sender.stop()


def test_a_name_look_up_that_hangs_holds_up_neither_the_loop_nor_the_end() -> None:
    for_ever = threading.Event()

    def hang(*_: object, **__: object) -> socket.socket:
        for_ever.wait(20)
        raise OSError("never")

    sender = Sender(
        "http://controller:9765",
        Spool(1000, 60),
        DirectChannel(Connection("http://controller:9765", 100, hang)),
    )
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
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    counts: Counter[str] = Counter()
    sender = Sender(url, Spool(5000, 60), trusting(url), count=lambda outcome: counts.update([outcome]))
    sender.start()
    for sequence in range(1000):
        sender.put(report(sequence))
    assert 0 < sender.spool_bytes <= 5000
    assert counts["expired"] > 800
    sender.stop(0.1)


def test_a_file_name_that_is_no_utf8_keeps_no_report_from_being_sent() -> None:
    name = os.fsdecode(b"/shared/caf\xe9.log")
    odd = replace(report(1), logs=(LogFile(job_id="4", path=name),), problems=("caf\udce9",))
    assert decode_report(encode(odd)).logs[0].path == "/shared/caf?.log"


@pytest.mark.parametrize("head", [b"", b"HTTP/2 200", b"HTTP/1.1 2000 OK", b"HTTP/1.1 abc", b"HTTP/1.1", b"\xff\xfe"])
def test_what_is_no_status_line_is_refused(head: bytes) -> None:
    with pytest.raises(InvalidResponse):
        parse_head(head)


@pytest.mark.parametrize(
    ("text", "base"), [(b"", 10), (b"-1", 10), (b"1_0", 10), (b"a", 10), (b"g", 16), (b"9" * 17, 10)]
)
def test_what_is_no_length_is_refused(text: bytes, base: int) -> None:
    with pytest.raises(InvalidResponse):
        parse_size(text, base)


# ---------------------------------------------------------------------------------------- reports of changes


def moved(sequence: int) -> Report:
    return replace(report(sequence), processes=(process(0), process(1, cpu_s=float(sequence))))


def one_by_one(sender: Sender, controller: Controller, sequences: range) -> None:
    """Each report is taken before the next one is made, as between ticks."""
    for sequence in sequences:
        told = len(controller.reports)
        sender.put(moved(sequence))
        wait_for_reports(controller, told + 1)
        end = time.monotonic() + 10
        while sender.spool_bytes and time.monotonic() < end:
            time.sleep(0.005)


def kinds(controller: Controller) -> list[str]:
    return [
        f"{each.sequence} {'full' if each.changes is None else f'since {each.changes.since}'}"
        for each in controller.reports
    ]


def test_a_controller_that_understands_changes_gets_them_once_it_has_a_full_report(
    controller: Controller,
) -> None:
    controller.reply = Reply(takes_changes=True)
    sender = Sender(controller.url, Spool(10**6, 60), trusting(controller.url))
    sender.start()
    one_by_one(sender, controller, range(1, 4))
    sender.stop()
    assert kinds(controller) == ["1 full", "2 since 1", "3 since 2"]
    assert [len(each.processes) for each in controller.reports] == [2, 0, 0]


def test_an_older_controller_gets_full_reports_for_ever(controller: Controller) -> None:
    controller.reply = Reply()
    sender = Sender(controller.url, Spool(10**6, 60), trusting(controller.url))
    sender.start()
    one_by_one(sender, controller, range(1, 4))
    sender.stop()
    assert kinds(controller) == ["1 full", "2 full", "3 full"]


def test_a_controller_that_lacks_the_report_before_is_told_the_same_in_full_at_once(
    controller: Controller,
) -> None:
    controller.reply = Reply(takes_changes=True)
    sender = Sender(controller.url, Spool(10**6, 60), trusting(controller.url))
    sender.start()
    one_by_one(sender, controller, range(1, 3))
    controller.reply = Reply(takes_changes=True, want_full=True)
    sender.put(moved(3))
    wait_for_reports(controller, 4)
    controller.reply = Reply(takes_changes=True)
    one_by_one(sender, controller, range(4, 6))
    sender.stop()
    assert kinds(controller)[:4] == ["1 full", "2 since 1", "3 since 2", "3 full"]
    assert replace(controller.reports[3], age_s=0.0) == moved(3)
    assert kinds(controller)[-1] == "5 since 4"


def test_after_an_error_the_next_attempt_and_the_next_report_are_full(controller: Controller) -> None:
    controller.reply = Reply(takes_changes=True)
    sender = Sender(controller.url, Spool(10**6, 60), trusting(controller.url))
    sender.start()
    one_by_one(sender, controller, range(1, 2))
    controller.status = [503, 200]
    one_by_one(sender, controller, range(2, 4))
    sender.stop()
    assert kinds(controller) == ["1 full", "2 full", "3 since 2"]


def test_reports_that_wait_are_full_whoever_takes_them(controller: Controller) -> None:
    controller.reply = Reply(takes_changes=True)
    sender = Sender(controller.url, Spool(10**6, 60), trusting(controller.url))
    for sequence in (1, 2, 3):
        sender.put(moved(sequence))
    sender.start()
    wait_for_reports(controller, 3)
    sender.stop()
    assert kinds(controller) == ["1 full", "2 full", "3 full"]


def test_every_so_often_a_report_is_full_for_no_reason(controller: Controller) -> None:
    controller.reply = Reply(takes_changes=True)
    sender = Sender(controller.url, Spool(10**6, 60), trusting(controller.url), full_every=2)
    sender.start()
    one_by_one(sender, controller, range(1, 6))
    sender.stop()
    assert kinds(controller) == ["1 full", "2 since 1", "3 since 2", "4 full", "5 since 4"]


class Scripted:
    """A channel that answers with a status, or raises where it is 0."""

    def __init__(self, name: str, status: int, asked: list[str]):
        self.name, self.status, self.asked = name, status, asked

    def post(
        self, path: str, body: bytes, headers: dict[str, str], connect_s: float, answer_s: float
    ) -> Proven | Response:
        self.asked.append(self.name)
        if not self.status:
            raise ConnectionRefusedError
        return Response(self.status, "", {}, b"")

    def close(self) -> None: ...

    def certificates(self) -> dict[str, float]:
        return {}

    def recheck_files(self) -> None: ...


@pytest.mark.parametrize(
    ("status", "then"),
    [(503, "b"), (0, "b"), (400, "a"), (429, "a")],
    ids=["a standby", "nobody listens", "a bad report", "too often"],
)
def test_another_controller_is_asked_after_what_is_about_the_controller_and_not_the_report(
    status: int, then: str
) -> None:
    asked: list[str] = []
    both = InTurn([Scripted("a", status, asked), Scripted("b", 404, asked)])
    for _ in range(3):
        try:
            both.post("/v1/report", b"", {}, 1.0, 1.0)
        except ConnectionRefusedError:
            continue
    assert asked == ["a", then, then]
