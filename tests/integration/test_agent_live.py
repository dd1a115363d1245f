"""The agents as they run, on a real Slurm with real faults: what each node's reports say, what the controller
makes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.agent.logs.job_logs import KEPT
from slurm_watchdog.controller.state.progress_clock import lines_of
from slurm_watchdog.model.observations import EventKind, LogFile, Process, Role
from slurm_watchdog.model.protocol import JobWatch, Reply
from slurm_watchdog.model.report import Report
from slurm_watchdog.wire.codec import encode_report
from tests.agent_tree import (
    AgentProcess,
    Receiver,
    alone,
    descriptors_and_threads,
    settles_at,
    tree_of,
    until,
)
from tests.builders.report_json import report_of
from tests.builders.thorough import first
from tests.integration.gpu_devices import DEVICES
from tests.rig.cluster import Cluster
from tests.rig.rights import USER, USER_UID
from tests.rig.stack import COMMAND, Watchdog, train_script
from tests.rig.standin_nvml import standin
from tests.rig.standin_nvml.standin import HEALTHY, Gpu, Instance, Scenario

INTERVAL_S = 1.0
GRACE_S = 3.0
LIFETIME_S = 5.0
SAVE_INTERVAL = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "agent": {"mount_probe_interval": "1s", "orphan_grace": f"{GRACE_S:g}s", "metrics_directory": ""},
}

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a Slurm cluster of its own"),
    pytest.mark.skipif(not standin.can_build(), reason="needs a C compiler: apt-get install gcc libc6-dev"),
]


class Live(Watchdog):
    """A watchdog whose agents also write their reports down, each node with two stand-in GPUs."""

    def __init__(self, cluster: Cluster, more: Mapping[str, Mapping[str, Any]]) -> None:
        settings: dict[str, dict[str, Any]] = {name: dict(values) for name, values in SETTINGS.items()}
        settings["agent"]["mount_probe_write"] = [str(cluster.shared), str(cluster.scratch)]
        for section, values in more.items():
            settings.setdefault(section, {}).update(values)
        place = Path(cluster.directory) / "stand-in"
        place.mkdir(exist_ok=True)
        self.library = standin.build(place)
        self.scenarios = {
            node: Scenario(
                place / node,
                gpus=tuple(
                    Gpu(
                        uuid=f"GPU-{node}-{index}",
                        bus=f"00000000:{(0x07, 0x0F)[index]:02X}:00.0",
                        minor=1 - index,
                        **HEALTHY,
                    )
                    for index in range(2)
                ),
            )
            for node in cluster.nodes
        }
        super().__init__(cluster, mode="observe", settings=settings, agent_env=self.environment)

    def environment(self, node: str) -> Mapping[str, str]:
        return standin.environment_of(self.library, self.scenarios[node].path)

    def start_agent(self, node: str, *words: str, stdout: IO[bytes] | None = None) -> None:
        with self._reports(node).open("ab") as reports:
            super().start_agent(node, "--json", *words, stdout=reports)

    def _reports(self, node: str) -> Path:
        return self.directory / f"reports-{node}.jsonl"

    def reports(self, node: str) -> list[Report]:
        """All that the agents of this node have seen, oldest first."""
        lines = self._reports(node).read_bytes().split(b"\n")[:-1]
        return [report_of(line) for line in lines]

    def last(self, node: str) -> Report:
        return self.reports(node)[-1]

    def sees(self, node: str, condition: Callable[[Report], object], timeout_s: float, what: str) -> Report:
        """The first report of this node, from now on, that is as it should be."""
        since = len(self.reports(node))

        def find() -> Report | None:
            return next((report for report in self.reports(node)[since:] if condition(report)), None)

        found: Report = self.wait_for(find, timeout_s, f"{node}: {what}")
        return found

    def incidents_of(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.incidents() if each["kind"] == kind and each["state"] == "firing"]


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.fixture
def live(cluster: Cluster) -> Iterator[Callable[..., Live]]:
    """Starts a watchdog that only looks on. After the test it is seen to have done nothing."""
    started: list[Live] = []

    def start(**more: Mapping[str, Any]) -> Live:
        live = Live(cluster, more)
        started.append(live)
        live.__enter__()
        return live

    yield start
    acted = []
    for each in started:
        acted += [
            decision
            for incident in each.incidents()
            for decision in each.explain(incident["id"])["incident"]["decisions"]
            if decision["verdict"] == "allowed" and decision["action"] != "none"
        ]
        for scenario in each.scenarios.values():
            scenario.rule()
        each.close()
    roots = [Path("/proc", str(cluster.init_pid(node)), "root") for node in cluster.nodes]
    switches = [switch for root in roots for switch in root.glob("run/slurm-watchdog/jobs/*/kill")]
    assert (acted, switches) == ([], []), "an observer does nothing"


def submit(cluster: Cluster, *options: str, nodes: int = 3, sbatch: tuple[str, ...] = ()) -> str:
    output = Path(cluster.directory) / "log" / "job-%j.out"
    output.parent.chmod(0o1777)
    script = train_script(cluster, f"--steps 100000 --step-seconds 0.3 --save-interval {SAVE_INTERVAL}", *options)
    return cluster.sbatch(script, f"-N{nodes}", f"--output={output}", *sbatch)


def ranks(report: Report, job: str) -> list[Process]:
    return [each for each in report.processes if each.job_id == job and each.role is Role.RANK]


def steps(reports: list[Report]) -> list[int]:
    """Every step that was told, in the order of telling."""
    events = (event for report in reports for event in report.events if event.kind is EventKind.PROGRESS)
    return [line.step for event in events for line in lines_of(event) if line.step is not None]


def is_quiet(report: Report) -> bool:
    """Nobody is accused of anything."""
    return (
        all(each.blocked is None for each in report.processes)
        and all(each.responding for each in report.mounts)
        and all(each.error is None for each in report.logs)
        and all(gpu.error is None for gpu in report.gpus)
        and not (report.hung_probes or report.gpu_holders or report.problems)
    )


def of_step(job: str, at_least: int) -> Callable[[Report], bool]:
    def holds(report: Report) -> bool:
        return any(event.job_id == job and (event.step or 0) >= at_least for event in report.events)

    return holds


def in_steps(job: str, every: int, first: int, last: int) -> Callable[[Report], bool]:
    """Holds if the newest step of a report is `first` to `last` steps after a multiple of `every`."""

    def holds(report: Report) -> bool:
        told = [event.step for event in report.events if event.job_id == job and event.step]
        return bool(told) and first <= told[-1] % every <= last

    return holds


@pytest.mark.parametrize("where", first(1, ["one node", "all nodes"]))
def test_a_frozen_filesystem_is_told_by_every_node_as_what_it_is(
    cluster: Cluster, live: Callable[..., Live], where: str
) -> None:
    watchdog = live()
    everywhere = where == "all nodes"
    mount = cluster.shared if everywhere else cluster.scratch
    for node in cluster.nodes:
        cluster.node_local(node).chmod(0o1777)
    every = 40  # steps between checkpoints: time enough to freeze what only the log's writer is using
    job = submit(cluster, f"--log {mount}/train.log", f"--save-interval {every}")
    watchdog.sees("n1", of_step(job, every + 2), 120, "steps after a first checkpoint")
    for node in cluster.nodes:
        # Only the last rank writes the log; the others' mount is nobody's business unless the job names it.
        assert watchdog.sees(node, is_quiet, 60, "a quiet report")
    victims = cluster.nodes if everywhere else ("n3",)
    writer = "n3"  # of the last rank, who writes the log: the others wait for it, and for nothing else
    watchdog.sees("n1", in_steps(job, every, 2, every // 2), 120, "a step that is far from a checkpoint")
    cluster.freeze(None if everywhere else "n3")
    try:
        watchdog.sees(writer, lambda r: _blocked_on(r, job, mount), 60, "a rank that is blocked")
        for node in victims:
            watchdog.sees(
                node,
                lambda r: any(not m.responding for m in r.mounts if m.mount == str(mount)),
                60,
                "the mount",
            )
        time.sleep(3)
        for node in cluster.nodes:
            report = watchdog.last(node)
            blocked = _blocked_on(report, job, mount)
            rows = [m for m in report.mounts if m.mount == str(mount)]
            probe = min(rows, key=lambda row: row.responding, default=None)  # a look of our own still succeeds
            assert [each.rank for each in blocked] == ([5] if node == writer else [])
            if node in victims:
                assert probe is not None
                assert (probe.responding, probe.fs_type, probe.wrote) == (False, "ext4", False)
                assert probe.device
                assert probe.device.startswith("/dev/loop")
                assert {each.probe for each in report.hung_probes} == {f"probe:{mount}:{USER_UID}"}
            else:
                assert report.hung_probes == ()
                assert probe is None or probe.responding
            assert len(ranks(report, job)) == 2
            assert report.problems == ()
        (log,) = _log_rows(watchdog.last("n3"), f"{mount}/train.log")
        assert (log.error, (log.growth_age_s or 0) > 2) == (None, True), "ext4 still answers who reads"
        (row,) = [each for each in watchdog.last("n1").checkpoints if each.job_id == job]
        assert row.step is not None
        assert row.error is None
    finally:
        cluster.thaw(None if everywhere else "n3")
    seen = max(steps(watchdog.reports("n1")))
    watchdog.sees("n1", of_step(job, seen + 3), 30, "steps after the thaw")
    for node in cluster.nodes:
        watchdog.sees(node, is_quiet, 20, "a quiet report after the thaw")
    told = steps(watchdog.reports("n1"))
    told = [step for at, step in enumerate(told) if step not in told[:at]]
    assert told == list(range(told[0], told[-1] + 1)), "no step was lost"


def _blocked_on(report: Report, job: str, mount: Path) -> list[Process]:
    found = [each for each in ranks(report, job) if each.blocked is not None]
    assert all(each.blocked and each.blocked.mount == str(mount) for each in found)
    return [
        each
        for each in found
        if each.blocked and each.blocked.syscall and each.blocked.fs_type == "ext4" and each.blocked.seconds > 0
    ]


def _log_rows(report: Report, path: str) -> list[LogFile]:
    return [row for row in report.logs if row.path == path]


@pytest.mark.thorough
def test_while_the_network_is_cut_nothing_is_lost_and_what_is_too_old_is_not_judged(
    cluster: Cluster, live: Callable[..., Live]
) -> None:
    watchdog = live()
    job = submit(cluster, nodes=1, sbatch=("--nodelist=n1",))
    watchdog.wait_for(lambda: watchdog.step(job) >= 5, 60, "steps")
    before = watchdog.step(job)
    cluster.cut("n1")
    try:
        time.sleep(3 * LIFETIME_S)
        assert watchdog.step(job) <= before + 5, "the controller knows no more than it was told"
        away = steps(watchdog.reports("n1"))[-1]
        assert away > before + 20, "the agent sees on"
    finally:
        cluster.join("n1")
    watchdog.wait_for(lambda: watchdog.step(job) > away, 20, "the steps of the time after")
    told = steps(watchdog.reports("n1"))
    times = Counter(told)
    assert max(times.values()) <= 2 and times.total() - len(times) <= KEPT, "only the last ones are told again"
    told = list(times)
    assert told == list(range(told[0], told[-1] + 1)), "no step was lost"
    text = watchdog.metrics()
    counts = {
        outcome: float(line.split()[-1])
        for outcome in ("accepted", "expired", "duplicate")
        for line in text.splitlines()
        if line.startswith(f'slurm_watchdog_reports_total{{outcome="{outcome}"}}')
    }
    assert counts.get("expired", 0) >= LIFETIME_S / INTERVAL_S, text
    # Slurm itself says of a node that is cut off that it does not answer.
    assert {each["kind"] for each in watchdog.incidents(job)} <= {"node_down"}
    watchdog.wait_for(lambda: set(watchdog.status()["nodes"]["reporting"]) == set(cluster.nodes), 10, "all nodes")


# In a mount namespace of its own, as in a container, there is a device of this name without the machine having one.
ORPHAN = """#!/bin/sh
perl -e "use POSIX; open(my \\$gpu, q(<), q(/dev/nvidia1)); \\$^F = 99; fcntl(\\$gpu, F_SETFD, 0);
    if (fork() == 0) {{ POSIX::setsid(); open(STDOUT, q(>), q(/dev/null)); open(STDERR, q(>&STDOUT));
        open(my \\$note, q(>), q({file})); print \\$note \\$\\$; close(\\$note); exec(q(sleep), 300); }}"
