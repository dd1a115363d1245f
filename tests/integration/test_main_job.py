"""The main job, whole: a real Slurm, real agents, a real controller, a real trainer, real faults."""

from __future__ import annotations

import http.client
import json
import os
import re
import sqlite3
import stat
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import encode_report
from tests.integration.training_job import SAVE_INTERVAL, ended_action, inject, submit, training
from tests.rig.cluster import Cluster
from tests.rig.stack import PORT, ROOT, Watchdog, train_script
from tests.rig.standin_nvml import standin
from tests.rig.standin_nvml.standin import HEALTHY, Gpu, Scenario


def slurm_release(cluster: Cluster) -> tuple[int, int]:
    year, month = cluster.slurm("squeue", "--version").stdout.split()[1].split(".")[:2]
    return int(year), int(month)


def test_in_observing_mode_a_hang_is_named_and_nothing_is_done(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(mode="observe")
    job = submit(cluster, nodes=3)
    training(watchdog, job)
    inject(cluster, "dataloader_hang.rank3")
    incident = watchdog.wait_for(lambda: watchdog.firing(job, "collective_hang"), 40, "the hang to be found")
    assert [(c["rank"], c["node"]) for c in incident["culprits"]] == [(3, "n2")]
    assert "data loader" in incident["culprits"][0]["reason"]
    time.sleep(3)
    decisions = watchdog.explain(incident["id"])["incident"]["decisions"]
    assert [(d["action"], d["verdict"], d["by"]) for d in decisions][-1] == ("requeue", "observed", "mode")
    assert cluster.job(job)["Restarts"] == "0"
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert 'slurm_watchdog_incidents{kind="collective_hang",state="firing"} 1.0' in watchdog.metrics()
    assert any("collective_hang" in text or "hangs" in text for text in watchdog.slack.texts())
    cluster.slurm("scancel", job)

    def counted() -> Any:
        savings = json.loads(watchdog.command("report", "--json").stdout).get("savings", {})
        return savings if savings.get("observed") else None

    savings = watchdog.wait_for(counted, 60, "the report to say what mode act would have saved")
    stood_h = (time.time() - incident["fired_at"]) * 3 / 3600
    assert 0 < savings["would_save_h"] < stood_h, savings
    assert (savings["observed"], savings.get("recovered", 0)) == (1, 0), savings


def test_a_dead_rank_among_waiting_ones_is_named_and_the_job_resumes(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(mode="act")
    job = submit(cluster, nodes=2)
    training(watchdog, job, at_least=SAVE_INTERVAL + 2)
    inject(cluster, "die.rank1", "signal=9")
    incident = watchdog.wait_for(lambda: watchdog.firing(job, "lingering_job"), 40, "the dead rank to be found")
    assert [(c["rank"], c["node"]) for c in incident["culprits"]] == [(1, "n1")]
    end = ended_action(watchdog, incident["id"])["end"]
    assert end["ok"], end
    assert 0 <= end["steps_lost"] <= SAVE_INTERVAL
    assert cluster.job(job)["Restarts"] == "1"

    def told() -> Any:
        found = json.loads(watchdog.command("story", job, "--json").stdout)
        return (
            found if [run["last_step"] is not None for run in found["report"].get("runs", ())] == [True, True] else None
        )

    story = watchdog.wait_for(told, 60, "both runs to be kept")
    lost = dict(story["report"]["jobs"][0]["lost_h"])
    assert lost.keys() >= {"lingering_job", "restart"} and story["report"]["failures"] == 1, story["report"]
    assert "no accounting" in story["accounting"]["problem"] or "disabled" in story["accounting"]["problem"], story


@pytest.mark.thorough
def test_a_job_that_lost_a_gpu_goes_on_without_that_node_which_is_drained_for_a_while(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    """The dead rank is why it is restarted; that hardware broke under it is why the restart goes elsewhere."""
    place = Path(cluster.directory) / "stand-in"  # which the agents may read
    place.mkdir(exist_ok=True)
    library = standin.build(place)
    scenarios = {
        node: Scenario(place / node, gpus=(Gpu(uuid=f"GPU-{node}", bus="00000000:07:00.0", minor=0, **HEALTHY),))
        for node in cluster.nodes
    }
    policy = {
        "drained_percent": 50.0,
        "drain_lifetime": "20s",
        "kinds": {"lingering_job": {"drain": True}},
    }
    watchdog = watch(
        mode="act",
        settings={"policy": policy},
        agent_env=lambda node: standin.environment_of(library, scenarios[node].path),
    )
    job = submit(cluster, nodes=2)
    training(watchdog, job, at_least=SAVE_INTERVAL + 2)
    first = cluster.job(job)["NodeList"]
    assert first == "n[1-2]"
    scenarios["n1"].change(0, rules=("lost",))
    watchdog.wait_for(
        lambda: [i for i in watchdog.incidents() if (i["kind"], i["state"]) == ("gpu_fault", "firing")],
        60,
        "the fault",
    )
    inject(cluster, "die.rank1", "signal=9")
    incident = watchdog.wait_for(lambda: watchdog.firing(job, "lingering_job"), 60, "the dead rank to be found")
    end = ended_action(watchdog, incident["id"])["end"]
    assert end["ok"], end
    assert 0 <= end["steps_lost"] <= SAVE_INTERVAL
    after = cluster.job(job)
    assert (after["Restarts"], after["ExcNodeList"], after["NodeList"]) == ("1", "n1", "n[2-3]")
    reason = watchdog.explain(incident["id"])["incident"]["decisions"][-1]["reason"]
    assert "n1 is avoided" in reason and "GPU-n1" in reason
    node = cluster.node("n1")
    if "DRAIN" in node["State"]:  # it may be taken back already where the machine is slow
        assert node["Reason"].startswith("slurm-watchdog:"), node
    drained = [r for r in ended_action(watchdog, incident["id"])["operations"] if r["operation"] == "drain"]
    assert [r["outcome"] for r in drained] == ["done"], drained
    watchdog.wait_for(lambda: "DRAIN" not in cluster.node("n1")["State"], 240, "our own drain to be taken back")


def test_a_users_job_is_moved_off_a_node_with_no_step_lost(cluster: Cluster, watch: Callable[..., Watchdog]) -> None:
    watchdog = watch(mode="observe")
    job = submit(cluster, nodes=2, sbatch=("--exclude=n3",))
    training(watchdog, job)
    cluster.slurm("scontrol", "update", f"JobId={job}", "Comment=moved")
    excluded_before = cluster.job(job)["ExcNodeList"]
    assert excluded_before == "n3"
    done = watchdog.command("restart", job, "--exclude", "n3", "--reason", "a test", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    incident = next(i for i in watchdog.incidents(job) if i["kind"] == "operator_restart")
    action = ended_action(watchdog, incident["id"])
    assert action["end"]["ok"], action
    assert action["end"]["steps_lost"] == 0
    operations = [r["operation"] for r in action["operations"] if r["outcome"] == "done"]
    assert operations.index("remove_kill_switch") < operations.index("release")
    assert not list(cluster.node_path("n1", "/run/slurm-watchdog/jobs").glob("*/kill"))
    assert cluster.job(job)["ExcNodeList"] == "n3"


def test_a_filesystem_lost_by_one_node_moves_the_job_off_that_node(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    """From Slurm 25.11 on the requeued job stays COMPLETING as long as its process on n2 lives: there the
    node is set DOWN."""
    keeps = slurm_release(cluster) >= (25, 11)
    settings = {"ladder": {"set_down_after": "45s"}, "policy": {"drained_percent": 100.0}}
    watchdog = watch(mode="act", settings=settings)
    for node in cluster.nodes:
        cluster.node_local(node).chmod(0o1777)
    job = submit(cluster, f"--log {cluster.scratch}/main_log.txt", nodes=2)
    training(watchdog, job)
    cluster.freeze(node="n2")
    incident = watchdog.wait_for(lambda: watchdog.firing(job, "filesystem_stall"), 60, "the stall to be found")
    culprit = incident["culprits"][0]
    assert (culprit["node"], culprit["rank"], culprit["mount"]) == ("n2", 3, str(cluster.scratch))
    action = ended_action(watchdog, incident["id"], timeout_s=150)
    assert action["end"]["ok"], action
    assert "n2" not in watchdog.status()["jobs"][0]["nodes"]
    operations = {record["operation"]: record["outcome"] for record in action["operations"]}
    assert operations.get("set_down") == ("done" if keeps else None), action
    assert not [i for i in watchdog.incidents(job) if i["kind"] == "filesystem_outage"]


KILLING_SCONTROL = """#!/bin/sh
# Stands before the real scontrol: kills the controller with kill -9 before or after one request, once.
echo "$*" >>{log}
case "$1:{when}" in
    {verb}:before) if mkdir {once} 2>/dev/null; then kill -9 $(cat {pid}); sleep 1; fi ;;
esac
{real} "$@"
code=$?
case "$1:{when}" in
    {verb}:after) if mkdir {once} 2>/dev/null; then kill -9 $(cat {pid}); sleep 1; fi ;;
esac
exit $code
"""


@pytest.mark.parametrize(
    ("verb", "when"),
    [
        ("requeuehold", "after"),
        *(
            pytest.param(*each, marks=pytest.mark.thorough)
            for each in (("requeuehold", "before"), ("update", "after"), ("release", "before"), ("release", "after"))
        ),
    ],
)
def test_a_controller_killed_between_intent_and_outcome_requeues_exactly_once(
    cluster: Cluster, watch: Callable[..., Watchdog], tmp_path: Path, verb: str, when: str
) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    real = {name: _which(name) for name in ("squeue", "scontrol", "sinfo", "scancel")}
    for name, path in real.items():
        (tools / name).symlink_to(path)
    (tools / "scontrol").unlink()
    log, pid = tmp_path / "scontrol.log", tmp_path / "controller.pid"
    wrapper = tools / "scontrol"
    wrapper.write_text(
        KILLING_SCONTROL.format(log=log, verb=verb, when=when, once=tmp_path / "once", pid=pid, real=real["scontrol"])
    )
    wrapper.chmod(0o755)
    watchdog = watch(mode="act", settings={"slurm": {"bin_directory": str(tools)}})
    assert watchdog.controller is not None
    pid.write_text(str(watchdog.controller.pid))
    for node in cluster.nodes:
        cluster.node_local(node).chmod(0o1777)
    exclude_needed = verb == "update"
    job = submit(cluster, nodes=2)
    training(watchdog, job)
    if exclude_needed:
        watchdog.ask("POST", "/v1/restart", {"job_id": job, "exclude": ["n1"], "reason": "crash test"})
    else:
        inject(cluster, "dataloader_hang.rank1")
    watchdog.controller.wait(timeout=180)
    assert (tmp_path / "once").exists()
    watchdog.start_controller()
    watchdog.wait_for(lambda: cluster.job(job)["Restarts"] == "1", 60, "the job to be requeued")
    watchdog.wait_for(lambda: _ended_actions(watchdog) == 1, 90, "the action to end in writing")
    time.sleep(5)
    assert cluster.job(job)["Restarts"] == "1"
    assert cluster.job(job)["JobState"] == "RUNNING"
    assert _ended_actions(watchdog) == 1
    calls = [line.split()[0] for line in log.read_text().splitlines()]
    assert calls.count("requeuehold") in ((1, 2) if verb == "requeuehold" and when == "before" else (1,))


@pytest.mark.thorough
def test_a_controller_that_was_dead_while_the_job_saved_and_ended_restarts_it_once(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(mode="observe")
    job = submit(cluster, nodes=2)
    training(watchdog, job)
    answer = watchdog.ask("POST", "/v1/restart", {"job_id": job, "exclude": ["n1"], "reason": "crash test"})
    switch = cluster.node_path("n2", f"/run/slurm-watchdog/jobs/{job}.0/kill")
    watchdog.wait_for(switch.exists, 20, "the kill switch")
    watchdog.kill_controller()
    cluster.wait_for_job_state(job, "COMPLETED")
    time.sleep(8)
    watchdog.start_controller()
    end = ended_action(watchdog, answer["incident_id"])["end"]
    assert end["ok"], end
    assert end["steps_lost"] == 0
    assert cluster.job(job)["Restarts"] == "1"
    assert not switch.exists()


def _which(name: str) -> str:
    for directory in (*os.environ.get("PATH", "").split(":"), "/usr/bin", "/usr/sbin"):
        path = Path(directory) / name
        if path.exists():
            return str(path)
    raise AssertionError(f"{name} is not there")


def _ended_actions(watchdog: Watchdog) -> int:
    with sqlite3.connect(f"file:{watchdog.directory}/state/journal.sqlite?mode=ro", uri=True, timeout=180) as sql:
        return int(sql.execute("select count(*) from action_ends").fetchone()[0])


@pytest.mark.thorough
def test_agents_may_start_before_the_controller_and_their_old_reports_are_not_judged(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(mode="act")
    job = submit(cluster, nodes=2)
    training(watchdog, job)
    watchdog.kill_controller()
    time.sleep(12)
    watchdog.start_controller()
    watchdog.wait_for(lambda: set(watchdog.status()["nodes"]["reporting"]) == set(cluster.nodes), 20)
    before = watchdog.step(job)
    watchdog.wait_for(lambda: watchdog.step(job) > max(before, 10), 30, "steps to be seen again")
    assert watchdog.incidents() == []
    counted = re.search(r'slurm_watchdog_reports_total\{outcome="expired"\} (\d+)', watchdog.metrics())
    assert counted is not None
    assert int(counted[1]) > 0
    assert cluster.job(job)["Restarts"] == "0"


ON_A_NODE = """
import sys
from slurm_watchdog.agent.courier.munge import Munge, MungeController
from slurm_watchdog.agent.courier.streams import Refused
from slurm_watchdog.wire.frames import REPORT

url, munge, claimed, proven = sys.argv[1:]
body = sys.stdin.buffer.read()
encode = Munge("0", munge).encode if proven else lambda payload: "MUNGE:AAAA:"
try:
    stream = MungeController(url, claimed, encode).open(120.0)
    stream.send(REPORT, body)
    stream.receive()
    print("taken")
except Refused as error:
    print(error.code)
except OSError as error:
    print(type(error).__name__)
"""
"""Somebody on a node who sends what is on standard input, proven to be that node or not; prints how it is refused, or
how it failed."""


def post(watchdog: Watchdog, node: str, body: bytes, *, proven: bool = True) -> str:
    url = f"http://{watchdog.cluster.controller_address}:{PORT}"
    munge = str(Path(watchdog.cluster.directory) / "munge" / "socket")
    argv = [sys.executable, "-c", ON_A_NODE, url, munge, node, "yes" * proven]
    done = watchdog.cluster.node_run(node, argv, 180.0, check=False, cwd=ROOT, input=body, text=False)
    return str(done.stdout.decode().strip())


def test_garbage_at_the_door_is_refused_and_counted(cluster: Cluster, watch: Callable[..., Watchdog]) -> None:
    watchdog = watch(mode="act")
    assert post(watchdog, "n1", b"{}", proven=False) == "unauthorized"
    watchdog.stop_agent("n2")  # a node has one stream
    for garbage in (b"", b"\x00\xff", b"{", b"\x90", b"\x81\xa4node\x05", b"\x91" * 5000):
        assert post(watchdog, "n2", garbage) == "garbage"
    forged = encode_report(Report(node="n1", boot_id="b", agent_id="a", sequence=1))
    assert post(watchdog, "n2", forged) == "wrong_node"
    assert post(watchdog, "n2", b"x" * (9 * 1024 * 1024)) in ("too_large", "BrokenPipeError", "ConnectionResetError")
    text = watchdog.metrics()
    for outcome in ("unauthorized", "garbage", "wrong_node", "too_large"):
        assert f'slurm_watchdog_reports_total{{outcome="{outcome}"}}' in text
    with urllib.request.urlopen(f"http://{cluster.controller_address}:{PORT}/healthz", timeout=180) as answer:
        assert answer.status == 200


@pytest.mark.thorough
def test_a_job_that_ends_while_it_is_looked_at_leaves_no_incident(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(mode="act")
    job = submit(cluster, nodes=2)
    training(watchdog, job)
    inject(cluster, "dataloader_hang.rank0")
    time.sleep(5)
    cluster.slurm("scancel", job)
    cluster.wait_for_job_state(job, "CANCELLED")
    time.sleep(8)
    assert [i for i in watchdog.incidents(job) if i["state"] != "resolved"] == []
    assert cluster.job(job)["Restarts"] == "0"


@pytest.mark.thorough
def test_a_log_that_vanishes_accuses_nobody(cluster: Cluster, watch: Callable[..., Watchdog]) -> None:
    watchdog = watch(mode="act")
    job = submit(cluster, nodes=2)
    training(watchdog, job)
    (Path(cluster.directory) / "log" / f"job-{job}.out").unlink()
    time.sleep(15)
    assert cluster.job(job)["Restarts"] == "0"
    assert [i for i in watchdog.incidents(job) if i["state"] == "firing"] == []


@pytest.mark.thorough
def test_pause_holds_every_action_until_resume(cluster: Cluster, watch: Callable[..., Watchdog]) -> None:
    watchdog = watch(mode="act")
    job = submit(cluster, nodes=2)
    training(watchdog, job)
    assert watchdog.command("pause", "maintenance").returncode == 0
    inject(cluster, "lock.rank2")
    incident = watchdog.wait_for(lambda: watchdog.firing(job, "collective_hang"), 40)
    assert [c["rank"] for c in incident["culprits"]] == [2]
    time.sleep(3)
    assert cluster.job(job)["Restarts"] == "0"
    refused = watchdog.command("restart", job, "--now", "--json")
    assert refused.returncode == 1
    assert "paused" in refused.stdout
    watchdog.kill_controller()
    watchdog.start_controller()
    assert watchdog.status()["paused"]["reason"] == "maintenance"
    assert watchdog.command("resume").returncode == 0
    end = ended_action(watchdog, incident["id"])["end"]
    assert end["ok"], end


def test_the_socket_and_the_journal_are_closed_to_others(cluster: Cluster, watch: Callable[..., Watchdog]) -> None:
    watchdog = watch(mode="observe")
    assert stat.S_IMODE(os.stat(watchdog.socket).st_mode) & 0o007 == 0
    assert stat.S_IMODE(os.stat(watchdog.directory / "state").st_mode) & 0o007 == 0
    with pytest.raises((OSError, http.client.HTTPException)):
        urllib.request.urlopen(f"http://{cluster.controller_address}:{PORT}/v1/status", timeout=180)


@pytest.mark.thorough
def test_a_job_that_prepares_its_data_in_a_step_of_its_own_is_judged_by_its_training(
    cluster: Cluster, watch: Callable[..., Watchdog]
) -> None:
    watchdog = watch(mode="observe")
    prepare = "for n in $(seq 20); do sleep 0.2; [ $SLURM_PROCID != 0 ] || echo step=$n/20 loss=1.0; done"
    program = f"import subprocess; subprocess.run({['bash', '-c', prepare]!r})"
    (cluster.shared / "prepare.py").write_text(program)
    faults = cluster.shared / "faults"
    faults.mkdir()
    faults.chmod(0o777)
    script = train_script(
        cluster,
        f"--steps 100000 --step-seconds 0.3 --fault-dir {faults} --rendezvous-timeout-seconds 60",
        ranks_per_node=1,
    )
    first = f"srun --ntasks-per-node=4 {cluster.place.python} {cluster.shared}/prepare.py\nsleep 12\nsrun"
    output = Path(cluster.directory) / "log" / "job-%j.out"
    options = ("-N2", "--ntasks-per-node=4", f"--output={output}")
    job = cluster.sbatch(script.replace("\nsrun", "\n" + first), *options)
    watchdog.wait_for(lambda: watchdog.step(job) == 20, 60, "the preparation to end")
    watchdog.wait_for(lambda: watchdog.step(job) < 20, 90, "the training to begin")
    training(watchdog, job)
    assert watchdog.incidents(job) == []
    inject(cluster, "dataloader_hang.rank1")
    incident = watchdog.wait_for(lambda: watchdog.firing(job, "collective_hang"), 40, "the hang to be found")
    assert [c["rank"] for c in incident["culprits"]] == [1]
