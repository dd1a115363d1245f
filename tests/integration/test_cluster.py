"""The demo's cluster: it is a real one, its faults are real ones, and nothing of it stays behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.rig.cluster import Cluster, parse_fields
from tests.rig.cluster_claim import Claim, claim_directory, lock_directory, processes_of
from tests.rig.commands import ClusterError, wait_until
from tests.rig.node_process import NodeProcess
from tests.rig.rights import parts_of_a_place

CHECKOUT = Path(__file__).resolve().parents[2]
# Writes a line every 20 ms to an open descriptor, as a training job writes its log.
WRITER = 'exec 3>>"$0"; while echo line >&3; do sleep 0.02; done'


def state_of(pid: int | None) -> str:
    """The one-letter state of a process as the kernel tells it, "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def stays(condition: Callable[[], bool], for_s: float) -> bool:
    """True if the condition held all the time."""
    return not wait_until(lambda: not condition(), for_s)


def writer(cluster: Cluster, node: str, path: Path) -> NodeProcess:
    """A process on the node that writes to the file, running."""
    process = cluster.node_popen(node, ["sh", "-c", WRITER, path])
    seen = cluster.node_local(node) / path.name if path.parent == cluster.scratch else path
    assert wait_until(lambda: seen.exists() and seen.stat().st_size > 0, 5)
    return process


def hosts_named(cluster: Cluster, job: str) -> list[str]:
    """The nodes whose names stand alone in the job's output; what Slurm's own daemons add (on /tmp, to a
    user) does not matter."""
    lines = (cluster.shared / f"slurm-{job}.out").read_text().splitlines()
    return sorted(line for line in lines if line in cluster.nodes)


def traces(directory: str) -> list[str]:
    """Whatever of a cluster the machine still knows, found with the machine's own tools."""
    index = directory.rpartition(".")[2]
    found = [f"directory {directory}"] if Path(directory).exists() else []
    commands = [["cat", "/proc/mounts"], ["losetup", "--all"], ["ip", "-oneline", "link"], ["ip", "netns"]]
    for command in [*commands, ["ps", "-eo", "pid,stat,args"]]:
        output = subprocess.run(command, capture_output=True, text=True, timeout=180).stdout
        words = (f"{directory}/", f"swd{index}:", f"swd{index}n", f"swd{index}-")
        found += [f"{command[0]}: {line}" for line in output.splitlines() if any(word in line for word in words)]
    return found


def start_owner(nodes: int = 1) -> tuple[subprocess.Popen[str], str]:
    """A process that owns a cluster, and the cluster's directory."""
    command = [sys.executable, "-m", "tests.rig.cluster", "up", "--nodes", str(nodes)]
    owner = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    directory = ""
    for line in owner.stdout:
        if line.startswith("export SLURM_CONF="):
            directory = line.strip().partition("=")[2].removesuffix("/slurm.conf")
        if "Ctrl-C" in line:
            return owner, directory
    raise AssertionError(f"no cluster came up, exit code {owner.wait(10)}")


# --- what is real -----------------------------------------------------------------------------------------------------


def test_a_job_runs_on_all_nodes(cluster: Cluster) -> None:
    job = cluster.sbatch("#!/bin/sh\nsrun -N3 hostname\n", "-N3")
    fields = cluster.wait_for_job_state(job, "COMPLETED")
    assert fields["NodeList"] == "n[1-3]"
    assert hosts_named(cluster, job) == ["n1", "n2", "n3"]


def test_a_job_runs_as_a_normal_user(cluster: Cluster) -> None:
    job = cluster.sbatch("#!/bin/sh\nid -un\n", user="nobody")
    assert cluster.wait_for_job_state(job, "COMPLETED")["UserId"].startswith("nobody(")
    output = cluster.shared / f"slurm-{job}.out"
    assert output.read_text() == "nobody\n"
    assert output.owner() == "nobody"


def test_slurms_commands_work_with_the_clusters_environment(cluster: Cluster) -> None:
    done = subprocess.run(["sinfo", "-h", "-o", "%D %T"], env=cluster.env, capture_output=True, text=True, timeout=180)
    assert done.stdout.strip() == "3 idle"
    on_node = cluster.node_run("n2", ["sinfo", "-h", "-o", "%D %T"])
    assert on_node.stdout.strip() == "3 idle"


