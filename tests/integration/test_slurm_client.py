"""The contract of SlurmClient on a real cluster: the same tests for every client that is here.

The one that lists by pyslurm is here if the interpreter in SLURM_WATCHDOG_TEST_PYSLURM, or ours, has a
pyslurm that was built for the installed Slurm. Otherwise the test that compares both is skipped, and says so.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.model.slurm import SlurmJob, SlurmNode
from slurm_watchdog.slurm.client import (
    Refusal,
    SignalTo,
    SlurmClient,
    SlurmRefused,
    SlurmUnavailable,
    Submission,
)
from slurm_watchdog.slurm.pyslurm_client import is_importable, make_client
from tests.rig.cluster import Cluster
from tests.rig.commands import wait_until

PYSLURM = os.environ.get("SLURM_WATCHDOG_TEST_PYSLURM", "")
CLIENTS = ("command_line", *(("pyslurm",) if PYSLURM or is_importable() else ()))
USER = "games"
"""Of Debian's base system: somebody who is no administrator."""
SLEEP = "#!/bin/bash\nexec sleep 600\n"
HOSTILE = (
    "two  words | JobState=COMPLETED",
    "line\nbreak JobId=999 JobState=FAILED Restarts=7",
    "%j,:;$(touch pwned)`x`\t'\"\\",
    "--all",
    "—unicode 你好",
)


Do = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture
def do() -> Iterator[Do]:
    """Runs a request to its end, all of a test in one event loop, as a controller would."""
    with asyncio.Runner() as runner:
        yield runner.run


Make = Callable[[str, float], SlurmClient]


@pytest.fixture
def make(cluster: Cluster) -> Make:
    """Makes a client of a kind with a deadline in seconds."""

    def one(choice: str, deadline_s: float) -> SlurmClient:
        return make_client(choice, deadline_s=deadline_s, pyslurm_python=PYSLURM, environ=cluster.env)  # type: ignore[arg-type]

    return one


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, make: Make) -> SlurmClient:
    return make(request.param, 30.0)


@pytest.fixture
def commands(make: Make) -> SlurmClient:
    """The command-line client, for what all clients do in the same way."""
    return make("command_line", 30.0)


def job_when(
    do: Do, client: SlurmClient, job_id: str, holds: Callable[[SlurmJob], bool], within_s: float = 60
) -> SlurmJob:
    """The job as soon as `holds` is true of it."""
    end = time.monotonic() + within_s
    while True:
        job = do(client.read_job(job_id))
        if job is not None and holds(job):
            return job
        assert time.monotonic() < end, f"still {job}"
        time.sleep(0.1)


def test_jobs_with_hostile_names_are_listed_as_they_are(cluster: Cluster, client: SlurmClient, do: Do) -> None:
    ids = {
        cluster.sbatch(SLEEP, f"--job-name={name}", f"--comment={name}", "--output=/dev/null"): name for name in HOSTILE
    }
    for job_id in ids:
        job_when(do, client, job_id, lambda job: job.state == "RUNNING")
    view = do(client.read_view())
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
        do(client.cancel(job_id))
    for job_id in ids:
        job_when(do, client, job_id, lambda job: job.state == "CANCELLED")


