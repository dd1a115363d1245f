"""Thresholds of some jobs: by partition from the site, by their owners only to be more patient."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slurm_watchdog.config.loading import ConfigError, parse_config
from slurm_watchdog.controller.incidents.judge import Judge
from slurm_watchdog.controller.policy.owner_directives import directives_of
from slurm_watchdog.model.incidents import Truth
from tests.builders import views
from tests.builders.views import LOADER, RECV, progress, slurm_job, still

DEBUG = "thresholds: [{match: {partition: debug}, detectors: {collective_hang: {floor: 2min, proven_floor: 2min}}}]\n"


def judged(config: str, age_s: float, **of_job: Any) -> tuple[Truth, float]:
    """What `collective_hang` says of a job that stands in its data loader, and its limit."""
    job = views.job(job=slurm_job(**of_job), progress=progress(age_s), snapshots=still(RECV, RECV, LOADER, RECV))
    state: Any = SimpleNamespace(
        next_view=lambda now, asked: (views.cluster(job), frozenset({"7"})),
        gpus=SimpleNamespace(with_gpus=lambda finding: finding),
    )
    judge = Judge(
        parse_config(config), state, (), lambda: "id", pytest.fail,
        patience_of=lambda job: directives_of(job.comment).stall_after_s or 0.0,
    )  # fmt: skip
    (found,) = [each for each in judge.detect(10_000.0) if each.kind == "collective_hang"]
    return found.truth, judge.limits_s["7"]


@pytest.mark.parametrize(
    ("config", "age_s", "of_job", "truth", "limit_s"),
    [
        ("", 70.0, {}, Truth.BAD, 60.0),
        (DEBUG, 70.0, {"partition": "long"}, Truth.BAD, 60.0),
        (DEBUG, 70.0, {"partition": "debug"}, Truth.UNKNOWN, 120.0),
        (DEBUG, 130.0, {"partition": "debug"}, Truth.BAD, 120.0),
        ("", 70.0, {"comment": "watchdog: stall_after=20m"}, Truth.UNKNOWN, 1200.0),
        ("", 1201.0, {"comment": "watchdog: stall_after=20m"}, Truth.BAD, 1200.0),
        ("", 30.0, {"comment": "watchdog: stall_after=10s"}, Truth.UNKNOWN, 60.0),
        ("", 70.0, {"comment": "watchdog: stall_after=soon"}, Truth.BAD, 60.0),
    ],
)
def test_a_job_is_judged_by_its_own_thresholds(
    config: str, age_s: float, of_job: dict[str, str], truth: Truth, limit_s: float
) -> None:
    assert judged(config, age_s, **of_job) == (truth, limit_s)


@pytest.mark.parametrize(
    ("threshold", "words"),
    [
        ("{detectors: {collective_hang: {floor: 2min}}}", "required"),
        ("{match: {}, detectors: {}}", "names no partition"),
        ("{match: {user: a}, detectors: {collective_hung: {floor: 2min}}}", "judges no single job"),
        ("{match: {user: a}, detectors: {node_down: {}}}", "judges no single job"),
        ("{match: {user: a}, detectors: {collective_hang: {floor: 2}}}", "a duration needs a number and a unit"),
        ("{match: {user: a}, detectors: {collective_hang: {flor: 2min}}}", "is no option that a job may have"),
        ("{match: {user: a}, detectors: {collective_hang: {mode: act}}}", "is no option that a job may have"),
        ("{match: {user: a}, detectors: {collective_hang: {factor: 1.0}}}", "greater than or equal to 1.5"),
    ],
)
def test_a_threshold_that_makes_no_sense_is_refused(threshold: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"thresholds: [{threshold}]\n")
    assert words in "\n".join(caught.value.lines()), caught.value.lines()
