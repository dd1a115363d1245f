"""What GPUs do under load: the program that torch runs, here with a stand-in for it, and which card a figure is of."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm_watchdog.knowledge.node_figures import KINDS
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.nodetest.judge import judge_nodes
from slurm_watchdog.nodetest.probes import torch_program
from slurm_watchdog.nodetest.probes.gpu_rate import ClockLooks, measure_gpu_rate, steadiness, summed_up
from slurm_watchdog.nodetest.program import command
from slurm_watchdog.nodetest.results import Fact, Measured, measured, parse_line, place_of
from tests.builders.fake_torch import install
from tests.builders.measured_nodes import node

A, B, C = "GPU-aaaaaaaa-0000-4000-8000-000000000000", "GPU-bbbbbbbb-0000-4000-8000-000000000000", "GPU-cccc"


def asked(environment: dict[str, str]) -> Measured:
    """As a node answers, with its gpu_rate alone."""
    question = {"phases": [{"phase": "gpu_rate", "limit_s": 60, "seconds": 0.2, "python": sys.executable}]}
    done = subprocess.run(
        command(sys.executable, question), capture_output=True, text=True, timeout=120, check=True, cwd="/",
        env={"SLURMD_NODENAME": "n1", "PATH": os.environ["PATH"], **environment},
    )  # fmt: skip
    return measured("n1", [line for text in done.stdout.splitlines() if (line := parse_line(text)) is not None])


def test_each_gpu_has_rates_of_matrices_memory_pcie_and_neighbour_and_its_uuid(tmp_path: Path) -> None:
    found = asked(install(tmp_path, [A.removeprefix("GPU-"), B]))
    assert found.problems == ()
    names = {"gpu_matmul", "gpu_steadiness", "gpu_memory", "gpu_h2d", "gpu_d2h", "gpu_p2p"}
    assert set(found.figures) == {f"{name}/{index}" for name in names for index in (0, 1)}
    assert 50 < found.figures["gpu_steadiness/0"] <= 100
    assert found.facts["gpu_rate"] == {"gpus": 2, "gpu_0": {"uuid": A}, "gpu_1": {"uuid": B}}


def test_one_gpu_has_no_neighbour_and_memory_that_cannot_be_pinned_no_rate_of_pcie(tmp_path: Path) -> None:
    found = asked(install(tmp_path, [A], FAKE_TORCH_NO_PIN="1"))
    assert found.problems == ()
    assert set(found.figures) == {"gpu_matmul/0", "gpu_steadiness/0", "gpu_memory/0"}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"FAKE_TORCH_BROKEN": "1"}, "torch cannot be imported: libcudnn.so.9: cannot open shared object file"),
        ({"FAKE_TORCH_CUDA": ""}, "this torch is built for the CPU alone"),
    ],
)
def test_without_torch_for_gpus_nothing_is_measured_and_nothing_is_wrong(
    tmp_path: Path, more: dict[str, str], why: str
) -> None:
    found = asked(install(tmp_path, [A], **more))
    assert (found.problems, found.figures, found.facts["gpu_rate"]) == ((), {}, {"skipped": why})


def test_a_python_that_is_not_installed_is_no_problem_of_the_node_and_one_that_fails_is(tmp_path: Path) -> None:
    absent = measure_gpu_rate({"python": str(tmp_path / "python"), "seconds": 0.2})
    assert absent["facts"]["skipped"].endswith("cannot be started: No such file or directory")
    (problem,) = asked(install(tmp_path, [A], FAKE_TORCH_CARD="broken")).problems
    assert "uncorrectable ECC error" in problem.said


class Driver:
    """libcuda with one GPU."""

    def cuDeviceGet(self, device: Any, index: int) -> int:
        return int(index > 0)

    def cuDeviceGetUuid(self, buffer: Any, device: Any) -> int:
        ctypes.memmove(buffer, bytes.fromhex("aaaaaaaa000040008000000000000000"), 16)
        return 0


@pytest.mark.parametrize(("index", "library", "uuid"), [(0, Driver(), A), (1, Driver(), ""), (0, None, "")])
def test_where_torch_has_no_uuid_the_driver_gives_it(index: int, library: Any, uuid: str) -> None:
    assert torch_program.driver_uuid(index, library) == uuid


def lines(rate: dict[str, Any], *cards: dict[str, Any]) -> Measured:
    """NVML shows these cards, and torch's program printed that."""
    health = {"gpus": len(cards), **{f"gpu_{index}": card for index, card in enumerate(cards)}}
    said = [{"phase": "gpu_health", "subject": "before", "facts": health}, {"phase": "gpu_rate", **rate}]
    return measured("n1", [
        line for each in said
        if (line := parse_line("slurm-watchdog-test " + json.dumps({"node": "n1", "state": "ok", "at": 1.0, **each})))
    ])  # fmt: skip


def rate_of(*cards: dict[str, str]) -> dict[str, Any]:
    """GPU N of torch has 100 + N TFLOP/s."""
    return {
        "figures": {f"gpu_matmul/{index}": [100.0 + index, 0.0, 5, False] for index in range(len(cards))},
        "facts": {"gpus": len(cards), **{f"gpu_{index}": card for index, card in enumerate(cards)}},
    }


