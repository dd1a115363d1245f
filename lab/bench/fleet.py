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
import re
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
from lab.bench.fleet_reports import Shape, events_of, fault_of, logs_of, report_of
from slurm_watchdog.agent.delivery.sender import backoff_s
from slurm_watchdog.base.loop import share_of
from slurm_watchdog.identity.munge_protocol import Session
from slurm_watchdog.model.observations import NodeEvent
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import encode_report
from slurm_watchdog.wire.delta import changes_between
from tests.munged import Munged

VARIANTS = 8
"""Nodes of one round differ in so many ways."""
FULL_EVERY = 120
"""Reports between two full ones, as the agent's sender has it."""
SHAKING = 200
"""Handshakes at once: ten thousand machines compute theirs side by side, and this one process one after the
other. What it did not come to for ten seconds would be refused as slow."""
SPOOLED = 6
"""Reports that an agent keeps for a controller that is away: half a minute of them, as old as they may be judged."""
INTERVAL = re.compile(rb'"interval_s":([0-9.]+)')
HEAD = b"POST %b HTTP/1.1\r\nHost: controller\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n"


@dataclass(slots=True)
class Agent:
    """One of them."""

    index: int
    due: float
    sock: socket.socket | None = None
    ready: bool = False
    inbox: bytearray = field(default_factory=bytearray)
    out: bytes = b""
    sequence: int = 0
    acknowledged: int = 0
    since_full: int = 0
    answered_round: int = 0
    """Of the report that was acknowledged last."""
    interval_s: float = 0.0
    asked_s: float = 0.0
    """The interval that the controller wants: in force with the next report, as the real agent has it."""
    waiting: deque[tuple[int, float, int]] = field(default_factory=deque)
    """(sequence, made at, round) of reports that are not taken yet, the first of them on its way."""
    sent_at: float = 0.0
    in_flight: bool = False
    full_next: bool = True
    failures: int = 0
    turns: int = 0
    """Controllers that were tried one after the other."""
    session: Session | None = None
    """By MUNGE: begun, or about to begin."""
    begins: bool = False
    """What is in flight is no report, but about a session."""
    faults: list[NodeEvent] = field(default_factory=list)


