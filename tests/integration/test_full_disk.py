"""A real filesystem that is full: the job whose rank dies of it is not restarted onto it, and runs again once there is room."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any

from tests.integration.training_job import SAVE_INTERVAL, ended_action, submit, training
from tests.rig.cluster import Cluster
from tests.rig.commands import as_user
from tests.rig.rights import USER
from tests.rig.stack import Watchdog

ROOM = 40 * 1024
"""For the small shards of a checkpoint, and not for the 80 KiB of rank 0: it dies, and the others wait for it."""


def test_a_job_that_dies_of_a_full_filesystem_runs_again_once_there_is_room(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(mode="act", settings={"detectors": {"disk_full": {"recent": "20s"}}})
    job = submit(cluster, "--checkpoint-seconds 0.2 --checkpoint-writers=rank0", nodes=2)
    training(watchdog, job, at_least=SAVE_INTERVAL + 2)
    filler = cluster.shared / "filler"
    fill = [*as_user(USER), "dd", "if=/dev/zero", f"of={filler}", "bs=4k"]
    subprocess.run(fill, capture_output=True, check=False)
    os.truncate(filler, filler.stat().st_size - ROOM)
    full = watchdog.wait_for(lambda: watchdog.firing(job, "disk_full"), 60, "the full filesystem to be reported")
    print(full["summary"])
    dead = watchdog.wait_for(lambda: watchdog.firing(job, "lingering_job"), 60, "the job to be found ended in part")

    def decided() -> Any:
        decisions = watchdog.explain(dead["id"])["incident"]["decisions"]
        return next((each for each in decisions if each["by"] == "disk_full"), None)

    decision = watchdog.wait_for(decided, 20, "the decision")
    print(decision)
    assert decision["verdict"] == "suppressed" and "no space is left" in decision["reason"]
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("RUNNING", "0")
    filler.unlink()
    assert ended_action(watchdog, dead["id"], 120)["end"]["ok"]
    assert cluster.job(job)["Restarts"] == "1"
