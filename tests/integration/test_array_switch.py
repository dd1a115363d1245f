"""One kill switch for all elements of an array that run one at a time, as the BLOOM team had it: each element exits at once
if the file is there when it starts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.training_job import training
from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog

SCRIPT = """#!/bin/bash
#SBATCH --requeue --ntasks-per-node=1
KILL_SWITCH_PATH={shared}/kill-switch
MEGATRON_ARGS="--train-iters 100000 --save-interval 10 --exit-interval 100000 --save {shared}/main --load {shared}/main"
CMD="pretrain_gpt.py $MEGATRON_ARGS --kill-switch-path $KILL_SWITCH_PATH"
mkdir -p {shared}/main
srun {python} -u {launcher} --nproc_per_node 2 $CMD
"""
FOUND = "Detected kill switch"


@pytest.mark.thorough
def test_the_next_element_of_an_array_never_sees_the_kill_switch_of_the_one_before_also_if_the_controller_dies(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(mode="observe", settings={"jobs": {"kill_switch_prefixes": [str(cluster.shared)]}})
    launcher = f"{cluster.place.directory}/checkout/tests/rig/megatron.py"
    script = SCRIPT.format(shared=cluster.shared, python=cluster.place.python, launcher=launcher)
    output = Path(cluster.directory) / "log" / "job-%j.out"
    array = cluster.sbatch(script, "-N2", f"--output={output}", "--array=1-3%1")
    first, second, third = (f"{array}_{index}" for index in (1, 2, 3))
    switch = cluster.shared / "kill-switch"

    training(watchdog, first, at_least=12)
    done = watchdog.command("save-all", first, "--json", timeout_s=240)
    rows = json.loads(done.stdout)["jobs"]
    assert (done.returncode, [(row["job_id"], row["state"]) for row in rows]) == (0, [(first, "done")]), done.stdout
    ended = log_of(cluster, first)
    training(watchdog, second, at_least=15)
    assert ended.count(FOUND) == 4 and ended.count("successfully saved") >= 2, ended  # one a rank, in any order
    assert FOUND not in log_of(cluster, second) and not switch.exists()
    assert cluster.job(third)["JobState"] == "PENDING" and cluster.job(third)["Priority"] != "0"
    assert cluster.job(second)["Restarts"] == "0"

    def asked() -> bool:
        """Refused while no agent has read the ranks, which alone say where the kill switch has to lie."""
        done = watchdog.command("save-all", second, "--no-wait", "--json")
        (row,) = json.loads(done.stdout)["jobs"]
        assert row["job_id"] == second and (row["state"] == "under way" or "no rank" in row["why"]), row
        return bool(row["state"] == "under way")

    watchdog.wait_for(asked, 40, "save-all to be accepted")
    watchdog.wait_for(switch.exists, 60, "the kill switch")
    watchdog.kill_controller()
    watchdog.wait_for(lambda: cluster.job(second)["JobState"] == "COMPLETED", 60, "the second element to end")
    time.sleep(5)  # Slurm starts the next one within one
    held = cluster.job(third)
    assert (held["JobState"], held["Priority"]) == ("PENDING", "0") and switch.exists(), held
    watchdog.start_controller()
    training(watchdog, third, at_least=20)
    assert FOUND not in log_of(cluster, third) and not switch.exists()


def log_of(cluster: Cluster, job: str) -> str:
    return Path(cluster.job(job)["StdOut"]).read_text()
