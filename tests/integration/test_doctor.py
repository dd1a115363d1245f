"""`doctor` on a real cluster: a job that nobody protected, and a controller with its agents."""

from __future__ import annotations

import json
from typing import Any

from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog

SCRIPT = """#!/bin/bash
#SBATCH --no-requeue
srun python3 -c 'import time; time.sleep(300)'
"""


def findings(watchdog: Watchdog, *arguments: str) -> dict[str, dict[str, Any]]:
    done = watchdog.command("doctor", "--config", str(watchdog.config_file), "--json", *arguments)
    document = json.loads(done.stdout)
    assert done.returncode == {"ok": 0, "warning": 1, "critical": 2, "unknown": 3}[document["level"]]
    return {each["rule"]: each for each in document["findings"]}


def test_the_doctor_sees_the_cluster_and_a_job_as_slurm_and_the_controller_have_them(
    cluster: Cluster,
) -> None:
    with Watchdog(cluster, mode="observe", nodes=cluster.nodes[:2]) as watchdog:
        found = findings(watchdog)
        assert not {"controller", "slurm", "no_agents", "slurm_commands", "token"} & set(found)
        assert found["nodes_without_agent"]["evidence"] == cluster.nodes[2]
        assert found["mode"]["level"] == "hint"
        job = cluster.sbatch(SCRIPT, "-N2", "--ntasks-per-node=1")
        watchdog.wait_for(lambda: cluster.job(job).get("JobState") == "RUNNING", 60, "the job to run")
        watchdog.wait_for(
            lambda: job in [each["job_id"] for each in watchdog.status()["jobs"]],
            60,
            "the controller to see it",
        )
        found = findings(watchdog, "--job", job)
        assert {"requeue", "kill_on_bad_exit"} <= set(found)
        assert found["requeue"]["evidence"].endswith("--no-requeue")
        assert found["kill_on_bad_exit"]["where"].endswith(":3")
        assert not {"not_watched", "job", "script"} & set(found)
        assert set(findings(watchdog, "--job", "999999")) == {"job"}
