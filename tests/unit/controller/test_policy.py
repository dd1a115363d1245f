"""Each guard takes the action away alone and names itself; the order; operators; observing."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.config.policy import Policy
from slurm_watchdog.controller.policy.decision import decide, is_final, is_news
from slurm_watchdog.controller.policy.guards import ASKED_FOR, GUARDS
from slurm_watchdog.controller.policy.placement import broken_under
from slurm_watchdog.controller.policy.rules import Rule
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.model.actions import Action, Decision, Fence, Rung, Verdict
from slurm_watchdog.model.incidents import Incident, IncidentKind, IncidentState
from slurm_watchdog.model.slurm import SlurmNode
from slurm_watchdog.model.supervisor import SupervisorState, SupervisorStatus
from tests.builders.policy_inputs import INCIDENT, LIMITS, PROCESS, SITUATION
from tests.builders.views import slurm_job

GRACEFUL = (Rung.KILL_SWITCH, Rung.REQUEUE)
"""Of a kind that has no ladder as shipped, where a site gives it this one."""


def done(ago_s: float, job_id: str = "7") -> Decision:
    return Decision(
        id="x",
        incident_id="x",
        action=Action.REQUEUE,
        verdict=Verdict.ALLOWED,
        by="",
        reason="",
        decided_at=1e6 - ago_s,
        fence=Fence(job_id=job_id, restarts=0, start_at=None),
    )


BY_SITE = (IncidentKind.SLOW_NODE, IncidentKind.SLOW_JOB)
"""Kinds that have a ladder where a site wants one."""


def judge(incident: Incident = INCIDENT, mode: str = "act", **changes: Any) -> Decision:
    rule = changes.pop("rule", Rule(acts=mode == "act", ladder=(), source="test"))
    shipped = spec_of(incident.kind).ladder or (GRACEFUL if incident.kind in BY_SITE else ())
    ladder = (Rung.END_PROCESS,) if incident.processes else shipped
    rule = replace(rule, ladder=ladder)
    return decide(replace(SITUATION, **changes, rule=rule, incident=incident, config=LIMITS), "d")


def test_nothing_objects_and_the_decision_is_fenced_by_the_run() -> None:
    decision = judge()
    assert (decision.verdict, decision.action) == (Verdict.ALLOWED, Action.REQUEUE)
    assert decision.fence == Fence(job_id="7", restarts=0, start_at=900.0)
    assert (decision.exclude, decision.nodes, decision.step_at_decision) == (("n1",), ("n1", "n2"), 500)
    assert decision.wait_until_responding == ("/shared",)
    assert is_final(decision)


ALWAYS = "00:00-24:00"
SUPERVISOR = SupervisorStatus(protocol=1, state=SupervisorState.RUNNING, step_id="0", starts=1, restarts_left=2)

OBJECTIONS: dict[str, list[dict[str, Any]]] = {
    "paused": [{"paused": "maintenance"}, {"paused": ""}],
    "blind": [{"blind": "just started"}],
    "unsure": [
        {"job": slurm_job(unreadable=(field,))}
        for field in ("state", "restarts", "start_at", "uid", "nodes", "is_batch")
    ],
    "job_changed": [
        {"job": None},
        {"job": slurm_job(restarts=1)},
        {"job": slurm_job(state="COMPLETING")},
        {"job": slurm_job(state="SUSPENDED")},
        {"job": slurm_job(job_id="8")},
    ],
    "process_changed": [
        {
            "incident": replace(INCIDENT, kind=IncidentKind.ORPHAN_GPU_PROCESS, processes=(PROCESS,)),
            "process": PROCESS,
            "job": None,
            "process_objection": "job 6 is RUNNING",
        }
    ],
    "opted_out": [
        {"job": slurm_job(comment="x watchdog=off y")},
        {"rule": Rule(acts=True, ladder=spec_of(IncidentKind.COLLECTIVE_HANG).ladder, source="t", refused="no")},
    ],
    "not_possible": [
        {"job": slurm_job(is_batch=False)},
        {"job": slurm_job(requeueable=False)},
        {"job": slurm_job(reason="JobHeldUser")},
    ],
    "evidence": [{"incident": replace(INCIDENT, actionable=False)}],
    "storage": [{"mounts_stalled": ("/shared",)}],
    "disk_full": [{"full": ("/scratch",)}],
    "busy": [{"busy": True}],
    "job_hangs": [{"incident": replace(INCIDENT, kind=IncidentKind.SLOW_NODE), "hang": "i9"}],
    "switch_unknown": [
        {"incident": replace(INCIDENT, kind=IncidentKind.SLOW_NODE), "loop_turns": True, "switch_unknown": "not yet"}
    ],
    "shared_switch": [
        {
            "incident": replace(INCIDENT, kind=IncidentKind.SLOW_NODE),
            "loop_turns": True,
            "switch_of_others": "job 8 would see it",
        }
    ],
    "chained": [
        {
            "incident": replace(INCIDENT, kind=IncidentKind.SLOW_NODE),
            "loop_turns": True,
            "waits_behind": ("8",),
        }
    ],
    "hours": [
        {"rule": Rule(acts=True, ladder=spec_of(IncidentKind.COLLECTIVE_HANG).ladder, source="t", no_action=(ALWAYS,))},
    ],
    "cooldown": [{"recent": (done(899),)}],
    "budget": [
        {"recent": tuple(done(10, f"{n}") for n in range(20, 24))},
        {"recent": (done(10, "20"),), "running_jobs": 9},
    ],
    "storm": [{"jobs_in_trouble": 3}, {"nodes_silent": 3}, {"storm_over_s": 10.0}],
    "attempts": [{"recent": (done(9000), done(8000), done(7000))}],
    "crash_loop": [{"crash_loop": "Job 7 restarts and dies again and again."}],
    "same_hang": [
        {
            "why_held": "the job hangs for the 3rd time after step 40.",
            "job": slurm_job(requeueable=False),
            "supervisor": SUPERVISOR,
        }
    ],
    "exclusions": [{"job": slurm_job(excluded_nodes=("a", "b", "c"))}],
}


@pytest.mark.parametrize(("guard", "change"), [(g, c) for g, changes in OBJECTIONS.items() for c in changes])
def test_each_guard_alone_takes_the_action_away_and_names_itself(guard: str, change: dict[str, Any]) -> None:
    decision = judge(**change)
    assert (decision.verdict, decision.by) == (Verdict.SUPPRESSED, guard)
    assert decision.reason
    assert not is_final(decision)


def test_every_guard_has_its_case_and_they_stand_in_this_order() -> None:
    assert [name for name, _ in GUARDS] == list(OBJECTIONS)


def test_the_first_guard_in_the_order_gives_its_name() -> None:
    assert judge(paused="x", blind="y", busy=True).by == "paused"
    assert judge(blind="y", busy=True, jobs_in_trouble=9).by == "blind"
    assert judge(jobs_in_trouble=9, recent=(done(1),)).by == "cooldown"


def test_what_is_just_within_the_limits_is_allowed() -> None:
    allowed = judge(
        recent=(done(901), done(8000), *(done(3601, "20") for _ in range(9))),
        jobs_in_trouble=2,
        nodes_silent=2,
    )
    assert allowed.verdict is Verdict.ALLOWED
    assert judge(job=slurm_job(excluded_nodes=("a", "n1", "b"))).verdict is Verdict.ALLOWED
    assert judge(job=slurm_job(requeueable=None)).verdict is Verdict.ALLOWED


def test_observing_is_the_last_word_and_no_guard_is_passed_over_for_it() -> None:
    assert (judge(mode="observe").verdict, judge(mode="observe").by) == (Verdict.OBSERVED, "mode")
    assert judge(mode="observe", busy=True).by == "busy"
    assert not is_final(judge(mode="observe"))


def test_an_outage_is_answered_by_nothing() -> None:
    assert judge(replace(INCIDENT, kind=IncidentKind.FILESYSTEM_OUTAGE)).action is Action.NONE


@pytest.mark.parametrize(
    ("guard", "change"),
    [
        (g, c)
        for g, changes in OBJECTIONS.items()
        for c in changes
        if not {"process_objection", "supervisor"} & c.keys()
    ],
)
def test_an_operator_is_held_back_only_by_what_protects_the_job(guard: str, change: dict[str, Any]) -> None:
    asked = replace(change.get("incident", INCIDENT), kind=IncidentKind.OPERATOR_RESTART)
    decision = judge(asked, **{k: v for k, v in change.items() if k != "incident"}, mode="observe")
    expected = (Verdict.SUPPRESSED, guard) if guard in ASKED_FOR else (Verdict.ALLOWED, "operator_restart")
    assert (decision.verdict, decision.by, decision.action) == (*expected, Action.GRACEFUL_RESTART)


def test_only_a_decision_that_differs_is_news() -> None:
    assert is_news(judge(), [])
    assert is_news(judge(busy=True), [])
    assert not is_news(judge(busy=True), [judge(busy=True)])
    assert is_news(judge(), [judge(busy=True)])
    assert is_news(judge(paused="x"), [judge(busy=True)])


def test_a_start_of_the_controller_is_no_news_about_an_incident_that_was_decided_about() -> None:
    blind = judge(blind="Slurm has not answered yet")
    assert is_news(blind, [])
    assert not is_news(blind, [judge(mode="observe")])
    assert not is_news(judge(mode="observe"), [judge(mode="observe")])


def test_evidence_that_comes_and_goes_is_told_once_if_nothing_else_was() -> None:
    weak = replace(INCIDENT, actionable=False)
    assert is_news(judge(weak), [])
    assert not is_news(judge(weak), [judge(mode="observe")])
    assert not is_news(judge(mode="observe"), [judge(mode="observe")])
    assert is_news(judge(), [judge(weak)])


@pytest.mark.parametrize("silent", range(1, 101))
def test_above_a_fifth_of_the_nodes_silent_nothing_is_done_whatever_else_is_clear(silent: int) -> None:
    decision = judge(nodes_known=100, nodes_silent=silent)
    expected = (Verdict.SUPPRESSED, "storm") if silent > 20 else (Verdict.ALLOWED, str(IncidentKind.COLLECTIVE_HANG))
    assert (decision.verdict, decision.by) == expected


def test_what_of_a_ladder_is_not_possible_is_left_out_and_said() -> None:
    ladder = (Rung.KILL_SWITCH, Rung.REQUEUE, Rung.RESUBMIT, Rung.CANCEL)
    rule = Rule(acts=True, ladder=ladder, source="t")
    situation = replace(SITUATION, rule=rule, job=slurm_job(requeueable=False), loop_turns=False)
    decision = decide(replace(situation, incident=INCIDENT, config=LIMITS), "d")
    assert decision.ladder == (Rung.RESUBMIT, Rung.CANCEL)
    assert decision.action is Action.RESUBMIT
    assert "no kill switch" in decision.reason and "no requeue" in decision.reason


def test_a_node_is_drained_only_where_the_rule_says_so_and_within_both_budgets() -> None:
    nodes = tuple(SlurmNode(name=f"n{n}", address="", state="IDLE") for n in range(1, 101))
    rule = Rule(acts=True, ladder=spec_of(IncidentKind.COLLECTIVE_HANG).ladder, source="t", drain=True)
    limits = replace(LIMITS, policy=Policy(max_drained_nodes=3, drained_percent=2.0))
    fits = decide(replace(SITUATION, rule=rule, nodes=nodes, incident=INCIDENT, config=limits), "d")
    assert fits.drain == ("n1",)
    out = (*nodes[:-2], *(replace(node, state="DRAINED") for node in nodes[-2:]))
    full = decide(replace(SITUATION, rule=rule, nodes=out, incident=INCIDENT, config=limits), "d")
    assert full.drain == () and "not drained" in full.reason and full.verdict is Verdict.ALLOWED
    shipped = decide(replace(SITUATION, nodes=nodes, incident=INCIDENT, config=limits), "d")
    assert shipped.drain == ()


FAULT = replace(
    INCIDENT,
    id="f",
    kind=IncidentKind.GPU_FAULT,
    subject="gpu:n2/GPU-1",
    exclude_nodes=("n2",),
    jobs_now=("7",),
    summary="Xid 79",
)


@pytest.mark.parametrize(
    ("fault", "others", "found"),
    [
        (FAULT, (), True),
        (FAULT, ("n2",), True),
        (replace(FAULT, jobs_now=()), (), True),  # nobody else can have been on it
        (replace(FAULT, jobs_now=()), ("n2",), False),
        (replace(FAULT, jobs_now=("8",)), ("n2",), False),
        (replace(FAULT, state=IncidentState.RESOLVED), (), False),
        (replace(FAULT, exclude_nodes=()), (), False),  # the evidence does not prove it
        (replace(FAULT, exclude_nodes=("n9",)), (), False),
        (replace(FAULT, kind=IncidentKind.SLOW_NODE), (), False),
    ],
)
def test_hardware_counts_as_broken_under_a_job_only_if_it_was_the_jobs(
    fault: Incident, others: tuple[str, ...], found: bool
) -> None:
    job = slurm_job()
    gone = slurm_job(job_id="6", nodes=("n2",), state="CANCELLED")  # Slurm lists it for minutes
    jobs = (job, slurm_job(job_id="8", nodes=others), gone)
    assert broken_under(job, [INCIDENT, fault], jobs) == ((("n2", "Xid 79"),) if found else ())


def test_a_restart_for_another_reason_avoids_broken_hardware_as_well_and_says_so() -> None:
    decision = judge(broken=(("n2", "GPU 0 of n2 fell off the bus."),), job=slurm_job(required_nodes=()))
    assert decision.verdict is Verdict.ALLOWED and decision.exclude == ("n1", "n2")
    assert "n2 is avoided: GPU 0 of n2 fell off the bus." in decision.reason
    many = tuple((f"n{n}", "broken") for n in range(2, 6))
    assert judge(broken=many).by == "exclusions", "so much that is broken is for a person to look at"
    asked = judge(replace(INCIDENT, kind=IncidentKind.OPERATOR_RESTART, exclude_nodes=()), broken=(("n2", "broken"),))
    assert asked.exclude == (), "a person says himself what to avoid"


def test_the_third_hang_in_the_same_place_is_requeued_and_stays_held() -> None:
    why = "the job hangs for the 3rd time after step 40."
    held = judge(why_held=why, supervisor=SUPERVISOR)
    assert (held.verdict, held.action, held.held_why) == (Verdict.ALLOWED, Action.HOLD, why)
    assert held.ladder == (Rung.EVIDENCE, Rung.REQUEUE)
    assert f"it is requeued and stays held: {why}" in held.reason
