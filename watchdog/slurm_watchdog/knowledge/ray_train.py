"""The workers of Ray Train: how their processes are called, and where the log says which rank each of them is.

raylet starts them, so they have the environment of the task that started Ray, and no rank in it: Ray sets
RANK and its like from inside, which /proc/PID/environ does not show. The controller of a run logs the ranks
when its group of workers has started (Ray 2.7 to 2.60, `ray/train/_internal/backend_executor.py` and
`ray/train/v2/_internal/execution/worker_group/worker_group.py`):

    Started training worker group of size 2:
    - (ip=192.0.2.2, pid=12426) world_rank=0, local_rank=0, node_rank=0
"""

from __future__ import annotations

import msgspec

from slurm_watchdog.base.late_regex import late_regex

WORKER_NAMES = ("ray::RayTrainWo", "ray::_RayTrainW")
"""Of a worker's process (15 characters, as the kernel keeps them): the titles `ray::RayTrainWorker[.METHOD]` and
`ray::_RayTrainWorker__execute.METHOD` (before Train V2)."""
MAX_WORKERS = 1024  # Of one node.

_STARTED = late_regex(rb"Started (?:distributed worker processes|training worker group of size \d+): ?")
_SEAT = late_regex(
    rb"- \((?:node_id=\w{1,64}, )?ip=([\w.:-]{1,64}), pid=(\d{1,9})\) "
    rb"world_rank=(\d{1,6}), local_rank=(\d{1,4}), node_rank=\d{1,6}"
)

_SPEAKER = late_regex(r"\W{0,12}(?:\d{1,3}m)?\(_?RayTrainWorker\w{0,20} pid=(\d{1,9})\)")
"""Who wrote a line, in front of it as the driver prints it; an address behind the pid means another node."""
_DIED = late_regex(r"\bWorker IP address: (?P<host>[\w.:-]{1,64}) .{0,80}?Worker PID: (?P<pid>\d{1,9})\b")
"""The raylet's word of a worker process that ended by itself: core_worker/task_manager.cc, Ray 2.9 to 2.60.
How it ended Ray does not know: what it lists behind that are possible causes."""


class Row(msgspec.Struct, frozen=True):
    """A row of the table of ranks."""

    address: str
    pid: int
    rank: int


def seat_of(line: str) -> Row | None:
    """The row of the table of ranks that a line is; None if it is none."""
    found = _SEAT.search(line.encode(errors="replace"))
    return Row(found[1].decode(), int(found[2]), int(found[3])) if found else None


def died_of(line: str) -> tuple[int, str] | None:
    """Pid and address of the worker of which raylet says that its process died; None if a line says no such thing."""
    found = _DIED.search(line)
    return (int(found["pid"]), found["host"]) if found else None


def speaker_of(line: str) -> int | None:
    """The pid of the worker that wrote a line of the driver's log, on the driver's node; None if it does not say."""
    found = _SPEAKER.match(line)
    return int(found[1]) if found else None


class WorkerRank(msgspec.Struct, frozen=True):
    """Which rank a process is."""

    rank: int
    local_rank: int
    world_size: int


class WorkerRankReader(msgspec.Struct):
    """Gathers the newest table of ranks from the blocks of a log; one for each file."""

    by_pid: dict[int, tuple[int, int]] | None = None  # Pid -> rank and local rank; None: no table was seen.
    hosts: frozenset[bytes] = frozenset()

    def feed(self, lines: bytes) -> None:
        """Takes whole lines of the log."""
        if b"world_rank=" not in lines and b"Started " not in lines:
            return
        for line in lines.splitlines():
            if b"Started " in line and _STARTED.search(line):
                self.by_pid, self.hosts = {}, frozenset()
            elif self.by_pid is not None and b"world_rank=" in line and (found := _SEAT.search(line)):
                # A replica group that is replaced gives its ranks to new processes.
                self.by_pid = {pid: seat for pid, seat in self.by_pid.items() if seat[0] != int(found[3])}
                if len(self.by_pid) < MAX_WORKERS:
                    self.by_pid[int(found[2])] = (int(found[3]), int(found[4]))
                    self.hosts |= {found[1]}

    def seats(self) -> dict[int, WorkerRank]:
        """Pid -> rank of the newest group, if it is on one node: of several, a log has addresses, no processes."""
        if not self.by_pid or len(self.hosts) != 1:
            return {}
        ranks = {rank for rank, _ in self.by_pid.values()}
        if ranks != set(range(len(self.by_pid))):
            return {}  # a line is missing, or has not been written yet
        return {pid: WorkerRank(rank, local, len(ranks)) for pid, (rank, local) in self.by_pid.items()}
