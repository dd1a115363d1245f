"""A hang that is proven before the limit, on a real Slurm, at the shipped times."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.integration.training_job import inject, submit, training
from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog

KNOWN_S = 90.0
"""Until this training has shown what is usual for it: 15 reports with steps."""
VERDICT_S = 40.0
"""20 s, and what a busy machine takes; the limit without proof is 60 s."""


@pytest.mark.thorough
def test_a_rank_in_a_lock_is_named_long_before_the_limit_of_its_job(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(shipped=True)
    job = submit(cluster, nodes=2, sbatch=("--comment=watchdog=off",))
    training(watchdog, job, at_least=12)
    time.sleep(KNOWN_S)
    assert watchdog.incidents(job) == []
    inject(cluster, "lock.rank3")
    began = time.monotonic()
    watchdog.wait_for(lambda: watchdog.incidents(job), VERDICT_S, "the verdict")
    (found,) = watchdog.incidents(job)
    assert (found["kind"], [each["rank"] for each in found["culprits"]]) == ("collective_hang", [3])
    assert "nothing at work" in found["summary"], f"after {time.monotonic() - began:.0f} s"