def test_the_output_of_a_job_is_where_the_client_says(cluster: Cluster, client: SlurmClient, do: Do) -> None:
    script = "#!/bin/bash\necho here\necho there >&2\nexec sleep 600\n"
    plain = cluster.sbatch(script)
    named = cluster.sbatch(script, "--output=o-%j-%4j-%x-%u-%N.log", "--error=e-%A.log", "--job-name=nm")
    array = cluster.sbatch(script, "--array=3", "--output=a-%A_%a.log")
    for job_id in (plain, named, f"{array}_3"):
        job = job_when(do, client, job_id, lambda job: job.state == "RUNNING")
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
    cluster: Cluster, client: SlurmClient, do: Do
) -> None:
    job_id = cluster.sbatch(SLEEP, "--exclude=n3")
    before = job_when(do, client, job_id, lambda job: job.state == "RUNNING")
    assert before.excluded_nodes == ("n3",)
    (node,) = before.nodes

    do(client.requeue_hold(job_id, only_unfinished=True))
    held = do(client.read_job(job_id))
    assert held is not None
    assert (held.held, held.restarts) == (True, 1)
    do(client.requeue_hold(job_id, only_unfinished=True))  # again: already so, no error

    excluded = tuple(sorted({*held.excluded_nodes, node}))
    do(client.set_excluded_nodes(job_id, excluded))
    do(client.release(job_id))
    after = job_when(do, client, job_id, lambda job: job.state == "RUNNING", within_s=60)
    assert tuple(sorted(after.excluded_nodes)) == excluded
    assert not set(after.nodes) & set(excluded)
    assert (after.held, after.restarts) == (False, 1)
    assert after.start_at != before.start_at


def test_an_element_of_an_array_is_requeued_and_its_siblings_are_not(
    cluster: Cluster, client: SlurmClient, do: Do
) -> None:
    array = cluster.sbatch(SLEEP, "--array=0-2")
    for index in range(3):
        job_when(do, client, f"{array}_{index}", lambda job: job.state == "RUNNING")
    for index in (1, 2):
        do(client.requeue_hold(f"{array}_{index}", only_unfinished=True))
        job_when(do, client, f"{array}_{index}", lambda job: job.state == "PENDING")
    # Both wait for the same reason, and are two jobs all the same.
    states = {job.job_id: job.restarts for job in do(client.read_view()).jobs if job.array_job_id == array}
    assert states == {f"{array}_0": 0, f"{array}_1": 1, f"{array}_2": 1}
    with pytest.raises(SlurmRefused, match="does not name one job"):
        do(client.read_job(array))


def test_a_finished_job_is_refused_and_does_not_run_again(cluster: Cluster, client: SlurmClient, do: Do) -> None:
    job_id = cluster.sbatch("#!/bin/bash\ntrue\n")
    job_when(do, client, job_id, lambda job: job.state == "COMPLETED")
    with pytest.raises(SlurmRefused, match="already finished"):
        do(client.requeue_hold(job_id, only_unfinished=True))
    job = do(client.read_job(job_id))
    assert job is not None
    assert (job.state, job.restarts) == ("COMPLETED", 0)
    do(client.requeue_hold(job_id, only_unfinished=False))
    assert job_when(do, client, job_id, lambda job: job.restarts == 1).held


def test_a_job_that_is_not_running_or_may_not_be_requeued_is_refused(
    cluster: Cluster, client: SlurmClient, do: Do
) -> None:
    pending = cluster.sbatch(SLEEP, "--begin=now+1hour")
    fixed = cluster.sbatch(SLEEP, "--no-requeue")
    with pytest.raises(SlurmRefused, match="not running"):
        do(client.requeue_hold(pending, only_unfinished=True))
    assert job_when(do, client, fixed, lambda job: job.state == "RUNNING").requeueable is False
    with pytest.raises(SlurmRefused, match="disabled"):
        do(client.requeue_hold(fixed, only_unfinished=True))
    with pytest.raises(SlurmRefused, match="no longer pending"):
        do(client.set_excluded_nodes(fixed, ["n1"]))
    with pytest.raises(SlurmRefused, match="Invalid node name"):
        do(client.set_excluded_nodes(pending, ["nowhere"]))


def test_a_pending_job_is_held_released_and_cancelled(cluster: Cluster, client: SlurmClient, do: Do) -> None:
    job_id = cluster.sbatch(SLEEP, "--begin=now+1hour")
    do(client.hold(job_id))
    assert job_when(do, client, job_id, lambda job: job.held)
    do(client.release(job_id))
    assert job_when(do, client, job_id, lambda job: not job.held)
    do(client.cancel(job_id))
    assert job_when(do, client, job_id, lambda job: job.state == "CANCELLED")


