"""The connection of a supervisor to the agent of its node: it sends its status, and orders come back. Where there is no
agent nothing is lost but these; one that restarts is connected to again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from slurm_watchdog.base import clock
from slurm_watchdog.model.supervisor import MAX_LINE_BYTES, FromAgent, FromSupervisor, SupervisorStatus, from_agent

FIRST_PAUSE_S, MOST_PAUSE_S = 0.2, 5.0  # Before it is connected to again: twice as long each time.


class AgentLink:
    """One supervisor's; all of it belongs to one event loop."""

    def __init__(self, path: str, restarts: int, hear: Callable[[FromAgent], None], most_pause_s: float = MOST_PAUSE_S):
        """`restarts`: the run of the job. `hear` gets each line of the agent, but no order that was withdrawn."""
        self._path, self._restarts, self._hear = path, restarts, hear
        self._writer: asyncio.StreamWriter | None = None
        self._line, self._most_pause_s = b"", most_pause_s
        self.was_connected = False

    def say(self, status: SupervisorStatus) -> None:
        """Sends it, now or with the next connection. While the agent does not read, what was said before is enough: the
        next line says everything."""
        said = FromSupervisor(restarts=self._restarts, status=status)
        self._line = msgspec.json.encode(said)
        if len(self._line) >= MAX_LINE_BYTES:
            self._line = msgspec.json.encode(replace(said, status=replace(status, nodes=(), spares=(), avoided=())))
        self._send()

    def _send(self) -> None:
        if self._line and self._writer is not None and not self._writer.transport.get_write_buffer_size():
            self._writer.write(self._line + b"\n")

    async def keep(self) -> None:
        """Keeps the connection, until it is cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            began = clock.monotonic()
            with contextlib.suppress(OSError):
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                self.was_connected = True
                try:
                    self._send()
                    await self._read(reader)
                finally:
                    self._writer.close()
                    self._writer = None
            most_s = self._most_pause_s
            pause_s = FIRST_PAUSE_S if clock.monotonic() - began > most_s else min(most_s, 2 * pause_s)
            await asyncio.sleep(pause_s)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Until the agent ends the connection. An order that comes together with its withdrawal, for this process was
        stopped, is none."""
        rest = b""
        while data := await reader.read(MAX_LINE_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            said = []
            for line in lines:
                with contextlib.suppress(ValueError):
                    said.append(from_agent(line))
            withdrawn = {each.withdrawn for each in said}
            for each in said:
                if each.order is None or each.order.decision not in withdrawn:
                    self._hear(each)
            if len(rest) > MAX_LINE_BYTES:
                return
