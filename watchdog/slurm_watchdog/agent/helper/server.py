"""The helper: the same spawner of children as the agent's own, in a service with the rights that the agent lacks.

It listens on a local socket, takes connections of one user alone, and three messages: [KEY, UID] with one end
of a socket, for which it forks a worker that serves that socket; ["end child", PID] for one that gives no
answer; and ["kernel log"], for which it passes an open /dev/kmsg. What a worker may be asked is in
slurm_watchdog.agent.helper.requests, and is checked in the worker. The helper itself only accepts, forks and
counts: nothing here can hang.
"""

from __future__ import annotations

import gc
import logging
import os
import pwd
import signal
import socket
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from slurm_watchdog.agent.helper.requests import MAX_REQUEST, Dispatch, RefusedError, Task, check_user
from slurm_watchdog.agent.proc.kmsg import KERNEL_LOG, KmsgFile
from slurm_watchdog.agent.workers.child import decode, encode, fork_worker, say_no_start
from slurm_watchdog.base import clock, loop
from slurm_watchdog.base.descriptors import describe
from slurm_watchdog.base.refusals import MAX_REFUSAL, Refusals
from slurm_watchdog.identity.transport import peer_of

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4  # The agent's, one of its `--once`, and one for a device that is passed.
MAX_CHILDREN = 64  # The agent keeps 48 at most (probe.MAX_WORKERS); those that hang outlive an agent that restarted.
MAX_OF_USER = 12  # That are one user: his hanging files must not take the places of all others.
MAX_KEY = 8192
MAX_MESSAGE = 16 * 1024
STARTS_PER_S = 50  # And as many at once: an agent that starts looks at every mount and user of its jobs in one tick.
ROUND_S = 10.0  # Between two signs of life while no one asks for anything.
HERE_S = 3600.0  # So long after his last process was seen a user's files may be looked at, for a job's last words.
MAX_USERS = 4096


@dataclass
class Connection:
    """One agent."""

    sock: socket.socket
    pid: int
    starts: float = float(STARTS_PER_S)  # How many children it may start now.
    asked_at: float = 0.0


