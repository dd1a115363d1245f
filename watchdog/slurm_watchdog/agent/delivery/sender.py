"""Gives reports to the courier, keeps them while the controller is away, and hands what it says to the loop.

A report is encoded once, and waits as bytes: the objects would take many times what the bound says. One at a time is
on its way: it stays in the spool until the controller says that it was taken, and is sent again on the next stream, so
that none is lost; the controller knows by its number one that it has. One that only says that all is as before is not
answered. What the controller asks comes at any time. The loop calls `pump`, which never waits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from msgspec.structs import replace

from slurm_watchdog.agent.delivery.courier_link import CourierLink
from slurm_watchdog.agent.delivery.replies import parse_reply
from slurm_watchdog.agent.delivery.spool import Spool, Waiting
from slurm_watchdog.base import clock
from slurm_watchdog.base.descriptors import describe
from slurm_watchdog.base.loop import wait_readable
from slurm_watchdog.base.structs import printable
from slurm_watchdog.base.text import one_line
from slurm_watchdog.model.protocol import Reply
from slurm_watchdog.model.report import Report, is_state
from slurm_watchdog.wire import frames
from slurm_watchdog.wire.codec import WireError, encode_report, encode_state
from slurm_watchdog.wire.frames import FrameError, words

log = logging.getLogger(__name__)

BACKOFF_S = (0.5, 1.0, 2.0, 4.0, 5.0)
"""Waits between attempts; with 4,000 agents and jitter a controller that comes back sees 1,000 streams a second."""
SILENT_S = 60.0  # A courier that owes an answer for so long hangs: to connect, ask munge and wait takes 35 s.
MAX_WHY = 300  # Characters of why a stream is ended.
STOPPED, OPENING, OPEN = range(3)  # Of the courier's stream, as far as the agent was sent.


def backoff_s(failures: int, chance: float) -> float:
    """How long to wait after so many failures in a row; `chance` in [0, 1) spreads agents out."""
    longest = BACKOFF_S[min(failures, len(BACKOFF_S)) - 1] if failures else 0.0
    return longest * (0.5 + 0.5 * chance)


def _chance() -> float:
    """In [0, 1). The module random would cost a quarter of a megabyte."""
    return int.from_bytes(os.urandom(4), "little") / 2**32


def encode(report: Report) -> bytes:
    """The bytes of a report, odd bytes in names replaced. Raises WireError if it is too large."""
    try:
        return encode_report(report)
    except UnicodeEncodeError:
        return encode_report(printable(report))


class Sender:
    """What waits, and what was said. `link.fileno()` is readable when `pump` has something to do."""

    def __init__(
        self,
        spool: Spool,
        link: CourierLink,
        count: Callable[[str], None] = lambda outcome: None,
        now: Callable[[], float] = clock.monotonic,
        silent_s: float = SILENT_S,
    ):
        self.link, self._silent_s = link, silent_s
        self._spool, self._count, self._now = spool, count, now
        self._stream, self._since = STOPPED, 0.0  # Since when the courier owes an answer.
        self._flying: Waiting | None = None  # The report that is on its way.
        self._failures, self._retry_at = 0, float("-inf")
        self._replies: list[Reply] = []
        self._orders: list[Reply] = []
        self._last: tuple[bytes, Reply] = (b"", Reply())
        self._where = ""
        self.heard_at = now()  # When the controller last took a report, or this was made.
        self.problem = ""  # Why the last attempt failed; empty while it works.
        self.lost = 0  # Reports that the controller will never have.
        self.breaks = 0  # Streams that have ended: another controller may take the next.

    def left(self) -> tuple[Waiting, ...]:
        """What the controller has not taken, oldest first; one on its way just now is among them."""
        return self._spool.left()

    def put(self, report: Report) -> None:
        """Hands a report over; never waits. Raises WireError if it is too large to send."""
        is_short = is_state(report)
        body = encode_state(report) if is_short else encode(report)
        self._spool.put(report.sequence, body, self._now(), is_state=is_short)
        self._count_dropped()
        self.pump()

    def _count_dropped(self) -> None:
        for _ in range(self._spool.dropped):
            self._count("expired")
        self.lost += self._spool.dropped
        self._spool.dropped = 0

    def replies(self) -> list[Reply]:
        """Replies since the last call, oldest first."""
        found, self._replies = self._replies, []
        return found

    def orders(self) -> list[Reply]:
        """What was asked since the last call, between two replies."""
        found, self._orders = self._orders, []
        return found

    @property
    def spool_bytes(self) -> int:
        return self._spool.size

    def due_at(self) -> float:
        """When `pump` is to be called though nothing wakes the loop."""
        return self._retry_at if self._stream == STOPPED and len(self._spool) else float("inf")

    def renew(self) -> None:
        """Lets the courier go: the next one reads configuration and keys again."""
        self.link.close()
        self.breaks += self._stream == OPEN
        self._stream, self._flying, self._retry_at = STOPPED, None, float("-inf")
        self._last = b"", Reply()

    def stop(self, seconds: float = 2.0) -> None:
        """Gives what waits this long to be sent, and lets the courier go."""
        end = clock.monotonic() + seconds
        self.pump()
        while len(self._spool) and not self._failures and (left_s := end - clock.monotonic()) > 0:
            wait_readable([self.link.fileno()], left_s)
            self.pump()
        self.link.close()

    # -- the courier -------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Takes what the courier has passed on, and gives it what can be sent."""
        now = self._now()
        try:
            for kind, body in self.link.receive():
                self._take(kind, body, now)
            if self._owes() and now - self._since > self._silent_s:
                raise TimeoutError("the courier hangs")
            self._give(now)
        except (OSError, FrameError, ValueError, WireError) as error:
            self.link.close()
            self._end("-", one_line(str(error.args[-1] if error.args else error), MAX_WHY), now)

    def _owes(self) -> bool:
        return self._stream == OPENING or self._flying is not None

    def _give(self, now: float) -> None:
        if self._stream == STOPPED and len(self._spool) and now >= self._retry_at:
            self._stream, self._since = OPENING, now
            if not self.link.is_there:
                try:
                    self.link.start()
                except OSError as error:
                    raise OSError(f"the courier does not start: {describe(error)}") from error
            self.link.send(frames.HELLO, b"")
        while self._stream == OPEN and self._flying is None and (first := self._spool.first()) is not None:
            if not first.is_state:
                self.link.send(frames.REPORT, first.aged(now))
                self._flying, self._since = first, now
                continue
            if self._last[0]:  # else it would be the first one of its stream: the next report is whole
                self.link.send(frames.STATE, first.aged(now))
                self._replies.append(replace(self._last[1], commands=()))  # it holds: else NEWS had come
            self._sent(first)

    def _take(self, kind: bytes, body: bytes, now: float) -> None:
        """Raises FrameError, WireError."""
        if kind == frames.OPENED:
            own, authority, self._where = words(body, 3)
            self.link.expires = {"own": float(own), "authority": float(authority)} if float(own) else {}
            self._stream = OPEN
        elif kind == frames.CLOSED:
            code, self._where, why = words(body, 3)
            self._end(code, one_line(why, MAX_WHY), now)
        elif kind == frames.ORDERS:
            self._orders.append(parse_reply(body))
        elif kind in (frames.TAKEN, frames.NEWS):
            self.heard_at = now
            if not body:
                self._last = self._last[0], replace(self._last[1], commands=())
            elif body != self._last[0] or self._last[1].commands:
                self._last = body, parse_reply(body)
            self._replies.append(self._last[1])
            if kind == frames.TAKEN and self._flying is not None:
                self._sent(self._flying)
        else:
            raise FrameError("garbage", "the courier passes on a frame of an unknown kind")

    def _sent(self, report: Waiting) -> None:
        self._flying = None
        self._spool.done(report.sequence)
        self._count("sent")
        if self.problem:
            log.info("the controller at %s answers again", self._where)
        self.problem, self._failures = "", 0

    def _end(self, code: str, why: str, now: float) -> None:
        """The stream, or the attempt to begin one, has ended."""
        was, flying = self._stream, self._flying
        self.breaks += was == OPEN
        self._stream, self._flying = STOPPED, None
        self._last = b"", Reply()  # what was said on one stream is not said on the next
        if was == OPEN and flying is not None and code in frames.OF_THE_REPORT:
            self._spool.done(flying.sequence)
            self._count("rejected")
            self.lost += 1
            self._failures = 0
            self._say(f"a report was dropped: {why}")
            return
        self._say(f"the controller {f'at {self._where} ' if self._where else ''}cannot be reached: {why}")
        if was == OPENING or flying is not None:
            self._count("failed")
            self._failures += 1
            self._retry_at = now + backoff_s(self._failures, _chance())
            self._spool.expire(now)
            self._count_dropped()

    def _say(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem
