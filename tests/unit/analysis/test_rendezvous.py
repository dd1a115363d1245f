"""A rank that never joins the others is named within minutes, and nobody is who may be at work on the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.detect.collective_hang import CollectiveHang, hang_finding
from slurm_watchdog.model.cluster_view import JobView
from slurm_watchdog.model.evidence import ProcessStack
from slurm_watchdog.model.incidents import Finding, Truth
from slurm_watchdog.model.observations import Role
from tests.builders.proven_hangs import TURN, dumped, process, threads
from tests.builders.views import BARRIER, blocked, job, progress, snapshot

JOINS = (
    "_store_based_barrier (torch/distributed/distributed_c10d.py)",
    "init_process_group (torch/distributed/distributed_c10d.py)",
    "main (train.py)",
)
KEEPS_THE_STORE = (
    "_create_c10d_store (torch/distributed/rendezvous.py)",
    "_env_rendezvous_handler (torch/distributed/rendezvous.py)",
    "init_process_group (torch/distributed/distributed_c10d.py)",
    "main (train.py)",
)
LOCKED = ("take_turn (state.py)", "main (train.py)", "<module> (train.py)")
AGES_S = (361.0, 61.0, 1.0)
"""As a start is looked at: after 5 min, after 10, and a minute later."""


def starts(rank_2: ProcessStack, ages_s: Sequence[float] = AGES_S, **changes: Any) -> JobView:
    """Four ranks, eleven minutes after they were started; three of them wait in the rendezvous."""
    joining = {rank: dumped(rank, JOINS if rank else KEEPS_THE_STORE, syscall="poll") for rank in (0, 1, 3)}
    stacks = tuple(rank_2 if rank == 2 else joining[rank] for rank in range(4))
    given: dict[str, Any] = {
        "progress": None,
        "run_age_s": 661.0,
        "snapshots": tuple(snapshot(age_s, stacks) for age_s in ages_s),
        "processes": tuple(replace(process(rank), worked_age_s=600.0) for rank in range(4)),
    }
    return job(**{**given, **changes})


def judged(view: JobView) -> Finding:
    return hang_finding(view, 10_000.0, CollectiveHang())


@pytest.mark.parametrize("look", [{}, {"syscall": "clock_nanosleep", "sleep_s": 1e6}])
def test_a_rank_that_is_stuck_before_it_joins_the_others_is_named_after_minutes_and_not_acted_on(
    look: dict[str, Any],
) -> None:
    found = judged(starts(dumped(2, LOCKED, **look)))
    assert (found.truth, found.actionable, [each.rank for each in found.culprits]) == (Truth.BAD, False, [2])
    assert found.summary.startswith("Job 7 does not start: no step for 661 s; rank 2 (pid 102 on n2) ")
    assert found.summary.endswith("3 ranks wait for it to join, and no rank has moved for 360 s.")


MAY_BE_AT_WORK = {
    "it computes": dumped(2, LOCKED, state="R"),
    "it reads": dumped(2, LOCKED, syscall="read"),
    "it waits for a server": dumped(2, ("read (ssl.py)", "get (hub.py)", "main (train.py)"), syscall="recvfrom"),
    "it sleeps briefly": dumped(2, ("until_there (cache.py)", "main (train.py)"), syscall="clock_nanosleep", sleep_s=60.0),
    "it sleeps, and nobody knows for how long": dumped(2, LOCKED, syscall="clock_nanosleep"),
    "it downloads": dumped(2, ("wait (threading.py)", "snapshot_download (hub.py)", "main (train.py)")),
    "a thread of it fetches": dumped(2, LOCKED, others=(threads("recvfrom"),)),
    "it compiles": dumped(2, ("wait (threading.py)", "compile_fx (torch/_inductor/compile_fx.py)", "main (train.py)")),
    "it imports": dumped(2, ("_find_and_load (<frozen importlib._bootstrap>)", "<module> (train.py)")),
    "it prepares its data": dumped(2, ("acquire (lock.py)", "build_index_mappings (dataset.py)", "main (train.py)")),
    "it waits for a program": dumped(2, ("wait (subprocess.py)", "build (ext.py)", "main (train.py)"), syscall="wait4"),
    "it waits for the lock of a file": dumped(2, LOCKED, syscall="fcntl"),
    "it sits at a prompt": dumped(2, ("interaction (/usr/lib/python3.12/pdb.py)", "main (train.py)")),
    "it has joined, too": dumped(2, JOINS, syscall="poll"),
    "it cannot be dumped": dumped(2, (), error="EPERM"),
    "its bytes are not known": dumped(2, LOCKED, io_bytes=None),
}  # fmt: skip


@pytest.mark.parametrize("name", MAY_BE_AT_WORK)
def test_nobody_is_said_to_keep_the_others_from_starting_if(name: str) -> None:
    assert judged(starts(MAY_BE_AT_WORK[name])).truth is not Truth.BAD


STUCK = dumped(2, LOCKED)
HELPER = replace(process(2, pid=300, role=Role.HELPER, comm="cc1plus"), worked_age_s=5.0)
RANKS = tuple(replace(process(rank), worked_age_s=600.0) for rank in range(4))
OBJECTIONS: dict[str, JobView] = {
    "it is early": starts(STUCK, (300.0, 20.0, 1.0), run_age_s=590.0),
    "the dumps are of a moment": starts(STUCK, (20.0, 10.0, 1.0)),
    "two dumps are in": starts(STUCK, AGES_S[1:]),
    "a program beside it works": starts(STUCK, processes=(*RANKS, HELPER)),
    "it is blocked on a file": starts(STUCK, processes=(*RANKS[:2], process(2, blocked=blocked(90.0)), RANKS[3])),
    "the log says that it compiles": starts(STUCK, phase="compiling"),
    "a checkpoint grows": starts(STUCK, growing_age_s=20.0),
    "a node is silent": starts(STUCK, silent_nodes=("n2",)),
    "processes are not listed": starts(STUCK, unlisted=1),
    "a rank was never seen": starts(STUCK, processes=tuple(process(rank, world_size=5) for rank in range(4))),
    "it has made steps": starts(STUCK, progress=progress(5.0)),
    "it has moved": starts(
        STUCK, snapshots=(snapshot(361.0, [dumped(2, TURN)]), *starts(STUCK).snapshots[1:])
    ),
    "the others wait for something else": starts(
        STUCK, snapshots=tuple(snapshot(a, [dumped(r, LOCKED if r == 2 else TURN) for r in range(4)]) for a in AGES_S)
    ),
    "the others are past the rendezvous": starts(
        STUCK, snapshots=tuple(snapshot(a, [dumped(r, LOCKED if r == 2 else BARRIER) for r in range(4)]) for a in AGES_S)
    ),
    "half of them are outside": starts(
        STUCK, snapshots=tuple(snapshot(a, [dumped(r, LOCKED if r > 1 else JOINS) for r in range(4)]) for a in AGES_S)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTIONS)
def test_a_start_has_its_hour_while(name: str) -> None:
    assert judged(OBJECTIONS[name]).truth is not Truth.BAD
