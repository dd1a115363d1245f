"""The contract of SlurmClient, kept by the command-line client on a real cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from deploy.demo.cluster import Cluster
from watchdog.model import SlurmJob
from watchdog.slurm.client import SlurmClient, SlurmRefused, SlurmUnavailable
from watchdog.slurm.command_line import CommandLineSlurm

SLEEP = "#!/bin/bash\nexec sleep 600\n"
HOSTILE = (
    "two  words | JobState=COMPLETED",
    "line\nbreak JobId=999 JobState=FAILED Restarts=7",
    "%j,:;$(touch pwned)`x`\t'\"\\",
    "--all",
    "—unicode 你好",
)


@pytest.fixture
def client(cluster: Cluster) -> SlurmClient:
    return CommandLineSlurm("", 15.0, environ=cluster.env)


def job_when(
    client: SlurmClient, job_id: str, holds: Callable[[SlurmJob], bool], within_s: float = 30
) -> SlurmJob:
    """The job as soon as `holds` is true of it."""
    end = time.monotonic() + within_s
    while True:
        job = asyncio.run(client.read_job(job_id))
        if job is not None and holds(job):
            return job
        assert time.monotonic() < end, f"still {job}"
        time.sleep(0.1)


def test_jobs_with_hostile_names_are_listed_as_they_are(cluster: Cluster, client: SlurmClient) -> None:
    ids = {
        cluster.sbatch(SLEEP, f"--job-name={name}", f"--comment={name}", "--output=/dev/null"): name
        for name in HOSTILE
    }
    for job_id in ids:
        job_when(client, job_id, lambda job: job.state == "RUNNING")
    view = asyncio.run(client.read_view())
    jobs = {job.job_id: job for job in view.jobs}
    assert {node.name for node in view.nodes} == {"n1", "n2", "n3"}
    assert {node.address for node in view.nodes} == {cluster.layout.address(node) for node in cluster.nodes}
    for job_id, name in ids.items():
        job = jobs[job_id]
        assert (job.name, job.comment, job.state, job.restarts) == (name, name, "RUNNING", 0)
        assert len(job.nodes) == 1
        assert job.batch_host == job.nodes[0]
        assert job.start_at is not None
        assert abs(job.start_at - time.time()) < 120
        assert job.workdir == str(cluster.shared)
    assert "999" not in jobs
    for job_id in ids:
        asyncio.run(client.cancel(job_id))
    for job_id in ids:
        job_when(client, job_id, lambda job: job.state == "CANCELLED")


def test_the_output_of_a_job_is_where_the_client_says(cluster: Cluster, client: SlurmClient) -> None:
    script = "#!/bin/bash\necho here\necho there >&2\nexec sleep 600\n"
    plain = cluster.sbatch(script)
    named = cluster.sbatch(script, "--output=o-%j-%4j-%x-%u-%N.log", "--error=e-%A.log", "--job-name=nm")
    array = cluster.sbatch(script, "--array=3", "--output=a-%A_%a.log")
    for job_id in (plain, named, f"{array}_3"):
        job = job_when(client, job_id, lambda job: job.state == "RUNNING")
        assert job.stdout is not None
        assert job.stderr is not None
        end = time.monotonic() + 5
        while not (b"here" in read(job.stdout) and b"there" in read(job.stderr)):
            assert time.monotonic() < end, f"{job.stdout} and {job.stderr} do not hold it"
            time.sleep(0.05)


def read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return b""


def test_a_job_is_requeued_held_gets_its_exclusion_and_runs_elsewhere(
    cluster: Cluster, client: SlurmClient
) -> None:
    job_id = cluster.sbatch(SLEEP, "--exclude=n3")
    before = job_when(client, job_id, lambda job: job.state == "RUNNING")
    assert before.excluded_nodes == ("n3",)
    (node,) = before.nodes

    asyncio.run(client.requeue_hold(job_id, only_unfinished=True))
    held = asyncio.run(client.read_job(job_id))
    assert held is not None
    assert (held.held, held.restarts) == (True, 1)
    asyncio.run(client.requeue_hold(job_id, only_unfinished=True))  # again: already so, no error

    excluded = tuple(sorted({*held.excluded_nodes, node}))
    asyncio.run(client.set_excluded_nodes(job_id, excluded))
    asyncio.run(client.release(job_id))
    after = job_when(client, job_id, lambda job: job.state == "RUNNING", within_s=60)
    assert tuple(sorted(after.excluded_nodes)) == excluded
    assert not set(after.nodes) & set(excluded)
    assert (after.held, after.restarts) == (False, 1)
    assert after.start_at != before.start_at


def test_an_element_of_an_array_is_requeued_and_its_siblings_are_not(
    cluster: Cluster, client: SlurmClient
) -> None:
    array = cluster.sbatch(SLEEP, "--array=0-2")
    for index in range(3):
        job_when(client, f"{array}_{index}", lambda job: job.state == "RUNNING")
    asyncio.run(client.requeue_hold(f"{array}_2", only_unfinished=True))
    states = {
        job.job_id: job.restarts
        for job in asyncio.run(client.read_view()).jobs
        if job.job_id.startswith(array)
    }
    assert states == {f"{array}_0": 0, f"{array}_1": 0, f"{array}_2": 1}
    with pytest.raises(SlurmRefused, match="does not name one job"):
        asyncio.run(client.read_job(array))


def test_a_finished_job_is_refused_and_does_not_run_again(cluster: Cluster, client: SlurmClient) -> None:
    job_id = cluster.sbatch("#!/bin/bash\ntrue\n")
    job_when(client, job_id, lambda job: job.state == "COMPLETED")
    with pytest.raises(SlurmRefused, match="already finished"):
        asyncio.run(client.requeue_hold(job_id, only_unfinished=True))
    job = asyncio.run(client.read_job(job_id))
    assert job is not None
    assert (job.state, job.restarts) == ("COMPLETED", 0)
    asyncio.run(client.requeue_hold(job_id, only_unfinished=False))
    assert job_when(client, job_id, lambda job: job.restarts == 1).held


def test_a_job_that_is_not_running_or_may_not_be_requeued_is_refused(
    cluster: Cluster, client: SlurmClient
) -> None:
    pending = cluster.sbatch(SLEEP, "--begin=now+1hour")
    fixed = cluster.sbatch(SLEEP, "--no-requeue")
    with pytest.raises(SlurmRefused, match="not running"):
        asyncio.run(client.requeue_hold(pending, only_unfinished=True))
    assert job_when(client, fixed, lambda job: job.state == "RUNNING").requeueable is False
    with pytest.raises(SlurmRefused, match="disabled"):
        asyncio.run(client.requeue_hold(fixed, only_unfinished=True))
    with pytest.raises(SlurmRefused, match="no longer pending"):
        asyncio.run(client.set_excluded_nodes(fixed, ["n1"]))
    with pytest.raises(SlurmRefused, match="Invalid node name"):
        asyncio.run(client.set_excluded_nodes(pending, ["nowhere"]))


def test_a_pending_job_is_held_released_and_cancelled(cluster: Cluster, client: SlurmClient) -> None:
    job_id = cluster.sbatch(SLEEP, "--begin=now+1hour")
    asyncio.run(client.hold(job_id))
    assert job_when(client, job_id, lambda job: job.held)
    asyncio.run(client.release(job_id))
    assert job_when(client, job_id, lambda job: not job.held)
    asyncio.run(client.cancel(job_id))
    assert job_when(client, job_id, lambda job: job.state == "CANCELLED")


def test_an_unknown_job_is_none_and_refused(cluster: Cluster, client: SlurmClient) -> None:
    assert asyncio.run(client.read_job("4000000")) is None
    for call in (
        client.requeue_hold("4000000", only_unfinished=True),
        client.release("4000000"),
        client.hold("4000000"),
        client.set_excluded_nodes("4000000", ["n1"]),
    ):
        with pytest.raises(SlurmRefused, match="Invalid job id"):
            asyncio.run(call)


def test_a_stopped_controller_is_unavailable_within_the_deadline(cluster: Cluster) -> None:
    job_id = cluster.sbatch(SLEEP)
    client = CommandLineSlurm("", 3.0, environ=cluster.env)
    cluster.stop_controller()
    try:
        for call in (
            client.read_view(),
            client.read_job(job_id),
            client.requeue_hold(job_id, only_unfinished=True),
            client.set_excluded_nodes(job_id, ["n1"]),
            client.release(job_id),
        ):
            start = time.monotonic()
            with pytest.raises(SlurmUnavailable):
                asyncio.run(call)
            assert time.monotonic() - start < 4.5
    finally:
        cluster.start_controller()
    assert job_id in {job.job_id for job in asyncio.run(client.read_view()).jobs}
