"""The supervisors of jobs on this node: each connects to the agent's socket, sends its status and gets orders.

The kernel says which user a peer is; the job is that of its process (control group, else ancestors and environment, as
processes are told apart), and counts where Slurm says that it is this user's. Nothing here waits for a peer: one that
sends too much, or does not read, is disconnected.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from slurm_watchdog.agent.proc.entry import Entry, parse_cgroup
from slurm_watchdog.agent.proc.files import read_file
from slurm_watchdog.agent.processes.jobs_here import JobsHere
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import describe
from slurm_watchdog.base.loop import Waiter, wait_readable
from slurm_watchdog.base.refusals import Refusals
from slurm_watchdog.identity.transport import peer_of
from slurm_watchdog.model.supervisor import (
    MAX_LINE_BYTES,
    ORDER_LIFETIME_S,
    FromAgent,
    FromSupervisor,
    JobSupervisor,
    RestartOrder,
    SupervisorState,
    from_supervisor,
)

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
MAX_OF_USER = 16  # Of these; more jobs with a supervisor than a user has on one node.
ACCEPTED_AT_ONCE = 64
REST_S = 0.1  # Between two looks at what peers send: however many they are, the loop wakes up ten times a second.
MAX_ANCESTORS = 64
NEWS, NEWS_PER_TICK = 6.0, 0.25
"""So many changes of one user's supervisors are reported out of turn, and so many more with each tick: a restart has
four. One that changes all the time is reported with the ticks."""


@dataclass(eq=False)
class Peer:
    """One supervisor: connected, or the last one of its job."""

    sock: socket.socket
    pid: int
    uid: int
    pidfd: int | None  # None: it cannot be seen whether the process has exited.
    rest: bytes = b""  # The beginning of a line.
    said: FromSupervisor | None = None
    heard_at: float = 0.0
    job_id: str = ""  # Empty: not known yet.
    beside: int | None = None  # As it was last told.
    left_at: float | None = None  # When the connection ended.

    @property
    def has_exited(self) -> bool:
        return self.pidfd is not None and bool(wait_readable([self.pidfd], 0.0))

    @property
    def run(self) -> tuple[str, int]:
        """Job and run; no job before both are known."""
        return (self.job_id, self.said.restarts if self.said is not None else -1)


@dataclass
class HeldOrder:
    """One that a supervisor gets, also when it connects later."""

    run: tuple[str, int]
    line: FromAgent
    until: float


@dataclass
class SupervisorLink:
    """The socket and what came over it. `path` empty: this agent has none."""

    path: str
    jobs: JobsHere
    entries: Mapping[int, Entry]  # The processes of this node.
    problem: str = ""  # Why no supervisor can connect.
    has_news: bool = False  # Something came that the controller waits for; the reader sets it back.
    _listener: socket.socket | None = None
    _peers: dict[int, Peer] = field(default_factory=dict)  # Connected, by descriptor.
    _last: dict[str, Peer] = field(default_factory=dict)  # By job: who has spoken last.
    _orders: dict[str, HeldOrder] = field(default_factory=dict)  # By decision.
    _news_left: dict[int, float] = field(default_factory=dict)  # By user; NEWS where there is none.
    _refusals: Refusals = field(default_factory=Refusals)
    _waiter: Waiter = field(default_factory=Waiter)
    _rests_until: float = 0.0

    def filenos(self, now: float) -> tuple[int, ...]:
        """Readable when `serve` has something to do."""
        return (self._waiter.fileno(),) if self.path and now >= self._rests_until else ()

    def due_at(self, now: float) -> float:
        """When `serve` is to be called though nothing wakes the loop."""
        return self._rests_until if now < self._rests_until else float("inf")

    def serve(self, now: float) -> None:
        """Takes what has come."""
        ready = self._waiter.wait(0.0) if now >= self._rests_until else []
        if ready:
            self._rests_until = now + REST_S
        for fd in ready:
            if fd in self._peers:
                self._hear(self._peers[fd], now)
            else:
                self._accept(now)

    def tick(self, now: float) -> Iterator[JobSupervisor]:
        """Does what is due; the newest status of each job's supervisor."""
        if self.path and (self._listener is None or not os.path.exists(self.path)):
            self._listen()
        self.serve(now)
        for peer in [each for each in self._peers.values() if each.said is not None and not each.job_id]:
            self._place(peer, now)
        self._orders = {key: held for key, held in self._orders.items() if now < held.until}
        self._news_left = {
            uid: left + NEWS_PER_TICK for uid, left in self._news_left.items() if left + NEWS_PER_TICK < NEWS
        }
        for job_id, peer in list(self._last.items()):
            if peer.said is None or not self._is_current(peer):
                self._forget(self._last.pop(job_id))
                continue
            unsure = peer.left_at is not None and not peer.has_exited
            yield JobSupervisor(
                job_id=job_id, restarts=peer.said.restarts, age_s=max(0.0, now - peer.heard_at),
                read_age_s=max(0.0, now - (peer.left_at or now)) if unsure else 0.0, status=peer.said.status,
            )  # fmt: skip

    def give(self, job_id: str, restarts: int, order: RestartOrder, now: float) -> None:
        """Hands an order to the supervisors of that run, now and to those that connect while it counts. A second time
        it is the same order, given when it first was."""
        new = HeldOrder((job_id, restarts), FromAgent(order=order, given_at=clock.wall()), now + ORDER_LIFETIME_S)
        held = self._orders.setdefault(order.decision, new)
        for peer in self._of_run(held.run):
            self._say(peer, held.line, now)

    def withdraw(self, decision: str, now: float) -> None:
        """The order is handed to no one any more; who has it, and has not begun, drops it."""
        held = self._orders.pop(decision, None)
        for peer in self._of_run(held.run) if held is not None else ():
            self._say(peer, FromAgent(withdrawn=decision), now)

    def close(self) -> None:
        """Ends all connections: the next agent is connected to by itself."""
        for peer in [*self._peers.values(), *self._last.values()]:
            peer.left_at = peer.left_at or clock.monotonic()
            peer.sock.close()
            self._forget(peer)
        if self._listener is not None:
            self._listener.close()
        self._peers, self._last, self._listener, self.path = {}, {}, None, ""

    # -- connections -------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        sock, temporary = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), f"{self.path}.{os.getpid()}"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            sock.bind(temporary)
            os.chmod(temporary, 0o666)  # noqa: S103 -- every user may connect: who it is, the kernel says
            sock.listen(MAX_CONNECTIONS)
            sock.setblocking(False)
            os.rename(temporary, self.path)
        except OSError as error:
            sock.close()
            if not self.problem:
                log.error("supervisors of jobs cannot connect: %s: %s", self.path, describe(error))
            self.problem = f"they cannot connect: {self.path}: {describe(error)}"
            return
        if self._listener is not None:
            self._waiter.forget(self._listener.fileno())
            self._listener.close()
        self._listener, self.problem = sock, ""
        self._waiter.watch(sock.fileno())

    def _accept(self, now: float) -> None:
        assert self._listener is not None
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setblocking(False)
            pid, uid = peer_of(sock)
            if (reason := self._refusal(uid)) is not None:
                self._refusals.add(f"process {pid} of uid {uid}: {reason}", now)
                sock.close()
                continue
            pidfd = None
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(pid)
            self._peers[sock.fileno()] = Peer(sock, pid, uid, pidfd)
            self._waiter.watch(sock.fileno())

    def _refusal(self, uid: int) -> str | None:
        if len(self._peers) >= MAX_CONNECTIONS:
            return f"{MAX_CONNECTIONS} supervisors are connected already"
        if sum(each.uid == uid for each in self._peers.values()) >= MAX_OF_USER:
            return f"{MAX_OF_USER} supervisors of this user are connected already"
        return None

    def _drop(self, peer: Peer, now: float, reason: str = "") -> None:
        if peer.left_at is not None:
            return
        if reason:
            self._refusals.add(f"process {peer.pid} of uid {peer.uid}: {reason}", now)
        del self._peers[peer.sock.fileno()]
        self._waiter.forget(peer.sock.fileno())
        peer.sock.close()
        peer.left_at = now
        self._tell_beside(peer.run, now)
        if reason or self._last.get(peer.job_id) is not peer:  # what it would have said to us is not known
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        if peer.pidfd is not None and peer.left_at is not None:
            os.close(peer.pidfd)
            peer.pidfd = None

    def _hear(self, peer: Peer, now: float) -> None:
        """Each line says everything: of several the last one counts."""
        try:
            data = peer.sock.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        lines, newline, peer.rest = (peer.rest + data).rpartition(b"\n")
        if not data or len(peer.rest) > MAX_LINE_BYTES:
            self._drop(peer, now, f"a line of more than {MAX_LINE_BYTES} bytes" if data else "")
            return
        if not newline:
            return
        try:
            said = from_supervisor(lines.rpartition(b"\n")[2])
        except ValueError as error:
            self._drop(peer, now, str(error))
            return
        before, peer.said, peer.heard_at = peer.said, said, now
        if not peer.job_id:
            self._place(peer, now)
        else:
            self._note(peer, now)
            left = self._news_left.get(peer.uid, NEWS)
            if before is not None and _matters(before) != _matters(said) and left >= 1.0:
                self._news_left[peer.uid], self.has_news = left - 1.0, True

    def _say(self, peer: Peer, line: FromAgent, now: float) -> None:
        data = msgspec.json.encode(line) + b"\n"
        with contextlib.suppress(OSError):
            if peer.sock.send(data) == len(data):
                return
        self._drop(peer, now, "it does not read what it is sent")

    # -- jobs --------------------------------------------------------------------------------------------------

    def _place(self, peer: Peer, now: float) -> None:
        """Finds out the job of a peer; while that is not known it is asked again in each tick."""
        job_id = self._job_of(peer.pid)
        owner = self.jobs.owners.get(job_id or "")
        if job_id is None or owner is None:
            return
        if owner != peer.uid:
            self._drop(peer, now, f"it is in job {job_id}, which is uid {owner}'s")
            return
        peer.job_id = job_id
        self._note(peer, now)
        for held in [each for each in self._orders.values() if each.run == peer.run]:
            self._say(peer, held.line, now)

    def _job_of(self, pid: int) -> str | None:
        """The job of a process: of its control group, else as it, or its nearest ancestor that belongs to one, is
        known. Only what no lock of that process can hold up is read."""
        with contextlib.suppress(OSError, ValueError):
            step = parse_cgroup(read_file(f"/proc/{pid}/cgroup").decode(errors="replace"))
            if step is not None:
                return step.job_id
            for _ in range(MAX_ANCESTORS):
                entry = self.entries.get(pid)
                if entry is not None and entry.member is not None:
                    return entry.member.job_id
                if entry is not None and entry.known.stepd is not None:
                    return entry.known.stepd.job_id
                status = read_file(f"/proc/{pid}/status")
                pid = int(status.partition(b"\nPPid:")[2].split(None, 1)[0])
                if pid <= 1:
                    break
        return None

    def _is_current(self, peer: Peer) -> bool:
        """Whether its run is the one that Slurm has here."""
        watch = self.jobs.watch.get(peer.job_id)
        return watch is not None and (peer.job_id, watch.restarts) == peer.run

    def _note(self, peer: Peer, now: float) -> None:
        if self._is_current(peer):
            before, self._last[peer.job_id] = self._last.get(peer.job_id), peer
            if before is not None and before is not peer:
                self._forget(before)
        self._tell_beside(peer.run, now)

    def _of_run(self, run: tuple[str, int]) -> list[Peer]:
        return [each for each in self._peers.values() if each.job_id and each.run == run]

    def _tell_beside(self, run: tuple[str, int], now: float) -> None:
        """Each supervisor of a run learns of another one that lives: neither may take an order then."""
        there = [
            each
            for each in self._of_run(run)
            if each.said is not None and each.said.status.state is not SupervisorState.OVER
        ]
        for peer in there:
            other = next((each.pid for each in there if each is not peer), 0)
            if other != peer.beside:
                peer.beside = other
                self._say(peer, FromAgent(beside=other), now)


def _matters(said: FromSupervisor) -> tuple[object, ...]:
    """What the controller waits for."""
    status = said.status
    return (said.restarts, status.state, status.step_id, status.starts, status.order, status.answer)
