"""The controller's end of an agent's stream: frames in order, in time, and within bounds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Protocol

from slurm_watchdog.wire.connection import Connection
from slurm_watchdog.wire.frames import BYE, LENGTH, MAX_UNPROVEN, FrameError, Inbox, Seal, pack

log = logging.getLogger(__name__)

SILENT_S = 45.0  # A stream without a frame for so long is half-open: agents report every 30 s at least …
INTERVALS = 3.0  # … or for so many intervals of a longer one.
ONE_READ = 256 * 1024  # Bytes that the loop reads at once.


class StreamDoor(Protocol):
    """What the frames of streams go to."""

    def take_frame(self, stream: Stream, kind: bytes, body: bytes) -> Awaitable[None] | None:
        """Raises FrameError: the stream ends with it."""

    def ended(self, stream: Stream, reason: str, why: str) -> None:
        """Called once; `why`: a sentence, where there is one."""


class Stream:
    """One agent. What it is handed after `end` is thrown away."""

    __slots__ = (
        "_client", "_door", "_inbox", "_is_waiting", "_reason", "_seal", "_task", "agent", "basis", "challenge",
        "interval_s", "is_heard", "is_open", "names", "node", "remote", "said",
    )  # fmt: skip

    def __init__(self, client: Connection, door: StreamDoor):
        self._client, self._door = client, door
        self.remote, self.names = client.remote, client.names
        self.node, self.challenge = "", ""
        self.is_open = False  # Both ends are proven: reports are taken.
        self.is_heard = False  # A report was taken: it may be asked.
        self.said = b""  # The newest reply,
        self.basis: object = None  # and what that depended on.
        self.agent = ("", "")  # Boot and agent id of the newest report; empty: none was taken.
        self.interval_s = 0.0  # Between two of its reports.
        self._inbox = Inbox(MAX_UNPROVEN)
        self._seal: Seal | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_waiting = False  # For its turn: see Port.serve_soon.
        self._reason = ""  # Why it has ended.

    @property
    def is_busy(self) -> bool:
        """Whether a frame is looked at that takes its time, or waits for its turn."""
        return self._task is not None or self._is_waiting

    @property
    def most_held(self) -> int:
        return LENGTH.size + self._inbox.limit + ONE_READ

    def seal(self, incoming: Seal, outgoing: Seal) -> None:
        """From the next frame on, in both directions."""
        self._inbox.seal, self._seal = incoming, outgoing

    def open(self, limit: int) -> None:
        """Frames may have so many bytes from now on."""
        self.is_open, self._inbox.limit = True, limit

    def send(self, kind: bytes, body: bytes) -> None:
        if not self._reason:
            self._client.transport.write(pack(kind, body, self._seal))

    def refuse(self, reason: str, why: str = "") -> None:
        """Says why, and closes."""
        if not self._reason:
            self._finish(reason, why)
            if why:
                self._client.transport.write(pack(BYE, f"{reason} {why}".encode(errors="replace"), self._seal))
            self._client.transport.close()

    def close(self) -> None:
        """As the whole port is closed."""
        self.refuse("closed_by_us")

    def check(self, age_s: float) -> None:
        """Ends what is half-open."""
        patience_s = SILENT_S if self.is_open else self._client.port.deadline_s
        if age_s > max(patience_s, INTERVALS * self.interval_s):
            self.refuse("silent", f"no frame came for {age_s:.0f} s")

    # -- the transport's side ----------------------------------------------------------------------------------

    def connection_lost(self, error: Exception | None) -> None:
        if self._is_waiting:
            self.serve()
        self._finish("reset" if error is not None else "cut_off" if self._inbox.data else "closed_by_agent")
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """It does not read what it is sent."""
        self._finish("slow_reader")
        self._client.transport.abort()

    def resume_writing(self) -> None:
        """It has been closed by then."""

    def data_received(self, data: bytes) -> None:
        if not self._reason:
            self._inbox.data += data
            if not self._is_waiting and self._task is None:
                self._is_waiting = True
                self._client.port.serve_soon(self)

    def _finish(self, reason: str, why: str = "") -> None:
        if not self._reason:
            self._reason = reason
            self._inbox.data.clear()
            self._client.give_up()
            self._door.ended(self, reason, why)

    def serve(self) -> None:
        """Its turn has come."""
        self._is_waiting = False
        self._serve()

    def _serve(self) -> None:
        """Takes all frames that have arrived whole, in order."""
        client = self._client
        while self._task is None and not self._reason:
            try:
                frame = self._inbox.take()
                client.settle(len(self._inbox.data))
                if frame is None:
                    return
                client.since = client.port.now()
                work = self._door.take_frame(self, *frame)
                self._task = None if work is None else asyncio.ensure_future(self._finish_later(work))
            except Exception as error:  # noqa: BLE001 - the boundary: one frame never ends the others' streams
                self._fail(error)

    async def _finish_later(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)
        finally:
            self._task = None
        self._serve()

    def _fail(self, error: Exception) -> None:
        if isinstance(error, FrameError):
            self.refuse(*error.args)
        else:
            log.error("a frame failed", exc_info=error)
            self.refuse("failed", "this frame failed; see the log of the controller")
