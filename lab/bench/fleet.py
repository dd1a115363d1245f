"""`python -m lab.bench.fleet`: thousands of agents in one process, for the controller's benchmark.

Each agent holds a connection of its own, from an address of its own, and reports as a node with 8 ranks on 8
GPUs does: numbers that move with every look, and on the first node of each job the lines of its log and its
checkpoints. What is the same on all nodes in one round is made once, so that this process costs little beside
the one that is measured. Commands come as JSON lines on standard input, answers go as JSON lines to standard
output.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import resource
import select
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lab.bench import fleet_munge, fleet_tls
from lab.bench.fleet_reports import WHOLE_EVERY, Shape, events_of, fault_of, logs_of, report_of, small_of
from slurm_watchdog.agent.delivery.sender import backoff_s
from slurm_watchdog.model.observations import NodeEvent
from slurm_watchdog.model.report import Report, is_state
from slurm_watchdog.wire.codec import decode_reply, encode_report, encode_state, with_age
from slurm_watchdog.wire.frames import (
    BYE,
    HELLO,
    MAX_BYTES,
    NEWS,
    OPENED,
    ORDERS,
    PROOF,
    REPORT,
    STATE,
    TAKEN,
    TO_AGENT,
    TO_CONTROLLER,
    WELCOME,
    FrameError,
    Inbox,
    Seal,
    hello,
    pack,
)
from tests.munged import Munged

VARIANTS = 8
"""Nodes of one round differ in so many ways."""
SHAKING = 200
"""Handshakes at once: ten thousand machines compute theirs side by side, and this one process one after the
other. What it did not come to for ten seconds would be refused as slow."""
SPOOLED = 6
"""Reports that an agent keeps for a controller that is away: half a minute of them, as old as they may be judged."""


@dataclass(slots=True)
class Agent:
    """One of them."""

    index: int
    due: float
    sock: socket.socket | None = None
    ready: bool = False
    inbox: Inbox = field(default_factory=lambda: Inbox(MAX_BYTES))
    out: bytes = b""
    sequence: int = 0
    answered_round: int = 0
    """Of the report that was acknowledged last."""
    whole: int = 0
    """Number of the newest whole report; 0: it may not have arrived."""
    closely: bool = False
    """The controller wants each report whole."""
    waiting: deque[tuple[int, float, int]] = field(default_factory=deque)
    """(sequence, made at, round) of reports that are not taken yet, the first of them on its way."""
    sent_at: float = 0.0
    in_flight: bool = False
    failures: int = 0
    turns: int = 0
    """Controllers that were tried one after the other."""
    key: bytes = b""
    """By MUNGE: of the stream that is about to be opened."""
    seal: Seal | None = None
    opened: bool = False
    faults: list[NodeEvent] = field(default_factory=list)


@dataclass
class Tally:
    """What was seen since the last question."""

    sent: int = 0
    taken: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    errors: int = 0
    refused: int = 0
    late: int = 0
    """Reports that were due before the one before them was answered."""
    trips_s: list[float] = field(default_factory=list)
    last_problem: str = ""


class Fleet:
    """All agents, and the loop that drives them."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        shape: Shape,
        interval_s: float,
        *,
        proof: fleet_tls.Client | fleet_munge.Client,
    ):
        self.tls = proof if isinstance(proof, fleet_tls.Client) else None
        self.munge = proof if isinstance(proof, fleet_munge.Client) else None
        self.shaking: set[int] = set()
        """Agents whose handshake is not over yet."""
        self.addresses, self.shape, self.interval_s = addresses, shape, interval_s
        self.epoll = select.epoll()
        self.began = time.monotonic()
        rng = random.Random(1)
        starts = [self.began + interval_s * n / shape.nodes for n in range(shape.nodes)]
        rng.shuffle(starts)
        self.agents = [Agent(n, starts[n]) for n in range(shape.nodes)]
        self.of_fd: dict[int, Agent] = {}
        self.agenda = [(agent.due, agent.index, "report") for agent in self.agents]
        heapq.heapify(self.agenda)
        self.rng = rng
        self.tally = Tally()
        self.known: set[int] = set()
        """Agents that were answered since `restarted`."""
        self.silent: set[int] = set()

    # -- the loop ----------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Does what is due, and waits a little for answers."""
        now = time.monotonic()
        while self.agenda and self.agenda[0][0] <= now:
            due, index, what = heapq.heappop(self.agenda)
            agent = self.agents[index]
            if what == "report":
                self._make(agent, due, now)
            elif what == "connect" and agent.sock is None:
                self._connect(agent)
        wait_s = max(0.0, min(0.01, self.agenda[0][0] - time.monotonic())) if self.agenda else 0.01
        for fd, events in self.epoll.poll(wait_s, 4096):
            agent_or_none = self.of_fd.get(fd)
            if agent_or_none is None:
                continue
            try:
                self._advance(agent_or_none, events)
            except (OSError, FrameError) as error:
                self._lose(agent_or_none, str(error))

    def _make(self, agent: Agent, due: float, now: float) -> None:
        """One more report waits; the one before may not be answered yet."""
        heapq.heappush(self.agenda, (due + self.interval_s, agent.index, "report"))
        if agent.index in self.silent:
            return
        agent.sequence += 1
        agent.waiting.append((agent.sequence, now, int((due - self.began) / self.interval_s)))
        while len(agent.waiting) > SPOOLED + 1:
            del agent.waiting[1 if agent.in_flight else 0]
        if agent.sock is None:
            if agent.failures == 0:
                self._connect(agent)
        elif agent.in_flight:
            self.tally.late += 1
        elif agent.opened:
            self._send(agent)

    def _connect(self, agent: Agent) -> None:
        if self.tls is not None and len(self.shaking) >= SHAKING:
            heapq.heappush(self.agenda, (time.monotonic() + 0.05, agent.index, "connect"))
            return
        self.shaking.add(agent.index)
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_IP, getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24), 1)
        sock.bind((f"127.{1 + agent.index // 62_500}.{agent.index // 250 % 250}.{1 + agent.index % 250}", 0))
        agent.sock, agent.ready, agent.in_flight = sock, False, False
        self.of_fd[sock.fileno()] = agent
        self.epoll.register(sock.fileno(), select.EPOLLOUT | select.EPOLLIN)
        sock.connect_ex(self.addresses[agent.turns % len(self.addresses)])

    def _lose(self, agent: Agent, why: str) -> None:
        """The connection is gone: again after a pause, as the real sender pauses."""
        assert agent.sock is not None
        self.tally.errors += 1
        self.tally.last_problem = why
        fd = agent.sock.fileno()
        self.epoll.unregister(fd)
        del self.of_fd[fd]
        agent.sock.close()
        agent.sock, agent.ready, agent.in_flight, agent.opened = None, False, False, False
        agent.key, agent.seal, agent.inbox, agent.out = b"", None, Inbox(MAX_BYTES), b""
        agent.whole = 0
        self.shaking.discard(agent.index)
        agent.failures += 1
        agent.turns += 1
        pause_s = backoff_s(agent.failures, self.rng.random())
        heapq.heappush(self.agenda, (time.monotonic() + pause_s, agent.index, "connect"))

    def _advance(self, agent: Agent, events: int) -> None:
        sock = agent.sock
        assert sock is not None
        if not agent.ready and events & (select.EPOLLOUT | select.EPOLLERR | select.EPOLLHUP):
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            if self.tls is not None:
                agent.sock = sock = self._begin_tls(agent, sock)
            if not isinstance(sock, ssl.SSLSocket) or self._shake_hands(sock):
                self._is_ready(agent, sock)
            return
        if not agent.ready and isinstance(sock, ssl.SSLSocket):
            if self._shake_hands(sock):
                self._is_ready(agent, sock)
            return
        if agent.out and events & select.EPOLLOUT:
            self._flush(agent)
        if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
            try:
                data = sock.recv(1 << 16)
                while isinstance(sock, ssl.SSLSocket) and sock.pending():
                    data += sock.recv(1 << 16)  # what has come, and no event tells of
            except ssl.SSLWantReadError:
                return
            if not data:
                raise OSError("the controller hung up")
            agent.inbox.data += data
            self.tally.bytes_in += len(data)
            while (frame := agent.inbox.take()) is not None:
                self._take(agent, *frame)

    def _begin_tls(self, agent: Agent, sock: socket.socket) -> socket.socket:
        """The connection with TLS on it: the same descriptor."""
        assert self.tls is not None
        if isinstance(sock, ssl.SSLSocket):
            return sock
        self.epoll.modify(sock.fileno(), select.EPOLLIN)
        return self.tls.wrap(sock, self.shape.name(agent.index))

    def _shake_hands(self, sock: ssl.SSLSocket) -> bool:
        """Whether the handshake is over. What we have to say in it always fits into the socket's buffer."""
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def _is_ready(self, agent: Agent, sock: socket.socket) -> None:
        agent.ready = True
        self.shaking.discard(agent.index)
        self.epoll.modify(sock.fileno(), select.EPOLLIN)
        self._write(agent, HELLO, hello(self.shape.name(agent.index)))

    def _take(self, agent: Agent, kind: bytes, body: bytes) -> None:
        """One frame of the controller's."""
        if kind == BYE:
            self.tally.refused += 1
            raise OSError(f"refused: {body.decode()}")
        if kind == WELCOME:
            assert self.munge is not None
            agent.key, credential = self.munge.begin(self.shape.name(agent.index), body.decode())
            self._write(agent, PROOF, credential)
        elif kind == OPENED:
            if agent.key:
                incoming = Seal(agent.key, TO_AGENT)
                assert incoming.mac(OPENED) == body
                agent.inbox.seal, agent.seal = incoming, Seal(agent.key, TO_CONTROLLER)
            agent.opened = True
            if agent.waiting:
                self._send(agent)
        elif kind == TAKEN:
            self._take_answer(agent, body)
        elif kind in (ORDERS, NEWS):
            agent.closely = decode_reply(body).closely or agent.closely

    def _take_answer(self, agent: Agent, body: bytes) -> None:
        agent.in_flight = False
        agent.failures = 0
        self.tally.trips_s.append(time.monotonic() - agent.sent_at)
        self.tally.taken += 1
        self.known.add(agent.index)
        _, _, agent.answered_round = agent.waiting.popleft()
        closely = decode_reply(body).closely if body else None
        agent.closely = agent.closely if closely is None else closely
        if agent.waiting:
            self._send(agent)

    # -- what is sent ------------------------------------------------------------------------------------------

    def _send(self, agent: Agent) -> None:
        sequence, made_at, number = agent.waiting[0]
        now = time.monotonic()
        report = self._report(agent, sequence, number)
        body, kind = (encode_state(report), STATE) if is_state(report) else (encode_report(report), REPORT)
        if now - made_at > 0.05:
            body = with_age(body, now - made_at)
        agent.in_flight, agent.sent_at = kind == REPORT, now
        self.tally.sent += 1
        self.tally.bytes_out += len(body)
        if kind == STATE:
            agent.waiting.popleft()
        self._write(agent, kind, body)
        if agent.waiting and not agent.in_flight and agent.sock is not None:
            self._send(agent)

    def _write(self, agent: Agent, kind: bytes, body: bytes) -> None:
        agent.out += pack(kind, body, agent.seal)
        self._flush(agent)

    def _flush(self, agent: Agent) -> None:
        assert agent.sock is not None
        try:
            sent = agent.sock.send(agent.out)
        except (BlockingIOError, ssl.SSLWantWriteError):
            sent = 0
        except OSError as error:
            self._lose(agent, str(error))
            return
        agent.out = agent.out[sent:]
        if agent.out or sent == 0:
            self.epoll.modify(agent.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _news(self, agent: Agent, number: int) -> dict[str, Any]:
        """What this node alone has to tell in this round."""
        news: dict[str, Any] = {}
        if self.shape.is_batch_host(agent.index):
            news |= {
                "logs": logs_of(self.shape, agent.index, number),
                "events": events_of(self.shape, agent.index, agent.answered_round, number),
            }
        if agent.faults:
            news["node_events"] = tuple(agent.faults)
        return news

    def _report(self, agent: Agent, sequence: int, number: int) -> Report:
        if agent.closely or agent.faults or not agent.whole or (number + agent.index) % WHOLE_EVERY == 0:
            report = report_of(self.shape, agent.index, number, (agent.index + number) % VARIANTS)
            agent.whole = sequence
        else:
            report = small_of(self.shape, agent.index, agent.whole)
        news = self._news(agent, number)
        agent.faults = []
        return msgspec.structs.replace(
            report,
            agent_id=f"{agent.index + 1:032x}",
            sequence=sequence,
            interval_s=self.interval_s,
            agent_version="0.1.0",
            **news,
        )

    # -- questions ---------------------------------------------------------------------------------------------

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Carries out one command."""
        what = question["do"]
        if what == "tally":
            found, self.tally = self.tally, Tally()
            return {
                name: getattr(found, name)
                for name in (*Tally.__dataclass_fields__,)  # all of them
            } | {"connected": sum(agent.ready for agent in self.agents), "known": len(self.known)}
        if what == "forget":
            self.known.clear()
        elif what == "fault":
            for index in question["nodes"]:
                self.agents[index].faults.append(fault_of(self.shape, index))
        elif what == "silence":
            self.silent = set(question["nodes"])
        elif what == "count":
            return {
                "known": len(self.known),
                "connected": sum(agent.ready for agent in self.agents),
                "last_problem": self.tally.last_problem,
            }
        return {}


def main() -> None:
    """Runs until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="127.0.0.1", help="of the controllers")
    parser.add_argument("--port", type=int, required=True, action="append", help="of each controller: they know all")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--interval", type=float, default=5.0)
    parser.add_argument("--tls", type=Path, help="where fleet_tls.make has made certificates")
    parser.add_argument("--munge", default="", help="the socket of munged, without --tls")
    parser.add_argument("--reader-uid", type=int, help="with --munge: of the controller's user (default: our own)")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < options.nodes + 100:
        sys.exit(f"{options.nodes} connections need as many descriptors, and the limit is {hard}: ulimit -Hn")
    shape = Shape(nodes=options.nodes, jobs=options.jobs, workers=options.workers)
    proof: fleet_tls.Client | fleet_munge.Client
    if options.tls is None:
        proof = fleet_munge.Client(Munged(options.munge, 0), options.reader_uid)
    else:
        proof = fleet_tls.Client(options.tls)
    addresses = [(options.address, port) for port in options.port]
    fleet = Fleet(addresses, shape, options.interval, proof=proof)
    fleet.epoll.register(0, select.EPOLLIN)
    pending = b""
    os.set_blocking(0, False)
    while True:
        fleet.turn()
        try:
            data = os.read(0, 1 << 16)
        except BlockingIOError:
            continue
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            sys.stdout.write(json.dumps(fleet.answer(json.loads(line))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
