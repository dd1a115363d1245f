"""Whose GPUs are whose in a trace: an orphan is one of a job that the trace says is over; seats are dealt
only where they fit."""

from __future__ import annotations

from typing import Any

from slurm_watchdog.model.observations import Gpu, GpuHolder, Process, Role
from slurm_watchdog.trace.gpu_owners import GRACE_S, GpuHolders, assign_gpus

OVER = {"7": "ada"}


def rank(number: int, **changes: Any) -> Process:
    given = {
        "pid": 100 + number, "start_ticks": 5, "job_id": "7", "role": Role.RANK, "comm": "process", "state": "S", "uid": -1,
        "rank": number, "cpu_s": 0.0,
    }  # fmt: skip
    return Process(**{**given, **changes})


def card(index: int, pids: tuple[int, ...] | None = (), mib: int = 0) -> Gpu:
    return Gpu(uuid=f"GPU-{index}", index=index, pids=pids, memory_used_bytes=mib * 1024**2)


def after(
    seconds: float, processes: list[Process], *cards: Gpu, over: dict[str, str] | None = None
) -> tuple[GpuHolder, ...]:
    """Who holds what so long after the job of two ranks has ended."""
    seen = GpuHolders()
    seen.remember([rank(0), rank(1)], [card(0, (100,)), card(1, (101,))])
    ended = OVER if over is None else over
    seen.orphans(processes, cards, ended, 1000.0)
    return seen.orphans(processes, cards, ended, 1000.0 + seconds)


def test_a_process_that_a_card_lists_after_the_end_of_its_job_is_an_orphan_after_its_grace() -> None:
    (holder,) = after(GRACE_S + 5.0, [], card(0), card(1, (101,), 520))
    assert (holder.pid, holder.job_id, holder.user, holder.gpu_uuids) == (101, "7", "ada", ("GPU-1",))
    assert holder.orphan_for_s == 5.0
    (early,) = after(GRACE_S - 5.0, [], card(1, (101,), 520))
    assert early.orphan_for_s is None


def test_one_that_its_card_does_not_list_any_more_holds_the_memory_that_is_still_taken() -> None:
    (holder,) = after(100.0, [rank(1)], card(0), card(1, (), 520))
    assert (holder.pid, holder.listed_by_nvml) == (101, False)
    assert after(100.0, [rank(1)], card(0), card(1, (), 3)) == ()
    assert after(100.0, [rank(1, state="Z")], card(0), card(1, (), 520)) == ()


def test_trace_process_of_a_running_or_unknown_job_is_no_orphan() -> None:
    assert after(100.0, [rank(1)], card(1, (101,), 520), over={}) == ()
    assert after(100.0, [], card(1, (4242,), 520)) == ()


def test_the_grace_of_a_run_begins_with_its_own_end_and_not_with_that_of_the_run_before() -> None:
    seen = GpuHolders()
    seen.remember([rank(0)], [card(0, (100,))])
    seen.orphans([], [card(0)], OVER, 1000.0)
    assert seen.orphans([], [card(0, (100,))], {}, 2000.0) == ()
    (holder,) = seen.orphans([], [card(0, (100,))], OVER, 3000.0)
    assert holder.orphan_for_s is None


def test_who_was_seen_to_hold_a_card_within_the_grace_alone_is_no_orphan_after_it() -> None:
    seen = GpuHolders()
    seen.remember([rank(0)], [card(0, (100,))])
    seen.orphans([], [card(0, (100,))], OVER, 1000.0)
    (holder,) = seen.orphans([], [card(0, (100,))], OVER, 1000.0 + GRACE_S + 5.0, 1000.0 + GRACE_S - 5.0)
    assert holder.orphan_for_s is None


def test_ranks_are_seated_in_their_order_where_no_line_lists_processes() -> None:
    cards = [card(1, None), card(0, None)]
    assert [(c.index, c.pids) for c in assign_gpus(cards, [rank(5), rank(4)], {})] == [
        (0, (104,)),
        (1, (105,)),
    ]


def test_trace_gpus_are_not_assigned_where_counts_do_not_match() -> None:
    cards = (card(0, None), card(1, None))
    for ranks in ([], [rank(0)], [rank(0), rank(1), rank(2)], [rank(0), rank(1, job_id="8")]):
        assert assign_gpus(cards, ranks, {}) == cards
    listed = (card(0, (100,)), card(1, None))
    assert assign_gpus(listed, [rank(0), rank(1)], {}) == listed


def test_a_card_of_which_nothing_new_is_said_is_the_same_one_again() -> None:
    """What is said twice was not looked at twice."""
    cards, seats = [card(0, None)], dict[str, tuple[Gpu, Gpu]]()
    (first,) = assign_gpus(cards, [rank(0)], seats)
    (again,) = assign_gpus(cards, [rank(0)], seats)
    (other,) = assign_gpus([card(0, None)], [rank(0)], seats)
    assert again is first
    assert other is not first


def test_the_gpu_of_a_process_is_known_where_it_was_seen_on_one_alone() -> None:
    seen = GpuHolders()
    seen.remember([rank(0), rank(1)], [card(0, (100, 101)), card(1, (101,))])
    assert seen.of_process(100) == "GPU-0"
    assert seen.of_process(101) is None
    assert seen.of_process(None) is None
