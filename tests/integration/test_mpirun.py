"""Restarts in the allocation of a command that `mpirun` starts: the batch host's ranks are children of mpirun in the
batch step, the others those of its daemon in a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.packages import ensure
from tests.integration.training_job import SAVE_INTERVAL, ended_action, inject, submit_supervised, training
from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog

Watch = Callable[..., Watchdog]
SEAT = "export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK"


@pytest.mark.thorough
def test_a_hung_rank_of_mpirun_is_named_beside_those_of_the_batch_step_and_started_again(
    cluster: Cluster, watch: Watch
) -> None:
    ensure("Open MPI")
    seat = cluster.shared / "seat.sh"
    seat.write_text(f'{SEAT}\nexec "$@"\n')
    seat.chmod(0o755)
    watchdog = watch(mode="act")
    job = submit_supervised(cluster, nodes=3, spares=1, launch=f"mpirun --npernode 2 bash {seat}")
    training(watchdog, job, at_least=SAVE_INTERVAL + 2)
    inject(cluster, "dataloader_hang.rank3")
    incident = watchdog.wait_for(lambda: watchdog.firing(job, "collective_hang"), 120, "the hang to be found")
    assert [culprit["rank"] for culprit in incident["culprits"]] == [3], incident["summary"]
    assert "3 ranks wait for it" in incident["summary"]
    action = ended_action(watchdog, incident["id"], timeout_s=150)
    assert action["end"]["ok"], action
    assert "in its allocation" in action["end"]["detail"]
    before = watchdog.step(job)
    watchdog.wait_for(lambda: watchdog.step(job) > before + 5, 60, "the new start to train on")
