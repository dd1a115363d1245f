"""Processes that really outlive their Slurm job on a GPU, ended by controller and agent: one ends
when it is asked, one only when it is killed, one cannot be; other processes that hold a GPU there are not
touched."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.gpu_devices import DEVICES
from tests.integration.reporting_watchdog import ReportingWatchdog
from tests.rig import rights
from tests.rig.cluster import Cluster
from tests.rig.stack import Watchdog
from tests.rig.standin_nvml import standin
from tests.rig.standin_nvml.standin import HEALTHY, Gpu, Scenario

WAIT_S = 300.0
USER = rights.USER
NODE = "n1"
SETTINGS: dict[str, dict[str, Any]] = {
    "agent": {"metrics_directory": "", "orphan_grace": "2s", "interval": "500ms"},
    "policy": {
        "max_drained_nodes": 3,
        "drained_percent": 100.0,
        "kinds": {
            "orphan_gpu_process": {
                "mode": "act",
                "ladder": ["end_process"],
                "drain": True,
                "attempts": 1,
                "cooldown": "0s",
            }
        },
    },
}

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a Slurm cluster of its own"),
    pytest.mark.skipif(not standin.can_build(), reason="needs a C compiler: apt-get install gcc libc6-dev"),
]

# Each leaves the job, and holds the GPU that it inherits. The third writes a line now and then, until it can't.
ORPHANS = r"""#!/bin/sh
exec 9</dev/nvidia1 8</dev/nvidiactl
for name in quiet deaf stuck; do ln -sf "$(command -v perl)" $name; done
start='use POSIX; exit if fork; POSIX::setsid(); $SIG{TERM} = "IGNORE" if shift; $| = 1; while (1) { print "x\n"; sleep 1 }'
./quiet -e "$start" 0 </dev/null >/dev/null 2>&1
./deaf -e "$start" 1 </dev/null >/dev/null 2>&1
./stuck -e "$start" 1 </dev/null >out 2>&1
exec 9<&- 8<&-
exec sleep 900
"""


NAMES = ("quiet", "deaf", "stuck")


class Acting(ReportingWatchdog):
    """A watchdog that may end orphans, on one node: its agent has the rights of its unit."""

    def __init__(self, cluster: Cluster) -> None:
        place = Path(tempfile.mkdtemp(prefix="stand-in.", dir=cluster.directory))  # one of a failed try may be there
        place.chmod(0o755)
        library = standin.build(place)
        cards = tuple(
            Gpu(uuid=f"GPU-{index}", bus=f"00000000:0{index + 1}:00.0", minor=index, **HEALTHY) for index in range(2)
        )
        scenario = Scenario(place / "scenario", gpus=cards)
        self.processes: list[subprocess.Popen[bytes]] = []
        environment = standin.environment_of(library, scenario.path)
        Watchdog.__init__(
            self,
            cluster,
            mode="observe",
            settings=SETTINGS,
            nodes=(NODE,),
            agent_env=lambda node: environment,
        )

    def close(self) -> None:
        super().close()
        for process in self.processes:
            process.kill()
            process.wait(30)

    def leftovers(self) -> list[dict[str, Any]]:
        """The incidents of what jobs left on GPUs."""
        return [each for each in self.incidents() if each["kind"] == "orphan_gpu_process"]

    def named(self) -> set[str]:
        """The processes that the one incident of the job lists."""
        (incident,) = self.leftovers() or [{"evidence": ()}]
        return {name for name in NAMES if any(f"({name})" in fact for fact in incident["evidence"])}

    def ended(self, name: str) -> dict[str, Any] | None:
        """The first action on this process, once it is over."""
        actions = [action for each in self.leftovers() for action in self.explain(each["id"])["actions"]]
        return next((each for each in actions if each["end"] and f"({name})" in each["end"]["detail"]), None)


@pytest.fixture
def acting(cluster: Cluster) -> Iterator[Acting]:
    with ExitStack() as stack:
        stack.callback(cluster.node_run, NODE, ["umount", "--lazy", "/dev"], check=False)
        cluster.node_run(NODE, ["sh", "-ec", DEVICES])
        watchdog = Acting(cluster)
        stack.callback(kill_all, cluster)
        stack.callback(watchdog.close)
        stack.callback(cluster.thaw, NODE)
        yield watchdog.__enter__()  # type: ignore[misc]


def pid_of(cluster: Cluster, name: str) -> int | None:
    """Of the one that has left the job: the process that started it is its parent for a moment."""
    done = cluster.node_run(NODE, ["pgrep", "--exact", "--parent=1", name], check=False)
    return int(done.stdout.split()[0]) if done.stdout.split() else None


@pytest.mark.timeout(900)
def test_orphans_are_ended_by_the_ladder_and_one_that_cannot_be_has_its_node_drained_with_the_reason(
    cluster: Cluster, acting: Acting
) -> None:
    watchdog, place = acting, Path(cluster.scratch) / "orphans"
    cluster.node_run(NODE, ["install", "-d", "--mode=777", str(place)])
    # Somebody of the system's, who holds a GPU by right; and a second job of the same user, which may be
    # using what is left of the first.
    daemon = cluster.node_popen(NODE, ["perl", "-e", 'open(my $gpu, "<", "/dev/nvidia0"); sleep 900'])
    acting.processes.append(daemon)
    options = (f"--nodelist={NODE}", "-n1", "--output=/dev/null", f"--chdir={place}")
    job = cluster.sbatch(ORPHANS, *options, user=USER)
    later = cluster.sbatch("#!/bin/sh\nexec sleep 900\n", *options, user=USER)
    pids = {name: watchdog.wait_for(lambda n=name: pid_of(cluster, n), WAIT_S, name) for name in NAMES}
    # The agent has to have heard from Slurm, by way of the controller, that the job is here: what it never
    # saw run is only told.
    for number in (job, later):
        watchdog.wait_for(lambda n=number: n in jobs_of(watchdog), WAIT_S, "the jobs to be known")
    seen = watchdog.last(NODE).sequence
    watchdog.wait_for(lambda: watchdog.last(NODE).sequence > seen + 4, WAIT_S, "some reports")
    cluster.freeze(NODE)
    watchdog.wait_for(lambda: state_of(cluster, pids["stuck"]) == "D", WAIT_S, "the third to hang")
    cluster.slurm("scancel", job)
    watchdog.wait_for(lambda: watchdog.named() == set(pids), WAIT_S, "all three to be reported")
    held = watchdog.wait_for(lambda: held_back(watchdog), WAIT_S, "the second job to protect them")
    assert all(f"its user has job {later} on {NODE} now" in reason for reason in held)
    assert {name: pid_of(cluster, name) for name in NAMES} == pids

    cluster.slurm("scancel", later)
    actions = {
        name: watchdog.wait_for(lambda n=name: watchdog.ended(n), WAIT_S, f"the end of {name}") for name in NAMES
    }
    assert operations(actions["quiet"]) == ["term_process"], actions
    assert operations(actions["deaf"]) == ["term_process", "kill_process"], actions
    assert operations(actions["stuck"]) == ["term_process", "kill_process", "drain"], actions
    for name in ("quiet", "deaf"):
        assert actions[name]["end"]["ok"]
        assert pid_of(cluster, name) is None
        assert f"of {USER} on {NODE} has ended: GPU-1 free again" in actions[name]["end"]["detail"]
    detail, pid = actions["stuck"]["end"]["detail"], pids["stuck"]
    assert not actions["stuck"]["end"]["ok"]
    assert detail.startswith(
        f"unkillable: process {pid} (stuck) of {USER} on {NODE}, of job {job}, which is over, holds GPU-1"
    )
    assert "in state D (" in detail
    assert f"drained: {NODE}" in detail
    node = cluster.node(NODE)
    assert "DRAIN" in node["State"]
    assert f"slurm-watchdog: unkillable process {pid} (stuck)" in node["Reason"]
    told = watchdog.wait_for(
        lambda: [t for t in map(json.dumps, watchdog.slack.messages) if "NEEDS YOU" in t], WAIT_S, "Slack to be told"
    )
    assert any("unkillable" in text for text in told)
    assert 'slurm_watchdog_actions_total{action="end_process",outcome="ok"} 2.0' in watchdog.metrics()

    cluster.thaw(NODE)
    watchdog.wait_for(lambda: pid_of(cluster, "stuck") is None, WAIT_S, "SIGKILL to reach the third")
    watchdog.wait_for(
        lambda: not [each for each in watchdog.leftovers() if each["state"] == "firing"],
        WAIT_S,
        "the end of it all",
    )
    assert daemon.poll() is None


def jobs_of(watchdog: Watchdog) -> set[str]:
    return {each["job_id"] for each in watchdog.status()["jobs"]}


def held_back(watchdog: Acting) -> list[str]:
    decisions = [each for incident in watchdog.leftovers() for each in incident["decisions"]]
    return [each["reason"] for each in decisions if each["by"] == "process_changed"]


def kill_all(cluster: Cluster) -> None:
    """What a test that failed has left."""
    for name in NAMES:
        if (pid := pid_of(cluster, name)) is not None:
            cluster.node_run(NODE, ["kill", "-KILL", str(pid)], check=False)


def operations(action: dict[str, Any]) -> list[str]:
    """Each once: on a slow machine a node may object at first, or answer too late."""
    return list(dict.fromkeys(each["operation"] for each in action["operations"]))


def state_of(cluster: Cluster, pid: int) -> str:
    return cluster.node_run(NODE, ["ps", "-o", "state=", "-p", str(pid)], check=False).stdout.strip()
