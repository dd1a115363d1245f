"""What a node's test asks NVML, by the real pynvml on the stand-in library, and what is made of the answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.nodetest.judge import judge_nodes
from slurm_watchdog.nodetest.program import command
from slurm_watchdog.nodetest.results import Measured, measured, parse_line
from tests.rig.standin_nvml import standin
from tests.rig.standin_nvml.standin import Gpu, Scenario

pytestmark = pytest.mark.skipif(not standin.can_build(), reason="needs a C compiler: apt-get install gcc libc6-dev")
QUESTION = {"phases": [{"phase": "gpu_health", "limit_s": 20, "subject": each} for each in ("before", "after")]}


def card(number: int, **more: object) -> Gpu:
    healthy = {"ecc": (0, 0), "remapped": (0, 0, 0, 0), "pcie": (16, 16, 5, 5), "replays": 0}
    fields = {"uuid": f"GPU-{number}", "bus": f"00000000:0{number}:00.0", "minor": number, **healthy, **more}
    return Gpu(**fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return standin.build(tmp_path_factory.mktemp("nvml"))


def asked(library: Path, scenario: Scenario, gpus: str = "2") -> Measured:
    environment = standin.environment_of(library, scenario.path) | {"SLURM_GPUS_ON_NODE": gpus, "SLURMD_NODENAME": "n1"}
    done = subprocess.run(
        command(sys.executable, QUESTION), env={**environment, "PATH": os.environ["PATH"]}, capture_output=True, text=True,
        timeout=60, check=True, cwd="/",
    )  # fmt: skip
    return measured("n1", [line for text in done.stdout.splitlines() if (line := parse_line(text)) is not None])


def test_healthy_cards_are_seen_with_model_lanes_and_errors_and_nothing_is_wrong(library: Path, tmp_path: Path) -> None:
    found = asked(library, Scenario(tmp_path / "s", gpus=(card(1), card(2))))
    assert found.problems == ()
    after = found.facts["gpu_health after"]
    assert after["gpus"] == 2
    assert isinstance(after["gpu_0"], dict)
    assert {name: after["gpu_0"][name] for name in ("uuid", "bus", "uncorrected", "pcie_width", "slowed")} == {
        "uuid": "GPU-1", "bus": "00000000:01:00.0", "uncorrected": 0, "pcie_width": 16, "slowed": False,
    }  # fmt: skip
    assert found.model == "NVIDIA H100 80GB HBM3"
    assert judge_nodes([found], {}, {})[0].truth is not Truth.BAD


@pytest.mark.parametrize(
    ("broken", "gpus", "words"),
    [
        ({"remapped": (0, 1, 0, 1)}, "2", "remapped"),
        ({"pcie": (4, 16, 5, 5)}, "2", "PCIe has 4 of 16 lanes"),
        ({"throttle": 0x40}, "2", "slows its clocks"),
        ({}, "3", "NVML sees 2 GPUs, and Slurm gave the job 3"),
    ],
)
def test_a_broken_card_makes_its_node_bad_and_is_named_by_its_uuid(
    library: Path, tmp_path: Path, broken: dict[str, object], gpus: str, words: str
) -> None:
    found = asked(library, Scenario(tmp_path / "s", gpus=(card(1), card(2, **broken))), gpus)
    (verdict,) = judge_nodes([found], {}, {})
    assert verdict.truth is Truth.BAD
    (fault,) = verdict.faults
    assert words in fault.what
    assert fault.place == ("GPU-2" if broken else "gpu")


def test_a_node_of_the_same_image_without_a_driver_is_not_accused_unless_slurm_gave_it_gpus(
    library: Path, tmp_path: Path
) -> None:
    scenario = Scenario(tmp_path / "s", gpus=())
    scenario.path.unlink()  # the library then answers that no driver is loaded
    found = asked(library, scenario, "")
    assert found.facts["gpu_health after"]["skipped"] == "no NVIDIA driver is loaded"
    assert found.facts["gpu_health after"]["gpus"] == 0
    assert judge_nodes([found], {}, {})[0].truth is Truth.UNKNOWN
    assert judge_nodes([asked(library, scenario, "2")], {}, {})[0].truth is Truth.BAD