def test_an_unknown_job_is_none_and_refused(cluster: Cluster, client: SlurmClient, do: Do) -> None:
    assert do(client.read_job("4000000")) is None
    for call in (
        client.requeue_hold("4000000", only_unfinished=True),
        client.release("4000000"),
        client.hold("4000000"),
        client.set_excluded_nodes("4000000", ["n1"]),
    ):
        with pytest.raises(SlurmRefused, match="Invalid job id"):
            do(call)


@pytest.mark.parametrize("choice", CLIENTS)
def test_a_controller_that_is_gone_leaves_everything_open_within_the_deadline(
    cluster: Cluster, make: Make, do: Do, choice: str
) -> None:
    job_id = cluster.sbatch(SLEEP)
    client = make(choice, 1.0)
    cluster.stop_controller()
    try:
        for call in (
            client.read_view(),
            client.read_job(job_id),
            client.requeue_hold(job_id, only_unfinished=True),
            client.set_excluded_nodes(job_id, ["n1"]),
            client.release(job_id),
            client.send_signal(job_id, "USR1", SignalTo.FULL),
            client.drain_node("n1", "test"),
        ):
            start = time.monotonic()
            with pytest.raises(SlurmUnavailable):
                do(call)
            assert time.monotonic() - start < 20
    finally:
        cluster.start_controller()
    again = make(choice, 30.0)
    assert job_id in {job.job_id for job in do(again.read_view()).jobs}
    job_when(do, again, job_id, lambda job: job.restarts == 0 and job.state == "RUNNING")


@pytest.mark.parametrize("choice", CLIENTS)
def test_a_controller_that_stands_still_is_unknown_and_the_same_client_goes_on_after_it(
    cluster: Cluster, make: Make, do: Do, choice: str
) -> None:
    job_id = cluster.sbatch(SLEEP)
    job_when(do, make(choice, 30.0), job_id, lambda job: job.state == "RUNNING")
    client = make(choice, 3.0)
    os.kill(controller_pid(cluster), signal.SIGSTOP)
    try:
        for call in (
            client.read_view(),
            client.requeue_hold(job_id, only_unfinished=True),
        ):
            with pytest.raises(SlurmUnavailable, match="no answer within 3 s"):
                do(call)
    finally:
        os.kill(controller_pid(cluster), signal.SIGCONT)
    end = time.monotonic() + 60
    while True:
        try:
            assert job_id in {job.job_id for job in do(client.read_view()).jobs}
            break
        except SlurmUnavailable:
            assert time.monotonic() < end
            time.sleep(0.5)


def controller_pid(cluster: Cluster) -> int:
    return int((cluster.directory / "state" / "slurmctld.pid").read_text())


# ------------------------------------------------------------------------------------------------- signals

HEARS = """#!/bin/bash
trap 'echo batch' USR1
srun bash -c 'trap "echo step" USR1; echo ready; while true; do sleep 0.2; done' &
while true; do sleep 0.2; done
"""


def test_a_signal_reaches_the_steps_the_batch_script_or_both(cluster: Cluster, commands: SlurmClient, do: Do) -> None:
    jobs = {to: cluster.sbatch(HEARS, "-n1", f"--output={to}.out") for to in SignalTo}

    def heard(to: SignalTo, word: str) -> bool:
        path = cluster.shared / f"{to}.out"
        return path.exists() and word in path.read_text().split()

    wait_for(lambda: all(heard(to, "ready") for to in SignalTo))
    for to, job_id in jobs.items():
        do(commands.send_signal(job_id, "SIGUSR1", to))
    wait_for(lambda: heard(SignalTo.STEPS, "step") and heard(SignalTo.FULL, "step"))
    wait_for(lambda: heard(SignalTo.BATCH, "batch") and heard(SignalTo.FULL, "batch"))
    assert not heard(SignalTo.STEPS, "batch")
    assert not heard(SignalTo.BATCH, "step")
    for job_id in jobs.values():
        assert do(commands.read_job(job_id)).state == "RUNNING"


