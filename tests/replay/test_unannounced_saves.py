"""Saves that no line announces: rank 0 stands in one call on one file, in D, and the others wait in a collective."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_watchdog.model.incidents import Severity
from slurm_watchdog.replay.player import Outcome
from tests.replay.stories import SPINS, WAITS, Doing, Story


def saves(path: str, seconds: float, call: str = "write") -> Outcome:
    """Three of them, in a job that trains before and after each."""
    story = Story(per_node=2)
    for number in range(3):
        story.train(20)

        def does(rank: int, since_s: float, number: int = number) -> Doing:
            blocked: dict[str, Any] = {
                "state": "D", "state_age_s": since_s, "syscall": call, "path": path.format(number), "mount": "/gpfs",
            }  # fmt: skip
            return WAITS | blocked if rank == 0 else SPINS

        story.go_on(seconds, does)
    story.train(20)
    return story.play()


@pytest.mark.parametrize("seconds", [70.0, 150.0])
@pytest.mark.parametrize(
    "path",
    [
        "/gpfs/m4/ckpt/step_{}00.pt", "/gpfs/run/checkpoints/mp_rank_00/model_optim_rng_{}.pt", "/gpfs/out/iter_00012{}0/x",
        "/gpfs/m/global_step{}00/zero_pp_rank_0.bin", "/gpfs/m/checkpoint-{}00/model.safetensors", "/gpfs/w/__{}_0.distcp",
        "/gpfs/lightning_logs/version_0/epoch=0-step={}00.ckpt",
    ],
)  # fmt: skip
def test_a_rank_that_writes_a_checkpoint_hangs_in_no_healthy_job(path: str, seconds: float) -> None:
    assert [each.summary for each in saves(path, seconds).incidents if each.severity is Severity.CRITICAL] == []


@pytest.mark.parametrize(
    ("path", "call"),
    [
        ("/gpfs/m4/main_log_{}.txt", "write"), ("/gpfs/data/shard-{}.bin.idx", "read"), ("/gpfs/m4/ckpt/step_{}.pt", "openat"),
        ("/gpfs/tensorboard/events.out.tfevents.{}", "write"),
    ],
)  # fmt: skip
def test_a_rank_that_is_blocked_on_another_file_or_does_not_write_is_reported(path: str, call: str) -> None:
    assert {each.kind for each in saves(path, 150.0, call).incidents} == {"filesystem_stall"}
