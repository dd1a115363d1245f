"""The controller's end of an agent's stream: frames in order, in time, and within bounds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Protocol

import msgspec

from slurm_watchdog.base import clock
from slurm_watchdog.identity.munge_protocol import Seal
from slurm_watchdog.wire.frames import BYE, LENGTH, MAX_UNPROVEN, Bye, FrameError, Inbox, pack
from slurm_watchdog.wire.rate_limits import Limits

log = logging.getLogger(__name__)

SILENT_S = 45.0  # A stream without a frame for so long is half-open: agents report every 30 s at least …
INTERVALS = 3.0  # … or for so many intervals of a longer one.


class Bounds(Protocol):
    """Of the port that a stream comes to: port.Port."""

    limits: Limits
    held: int
    deadline_s: float

    def lag_s(self, since: float) -> float: ...
    def serve_soon(self, stream: Stream) -> None: ...


class StreamDoor(Protocol):
    """What the frames of streams go to."""

    def take_frame(self, stream: Stream, kind: bytes, body: bytes) -> Awaitable[None] | None:
        """Raises FrameError: the stream ends with it."""

    def ended(self, stream: Stream, reason: str, why: str) -> None:
        """Called once; `why`: a sentence, where there is one."""


class Stream:
    """One agent. What it is handed after `end` is thrown away."""

    __slots__ = (
        "_door", "_held", "_inbox", "_is_waiting", "_port", "_reason", "_seal", "_since", "_task", "challenge",
        "interval_s", "is_heard", "is_open", "names", "node", "remote", "transport",
    )  # fmt: skip

    def __init__(
        self,
        port: Bounds,
        door: StreamDoor,
        transport: asyncio.Transport,
        remote: str,
        names: frozenset[str] | None,
    ):
        """`names`: the nodes that its certificate is for; None without certificates."""
        self._port, self._door = port, door
        self.transport, self.remote, self.names = transport, remote, names
        self.node, self.challenge = "", ""
        self.is_open = False  # Both ends are proven: reports are taken.
        self.is_heard = False  # A report was taken: it may be asked.
        self.interval_s = 0.0  # Between two of its reports.
        self._inbox = Inbox(MAX_UNPROVEN)
        self._seal: Seal | None = None
        self._since = clock.monotonic()  # When the frame that is arriving began, or the last one was taken.
        self._task: asyncio.Task[None] | None = None
        self._is_waiting = False  # For its turn: see Port.serve_soon.
        self._reason = ""  # Why it has ended.
        self._held = 0

    def seal(self, incoming: Seal, outgoing: Seal) -> None:
        """From the next frame on, in both directions."""
        self._inbox.seal, self._seal = incoming, outgoing

    def open(self, limit: int) -> None:
        """Frames may have so many bytes from now on."""
        self.is_open, self._inbox.limit = True, limit

    def send(self, kind: bytes, body: bytes) -> None:
        if not self._reason:
            self.transport.write(pack(kind, body, self._seal))

    def end(self, reason: str, why: str = "") -> None:
        """Says why, and closes."""
        if not self._reason:
            self._finish(reason, why)
            if why:
                self.transport.write(pack(BYE, msgspec.msgpack.encode(Bye(reason, why)), self._seal))
            self.transport.close()

    def close(self) -> None:
        """As the whole port is closed."""
        self.end("closed_by_us")

    def check(self, now: float) -> None:
        """Ends what takes too long, and what is half-open."""
        age_s = now - self._since - self._port.lag_s(self._since)
        if self._task is not None or self._is_waiting:
            return
        if self._inbox.data and age_s > self._port.deadline_s:
            self.end("too_slow", f"a frame has to arrive within {self._port.deadline_s:.0f} s")
        elif age_s > max(SILENT_S if self.is_open else self._port.deadline_s, INTERVALS * self.interval_s):
            self.end("silent", f"no frame came for {age_s:.0f} s")

    # -- the transport's side ----------------------------------------------------------------------------------

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_waiting and self._task is None:
            self.serve()
        cut = "reset" if error is not None else "cut_off" if self._inbox.data else "closed_by_agent"
        self._finish(cut)
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """It does not read what it is sent."""
        self._finish("slow_reader")
        self.transport.abort()

    def resume_writing(self) -> None:
        """It has been closed by then."""

    def data_received(self, data: bytes) -> None:
        if self._reason:
            return
        if not self._inbox.data:
            self._since = clock.monotonic()
        self._inbox.data += data
        if self._task is None and not self._is_waiting:
            self._is_waiting = True
            self._port.serve_soon(self)
        elif len(self._inbox.data) > LENGTH.size + self._inbox.limit:
            self.end("too_large", "too much at once")
        self._settle(len(self._inbox.data))
        if self._inbox.data and self._port.held > self._port.limits.held_bytes:
            self.end("busy", "too much is arriving at once: try again")

    def serve(self) -> None:
        """Its turn has come."""
        self._is_waiting = False
        self._serve()
        self._settle(len(self._inbox.data))

    def _finish(self, reason: str, why: str = "") -> None:
        if self._reason:
            return
        self._reason = reason
        self._inbox.data.clear()
        self._settle(0)
        self._door.ended(self, reason, why)

    def _settle(self, held: int) -> None:
        self._port.held += held - self._held
        self._held = held

    def _serve(self) -> None:
        """Takes all frames that have arrived whole, in order."""
        while self._task is None and not self._reason:
            try:
                frame = self._inbox.take()
                if frame is None:
                    return
                self._since = clock.monotonic()
                work = self._door.take_frame(self, *frame)
            except FrameError as error:
                self.end(*error.args)
            except Exception:  # the boundary: one frame never ends the others' streams
                log.exception("a frame failed")
                self.end("failed", "this frame failed; see the log of the controller")
            else:
                if work is not None:
                    self._task = asyncio.ensure_future(self._finish_later(work))

    async def _finish_later(self, work: Awaitable[None]) -> None:
        try:
            await work
        except FrameError as error:
            self.end(*error.args)
        except Exception:
            log.exception("a frame failed")
            self.end("failed", "this frame failed; see the log of the controller")
        finally:
            self._task = None
        self._serve()
        self._settle(len(self._inbox.data))
