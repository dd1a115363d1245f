"""What was done and what is broken in a simulated cluster, in truth."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Deed:
    """One thing that really happened, and whose it was: `us`, `person`, `slurm`, `job`, `fault`."""

    t: float
    by: str
    what: str
    job_id: str = ""
    restarts: int = -1
    start_at: float | None = None
    detail: str = ""

    def line(self) -> str:
        return f"{self.t:.3f} {self.by} {self.what} {self.job_id} {self.restarts} {self.start_at} {self.detail}"


@dataclass
class Fault:
    """A fault of one run of one job, while it lasts."""

    kind: str
    job_id: str
    restarts: int
    began: float
    told: int = 0
    """Steps that the run's log had told by then."""
    ended: float | None = None


@dataclass
class Truth:
    deeds: list[Deed] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def note(self, deed: Deed) -> None:
        self.deeds.append(deed)
