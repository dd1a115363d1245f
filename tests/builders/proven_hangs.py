"""A training of four ranks with steps of a second, one of which waits for a lock that nobody gives back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from slurm_watchdog.model.cluster_view import JobView, ProcessView, StackSnapshot, StillRow
from slurm_watchdog.model.evidence import ProcessStack, WaitingThreads
from slurm_watchdog.model.observations import Role
from tests.builders.views import BARRIER, job, progress, seen, stack

TURN = ("take_turn (state.py)", "train_step (train.py)", "main (train.py)", "<module> (train.py)")
DATA = (
    "_PollLikeSelector.select (selectors.py)",
    "wait (multiprocessing/connection.py)",
    "Connection._poll (multiprocessing/connection.py)",
    "Queue.get (multiprocessing/queues.py)",
    "_MultiProcessingDataLoaderIter._try_get_data (torch/utils/data/dataloader.py)",
    "_BaseDataLoaderIter.__next__ (torch/utils/data/dataloader.py)",
    "main (train.py)",
    "<module> (train.py)",
)
"""Names as py-spy gives them from Python 3.11 on."""
WAITS_FOR_WORK = (
    "_PollLikeSelector.select (selectors.py)",
    "Connection._poll (multiprocessing/connection.py)",
    "Queue.get (multiprocessing/queues.py)",
    "_worker_loop (torch/utils/data/_utils/worker.py)",
    "BaseProcess.run (multiprocessing/process.py)",
)
MAKES_A_SAMPLE = (
    "Corpus.__getitem__ (corpus.py)",
    "_MapDatasetFetcher.fetch (torch/utils/data/_utils/fetch.py)",
    "_worker_loop (torch/utils/data/_utils/worker.py)",
    "BaseProcess.run (multiprocessing/process.py)",
)
AGES_S = (3.2, 1.2, 0.1)
"""Of the first dump of the row and the last two."""


def threads(call: str, number: int = 1, name: str = "python", state: str = "S") -> WaitingThreads:
    return WaitingThreads(name=name, state=state, call=call, threads=number)


SHARES = (threads("futex", 1, "pt_data_worker"), threads("accept4", 1, "pt_data_worker"))
"""The threads of a worker that gives its tensors away as files (torch's `file_descriptor` strategy)."""
USUAL = (threads("futex", 8), threads("epoll_wait", 1))


def dumped(rank: int, lines: Sequence[str], **changes: Any) -> ProcessStack:
    """As an agent dumps a rank that does nothing."""
    given: dict[str, Any] = {"state": "S", "syscall": "futex", "io_bytes": 1000, "cpu_s": 50.0, "others": USUAL}
    return stack(rank, lines, **{**given, **changes})


def worker_dumped(rank: int, lines: Sequence[str] = WAITS_FOR_WORK, **changes: Any) -> ProcessStack:
    """The same of the worker of its data loader."""
    given: dict[str, Any] = {"pid": 200 + rank, "role": Role.WORKER, "syscall": "poll", "others": SHARES}
    found = dumped(rank, lines, **{**given, **changes})
    return replace(found, threads=tuple(replace(each, thread_id=found.pid) for each in found.threads))


def process(rank: int, **changes: Any) -> ProcessView:
    return replace(seen(rank, **changes), worked_age_s=9.0)


def worker(rank: int, **changes: Any) -> ProcessView:
    return process(rank, pid=200 + rank, role=Role.WORKER, comm="pt_data_worker", **changes)


def row(*stacks: ProcessStack, dumps: int = 3, ages_s: Sequence[float] = AGES_S, **changes: Any) -> StillRow:
    """Dumps that are all alike."""
    return StillRow(
        dumps=dumps, snapshots=tuple(StackSnapshot(age_s=age_s, stacks=stacks) for age_s in ages_s), **changes
    )


def late(age_s: float = 14.0, **changes: Any) -> Any:
    """A log that is read every 5 s had a step each time, until so long ago."""
    given: dict[str, Any] = {
        "paces_s": (5.0,) * 100,
        "longest_pace_s": 5.2,
        "read_age_s": 0.5,
        "intervals_s": (5.0,) * 50,
    }
    return progress(age_s, **{**given, **changes})


STACKS = (dumped(0, BARRIER), dumped(1, BARRIER), dumped(2, TURN), dumped(3, BARRIER))


def hung(stacks: Sequence[ProcessStack] = STACKS, **changes: Any) -> JobView:
    """The job; rank 2 is the one."""
    given: dict[str, Any] = {
        "progress": late(), "row": row(*stacks), "processes": tuple(process(rank) for rank in range(4)),
    }  # fmt: skip
    return job(**{**given, **changes})


def starved(**worker_of_rank_2: Any) -> JobView:
    """The same job; rank 2 waits for its data loader, whose worker looks as given."""
    lines = worker_of_rank_2.pop("lines", WAITS_FOR_WORK)
    waits = [dumped(rank, BARRIER) for rank in (0, 1, 3)]
    idle = [worker_dumped(rank) for rank in (0, 1, 3)]
    stacks = (*waits, dumped(2, DATA), *idle, worker_dumped(2, lines, **worker_of_rank_2))
    return hung(stacks, processes=tuple(each(rank) for rank in range(4) for each in (process, worker)))
