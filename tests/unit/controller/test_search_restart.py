"""Nodes that a restart leaves out once, to find the one that makes its job slow."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from slurm_watchdog.config.schema import Config
from slurm_watchdog.controller.actions.from_config import ACTIVE_SEARCH, rule_book_of
from slurm_watchdog.controller.policy.decision import decide
from slurm_watchdog.controller.policy.rules import RuleChange
from slurm_watchdog.controller.policy.search_restart import to_leave_out
from slurm_watchdog.model.actions import Action, Decision, Rung, Verdict
from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.model.slow_search import JobSearch
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.model.supervisor import SupervisorState, SupervisorStatus
from tests.builders.policy_inputs import INCIDENT, LIMITS, SITUATION
from tests.builders.slow_clusters import job_search
from tests.builders.views import slurm_job

NODES = ("n1", "n2", "n3", "n4")
JOB = slurm_job(nodes=NODES, node_count=4, partition="gpu")
SEARCH = job_search("n1 n2 n3 n4")


def cluster(idle: str, busy: str = "") -> tuple[SlurmNode, ...]:
    states = dict.fromkeys(NODES, "ALLOCATED") | dict.fromkeys(idle.split(), "IDLE")
    states |= dict.fromkeys(busy.split(), "ALLOCATED")
    return tuple(SlurmNode(name=n, address="", state=state, partitions=("gpu",)) for n, state in states.items())


@pytest.mark.parametrize(
    ("idle", "busy", "most", "avoided", "count"),
    [
        ("s1 s2 s3", "", 8, (), 2),
        ("s1", "s2 s3", 8, (), 1),
        ("", "s1 s2 s3", 8, (), 0),
        ("s1 s2 s3", "", 1, (), 1),
        ("s1 s2", "", 8, ("n1",), 1),
        ("s1", "", 8, ("n1",), 0),
    ],
    ids=["half", "one is free", "none is free", "no more exclusions", "one goes to the culprit", "none is left"],
)  # fmt: skip
def test_as_many_suspects_are_left_out_as_others_are_free_for(
    idle: str, busy: str, most: int, avoided: tuple[str, ...], count: int
) -> None:
    found = to_leave_out(JOB, SEARCH, avoided, cluster(idle, busy), most)
    assert len(found) == count and set(found) <= set(NODES).difference(avoided)


def test_a_job_without_a_search_and_one_that_needs_its_nodes_leave_out_none() -> None:
    assert to_leave_out(JOB, None, (), cluster("s1 s2"), 8) == ()
    assert to_leave_out(replace(JOB, required_nodes=NODES), SEARCH, (), cluster("s1 s2"), 8) == ()


def test_once_a_node_is_named_it_alone_is_left_out() -> None:
    named = job_search("n1 n2 n3 n4", ("n3 n4 s1 s2", 0.0), ("n1 n3 n4 s1", 0.07))
    assert to_leave_out(JOB, named, (), cluster("s1 s2"), 8) == ("n1",)


def test_a_restart_for_a_hang_excludes_them_beside_the_culprit_and_says_why() -> None:
    situation = replace(SITUATION, job=JOB, nodes=cluster("s1 s2 s3"), search=SEARCH)
    decision = decide(INCIDENT, situation, replace(LIMITS, max_excluded_nodes=8), "d1")
    assert decision.exclude[0] == "n1" and decision.exclude[1:] == decision.searched
    assert len(decision.searched) in (1, 2) and decision.blamed == ("n1",)
    assert f"{', '.join(decision.searched)} left out once, to find the node that makes the job slow" in decision.reason
    asked = replace(INCIDENT, kind=IncidentKind.OPERATOR_RESTART)
    assert decide(asked, situation, LIMITS, "d2").searched == ()
    no_requeue = replace(situation, rule=replace(SITUATION.rule, ladder=(Rung.CANCEL,)))
    assert decide(INCIDENT, no_requeue, LIMITS, "d3").searched == ()


def supervisor(spares: str = "s1 s2") -> SupervisorStatus:
    return SupervisorStatus(
        protocol=1, state=SupervisorState.RUNNING, step_id="0", starts=1, restarts_left=3, nodes=NODES,
        spares=tuple(spares.split()), takes_once=True,
    )  # fmt: skip


def active(
    search: JobSearch | None = SEARCH, *, done: int = 0, a_day: int | None = 2, free: str = "s1 s2", users: int = 1,
    by: SupervisorStatus | None = None,
) -> Decision:  # fmt: skip
    """About a slow job, with so many restarts for searches of its user within a day, and jobs of so many users."""
    incident = replace(INCIDENT, kind=IncidentKind.SLOW_JOB, exclude_nodes=())
    before = decide(INCIDENT, SITUATION, LIMITS, "d0")
    recent = tuple(
        replace(before, id=f"r{n}", by=IncidentKind.SLOW_JOB, decided_at=1e6 - 7200.0 * (n + 1)) for n in range(done)
    )
    rule = replace(SITUATION.rule, ladder=ACTIVE_SEARCH.ladder or ())
    situation = replace(SITUATION, job=JOB, nodes=cluster(free), search=search, recent=recent, rule=rule)
    situation = replace(situation, users_running=users, supervisor=by)
    limits = replace(LIMITS, max_excluded_nodes=8, slow_search_restarts=a_day)
    return decide(incident, situation, limits, "d1")


def test_an_active_search_restarts_by_kill_switch_without_half_of_the_suspects() -> None:
    decision = active()
    assert (decision.verdict, decision.action) == (Verdict.ALLOWED, Action.GRACEFUL_RESTART)
    assert decision.exclude == decision.searched and len(decision.searched) == 2
    assert not decision.lose_work
    assert active(done=1, a_day=4, users=2).verdict is active(done=2, a_day=4).verdict is Verdict.ALLOWED


def test_one_of_a_supervised_job_starts_its_step_again_in_the_allocation_as_long_as_that_has_spares() -> None:
    in_place = active(free="", by=supervisor())
    assert in_place.ladder == (Rung.KILL_SWITCH, Rung.RESTART_STEP, Rung.REQUEUE)
    assert in_place.verdict is Verdict.ALLOWED and len(in_place.avoid_once) == 2 and in_place.exclude == ()
    no_spare = active(by=supervisor(spares=""))
    assert no_spare.ladder == (Rung.KILL_SWITCH, Rung.REQUEUE) and len(no_spare.searched) == 2
    used_up = active(by=replace(supervisor(), restarts_left=0))
    assert Rung.RESTART_STEP not in used_up.ladder and len(used_up.searched) == 2


@pytest.mark.parametrize(
    ("decision", "why"),
    [
        (active(a_day=None), "is not active"),
        (active(done=2), "2 restarts within a day"),
        (active(done=2, a_day=4, users=2), "half of policy.slow_search_restarts"),
        (active(free=""), "no other nodes are free"),
        (active(free="", by=supervisor(spares="")), "no other nodes are free"),
        (active(free="", by=replace(supervisor(), restarts_left=0)), "no other nodes are free"),
        (active(None), "no other nodes are free"),
        (active(job_search("n1 n2 n3 n4", ("n1 n2 n3 n4", 0.0), ("n1 n2 n3 n4", 0.07))), "the search for the slow node is over"),
    ],
    ids=["not active", "as many as a day has", "half of them", "no others", "no spares", "no restarts left", "no search", "acquitted"],
)  # fmt: skip
def test_an_active_search_restarts_for_a_question_only_and_within_its_budget(decision: Decision, why: str) -> None:
    assert (decision.verdict, decision.by) == (Verdict.SUPPRESSED, "slow_search")
    assert why in decision.reason


def test_the_rule_of_an_active_search_stands_unless_the_site_has_its_own() -> None:
    def rule(policy: dict[str, object]) -> RuleChange | None:
        return rule_book_of(Config.model_validate({"policy": policy})).kinds.get(IncidentKind.SLOW_JOB)

    assert rule({}) is None
    assert rule({"slow_search": "active"}) == ACTIVE_SEARCH
    own = rule({"slow_search": "active", "kinds": {"slow_job": {"ladder": ["sigusr1", "requeue"], "cooldown": "1h"}}})
    assert own is not None and own.ladder == (Rung.SIGUSR1, Rung.REQUEUE) and own.attempts == 1000
