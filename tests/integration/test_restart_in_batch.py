"""Restarts of a command whose ranks are in the batch script itself (one node, torchrun), with everything real."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.training_job import SAVE_INTERVAL, ended_action, inject, training
from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog

Watch = Callable[..., Watchdog]


def submit(cluster: Cluster) -> str:
    """Two ranks that a script beside them starts, as torchrun does, without a step of Slurm's."""
    faults, place = cluster.shared / "faults", cluster.place
    faults.mkdir(exist_ok=True)
    faults.chmod(0o777)
    run = "import sys; from slurm_watchdog.cli.main import main; sys.argv[0] = 'slurm-watchdog'; main()"
    exports = "".join(f"export {name}='{value}'\n" for name, value in place.environment.items() if name != "PATH")
    trainer = (
        f"{place.python} {place.directory}/checkout/tests/rig/trainer.py --steps 100000 --step-seconds 0.3 "
        f"--save-interval {SAVE_INTERVAL} --fault-dir {faults} --checkpoint-dir $DIR --rendezvous-dir {cluster.shared}"
    )
    script = f"""#!/bin/bash
#SBATCH --requeue --open-mode=append
{exports}export DIR={cluster.shared}/checkpoints-$SLURM_JOB_ID
mkdir -p $DIR
launch() {{ for r in 0 1; do RANK=$r LOCAL_RANK=$r WORLD_SIZE=2 {trainer} & done; wait; }}
export -f launch
{place.python} -c "{run}" run -- launch
"""
    output = Path(cluster.directory) / "log" / "job-%j.out"
    return cluster.sbatch(script, "-N1", f"--output={output}")


def test_a_hang_in_the_batch_script_is_started_again_there_and_nobody_is_taken_for_dead(
    cluster: Cluster, watch: Watch
) -> None:
    watchdog: Any = watch(mode="act", settings={"policy": {"kinds": {"collective_hang": {"exclude_nodes": False}}}})
    job = submit(cluster)
    training(watchdog, job, at_least=SAVE_INTERVAL + 12)
    inject(cluster, "dataloader_hang.rank1")
    incident = watchdog.wait_for(lambda: watchdog.firing(job, "collective_hang"), 120, "the hang to be found")
    action = ended_action(watchdog, incident["id"], timeout_s=120)
    done = [f"{r['operation']} {r['outcome']}" for r in action["operations"]]
    assert action["end"]["ok"], action
    assert done[-2:] == ["write_order done", "restart_step done"], action
    assert "in its allocation" in action["end"]["detail"]
    assert 0 <= action["end"]["steps_lost"] <= SAVE_INTERVAL
    assert cluster.job(job)["Restarts"] == "0"
    before = watchdog.step(job)
    watchdog.wait_for(lambda: watchdog.step(job) > before + 5, 30, "the new start to train on")
    watchdog.wait_for(lambda: not watchdog.firing(job, "collective_hang"), 30, "the incident to be over")
    assert {each["kind"] for each in watchdog.incidents(job)} == {"collective_hang"}
