"""A sender with its courier, each in a thread, as loop and process have them in the product."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from slurm_watchdog.agent.courier.process import Courier
from slurm_watchdog.agent.courier.streams import ANSWER_S, Controller
from slurm_watchdog.agent.delivery.courier_link import CourierLink
from slurm_watchdog.agent.delivery.sender import SILENT_S, Sender
from slurm_watchdog.agent.delivery.spool import Spool, Waiting
from slurm_watchdog.base import clock
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report


def link_to(controllers: Sequence[Controller], answer_s: float = ANSWER_S) -> CourierLink:
    """A link behind which each courier is a thread."""
    ours = list(controllers)

    def start() -> socket.socket:
        one, other = socket.socketpair()
        one.setblocking(False)
        courier = Courier(other, ours, answer_s)
        courier._all = ours  # the next one begins with the controller that this one has come to
        threading.Thread(target=courier.serve, daemon=True).start()
        return one

    return CourierLink(start)


class DrivenSender:
    """What the agent's loop does with a sender, in a thread; `fileno` is readable when something was said."""

    def __init__(
        self,
        spool: Spool,
        link: CourierLink,
        count: Callable[[str], None] = lambda outcome: None,
        now: Callable[[], float] = clock.monotonic,
        silent_s: float = SILENT_S,
    ):
        self.inner = Sender(spool, link, count, now, silent_s)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK)
        self._wake_fd, self._waker_fd = os.pipe2(os.O_NONBLOCK)
        self._said: list[Reply] = []
        self._asked: list[Reply] = []
        self._thread = threading.Thread(target=self._drive, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _drive(self) -> None:
        while not self._is_over.is_set():
            with self._lock:
                self.inner.pump()
                said, asked = self.inner.replies(), self.inner.orders()
                self._said += said
                self._asked += asked
                due_s = self.inner.due_at() - clock.monotonic()
            if said or asked:
                os.write(self._write_fd, b"r")
            ready = wait_readable([self.inner.link.fileno(), self._wake_fd], min(max(due_s, 0.0), 1.0))
            if self._wake_fd in ready:
                os.read(self._wake_fd, 4096)

    def fileno(self) -> int:
        return self._read_fd

    def put(self, report: Report) -> None:
        with self._lock:
            self.inner.put(report)
        os.write(self._waker_fd, b"w")

    def renew(self) -> None:
        with self._lock:
            self.inner.renew()
        os.write(self._waker_fd, b"w")

    def replies(self) -> list[Reply]:
        with self._lock:
            if wait_readable([self._read_fd], 0):
                os.read(self._read_fd, 4096)
            found, self._said = [*self._said, *self.inner.replies()], []
            return found

    def orders(self) -> list[Reply]:
        with self._lock:
            found, self._asked = [*self._asked, *self.inner.orders()], []
            return found

    def stop(self, seconds: float = 2.0) -> None:
        self._is_over.set()
        os.write(self._waker_fd, b"w")
        if self._thread.ident is not None:
            self._thread.join(10)
        self.inner.stop(seconds)

    def left(self) -> tuple[Waiting, ...]:
        return self.inner.left()

    @property
    def problem(self) -> str:
        return self.inner.problem

    @property
    def lost(self) -> int:
        return self.inner.lost

    @property
    def spool_bytes(self) -> int:
        return self.inner.spool_bytes


@contextmanager
def sending(
    *places: Controller, spool: Spool | None = None, answer_s: float = ANSWER_S
) -> Iterator[tuple[DrivenSender, Counter[str]]]:
    """A sender to the controllers, and what it has counted."""
    counts: Counter[str] = Counter()
    link = link_to(places, answer_s)
    sender = DrivenSender(Spool() if spool is None else spool, link, lambda each: counts.update([each]))
    sender.start()
    try:
        yield sender, counts
    finally:
        sender.stop()