@dataclass
class Tally:
    """What was seen since the last question."""

    sent: int = 0
    taken: int = 0
    full: int = 0
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
        changes: bool,
        proof: fleet_tls.Client | fleet_munge.Client,
    ):
        self.tls = proof if isinstance(proof, fleet_tls.Client) else None
        self.munge = proof if isinstance(proof, fleet_munge.Client) else None
        self.shaking: set[int] = set()
        """Agents whose handshake is not over yet."""
        self.addresses, self.shape, self.interval_s, self.changes = addresses, shape, interval_s, changes
        self.epoll = select.epoll()
        self.began = time.monotonic()
        rng = random.Random(1)
        starts = [self.began + interval_s * n / shape.nodes for n in range(shape.nodes)]
        rng.shuffle(starts)
        self.agents = [Agent(n, starts[n], interval_s=interval_s, asked_s=interval_s) for n in range(shape.nodes)]
        self.of_fd: dict[int, Agent] = {}
        self.agenda = [(agent.due, agent.index, "report") for agent in self.agents]
        heapq.heapify(self.agenda)
        self.rng = rng
        self.tally = Tally()
        self.known: set[int] = set()
        """Agents that were answered since `restarted`."""
        self.heads = [self._head(n) for n in range(shape.nodes)]
        self._parts: dict[tuple[int, int, int], bytes] = {}
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
            except OSError as error:
                self._lose(agent_or_none, str(error))

    def _make(self, agent: Agent, due: float, now: float) -> None:
        """One more report waits; the one before may not be answered yet."""
        if agent.asked_s != agent.interval_s:
            agent.interval_s = agent.asked_s
            due_next = now + (0.5 + share_of(self.shape.name(agent.index))) * agent.interval_s
        else:
            due_next = due + agent.interval_s
        heapq.heappush(self.agenda, (due_next, agent.index, "report"))
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
        elif agent.ready:
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
        """The connection is gone: again after a pause, as the real sender pauses, and in full."""
        assert agent.sock is not None
        self.tally.errors += 1
        self.tally.last_problem = why
        fd = agent.sock.fileno()
        self.epoll.unregister(fd)
        del self.of_fd[fd]
        agent.sock.close()
        agent.sock, agent.ready, agent.in_flight, agent.full_next = None, False, False, True
        agent.session, agent.begins = None, False
        self.shaking.discard(agent.index)
        agent.inbox.clear()
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
            agent.inbox += data
            self._take_answer(agent)

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
        if agent.waiting:
            self._send(agent)

    def _begin(self, agent: Agent, epoch: str = "") -> None:
        """Asks for the controller's epoch, or begins a session with it."""
        assert self.munge is not None
        header = ""
        if epoch:
            agent.session, header = self.munge.begin(self.shape.name(agent.index), epoch)
        agent.begins, agent.in_flight, agent.sent_at = True, True, time.monotonic()
        agent.out = HEAD % (fleet_munge.PATH.encode(), 0, header.encode())
        self._flush(agent)

    def _take_beginning(self, agent: Agent, status: bytes, body: bytes) -> None:
        agent.begins = agent.in_flight = False
        if status != b"200":
            agent.session = None
            raise OSError(f"no session: {body.decode(errors='replace')}")
        if agent.session is None:
            self._begin(agent, str(json.loads(body)["epoch"]))
        elif agent.waiting:
            self._send(agent)

    def _take_answer(self, agent: Agent) -> None:
        inbox = agent.inbox
        end = inbox.find(b"\r\n\r\n")
        if end < 0:
            return
        at = inbox.lower().find(b"content-length:", 0, end)
        size = int(inbox[at + 15 : inbox.find(b"\r\n", at)])
        if len(inbox) < end + 4 + size:
            return
        status, body = bytes(inbox[9:12]), bytes(inbox[end + 4 :])
        if agent.begins or (self.munge is not None and status == b"401"):
            inbox.clear()
            if agent.begins:
                self._take_beginning(agent, status, body)
            else:  # the controller is another one: as the real agent does, a new session, and the report again
                agent.session, agent.in_flight = None, False
                self._begin(agent)
            return
        tally = self.tally
        good = inbox.startswith(b"HTTP/1.1 200")
        again = b'"want_full":true' in inbox
        tally.bytes_in += len(inbox)
        if not good:
            tally.refused += 1
            tally.last_problem = bytes(inbox[:300]).decode(errors="replace")
            if len(self.addresses) > 1:
                raise OSError(f"refused: {tally.last_problem[-100:]}")
        inbox.clear()
        agent.in_flight = False
        agent.failures = 0
        tally.trips_s.append(time.monotonic() - agent.sent_at)
        if again:
            agent.full_next = True
        else:
            tally.taken += 1
            self.known.add(agent.index)
            agent.acknowledged, _, agent.answered_round = agent.waiting.popleft()
            asked = INTERVAL.search(body)
            if asked is not None:
                agent.asked_s = max(self.interval_s, float(asked[1]))
        if agent.waiting:
            self._send(agent)

    # -- what is sent ------------------------------------------------------------------------------------------

    def _send(self, agent: Agent) -> None:
        if self.munge is not None and agent.session is None:
            self._begin(agent)
            return
        sequence, made_at, number = agent.waiting[0]
        now = time.monotonic()
        full = (
            agent.full_next or not self.changes or agent.since_full >= FULL_EVERY or agent.acknowledged != sequence - 1
        )
        body = self._full(agent, sequence, number) if full else self._changes(agent, sequence, number)
        if now - made_at > 0.05:
            body = b'{"age_s":%.3f,' % (now - made_at) + body[1:]
        agent.since_full = 0 if full else agent.since_full + 1
        agent.full_next = False
        agent.in_flight, agent.sent_at = True, now
        self.tally.sent += 1
        self.tally.full += full
        self.tally.bytes_out += len(body)
        proof = "" if self.munge is None or agent.session is None else self.munge.proof(agent.session, body)
        agent.out = HEAD % (b"/v1/report", len(body), proof.encode()) + body
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

    def _head(self, index: int) -> bytes:
        """How every report of this node begins."""
        return b'{"node":"%s","boot_id":"%s","agent_id":"%032x","agent_version":"0.1.0"' % (
            self.shape.name(index).encode(),
            self.shape.boot_id(index).encode(),
            index + 1,
        )

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

    def _full(self, agent: Agent, sequence: int, number: int) -> bytes:
        report = report_of(self.shape, agent.index, number, (agent.index + number) % VARIANTS)
        news = self._news(agent, number)
        agent.faults = []
        return encode_report(
            msgspec.structs.replace(
                report,
                agent_id=f"{agent.index + 1:032x}",
                sequence=sequence,
                interval_s=agent.interval_s,
                agent_version="0.1.0",
                **news,
            )
        )

    def _changes(self, agent: Agent, sequence: int, number: int) -> bytes:
        """What is new since the report before: the same on many nodes, and made once for them."""
        variant, since = (agent.index + number) % VARIANTS, agent.answered_round
        was = (agent.index + since) % VARIANTS
        news = self._news(agent, number)
        if news:
            agent.faults = []
            before = report_of(self.shape, agent.index, since, was)
            if "logs" in news:
                before = msgspec.structs.replace(before, logs=logs_of(self.shape, agent.index, since))
            after = msgspec.structs.replace(report_of(self.shape, agent.index, number, variant), **news)
            return self._patched(agent, sequence, self._part(before, after))
        part = self._parts.get((since, number, variant))
        if part is None:
            for old in [key for key in self._parts if key[1] < number - SPOOLED - 2]:
                del self._parts[old]
            before, after = report_of(self.shape, 1, since, was), report_of(self.shape, 1, number, variant)
            part = self._parts[since, number, variant] = self._part(before, after)
        return self._patched(agent, sequence, part)

    def _part(self, before: Report, after: Report) -> bytes:
        """Everything of a report of changes but who sends it, and its number."""
        small = changes_between(msgspec.structs.replace(before, sequence=1), msgspec.structs.replace(after, sequence=2))
        assert small is not None
        body = encode_report(
            msgspec.structs.replace(
                small, node="", boot_id="", agent_id="", sequence=0, interval_s=5.0, agent_version=""
            )
        )
        start = b'{"node":"","boot_id":"","agent_id":"","sequence":0'
        assert body.startswith(start) and body.count(b'"since":1') == 1
        return body[len(start) :]

    def _patched(self, agent: Agent, sequence: int, part: bytes) -> bytes:
        ends = part.replace(b'"since":1', b'"since":%d' % (sequence - 1), 1)
        return self.heads[agent.index] + b',"interval_s":%.1f,"sequence":%d' % (agent.interval_s, sequence) + ends

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
    parser.add_argument("--always-full", action="store_true")
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
    fleet = Fleet(addresses, shape, options.interval, changes=not options.always_full, proof=proof)
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
