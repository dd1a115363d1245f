"""A loss that goes bad: the incident says which checkpoint is the last good one, and `run` names it to the next start."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.training_job import SAVE_INTERVAL, ended_action, inject, submit_supervised, training
from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog


def test_a_restart_that_is_asked_for_after_a_nan_names_the_last_good_checkpoint_and_the_trainer_resumes_from_it(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(mode="observe")
    job = submit_supervised(cluster, "--keep-last 4", nodes=3, spares=1)
    training(watchdog, job, at_least=SAVE_INTERVAL + 5)
    inject(cluster, "nan.rank0")

    def last_good() -> Any:
        firing = watchdog.firing(job, "loss_nan")
        facts = " ".join(watchdog.explain(firing["id"])["incident"].get("evidence", ())) if firing else ""
        return re.search(r"(/\S+)/global_step(\d+)\b", facts)

    watchdog.wait_for(lambda: watchdog.firing(job, "loss_nan"), 60, "the loss to be reported")
    (cluster.shared / "faults" / "nan.rank0").unlink(missing_ok=True)
    found = watchdog.wait_for(last_good, 30, "the incident to say which checkpoint is the last good one")
    done = watchdog.command("restart", job, "--no-wait", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    asked = next(each for each in watchdog.incidents(job) if each["kind"] == "operator_restart")
    action = ended_action(watchdog, asked["id"], timeout_s=120)
    assert action["end"]["ok"] and f"the checkpoint {found[0]} is passed to it" in action["reason"], action
    output = (Path(cluster.directory) / "log" / f"job-{job}.out").read_text()
    assert f"with SLURM_WATCHDOG_RESUME_FROM={found[0]}" in output
    again = output.partition(f"loading checkpoint from {found[1]} at iteration {found[2]}")[2]
    assert again and "lm loss: nan" not in again.lower(), output[-3000:]
