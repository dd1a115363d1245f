"""PyTorch's debug server is asked through a port of the job alone; its page tells what each rank recorded."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slurm_watchdog.agent.evidence.debug_server import ask_debug_server
from slurm_watchdog.agent.evidence.nccl_ras import find_listeners
from slurm_watchdog.agent.proc.files import read_stat
from slurm_watchdog.agent.workers.answer_types import Listeners
from slurm_watchdog.agent.workers.request_types import AskDebugServer, FindListeners
from slurm_watchdog.agent.workers.worker_state import WorkerState
from slurm_watchdog.analysis.collective_order import order_of
from slurm_watchdog.analysis.collective_words import words_of
from slurm_watchdog.model.collective_records import CollectiveRecord
from slurm_watchdog.parse.debug_server import MAX_BYTES, parse_debug_server

PAGE = (Path(__file__).parents[2] / "captures" / "debug_server" / "2.13.html").read_bytes()
"""Of three ranks with gloo, of which rank 1 has not come to the fourth all-reduce."""
ASKED_AT = 1795754760.0
"""A minute later."""
HEAD = b"HTTP/1.0 200 OK\r\nContent-type: text/html\r\n\r\n"


def test_the_page_of_a_real_server_tells_which_rank_has_not_come() -> None:
    records = parse_debug_server(PAGE, ASKED_AT)
    assert [record.rank for record in records] == [0, 1, 2]
    assert words_of(order_of(records)) == "Rank 1 has not entered all_reduce 4 of default_pg; 2 of 3 ranks wait."


def test_a_rank_that_did_not_answer_and_one_that_cannot_be_read_are_left_out() -> None:
    silent = PAGE.replace(b'<pre>{\n  "comm_lib_version"', b"<p>Failed to fetch: status=408</p><pre>Timeout", 1)
    assert [record.rank for record in parse_debug_server(silent, ASKED_AT)] == [1, 2]
    spoilt = PAGE.replace(b'"entries": [', b'"entries": [[', 1)
    assert [record.rank for record in parse_debug_server(spoilt, ASKED_AT)] == [1, 2]


@pytest.mark.parametrize("body", [b"", b"<html>another page</html>", b" " * (MAX_BYTES + 1)])
def test_what_is_no_such_page_is_refused_with_a_reason(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"page|bytes"):
        parse_debug_server(body, ASKED_AT)


@contextmanager
def serving(answer: bytes, *, ends: bool = True) -> Iterator[tuple[int, list[bytes]]]:
    """A server in this process: its port, and what it is asked."""
    asked: list[bytes] = []
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                asked.append(connection.recv(4096))
                connection.sendall(answer)
                if not ends:
                    over.wait(30)

        threading.Thread(target=run, daemon=True).start()
        try:
            yield listener.getsockname()[1], asked
        finally:
            over.set()


def listeners(port: int) -> Listeners:
    own = os.getpid()
    return find_listeners(FindListeners([(own, read_stat(own).start_ticks)], port), WorkerState(own_uid=os.getuid()))


def ask(port: int, deadline_s: float = 12.0, found: Listeners | None = None) -> list[CollectiveRecord]:
    return ask_debug_server(AskDebugServer(found or listeners(port), port, deadline_s), WorkerState())


def test_one_page_is_asked_for_and_its_records_come() -> None:
    with serving(HEAD + PAGE) as (port, asked):
        assert [record.rank for record in ask(port)] == [0, 1, 2]
    assert asked[0].startswith(b"GET /fr_trace_json HTTP/1.0\r\n")


@pytest.mark.parametrize(
    ("answer", "why"),
    [(b"HTTP/1.0 500 no\r\n\r\n", "answered 'HTTP/1.0 500 no'"), (HEAD + b"<html></html>", "no page"), (b"\0" * 99, "answered")],
)  # fmt: skip
def test_another_answer_is_a_reason(answer: bytes, why: str) -> None:
    with serving(answer) as (port, _), pytest.raises(OSError, match=why):
        ask(port)


def test_who_does_not_end_is_given_up_in_time() -> None:
    with serving(HEAD, ends=False) as (port, _), pytest.raises(TimeoutError):
        ask(port, deadline_s=0.3)


def test_a_port_that_others_share_and_one_of_another_network_are_not_asked() -> None:
    with serving(HEAD + PAGE) as (port, asked):
        mine = listeners(port)
        shared = Listeners(addresses=mine.addresses, shared=True, namespace=mine.namespace)
        elsewhere = Listeners(addresses=mine.addresses, shared=False, namespace="net:[1]")
        for found in (shared, elsewhere):
            with pytest.raises(OSError, match=r"shared|network of its own"):
                ask(port, found=found)
    assert asked == []