sleep 6
"""


@pytest.mark.thorough
def test_a_process_that_outlives_its_job_on_a_gpu_is_told_of_after_the_grace_until_it_is_gone(
    cluster: Cluster, live: Callable[..., Live]
) -> None:
    cluster.node_run("n2", ["sh", "-ec", DEVICES])
    watchdog = live()
    note = cluster.shared / "orphan.pid"
    job = cluster.sbatch(ORPHAN.format(file=note), "-N1", "--nodelist=n2", "--output=/dev/null")
    pid = int(watchdog.wait_for(lambda: note.exists() and note.read_text(), 30, "the worker"))
    try:
        assert not any(report.gpu_holders for report in watchdog.reports("n2")), "its job still runs"
        cluster.wait_for_job_state(job, "COMPLETED")
        ended_at = time.monotonic()
        watchdog.sees("n2", lambda r: r.gpu_holders, 30, "the orphan")
        assert time.monotonic() - ended_at > GRACE_S - 2 * INTERVAL_S
        named = watchdog.sees("n2", lambda r: any(h.user == USER for h in r.gpu_holders), 10, "its user")
        (row,) = named.gpu_holders
        assert (row.pid, row.comm, row.user, row.job_id) == (pid, "sleep", USER, job)
        assert row.minors == (1,)
        assert (row.gpu_uuids, row.listed_by_nvml, row.memory_bytes) == (("GPU-n2-0",), False, None)
        watchdog.wait_for(lambda: watchdog.incidents_of("orphan_gpu_process"), 10, "the incident")
        time.sleep(2)
        (incident,) = watchdog.incidents_of("orphan_gpu_process")
        (culprit,) = incident["culprits"]
        assert (culprit["node"], culprit["pid"], culprit["gpu_uuid"]) == ("n2", pid, "GPU-n2-0")
        assert f"1 process of {USER}'s job {job}, which is over, still holds GPU-n2-0 on n2" in incident["summary"]
        assert f"pid {pid} (sleep)" in incident["summary"]
    finally:
        cluster.node_run("n2", ["kill", "-KILL", str(pid)], check=False)
        cluster.node_run("n2", ["umount", "--lazy", "/dev"], check=False)
    watchdog.wait_for(lambda: not watchdog.incidents_of("orphan_gpu_process"), 20, "the end of the incident")
    watchdog.sees("n2", lambda r: not r.gpu_holders, 10, "no orphan")
    for node in ("n1", "n3"):
        assert not any(report.gpu_holders for report in watchdog.reports(node))


CAUSE = "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_a_flood_in_a_jobs_log_hides_neither_its_cause_nor_the_steps_after_it(
    cluster: Cluster, live: Callable[..., Live]
) -> None:
    watchdog = live()
    job = submit(cluster, nodes=1, sbatch=("--nodelist=n1",))
    log = Path(cluster.directory) / "log" / f"job-{job}.out"
    watchdog.sees("n1", of_step(job, 3), 60, "steps")
    agent = tree_of(watchdog.agents["n1"].pid)
    before_s, began = _cpu_s(agent), len(watchdog.reports("n1"))
    flood = b"".join(
        b"[rank1]: [W Module.cpp:156] symbolizing C++ stack trace frame %d for a thread\n" % n for n in range(100_000)
    )
    with open(log, "ab", buffering=0) as file:
        file.write(f"[rank1]: {CAUSE}\n".encode() + flood)
    at_end = log.stat().st_size
    caught_up = watchdog.sees(
        "n1",
        lambda r: any((row.offset or 0) >= at_end for row in _log_rows(r, str(log))),
        10,
        "the flood's end",
    )
    flooded = watchdog.reports("n1")[began:]
    at = next(n for n, report in enumerate(flooded) if report.sequence == caught_up.sequence)
    errors = [event for report in flooded for event in report.events if event.kind is EventKind.ERROR]
    assert errors[0].line.endswith(CAUSE)
    assert errors[0].rank == 1
    assert at <= 3, "a flood of 100,000 lines is read within three ticks"
    watchdog.sees("n1", of_step(job, 1), 2 * INTERVAL_S + 1.5, "a step within two ticks of the flood")
    time.sleep(5)
    told = steps(watchdog.reports("n1"))
    assert told == sorted(set(told)), "no step was told twice"
    lines = sum(e.lines for r in watchdog.reports("n1") for e in r.events if e.kind is EventKind.PROGRESS)
    assert lines == told[-1] - told[0] + 1, "no step was lost in the flood"
    assert sum(report.events_dropped for report in watchdog.reports("n1")) == 0
    assert _cpu_s(tree_of(watchdog.agents["n1"].pid)) - before_s < 3.0, "it cost less than it filled"
    sequences = [report.sequence for report in flooded]
    assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))


def _cpu_s(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


@pytest.mark.thorough
def test_what_befalls_a_gpu_reaches_the_controller_as_what_it_is(cluster: Cluster, live: Callable[..., Live]) -> None:
    watchdog = live()
    job = submit(cluster)
    watchdog.wait_for(lambda: watchdog.step(job) >= 3, 60, "steps")
    node = watchdog.scenarios["n2"]
    pid = next(p.pid for p in ranks(watchdog.last("n2"), job) if p.local_rank == 0)
    node.change(0, processes=((pid, 1024**3),))
    node.change(1, mig=True, instances=(Instance("MIG-a", 1, 0), Instance("MIG-b", 2, 0)))
    node.event(1, 13)  # a program's own fault
    told = watchdog.sees("n2", lambda r: any(e.xid == 13 for e in r.node_events), 10, "Xid 13")
    assert [(e.gpu_uuid, e.source) for e in told.node_events if e.xid == 13] == [("GPU-n2-1", "nvml")]
    # What is slow to read is read once a minute.
    sliced = watchdog.sees("n2", lambda r: r.gpus[0].pids == (pid,) and r.gpus[1].mig, 90, "rank and slices")
    assert [each.uuid for each in sliced.gpus[1].mig or ()] == ["MIG-a", "MIG-b"]
    healthy = node.gpus
    node.only(healthy[::-1])  # each at the other's place
    swapped = watchdog.sees(
        "n2", lambda r: [g.uuid for g in r.gpus if g.index == 0] == ["GPU-n2-1"], 90, "the exchange"
    )
    assert {(g.uuid, g.index, g.minor) for g in swapped.gpus} == {("GPU-n2-0", 1, 1), ("GPU-n2-1", 0, 0)}
    node.only(healthy)
    assert watchdog.incidents_of("gpu_fault") == []

    node.event(1, 79)
    (incident,) = watchdog.wait_for(lambda: watchdog.incidents_of("gpu_fault"), 10, "Xid 79")
    assert [(c["node"], c["gpu_uuid"]) for c in incident["culprits"]] == [("n2", "GPU-n2-1")]
    assert "Xid 79" in incident["summary"]

    node.change(0, rules=("lost",))

    def fallen() -> Any:
        return [i for i in watchdog.incidents_of("gpu_fault") if i["culprits"][0]["gpu_uuid"] == "GPU-n2-0"]

    (incident,) = watchdog.wait_for(fallen, 20, "the GPU that is gone")
    assert incident["culprits"][0]["node"] == "n2"
    assert "it is lost" in incident["summary"]
    assert watchdog.explain(incident["id"])["incident"]["job_ids"] == [job], "whose rank computed on it"
    report = watchdog.last("n2")
    lost = {g.uuid: "GPU_IS_LOST" in (g.error or "") for g in report.gpus}
    assert lost == {"GPU-n2-0": True, "GPU-n2-1": False}
    node.change(0, rules=())
    for other in ("n1", "n3"):
        assert all(gpu.error is None for each in watchdog.reports(other) for gpu in each.gpus)


@pytest.mark.thorough
def test_a_driver_that_never_answers_costs_one_child_and_is_told_of_its_node(
    cluster: Cluster, live: Callable[..., Live]
) -> None:
    watchdog = live()
    watchdog.sees("n3", lambda r: len(r.gpus) == 2, 20, "two GPUs")
    assert watchdog.incidents_of("gpu_fault") == []
    watchdog.scenarios["n3"].rule("hang nvmlDeviceGetPowerUsage")
    watchdog.sees("n3", lambda r: r.hung_probes, 20, "a child that hangs")
    time.sleep(2)
    before = descriptors_and_threads(tree_of(watchdog.agents["n3"].pid))
    (incident,) = watchdog.wait_for(lambda: watchdog.incidents_of("gpu_fault"), 80, "the incident")
    assert [(c["node"], c["gpu_uuid"]) for c in incident["culprits"]] == [("n3", None)]
    assert "driver on n3 has not answered" in incident["summary"]
    time.sleep(8)
    report = watchdog.last("n3")
    assert [each.probe for each in report.hung_probes] == ["nvml"]
    settles_at(watchdog.agents["n3"].pid, before)
    assert [gpu.uuid for gpu in report.gpus] == ["GPU-n3-0", "GPU-n3-1"]
    assert all("has not answered" in (gpu.error or "") for gpu in report.gpus)
    watchdog.scenarios["n3"].rule()
    watchdog.wait_for(lambda: not watchdog.incidents_of("gpu_fault"), 30, "the end of the incident")
    watchdog.sees("n3", is_quiet, 60, "a quiet report")


def once(watchdog: Live, node: str, *words: str, wrapper: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`slurm-watchdog agent --once` as a person starts it on a node, with half a minute for it."""
    environment = dict(watchdog.cluster.env) | {"SLURMD_NODENAME": node} | dict(watchdog.environment(node))
    argv = [*wrapper, str(COMMAND), "agent", "--once", "--config", str(watchdog.config_file), *words]
    done = watchdog.cluster.node_run(node, argv, timeout_s=30, check=False, env=environment, cwd="/")
    said = [line for line in done.stderr.splitlines() if "the old place is read" not in line]  # as the rig writes it
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout, "\n".join(said))


