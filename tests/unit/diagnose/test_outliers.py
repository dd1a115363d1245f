"""What is odd about one rank among its peers, and what is not."""

from __future__ import annotations

import pytest

from slurm_watchdog.diagnose.outliers import RankFacts, compare
from slurm_watchdog.model.observations import Gpu

WELL = {
    "utilization_ratio": 1.0, "sm_clock_hz": 1410e6, "power_w": 270.0, "temperature_c": 52.0, "memory_used_bytes": 60 << 30,
    "memory_total_bytes": 80 << 30, "throttle": (), "pcie_link_width": 16, "ecc_uncorrected": 0, "nvlinks_down": 0,
}  # fmt: skip


def gpu(rank: int, **changes: object) -> Gpu:
    return Gpu(uuid=f"GPU-{rank}", index=rank % 4, name="A100", **(WELL | changes))  # type: ignore[arg-type]


def job(ranks: int = 8, **odd: object) -> list[RankFacts]:
    """Ranks of four a node; rank 5's GPU differs by `odd`."""
    return [
        RankFacts(rank=rank, node=f"n{rank // 4 + 1}", gpu=gpu(rank, **(odd if rank == 5 else {})))
        for rank in range(ranks)
    ]


def lines(
    ranks: list[RankFacts], settings: dict[str, dict[str, str]] | None = None, culprits: tuple[int, ...] = ()
) -> list[str]:
    return [each.line for each in compare(ranks, settings or {}, culprits)]


def with_environment(values: list[dict[str, str]]) -> list[RankFacts]:
    return [
        RankFacts(rank=rank, node=f"n{rank // 4 + 1}", environment=tuple(sorted(each.items())))
        for rank, each in enumerate(values)
    ]


def test_the_gpu_of_the_frozen_filesystem_is_told_apart_by_clock_power_temperature_and_utilisation() -> None:
    odd = {"utilization_ratio": 0.0, "sm_clock_hz": 1155e6, "power_w": 68.0, "temperature_c": 28.0}
    assert lines(job(**odd)) == [
        "rank 5 on n2: GPU SM clock is 1155 MHz, that of the 7 others 1410 MHz",
        "rank 5 on n2: GPU power is 68 W, that of the 7 others 270 W",
        "rank 5 on n2: GPU temperature is 28 C, that of the 7 others 52 C",
        "rank 5 on n2: GPU utilisation is 0%, that of the 7 others 100%",
    ]


@pytest.mark.parametrize(
    "odd",
    [
        {"sm_clock_hz": 1395e6},
        {"power_w": 240.0},
        {"temperature_c": 61.0},
        {"memory_used_bytes": 61 << 30},
        {"utilization_ratio": 0.9},
        {"ecc_corrected": 4},
    ],
)
def test_small_differences_between_healthy_gpus_are_none(odd: dict[str, object]) -> None:
    assert lines(job(**odd)) == []


@pytest.mark.parametrize(
    ("odd", "word"),
    [
        ({"pcie_link_width": 4}, "PCIe width is 4"),
        ({"throttle": ("hw_thermal_slowdown",)}, "throttle reasons is hw_thermal_slowdown"),
        ({"ecc_uncorrected": 2}, "uncorrected memory errors is 2"),
        ({"nvlinks_down": 1}, "NVLinks that are down is 1"),
        ({"error": "NVML_ERROR_GPU_IS_LOST: GPU is lost"}, "error of NVML is NVML_ERROR_GPU_IS_LOST"),
        ({"memory_total_bytes": 40 << 30}, "memory is 40 GiB"),
    ],
)
def test_outliers_of_gpus_have_a_line_for_each_odd_value(odd: dict[str, object], word: str) -> None:
    (line,) = lines(job(**odd))
    assert word in line


def test_two_kinds_of_gpus_in_equal_numbers_are_two_kinds_and_none_is_odd() -> None:
    ranks = [
        RankFacts(rank=rank, node="n1", gpu=gpu(rank, sm_clock_hz=1e9 if rank % 2 else 1.4e9)) for rank in range(8)
    ]
    assert lines(ranks) == []


def test_missing_values_and_too_few_peers_say_nothing() -> None:
    assert lines([]) == []
    assert lines(job(2, sm_clock_hz=1e9)) == []
    assert lines([RankFacts(rank=rank, node="n1", gpu=Gpu(uuid="x", index=rank)) for rank in range(8)]) == []


def test_the_one_rank_with_another_interface_is_named() -> None:
    values = [{"NCCL_SOCKET_IFNAME": "eth0", "RANK": str(rank)} for rank in range(8)]
    values[3]["NCCL_SOCKET_IFNAME"] = "docker0"
    assert lines(with_environment(values)) == ["rank 3 on n1: NCCL_SOCKET_IFNAME is docker0, that of the 7 others eth0"]


def test_a_variable_that_one_rank_lacks_is_named() -> None:
    values = [{"NCCL_IB_HCA": "mlx5", "RANK": str(rank)} for rank in range(8)]
    del values[6]["NCCL_IB_HCA"]
    assert lines(with_environment(values)) == ["rank 6 on n2: NCCL_IB_HCA is not set, that of the 7 others mlx5"]


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "SLURM_PROCID"])
def test_variables_that_differ_on_purpose_are_left_out(name: str) -> None:
    values = [{name: "0"} for _ in range(8)]
    values[3][name] = "7"
    assert lines(with_environment(values)) == []


def test_a_variable_of_its_own_for_every_rank_or_node_is_meant_so() -> None:
    assert lines(with_environment([{"TORCH_SOMETHING": str(rank)} for rank in range(8)])) == []
    assert lines(with_environment([{"UCX_NET_DEVICES": f"mlx5_{rank % 4}"} for rank in range(8)])) == []


def test_a_node_with_another_driver_is_named_and_its_free_memory_is_not() -> None:
    settings = {f"n{at}": {"nvidia_driver": "550.54", "shm_free_mib": str(at)} for at in range(1, 6)}
    settings["n4"]["nvidia_driver"] = "535.10"
    assert lines([], settings) == ["n4: nvidia_driver is 535.10, that of the 4 others 550.54"]


def test_the_culprits_differences_come_first() -> None:
    values = [{"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "8"} for _ in range(12)]
    values[1]["NCCL_ALGO"], values[9]["OMP_NUM_THREADS"] = "Tree", "1"
    assert [each.ranks for each in compare(with_environment(values), {}, (9,))] == [(9,), (1,)]


def test_a_long_value_is_shortened_in_its_sentence() -> None:
    values = [{"LD_LIBRARY_PATH": "/usr/lib"} for _ in range(4)]
    values[2]["LD_LIBRARY_PATH"] = "/opt/" + "x" * 500
    (difference,) = compare(with_environment(values), {})
    assert len(difference.line) < 200
