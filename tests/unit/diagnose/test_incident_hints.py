"""The hints of an incident: of the errors it quotes first, then of its kind; few, and none for nothing."""

from __future__ import annotations

from slurm_watchdog.detect.registry import KINDS
from slurm_watchdog.diagnose.incident_hints import incident_hints
from slurm_watchdog.knowledge.remediation_hints import HINTS, MAX_HINTS

BY_NAME = {row.name: row.hint for row in HINTS}


def test_the_error_that_a_fact_quotes_comes_before_the_kind() -> None:
    fact = "rank 3 on n2: NCCL WARN NET/IB : Got completion from peer 10.2.0.5<33092> with error 12, opcode 0"
    hints = incident_hints("lingering_job", "rank 3 of job 7 ended, the others wait", [fact])
    assert hints[0] == BY_NAME["infiniband_error_12"]
    assert BY_NAME["lingering_job"] in hints


def test_a_line_of_the_driver_is_taken_for_what_its_number_says() -> None:
    off = incident_hints("gpu_fault", "GPU 3", ["kernel: NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus."])
    assert off[0] in (BY_NAME["gpu_lost"], BY_NAME["xid_off_the_bus"])
    program = incident_hints("gpu_fault", "GPU 3", ["NVRM: Xid (PCI:0000:c1:00): 31, pid=1, name=python, MMU Fault"])
    assert BY_NAME["gpu_lost"] not in program
    assert BY_NAME["xid_off_the_bus"] not in program


def test_an_evaluation_that_hangs_in_its_data_loader_is_told_what_helped_others() -> None:
    hints = incident_hints(
        "collective_hang",
        "rank 5 waits for its data loader in evaluate_and_print_results, 15 wait in broadcast",
        [],
    )
    assert hints[0] == BY_NAME["dataloader_at_evaluation"]


def test_there_are_few_and_none_twice() -> None:
    for kind in KINDS:
        hints = incident_hints(
            kind, "CUDA out of memory", ["CUDA out of memory", "No space left on device", "Killed"] * 50
        )
        assert len(hints) <= MAX_HINTS
        assert len(set(hints)) == len(hints)


def test_an_unknown_kind_without_an_error_has_none() -> None:
    assert incident_hints("something new", "all is quiet", ["nothing"]) == ()