def test_once_prints_a_full_report_and_leaves_no_trace(cluster: Cluster, live: Callable[..., Live]) -> None:
    watchdog = live()
    job = submit(cluster)
    watchdog.sees("n1", of_step(job, SAVE_INTERVAL + 2), 60, "a checkpoint, and steps")
    pid = next(p.pid for p in ranks(watchdog.last("n1"), job) if p.local_rank == 1)
    watchdog.scenarios["n1"].change(1, processes=((pid, 1024**3),))
    files = {str(path) for place in (watchdog.directory, Path("/var/lib")) for path in place.rglob("*")}
    done = once(watchdog, "n1", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = report_of(done.stdout)
    assert [p.rank for p in ranks(report, job)] == [0, 1]
    assert report.events
    assert report.logs[0].offset
    assert [(m.mount, m.responding) for m in report.mounts] == [(str(cluster.shared), True)]
    assert [(c.job_id, c.layout, c.step is not None) for c in report.checkpoints] == [(job, "deepspeed", True)]
    assert [(g.uuid, g.pids) for g in report.gpus] == [("GPU-n1-0", ()), ("GPU-n1-1", (pid,))]
    assert (report.problems, report.hung_probes, report.gpu_holders) == ((), (), ())
    shown = once(watchdog, "n1")
    assert (shown.returncode, shown.stderr) == (0, "")
    for text in (
        "rank=0 local_rank=0 world_size=6",
        f"job-{job}.out",
        "GPU-n1-1",
        str(cluster.shared),
        "deepspeed",
        "checkpoint",
    ):
        assert text in shown.stdout
    time.sleep(0.5)
    found = [p for p in _pids("n1", cluster) if _comm(p).startswith(("slurm-watchdog", "swd"))]
    services = tree_of(watchdog.agents["n1"].pid)
    left = [p for p in found if p not in services and _comm(p)]
    assert (left, len(found) > 1) == ([], True), "no child of it lives on"
    new = {str(path) for place in (watchdog.directory, Path("/var/lib")) for path in place.rglob("*")} - files
    assert not [path for path in new if "journal" not in path]


def _pids(node: str, cluster: Cluster) -> list[int]:
    """Processes of a node, as the host numbers them."""
    return tree_of(cluster.init_pid(node)) + [
        pid
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
        if _namespace(pid) == _namespace(cluster.init_pid(node))
    ]


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def test_once_without_root_says_what_it_may_not_see_and_claims_nothing(
    cluster: Cluster, live: Callable[..., Live]
) -> None:
    watchdog = live()
    job = submit(cluster)
    watchdog.sees("n1", of_step(job, 2), 60, "steps")
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    if cluster.node_run("n1", [*nobody, str(COMMAND), "--help"], check=False, cwd="/").returncode != 0:
        pytest.skip("this interpreter lies where only root may look")
    done = once(watchdog, "n1", "--json", wrapper=nobody)
    assert done.returncode == 0, done.stderr
    report = report_of(done.stdout)
    assert {p.job_id for p in report.processes} == {job}, "Slurm's daemon names the job to everybody"
    assert ranks(report, job) == [], "whose ranks they are stands in their environment"
    problems = " ".join(report.problems)
    assert "may not be looked into (it takes CAP_SETUID and CAP_SYS_PTRACE)" in problems
    assert "/dev/kmsg cannot be read" in problems
    assert (report.hung_probes, report.gpu_holders) == ((), ())
    assert "Traceback" not in done.stderr
    shown = once(watchdog, "n1", wrapper=nobody)
    assert "problem: process:" in shown.stdout
    assert "No process of a Slurm job" not in shown.stdout


NAMED = "import ctypes, sys, time\nctypes.CDLL(None).prctl(15, bytes.fromhex(sys.argv[1]), 0, 0, 0)\ntime.sleep(600)"
NAMES = (b") R 1 1", b"\x1b[31mred\n", b"[bold]x[/]", b"\xff\xfe", b"a\nState:\tD", b"((((")


@alone
def test_whatever_a_job_calls_itself_and_its_logs_the_agent_sees_it_and_goes_on(tmp_path: Path) -> None:
    place = tmp_path / "logs"
    place.mkdir()
    os.mkfifo(place / "fifo.log")
    (place / "directory.log").mkdir()
    for name, target in (("loop.log", "loop.log"), ("dangling.log", "nowhere"), ("zero.log", "/dev/zero")):
        (place / name).symlink_to(target)
    (place / "good.log").write_text("iteration 5/ 10 | lm loss: 2.0\n")
    receiver = Receiver("7")
    paths = tuple(str(path) for path in sorted(place.iterdir()))
    receiver.reply = Reply(
        controller_id="t", watch=(JobWatch(job_id="7", restarts=0, uid=0, log_paths=paths),), closely=True
    )
    rank = {
        b"PATH": os.environb[b"PATH"],
        b"SLURM_JOB_ID": b"7",
        b"SLURM_STEP_ID": b"0",
        b"SLURM_NTASKS": b"9",
    }
    ballast = {b"BALLAST%d" % number: b"\xff\n" * 50_000 for number in range(10)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", NAMED, name.hex()], env=rank | ballast | {b"SLURM_PROCID": b"%d" % number}
        )
        for number, name in enumerate(NAMES)
    ]
    agent = AgentProcess(tmp_path, receiver, interval_s=0.5)
    try:
        pids = {process.pid for process in processes}
        until(lambda: receiver.reports and {p.pid for p in ranks(receiver.last(), "7")} == pids, 20, "all ranks")
        until(lambda: len(receiver.last().logs) == len(paths), 20, "all logs")
        until(lambda: all(row.error != "not read yet" for row in receiver.last().logs), 20, "all logs")
        began = time.monotonic()
        time.sleep(4)
        report = receiver.last()
        assert {p.rank: p.pid for p in ranks(report, "7")} == {n: p.pid for n, p in enumerate(processes)}
        assert {Path(row.path).name: row.error for row in report.logs if "link" not in (row.error or "")} == {
            "directory.log": "it is a directory, not a regular file",
            "fifo.log": "it is a FIFO, not a regular file",
            "zero.log": "it is a character device, not a regular file",
            "dangling.log": f"ENOENT: No such file or directory: '{place}/dangling.log'",
            "good.log": None,
        }
        assert all(process.blocked is None for process in report.processes)
        assert (report.problems, report.hung_probes) == ((), ())
        assert receiver.longest_gap_s(began) <= 1.0
        assert agent.end() == 0
    finally:
        agent.close()
        receiver.close()
        for process in processes:
            process.kill()
            process.wait(20)


