"""A process that really outlives its Slurm job with a GPU's device open: reported after the grace, it alone,
and with its owner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rig import rights
from tests.rig.cluster import Cluster

CHECKOUT = Path(__file__).resolve().parents[2]
GRACE_S = 4.0
INTERVAL_S = 0.3
USER = rights.USER

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a Slurm cluster of its own"),
]

# The rank starts a worker that inherits the open device, leaves its session, and lives on when the rank has ended.
RANK = r"""
use POSIX;
my ($device, $go, $stay) = @ARGV;
open(my $gpu, '<', $device) or die "$device: $!";
(my $name = $device) =~ s/\d+$/ctl/;
open(my $control, '<', $name) or die "$name: $!";
for my $worker (1 .. 2) {
    if (fork() == 0) {
        if ($stay && $worker == 1) { POSIX::setsid(); open(STDOUT, '>', '/dev/null'); open(STDERR, '>', '/dev/null'); sleep(300); }
        while (!-e $go) { select(undef, undef, undef, 0.1); }
        exit 0;
    }
}
while (!-e $go) { select(undef, undef, undef, 0.1); }
"""

# What the agent does in its ticks, with the list of jobs that a controller would send.
WATCHER = r"""
import json, os, sys, time
from slurm_watchdog.base import clock
from slurm_watchdog.agent.gpu.orphan_processes import OrphanGpuProcesses
from slurm_watchdog.agent.processes import thread_calls
from tests.builders.readers import reader
from slurm_watchdog.model.observations import Gpu
devices, jobs, grace_s, interval_s = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
thread_calls.DEVICES = devices
processes = reader()
children = processes.looks.children
holders = OrphanGpuProcesses(children, grace_s, processes.reads.devices_of, devices=devices)
gpus = (Gpu(uuid="GPU-a", index=1, minor=0), Gpu(uuid="GPU-b", index=0, minor=1))
while True:
    now = clock.monotonic()
    children.poll(now)
    members = processes.collect(now, 5.0)
    running = json.load(open(jobs))
    found = holders.collect(now, processes.table.entries, processes.ours, gpus, None if running is None else frozenset(running))
    print(json.dumps({
        "members": [[each.job_id, each.pid, each.role, each.comm] for each in members],
        "holders": [{name: getattr(each, name) for name in each.__struct_fields__} for each in found],
    }), flush=True)
    time.sleep(interval_s)
"""


class Node:
    """The watcher on n1, its words, and the jobs that it is given."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.devices = f"{cluster.shared}/nvidia"
        for name in ("0", "1", "ctl"):
            path = f"{self.devices}{name}"
            os.mknod(path, 0o666 | 0o020000, os.makedev(1, 3))  # a character device that anybody may open: null
            os.chmod(path, 0o666)
        self.jobs = cluster.directory / "running.json"
        self.tell(None)
        argv = [sys.executable, "-c", WATCHER, self.devices, str(self.jobs), str(GRACE_S), str(INTERVAL_S)]
        self.watcher = cluster.node_popen("n1", argv, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
        self.seen: list[dict[str, Any]] = []

    def tell(self, running: list[str] | None) -> None:
        new = self.jobs.with_suffix(".new")
        new.write_text(json.dumps(running))
        new.replace(self.jobs)

    def running(self) -> list[str]:
        """As the controller has it: ending jobs are still there."""
        return [
            job["job_id"] for job in self.cluster.squeue() if job["state"] in ("RUNNING", "COMPLETING", "SUSPENDED")
        ]

    def tick(self) -> dict[str, Any]:
        self.tell(self.running())
        assert self.watcher.stdout is not None
        line = self.watcher.stdout.readline()
        assert line, "the watcher has ended"
        self.seen.append(json.loads(line))
        return self.seen[-1]

    def until(self, condition: Callable[[dict[str, Any]], object], seconds: float = 30.0) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if condition(report := self.tick()):
                return report
        pytest.fail(f"not within {seconds:g} s; the last report: {report}; jobs: {self.cluster.squeue()}")

    def start(self, device: int, go: Path, *, stay: bool) -> str:
        program = self.cluster.shared / f"rank{device}.pl"
        program.write_text(RANK)
        script = f"#!/bin/sh\nsrun --ntasks=1 perl {program} {self.devices}{device} {go} {int(stay)}\n"
        return self.cluster.sbatch(script, "--nodelist=n1", "--ntasks=1", "--output=/dev/null", user=USER)


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Node]:
    node = Node(cluster)
    yield node
    node.watcher.kill()
    node.watcher.wait()
    left = {pid for report in node.seen[-1:] for _, pid, _, comm in report["members"] if comm == "perl"}
    for pid in left:
        cluster.node_run("n1", ["kill", "-KILL", str(pid)], check=False)


def workers_of(report: dict[str, Any], job_id: str) -> set[int]:
    return {pid for job, pid, _, comm in report["members"] if job == job_id and comm == "perl"}


def test_a_worker_that_outlives_its_job_is_told_of_after_the_grace_and_nobody_else_ever(node: Node) -> None:
    go, never = node.cluster.shared / "go", node.cluster.shared / "never"
    healthy, ending = node.start(0, never, stay=False), node.start(1, go, stay=True)
    node.until(lambda report: all(len(workers_of(report, job)) == 3 for job in (healthy, ending)))
    for _ in range(int(GRACE_S / INTERVAL_S) + 3):
        assert node.tick()["holders"] == []
    mine = workers_of(node.seen[-1], ending)
    go.touch()
    node.until(lambda _: ending not in node.running())
    ended_at = time.monotonic()
    report = node.until(lambda report: report["holders"])
    assert time.monotonic() - ended_at > GRACE_S - 2 * INTERVAL_S
    (row,) = report["holders"]
    assert row["pid"] in mine
    assert workers_of(report, ending) == {row["pid"]}  # it stays known under its job's id
    assert (row["job_id"], row["comm"], row["minors"], row["gpu_uuids"]) == (ending, "perl", [1], ["GPU-b"])
    assert (row["uid"], row["listed_by_nvml"]) == (rights.USER_UID, False)
    assert GRACE_S <= row["orphan_for_s"] < GRACE_S + 5
    assert row["age_s"] > row["orphan_for_s"]
    (row,) = node.until(lambda report: report["holders"] and report["holders"][0]["user"] == USER)["holders"]
    assert len(workers_of(node.tick(), healthy)) == 3
    node.cluster.node_run("n1", ["kill", "-KILL", str(row["pid"])])
    node.until(lambda report: not report["holders"])
    told = {row["pid"] for report in node.seen for row in report["holders"]}
    assert told == {row["pid"]}
    node.cluster.slurm("scancel", healthy)
