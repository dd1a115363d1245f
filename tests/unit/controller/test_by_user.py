"""No single user can switch off acting for others: not by trouble of his own, not by using up what is allowed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from slurm_watchdog.controller.policy.by_user import (
    crowd_of,
    in_trouble,
    orphans_at_once,
    over_budget,
    spent_on_jobs,
)
from slurm_watchdog.controller.policy.decision import decide
from slurm_watchdog.controller.policy.guards import GUARDS, is_storm, is_storm_of_one
from slurm_watchdog.model.actions import Verdict
from slurm_watchdog.model.incidents import IncidentKind, IncidentState
from tests.builders.policy_inputs import INCIDENT, LIMITS, PROCESS, SITUATION
from tests.builders.two_users import BUSY_MALLORY, JOB, MALLORY, MANY, VICTIM, done, incident, world


@pytest.mark.parametrize("guard", [name for name, _ in GUARDS])
@pytest.mark.parametrize("running", [2, 10, 100, 1000])
def test_a_guard_with_all_that_one_user_can_do_holds_nothing_back_from_another(guard: str, running: int) -> None:
    objection = dict(GUARDS)[guard](world(JOB, BUSY_MALLORY, running))
    assert objection is None


def test_decide_with_all_that_one_user_can_do_acts_for_another_and_not_for_him() -> None:
    mine = decide(replace(world(JOB, BUSY_MALLORY), incident=INCIDENT, config=LIMITS), "d")
    assert (mine.verdict, mine.uid) == (Verdict.ALLOWED, VICTIM)
    his = world(MANY["100"], tuple(done(str(n), MALLORY) for n in range(110, 112)))
    other = replace(incident("100"), runs=(("100", 0),))
    assert decide(replace(his, incident=other, config=LIMITS), "d").by == "budget"
    assert decide(replace(replace(his, recent=()), incident=other, config=LIMITS), "d").by == "storm"


def test_a_storm_is_one_of_users_and_one_users_own_is_his_alone() -> None:
    assert is_storm_of_one(world(MANY["100"])) and not is_storm(world(MANY["100"]))
    assert not is_storm_of_one(world(JOB))
    owners = {str(n): n for n in range(3)}
    crowd = crowd_of(in_trouble(map(incident, owners), owners.get), INCIDENT.kind, 0)
    assert is_storm(replace(SITUATION, users_in_trouble=crowd.users))


def test_in_trouble_jobs_whose_owner_is_not_known_count_as_one_users() -> None:
    trouble = in_trouble([incident("1"), incident("2"), replace(incident("3"), inhibited_by="x")], {}.get)
    assert trouble == {INCIDENT.kind: {None: {"1", "2"}}}
    assert in_trouble([replace(incident("1"), state=IncidentState.PENDING)], {}.get) == {}


def test_orphans_of_many_jobs_of_one_user_are_no_storm_for_another() -> None:
    one = replace(INCIDENT, kind=IncidentKind.ORPHAN_GPU_PROCESS, processes=(replace(PROCESS, uid=VICTIM, job_id="1"),))
    many = [replace(one, processes=(replace(PROCESS, uid=MALLORY, job_id=str(n)),)) for n in range(9)]
    crowd = orphans_at_once(one, one.processes[0], [one, *many])
    assert (crowd.users, crowd.own) == (2, 1)
    assert orphans_at_once(many[0], many[0].processes[0], many).own == 9


@pytest.mark.parametrize(
    ("spent", "allowed", "others", "why"),
    [
        ({MALLORY: 50}, 4, True, None),
        ({MALLORY: 50, VICTIM: 1}, 4, True, None),
        ({VICTIM: 2}, 4, True, "one user may have half of the budget of 4"),
        ({VICTIM: 2}, 4, False, None),
        ({VICTIM: 4}, 4, False, "the budget is 4"),
        ({MALLORY: 50}, 1, True, None),
        ({MALLORY: 1, 3: 1}, 1, True, "the budget is 2"),
        ({VICTIM: 1}, 1, True, "one user may have half of the budget of 1"),
        ({None: 4}, 4, True, "the budget is 4"),
        ({1: 2, 2: 2}, 4, True, "the budget is 4"),
    ],
)
def test_over_budget(spent: dict[int | None, int], allowed: int, others: bool, why: str | None) -> None:
    recent = [done(str(n), uid) for uid, count in spent.items() for n in range(count)]
    counted = spent_on_jobs(recent, SITUATION.now_wall, 3600.0)
    assert over_budget(counted, VICTIM, allowed, 4, others) == why


def test_over_budget_with_a_site_that_allows_one_action_in_all_keeps_to_it() -> None:
    strict = replace(LIMITS, restarts_per_hour=1)
    found = decide(replace(world(JOB, (done("100", MALLORY),)), incident=INCIDENT, config=strict), "d")
    assert (found.verdict, found.by) == (Verdict.SUPPRESSED, "budget")