def wait_for(condition: Callable[[], bool], within_s: float = 60) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_job_without_processes_gets_no_signal(cluster: Cluster, client: SlurmClient, do: Do) -> None:
    pending = cluster.sbatch(SLEEP, "--begin=now+1hour")
    over = cluster.sbatch("#!/bin/bash\ntrue\n", "--output=/dev/null")
    job_when(do, client, over, lambda job: job.state == "COMPLETED")
    for job_id, kind in (
        (pending, Refusal.NOT_RUNNING),
        (over, Refusal.FINISHED),
        ("400000", Refusal.NO_SUCH_JOB),
    ):
        with pytest.raises(SlurmRefused) as caught:
            do(client.send_signal(job_id, "USR1", SignalTo.FULL))
        assert caught.value.kind is kind


# ------------------------------------------------------------------------------------------------- requeue, exclude


def test_exclusions_replace_those_that_are_there(cluster: Cluster, client: SlurmClient, do: Do) -> None:
    job_id = cluster.sbatch(SLEEP, "--begin=now+1hour", "--exclude=n3")
    do(client.set_excluded_nodes(job_id, ["n1", "n3"]))
    assert do(client.read_job(job_id)).excluded_nodes == ("n1", "n3")
    running = cluster.sbatch(SLEEP, "--exclude=n2", "--output=/dev/null")
    job_when(do, client, running, lambda job: job.state == "RUNNING")
    with pytest.raises(SlurmRefused) as caught:
        do(client.set_excluded_nodes(running, ["n1"]))
    assert (caught.value.kind, caught.value.terminal) == (Refusal.NOT_PENDING, False)
    with pytest.raises(SlurmRefused) as caught:
        do(client.set_excluded_nodes("400000", ["n1"]))
    assert (caught.value.kind, caught.value.terminal) == (Refusal.NO_SUCH_JOB, True)


# ------------------------------------------------------------------------------------------------- script, submission

SCRIPT = (
    b"#!/bin/bash\n#SBATCH --nodes=3 --job-name=first\n"
    b'echo "$LOGNAME|$PWD|$SLURM_JOB_NUM_NODES|$SLURM_RESTART_COUNT|$(id -un)"\nexec sleep 600\n# \xff without an end'
)


@pytest.mark.parametrize("user", ["root", USER])
def test_a_stored_script_is_submitted_again_as_its_user_in_his_directory(
    cluster: Cluster, commands: SlurmClient, do: Do, tmp_path: Path, user: str
) -> None:
    workdir = cluster.shared / "w d"
    workdir.mkdir()
    workdir.chmod(0o777)
    uid = pwd.getpwnam(user).pw_uid
    first = Submission(
        script=SCRIPT, options=("--nodes=1", "--exclude=n2", "--output=out-%j", "--comment=a | b"), uid=uid,
        workdir=str(workdir),
    )  # fmt: skip
    job_id = do(commands.submit(first))
    job = job_when(do, commands, job_id, lambda job: job.state == "RUNNING")
    assert (job.user, job.workdir, job.comment, job.excluded_nodes) == (user, str(workdir), "a | b", ("n2",))
    assert (job.node_count, job.name) == (1, "first")
    wait_for(lambda: read(str(workdir / f"out-{job_id}")) == f"{user}|{workdir}|1||{user}\n".encode())
    assert do(commands.read_script(job_id)) == SCRIPT

    bare = Submission(
        script=do(commands.read_script(job_id)),
        options=("--nodes=1", "--output=/dev/null"),
        uid=uid,
        workdir=str(workdir),
    )
    again = do(commands.submit(bare))
    job = job_when(do, commands, again, lambda job: job.state in {"RUNNING", "PENDING"})
    assert (job.user, job.name, job.workdir) == (user, "first", str(workdir))
    assert do(commands.read_script(again)) == SCRIPT


