"""What an administrator does, on a real Slurm: silences that hold and end, jobs that save before a maintenance."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.training_job import SAVE_INTERVAL, inject, submit, training
from tests.rig.cluster import Cluster
from tests.rig.rights import USER
from tests.rig.stack import Watchdog


@pytest.mark.thorough
def test_a_silence_holds_over_a_restart_of_the_controller_and_what_still_fires_is_announced_at_its_end(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(mode="observe")
    job = submit(cluster, nodes=2)
    training(watchdog, job)
    made = watchdog.command("silence", "--job", job, "--for", "1h", "--reason", "a test", "--json")
    assert made.returncode == 0, made.stderr
    silence = json.loads(made.stdout)["id"]
    inject(cluster, "dataloader_hang.rank1")
    watchdog.wait_for(lambda: watchdog.firing(job, "collective_hang"), 60, "the hang to be found")
    watchdog.kill_controller()
    watchdog.start_controller()
    watchdog.wait_for(lambda: watchdog.status()["silences"], 30, "the silence after the restart")
    assert 'slurm_watchdog_incidents{kind="collective_hang",state="silenced"} 1.0' in watchdog.metrics()
    time.sleep(5)
    assert not [text for text in watchdog.slack.texts() if "hangs" in text]
    assert "silenced by root until" in watchdog.command("status").stdout
    assert watchdog.command("silence", "--end", silence).returncode == 0
    watchdog.wait_for(lambda: [t for t in watchdog.slack.texts() if "hangs" in t], 30, "the message at its end")


@pytest.mark.thorough
def test_jobs_on_reserved_nodes_save_and_wait_held_and_one_that_does_not_look_is_listed_first_and_runs_on(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(mode="observe", settings={"ladder": {"checkpoint_limit": "20s", "step_limit": "5s"}})
    hears = [submit(cluster, nodes=1), submit(cluster, nodes=1)]
    deaf = submit(cluster, "--kill-switch-path /nowhere/kill --save-interval 100000", nodes=1)
    for job in (*hears, deaf):
        training(watchdog, job, at_least=SAVE_INTERVAL + 2)
    with _maintenance(cluster, minutes=30):
        assert watchdog.command("save-all", "--all", "--dry-run").returncode == 0
        done = watchdog.command("save-all", "--all", "--hold", "--before", "25s", "--json", timeout_s=240)
        rows = json.loads(done.stdout)["jobs"]
        assert done.returncode == 1, done.stderr
        assert [(row["job_id"], row["state"]) for row in rows] == [
            (deaf, "failed"),
            *((job, "done") for job in hears),
        ], rows
        for job in hears:
            shown = cluster.job(job)
            assert (shown["JobState"], shown["Restarts"], shown["Priority"]) == ("PENDING", "1", "0"), shown
        assert cluster.job(deaf)["JobState"] == "RUNNING"
        assert not [path for node in cluster.nodes for path in _switches(cluster, node)]


@contextmanager
def _maintenance(cluster: Cluster, *, minutes: int) -> Iterator[None]:
    """A reservation of all nodes that begins so soon."""
    cluster.slurm(
        "scontrol", "create", "reservation", "ReservationName=maint", f"Nodes={','.join(cluster.nodes)}", "Users=root",
        f"StartTime=now+{minutes}minutes", "Duration=60", "Flags=MAINT,IGNORE_JOBS",
    )  # fmt: skip
    try:
        yield
    finally:
        cluster.slurm("scontrol", "delete", "ReservationName=maint")


def _switches(cluster: Cluster, node: str) -> list[Path]:
    return list(cluster.node_path(node, "/run/slurm-watchdog/jobs").glob("*/kill"))


@pytest.mark.thorough
def test_a_maintenance_reservation_makes_three_jobs_save_in_time(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    policy = {"kinds": {"ends_soon": {"ladder": ["kill_switch", "requeue"]}}}
    watchdog = watch(mode="act", settings={"policy": policy})
    jobs = [submit(cluster, nodes=1) for _ in range(3)]
    for job in jobs:
        training(watchdog, job, at_least=SAVE_INTERVAL + 2)
    with _maintenance(cluster, minutes=30):
        for job in jobs:
            incident = watchdog.wait_for(lambda job=job: watchdog.incidents(job), 120, "the maintenance to be seen")[0]
            assert incident["kind"] == "ends_soon" and "maintenance (reservation maint) takes" in incident["summary"]
            watchdog.wait_for(lambda job=job: cluster.job(job)["Restarts"] == "1", 90, f"job {job} to be requeued")
            operations = [r["operation"] for r in watchdog.explain(incident["id"])["actions"][0]["operations"]]
            assert operations.index("wait_checkpoint") < operations.index("requeue_hold"), operations


AS_COMMAND = "import sys; from slurm_watchdog.cli.main import main; sys.argv[0] = 'slurm-watchdog'; main()"
ASK = """
import http.client, socket, sys
connection = http.client.HTTPConnection("x")
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect(sys.argv[1])
connection.request("POST", sys.argv[2], sys.argv[3])
answer = connection.getresponse()
print(answer.status, answer.read().decode())
"""
COLLEAGUE, STRANGER = "daemon", "nobody"
"""Users that every system has; the group of the first is called as he is."""


def _as(user: str) -> list[str]:
    """Before the words of a command: as a user who is in no other group."""
    return ["setpriv", f"--reuid={user}", f"--regid={user if user == COLLEAGUE else 'nogroup'}", "--clear-groups"]


def _ask_as(user: str, watchdog: Watchdog, path: str, body: dict[str, object]) -> str:
    """What the controller answers to a user: its status, and the document."""
    argv = [*_as(user), "/usr/bin/python3", "-c", ASK, watchdog.socket, path, json.dumps(body)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, cwd="/", check=False).stdout


def _command_as(user: str, cluster: Cluster, watchdog: Watchdog, *words: str) -> tuple[int, str]:
    """(exit code, all that it prints) of a command that a user gives on the management node."""
    argv = [*_as(user), cluster.place.python, "-c", AS_COMMAND, *words, "--socket", watchdog.socket]
    done = subprocess.run(
        argv, env=cluster.place.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
        cwd="/", check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_a_colleague_of_the_group_restarts_a_job_and_another_user_may_not(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(mode="observe", settings={"security": {"may": {"restart": [f"group:{COLLEAGUE}"]}}})
    job = submit(cluster, nodes=1)
    training(watchdog, job, at_least=SAVE_INTERVAL + 2)
    Path(watchdog.socket).chmod(0o666)

    def asks(user: str, *words: str) -> tuple[int, str]:
        return _command_as(user, cluster, watchdog, *words, "--reason", "night")

    code, refused = asks(STRANGER, "restart", job)
    assert code == 1 and f"belongs to {USER}" in refused and not watchdog.incidents(job), refused
    code, told = asks(COLLEAGUE, "restart", job)
    assert code == 0 and "wait_checkpoint: done" in told and "requeue" in told, told
    assert cluster.job(job)["Restarts"] == "1"
    incident = next(each for each in watchdog.incidents(job) if each["kind"] == "operator_restart")
    assert incident["summary"].startswith(f"{COLLEAGUE} asked for a restart of job {job}"), incident


DOOR = 9768


def test_a_user_sees_and_restarts_his_own_job_from_another_machine_and_another_user_nothing_of_it(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    address = f"{cluster.controller_address}:{DOOR}"
    watchdog = watch(mode="observe", settings={"controller": {"user_listen": address}})
    job = submit(cluster, nodes=1)
    training(watchdog, job, at_least=SAVE_INTERVAL + 2)
    munged = str(Path(cluster.directory) / "munge" / "socket")

    def asks(user: str, *words: str) -> tuple[int, str]:
        environment = cluster.place.environment | {"SLURM_WATCHDOG_MUNGE_SOCKET": munged}
        argv = [cluster.place.python, "-c", AS_COMMAND, *words, "--socket", f"munge://0@{address}"]
        prefix = ["env", *(f"{name}={value}" for name, value in environment.items())]
        process = cluster.node_popen(
            "n3", [*prefix, *argv], user=user, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        out, _ = process.communicate(timeout=120)
        return process.returncode, out

    code, told = asks(USER, "status", "--me", "--json")
    assert (code, [each["job_id"] for each in json.loads(told)["jobs"]]) == (0, [job]), told
    code, told = asks("nobody", "status", "--json")
    assert json.loads(told)["jobs"] == [] and USER not in told, told
    code, told = asks("nobody", "restart", job, "--no-wait")
    assert code == 1 and "no job of yours" in told, told
    code, told = asks("root", "status")
    assert code == 3 and "on the management node" in told, told
    code, told = asks(USER, "restart", job, "--reason", "from afar")
    assert code == 0, told
    assert cluster.job(job)["Restarts"] == "1"
