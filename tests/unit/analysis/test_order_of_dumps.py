"""Whole jobs as NCCL's recorder has them: who is at fault is named, and nobody who did his part."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slurm_watchdog.analysis.collective_order import CollectiveOrder, order_of
from slurm_watchdog.model.collective_records import CollectiveRecord
from tests.builders.nccl_dumps import Recorder, recorders

Job = list[Recorder]


def named(job: Job) -> list[int]:
    return [each.rank for each in judged(job).odd]


def judged(job: Job) -> CollectiveOrder:
    return order_of([each.record() for each in job])


# ------------------------------------------------------------------------------------------ who is at fault is named


def first_stage_never_sends() -> Job:
    job = recorders(4)
    for stage in (1, 2, 3):
        job[stage].recv(stage - 1, done=False)
    return job


def a_stage_has_received_and_does_not_send() -> Job:
    job = recorders(4)
    job[0].send(1)
    job[1].recv(0)
    job[2].recv(1, done=False)
    job[3].recv(2, done=False)
    job[0].recv(1, done=False)
    return job


def a_stage_stops_after_1f1b_was_steady() -> Job:
    """Forward and backward in turn; stage 2 stops before the third backward."""
    job = recorders(4)
    for stage, rank in enumerate(job):
        for _ in range(2):
            if stage:
                rank.recv(stage - 1)
            if stage < 3:
                rank.send(stage + 1)
                rank.recv(stage + 1)
            if stage:
                rank.send(stage - 1)
    job[0].send(1)
    job[1].recv(0)
    job[1].send(2)
    job[2].recv(1)
    job[3].recv(2, done=False)
    job[1].recv(2, done=False)
    job[0].recv(1, done=False)
    return job


def all_reduce_hangs_beside_a_pair_that_goes_on() -> Job:
    job = recorders(4)
    for rank in job:
        rank.collective()
        if rank.rank != 2:
            rank.collective(done=False)
    job[0].send(1)
    job[1].recv(0)
    return job


def a_batch_of_one_stage_is_missing() -> Job:
    job = recorders(4)
    job[1].batch(("recv", 0), done=False)
    job[2].batch(("recv", 1), done=False)
    job[3].batch(("recv", 2), done=False)
    return job


def a_tensor_parallel_peer_keeps_its_data_parallel_ones_waiting() -> Job:
    job = recorders(4, {"tp0": (0, 1), "tp1": (2, 3), "dp0": (0, 2), "dp1": (1, 3)})
    for rank in job:
        tensor, data = f"tp{rank.rank // 2}", f"dp{rank.rank % 2}"
        rank.collectives(3, group=tensor)
        if rank.rank == 3:
            continue
        rank.collective(group=tensor, done=rank.rank != 2)
        if rank.rank != 2:
            rank.collective("_reduce_scatter_base", data, done=False)
    return job


def the_last_of_a_pipeline_with_data_parallel_groups_stops() -> Job:
    """Two pipelines of two stages; the stages of each level reduce together at the end, and have queued that."""
    job = recorders(4, {"pp0": (0, 1), "pp1": (2, 3), "dp0": (0, 2), "dp1": (1, 3)})
    for first, last, group in ((0, 1, "pp0"), (2, 3, "pp1")):
        job[first].send(last, group)
        job[last].recv(first, group)
        if last == 3:
            job[first].recv(last, group, done=False)
        else:
            job[last].send(first, group)
            job[first].recv(last, group)
            job[last].collective(group="dp1", done=False)
        job[first].collective(group="dp0", done=False)
    return job


def absent_from_a_ring_that_has_long_been_overwritten() -> Job:
    """Thousands of sends, of which the ring has the last; rank 2 has not come to the all-reduce."""
    job = recorders(4, room=1000)
    for rank in job:
        rank.collective()
        for _ in range(400):
            rank.batch(("send", (rank.rank + 1) % 4), ("recv", (rank.rank - 1) % 4))
        if rank.rank != 2:
            rank.collective(done=False)
    return job


def absent_after_a_barrier_of_broadcasts() -> Job:
    """A broadcast ends on its root before others have come to it."""
    job = recorders(4)
    for rank in job:
        rank.collective()
        if rank.rank == 2:
            continue
        for _ in range(3):
            rank.collective("broadcast", done=rank.rank != 3)
        rank.collective(done=False)
    return job


def a_coalesced_collective_lacks_one() -> Job:
    job = recorders(4)
    for rank in job:
        rank.coalesced(["_all_gather_base", "_all_gather_base"])
        if rank.rank != 1:
            rank.coalesced(["_all_gather_base", "_all_gather_base"], done=False)
    return job


AT_FAULT: list[tuple[Callable[[], Job], list[int]]] = [
    (first_stage_never_sends, [0]),
    (a_stage_has_received_and_does_not_send, [1]),
    (a_stage_stops_after_1f1b_was_steady, [2]),
    (all_reduce_hangs_beside_a_pair_that_goes_on, [2]),
    (a_batch_of_one_stage_is_missing, [0]),
    (a_tensor_parallel_peer_keeps_its_data_parallel_ones_waiting, [3]),
    (the_last_of_a_pipeline_with_data_parallel_groups_stops, [3]),
    (absent_from_a_ring_that_has_long_been_overwritten, [2]),
    (absent_after_a_barrier_of_broadcasts, [2]),
    (a_coalesced_collective_lacks_one, [1]),
]


@pytest.mark.parametrize(("job", "ranks"), AT_FAULT, ids=[make.__name__ for make, _ in AT_FAULT])
def test_who_keeps_the_others_waiting_is_named(job: Callable[[], Job], ranks: list[int]) -> None:
    assert named(job()) == ranks


# ---------------------------------------------------------------------------------------- and nobody who did his part


def a_recv_stays_open_while_a_later_send_has_finished() -> Job:
    """Rank 0 never sends: rank 1 waits for it, though it has sent to rank 2."""
    job = recorders(4)
    job[1].recv(0, done=False)
    job[1].send(2)
    job[2].recv(1)
    job[2].recv(1, done=False)
    job[3].recv(2, done=False)
    return job


def a_later_batch_of_another_group_has_finished() -> Job:
    job = recorders(4, {"pp": (0, 1, 2, 3), "ring": (0, 1, 2, 3)})
    job[1].recv(0, "pp", done=False)
    for at, rank in enumerate(job):
        rank.batch(("send", (at + 1) % 4), ("recv", (at - 1) % 4), group="ring")
    job[2].recv(1, "pp", done=False)
    job[3].recv(2, "pp", done=False)
    return job


@pytest.mark.parametrize(
    "job", [a_recv_stays_open_while_a_later_send_has_finished, a_later_batch_of_another_group_has_finished]
)
def test_who_waits_for_the_first_stage_is_not_named_for_what_it_has_finished_since(job: Callable[[], Job]) -> None:
    assert named(job()) == [0]


def all_have_entered_and_the_network_is_gone() -> Job:
    job = recorders(4)
    for rank in job:
        rank.collective()
        rank.collective(done=False)
    return job


def the_link_of_a_pipeline_is_gone() -> Job:
    """What rank 1 sent is in buffers, and does not arrive; it waits for the answer."""
    job = recorders(4)
    job[0].send(1)
    job[1].recv(0)
    job[1].send(2)
    job[2].recv(1, done=False)
    job[3].recv(2, done=False)
    job[1].recv(2, done=False)
    job[0].recv(1, done=False)
    return job


def one_has_sent_and_is_done_where_a_group_hangs() -> Job:
    """Rank 0 has sent and saves now; ranks 2 and 3 hang together, and rank 1 in one batch with both sides."""
    job = recorders(4, {"tp": (2, 3)})
    job[0].send(1)
    job[1].batch(("recv", 0), ("send", 2), done=False)
    job[2].collective(group="tp", done=False)
    job[3].collective(group="tp", done=False)
    return job


def one_of_a_ring_does_not_exchange() -> Job:
    """Rank 3 is at fault. As each batch waits for both sides, another one could have done its part as well."""
    job = recorders(8)
    for at, rank in enumerate(job):
        rank.batch(("send", (at + 1) % 8), ("recv", (at - 1) % 8))
        if at != 3:
            rank.batch(("send", (at + 1) % 8), ("recv", (at - 1) % 8), done=at not in (2, 4))
    for at in (0, 1, 5, 6, 7):
        job[at].batch(("send", (at + 1) % 8), ("recv", (at - 1) % 8), done=False)
    return job


def a_batch_that_waits_for_one_of_two() -> Job:
    """Ranks 0 and 2 have nothing unfinished: one of them has done its part, and nobody knows which."""
    job = recorders(8)
    job[1].batch(("recv", 0), ("send", 2), done=False)
    for at in range(3, 8):
        job[at].recv(1, done=False)
    return job


def the_only_one_who_would_explain_it_has_no_dump() -> Job:
    job = recorders(4)
    job[0].send(1)
    job[1].batch(("recv", 0), ("send", 2), done=False)
    job[3].recv(2, done=False)
    del job[2]
    return job


def one_dump_is_from_hours_ago() -> Job:
    job = recorders(4)
    for rank in job:
        rank.collectives(500 if rank.rank != 1 else 200)
        if rank.rank != 1:
            rank.collective(done=False)
    return job


def one_dump_is_from_hours_ago_and_its_group_was_not_made_yet() -> Job:
    job = recorders(4, {"tp0": (0, 1), "tp1": (2, 3)})
    for rank in job:
        if rank.rank == 1:
            rank.collective()
            continue
        rank.collectives(5)
        rank.collectives(7, group=f"tp{rank.rank // 2}")
        rank.collective("broadcast", f"tp{rank.rank // 2}", done=rank.rank != 0)
    return job


def a_stale_dump_of_a_pipeline() -> Job:
    """Rank 0's was written before the last step: it had nothing to do then."""
    job = recorders(4)
    for stage, rank in enumerate(job):
        rank.collectives(3 if stage else 2)
        if stage:
            rank.recv(stage - 1, done=False)
    return job


