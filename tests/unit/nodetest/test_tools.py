"""fio and dcgmi, where a node has them: what they print becomes figures and findings; that they fail becomes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_watchdog.knowledge.node_figures import KINDS
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.nodetest.judge import judge_nodes
from slurm_watchdog.nodetest.probes.fio import parse_fio
from slurm_watchdog.nodetest.probes.gpu_dcgm import parse_dcgm
from slurm_watchdog.nodetest.probes.gpu_nccl import parse_nccl
from slurm_watchdog.nodetest.probes.pair import parse_iperf3
from slurm_watchdog.nodetest.program import command
from slurm_watchdog.nodetest.results import Fact, Measured, measured, parse_line
from tests.builders.measured_nodes import node, nodes, problem

CAPTURES = Path(__file__).parents[2] / "captures" / "nodetest"
CARDS: dict[str, Fact] = {
    "gpus": 2,
    "gpu_0": {"uuid": "GPU-0", "serial": "1650123000002"},  # DCGM's GPU 1
    "gpu_1": {"uuid": "GPU-1", "serial": "1650123000001"},
}


def asked(phase: dict[str, object], path: Path, **more: str) -> Measured:
    """As a node answers one phase, with `path` before its programs."""
    question = {"phases": [{"limit_s": 20, "seconds": 0.4, "subject": "", **phase}]}
    done = subprocess.run(
        command(sys.executable, question), capture_output=True, text=True, timeout=60, check=True, cwd="/",
        env={"SLURMD_NODENAME": "n1", "PATH": f"{path}:{os.environ['PATH']}", **more},
    )  # fmt: skip
    return measured("n1", [line for text in done.stdout.splitlines() if (line := parse_line(text)) is not None])


def program(directory: Path, name: str, script: str) -> Path:
    """An executable in the place of the tool's."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{script}\n")
    (directory / name).chmod(0o755)
    return directory


# -- fio


def test_of_what_fio_prints_rates_and_random_reads_are_figures() -> None:
    found = parse_fio(f"fio: a warning\n{(CAPTURES / 'fio-3.33.json').read_text()}", "disk")
    assert {name: round(value[0]) for name, value in found["figures"].items()} == {
        "disk_fio_write": 4772, "disk_fio_read": 1347, "disk_fio_random": 47156,
    }  # fmt: skip
    assert set(found["figures"]) <= set(KINDS)
    assert {name.replace("disk", "mount") for name in found["figures"]} <= set(KINDS)
    assert found["facts"] == {"version": "fio-3.33"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not understood"),
        ("{}", "not understood"),
        ('{"jobs": [{"jobname": "write", "error": 22}]}', "fio's write ended with error 22"),  # no O_DIRECT there
        ('{"jobs": [{"jobname": "write", "error": 0}]}', "not understood"),
    ],
)
def test_what_fio_cannot_do_is_skipped(text: str, why: str) -> None:
    found = parse_fio(text, "disk")
    assert found["figures"] == {}
    assert why in found["facts"]["skipped"]


@pytest.mark.skipif(shutil.which("fio") is None, reason="apt-get install fio")
def test_the_real_fio_measures_a_directory_and_leaves_no_file(tmp_path: Path) -> None:
    found = asked({"phase": "fio", "name": "disk", "directory": str(tmp_path), "subject": str(tmp_path)}, tmp_path)
    assert found.problems == ()
    if "skipped" not in found.facts[f"fio {tmp_path}"]:  # a filesystem without O_DIRECT
        assert set(found.figures) == {f"disk_fio_{name} {tmp_path}" for name in ("write", "read", "random")}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'fio: engine psync not loadable' >&2; exit 1", "fio ended with 1: fio: engine psync not loadable"),
        ("exec sleep 60", "fio did not end in time"),
    ],
)
def test_a_fio_that_fails_or_hangs_is_no_problem_of_the_node(tmp_path: Path, script: str, why: str) -> None:
    place = program(tmp_path / "bin", "fio", script)
    found = asked({"phase": "fio", "name": "disk", "directory": str(tmp_path), "seconds": -9.0}, place)
    assert (found.problems, found.facts["fio"]) == ((), {"skipped": why})
    assert [each.name for each in tmp_path.iterdir()] == ["bin"]


def test_without_a_directory_fio_is_skipped_and_the_disks_own_phase_judges(tmp_path: Path) -> None:
    place = program(tmp_path, "fio", "exit 1")
    found = asked({"phase": "fio", "name": "disk", "directory": str(tmp_path / "absent")}, place)
    assert found.facts["fio"] == {"skipped": "no file can be made there: No such file or directory"}


