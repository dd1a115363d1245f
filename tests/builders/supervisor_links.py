"""The agent's end of the connection of supervisors, where the process that runs the test is in a job."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from slurm_watchdog.agent.processes.jobs_here import JobsHere
from slurm_watchdog.agent.processes.supervisor_link import SupervisorLink
from slurm_watchdog.base import clock
from slurm_watchdog.model.protocol import JobWatch
from slurm_watchdog.model.supervisor import (
    PROTOCOL,
    FromAgent,
    FromSupervisor,
    JobSupervisor,
    SupervisorState,
    SupervisorStatus,
    from_agent,
)

JOB, RUN = "7", 2
STATUS = SupervisorStatus(protocol=PROTOCOL, state=SupervisorState.RUNNING, step_id="0", nodes=("n1",), starts=1)


def link_at(place: Path, *, uid: int | None = None, here: Mapping[int, str] | None = None) -> SupervisorLink:
    """An agent that listens in `place`. Job 7 is of `uid` (else ours); `here`: processes and their jobs, else ours."""
    jobs = JobsHere()
    jobs.hear([JobWatch(job_id=JOB, restarts=RUN, uid=os.getuid() if uid is None else uid)])
    here = {os.getpid(): JOB} if here is None else here
    entries: Any = {pid: SimpleNamespace(member=SimpleNamespace(job_id=job), known=None) for pid, job in here.items()}
    link = SupervisorLink(str(place / "agent"), jobs, entries)
    list(link.tick(clock.monotonic()))
    assert not link.problem
    return link


def rows(link: SupervisorLink) -> list[JobSupervisor]:
    """What a tick of the agent reports."""
    link._rests_until = 0.0
    return list(link.tick(clock.monotonic()))


def until(link: SupervisorLink, holds: Callable[[list[JobSupervisor]], Any], what: str, within_s: float = 10.0) -> Any:
    """The rows of the first tick for which this holds."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        found = rows(link)
        if holds(found):
            return found
        time.sleep(0.02)
    raise AssertionError(f"not in time: {what}: {rows(link)}")


class Peer:
    """One that connects, and says what it likes."""

    def __init__(self, place: Path):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(5)
        self.sock.connect(str(place / "agent"))
        self._rest = b""

    def say(self, status: SupervisorStatus = STATUS, restarts: int = RUN) -> None:
        self.sock.sendall(msgspec.json.encode(FromSupervisor(restarts=restarts, status=status)) + b"\n")

    def heard(self, link: SupervisorLink | None = None) -> FromAgent:
        """The next line of the agent, whose ticks go on."""
        self.sock.settimeout(0.05 if link is not None else 0.3)
        for _ in range(100 if link is not None else 1):
            if b"\n" in self._rest:
                break
            with contextlib.suppress(TimeoutError if link is not None else ()):
                data = self.sock.recv(65536)
                assert data, "the agent has ended the connection"
                self._rest += data
            if link is not None:
                rows(link)
        line, _, self._rest = self._rest.partition(b"\n")
        return from_agent(line)

    @property
    def is_open(self) -> bool:
        self.sock.settimeout(0.05)
        try:
            return bool(self.sock.recv(1 << 20))
        except TimeoutError:
            return True
        except OSError:
            return False
