"""How busy one process is: CPU time and I/O, from counters in two of its reports."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_watchdog.model.observations import Process, Role

RATE_S = 20.0
"""Counters are compared over at least this time: a report every 5 s is too short for a process that works in bursts."""


POLLS_CPU, QUIET_CPU = 0.5, 0.2
"""Cores: a rank that computes or polls uses more than the one, a rank that waits for something less than the other."""

ASLEEP_LOOKS, ASLEEP_S = 6, 30.0
"""Where no one tells its time, a process that was found running as often before, and now asleep in each of so
many looks, uses none."""

WORKS_CPU, WORKS_BYTES_S = 0.05, 1e5
"""Cores, and bytes a second: who uses more from one report to the next has something to do. A thread that looks
around every second uses a tenth of it."""
LEAST_LOOK_S = 1.5  # Between two such reports: CPU time is counted in hundredths of a second.

MOMENT_S = 15.0  # A call on a file that is over so soon: the process moves data. A longer one may be stuck.


@dataclass(slots=True)
class ProcessRates:
    """How busy one process is, from counters that only rise."""

    at: float
    cpu_s: float
    io_bytes: int | None
    cpu_ratio: float | None = None
    io_bytes_s: float | None = None
    storage_at: float | None = None  # When it was last seen waiting for a disk or a file, for a moment only.
    busy_at: float | None = None
    """When it was last seen to use most of a core, or more than next to nothing since; None: never."""
    ran: int = 0  # Looks that found it running, of a process whose time is not reported.
    asleep: int = 0  # Looks since, that found it asleep.
    asleep_at: float = 0.0  # When the first of these was.

    worked_at: float | None = None  # When it was last seen to have worked since the report before; None: never.
    _looked_at: float | None = None  # When that report was; None: there was none.
    _looked_cpu_s: float = 0.0
    _looked_io_bytes: int | None = None

    def update(self, process: Process, now: float) -> None:
        self._note_work(process, now)
        if (process.blocked is not None or process.state == "D") and _waits_for_a_moment(process):
            self.storage_at = now
        if process.cpu_s <= 0.0:
            self._note_state(process.state, now)
        elapsed_s = now - self.at
        if elapsed_s < RATE_S:
            return
        # No one has trained without using any time: nought is what a trace says that does not tell. A
        # loader's worker may have.
        reported = process.role is Role.WORKER or min(process.cpu_s, self.cpu_s) > 0
        used_s = max(0.0, process.cpu_s - self.cpu_s) if reported else None
        self.cpu_ratio = self._by_state(now) if used_s is None else used_s / elapsed_s
        if self.cpu_ratio is None:
            self.busy_at = None
        elif self.cpu_ratio >= (POLLS_CPU if self.busy_at is None else QUIET_CPU):
            self.busy_at = now
        known = process.io_bytes is not None and self.io_bytes is not None
        self.io_bytes_s = max(0, (process.io_bytes or 0) - (self.io_bytes or 0)) / elapsed_s if known else None
        self.at, self.cpu_s, self.io_bytes = now, process.cpu_s, process.io_bytes

    def _note_work(self, process: Process, now: float) -> None:
        before_at, before_cpu_s, before_bytes = self._looked_at, self._looked_cpu_s, self._looked_io_bytes
        passed_s = LEAST_LOOK_S if before_at is None else now - before_at
        if passed_s < LEAST_LOOK_S:
            return
        self._looked_at, self._looked_cpu_s, self._looked_io_bytes = now, process.cpu_s, process.io_bytes
        if before_at is None:
            self.worked_at = now
            return
        counted = process.io_bytes is not None and before_bytes is not None
        moved_bytes = (process.io_bytes or 0) - (before_bytes or 0) if counted else 0
        if process.cpu_s - before_cpu_s > WORKS_CPU * passed_s or moved_bytes > WORKS_BYTES_S * passed_s:
            self.worked_at = now

    def _note_state(self, state: str, now: float) -> None:
        if state not in ("S", "I"):
            self.ran, self.asleep = self.ran + (state == "R"), 0
            return
        self.asleep, self.asleep_at = self.asleep + 1, self.asleep_at if self.asleep else now

    def _by_state(self, now: float) -> float | None:
        """None: no one knows. A process that sleeps at every look anyway says nothing by sleeping."""
        slept = self.asleep >= ASLEEP_LOOKS and now - self.asleep_at >= ASLEEP_S
        return 0.0 if slept and self.ran >= ASLEEP_LOOKS else None


def _waits_for_a_moment(process: Process) -> bool:
    if process.blocked is not None:
        return process.blocked.mount is not None and process.blocked.seconds < MOMENT_S
    return process.state == "D" and (process.state_age_s or 0.0) < MOMENT_S
