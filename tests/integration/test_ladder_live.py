"""The ladder on a real Slurm: signals, a job submitted in another's place, an array, a job that is finished,
people without rights."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.training_job import SAVE_INTERVAL, ended_action, inject, submit, training
from tests.rig.cluster import Cluster
from tests.rig.rights import USER
from tests.rig.stack import Watchdog

Watch = Callable[..., Watchdog]


def policy(kind: str, **treatment: Any) -> dict[str, Any]:
    return {"policy": {"kinds": {kind: treatment}}}


def asked(watchdog: Watchdog, job: str, *options: str) -> Any:
    """The incident of a restart that a person asks for."""
    done = watchdog.command("restart", job, "--no-wait", "--json", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(i for i in watchdog.incidents(job) if i["kind"] == "operator_restart")


def operations(action: Any) -> list[str]:
    return [f"{r['operation']} {r['outcome']}" for r in action["operations"]]


ASK = """
import http.client, socket, sys
connection = http.client.HTTPConnection("x")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(sys.argv[1])
connection.request("POST", "/v1/restart", sys.argv[2])
answer = connection.getresponse()
print(answer.status, answer.read().decode())
"""


def nobody_asks(watchdog: Watchdog, job: str) -> str:
    """The answer to a user who does not own the job and requests its restart."""
    os.chmod(watchdog.socket, 0o666)
    request = f'{{"job_id": "{job}"}}'
    nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", ASK]
    done = subprocess.run(
        [*nobody, watchdog.socket, request], capture_output=True, text=True, timeout=180, cwd="/", check=False
    )
    return done.stdout + done.stderr


def test_a_job_that_saves_on_sigusr1_is_moved_for_its_owner_and_no_step_is_lost_and_not_for_somebody_else(
    cluster: Cluster, watch: Watch
) -> None:
    settings = policy("operator_restart", ladder=["sigusr1", "requeue"], signal_limit="60s")
    watchdog = watch(mode="observe", settings=settings)
    job = submit(cluster, nodes=2)
    training(watchdog, job)
    if os.geteuid() == 0:
        told = nobody_asks(watchdog, job)
        assert told.startswith("403") and f"belongs to {USER}" in told, told
        assert "its owner, security.may.restart may restart the job" in told and not watchdog.incidents(job)
    action = ended_action(watchdog, asked(watchdog, job, "--exclude", "n1")["id"], timeout_s=240)
    assert action["end"]["ok"] and action["end"]["steps_lost"] == 0, action
    assert operations(action)[0] == "signal_usr1 done"
    assert cluster.job(job)["Restarts"] == "1" and cluster.job(job)["ExcNodeList"] == "n1"


@pytest.mark.thorough
def test_a_hung_job_is_ended_by_sigterm_and_loses_no_more_than_what_came_after_its_checkpoint(
    cluster: Cluster, watch: Watch
) -> None:
    settings = policy("collective_hang", ladder=["evidence", "sigterm", "requeue"], signal_limit="60s")
    watchdog = watch(mode="act", settings=settings)
    job = submit(cluster, nodes=2)
    training(watchdog, job, at_least=SAVE_INTERVAL + 2)
    inject(cluster, "dataloader_hang.rank3")
    incident = watchdog.wait_for(lambda: watchdog.firing(job, "collective_hang"), 120, "the hang to be found")
    action = ended_action(watchdog, incident["id"], timeout_s=300)
    assert action["end"]["ok"], action
    assert 0 <= action["end"]["steps_lost"] <= SAVE_INTERVAL
    assert "signal_term done" in operations(action)
    assert cluster.job(job)["Restarts"] == "1"


@pytest.mark.thorough
def test_a_job_that_may_not_be_requeued_is_submitted_again_and_goes_on_after_it(cluster: Cluster, watch: Watch) -> None:
    settings = policy("operator_restart", ladder=["kill_switch", "requeue", "resubmit"])
    watchdog = watch(mode="observe", settings=settings)
    job = submit(cluster, nodes=2, sbatch=("--no-requeue",))
    training(watchdog, job)
    action = ended_action(watchdog, asked(watchdog, job)["id"], timeout_s=300)
    assert action["end"]["ok"], action
    (detail,) = [r["detail"] for r in action["operations"] if r["operation"] == "resubmit"]
    new = detail.split("job ")[1].split(",")[0]
    assert cluster.job(new)["JobState"] == "RUNNING"
    assert cluster.job(job)["JobState"] != "RUNNING" and cluster.job(job)["Restarts"] == "0"
    mine = [job_id for job_id in watchdog.status()["jobs"] if job_id["state"] == "RUNNING"]
    assert len(mine) == 1, "the job runs once"


@pytest.mark.thorough
def test_an_element_of_an_array_that_runs_one_at_a_time_is_restarted_and_the_others_are_not_touched(
    cluster: Cluster, watch: Watch
) -> None:
    watchdog = watch(mode="act")
    whole = submit(cluster, nodes=2, sbatch=("--array=1-2%1",))
    first, second = f"{whole}_1", f"{whole}_2"
    training(watchdog, first)
    inject(cluster, "dataloader_hang.rank1")
    incident = watchdog.wait_for(lambda: watchdog.firing(first, "collective_hang"), 120, "the hang to be found")
    watchdog.wait_for(lambda: cluster.job(first)["Restarts"] == "1", 120, "the element to be requeued")
    # Whichever Slurm starts first: the other one waits for it, and is as it was.
    watchdog.wait_for(
        lambda: {cluster.job(j)["JobState"] for j in (first, second)} == {"RUNNING", "PENDING"},
        180,
        "one of the two to run",
    )
    assert cluster.job(second)["Restarts"] == "0"
    if cluster.job(second)["JobState"] == "RUNNING":
        cluster.slurm("scancel", second)
    action = ended_action(watchdog, incident["id"], timeout_s=240)
    assert action["end"]["ok"], action
    assert cluster.job(first)["Restarts"] == "1"


@pytest.mark.thorough
def test_a_job_that_makes_its_last_step_before_it_hears_is_finished_and_never_run_again(
    cluster: Cluster, watch: Watch
) -> None:
    # A trainer that looks for another kill switch than the one that is written, and so comes to its end by itself.
    settings = {
        "jobs": {"kill_switch": str(cluster.shared) + "/nobody-looks-here-{job_id}"},
        "ladder": {"checkpoint_limit": "300s"},
    }
    watchdog = watch(mode="observe", settings=settings)
    job = submit(cluster, "--steps 40 --kill-switch-path /nowhere", nodes=2)
    training(watchdog, job, at_least=3)
    incident = asked(watchdog, job)
    action = ended_action(watchdog, incident["id"], timeout_s=300)
    assert not action["end"]["ok"], action
    assert cluster.job(job)["JobState"] == "COMPLETED" and cluster.job(job)["Restarts"] == "0"
    assert not list(cluster.shared.glob("nobody-looks-here-*")), "the kill switch was left behind"


WITHOUT_RIGHTS = """#!/bin/sh
# Stands before the real scontrol: whatever changes something is asked for by somebody without rights.
case "$1" in show|write) exec {real} "$@" ;; esac
exec setpriv --reuid=65534 --regid=65534 --clear-groups {real} "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_watchdog_without_rights_leaves_the_job_as_it_is_and_says_what_is_missing(
    cluster: Cluster, watch: Watch, tmp_path: Path
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("squeue", "sinfo", "scancel", "sbatch"):
        (tools / name).symlink_to(shutil.which(name) or "")
    (tools / "scontrol").write_text(WITHOUT_RIGHTS.format(real=shutil.which("scontrol")))
    (tools / "scontrol").chmod(0o755)
    watchdog = watch(mode="act", settings={"slurm": {"bin_directory": str(tools)}})
    job = submit(cluster, nodes=2)
    training(watchdog, job)
    inject(cluster, "dataloader_hang.rank3")
    incident = watchdog.wait_for(lambda: watchdog.firing(job, "collective_hang"), 120, "the hang to be found")
    action = ended_action(watchdog, incident["id"], timeout_s=240)
    assert not action["end"]["ok"]
    assert "ermission denied" in action["end"]["detail"] and "operator" in action["end"]["detail"]
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("RUNNING", "0")
