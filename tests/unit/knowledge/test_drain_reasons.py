"""What reasons of drained nodes mean: published ones, and look-alikes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from slurm_watchdog.knowledge.drain_reasons import drain_meaning

ROWS = yaml.safe_load((Path(__file__).parents[2] / "captures/slurm/drain_reasons.yaml").read_text())


@pytest.mark.parametrize(("means", "reason", "source"), [*ROWS["published"], *ROWS["lookalikes"]])
def test_a_reason_means_what_its_author_meant(means: str, reason: str, source: str) -> None:
    assert drain_meaning(reason) == means


@pytest.mark.parametrize("reason", ["\x00", "[" * 5000, "fail " * 200, "ib " * 5000 + "down", "alice " * 2000])
def test_a_reason_of_nonsense_takes_no_time_and_blames_nobody(reason: str) -> None:
    assert drain_meaning(reason) != "node" or "fail" in reason
