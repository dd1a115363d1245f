"""The error in the log that stopped a rank is the cause of its hang; what only looks like one is none."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.logs.step_rows import make_event
from slurm_watchdog.detect.collective_hang import CollectiveHang, detect
from slurm_watchdog.model.cluster_view import ErrorLine
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.parse.training_log.line import parse_line
from tests.builders.views import LOADER, RECV, cluster, job, progress, still

STEP_AGE_S = 70.0
SHARD = "OSError: [Errno 5] Input/output error: '/gpfs/data/shard-004.bin'"
THREAD = ("Exception in thread Thread-5 (reader):", "Traceback (most recent call last):")
QUEUE = ("wait (threading.py)", "get (queue.py)", "batches (train.py)", "main (train.py)")
OWN_CODE = ("step (solver.py)", "main (train.py)")
TIMED_OUT = (
    "[rank2]:[E ProcessGroupNCCL.cpp:607] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=40512, "
    "OpType=ALLREDUCE, NumelIn=26214400, NumelOut=26214400, Timeout(ms)=600000) ran for 600123 milliseconds before timing out."
)

CAUSES: dict[str, tuple[tuple[str, ...], float, tuple[str, ...], str]] = {
    "a reader's file, in a line of no rank": ((*THREAD, SHARD), 65.0, QUEUE, "names no rank: OSError: [Errno 5]"),
    "the same below a data loader": ((SHARD,), 65.0, LOADER, "shard-004.bin"),
    "a thread that raised anything": ((*THREAD, "ValueError: bad magic in shard 4"), 65.0, QUEUE, "bad magic in shard 4"),
    "a worker that was killed": (
        ("RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error.",), 65.0, LOADER, "is killed by signal",
    ),
    "a file handle that a server forgot": (
        ("OSError: [Errno 116] Stale file handle: '/nfs/x.tar'",), 65.0, QUEUE, "Stale file handle",
    ),
    "the rank's own words": (("[rank2]: ValueError: shapes do not fit",), 65.0, OWN_CODE, "Its log says why: ValueError"),
    "the rank's own GPU": (
        ("[rank2]: RuntimeError: CUDA error: an illegal memory access was encountered",), 65.0, OWN_CODE, "illegal memory",
    ),
    "a reader that died while its queue had batches": ((*THREAD, SHARD), STEP_AGE_S + 8.0, QUEUE, "shard-004.bin"),
}  # fmt: skip
NO_CAUSES: dict[str, tuple[tuple[str, ...], float, tuple[str, ...]]] = {
    "another rank's": ((f"[rank1]: {SHARD}",), 65.0, QUEUE),
    "a server that timed out": (
        ("urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(host='s3'): Read timed out.",), 65.0, QUEUE,
    ),
    "a collective that timed out": ((TIMED_OUT,), 65.0, LOADER),
    "a peer that was lost": (("RuntimeError: [1] is setting up NCCL communicator: Connection reset by peer",), 65.0, QUEUE),
    "an exception that may have been handled": (
        ("Traceback (most recent call last):", "ValueError: bad sample"), 65.0, QUEUE,
    ),
    "long before the last step": ((*THREAD, SHARD), STEP_AGE_S + 300.0, QUEUE),
    "of no rank, while this one is in its own code": ((SHARD,), 65.0, OWN_CODE),
}  # fmt: skip


def summary(lines: tuple[str, ...], age_s: float, where: tuple[str, ...]) -> str:
    errors = []
    for line in lines:
        fact = parse_line(line)
        assert fact is not None, line
        event = replace(make_event(fact, 0.0), job_id="7", source="/log")
        errors.append(ErrorLine(node="n1", age_s=age_s, event=event))
    view = job(progress=progress(STEP_AGE_S), snapshots=still(RECV, RECV, where, RECV), errors=tuple(errors))
    (found,) = detect(cluster(view), CollectiveHang())
    assert (found.truth, [each.rank for each in found.culprits]) == (Truth.BAD, [2])
    return found.summary


@pytest.mark.parametrize("name", CAUSES)
def test_an_error_that_stopped_the_rank_is_the_cause_in_the_sentence(name: str) -> None:
    *given, words = CAUSES[name]
    assert words in summary(*given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NO_CAUSES)
def test_an_error_that_does_not_stop_this_rank_is_no_cause(name: str) -> None:
    assert "says why" not in summary(*NO_CAUSES[name])