def test_where_a_directorys_own_phase_hangs_fio_is_not_begun(tmp_path: Path) -> None:
    hangs = {"phase": "site_check", "limit_s": 0.3, "command": "sleep 60", "subject": "/s"}
    phases = [
        hangs,
        {"phase": "fio", "limit_s": 20, "seconds": 0.4, "name": "mount", "directory": "/s", "subject": "/s"},
    ]
    done = subprocess.run(
        command(sys.executable, {"phases": phases}), capture_output=True, text=True, timeout=60, check=True, cwd="/",
        env={"SLURMD_NODENAME": "n1", "PATH": os.environ["PATH"]},
    )  # fmt: skip
    found = measured("n1", [line for text in done.stdout.splitlines() if (line := parse_line(text)) is not None])
    assert [each.phase for each in found.problems] == ["site_check"]
    assert found.facts["fio /s"] == {"skipped": "the phase before it hangs there"}


def test_a_slow_disk_shows_in_fios_figures_as_in_ours() -> None:
    slow = {"disk_fio_read /tmp": 100.0}
    well = [node(f"n{at}", figures={"disk_fio_read /tmp": 2000.0 + at}) for at in range(2, 7)]
    (bad,) = [each for each in judge_nodes([node("n1", figures=slow), *well], {}, {}) if each.truth is Truth.BAD]
    assert bad.faults[0].place == "disk:/tmp"
    assert "read rate by fio of /tmp is 100 MB/s" in bad.reasons[0]


def test_a_tools_phase_that_hangs_is_a_doubt_and_no_verdict() -> None:
    for phase in ("fio", "gpu_dcgm", "gpu_nccl"):
        for state in ("late", "failed"):
            found = judge_nodes(nodes(5, node("n1", problems=(problem(phase, state),))), {}, {})
            assert [each.truth for each in found] == [Truth.UNKNOWN, *[Truth.OK] * 4]


# -- iperf3


def test_what_arrived_by_all_streams_of_iperf3_is_its_figure() -> None:
    assert round(parse_iperf3((CAPTURES / "iperf3-3.12.json").read_text()) or 0, 1) == 17.9


@pytest.mark.parametrize(
    "text", ["", "[]", '{"error": "unable to connect to server"}', '{"end": {"sum_received": {}}}']
)
def test_what_is_no_result_of_iperf3_is_none(text: str) -> None:
    assert parse_iperf3(text) is None


# -- the site's check


@pytest.mark.parametrize(
    ("check", "state", "words"),
    [
        ("true", Truth.OK, ""),
        ("echo GPU 3 is slow; exit 3", Truth.BAD, "it ended with 3: GPU 3 is slow"),
        ("no-such-program --all", Truth.UNKNOWN, "site_check did not run: it ended with 127"),
        ("/etc/passwd", Truth.UNKNOWN, "site_check did not run: it ended with 126"),
    ],
)
def test_a_check_that_cannot_run_is_a_doubt_and_one_that_fails_a_verdict(
    tmp_path: Path, check: str, state: Truth, words: str
) -> None:
    found = asked({"phase": "site_check", "command": check}, tmp_path)
    (verdict,) = judge_nodes([node("n1", found.problems, facts=found.facts)], {"cpu_core": 1.0}, {})
    assert verdict.truth is state
    assert words in " ".join(verdict.reasons)


# -- nccl-tests: as src/util.cu prints it, without and with a bandwidth that was asked for (NCCL_TESTS_MIN_BW)

OLD = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 361.234 \n#\n"
NEW = "#\n# Out of bounds values : 12 FAILED\n# Avg bus bandwidth    : 4.1e+02 OK\n# Collective test concluded: all_reduce_perf\n"


def test_the_average_bus_bandwidth_is_the_figure_and_wrong_values_are_a_fact() -> None:
    assert parse_nccl(OLD) == {"figures": {"gpu_nccl": [361.234, 0.0, 1, False]}, "facts": {"wrong": 0}}
    assert parse_nccl(NEW) == {"figures": {"gpu_nccl": [410.0, 0.0, 1, False]}, "facts": {"wrong": 12}}
    assert parse_nccl("") is None
    assert parse_nccl("# Avg bus bandwidth    : nan\n# Out of bounds values : 0 OK") is None
    assert "gpu_nccl" in KINDS


def test_an_all_reduce_runs_over_the_gpus_of_the_job_and_its_failure_is_no_problem(tmp_path: Path) -> None:
    script = f"[ \"$*\" = '-b 256M -e 256M -w 5 -n 50 -g 8' ] && printf '{OLD}' || {{ echo no CUDA >&2; exit 2; }}"
    place = program(tmp_path, "all_reduce_perf", script)
    found = asked({"phase": "gpu_nccl", "nccl_s": 10.0}, place, SLURM_GPUS_ON_NODE="8")
    assert (found.figures, found.facts["gpu_nccl"]) == ({"gpu_nccl": 361.234}, {"wrong": 0, "gpus": 8})
    failed = asked({"phase": "gpu_nccl", "nccl_s": 10.0}, place, SLURM_GPUS_ON_NODE="4")
    assert failed.problems == ()
    assert failed.facts["gpu_nccl"] == {"skipped": "all_reduce_perf ended with 2: no CUDA"}
    assert asked({"phase": "gpu_nccl", "nccl_s": 10.0}, place, SLURM_GPUS_ON_NODE="1").facts["gpu_nccl"] == {
        "skipped": "fewer than two GPUs are known"
    }