def test_a_figure_is_of_the_card_with_the_same_uuid_in_whatever_order_torch_numbers_them() -> None:
    found = lines(rate_of({"uuid": C}, {"uuid": A}), {"uuid": A}, {"uuid": B}, {"uuid": C})
    assert found.figures == {"gpu_matmul/2": 100.0, "gpu_matmul/0": 101.0}
    assert place_of("gpu_matmul", "2", found.facts) == C


def test_without_a_uuid_the_pci_address_tells_and_without_both_no_card_of_nvml_is_named() -> None:
    cards = ({"uuid": A, "bus": "00000000:3B:00.0"}, {"uuid": B, "bus": "00000000:5E:00.0"})
    found = lines(rate_of({"bus": "00000000:5e:00.0"}, {}), *cards)
    assert found.figures == {"gpu_matmul/1": 100.0, "gpu_matmul/cuda:1": 101.0}
    assert place_of("gpu_matmul", "cuda:1", found.facts) == "gpu:cuda:1"
    assert lines(rate_of({}), {"uuid": A}).figures == {"gpu_matmul/0": 100.0}  # there is only one
    assert place_of("gpu_matmul", "0", lines(rate_of({"uuid": B})).facts) == B  # NVML is not there


def test_the_slowest_tenth_counts_and_a_single_slow_repetition_of_ten_does_not() -> None:
    assert steadiness([100.0] * 9 + [10.0])[0] == 100.0
    assert steadiness([100.0] * 8 + [60.0, 70.0])[0] == 70.0
    assert steadiness([0.0])[0] == 0.0


class Nvml:
    """Two cards; the second one is slowed down by heat, and the third has fallen off the bus."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 2:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return (A, B)[handle].encode()

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 1980 - 600 * handle

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x40 * handle


def test_the_clock_counts_during_the_load_of_that_card_alone() -> None:
    looks = ClockLooks(Nvml())
    looks.look()
    assert [each[1:] for each in looks.seen] == [(A, 1980, False), (B, 1380, True)]
    seen = [(1.0, A, 300, False), (15.0, A, 1980, False), (15.0, B, 210, True), (25.0, B, 1380, True)]
    loads = {"0": [10.0, 20.0], "1": [20.0, 30.0]}
    found = summed_up({"rates": {}, "cards": {"0": {"uuid": A}, "1": {"uuid": B}}, "loads": loads}, seen)
    assert {name: value[0] for name, value in found["figures"].items()} == {"gpu_clock/0": 1980, "gpu_clock/1": 1380}
    assert found["facts"]["gpu_1"] == {"uuid": B, "slowed_share": 1.0}
    assert ClockLooks(None).look() is None


def eight(value: float, odd: float | None = None) -> dict[str, float]:
    return {f"gpu_p2p/{at}": odd if odd is not None and at == 3 else value for at in range(8)}


def test_what_depends_on_the_slot_is_compared_with_the_same_slot_of_other_nodes_only() -> None:
    alike = [node(f"n{at}", figures=eight(300.0, 40.0)) for at in range(1, 6)]
    assert {each.truth for each in judge_nodes(alike, {}, {})} == {Truth.OK}  # the slot that crosses the sockets
    broken = node("n3", figures=eight(300.0, 40.0) | {"gpu_p2p/6": 40.0})
    (bad,) = [each for each in judge_nodes([*alike[:2], broken, *alike[3:]], {}, {}) if each.truth is Truth.BAD]
    assert "rate to the next GPU from GPU 6 is 40.0 GB/s, 87% less than the 300 GB/s on 4 peers" in bad.reasons[0]


def test_an_unsteady_gpu_and_one_that_the_hardware_slows_down_under_load_are_named() -> None:
    steady = {f"gpu_steadiness/{at}": 98.0 + at / 10 for at in range(8)}
    (bad,) = judge_nodes([node("n1", figures=steady | {"gpu_steadiness/5": 70.0})], {}, {})
    assert "slowest tenth" in bad.reasons[0]
    facts: dict[str, dict[str, Fact]] = {
        "gpu_health before": {"gpus": 1, "gpu_0": {"uuid": A}},
        "gpu_rate": {"gpus": 1, "gpu_0": {"uuid": A, "slowed_share": 0.9}},
    }
    (slowed,) = judge_nodes([node("n1", facts=facts)], {}, {})
    assert slowed.faults[0].place == A
    assert "during 90% of the load" in slowed.faults[0].what


def test_that_torch_can_use_fewer_gpus_than_slurm_gave_counts_unless_it_can_use_none_anywhere() -> None:
    def usable(name: str, gpus: int) -> Measured:
        return node(name, facts={"gpu_health before": {"gpus": 8, "expected": 8}, "gpu_rate": {"gpus": gpus}})

    assert judge_nodes([usable("n1", 7), usable("n2", 8)], {}, {})[0].truth is Truth.BAD
    assert judge_nodes([usable("n1", 0)], {}, {})[0].truth is Truth.BAD
    assert Truth.BAD not in {each.truth for each in judge_nodes([usable("n1", 0), usable("n2", 0)], {}, {})}


def test_every_figure_of_the_program_has_its_row() -> None:
    assert {"gpu_steadiness", "gpu_clock", "gpu_h2d", "gpu_d2h", "gpu_p2p"} <= set(KINDS)
