"""Hundreds of random jobs that hang: nobody but the rank that stopped is named, and that one mostly."""

from __future__ import annotations

from random import Random

import pytest

from slurm_watchdog.analysis.collective_order import order_of
from tests.builders.random_jobs import BEGAN, STUCK_S, Job, random_job

JOBS = 250


def named(
    job: Job,
    *,
    without: int | None = None,
    stale: tuple[int, int] | None = None,
    gave_up: Random | None = None,
    **how: bool,
) -> set[int]:
    """By the dumps of a hang; `without` that of one rank, or with one (rank, step) of an earlier moment, or half of them
    made after a timeout that did not end the job."""
    records = []
    for rank in range(len(job.groups["0"])):
        old = stale is not None and rank == stale[0]
        step = stale[1] if stale is not None and old else len(job.history) - 1
        if rank != without:
            recorder = job.record(rank, step)
            if gave_up is not None and gave_up.random() < 0.5:
                recorder.give_up()
            records.append(recorder.record(BEGAN + step + (0.0 if old else STUCK_S), **how))
    return {each.rank for each in order_of(records).odd}


@pytest.mark.parametrize(("collectives", "least"), [(True, 0.6), (False, 0.45)])
def test_of_jobs_in_which_a_rank_stops_that_one_is_named_or_nobody(collectives: bool, least: float) -> None:
    hits = 0
    for seed in range(JOBS):
        job, rng = random_job(seed, stops=True, collectives=collectives), Random(seed)
        found = named(job)
        assert found <= {job.guilty}, seed
        assert named(job, gave_up=rng) == found, f"{seed} after a timeout"
        hits += bool(found)
        missing = rng.randrange(len(job.groups["0"]))
        assert named(job, without=missing) <= {job.guilty}, f"{seed} without {missing}"
        stale = rng.randrange(len(job.groups["0"])), rng.randrange(len(job.history))
        assert named(job, stale=stale) <= {job.guilty}, f"{seed} with {stale}"
    assert hits >= least * JOBS


@pytest.mark.parametrize(
    ("program", "hashed", "least"),
    [
        ({"batches": False}, False, 0.4),
        ({"batches": False, "collectives": False}, False, 0.3),
        ({}, False, 0.2),
        ({}, True, 0.2),
    ],
)
def test_without_finished_entries_that_one_is_named_or_nobody(
    program: dict[str, bool], hashed: bool, least: float
) -> None:
    """As Megatron and NVRx write their dumps: `onlyActive=True`. Whether a part of a batch has finished is not known
    there, so that less can be said of those."""
    hits = 0
    for seed in range(JOBS):
        job, rng = random_job(seed, stops=True, **program), Random(seed)
        found = named(job, only_active=True, hashed=hashed)
        assert found <= {job.guilty}, seed
        hits += bool(found)
        missing = rng.randrange(len(job.groups["0"]))
        assert named(job, without=missing, only_active=True, hashed=hashed) <= {job.guilty}, f"{seed} without {missing}"
        stale = rng.randrange(len(job.groups["0"])), rng.randrange(len(job.history))
        assert named(job, stale=stale, only_active=True, hashed=hashed) <= {job.guilty}, f"{seed} with {stale}"
        assert named(job, gave_up=rng, only_active=True, hashed=hashed) <= {job.guilty}, f"{seed} after a timeout"
        broken = random_job(seed, breaks=True, **program)
        assert named(broken, only_active=True, hashed=hashed) == set(), f"{seed} whose network breaks"
    assert hits >= least * JOBS, hits


@pytest.mark.parametrize("collectives", [True, False])
def test_of_jobs_whose_network_breaks_nobody_is_named(collectives: bool) -> None:
    for seed in range(JOBS):
        job = random_job(seed, breaks=True, collectives=collectives)
        assert named(job) == set(), seed
        assert named(job, without=seed % 4) == set(), seed
        assert named(job, gave_up=Random(seed)) == set(), seed
