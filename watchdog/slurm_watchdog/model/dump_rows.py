"""What dump after dump of one run has shown: ranks that go round in a loop, and whether anybody moves."""

from __future__ import annotations

from slurm_watchdog.base.structs import Struct
from slurm_watchdog.model.evidence import Frame


class Steady(Struct):
    """A rank that runs Python in one small loop, as dump after dump since the last step had it; see
    slurm_watchdog.diagnose.stacks.spinning. `*_at` are on the clock of `ClusterView.now`."""

    node: str
    pid: int
    rank: int
    first_at: float
    last_at: float
    dumps: int
    with_gil: int  # Dumps in which its main thread held the interpreter's lock.
    stacks: tuple[tuple[Frame, ...], ...]  # The different ones, innermost frame first.
    io_bytes: int  # Read and written by the first of these dumps; hardly more since.
    resident_bytes: tuple[int, int]  # The least and the most.
    cpu_s: tuple[float, float]  # Of the whole process, at the first and at the last dump.


class Motion(Struct):
    """What the dumps of one run say of a loop whose steps cannot be read; see
    slurm_watchdog.analysis.rank_motion. `*_at` are on the clock of `ClusterView.now`."""

    last_at: float  # Of the newest dump.
    trained: int = 0  # Dumps since whose predecessor it had moved, with a rank in the code of a training.
    still_from_at: float | None = None
    """The first dump of the unbroken row in which no one was seen to have moved; None: someone has, or it is
    not known."""
    still_looks: int = 0  # Dumps of that row.
    pauses_s: tuple[float, ...] = ()  # How long earlier such rows lasted, until someone moved again; oldest first.