def test_a_job_like_another_gets_what_stood_on_that_ones_command_line(
    cluster: Cluster, commands: SlurmClient, do: Do
) -> None:
    bare = "#!/bin/bash\necho here\nexec sleep 600\n"
    given = ("-n2", "-c2", "-N1", "--exclusive", "--contiguous", "--output=log-%j", "--error=err-%A")
    jobs = [cluster.sbatch(bare, *given), cluster.sbatch(bare, "--array=7", "--ntasks-per-node=1") + "_7"]
    for job_id in jobs:
        job = job_when(do, commands, job_id, lambda job: job.state == "RUNNING")
        again = do(
            commands.submit(
                Submission(
                    script=do(commands.read_script(job_id)),
                    like=job_id,
                    options=("--hold", f"--nodes={job.node_count}", f"--job-name={job.name}"),
                    uid=job.uid,
                    workdir=job.workdir or "/",
                )
            )
        )
        new = again if "_" not in job_id else f"{again}_7"
        asked = [cluster.job(one) for one in (job_id, new)]
        for field in (
            "NumTasks",
            "CPUs/Task",
            "OverSubscribe",
            "Contiguous",
            "NtasksPerN:B:S:C",
            "ArrayTaskId",
        ):
            assert asked[0].get(field) == asked[1].get(field), field
        do(commands.release(new))
        do(commands.cancel(job_id))
        copy = job_when(do, commands, new, lambda job: job.state == "RUNNING")
        expected = f"log-{again}" if "_" not in job_id else f"slurm-{again}_7.out"
        assert copy.stdout == str(cluster.shared / expected)
        wait_for(lambda: read(str(cluster.shared / expected)) == b"here\n")  # noqa: B023 - called at once
        do(commands.cancel(new))


def test_what_can_not_be_submitted_is_refused_for_good(cluster: Cluster, commands: SlurmClient, do: Do) -> None:
    for script, option, kind in (
        (SCRIPT, "--partition=nowhere", Refusal.UNSATISFIABLE),
        (SCRIPT, "--nodelist=nowhere", Refusal.NO_SUCH_NODE),
        (SCRIPT, "--nonsense", Refusal.OTHER),
        (b"true\n", "--nodes=1", Refusal.OTHER),
    ):
        with pytest.raises(SlurmRefused) as caught:
            do(commands.submit(Submission(script=script, options=(option,), uid=0, workdir="/")))
        assert (caught.value.kind, caught.value.terminal) == (kind, True)
    salloc = cluster.sbatch(SLEEP, "--begin=now+1hour")
    with pytest.raises(SlurmRefused) as caught:
        do(commands.read_script(str(int(salloc) + 1)))
    assert caught.value.kind is Refusal.NO_SUCH_JOB


# ------------------------------------------------------------------------------------------------- nodes


def test_a_node_is_drained_and_only_our_own_drain_is_taken_back(cluster: Cluster, client: SlurmClient, do: Do) -> None:
    do(client.drain_node("n3", "slurm-watchdog: two\nlines | and State=IDLE"))
    ours = do(client.read_node("n3"))
    assert "DRAIN" in ours.state
    assert (ours.reason, ours.reason_user) == ("slurm-watchdog: two lines | and State=IDLE", "root")
    assert ours.reason_at is not None
    assert abs(ours.reason_at - time.time()) < 120
    assert ours in do(client.read_view()).nodes

    do(client.drain_node("n3", "somebody else's"))
    with pytest.raises(SlurmRefused, match="another reason") as caught:
        do(client.undrain_node("n3", ours.reason, ours.reason_at))
    assert caught.value.kind is Refusal.CHANGED
    assert "DRAIN" in do(client.read_node("n3")).state

    theirs = do(client.read_node("n3"))
    do(client.undrain_node("n3", theirs.reason, theirs.reason_at))
    node = do(client.read_node("n3"))
    assert "DRAIN" not in node.state
    assert node.reason in {"", "somebody else's"}  # 24.11 leaves the words of a drain that is over
    with pytest.raises(SlurmRefused, match="not drained"):
        do(client.undrain_node("n3", ours.reason, ours.reason_at))


