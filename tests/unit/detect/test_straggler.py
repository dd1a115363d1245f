"""straggler: named with its confidence once the job is slower, the others wait, and stacks say for whom; else nobody."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.analysis.lateness import LEAST_RANKS
from slurm_watchdog.detect.slow_job import SlowJob
from slurm_watchdog.detect.straggler import DUMPS, detect
from slurm_watchdog.model.cluster_view import ClusterView, JobView, ProcessView
from slurm_watchdog.model.incidents import Finding, StackRequest, Truth
from tests.builders.stragglers import Training, Work, late, turns
from tests.builders.views import cluster, job, process, slurm_job

CHANGE_S, AFTER_S = 900.0, 700.0


def slow(work: Work, ranks: int = 8, **kind: Any) -> tuple[Training, JobView]:
    training = Training(1, work, ranks=ranks, per_node=2, **kind)
    training.run(CHANGE_S, AFTER_S)
    seen = tuple(
        ProcessView(
            node=key.node, seen_age_s=1.0,
            process=process(key.rank, pid=key.pid, start_ticks=key.start_ticks, world_size=ranks),
        )
        for key in map(training.key, range(ranks))
    )  # fmt: skip
    names = tuple(dict.fromkeys(each.node for each in seen))
    found = job(
        job=slurm_job(nodes=names), processes=seen, step_times=tuple(training.times), waits=training.blocks(),
        wait_dumps=training.dumps(CHANGE_S + 30.0, DUMPS),
    )  # fmt: skip
    return training, found


def view(of: JobView) -> ClusterView:
    return cluster(of, now=CHANGE_S + AFTER_S)


def judge(of: JobView) -> Finding:
    (finding,) = detect(view(of), SlowJob())
    return finding


_, ONE = slow(late({5}, 0.3))
WRONG = view(ONE)


def test_the_rank_is_named_with_its_share_its_place_and_its_confidence() -> None:
    finding = judge(ONE)
    assert finding.truth is Truth.BAD
    assert [(each.node, each.rank) for each in finding.culprits] == [("n3", 5)]
    assert "rank 5 on n3 keeps the others waiting (confidence 0.9999)" in finding.summary
    assert "it waits 0 %, the other 7 ranks 99 %" in finding.facts[0]
    assert "augment (data.py:31)" in finding.facts[1]
    assert not finding.actionable
    assert finding.wanted == ()


def test_a_node_is_named_with_its_ranks() -> None:
    _, of = slow(late({4, 5}, 0.3))
    finding = judge(of)
    assert [(each.node, each.rank) for each in finding.culprits] == [("n3", 4), ("n3", 5)]
    assert "n3 (ranks 4, 5)" in finding.summary


def test_sleep_alone_is_not_enough_and_dumps_are_asked_for() -> None:
    for dumps in ((), slow(late({5}, 0.3))[0].dumps(CHANGE_S, 12, others_wait=False)):
        finding = judge(replace(ONE, wait_dumps=dumps))
        assert finding.truth is Truth.UNKNOWN
    assert judge(replace(ONE, wait_dumps=())).wanted == (StackRequest(job_id="7", apart_s=20.0, usual=True),)


def test_idle_gpus_need_no_dump() -> None:
    _, of = slow(late({5}, 0.5), gpus=True, spins=True, host_share=0.02)
    finding = judge(replace(of, wait_dumps=()))
    assert finding.truth is Truth.BAD
    assert "its GPU idles" in finding.facts[0]


@pytest.mark.parametrize(
    "work", [turns(8, 0.5), late(set(range(8)), 0.2), late({0}, 0.3), late((), 0.0)],
    ids=["by turns", "all", "rank 0", "nobody"],
)  # fmt: skip
def test_nobody_is_named_in_what_looks_similar(work: Work) -> None:
    assert judge(slow(work)[1]).truth is not Truth.BAD


def test_a_job_that_is_not_slower_is_well() -> None:
    assert judge(slow(late((), 0.0))[1]).truth is Truth.OK


def test_missing_data_names_nobody() -> None:
    for of in (
        replace(ONE, silent_nodes=("n2",)),
        replace(ONE, waits=()),
        replace(ONE, processes=ONE.processes[1:]),
        replace(ONE, phase="evaluating"),
        replace(ONE, step_times=()),
        slow(late({1}, 0.3), ranks=LEAST_RANKS - 1)[1],
    ):
        assert judge(of).truth is Truth.UNKNOWN
