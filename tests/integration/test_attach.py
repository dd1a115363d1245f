"""`slurm-watchdog attach`: agents as a step inside of the job, the controller where it was called; nothing is
installed on the nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rig.cluster import Cluster
from tests.rig.rights import USER_UID
from tests.rig.stack import COMMAND, QUICK, munge_of, train_script

PATIENCE_S = 150.0


class Attached:
    """One `slurm-watchdog attach`."""

    def __init__(self, cluster: Cluster, job: str, *options: str) -> None:
        self.cluster = cluster
        self.directory = cluster.shared / f"attached-{job}"
        config = cluster.shared / "attach.yaml"
        config.write_text(json.dumps(QUICK))
        self.errors = cluster.shared / f"attach-{job}.txt"
        argv = cluster.place.command(  # its job's owner, who alone may start a step in it
            USER_UID,
            (),
            "-c",
            "from slurm_watchdog.cli.main import main; main()",
            "attach",
            job,
            "--config",
            str(config),
            "--directory",
            str(self.directory),
            *options,
        )
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                argv,
                env=dict(cluster.env) | dict(cluster.place.environment),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                cwd="/",
                start_new_session=True,
            )

    def ask(self, *words: str) -> Any:
        done = subprocess.run(
            [str(COMMAND), *words, "--json", "--socket", str(self.directory / "controller.sock")],
            capture_output=True, text=True, check=False, timeout=180,
        )  # fmt: skip
        return json.loads(done.stdout)

    def step(self) -> int:
        jobs = self.ask("status").get("jobs", [])
        return int(jobs[0]["step"] or -1) if jobs else -1

    def reporting(self) -> set[str]:
        return set(self.ask("status").get("nodes", {}).get("reporting", ()))

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            told = self.errors.read_text()[-3000:]
            assert time.monotonic() < deadline, f"not in time: {what}\n{told}\n{self.agents()[-2000:]}"
            time.sleep(0.5)
        return found

    def agents(self) -> str:
        file = self.directory / "agents.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def close(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(timeout=180)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise


@pytest.fixture
def attach(cluster: Cluster) -> Iterator[Callable[..., Attached]]:
    started: list[Attached] = []

    def begin(job: str, *options: str) -> Attached:
        started.append(Attached(cluster, job, *options))
        return started[-1]

    yield begin
    for each in started:
        each.close()


def submit(cluster: Cluster, *options: str) -> tuple[str, Path]:
    faults = cluster.shared / "faults"
    faults.mkdir(mode=0o777, exist_ok=True)
    faults.chmod(0o777)
    script = train_script(
        cluster, f"--steps 100000 --step-seconds 0.3 --save-interval 10 --fault-dir {faults}", *options
    )
    return cluster.sbatch(script, "-N2", f"--output={cluster.shared}/job-%j.out"), faults


def test_a_hang_is_named_the_job_requeued_and_followed_into_its_next_run(
    cluster: Cluster, attach: Callable[..., Attached]
) -> None:
    job, faults = submit(cluster)
    watched = attach(job, "--act")
    watched.until(lambda: watched.step() >= 12, "steps")
    (faults / "dataloader_hang.rank3").touch()
    found = watched.until(lambda: [i for i in watched.ask("incidents") if i["kind"] == "collective_hang"], "the hang")
    assert [(c["rank"], c["node"]) for c in found[0]["culprits"]] == [(3, "n2")]

    def outcome() -> str | None:
        (incident,) = [i for i in watched.ask("incidents") if i["kind"] == "collective_hang"]
        return incident["decisions"][0]["outcome"] if incident["decisions"] else None

    assert "first new step" in watched.until(outcome, "the restart")
    (listed,) = watched.ask("status")["jobs"]
    assert (listed["restarts"], listed["ranks"], listed["ranks_alive"]) == (1, 4, 4), "an agent is no rank"
    assert watched.close() == 0
    assert cluster.job(job)["JobState"] == "RUNNING", "nothing is done to the job"


@pytest.mark.thorough
def test_it_proves_itself_by_munge_and_its_agents_end_with_it_however_it_ends(
    cluster: Cluster, attach: Callable[..., Attached]
) -> None:
    job, _ = submit(cluster)
    killed = attach(job)
    killed.until(lambda: killed.reporting() >= {"n1", "n2"}, "proven reports of both nodes")
    own = str(USER_UID)
    security = json.loads((killed.directory / "agents.json").read_text())["security"]
    assert (security["mode"], security["controller_user"]) == ("munge", own)
    assert security["munge_socket"] == munge_of(cluster)["munge_socket"]
    assert not (killed.directory / "token").exists()

    def agents() -> str:
        words = ["pgrep", "-U", own, "-f", "slurm_watchdog.agent 3$"]
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout

    assert len(agents().split()) >= 2, "there is something to end"
    killed.process.kill()
    killed.until(lambda: not agents(), "the end of its agents")
    assert cluster.job(job)["JobState"] == "RUNNING"

    watched = attach(job)
    watched.until(lambda: watched.reporting() >= {"n1", "n2"}, "proven reports of both nodes")
    cluster.slurm("scancel", job)
    watched.until(lambda: watched.process.poll() is not None, "its end")
    assert f"job {job} is CANCELLED: it is not watched any more" in watched.errors.read_text()
    later = attach(job)
    watched.until(lambda: later.process.poll() is not None, "the end of the third")
    assert later.process.returncode == 1
    assert "there is nothing to watch" in later.errors.read_text()