def test_a_node_is_reserved_once_and_given_back(cluster: Cluster, client: SlurmClient, do: Do) -> None:
    name = "slurm-watchdog-test-0a1b2c"
    do(client.reserve_nodes(name, ("n3",)))
    (ours,) = do(client.read_reservations())
    assert (ours.name, ours.nodes, ours.is_maintenance) == (name, ("n3",), True)
    assert wait_until(lambda: "MAINT" in do(client.read_node("n3")).state, 30)
    with pytest.raises((SlurmRefused, SlurmUnavailable)):
        do(client.reserve_nodes(name, ("n3",)))
    assert do(client.read_reservations()) == (ours,)
    do(client.delete_reservation(name))
    assert do(client.read_reservations()) == ()
    with pytest.raises((SlurmRefused, SlurmUnavailable)):
        do(client.delete_reservation(name))
    with pytest.raises(SlurmRefused):
        do(client.reserve_nodes(name, ("nowhere",)))


def test_an_unknown_node_is_none_and_refused(client: SlurmClient, do: Do) -> None:
    assert do(client.read_node("nowhere")) is None
    with pytest.raises(SlurmRefused) as caught:
        do(client.drain_node("nowhere", "test"))
    assert caught.value.kind is Refusal.NO_SUCH_NODE


# ------------------------------------------------------------------------------------------------- rights


def test_a_user_without_rights_is_told_so_for_good(cluster: Cluster, do: Do, tmp_path: Path) -> None:
    job_id = cluster.sbatch(SLEEP, "--output=/dev/null")
    pending = cluster.sbatch(SLEEP, "--begin=now+1hour")
    entry = pwd.getpwnam(USER)
    for command in ("squeue", "sinfo", "scontrol", "scancel", "sbatch"):
        path = tmp_path / command
        path.write_text(
            f'#!/bin/bash\nexec setpriv --reuid={entry.pw_uid} --regid={entry.pw_gid} --clear-groups {command} "$@"\n'
        )
        path.chmod(0o755)
    user = make_client("command_line", bin_directory=str(tmp_path), deadline_s=30.0, environ=cluster.env)
    job_when(do, user, job_id, lambda job: job.state == "RUNNING")
    for call in (
        user.requeue_hold(job_id, only_unfinished=True),
        user.cancel(job_id),
        user.send_signal(job_id, "TERM", SignalTo.FULL),
        user.set_excluded_nodes(pending, ["n1"]),
        user.hold(pending),
        user.release(pending),
        user.read_script(job_id),
        user.drain_node("n1", "test"),
    ):
        with pytest.raises(SlurmRefused, match="Slurm operator") as caught:
            do(call)
        assert (caught.value.kind, caught.value.terminal) == (Refusal.NO_PERMISSION, True)
    assert do(user.read_job(job_id)).restarts == 0


# ------------------------------------------------------------------------------------------------- odd jobs