def test_a_slow_all_reduce_is_bad_beside_its_peers_and_wrong_values_are_a_doubt() -> None:
    well = [node(f"n{at}", figures={"gpu_nccl": 360.0 + at}) for at in range(2, 7)]
    slow = judge_nodes([node("n1", figures={"gpu_nccl": 180.0}), *well], {}, {})[0]
    assert (slow.truth, slow.faults[0].place) == (Truth.BAD, "gpu")
    wrong = judge_nodes([node("n1", facts={"gpu_nccl": {"wrong": 12}}), *well], {}, {})[0]
    assert wrong.truth is Truth.UNKNOWN
    assert "12 values" in " ".join(wrong.reasons)


# -- dcgmi


def with_dcgm(name: str, facts: dict[str, Fact] | None) -> Measured:
    return node(name, facts={"gpu_health before": CARDS, **({} if facts is None else {"gpu_dcgm": facts})})


def recorded(name: str) -> dict[str, Fact]:
    found = parse_dcgm(f"warning: stale\n{(CAPTURES / name).read_text()}")
    assert found is not None
    return found


def test_broken_hardware_that_dcgm_names_makes_the_card_with_that_serial_bad() -> None:
    facts = recorded("dcgmi-4.json")
    assert (facts["tests"], facts["failed"]) == (1, 1)
    (found,) = judge_nodes([with_dcgm("n1", facts)], {}, {})
    assert found.truth is Truth.BAD
    (fault,) = found.faults
    assert fault.place == "GPU-0"  # by serial: DCGM's numbers are its own
    assert fault.what == "GPU 0: dcgmi's test software fails: Detected a volatile double-bit ECC error on GPU 1."


def test_a_failure_without_a_severity_is_a_doubt_only_where_the_peers_pass() -> None:
    facts = recorded("dcgmi-3.json")
    assert (facts["tests"], facts["failed"]) == (4, 2)
    passed: dict[str, Fact] = {"tests": 4, "failed": 0}
    alone = judge_nodes([with_dcgm("n1", facts), *(with_dcgm(f"n{at}", passed) for at in range(2, 7))], {}, {})
    assert [each.truth for each in alone] == [Truth.UNKNOWN, *[Truth.OK] * 5]
    assert "dcgmi's test Page Retirement/Row Remap fails: GPU 1 had uncorrectable" in " ".join(alone[0].reasons)
    everywhere = judge_nodes([with_dcgm(f"n{at}", facts) for at in range(6)], {}, {})
    assert {each.truth for each in everywhere} == {Truth.OK}
    few = judge_nodes([with_dcgm("n1", facts), *(with_dcgm(f"n{at}", None) for at in range(2, 7))], {}, {})
    assert {each.truth for each in few} == {Truth.OK}


def test_a_configuration_that_dcgm_dislikes_is_no_broken_hardware() -> None:
    answer = json.loads((CAPTURES / "dcgmi-4.json").read_text())
    result = answer["DCGM Diagnostic"]["test_categories"][0]["tests"][0]["results"][1]
    grave = result["warnings"].pop(0)
    facts = parse_dcgm(json.dumps(answer))
    assert facts is not None
    assert judge_nodes([with_dcgm("n1", facts)], {"cpu_core": 1.0}, {})[0].truth is Truth.OK
    result["warnings"].append(grave)  # the second of two counts as well
    both = parse_dcgm(json.dumps(answer))
    assert both is not None
    assert judge_nodes([with_dcgm("n1", both)], {}, {})[0].truth is Truth.BAD


@pytest.mark.parametrize(
    "text",
    [
        "", "Error: unable to establish a connection to the specified host: localhost", "{}", "[]", '{"DCGM Diagnostic": 3}',
        '{"DCGM Diagnostic": {"runtime_error": "another diagnostic is running"}}', '{"DCGM Diagnostic": {}}',
    ],
)  # fmt: skip
def test_what_is_no_result_of_dcgm_is_none(text: str) -> None:
    assert parse_dcgm(text) is None


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'Error: unable to establish a connection'; exit 1", "dcgmi ended with 1: Error: unable to establish a"),
        ("exec sleep 60", "dcgmi did not end within 0.5 s"),
    ],
)
def test_a_dcgmi_without_its_service_is_no_problem_of_the_node(tmp_path: Path, script: str, why: str) -> None:
    found = asked({"phase": "gpu_dcgm", "dcgm_s": 0.5}, program(tmp_path, "dcgmi", script))
    assert found.problems == ()
    assert str(found.facts["gpu_dcgm"]["skipped"]).startswith(why)


def test_dcgmi_is_asked_for_its_quick_check_as_json(tmp_path: Path) -> None:
    place = program(tmp_path, "dcgmi", f'[ "$*" = "diag -r 1 -j" ] && cat {CAPTURES / "dcgmi-4.json"}; exit 226')
    found = asked({"phase": "gpu_dcgm", "dcgm_s": 10.0}, place)
    assert found.facts["gpu_dcgm"]["failed"] == 1