@dataclass
class Helper:
    """Who is connected, and which children there are."""

    listener: socket.socket
    allowed: frozenset[int]  # Users whose agent is served.
    tasks: Mapping[str, Task]
    prefixes: tuple[str, ...] = ()  # Directories below which kill switches may lie, besides KILL_SWITCH_BASE.
    refusals: Refusals = field(default_factory=Refusals)
    connections: dict[int, Connection] = field(default_factory=dict)
    children: dict[int, int] = field(default_factory=dict)  # By pid: the user that it has become, -1 for none.
    seen_here: OrderedDict[int, float] = field(default_factory=OrderedDict)  # User -> when he was seen last.

    def __post_init__(self) -> None:
        self.listener.setblocking(False)
        self._told, self._tell = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        """Children tell of what they refuse."""
        self._told.setblocking(False)
        self._tell.setblocking(False)

    def serve(self, signals: loop.Signals) -> None:
        """Until a signal says stop."""
        loop.sd_notify("READY=1\nWATCHDOG=1")
        while not signals.stop:
            fds = [
                signals.fileno(),
                self._told.fileno(),
                *((self.listener.fileno(),) if len(self.connections) < MAX_CONNECTIONS else ()),
                *self.connections,
            ]
            ready = loop.wait_readable(fds, ROUND_S)
            now = clock.monotonic()
            if signals.fileno() in ready:
                signals.drain()
            self.round(set(ready), now)
            count = f"{len(self.children)} children, {self.refusals.total} requests refused"
            loop.sd_notify(f"WATCHDOG=1\nSTATUS={count}")
        loop.sd_notify("STOPPING=1")

    def round(self, ready: set[int], now: float) -> None:
        """Does what there is to do for these descriptors."""
        self._bury()
        if self._told.fileno() in ready:
            self._hear(now)
        for fd in ready & self.connections.keys():
            self._take(self.connections[fd], now)
        if self.listener.fileno() in ready:
            self._accept(now)

    # -- who asks ----------------------------------------------------------------------------------------------

    def _accept(self, now: float) -> None:
        try:
            sock, _ = self.listener.accept()
        except OSError:
            return
        pid, uid = peer_of(sock)
        if uid not in self.allowed:
            self.refusals.add(f"a connection of uid {uid} (process {pid}), which is not the agent's user", now)
            sock.close()
            return
        sock.setblocking(False)
        self.connections[sock.fileno()] = Connection(sock, pid, asked_at=now)

    def _take(self, connection: Connection, now: float) -> None:
        try:
            message, fds, flags, _ = socket.recv_fds(connection.sock, MAX_MESSAGE, 4)
        except BlockingIOError:
            return
        except OSError:
            message, fds, flags = b"", [], 0
        if not message and not fds:
            del self.connections[connection.sock.fileno()]
            connection.sock.close()
            return
        try:
            self._do(connection, message, fds, flags, now)
        except RefusedError as error:
            self.refusals.add(str(error), now)
            for fd in fds:
                say_no_start(fd, f"the helper refuses: {error}")

    def _do(self, connection: Connection, message: bytes, fds: list[int], flags: int, now: float) -> None:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise RefusedError("a message that is too long, or with too many descriptors")
        try:
            words = decode(message)
        except (ValueError, RecursionError) as error:
            raise RefusedError("a message that is not JSON") from error
        if words == ["kernel log"] and not fds:
            self._pass_kernel_log(connection)
            return
        if isinstance(words, list) and words[:1] == ["end child"] and len(words) == 2 and not fds:
            self._end(words[1])
            return
        if not isinstance(words, list) or len(words) != 2 or len(fds) != 1:
            raise RefusedError("a message of unknown type")
        key, uid = words
        if not isinstance(key, str) or not isinstance(uid, int) or isinstance(uid, bool) or len(key) > MAX_KEY:
            raise RefusedError("a child needs its key and a user")
        if uid >= 0:
            check_user(uid)
        self._limit(connection, uid, now)
        self._start(key, max(uid, -1), fds[0], now)

    def _limit(self, connection: Connection, uid: int, now: float) -> None:
        earned = (now - connection.asked_at) * STARTS_PER_S
        connection.starts = min(float(STARTS_PER_S), connection.starts + earned)
        connection.asked_at = now
        if connection.starts < 1.0:
            raise RefusedError(f"more than {STARTS_PER_S} children in a second")
        connection.starts -= 1.0
        if len(self.children) >= MAX_CHILDREN:
            raise RefusedError(f"{MAX_CHILDREN} children are there already")
        if uid >= 0 and sum(each == uid for each in self.children.values()) >= MAX_OF_USER:
            raise RefusedError(f"{MAX_OF_USER} children that are uid {uid} are there already")

    # -- what is done ------------------------------------------------------------------------------------------

    def _start(self, key: str, uid: int, fd: int, now: float) -> None:
        is_here = uid < 0 or self._is_here(uid, now)

        def report(reason: str) -> None:
            with suppress(OSError):  # full: it is one of very many
                self._tell.send(f"{key}: {reason}"[:MAX_REFUSAL].encode(errors="replace"))

        dispatch = Dispatch(self.tasks, is_here, report, self.prefixes)
        ours = [self.listener, self._told, *(each.sock for each in self.connections.values())]
        pid = fork_worker(ours, fd, key, uid, dispatch, MAX_REQUEST)
        if pid > 0:
            self.children[pid] = uid

    def _end(self, pid: object) -> None:
        """One of our own children, as long as it has not been waited for, and no one else."""
        if isinstance(pid, bool) or not isinstance(pid, int) or pid not in self.children:
            raise RefusedError("not ended: the process is not a child of the helper")
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)

    def _is_here(self, uid: int, now: float) -> bool:
        """Whether a user has a process on this node, one of ours that became him aside, or had within HERE_S."""
        for name in os.listdir("/proc"):
            if name.isdecimal():
                with suppress(OSError):
                    if os.stat(f"/proc/{name}").st_uid == uid and int(name) not in self.children:
                        self.seen_here[uid] = now
                        self.seen_here.move_to_end(uid)
                        break
        while len(self.seen_here) > MAX_USERS:
            self.seen_here.popitem(last=False)
        return now - self.seen_here.get(uid, float("-inf")) <= HERE_S

    def _pass_kernel_log(self, connection: Connection) -> None:
        try:
            device = KmsgFile(KERNEL_LOG)
        except OSError as error:
            with suppress(OSError):
                connection.sock.send(encode([describe(error)]))
            return
        with suppress(OSError):
            socket.send_fds(connection.sock, [encode([None])], [device.fileno()])
        device.close()

    def _hear(self, now: float) -> None:
        with suppress(OSError):
            for _ in range(MAX_CHILDREN):
                self.refusals.add(self._told.recv(MAX_REFUSAL).decode(errors="replace"), now)

    def _bury(self) -> None:
        with suppress(ChildProcessError):
            while (gone := os.waitpid(-1, os.WNOHANG))[0] > 0:
                self.children.pop(gone[0], None)


def listen(path: str, group: int) -> socket.socket:
    """The socket that systemd passes (sd_listen_fds(3)); otherwise a new one at `path` for `group`. Raises OSError."""
    if os.environ.get("LISTEN_PID") == str(os.getpid()) and os.environ.get("LISTEN_FDS") == "1":
        for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
            os.environ.pop(name, None)
        sock = socket.socket(fileno=3)
        sock.set_inheritable(False)
        return sock
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with suppress(FileNotFoundError):
        os.unlink(path)
    before = os.umask(0o117)
    try:
        sock.bind(path)
    finally:
        os.umask(before)
    os.chown(path, -1, group)
    sock.listen(MAX_CONNECTIONS)
    return sock


def run_helper(path: str, agent: str, tasks: Mapping[str, Task], prefixes: tuple[str, ...] = ()) -> int:
    """The helper of the user `agent` as a daemon until SIGTERM. Returns the exit code."""
    try:
        uid, gid = user_of(agent)
    except KeyError:
        log.critical("there is no user %s: the agent's has to exist before its helper starts", agent)
        return 2
    try:
        listener = listen(path, gid)
    except OSError as error:
        log.critical("%s cannot be listened on: %s", path, describe(error))
        return 1
    signals = loop.Signals()
    signals.install()
    gc.collect()
    gc.freeze()  # the collector writes into objects, and what is written to is shared with the children no more
    helper = Helper(listener, frozenset({uid}), tasks, prefixes)
    where = f", kill switches below {', '.join(prefixes)}" if prefixes else ""
    log.info("serving the agent of uid %d%s", uid, where)
    helper.serve(signals)
    log.info("ending; %d requests were refused", helper.refusals.total)
    return 0


def user_of(agent: str) -> tuple[int, int]:
    """User and group of a name or a number. Raises KeyError."""
    if agent.isascii() and agent.isdecimal():
        return int(agent), int(agent)
    entry = pwd.getpwnam(agent)
    return entry.pw_uid, entry.pw_gid