COMPUTES = "import time\nwhile True:\n    sum(range(200_000))\n    time.sleep(0.05)\n"


@alone
def test_while_ranks_train_reports_are_small_and_one_that_is_stopped_is_reported_whole_at_once(tmp_path: Path) -> None:
    receiver = Receiver("7")
    receiver.reply = replace(receiver.reply, closely=False)
    rank = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}
    processes = [
        subprocess.Popen([sys.executable, "-c", COMPUTES], env={**rank, "SLURM_PROCID": str(number)})
        for number in range(4)
    ]
    agent = AgentProcess(tmp_path, receiver, interval_s=0.5)
    try:
        pids = {process.pid for process in processes}
        until(lambda: receiver.reports and {p.pid for p in ranks(receiver.last(), "7")} == pids, 20, "all ranks")
        until(lambda: all(report.same_as for _, report in receiver.reports[-6:]), 20, "small reports")
        met = len(receiver.reports)
        until(lambda: len(receiver.reports) >= met + 20, 20, "twenty more")
        steady = [report for _, report in receiver.reports[met:]]
        assert sum(not report.same_as for report in steady) <= 1, "but for the one of each 30 s"
        assert max(len(encode_report(report)) for report in steady if report.same_as) <= 250
        base = max(report.sequence for _, report in receiver.reports if not report.same_as)
        assert steady[-1].same_as == base
        stopped, at = processes[2], time.monotonic()
        stopped.send_signal(signal.SIGSTOP)
        until(lambda: not receiver.last().same_as, 5, "a whole report")
        whole = next(report for came, report in receiver.reports if came > at and not report.same_as)
        assert receiver.reports[-1][0] - at < 1.5
        assert [row.pid for row in ranks(whole, "7") if row.state == "T"] == [stopped.pid]
        met = len(receiver.reports)
        until(lambda: len(receiver.reports) >= met + 4, 10, "four more")
        assert not any(report.same_as for _, report in receiver.reports[met:]), "as long as it is stopped"
        stopped.send_signal(signal.SIGCONT)
        until(lambda: receiver.last().same_as, 5, "a small report")
        again = [report for _, report in receiver.reports if not report.same_as][-1]
        assert {row.state for row in ranks(again, "7")} <= {"R", "S"}
        processes[3].kill()
        processes[3].wait()
        until(lambda: len(ranks(receiver.last(), "7")) == 3, 5, "a rank less, at once")
    finally:
        agent.close()
        receiver.close()
        for process in processes:
            process.kill()
            process.wait()
