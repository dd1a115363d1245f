"""Jobs whose ranks compute, wait or idle, by their processes and GPUs."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from slurm_watchdog.model.cluster_view import JobView, ProcessView, RankGpu
from slurm_watchdog.model.node_view import GpuView
from slurm_watchdog.model.observations import Checkpoint, Gpu, Role
from tests.builders.views import (
    job,
    progress,
    seen,
    slurm_job,
)

NOW = 10_000.0


def card(rank: int, doing: str, **changes: Any) -> RankGpu:
    """The GPU of a rank: it `trains`, `spins`, is `busy` (power not known), or `idles`."""
    power = {"trains": 330.0, "spins": 110.0, "busy": None, "idles": 68.0}[doing]
    idle = doing == "idles"
    row: dict[str, Any] = {
        "uuid": f"GPU-{rank}",
        "index": rank,
        "utilization_ratio": 0.0 if idle else 1.0,
        "power_w": power,
        "recent_power_w": None if idle or power is None else power + 40,
        "usual_power_w": None if power is None else 330.0,
    }
    row |= {name: changes.pop(name) for name in list(changes) if name in Gpu.__struct_fields__}
    given: dict[str, Any] = {
        "node": "n1" if rank < 2 else "n2",
        "gpu": Gpu(**row),
        "idle_since": NOW - 5000 if idle else None,
        "busy_since": None if idle else NOW - 5000,
    }
    return RankGpu(rank=rank, pid=100 + rank, view=GpuView(**{**given, **changes}))


def rank(number: int, cpu: float | None = 0.0, io: float | None = None, **changes: Any) -> ProcessView:
    storage = changes.pop("storage_age_s", None)
    return replace(seen(number, cpu_ratio=cpu, io_bytes_s=io, **changes), storage_age_s=storage)


def four(doing: str = "spins", cpu: float | None = 1.0, **changes: Any) -> JobView:
    """Four ranks that do the same, no step for 70 s; keys r0 … r3 replace a process, g0 … g3 a GPU (None: not
    known)."""
    processes = [changes.pop(f"r{n}", rank(n, cpu)) for n in range(4)]
    cards = [changes.pop(f"g{n}", card(n, doing)) for n in range(4)]
    return job(
        **{
            "processes": tuple(processes),
            "gpus": tuple(each for each in cards if each is not None),
            "progress": progress(changes.pop("age_s", 75.0)),
            **changes,
        }
    )


IDLE_RANK = {"r2": rank(2, 0.0), "g2": card(2, "idles")}


MOVES_UNKNOWN = {f"r{n}": rank(n, 0.0, None if n == 3 else 0.0) for n in range(4)}
"""Bytes are counted, but those of rank 3 are not known."""


SAVES = {"r0": rank(0, 0.9), "g0": card(0, "idles")}


HEALTHY = {
    "a checkpoint: rank 0 computes, the others spin in a barrier": four(**SAVES, age_s=1700.0),
    "a checkpoint: rank 0 moves data": four(
        **{f"r{n}": rank(n, 0.05, 0.0 if n else 5e8) for n in range(4)}, g0=card(0, "idles"), age_s=1700.0
    ),
    "a checkpoint: rank 0 waits for its disk again and again": four(
        r0=rank(0, 0.05, storage_age_s=3.0), g0=card(0, "idles"), age_s=1700.0
    ),
    "a checkpoint: a child of rank 0 writes": four(
        **IDLE_RANK,
        processes=(*(rank(n, 0.0) for n in range(4)), rank(2, 0.9, pid=900, role=Role.WORKER)),
        age_s=1700.0,
    ),
    "a checkpoint that grows on the disk": four(
        checkpoints_on_disk=(Checkpoint(job_id="7", directory="/c", writing=True),), age_s=1700.0
    ),
    "a checkpoint of half an hour between steps of 105 s": four(
        **SAVES, progress=progress(1900.0, intervals_s=(105.0,) * 20)
    ),
    "an evaluation of twelve minutes that nobody announces": four("trains", age_s=820.0),
    "an evaluation whose GPUs are busy now and then": four(
        "trains", g1=card(1, "trains", busy_since=None), age_s=820.0
    ),
    "an index that rank 0 builds while nobody's GPU does anything": four("idles", 0.0, r0=rank(0, 1.0), age_s=1700.0),
    "all ranks save": four("idles", 0.4, age_s=1700.0),
    "start-up": four("idles", 0.0, progress=progress(3000.0, steps_seen=2)),
    "an evaluation that the log announces": four("idles", 0.0, progress=progress(1700.0, phase="evaluating")),
    "a job that has never logged a step": four("idles", 0.0, progress=None, run_age_s=9e4),
    "a suspended job": four("idles", 0.0, job=slurm_job(state="SUSPENDED")),
}


UNSEEN = {
    "a GPU has only just become idle": four(r2=rank(2, 0.0), g2=card(2, "idles", idle_since=NOW - 20)),
    "a node is silent": four(silent_nodes=("n2",)),
    "nobody knows how busy the processes are": four("idles", None),
    "one process is not known": four("idles", 0.0, r3=rank(3, None)),
    "one GPU is not known, and its process is quiet": four(r3=rank(3, 0.0), g3=None),
    "the power of one GPU is not known": four(g3=card(3, "busy")),
    "the power of no GPU is known, and none idles": four("busy"),
    "what one of those that spin moves is not known": four(**MOVES_UNKNOWN),
    "what a busy one moves is not known, and another one idles": four("busy", **MOVES_UNKNOWN, g2=card(2, "idles")),
    "no processes": four(processes=()),
    "a GPU that does not answer": four(
        **{k: v for k, v in IDLE_RANK.items() if k == "r2"},
        g2=card(2, "idles", idle_since=None, gpu=Gpu(uuid="GPU-2", index=2, error="lost")),
    ),
}