def test_every_node_has_its_own_name_processes_and_run_directory(cluster: Cluster) -> None:
    for node in cluster.nodes:
        assert cluster.node_run(node, ["hostname"]).stdout.strip() == node
        processes = cluster.node_run(node, ["ps", "-e", "-o", "args="]).stdout
        assert processes.count("slurmd -D") == 1
        cluster.node_run(node, ["sh", "-c", "echo $(hostname) >/run/name"])
    names = [cluster.node_path(node, "/run/name").read_text().strip() for node in cluster.nodes]
    assert names == ["n1", "n2", "n3"]
    assert not Path("/run/name").exists()


def test_a_node_sees_of_all_clusters_only_its_own_filesystems(cluster: Cluster) -> None:
    mounts = [line.split()[1] for line in cluster.node_run("n3", ["cat", "/proc/mounts"]).stdout.splitlines()]
    of_clusters = {mount for mount in mounts if mount.startswith("/tmp/slurm-watchdog-demo.")}
    place = {str(cluster.place.directory / part) for part in parts_of_a_place()}  # to run our own code from
    assert of_clusters == {str(cluster.shared), str(cluster.scratch), *place}


def test_a_node_reaches_the_controllers_address_and_its_neighbours_by_name(cluster: Cluster) -> None:
    listener = subprocess.Popen(
        [sys.executable, "-c", "import socket, sys\n"
         "server = socket.create_server((sys.argv[1], 0)); print(server.getsockname()[1], flush=True)\n"
         "server.accept()[0].sendall(b'hello')", cluster.controller_address],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert listener.stdout is not None
    port = listener.stdout.readline().strip()
    assert (
        cluster.node_run("n1", ["bash", "-c", f"cat </dev/tcp/{cluster.controller_address}/{port}"]).stdout == "hello"
    )
    assert listener.wait(timeout=180) == 0
    listener.stdout.close()
    assert reaches(cluster, "n1", "n2")


# --- processes on a node ----------------------------------------------------------------------------------------------


def test_a_process_on_a_node_dies_with_its_popen(cluster: Cluster) -> None:
    process = cluster.node_popen("n1", ["sleep", "300"], user="nobody")
    assert wait_until(lambda: "sleep 300" in cluster.node_run("n1", ["ps", "-e", "-o", "args="]).stdout, 5)
    inner = process.inner_pid
    os.kill(process.pid, signal.SIGKILL)  # the door alone, as the kernel does when memory runs out
    process.wait(timeout=180)
    assert wait_until(lambda: state_of(inner) in ("", "Z"), 5)


def test_terminating_a_process_on_a_node_lets_it_say_goodbye(cluster: Cluster) -> None:
    script = 'trap "echo goodbye; exit 7" TERM; echo ready; while true; do sleep 0.05; done'
    process = cluster.node_popen("n1", ["sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.communicate(timeout=180)[0] == "goodbye\n"
    assert process.returncode == 7


def test_a_command_on_a_node_that_does_not_end_is_an_error_after_its_deadline(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match=r"no answer within 0.3 s on n1: sleep 300"):
        cluster.node_run("n1", ["sleep", "300"], timeout_s=0.3)
    assert "sleep 300" not in cluster.node_run("n1", ["ps", "-e", "-o", "args="]).stdout


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_writer_is_stuck_in_state_d_while_the_shared_filesystem_is_frozen(cluster: Cluster) -> None:
    process = writer(cluster, "n1", cluster.shared / "log")
    cluster.freeze()
    cluster.freeze()  # may be repeated
    assert wait_until(lambda: state_of(process.inner_pid) == "D", 5)
    size = (cluster.shared / "log").stat().st_size  # stat answers
    assert stays(lambda: state_of(process.inner_pid) == "D" and (cluster.shared / "log").stat().st_size == size, 0.5)
    cluster.thaw()
    cluster.thaw()
    assert wait_until(lambda: (cluster.shared / "log").stat().st_size > size, 5)
    process.kill()
    assert process.wait(timeout=180) == -signal.SIGKILL


def test_freezing_one_nodes_filesystem_leaves_the_others_working(cluster: Cluster) -> None:
    stuck, fine = (writer(cluster, node, cluster.scratch / "log") for node in ("n1", "n2"))
    cluster.freeze(node="n1")
    assert wait_until(lambda: state_of(stuck.inner_pid) == "D", 5)
    (cluster.shared / "other").write_text("the shared filesystem works")
    log = cluster.node_local("n2") / "log"
    size = log.stat().st_size
    assert wait_until(lambda: log.stat().st_size > size, 5)
    cluster.thaw(node="n1")
    assert wait_until(lambda: state_of(stuck.inner_pid) != "D", 5)
    for process in (stuck, fine):
        process.kill()
        process.wait(timeout=180)


def reaches(cluster: Cluster, source: str, target: str) -> bool:
    """Can the source open a connection to the target's slurmd?"""
    probe = ["timeout", "1", "bash", "-c", f": </dev/tcp/{target}/6818"]
    return cluster.node_run(source, probe, check=False).returncode == 0


def test_a_node_whose_cable_is_cut_runs_on_alone(cluster: Cluster) -> None:
    cluster.cut("n2")
    assert not reaches(cluster, "n1", "n2")
    assert not reaches(cluster, "n2", "n1")
    assert reaches(cluster, "n1", "n3")
    assert cluster.node_run("n2", ["hostname"]).stdout == "n2\n"
    cluster.join("n2")
    assert wait_until(lambda: reaches(cluster, "n1", "n2"), 10)


def test_a_killed_node_takes_its_processes_along_and_comes_back(cluster: Cluster) -> None:
    gone, stays_up = (cluster.node_popen(node, ["sleep", "300"]) for node in ("n1", "n2"))
    assert wait_until(lambda: gone.inner_pid is not None, 5)
    cluster.kill_node("n1")
    assert gone.wait(timeout=180) == -signal.SIGKILL
    assert stays_up.poll() is None
    with pytest.raises(ClusterError, match=r"node n1 is down; start_node\('n1'\)"):
        cluster.node_popen("n1", ["true"])
    cluster.start_node("n1")
    job = cluster.sbatch("#!/bin/sh\nhostname\n", "--nodelist=n1")
    cluster.wait_for_job_state(job, "COMPLETED")
    assert (cluster.shared / f"slurm-{job}.out").read_text() == "n1\n"
    stays_up.kill()
    stays_up.wait(timeout=180)


def test_jobs_run_on_while_slurmctld_is_stopped(cluster: Cluster) -> None:
    job = cluster.sbatch("#!/bin/sh\nsleep 300\n")
    cluster.wait_for_job_state(job, "RUNNING")
    cluster.stop_controller()
    assert cluster.slurm("scontrol", "ping", check=False).returncode == 1
    cluster.start_controller()
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert cluster.job(job)["Restarts"] == "0"


# --- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_of_a_slurm_command_says_what_slurm_said_and_shows_the_log(cluster: Cluster) -> None:
    with pytest.raises(ClusterError) as error:
        cluster.job("999999")
    assert "Invalid job id specified" in str(error.value)
    assert "slurmctld.log" in str(error.value)


def test_an_unknown_node_is_named_together_with_the_known_ones(cluster: Cluster) -> None:
    with pytest.raises(ClusterError, match="no node 'n9'; there are n1, n2, n3"):
        cluster.cut("n9")


def test_fields_of_scontrol_may_hold_blanks_and_equal_signs() -> None:
    line = "JobId=1 JobName=my job UserId=root(0) CPUs/Task=1 ReqB:S:C:T=0:0:*:* Comment=lr=0.1 wd=2 Power="
    assert parse_fields(line) == {
        "JobId": "1", "JobName": "my job", "UserId": "root(0)", "CPUs/Task": "1",
        "ReqB:S:C:T": "0:0:*:*", "Comment": "lr=0.1 wd=2", "Power": "",
    }  # fmt: skip


# --- more than one, and none ------------------------------------------------------------------------------------------


def test_two_clusters_live_side_by_side(cluster: Cluster) -> None:
    with Cluster(nodes=2) as other:
        assert other.directory != cluster.directory
        jobs = [(one, one.sbatch("#!/bin/sh\nsrun -N2 hostname\n", "-N2")) for one in (cluster, other)]
        for one, job in jobs:
            one.wait_for_job_state(job, "COMPLETED")
            assert hosts_named(one, job) == ["n1", "n2"]
        other.freeze()
        (cluster.shared / "works").write_text("still")
        directory = str(other.directory)
    assert traces(directory) == []
    assert cluster.slurm("sinfo", "-h", "-o", "%D").stdout.strip() == "3"


@pytest.mark.usefixtures("cluster_possible")
def test_nothing_stays_behind_after_a_failure_while_everything_is_frozen_and_a_node_is_dead() -> None:
    with pytest.raises(ZeroDivisionError), Cluster(nodes=2) as cluster:
        directory = str(cluster.directory)
        assert traces(directory) != []
        stuck = [writer(cluster, "n1", where / "log") for where in (cluster.shared, cluster.scratch)]
        stuck.append(writer(cluster, "n2", cluster.shared / "log"))
        cluster.freeze()
        cluster.freeze(node="n1")
        assert all(wait_until(lambda one=process: state_of(one.inner_pid) == "D", 5) for process in stuck)
        cluster.cut("n1")
        cluster.kill_node("n2")
        _ = 1 / 0
    for process in stuck:
        process.wait(timeout=180)
    assert traces(directory) == []


@pytest.mark.usefixtures("cluster_possible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_stays_behind_when_the_owner_is_told_to_end(number: signal.Signals) -> None:
    owner, directory = start_owner()
    owner.send_signal(number)
    time.sleep(0.05)
    owner.send_signal(number)  # impatient: cleaning up continues
    owner.communicate(timeout=180)
    assert traces(directory) == []


@pytest.mark.usefixtures("cluster_possible")
def test_clean_removes_what_a_killed_owner_left_even_if_it_is_frozen() -> None:
    owner, directory = start_owner()
    shared = Path(directory, "shared")
    init = subprocess.run(["pgrep", "-f", f"^bash {directory}/node-init"], capture_output=True, text=True, timeout=180)
    inside = ["nsenter", f"--target={init.stdout.split()[0]}", "--net", "--mount", "--uts", "--pid", "--"]
    stuck = subprocess.Popen([*inside, "sh", "-c", WRITER, str(shared / "log")])
    assert wait_until((shared / "log").exists, 5)
    subprocess.run(["fsfreeze", "--freeze", shared], check=True, timeout=180)
    owner.kill()
    owner.communicate(timeout=180)
    assert traces(directory) != []
    assert wait_until(lambda: f"removed {directory}" in clean_from("ours"), 60, 0.5), "others look at it for a moment"
    stuck.wait(timeout=180)
    assert traces(directory) == []


CLEAN = [sys.executable, "-m", "tests.rig.cluster", "clean"]
OTHER_VIEWS = {
    "ours": [],
    "another PID namespace": ["unshare", "--pid", "--fork", "--mount-proc"],
    "another network namespace": ["unshare", "--net"],
}


def clean_from(view: str) -> str:
    """What the command printed that removes what dead owners left."""
    argv = [*OTHER_VIEWS[view], *CLEAN]
    done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("view", OTHER_VIEWS)
def test_clean_from_any_view_leaves_a_living_owners_cluster_alone(cluster: Cluster, view: str) -> None:
    assert str(cluster.directory) not in clean_from(view)
    assert cluster.slurm("sinfo", "-h", "-o", "%D %T").stdout.strip() == "3 idle"


@pytest.mark.usefixtures("cluster_possible")
def test_clean_leaves_alone_what_it_cannot_prove_to_be_dead() -> None:
    owner, directory = start_owner()
    owner.kill()
    owner.communicate(timeout=180)
    assert directory not in clean_from("another PID namespace"), "its nodes live, and cannot be seen from there"
    assert Path(directory, "slurm.conf").exists()
    assert wait_until(lambda: f"removed {directory}" in clean_from("ours"), 60, 0.5), "others look at it for a moment"
    assert traces(directory) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a mount namespace")
def test_daemons_of_a_directory_of_the_same_name_below_another_root_are_not_ours(tmp_path: Path) -> None:
    directory, daemon = tmp_path / "tmp" / "slurm-watchdog-demo.1", tmp_path / "munged"
    directory.mkdir(parents=True)
    daemon.write_text("#!/bin/sh\nmkdir -p $2\nwhile sleep 1; do :; done\n")
    daemon.chmod(0o755)
    argv = [daemon, f"--socket={directory}/munge/socket", directory]
    elsewhere = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {tmp_path}/tmp; exec "$@"', "sh"]
    ours, theirs = subprocess.Popen(argv), subprocess.Popen([*elsewhere, *argv])
    try:
        there = Path(f"/proc/{theirs.pid}/root{directory}")
        assert wait_until(lambda: there.exists() and not there.samefile(directory), 10)
        assert wait_until(lambda: processes_of(directory, None) == [ours.pid], 10)
    finally:
        for process in (ours, theirs):
            process.kill()
            process.wait(10)


def test_two_prefixes_that_start_at_once_take_different_indexes() -> None:
    start = threading.Barrier(8)

    def claim(prefix: str) -> Claim:
        start.wait()
        return claim_directory(prefix)

    with ThreadPoolExecutor(8) as pool:
        claims = list(pool.map(claim, [f"slurm-watchdog-test-{letter}" for letter in "abababab"]))
    try:
        assert len({claim.index for claim in claims}) == len(claims)
        assert len({claim.directory for claim in claims}) == len(claims)
        assert all(lock_directory(claim.directory) is None for claim in claims)
    finally:
        for claim in claims:
            shutil.rmtree(claim.directory)
            claim.release()
