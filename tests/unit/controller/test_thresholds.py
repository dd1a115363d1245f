"""Thresholds of some jobs: by partition from the site, by their owners to be more patient, and less so as far as the site
allows it."""

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

DEBUG = "except: [{match: {partition: debug}, detectors: {collective_hang: {floor: 2min, proven_floor: 2min}}}]\n"


SOONER = "expert: {policy: {stall_after_floor: 40s}}\n"
SOONER_IN_DEBUG = "except: [{match: {partition: debug}, stall_after_floor: 30s}]\n"
NOT_IN_LONG = SOONER + "except: [{match: {partition: long}, stall_after_floor: 0s}]\n"
ASKS = {"comment": "watchdog: stall_after=35s"}


def judged(
    config: str, age_s: float, *, kind: str = "collective_hang", seen: dict[str, Any] | None = None,
    shows: dict[str, Any] | None = None, **of_job: Any,
) -> tuple[Truth, float]:  # fmt: skip
    """What `kind` says of a job that stands in its data loader, and the job's limit. `seen`: of its progress;
    `shows`: of the job in place of its stacks."""
    more = {"snapshots": still(RECV, RECV, LOADER, RECV)} if shows is None else shows
    job = views.job(job=slurm_job(**of_job), progress=progress(age_s, **(seen or {})), **more)
    state: Any = SimpleNamespace(
        nodes=SimpleNamespace(view=lambda name: None),
        processes=SimpleNamespace(with_gpus=lambda finding: finding),
        lost_among=lambda nodes: (),
    )
    judge = Judge(
        parse_config(config), state, (), lambda: "id", pytest.fail,
        patience_of=lambda job: directives_of(job.comment).stall_after_s or 0.0,
    )  # fmt: skip
    judge.around = views.cluster(job)
    findings, limit_s = judge.findings_of(job, judge.around, 10_000.0)
    (found,) = [each for each in findings if each.kind == kind]
    return found.truth, limit_s


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
    ("config", "age_s", "of_job", "truth", "limit_s"),
    [
        (SOONER, 45.0, ASKS, Truth.BAD, 40.0),
        (SOONER, 38.0, ASKS, Truth.UNKNOWN, 40.0),
        (SOONER, 45.0, {}, Truth.UNKNOWN, 60.0),
        (SOONER, 45.0, {"comment": "watchdog: stall_after=50s"}, Truth.UNKNOWN, 50.0),
        (SOONER, 70.0, {"comment": "watchdog: stall_after=20m"}, Truth.UNKNOWN, 1200.0),
        (SOONER_IN_DEBUG, 36.0, {"partition": "debug", **ASKS}, Truth.BAD, 35.0),
        (SOONER_IN_DEBUG, 36.0, {"partition": "gpu", **ASKS}, Truth.UNKNOWN, 60.0),
        (NOT_IN_LONG, 45.0, {"partition": "long", **ASKS}, Truth.UNKNOWN, 60.0),
        (NOT_IN_LONG, 45.0, {"partition": "gpu", **ASKS}, Truth.BAD, 40.0),
    ],
)
def test_an_owner_has_his_job_judged_sooner_as_far_as_the_site_allows_it(
    config: str, age_s: float, of_job: dict[str, str], truth: Truth, limit_s: float
) -> None:
    assert judged(config, age_s, **of_job) == (truth, limit_s)


@pytest.mark.parametrize(
    ("seen", "limit_s"),
    [
        ({"intervals_s": (18.0, 15.0)}, 40.0),
        ({"intervals_s": (30.0, 25.0)}, 60.0),
        ({"phase": "evaluating"}, 1810.0),
        ({"phase": "checkpointing"}, 1810.0),
        ({"steps_seen": 1}, 3600.0),
    ],
    ids=["training", "never below twice its slowest step", "evaluation", "checkpoint", "start"],
)
def test_a_phase_and_slow_steps_keep_their_time_whatever_the_owner_says(seen: dict[str, Any], limit_s: float) -> None:
    assert judged(SOONER, 5.0, seen=seen, **ASKS)[1] == limit_s


def test_a_job_of_which_nobody_is_known_to_do_anything_is_reported_sooner_too() -> None:
    busy = {"shows": {"snapshots": ()}, "kind": "stalled_progress"}
    assert judged("", 300.0, **busy, **ASKS)[0] is Truth.UNKNOWN
    assert judged(SOONER, 300.0, **busy, **ASKS)[0] is Truth.BAD


def test_a_site_may_have_a_partition_judged_sooner_itself() -> None:
    ceiling = "detectors: {collective_hang: {floor: 30s, ceiling: 90s}}"
    config = f"except: [{{match: {{partition: debug}}, {ceiling}}}]\n"
    slow = {"intervals_s": (40.0, 40.0)}
    assert judged(config, 5.0, seen=slow, partition="debug")[1] == 90.0
    assert judged(config, 5.0, seen=slow, partition="long")[1] == 120.0


@pytest.mark.parametrize(
    ("threshold", "words"),
    [
        ("{detectors: {collective_hang: {floor: 2min}}}", "missing"),
        ("{match: {}, detectors: {}}", "names no partition"),
        ("{match: {user: a}}", "nothing is different"),
        ("{match: {user: a}, stall_after_floor: 5s}", "0s or at least 30s, got 5s"),
        ("{match: {user: a}, detectors: {collective_hung: {floor: 2min}}}", "judges no single job"),
        ("{match: {user: a}, detectors: {node_down: {}}}", "judges no single job"),
        ("{match: {user: a}, detectors: {collective_hang: {floor: 2}}}", "a duration needs a number and a unit"),
        ("{match: {user: a}, detectors: {collective_hang: {flor: 2min}}}", "is not an option that a job may have"),
        ("{match: {user: a}, detectors: {collective_hang: {mode: act}}}", "is not an option that a job may have"),
        ("{match: {user: a}, detectors: {slow_job: {percent: 1.0}}}", "at least 2"),
    ],
)
def test_a_threshold_that_makes_no_sense_is_refused(threshold: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(f"except: [{threshold}]\n")
    assert words in "\n".join(caught.value.lines()), caught.value.lines()


def test_a_floor_for_all_jobs_that_leaves_no_time_for_stacks_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config("expert: {policy: {stall_after_floor: 10s}}\n")
    assert "expert.policy.stall_after_floor: 0s or at least 30s" in "\n".join(caught.value.lines())
