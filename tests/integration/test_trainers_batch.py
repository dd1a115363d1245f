"""deploy/trainers/batch.sh on a real Slurm: a warned job saves, is requeued once by itself, and resumes
without a lost step."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import pytest

from tests.rig.cluster import Cluster
from tests.rig.commands import ClusterError
from tests.rig.stack import train_script

BATCH = Path(__file__).parents[2] / "deploy" / "trainers" / "batch.sh"
RESUMED = re.compile(r"iteration +(\d+)/")


@pytest.mark.thorough
def test_a_warned_job_saves_is_requeued_once_and_goes_on(cluster: Cluster) -> None:
    script = train_script(cluster, "--step-seconds 0.2 --save-interval 1000 --steps 100000")
    script = re.sub(r"(?ms)^\(while .*?^pulse=.*?$", "", script)  # the last line is ours
    script = script.replace("srun ", f"exec {BATCH} --max-starts=2 -- srun ")
    output = cluster.shared / "batch.out"  # emptied between tests: a second try reads no old steps
    job = cluster.sbatch(script, "-N2", f"--output={output}")

    def steps() -> list[int]:
        return [int(step) for step in RESUMED.findall(output.read_text())] if output.exists() else []

    def told() -> str:
        lines = output.read_text().splitlines() if output.exists() else ["no output"]
        said = [line for line in lines if not RESUMED.search(line)]
        return "\n".join([f"{cluster.job(job)}", *said[-60:], *lines[-3:]])

    def wait_for(condition: object, what: str) -> None:
        deadline = time.monotonic() + 200  # a requeued job waits 2 min by itself; 90 s were too few in CI
        while not condition():  # type: ignore[operator]
            assert cluster.job(job)["JobState"] != "FAILED", f"{what}:\n{told()}"
            assert time.monotonic() < deadline, f"{what}:\n{told()}"
            time.sleep(0.2)

    wait_for(lambda: len(set(steps())) > 5, "the first run makes steps")
    cluster.slurm("scancel", "--batch", "--signal=USR1", job)
    wait_for(lambda: cluster.job(job)["Restarts"] == "1", "the job is requeued")
    reached = max(steps())

    said_at = time.monotonic() - 12

    def goes_on() -> bool:
        # A requeued job waits two minutes. That it may start now is said once its first run has wholly ended,
        # and some seconds later: in the second in which a run ended slurmd takes the next one's credential
        # for revoked. Each word puts the start off once more.
        nonlocal said_at
        if cluster.job(job)["JobState"] == "PENDING" and time.monotonic() - said_at > 15:
            said_at = time.monotonic()
            with contextlib.suppress(ClusterError):
                cluster.slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
        return max(steps()) > reached + 3

    wait_for(goes_on, "the second run makes steps")
    assert steps() == sorted(steps()), "no step is made twice: nothing was lost"
    cluster.slurm("scancel", "--batch", "--signal=USR1", job)
    cluster.wait_for_job_state(job, "COMPLETED")
    assert cluster.job(job)["Restarts"] == "1", "the second start was the last one that was allowed"
