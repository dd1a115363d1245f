"""A hang with what its ranks recorded: said, contradicted, or named by it alone."""

from __future__ import annotations

from msgspec.structs import replace

from slurm_watchdog.detect.collective_hang import CollectiveHang, detect
from slurm_watchdog.diagnose.recorded_collectives import weigh
from slurm_watchdog.model.cluster_view import JobView, StackSnapshot
from slurm_watchdog.model.collective_records import Call, CollectiveRecord, Communicator, RecordSet
from slurm_watchdog.model.incidents import Finding
from tests.builders.views import LOADER, RECV, cluster, job, progress, still

HANGS = progress(100.0)
WAITS = still(RECV, RECV, LOADER, RECV)
TOGETHER = still(RECV, RECV, RECV, RECV)
REDUCE = ("all_reduce (torch/distributed/distributed_c10d.py)", "train (train.py)")


def records(*absent: int, point_to_point: bool = True) -> RecordSet:
    def of(rank: int) -> CollectiveRecord:
        there = rank not in absent
        call = (Call(seq=61, name="all_reduce", elements=8, types=("Float",)),) if there else ()
        place = Communicator(
            key="0", label="default_pg", entered=61 if there else 60, waits=call, members=(0, 1, 2, 3) if there else ()
        )
        return CollectiveRecord(rank=rank, communicators=(place,), point_to_point=point_to_point)

    return RecordSet(source="the Flight Recorder", records=tuple(of(rank) for rank in range(4)))


def found(dumps: tuple[StackSnapshot, ...], *sets: RecordSet, age_s: float = 100.0) -> Finding:
    view: JobView = replace(job(progress=progress(age_s), snapshots=dumps), collectives=sets)
    (finding,) = detect(cluster(view), CollectiveHang())
    return finding


def test_who_stands_outside_and_is_absent_by_the_records_is_named_with_both() -> None:
    finding = found(WAITS, records(2))
    assert [each.rank for each in finding.culprits] == [2]
    assert "waits for its data loader" in finding.summary
    assert "the Flight Recorder has it, too: rank 2 has not entered all_reduce 61 of default_pg" in finding.summary
    assert finding.actionable


def test_who_is_accused_and_waits_by_the_records_is_not_named_and_nothing_is_done_soon() -> None:
    finding = found(WAITS, records(3))
    assert (finding.culprits, finding.clears) == ((), True)
    assert "but the Flight Recorder has rank 2 wait as the others do, and rank 3 has not entered" in finding.summary
    assert not finding.actionable
    assert found(WAITS, records(3), age_s=1900.0).actionable


def test_where_all_wait_together_the_records_name_who_is_absent() -> None:
    finding = found(TOGETHER, records(1))
    assert [(each.rank, each.node) for each in finding.culprits] == [(1, "n1")]
    assert "by the Flight Recorder, rank 1 (pid 101 on n1) has not entered all_reduce 61" in finding.summary


def test_records_that_leave_out_sending_and_receiving_name_nobody_by_themselves() -> None:
    finding = found(TOGETHER, records(1, point_to_point=False))
    assert finding.culprits == ()
    assert any("Rank 1 has not entered all_reduce 61" in fact for fact in finding.facts)


def test_by_themselves_records_name_no_two_ranks_and_none_in_a_barrier_that_nobody_records() -> None:
    barrier = ("monitored_barrier (torch/distributed/distributed_c10d.py)", *RECV)
    ranks = job().ranks
    assert [each.rank for each in weigh((), ranks, [records(1)], TOGETHER).culprits] == [1]
    assert weigh((), ranks, [records(1)], still(RECV, barrier, RECV, RECV)).culprits == ()
    assert found(TOGETHER, records(1, 2)).culprits == ()


def test_who_stands_in_the_call_of_those_who_wait_is_named_where_every_source_says_that_it_has_not_entered_it() -> None:
    ranks, ras = job().ranks, replace(records(1), source="NCCL's RAS")
    same, other = still(REDUCE, REDUCE, REDUCE, REDUCE), still(REDUCE, (*REDUCE, "evaluate (e.py)"), REDUCE, REDUCE)
    assert [each.rank for each in weigh((), ranks, [records(1), ras], same).culprits] == [1]
    assert weigh((), ranks, [records(1)], same).culprits == ()
    assert weigh((), ranks, [records(1), ras], other).culprits == ()


def test_records_in_which_nobody_waits_change_nothing() -> None:
    assert found(WAITS, records(0, 1, 2, 3)) == found(WAITS)


def test_of_two_sources_that_disagree_with_each_other_the_second_names_nobody() -> None:
    assert found(WAITS, records(3), records(1)).culprits == ()