def test_bytes_that_are_no_text_arrays_and_heterogeneous_jobs_are_all_in_the_listing(
    cluster: Cluster, client: SlurmClient, do: Do
) -> None:
    begin, sparse = "--begin=now+1hour", ",".join(str(n * n) for n in range(30))
    odd = cluster.sbatch(SLEEP, begin, os.fsdecode(b"--job-name=caf\xe9 \xff"))
    array = cluster.sbatch(SLEEP, begin, f"--array={sparse}%2")
    cluster.slurm("scontrol", "update", f"JobId={array}_4,{array}_9", "Comment=split off")
    het = cluster.sbatch("#!/bin/bash\n#SBATCH -n1\n#SBATCH hetjob\n#SBATCH -n1\nexec sleep 600\n", begin)
    waits = cluster.sbatch(SLEEP, f"--dependency=afterok:{odd}")
    jobs = {job.job_id: job for job in do(client.read_view()).jobs}
    assert jobs[odd].name == "caf\ufffd \ufffd"
    assert jobs[f"{array}_4"].comment == "split off"
    assert (jobs[f"{array}_4"].array_job_id, jobs[f"{array}_4"].array_tasks) == (array, "4")
    (rest,) = [job for job in jobs.values() if job.array_job_id == array and "[" in job.job_id]
    assert rest.array_tasks.startswith("0-1,16,25,")
    assert (jobs[het].het_job_id, len(jobs[het].component_ids), f"{het}+1" in jobs) == (het, 1, False)
    assert jobs[waits].dependency.startswith(f"afterok:{odd}")
    do(client.cancel(f"{array}_4"))
    job_when(do, client, f"{array}_4", lambda job: job.state == "CANCELLED")
    assert do(client.read_job(f"{array}_9")).state == "PENDING"
    do(client.cancel(het))
    job_when(do, client, het, lambda job: job.state == "CANCELLED")


def test_the_log_of_an_arrays_element_is_where_the_client_says_without_an_option(
    cluster: Cluster, client: SlurmClient, do: Do
) -> None:
    array = cluster.sbatch("#!/bin/bash\necho here\nexec sleep 600\n", "--array=0-1")
    for index in range(2):
        job = job_when(do, client, f"{array}_{index}", lambda job: job.state == "RUNNING")
        assert job.stdout is not None
        path = job.stdout
        wait_for(lambda: read(path) == b"here\n")  # noqa: B023 - called at once


@pytest.mark.skipif(
    "pyslurm" not in CLIENTS,
    reason="no pyslurm here; SLURM_WATCHDOG_TEST_PYSLURM can name an interpreter that has it",
)
@pytest.mark.hardware  # CI has no pyslurm: none is published for the Slurm that Debian has
def test_client_by_pyslurm_lists_the_same_jobs_and_nodes_as_the_one_by_commands(
    cluster: Cluster, make: Make, do: Do
) -> None:
    array = cluster.sbatch(SLEEP, "--array=0-5%2", "--output=/dev/null", "--time=5")
    cluster.sbatch(SLEEP, "--begin=now+1hour", "--nodelist=n1", "--job-name=a  b", "--comment=line\nbreak")
    squares, hundreds = [n * n for n in range(31)], [n for n in range(300) if n % 5 in {0, 2}]
    for elements in (squares, hundreds):
        listed_elements = ",".join(map(str, elements))
        cluster.sbatch(SLEEP, "--begin=now+1hour", f"--array={listed_elements}", "--output=%A_%a.out")
    over = cluster.sbatch("#!/bin/bash\ntrue\n", "--output=/dev/null")
    views = [make(choice, 30.0) for choice in CLIENTS]
    job_when(do, views[0], over, lambda job: job.state == "COMPLETED")

    def listed(client: SlurmClient) -> tuple[list[SlurmJob], list[SlurmNode]]:
        view = do(client.read_view())
        jobs = [job for job in view.jobs if int(job.raw_id) >= int(array)]
        return sorted(jobs, key=lambda job: job.job_id), sorted(view.nodes, key=lambda node: node.name)

    wait_until(lambda: listed(views[0]) == listed(views[1]), 20)
    jobs, nodes = listed(views[1])
    assert (jobs, nodes) == listed(views[0])
    assert len(jobs) >= 4, "an array that runs two at once, one job that waits, one that is over"
    assert [node.name for node in nodes] == ["n1", "n2", "n3"]
