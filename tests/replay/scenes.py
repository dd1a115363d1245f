"""Writes the traces of this folder: `python -m tests.replay.scenes`. They are small enough to be read
and changed by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.builders.told import Line

JOB = "1882409"
NODES = ("n0", "n1")
PER_NODE = 2


def job(t: float, **changes: Any) -> Line:
    given = {
        "state": "RUNNING",
        "nodes": list(NODES),
        "restarts": 0,
        "name": "m4",
        "user": "u",
        "batch_host": "n0",
    }
    return {"t": t, "kind": "job", "job_id": JOB, **given, **changes}


def rank(t: float, number: int, **changes: Any) -> Line:
    """One rank that trains: half of the time it computes, half of the time it waits."""
    given = {
        "node": NODES[number // PER_NODE], "job_id": JOB, "rank": number, "pid": 280058 + number, "start": 123.0 + number,
        "state": "R" if (t // 5 + number) % 2 else "S", "cpu_s": round(1000 + 0.9 * t + number, 1),
    }  # fmt: skip
    return {"t": t, "kind": "proc", **given, **changes}


def gpu(t: float, number: int, **changes: Any) -> Line:
    given = {
        "node": NODES[number // PER_NODE], "job_id": JOB, "gpu": number % PER_NODE, "uuid": f"GPU-eb0{number}", "util": 100,
        "sm_clock_mhz": 1410, "power_w": 330, "temp_c": 55, "mem_used_mib": 22377, "throttle": [],
        "pids": [changes.pop("pid", 280058 + number)],
    }  # fmt: skip
    return {"t": t, "kind": "gpu", **given, **changes}


def log(t: float, line: str, **changes: Any) -> Line:
    return {"t": t, "kind": "log", "node": "n0", "job_id": JOB, "stream": "stdout", "line": line, **changes}


def step(t: float, number: int, total: int = 1000) -> Line:
    return log(
        t,
        f" iteration {number:8d}/{total:8d} | elapsed time per iteration (ms): 10000.0 | lm loss: 2.5E+00 |",
    )


def node_says(t: float, node: str, ranks: dict[int, dict[str, Any] | None], gpus: bool = True) -> Iterator[Line]:
    """One report: all ranks of the node and their GPUs; `ranks` has what is different about some, None where
    one is not listed."""
    yield {"t": t, "kind": "report", "node": node}
    for number in range(PER_NODE * len(NODES)):
        if NODES[number // PER_NODE] != node:
            continue
        changes = ranks.get(number, {})
        if changes is not None:
            yield rank(t, number, **{k: v for k, v in changes.items() if k not in ("gpu",)})
        if changes is not None and gpus:
            yield gpu(t, number, **{"pid": changes.get("pid", 280058 + number), **changes.get("gpu", {})})


def everybody(t: float, ranks: dict[int, dict[str, Any] | None] | None = None, gpus: bool = True) -> Iterator[Line]:
    for node in NODES:
        yield from node_says(t, node, ranks or {}, gpus)


IDLE = {"util": 0, "sm_clock_mhz": 1155, "power_w": 68, "temp_c": 28}


def stuck(t: float, since: float) -> dict[str, Any]:
    """A rank that has been writing its log since then."""
    return {
        "state": "D", "state_age_s": t - since, "wchan": "rpc_wait_bit_killable", "syscall": "write",
        "path": "/gpfs/m4/main_log.txt", "mount": "/gpfs", "cpu_s": 1234.5, "gpu": IDLE,
    }  # fmt: skip


def training(until: float, *, every: float = 10.0, step_s: float = 10.0, gpus: bool = True) -> Iterator[Line]:
    """A healthy job from 0 on, a step every ten seconds."""
    yield job(0)
    t = 0.0
    while (t := t + every) <= until:
        yield from everybody(t, gpus=gpus)
        if t % step_s == 0:
            yield step(t, int(t // step_s))


def filesystem_outage() -> Iterator[Line]:
    yield from training(100)
    yield {"t": 101, "kind": "fault", "name": "frozen filesystem", "job_id": JOB}
    for t in range(110, 191, 10):
        yield from everybody(t, {0: stuck(t, 101), 2: stuck(t, 102), 1: {"state": "S"}, 3: {"state": "S"}})


def filesystem_stall() -> Iterator[Line]:
    yield from training(100)
    yield {"t": 101, "kind": "fault", "name": "frozen on one node", "job_id": JOB, "node": "n0"}
    for t in range(110, 191, 10):
        yield from everybody(t, {0: stuck(t, 101)})
        yield {"t": t, "kind": "mount", "node": "n1", "mount": "/gpfs", "responding": True, "probe_s": 0.01}
        yield {"t": t, "kind": "mount", "node": "n0", "mount": "/gpfs", "responding": False, "probe_s": None}


def _dead(changes: dict[str, Any] | None) -> Iterator[Line]:
    yield from training(100, gpus=False)
    yield {"t": 102, "kind": "fault", "name": "dead rank", "job_id": JOB, "node": "n1"}
    yield log(102, "[rank3]: RuntimeError: CUDA error: an illegal memory access was encountered")
    for t in range(110, 471, 10):
        yield from everybody(t, {3: changes}, gpus=False)


def dead_rank_zombie() -> Iterator[Line]:
    yield from _dead({"state": "Z", "cpu_s": 1100.0})


def dead_rank_not_listed() -> Iterator[Line]:
    yield from _dead(None)


def hang() -> Iterator[Line]:
    """Everybody waits; the GPUs spin; a status reporter goes on writing."""
    yield from training(200)
    yield {"t": 205, "kind": "fault", "name": "hang", "job_id": JOB}
    spinning = {"state": "R", "gpu": {"power_w": 110}}
    for t in range(230, 2301, 60):
        yield from everybody(t, dict.fromkeys(range(4), spinning))
        if t % 300 == 230:
            yield log(t, "[2023-01-01 00:00:00] PULSE: tr11-176B-ml is running for 1 day (1882409 on 'gpu_p5')")


def healthy() -> Iterator[Line]:
    """Start, steps, an evaluation of ten minutes, a checkpoint of five in which rank 0 writes, a restart, and
    the end."""
    yield from training(300, every=20, step_s=20)
    yield log(300, "Evaluating on 40 batches")
    for t in range(320, 901, 20):
        yield from everybody(t)
    yield log(900, " validation loss at iteration 15 | lm loss value: 2.4E+00 |")
    for number, t in enumerate(range(920, 1201, 20), 16):
        yield from everybody(t)
        yield step(t, number)
    yield log(1200, "saving checkpoint at iteration      30 to /gpfs/m4/checkpoints")
    for t in range(1220, 1501, 20):
        writing = {
            "state": "D",
            "state_age_s": 4,
            "syscall": "write",
            "path": "/gpfs/m4/checkpoints/a",
            "mount": "/gpfs",
        }
        yield from everybody(t, {0: writing, 1: {"state": "S"}, 2: {"state": "S"}, 3: {"state": "S"}})
    yield log(1500, "  successfully saved checkpoint at iteration      30 to /gpfs/m4/checkpoints")
    yield {"t": 1500, "kind": "checkpoint", "node": "n0", "job_id": JOB, "step": 30, "complete": True}
    yield job(1505, state="PENDING")
    for t in range(1520, 1700, 20):
        yield from ({"t": t, "kind": "report", "node": node} for node in NODES)
    yield job(1700, restarts=1)
    again = {n: {"pid": 290000 + n, "start": 1600.0 + n} for n in range(4)}
    for t in range(1720, 2001, 20):  # compiling
        yield from everybody(t, again)
    for number, t in enumerate(range(2020, 2301, 20), 31):
        yield from everybody(t, again)
        yield step(t, number, 45)
    for node in NODES:
        yield {"t": 2305, "kind": "report", "node": node}
    yield job(2310, state="COMPLETED", restarts=1)
    for node in NODES:
        yield {"t": 2310, "kind": "report", "node": node}


SCENES = (filesystem_outage, filesystem_stall, dead_rank_zombie, dead_rank_not_listed, hang, healthy)
