"""Short ways to say what a cluster looks like: one job `7` of four ranks on n1 and n2, unless told otherwise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.model.cluster_view import ClusterView, JobView, ProcessView, Progress, StackSnapshot
from slurm_watchdog.model.evidence import Frame, ProcessStack, SocketBytes, ThreadStack
from slurm_watchdog.model.observations import Blocked, Process, Role
from slurm_watchdog.model.slurm import SlurmJob

CAPTURES = Path(__file__).resolve().parents[1] / "captures/stacks"

RECV = ("ProcessGroup.recv (trainer.py)", "all_reduce (trainer.py)", "train (trainer.py)")
BARRIER = (
    "barrier (torch/distributed/distributed_c10d.py)",
    "wrapper (torch/distributed/c10d_logger.py)",
    "train (t.py)",
)
BACKWARD = (
    "_engine_run_backward (torch/autograd/graph.py)",
    "backward (torch/autograd/__init__.py)",
    "Tensor.backward (torch/_tensor.py)",
    "train (t.py)",
)
LOADER = (
    "Condition.wait (threading.py)",
    "Queue.get (queue.py)",
    "DataLoader._try_get_data (trainer.py)",
    "train (trainer.py)",
)
COMPUTE = ("forward (model.py)", "train (t.py)")
SAVE = ("_write (storage.py)", "save_checkpoint (t.py)", "train (t.py)")


def node_of(rank: int) -> str:
    return "n1" if rank < 2 else "n2"


def process(rank: int | None = 0, **changes: Any) -> Process:
    given = {
        "pid": 100 + (rank or 0),
        "start_ticks": 5,
        "job_id": "7",
        "role": Role.RANK,
        "comm": "python",
        "state": "S",
        "uid": 1000,
        "step_id": "0",
        "rank": rank,
        "world_size": 4,
    }
    return Process(**{**given, **changes})


def seen(rank: int = 0, *, node: str | None = None, gone_s: float | None = None, **changes: Any) -> ProcessView:
    return ProcessView(
        node=node or node_of(rank), process=process(rank, **changes), seen_age_s=gone_s or 1.0, gone_s=gone_s
    )


def blocked(seconds: float, **changes: Any) -> Blocked:
    given = {
        "thread_id": 100,
        "seconds": seconds,
        "state": "D",
        "syscall": "write",
        "path": "/shared/log.txt",
        "mount": "/shared",
    }
    return Blocked(**{**given, **changes})


def frames(lines: Sequence[str]) -> tuple[Frame, ...]:
    return tuple(Frame(function=a, file=b.rstrip(")"), line=1) for a, b in (line.split(" (") for line in lines))


def stack(
    rank: int, lines: Sequence[str], *, cpu_s: float = 0.0, node: str | None = None, **changes: Any
) -> ProcessStack:
    thread = ThreadStack(thread_id=100 + rank, name="MainThread", active=True, frames=frames(lines))
    given: dict[str, Any] = {
        "node": node or node_of(rank),
        "pid": 100 + rank,
        "start_ticks": 5,
        "job_id": "7",
        "role": Role.RANK,
        "rank": rank,
        "threads": (thread,) if lines else (),
        "main_cpu_s": cpu_s,
    }
    return ProcessStack(**{**given, **changes})


def snapshot(age_s: float, stacks: Sequence[ProcessStack]) -> StackSnapshot:
    return StackSnapshot(age_s=age_s, stacks=tuple(stacks))


def still(*places: Sequence[str]) -> tuple[StackSnapshot, ...]:
    """Three dumps in which every rank stands where it stood."""
    return tuple(snapshot(age, [stack(rank, lines) for rank, lines in enumerate(places)]) for age in (30, 20, 10))


def talking(dumps: Sequence[StackSnapshot], rank: int, seen_of_it: Sequence[str]) -> tuple[StackSnapshot, ...]:
    """`dumps`, where `rank` waits for a connection: `a 9e5` for one that is named a and has moved so many bytes,
    anything else where it waits for none."""

    def of(text: str) -> tuple[SocketBytes, ...]:
        name, _, moved = text.partition(" ")
        return (SocketBytes(socket=name, moved=int(float(moved))),) if moved else ()

    return tuple(
        replace(dump, stacks=tuple(replace(s, waits_for=of(text)) if s.rank == rank else s for s in dump.stacks))
        for dump, text in zip(dumps, seen_of_it, strict=True)
    )


def slurm_job(**changes: Any) -> SlurmJob:
    given = {"job_id": "7", "state": "RUNNING", "nodes": ("n1", "n2"), "start_at": 900.0, "uid": 1000}
    return SlurmJob(**{**given, **changes})


def progress(age_s: float, **changes: Any) -> Progress:
    given = {
        "step": 500,
        "age_s": age_s,
        "last_increase_age_s": age_s,
        "steps_seen": 50,
        "intervals_s": (10.0,) * 20,
    }
    return Progress(**{**given, **changes})


def job(**changes: Any) -> JobView:
    given: dict[str, Any] = {
        "job": slurm_job(),
        "run_age_s": 5000.0,
        "processes": tuple(seen(rank) for rank in range(4)),
        "progress": progress(5.0),
    }
    return JobView(**{**given, **changes})


def cluster(*jobs: JobView, **changes: Any) -> ClusterView:
    given: dict[str, Any] = {
        "now": 10_000.0,
        "jobs": jobs,
        "reporting_nodes": ("n1", "n2", "n3"),
        "slurm_age_s": 1.0,
    }
    return ClusterView(**{**given, **changes})


def captured(name: str) -> tuple[StackSnapshot, ...]:
    """Two real dumps of four ranks, 4 s apart."""
    dumps = json.loads((CAPTURES / f"{name}.json").read_text())["dumps"]
    return tuple(
        snapshot(
            age_s,
            [
                ProcessStack(
                    node=node_of(each["rank"]),
                    pid=each["pid"],
                    start_ticks=5,
                    job_id="7",
                    role=Role.RANK,
                    rank=each["rank"],
                    cpu_s=each["cpu_s"],
                    threads=tuple(
                        ThreadStack(
                            thread_id=thread["os_thread_id"],
                            name=thread["thread_name"] or "",
                            active=thread["active"],
                            frames=tuple(Frame(function=a, file=b, line=c) for a, b, c in thread["frames"]),
                        )
                        for thread in each["threads"]
                    ),
                )
                for each in dump
            ],
        )
        for age_s, dump in zip((14.0, 10.0), dumps, strict=True)
    )