def dumps_of_a_job_that_runs_taken_seconds_apart() -> Job:
    """Each rank is further than the one before it, and between two collectives or in one."""
    job = recorders(8)
    for at, rank in enumerate(job):
        rank.collectives(100 + 30 * at)
        if at % 3:
            rank.collective(done=False)
    return job


def a_pipeline_that_runs_dumped_seconds_apart() -> Job:
    job = recorders(4)
    for stage, rank in enumerate(job):
        rank.collectives(10 + stage)
        if stage != 1:
            rank.recv((stage - 1) % 4, done=False)
    return job


def an_older_release_counts_batches_as_collectives() -> Job:
    """The stages in the middle take part in more batches, and are ahead by that."""
    job = recorders(4, old=True)
    for stage, rank in enumerate(job):
        if stage:
            rank.batch(("recv", stage - 1))
        if stage < 3:
            rank.batch(("send", stage + 1))
        rank.collective(done=False)
    return job


def an_older_release_where_some_have_sent_nothing() -> Job:
    job = recorders(8, old=True)
    for rank in job:
        rank.collective()
    job[0].batch(("send", 1))
    job[1].batch(("recv", 0))
    for rank in job:
        rank.collective(done=rank.rank > 5)
    return job


def a_group_that_was_made_again_after_a_rank_came_back() -> Job:
    """Rank 2 was started again; the others had done 300 collectives before, and all wait in the fifth of the new."""
    job = recorders(4)
    for rank in job:
        if rank.rank != 2:
            rank.collectives(300)
        rank.again()
        rank.collectives(4)
        rank.collective(done=False)
    return job


