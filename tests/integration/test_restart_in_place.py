"""Restarts in a job's own allocation, with everything real: Slurm, supervisor, agents, controller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.training_job import SAVE_INTERVAL, ended_action, inject, submit_supervised, training
from tests.rig.cluster import Cluster
from tests.rig.rights import USER_UID
from tests.rig.stack import ROOT, Watchdog

Watch = Callable[..., Watchdog]


def operations(action: Any) -> list[str]:
    return [f"{r['operation']} {r['outcome']}" for r in action["operations"]]


def summary(action: Any) -> Any:
    return [(r["operation"], r["outcome"], r["detail"]) for r in action["operations"]], action["end"]["detail"]


def test_a_hung_rank_is_restarted_on_the_spare_and_the_job_never_leaves_its_allocation(
    cluster: Cluster, watch: Watch
) -> None:
    watchdog = watch(mode="act")
    job = submit_supervised(cluster, nodes=3, spares=1)
    training(watchdog, job, at_least=SAVE_INTERVAL + 2)
    inject(cluster, "dataloader_hang.rank3")
    incident = watchdog.wait_for(lambda: watchdog.firing(job, "collective_hang"), 120, "the hang to be found")
    action = ended_action(watchdog, incident["id"], timeout_s=120)
    assert action["end"]["ok"], action
    print(summary(action))
    assert "in its allocation" in action["end"]["detail"]
    assert operations(action)[-2:] == ["write_order done", "restart_step done"]
    assert 0 <= action["end"]["steps_lost"] <= SAVE_INTERVAL
    found = cluster.job(job)
    assert (found["JobState"], found["Restarts"], found["ExcNodeList"]) == ("RUNNING", "0", "(null)")
    before = watchdog.step(job)
    watchdog.wait_for(lambda: watchdog.step(job) > before + 5, 30, "the new step to train on")
    watchdog.wait_for(lambda: not watchdog.firing(job, "collective_hang"), 30, "the incident to be over")


@pytest.mark.thorough
def test_a_rank_in_state_d_is_left_behind_with_its_node_and_is_no_trouble_of_the_job_any_more(
    cluster: Cluster, watch: Watch
) -> None:
    watchdog = watch(mode="act")
    for node in cluster.nodes:
        cluster.node_local(node).chmod(0o1777)
    job = submit_supervised(cluster, f"--log {cluster.scratch}/main_log.txt", nodes=3, spares=1)
    training(watchdog, job, at_least=SAVE_INTERVAL + 12)
    cluster.freeze(node="n2")
    incident = watchdog.wait_for(lambda: watchdog.firing(job, "filesystem_stall"), 60, "the stall to be found")
    action = ended_action(watchdog, incident["id"], timeout_s=150)
    print(summary(action))
    assert action["end"]["ok"], action
    assert "in its allocation without n2" in action["end"]["detail"]
    found = cluster.job(job)
    assert (found["JobState"], found["Restarts"], found["ExcNodeList"]) == ("RUNNING", "0", "(null)")
    watchdog.wait_for(lambda: not watchdog.firing(job, "filesystem_stall"), 60, "the incident to be over")
    before = watchdog.step(job)
    watchdog.wait_for(lambda: watchdog.step(job) > before + 5, 30, "the new step to train on")
    others = [each["kind"] for each in watchdog.incidents(job) if each["id"] != incident["id"]]
    assert not others


@pytest.mark.thorough
def test_a_graceful_restart_saves_and_goes_on_in_place_with_no_step_lost(cluster: Cluster, watch: Watch) -> None:
    watchdog = watch(mode="observe")
    job = submit_supervised(cluster, nodes=3, spares=1)
    training(watchdog, job, at_least=SAVE_INTERVAL + 12)
    done = watchdog.command("restart", job, "--no-wait", "--json", "--exclude", "n1")
    assert done.returncode == 0, done.stdout + done.stderr
    asked = next(i for i in watchdog.incidents(job) if i["kind"] == "operator_restart")
    action = ended_action(watchdog, asked["id"], timeout_s=120)
    print(summary(action))
    assert action["end"]["ok"] and action["end"]["steps_lost"] == 0, action
    assert operations(action)[-2:] == ["write_order done", "restart_step done"]
    assert cluster.job(job)["Restarts"] == "0"


@pytest.mark.thorough
def test_a_node_without_power_is_left_out_once_slurm_has_lost_it_too(cluster: Cluster, watch: Watch) -> None:
    watchdog = watch(mode="act")
    job = submit_supervised(cluster, nodes=3, spares=1)
    training(watchdog, job, at_least=SAVE_INTERVAL + 12)
    cluster.kill_node("n2")
    incident = watchdog.wait_for(
        lambda: next((i for i in watchdog.incidents() if i["kind"] == "node_down" and i["state"] == "firing"), None),
        120,
        "the node to be lost",
    )
    action = ended_action(watchdog, incident["id"], timeout_s=120)
    print(summary(action))
    assert action["end"]["ok"], action
    assert "in its allocation without n2" in action["end"]["detail"]
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("RUNNING", "0")


SAFE = yaml.safe_load((ROOT / "deploy" / "profiles" / "safe-act.yaml").read_text())
SAFE.pop("restart")  # The same as the mode that the rig writes.
SAFE |= SAFE.pop("expert")  # The rig puts these sections there.


def lines_of(cluster: Cluster, job: str, words: str) -> list[str]:
    text = (Path(cluster.directory) / "log" / f"job-{job}.out").read_text(errors="replace")
    return [line for line in text.splitlines() if words in line]


@pytest.mark.thorough
def test_a_node_without_power_is_left_out_by_the_supervisor_itself_where_the_site_only_observes(
    cluster: Cluster, watch: Watch
) -> None:
    watchdog = watch(mode="observe", shipped=True)
    job = submit_supervised(cluster, nodes=3, spares=1)
    training(watchdog, job, at_least=SAVE_INTERVAL + 2)
    cluster.kill_node("n2")
    watchdog.wait_for(lambda: lines_of(cluster, job, "start 2 on n[1,3]"), 150, "the start without n2")
    before = len(lines_of(cluster, job, "iteration"))
    watchdog.wait_for(lambda: len(lines_of(cluster, job, "iteration")) > before + 5, 60, "the new start to train on")
    assert lines_of(cluster, job, "Slurm has lost n2: it is left out")
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("RUNNING", "0")


@pytest.mark.thorough
def test_a_node_without_power_and_without_a_spare_is_a_requeue_as_slurm_alone_would_have_made_it(
    cluster: Cluster, watch: Watch
) -> None:
    watchdog = watch(mode="observe", shipped=True, settings=SAFE)
    job = submit_supervised(cluster, nodes=2, spares=0)
    training(watchdog, job, at_least=SAVE_INTERVAL + 2)
    cluster.kill_node("n2")
    watchdog.wait_for(lambda: cluster.job(job)["Restarts"] == "1", 150, "the requeue")
    assert lines_of(cluster, job, "Slurm has lost n2, and the command cannot be started again here (no spare is left")
    before = len(lines_of(cluster, job, "iteration"))
    watchdog.wait_for(lambda: len(lines_of(cluster, job, "iteration")) > before + 5, 90, "the job to train on")
    assert (cluster.job(job)["JobState"], cluster.job(job)["NodeList"]) == ("RUNNING", "n[1,3]")


def test_where_the_supervisor_dies_over_its_order_the_job_is_requeued_once(cluster: Cluster, watch: Watch) -> None:
    watchdog = watch(mode="act")
    job = submit_supervised(cluster, nodes=3, spares=1)
    training(watchdog, job, at_least=SAVE_INTERVAL + 2)
    inject(cluster, "dataloader_hang.rank3")
    watchdog.wait_for(lambda: lines_of(cluster, job, "is ended and the command started again"), 90, "the order")
    cluster.node_run(cluster.job(job)["BatchHost"], ["pkill", "-9", "-u", str(USER_UID), "-x", "slurm-watchdog"])
    watchdog.wait_for(lambda: cluster.job(job)["Restarts"] == "1", 150, "the requeue")
    found = watchdog.wait_for(lambda: watchdog.incidents(job), 10, "the incident")[0]
    action = ended_action(watchdog, found["id"], timeout_s=120)
    print(summary(action))
    assert action["end"]["ok"] and "requeue_hold done" in operations(action), action
    assert cluster.job(job)["Restarts"] == "1"
