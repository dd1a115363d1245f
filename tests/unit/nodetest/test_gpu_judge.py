"""What is wrong with a node's GPUs: number, clocks and errors, against its peers; what is not certain accuses nobody."""

from __future__ import annotations

import pytest

from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.nodetest.judge import judge_nodes
from slurm_watchdog.nodetest.results import Fact, Measured
from tests.builders.measured_nodes import node


def with_gpus(name: str, gpus: int | None, expected: int | None = None, cpu: str = "X x32", **more: Fact) -> Measured:
    """A node on which NVML sees so many GPUs."""
    facts: dict[str, dict[str, Fact]] = {"state": {"model": cpu}}
    facts["gpu_health before"] = {"expected": expected, **({} if gpus is None else {"gpus": gpus}), **more}
    return node(name, facts=facts, model=f"{cpu} / H100" if gpus else cpu)


def verdicts(counts: list[int | None], **more: Fact) -> list[tuple[Truth, str]]:
    """Of the first node, which has the first count and `more`, and of its peers."""
    nodes = (
        [with_gpus("n1", counts[0], **more)]
        + [  # type: ignore[arg-type]
            with_gpus(f"n{at}", count) for at, count in enumerate(counts[1:], 2)
        ]
    )
    return [(each.truth, " ".join(each.reasons)) for each in judge_nodes(nodes, {}, {})]


def test_a_gpu_that_is_missing_shows_against_the_peers_where_slurm_states_no_number() -> None:
    first, *others = verdicts([7, 8, 8, 8, 8, 8, 8])
    assert first == (Truth.BAD, "NVML sees 7 GPUs, and 8 on 6 of 6 peers")
    assert {truth for truth, _ in others} == {Truth.OK}
    assert verdicts([0, 8, 8, 8, 8])[0][0] is Truth.BAD  # of a node that has lost all, the GPU model is not known


@pytest.mark.parametrize(
    ("counts", "truth", "words"),
    [
        ([7, 8, 8, 8], Truth.UNKNOWN, "nothing to compare it with"),  # three peers
        ([4, 4, 8, 8, 8, 8, 8], Truth.UNKNOWN, "others have 4 as well"),  # two may have been bought so
        ([4, 8, 8, 8, 4, 4], Truth.OK, ""),  # a mixed partition
        ([9, 8, 8, 8, 8, 8], Truth.OK, ""),
        ([7, None, None, None, None, 8, 8], Truth.OK, ""),  # NVML is not everywhere
    ],
)
def test_a_number_of_gpus_that_peers_share_or_that_few_peers_have_accuses_nobody(
    counts: list[int | None], truth: Truth, words: str
) -> None:
    found = verdicts(counts)
    assert found[0][0] in {truth, Truth.UNKNOWN}
    assert words in found[0][1]
    assert Truth.BAD not in {each for each, _ in found}


def test_what_slurm_gave_the_job_counts_before_what_the_peers_have() -> None:
    assert verdicts([7, 8, 8, 8, 8], expected=7)[0][0] is not Truth.BAD
    assert verdicts([7, 8, 8, 8, 8], expected=8)[0][0] is Truth.BAD


def test_a_node_without_a_driver_is_not_judged_and_of_another_cpu_model_it_is_no_peer() -> None:
    first = verdicts([0, 8, 8, 8, 8], skipped="no NVIDIA driver is loaded")[0]
    assert first == (Truth.UNKNOWN, "nothing to compare it with: 0 peers of its model, and 4 are needed, or 3 earlier "
                     "tests NVML sees 0 GPUs, and 8 on 4 of 4 peers: no NVIDIA driver is loaded")  # fmt: skip
    others = [with_gpus(f"n{at}", 8) for at in range(2, 8)]
    found = judge_nodes([with_gpus("n1", 0, cpu="Y x64"), *others], {}, {})
    assert found[0].truth is Truth.UNKNOWN
    assert "NVML" not in " ".join(found[0].reasons)