def a_small_ring_that_has_lost_what_its_rank_waits_for() -> Job:
    """Rank 2 waits for rank 3 with a send of long ago, and has exchanged much with rank 1 since."""
    job = recorders(4, room=20)
    job[2].recv(3, done=False)
    for _ in range(30):
        job[2].send(1)
        job[1].recv(2)
    job[0].recv(2, done=False)
    job[1].recv(2, done=False)
    return job


def batches_whose_parts_have_left_the_ring() -> Job:
    job = recorders(4, room=2)
    job[0].batch(("recv", 2), ("recv", 1), done=False)
    job[3].batch(("recv", 1), ("recv", 2), done=False)
    for at in (1, 2):
        job[at].batch(("send", 0), ("send", 3))
    return job


def a_subgroup_alone_waits_and_the_others_do_other_things() -> Job:
    """Ranks 0 and 1 hang in their own group, which both have entered; 2 and 3 have another and are done."""
    job = recorders(4, {"a": (0, 1), "b": (2, 3)})
    for rank in job:
        rank.collective(group="a" if rank.rank < 2 else "b", done=rank.rank >= 2)
    return job


def half_of_them_call_what_the_others_never_do() -> Job:
    job = recorders(4)
    for rank in job:
        rank.collective()
    job[0].collective("barrier", done=False)
    job[1].collective("barrier", done=False)
    return job


def a_collective_without_elements_ends_at_once() -> Job:
    """Ranks 0 and 1 have gone through 3 that exchange nothing, which rank 3 has not called yet; all wait in another."""
    job = recorders(4, {"x": (2, 3)})
    for rank in job:
        rank.collective()
    for at in (0, 1):
        for _ in range(3):
            job[at].collective(elements=0)
    job[2].collective(group="x", done=False)
    job[3].collective(group="x", done=False)
    return job


def in_a_ring_all_wait_for_one_another() -> Job:
    job = recorders(4)
    for at, rank in enumerate(job):
        rank.recv((at - 1) % 4, done=False)
    return job


def one_is_within_a_batch() -> Job:
    """It has begun to send and to receive, and its peer has not: both wait."""
    job = recorders(3)
    job[0].batch(("send", 1), ("recv", 1), ended=False)
    job[1].batch(("send", 0), ("recv", 0), done=False)
    job[2].recv(0, done=False)
    return job


