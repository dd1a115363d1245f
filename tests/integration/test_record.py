"""A real hang on a real cluster, recorded by a real controller, and found again in the recording."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from slurm_watchdog.recording import entries
from tests.rig.cluster import Cluster
from tests.rig.stack import COMMAND, Watchdog, train_script


class RecordingWatchdog(Watchdog):
    """Its controller is started as an administrator would start it to record."""

    def start_controller(self) -> None:
        argv = ["setpriv", "--pdeathsig=KILL", str(COMMAND), "controller", "--config", str(self.config_file)]
        argv += ["--record", str(self.directory / "hang.rec")]
        with self._log("controller").open("ab") as log:
            self.controller = subprocess.Popen(
                argv, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/"
            )
        self.wait_for(self._answers, 20, "the controller to answer")


def essence(incidents: list[dict[str, Any]]) -> list[Any]:
    return sorted(
        (i["kind"], i["job_id"], [(c["node"], c["rank"], c["pid"], c["gpu_uuid"]) for c in i["culprits"]])
        for i in incidents
        if i["fired_at"] is not None
    )


@pytest.mark.thorough
def test_a_hang_is_found_in_its_recording_with_the_same_culprit(cluster: Cluster) -> None:
    faults = cluster.shared / "faults"
    faults.mkdir(exist_ok=True)
    faults.chmod(0o777)
    with RecordingWatchdog(cluster, mode="observe") as watchdog:
        job = cluster.sbatch(
            train_script(cluster, f"--steps 100000 --step-seconds 0.3 --save-interval 10 --fault-dir {faults}"),
            "-N3",
            f"--output={cluster.directory}/log/job-%j.out",
        )
        watchdog.wait_for(lambda: watchdog.step(job) >= 5, 60, "the job to train")
        (faults / "dataloader_hang.rank3").touch()
        live = watchdog.wait_for(
            lambda: watchdog.firing(job, "collective_hang"), 60, "the hang to be found by the controller"
        )
        assert [(c["node"], c["rank"]) for c in live["culprits"]] == [("n2", 3)]
        recording = watchdog.directory / "hang.rec"
        written = recording.stat().st_size
        watchdog.wait_for(lambda: recording.stat().st_size > written + 20_000, 30, "the recording to go on")
        live_incidents = watchdog.incidents()
        assert watchdog.controller is not None
        watchdog.controller.terminate()
        watchdog.controller.wait(timeout=180)
        done = subprocess.run(
            [str(COMMAND), "replay", "--json", "--config", str(watchdog.config_file), str(recording)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert done.stderr == ""
        replayed = json.loads(done.stdout)["incidents"]
        assert essence(replayed) == essence(live_incidents)
        found = next(i for i in replayed if i["kind"] == "collective_hang")
        assert "data loader" in found["culprits"][0]["reason"]
        assert abs(found["opened_at"] - live["opened_at"]) < 2
        assert abs(found["detected_after_s"] - live["detected_after_s"]) < 5
        assert [(d["action"], d["verdict"]) for d in found["decisions"]][-1] == ("requeue", "observed")
        with recording.open("rb") as file:
            kinds = {type(each.what) for each in entries.read_entries(file.readline, entries.Tally())}
        assert kinds == {bytes, entries.Begin, entries.Answer, entries.Tick, entries.State, entries.Asked}
