"""Real pynvml and the real collector on a stand-in for NVIDIA's library: values, errors, slow calls, calls
that never return."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm_watchdog.agent.gpu import nvml
from slurm_watchdog.agent.gpu import reader as gpu_reader
from slurm_watchdog.agent.metrics import FILE
from slurm_watchdog.base import clock
from slurm_watchdog.model.observations import Gpu
from slurm_watchdog.model.report import Report
from tests.builders.report_json import report_of
from tests.integration.gpu_node import SHORT_DEADLINE_S, Node, read
from tests.rig.standin_nvml import standin
from tests.rig.standin_nvml.standin import GPU_IS_LOST, NOT_SUPPORTED, TWO, UNKNOWN, Scenario

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler: apt-get install gcc libc6-dev")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    return Scenario(tmp_path / "scenario")


@pytest.fixture
def node(library: Path, scenario: Scenario) -> Iterator[Node]:
    node = Node(library, scenario)
    yield node
    node.probes.close()


def test_every_value_comes_through_and_the_four_names_are_not_confused(node: Node, scenario: Scenario) -> None:
    scenario.change(0, processes=((4711, 1024), (4712, 2048)), throttle=0x44)
    node.until(read)
    first, second = node.tick()
    assert first == Gpu(
        uuid="GPU-aaaa",
        index=0,
        pci_bus_id="0000:c1:00.0",
        minor=5,
        name="NVIDIA H100 80GB HBM3",
        utilization_ratio=0.97,
        sm_clock_hz=1.98e9,
        memory_clock_hz=2.619e9,
        power_w=653.25,
        temperature_c=61.0,
        memory_used_bytes=40 * 1024**3,
        memory_total_bytes=80 * 1024**3,
        throttle=("sw_power_cap", "hw_thermal_slowdown"),
        pids=(4711, 4712),
        process_memory_bytes=(1024, 2048),
    )
    assert (second.uuid, second.index, second.pci_bus_id, second.minor) == ("GPU-bbbb", 1, "0000:07:00.0", 2)
    assert (second.utilization_ratio, second.power_w, second.throttle, second.pids) == (0.0, 71.0, (), ())


def test_a_change_is_seen_in_the_next_tick(node: Node, scenario: Scenario) -> None:
    node.until(read)
    scenario.change(1, utilization=100, sm_clock=345)
    assert [row.utilization_ratio for row in node.tick()] == [0.97, 1.0]
    assert node.tick()[1].sm_clock_hz == 3.45e8


def test_what_changes_slowly_is_read_of_every_other_gpu_in_turn(node: Node, scenario: Scenario) -> None:
    node.until(read)
    scenario.change(0, temperature=71)
    scenario.change(1, temperature=72)
    first = [row.temperature_c for row in node.tick()]
    second = [row.temperature_c for row in node.tick()]
    assert sum(was == now for was, now in zip(first, (71.0, 72.0), strict=True)) == 1
    assert second == [71.0, 72.0]


def test_processes_are_listed_once_a_minute_or_when_asked(node: Node, scenario: Scenario) -> None:
    node.until(read)
    scenario.change(0, processes=((7, 1),))
    assert node.tick()[0].pids == ()
    assert node.tick(later_s=59.0)[0].pids == ()
    assert node.tick(later_s=1.0)[0].pids == (7,)
    scenario.change(0, processes=((8, 1),))
    assert node.tick()[0].pids == (7,)
    node.gpus.want_processes()
    assert node.tick()[0].pids == (8,)


def test_a_value_that_a_gpu_does_not_have_is_no_error(node: Node, scenario: Scenario) -> None:
    scenario.rule(f"error nvmlDeviceGetPowerUsage {NOT_SUPPORTED}", f"error nvmlDeviceGetMinorNumber {NOT_SUPPORTED}")
    rows = node.until(read)
    assert [(row.power_w, row.minor, row.temperature_c) for row in rows] == [(None, None, 61.0)] * 2


def test_one_call_that_fails_takes_one_value_and_is_named(node: Node, scenario: Scenario) -> None:
    scenario.change(0, rules=(f"error nvmlDeviceGetMemoryInfo {UNKNOWN}",))
    first, second = node.until(bool)
    assert first.memory_used_bytes is None
    assert str(first.error).startswith("memory_used_bytes: NVML_ERROR_UNKNOWN")
    assert (first.utilization_ratio, second.memory_used_bytes, second.error) == (0.97, 40 * 1024**3, None)


def test_an_older_driver_without_the_newer_functions_is_read_too(node: Node, scenario: Scenario) -> None:
    scenario.rule(
        "error nvmlDeviceGetComputeRunningProcesses_v3 13",
        "error nvmlDeviceGetCurrentClocksEventReasons 13",
        "error nvmlDeviceGetTemperatureV 13",
    )
    scenario.change(0, processes=((4711, 1),), throttle=0x8)
    first = node.until(read)[0]
    assert (first.pids, first.throttle, first.temperature_c) == ((4711,), ("hw_slowdown",), 61.0)


def test_a_gpu_that_fell_off_the_bus_is_a_row_with_an_error(node: Node, scenario: Scenario) -> None:
    scenario.change(0, processes=((4711, 1),))
    node.until(read)
    scenario.change(0, rules=("lost",))
    first, second = node.tick()
    assert (first.uuid, first.pci_bus_id, first.minor) == ("GPU-aaaa", "0000:c1:00.0", 5)
    assert first.error == "NVML_ERROR_GPU_IS_LOST: GPU is lost"
    assert (first.utilization_ratio, first.power_w, first.throttle, first.pids) == (None, None, None, None)
    assert (second.error, second.utilization_ratio) == (None, 0.0)
    # Minutes later a new session, in which it can't even say who it is.
    for later_s in (nvml.RENEW_S, 0.0):
        assert [(row.uuid, row.error is None) for row in node.tick(later_s)] == [
            ("GPU-aaaa", False),
            ("GPU-bbbb", True),
        ]
    scenario.change(0, rules=())
    assert node.until(read)[0].uuid == "GPU-aaaa"


def test_a_gpu_that_was_lost_before_the_agent_came_has_no_name(node: Node, scenario: Scenario) -> None:
    scenario.change(1, rules=(f"error * {GPU_IS_LOST}",))
    rows = node.until(bool)
    assert [(row.uuid, row.index, row.error is None) for row in rows] == [
        ("GPU-aaaa", 0, True),
        ("", 1, False),
    ]


def test_a_gpu_that_is_not_listed_any_more_is_missed_by_its_uuid(node: Node, scenario: Scenario) -> None:
    node.until(read)
    scenario.only(TWO[1:])
    rows = node.tick()
    assert [(row.uuid, row.index) for row in rows] == [("GPU-bbbb", 0), ("GPU-aaaa", 0)]
    assert [row.error for row in rows] == [None, "NVML does not list this GPU any more"]


def test_a_slow_call_delays_the_answer_and_not_the_tick(node: Node, scenario: Scenario) -> None:
    node.until(read)
    node.impatient()
    scenario.rule("delay nvmlDeviceGetUtilizationRates 0.2")
    began = clock.monotonic()
    rows = node.tick()
    assert clock.monotonic() - began < 0.4
    node.deadline_s = 20.0
    assert [row.utilization_ratio for row in rows] == [None, None]
    assert all("has not answered for" in str(row.error) for row in rows)
    assert node.until(read)[0].utilization_ratio == 0.97


def test_a_call_that_never_returns_leaves_one_child_behind_and_no_more(node: Node, scenario: Scenario) -> None:
    node.until(read)
    node.impatient()
    scenario.change(1, rules=("hang nvmlDeviceGetUtilizationRates",))
    node.until(lambda rows: bool(node.probes.hung(clock.monotonic())))
    for _ in range(5):
        began = clock.monotonic()
        rows = node.tick()
        assert clock.monotonic() - began < SHORT_DEADLINE_S
        assert [row.uuid for row in rows] == ["GPU-aaaa", "GPU-bbbb"]
        assert all(row.utilization_ratio is None and "has not answered" in str(row.error) for row in rows)
    assert [hung.probe for hung in node.probes.hung(clock.monotonic())] == ["nvml"] == node.probes.names()
    scenario.change(1, rules=())
    node.deadline_s = 20.0
    node.until(read)
    assert node.probes.hung(clock.monotonic()) == ()


def test_a_driver_that_goes_away_is_a_problem_and_its_return_is_seen(node: Node, scenario: Scenario) -> None:
    node.until(read)
    scenario.rule("error * 18")
    rows = node.until(lambda rows: node.gpus.problem is not None)
    assert node.gpus.problem is not None
    assert "LIB_RM_VERSION_MISMATCH" in node.gpus.problem
    assert [(row.uuid, row.utilization_ratio, row.error) for row in rows] == [
        ("GPU-aaaa", None, node.gpus.problem),
        ("GPU-bbbb", None, node.gpus.problem),
    ]
    scenario.rule()
    node.tick()
    assert node.gpus.problem is not None, "it is not asked in every tick"
    node.until(read, later_s=gpu_reader.RETRY_S)
    assert node.gpus.problem is None


def test_a_node_without_driver_is_asked_seldom_and_is_no_problem(
    node: Node, scenario: Scenario, caplog: pytest.LogCaptureFixture
) -> None:
    scenario.path.unlink()
    for _ in range(40):
        assert node.tick() == ()
        time.sleep(0.02)
    assert node.gpus.problem is None
    assert node.probes.names() == []
    assert [record.levelname for record in caplog.records] == ["INFO"]
    scenario.write()
    assert node.until(read, later_s=gpu_reader.RETRY_MISSING_S)[0].uuid == "GPU-aaaa"


# ------------------------------------------------------------------------------------------ the whole agent


class Watcher:
    """The agent as a process of its own, and the reports that it writes."""

    def __init__(self, directory: Path, environment: dict[str, str]):
        config = directory / "config.yaml"
        config.write_text(
            f"agent: {{node_name: n1, probe_deadline: 1s, interval: 300ms, metrics_directory: {directory}/metrics,"
            f" state_directory: {directory}/state, controller_url: 'http://127.0.0.1:9', give_up_after: 1h}}\n"
        )
        self.file = directory / "metrics" / FILE
        start = "from slurm_watchdog.cli.main import main; main()"
        command = [sys.executable, "-c", start, "agent", "--config", str(config)]
        self.once = [*command, "--once"]
        self.environment = {**os.environ, **environment}
        self.process = subprocess.Popen(
            [*command, "--json"], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.sequence = 0

    def report(self) -> Report:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 20)[0], "the agent's ticks have stopped"
        report = report_of(self.process.stdout.readline())
        assert report.sequence == self.sequence + 1
        self.sequence = report.sequence
        return report

    def until(self, condition: Callable[[Report], bool]) -> Report:
        for _ in range(40):
            report = self.report()
            if condition(report):
                return report
        pytest.fail(f"not within 40 reports; the last: {report}")

    def metrics(self, *wanted: str) -> str:
        """The agent's metrics as soon as all of `wanted` are there: they are written now and then."""
        text = ""
        for _ in range(100):
            text = self.file.read_text() if self.file.exists() else ""
            if all(line in text for line in wanted):
                return text
            self.report()
        pytest.fail(f"{wanted} is not in:\n{text}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait(20)


@pytest.fixture
def watcher(library: Path, scenario: Scenario, tmp_path: Path) -> Iterator[Watcher]:
    watcher = Watcher(tmp_path, {**scenario.environment, "LD_LIBRARY_PATH": str(library.parent)})
    yield watcher
    watcher.close()


def nvml_hangs(report: Report) -> bool:
    return "nvml" in {hung.probe for hung in report.hung_probes}


def test_the_agent_reports_gpus_and_goes_on_while_nvml_hangs(watcher: Watcher, scenario: Scenario) -> None:
    report = watcher.until(lambda report: read(report.gpus))
    assert [(gpu.uuid, gpu.minor) for gpu in report.gpus] == [("GPU-aaaa", 5), ("GPU-bbbb", 2)]
    assert report.problems == ()
    watcher.metrics(
        'slurm_watchdog_gpu_utilization_ratio{gpu_uuid="GPU-aaaa",gpu="0"} 0.97',
        'slurm_watchdog_gpu_sm_clock_hertz{gpu_uuid="GPU-bbbb",gpu="1"} 1980000000',
        'slurm_watchdog_gpu_power_watts{gpu_uuid="GPU-bbbb",gpu="1"} 71',
    )
    scenario.rule("hang nvmlDeviceGetPowerUsage")
    watcher.until(nvml_hangs)
    began = clock.monotonic()
    for _ in range(10):
        report = watcher.report()
    assert clock.monotonic() - began < 10, "ten ticks of 0.3 s"
    assert nvml_hangs(report)
    assert [gpu.power_w for gpu in report.gpus] == [None, None]
    assert "slurm_watchdog_gpu_power_watts{" not in watcher.metrics('slurm_watchdog_probe_hung{probe="nvml"}')
    scenario.rule()
    watcher.until(lambda report: read(report.gpus) and not nvml_hangs(report))


def test_once_shows_the_gpus(watcher: Watcher, scenario: Scenario) -> None:
    scenario.change(1, rules=("lost",))
    scenario.rule("delay nvmlInitWithFlags 0.5")
    environment = {**watcher.environment, "COLUMNS": "200"}
    shown = subprocess.run(watcher.once, env=environment, capture_output=True, text=True, timeout=180)
    assert shown.returncode == 0, shown.stderr
    for text in ("GPU-aaaa", "0000:c1:00.0", "utilization_ratio=0.97", "power_w=653.25", "GPU is lost"):
        assert text in shown.stdout
    done = subprocess.run([*watcher.once, "--json"], env=environment, capture_output=True, text=True, timeout=180)
    assert json.loads(done.stdout)["gpus"][0]["uuid"] == "GPU-aaaa"
