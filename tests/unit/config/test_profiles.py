"""The configurations that are shipped beside the example are valid, and do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurm_watchdog.config.loading import load_config
from slurm_watchdog.config.policy import Except
from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.policy.guards import ASKED_FOR, GUARDS
from slurm_watchdog.controller.policy.owner_directives import VARIABLES
from slurm_watchdog.controller.policy.rules import rule_for
from slurm_watchdog.detect.registry import KINDS, MAY_ACT
from slurm_watchdog.knowledge.rungs import GENTLE, ORDER
from slurm_watchdog.model.actions import Rung
from slurm_watchdog.model.incidents import IncidentKind
from tests.builders.views import slurm_job

SAFE = {IncidentKind.LINGERING_JOB, IncidentKind.COLLECTIVE_HANG, IncidentKind.FILESYSTEM_STALL}


@pytest.fixture
def safe(checkout: Path) -> Config:
    return load_config(str(checkout / "deploy/profiles/safe-act.yaml"))


def test_every_profile_is_valid(checkout: Path) -> None:
    found = sorted((checkout / "deploy/profiles").glob("*.yaml"))
    assert [load_config(str(path)) for path in found]


def test_the_safe_profile_acts_on_these_kinds_and_on_no_other(safe: Config) -> None:
    acts = {kind for kind in KINDS if rule_for(safe, kind, slurm_job(partition="gpu")).acts}
    assert acts == SAFE <= set(MAY_ACT)


def test_the_safe_profile_ends_no_job_for_good_and_drains_nothing(safe: Config) -> None:
    for kind in SAFE:
        rule = rule_for(safe, kind, slurm_job(partition="gpu"))
        assert set(rule.ladder) <= {Rung.EVIDENCE, Rung.RESTART_STEP, Rung.REQUEUE, *GENTLE}
        assert not rule.drain and not rule.lose_work


def test_the_safe_profile_has_no_wider_limit_than_what_is_shipped(safe: Config) -> None:
    shipped, policy = Config().policy, safe.policy
    assert safe.restarts_per_hour <= Config().restarts_per_hour
    for name in (
        "budget_percent",
        "attempts",
        "storm_jobs",
        "max_excluded_nodes",
    ):
        assert getattr(policy, name) <= getattr(shipped, name), name
    assert policy.cooldown >= shipped.cooldown and policy.storm_cooldown >= shipped.storm_cooldown


@pytest.mark.parametrize("partition", ["debug", "debug-gpu", "interactive"])
def test_the_safe_profile_leaves_jobs_alone_that_somebody_waits_for(safe: Config, partition: str) -> None:
    rule = rule_for(safe, IncidentKind.COLLECTIVE_HANG, slurm_job(partition=partition))
    assert not rule.ladder


# ------------------------------------------------------------------------------------------ tables for readers


def rows(checkout: Path, heading: str, page: str = "docs/acting.md") -> str:
    """The first cells of the table with this heading."""
    lines = (checkout / page).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    body = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        body.append(line.split("|")[1])
    return "\n".join(body)


def test_the_page_for_owners_has_every_guard_in_its_order_and_which_hold_a_person_back(checkout: Path) -> None:
    table = [line.strip() for line in rows(checkout, "guard", "docs/why.md").splitlines()]
    told = [(line.split("`")[1], line.endswith("*")) for line in table if line]
    assert told == [*((name, name in ASKED_FOR) for name, _ in GUARDS), ("mode", False)]


def test_the_page_on_acting_has_every_rung_in_its_order(checkout: Path) -> None:
    assert re.findall(r"`(\w+)`", rows(checkout, "rung")) == [str(step) for step in ORDER]


def test_the_page_on_acting_has_every_key_of_a_rule(checkout: Path) -> None:
    told = set(re.findall(r"`(\w+)`", rows(checkout, "value of `except`")))
    assert told == set(Except.__struct_fields__)


def test_the_page_on_acting_has_every_directive_of_an_owner(checkout: Path) -> None:
    table = rows(checkout, "directive")
    assert all(name in table for name in ("SLURM_WATCHDOG=", *VARIABLES, *VARIABLES.values()))