LOOK_ALIKES: list[Callable[[], Job]] = [
    all_have_entered_and_the_network_is_gone, the_link_of_a_pipeline_is_gone, one_has_sent_and_is_done_where_a_group_hangs,
    one_of_a_ring_does_not_exchange, a_batch_that_waits_for_one_of_two, the_only_one_who_would_explain_it_has_no_dump, one_dump_is_from_hours_ago,
    one_dump_is_from_hours_ago_and_its_group_was_not_made_yet, a_stale_dump_of_a_pipeline,
    dumps_of_a_job_that_runs_taken_seconds_apart, a_pipeline_that_runs_dumped_seconds_apart,
    an_older_release_counts_batches_as_collectives, an_older_release_where_some_have_sent_nothing,
    a_group_that_was_made_again_after_a_rank_came_back, a_small_ring_that_has_lost_what_its_rank_waits_for, batches_whose_parts_have_left_the_ring,
    a_subgroup_alone_waits_and_the_others_do_other_things, half_of_them_call_what_the_others_never_do,
    a_collective_without_elements_ends_at_once, in_a_ring_all_wait_for_one_another, one_is_within_a_batch,
]  # fmt: skip


@pytest.mark.parametrize("job", LOOK_ALIKES, ids=[make.__name__ for make in LOOK_ALIKES])
def test_nobody_is_named_where_nobody_is_known_to_be_at_fault(job: Callable[[], Job]) -> None:
    found = judged(job())
    assert found.odd == ()
    assert not found.waiting or found.unclear


@pytest.mark.parametrize("job", [make for make, _ in AT_FAULT], ids=[make.__name__ for make, _ in AT_FAULT])
def test_without_the_dump_of_any_one_rank_nobody_else_is_named(job: Callable[[], Job]) -> None:
    whole = job()
    guilty = named(whole)
    for missing in range(len(whole)):
        left: list[CollectiveRecord] = [each.record() for each in whole if each.rank != missing]
        found = {each.rank for each in order_of(left).odd}
        assert found <= set(guilty), (missing, found)


def test_two_programs_of_a_job_that_number_their_ranks_alike_name_nobody() -> None:
    trains, serves = recorders(4), recorders(4)
    for rank in trains:
        rank.collective(done=False)
    assert order_of([each.record() for each in (*trains, *serves)]).odd == ()


def waits_since(began_s: float, made_s: float, late_made_s: float) -> CollectiveOrder:
    """Three ranks wait in an all-reduce since `began_s`, by dumps of `made_s`; rank 2 had not come by `late_made_s`."""
    job, records = recorders(4), []
    for rank in job:
        rank.now = 100.0
        rank.collective("broadcast")
        rank.now = began_s
        if rank.rank != 2:
            rank.collective(done=False)
        records.append(rank.record(late_made_s if rank.rank == 2 else made_s))
    return order_of(records)


def test_who_has_not_come_is_named_when_others_have_waited_long_by_both_their_dumps() -> None:
    assert [each.rank for each in waits_since(200.0, 260.0, 261.0).odd] == [2]


@pytest.mark.parametrize(("made_s", "late_made_s"), [(201.0, 260.0), (260.0, 201.0), (260.0, 150.0)])
def test_who_had_no_time_to_come_by_the_dates_of_the_dumps_is_not_named(made_s: float, late_made_s: float) -> None:
    found = waits_since(200.0, made_s, late_made_s)
    assert (found.odd, found.waiting) == ((), (0, 1, 3))
    assert "only seconds before" in found.unclear


def test_a_stage_that_had_nothing_to_do_when_its_old_dump_was_written_is_not_named() -> None:
    """Without collectives only the dates tell that its dump is older."""
    job = recorders(4)
    for stage, rank in enumerate(job):
        rank.now = 500.0
        if stage:
            rank.recv(stage - 1, done=False)
    fresh = [each.record(600.0) for each in job[1:]]
    assert order_of([job[0].record(300.0), *fresh]).odd == ()
    assert [each.rank for each in order_of([job[0].record(601.0), *fresh]).odd] == [0]


def test_who_waits_for_ranks_that_wait_for_nobody_is_in_no_circle_with_them() -> None:
    """The root of a broadcast has gone on, and all others wait in it."""
    job = recorders(4)
    for rank in job:
        rank.collective("broadcast", done=rank.rank == 0)
    job[0].collective(done=False)
    found = judged(job)
    assert (found.odd, found.waiting) == ((), (0, 1, 2, 3))
    assert "what all have entered" in found.unclear
