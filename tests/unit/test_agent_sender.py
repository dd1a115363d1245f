"""Reports on their way: kept within bounds, oldest first, aged when sent, dropped only when refused for good."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from msgspec.structs import replace

from watchdog.agent.sender import Sender, Spool, backoff_s
from watchdog.model import DumpStacks, Reply, Report
from watchdog.runner import wait_readable
from watchdog.wire import WireError, decode_reply, decode_report, encode_reply, encode_report


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
        self.tokens: list[str] = []
        controller = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                controller.tokens.append(self.headers.get("Authorization", ""))
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


def test_a_report_is_sent_and_its_reply_handed_over(controller: Controller, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    sender = Sender(controller.url, Spool(10**6, 60), str(tmp_path / "token"))
    sender.start()
    sender.put(report(1))
    assert wait_readable([sender.fileno()], 5)
    assert sender.replies() == [controller.reply]
    assert controller.tokens == ["Bearer secret"]
    assert sender.replies() == []
    sender.stop()


def test_what_is_refused_is_dropped_and_what_fails_is_sent_again(controller: Controller) -> None:
    counts: Counter[str] = Counter()
    controller.status = [400, 503, 200]
    sender = Sender(controller.url, Spool(10**6, 60), count=lambda outcome: counts.update([outcome]))
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
    sender = Sender(f"http://127.0.0.1:{port}", Spool(10**6, 60))
    sender.start()
    for sequence in (1, 2, 3):
        sender.put(report(sequence))
    time.sleep(0.3)
    assert "can't be reached" in sender.problem
    later = Controller(port)
    try:
        assert wait_for_reports(later, 3) == [1, 2, 3]
    finally:
        sender.stop()
        later.close()


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"node": 1}', b"[" * 100_000, json.dumps({"version": 2}).encode()]
)
def test_what_is_no_report_is_refused_with_a_sentence(data: bytes) -> None:
    with pytest.raises(WireError, match="no report"):
        decode_report(data)


def test_reports_and_replies_survive_the_wire() -> None:
    assert decode_report(encode_report(report(1))) == report(1)
    reply = Reply(commands=(DumpStacks(id="1", job_id="4", restarts=0),))
    assert decode_reply(encode_reply(reply)) == reply
    with pytest.raises(WireError, match="no reply of a controller"):
        decode_reply(b"{")


def test_another_version_of_the_wire_is_refused() -> None:
    with pytest.raises(WireError, match="report of version 2"):
        decode_report(encode_report(report(1)).replace(b'"node"', b'"version":2,"node"'))


def test_too_large_a_report_is_refused_before_it_is_read() -> None:
    with pytest.raises(WireError, match="the limit is"):
        decode_report(b" " * 9_000_000)
