"""A restart in the job's own allocation: when it is chosen, what it leaves out, and what is said of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.actuate.by_agent import Time, restart_step, write_kill_switch, write_order
from slurm_watchdog.controller.actions.ladder.state import UNSEEN, steps_lost
from slurm_watchdog.controller.policy.decision import decide
from slurm_watchdog.controller.policy.rules import Rule
from slurm_watchdog.detect.registry import spec_of
from slurm_watchdog.knowledge.rungs import problem_of
from slurm_watchdog.model.actions import Action, Decision, Fence, OperationOutcome, Rung, Verdict
from slurm_watchdog.model.incidents import IncidentKind
from slurm_watchdog.model.protocol import Command, CommandResult, GiveOrder
from slurm_watchdog.model.supervisor import (
    PROTOCOL,
    OrderAnswer,
    Sighting,
    SupervisorState,
    SupervisorStatus,
)
from tests.builders.notices import told
from tests.builders.policy_inputs import INCIDENT, LIMITS, SITUATION
from tests.builders.views import slurm_job

LADDER = (Rung.EVIDENCE, Rung.RESTART_STEP, Rung.REQUEUE)
SUPERVISOR = SupervisorStatus(
    protocol=PROTOCOL, state=SupervisorState.RUNNING, step_id="3", nodes=("n1", "n2"), spares=("n3",), restarts_left=2
)


def judge(supervisor: SupervisorStatus | None, ladder: tuple[Rung, ...] = LADDER, **changes: Any) -> Decision:
    rule = Rule(acts=True, ladder=ladder, source="test", exclude_nodes=changes.pop("exclude_nodes", True))
    return decide(
        replace(SITUATION, rule=rule, supervisor=supervisor, **changes, incident=INCIDENT, config=LIMITS), "d"
    )


def test_a_supervised_job_is_restarted_in_place_without_the_blamed_node() -> None:
    decision = judge(SUPERVISOR)
    assert (decision.verdict, decision.action, decision.ladder) == (Verdict.ALLOWED, Action.RESTART_STEP, LADDER)
    assert (decision.step_id, decision.avoid) == ("3", ("n1",))
    assert "job 7 is being restarted in its allocation" in told(INCIDENT, decision).sentence


def test_a_job_without_supervisor_is_requeued_as_ever_and_not_a_word_is_said_about_one() -> None:
    decision = judge(None)
    assert (decision.action, decision.ladder) == (Action.REQUEUE, (Rung.EVIDENCE, Rung.REQUEUE))
    assert (decision.step_id, decision.avoid) == ("", ())
    assert "restart_step" not in decision.reason


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"restarts_left": 0}, "--max-restarts"), ({"state": SupervisorState.OVER}, "ended"), ({"step_id": ""}, "step")],
)
def test_a_supervisor_that_cannot_leaves_it_to_the_queue_and_the_reason_is_given(
    changes: dict[str, Any], why: str
) -> None:
    decision = judge(replace(SUPERVISOR, **changes))
    assert decision.action is Action.REQUEUE
    assert "no restart_step" in decision.reason
    assert why in decision.reason


def test_a_job_that_slurm_may_not_requeue_is_restarted_in_place_all_the_same() -> None:
    job = slurm_job(requeueable=False)
    assert judge(SUPERVISOR, job=job).verdict is Verdict.ALLOWED
    refused = judge(None, job=job)
    assert (refused.verdict, refused.by) == (Verdict.SUPPRESSED, "not_possible")
    assert "slurm-watchdog run" in refused.reason


def test_nodes_stay_in_use_where_the_rule_excludes_none_or_they_run_nothing_of_the_job() -> None:
    assert judge(SUPERVISOR, exclude_nodes=False).avoid == ()
    assert judge(replace(SUPERVISOR, nodes=("n2", "n3"), spares=())).avoid == ()


GOOD = "/d/run/iter_0000500"


@pytest.mark.parametrize(
    ("actionable", "supervisor", "verdict", "named"),
    [
        (True, SUPERVISOR, Verdict.ALLOWED, GOOD),
        (True, None, Verdict.ALLOWED, ""),
        (False, SUPERVISOR, Verdict.SUPPRESSED, GOOD),
    ],
)
def test_a_bad_loss_is_answered_only_where_the_newest_checkpoint_is_good_and_that_one_is_named(
    actionable: bool, supervisor: Any, verdict: Verdict, named: str
) -> None:
    incident = replace(
        INCIDENT, kind=IncidentKind.LOSS_NAN, actionable=actionable, good_checkpoint=GOOD, exclude_nodes=()
    )
    rule = Rule(acts=True, ladder=LADDER, source="test", may_ask=False)
    situation = replace(SITUATION, rule=rule, supervisor=supervisor, resume_from=GOOD)
    decision = decide(replace(situation, incident=incident, config=LIMITS), "d")
    assert (decision.verdict, decision.resume_from) == (verdict, named)
    if verdict is Verdict.SUPPRESSED:
        assert decision.by == "evidence"
    elif named:
        assert f"the checkpoint {GOOD} is passed to it" in decision.reason


def test_an_order_names_its_checkpoint_as_it_is() -> None:
    """A name with any letters: nothing of it is composed into a line of ours."""
    asked: list[Command] = []

    async def ask(node: str, command: Command, deadline_s: float) -> CommandResult:
        asked.append(command)
        return CommandResult(command_id=command.id, ok=True)

    path = "/d/run's/iter_0000500"
    decision = replace(judge(SUPERVISOR), resume_from=path, uid=1000)
    outcome, _ = asyncio.run(write_order(ask, decision, "n1", 5.0, lambda: None))
    (command,) = asked
    assert isinstance(command, GiveOrder)
    assert (outcome, command.order.resume_from, command.uid) == (OperationOutcome.DONE, path, 1000)


@pytest.mark.parametrize(
    ("step_id", "fails", "asked", "outcome"),
    [
        ("3", (), [{"n2"}, {"n1", "n3"}], OperationOutcome.DONE),
        ("", (), [{"n1", "n2", "n3"}], OperationOutcome.DONE),
        ("3", ("n2",), [{"n2"}], OperationOutcome.UNKNOWN),
    ],
)
def test_the_kill_switch_of_a_supervised_job_is_on_its_batch_host_before_a_trainer_sees_it_elsewhere(
    step_id: str, fails: tuple[str, ...], asked: list[set[str]], outcome: OperationOutcome
) -> None:
    decision = replace(
        judge(SUPERVISOR), step_id=step_id, nodes=("n1", "n2", "n3"), kill_switch="/run/slurm-watchdog/jobs/7.0/kill"
    )
    rounds: list[set[str]] = []
    answers: list[asyncio.Future[None]] = []

    async def ask(node: str, command: Command, deadline_s: float) -> CommandResult:
        if not answers or answers[-1].done():
            answers.append(asyncio.get_running_loop().create_future())
            asyncio.get_running_loop().call_soon(answers[-1].set_result, None)
            rounds.append(set())
        rounds[-1].add(node)
        await answers[-1]
        return CommandResult(command_id=command.id, ok=node not in fails, error="gone" if node in fails else "")

    got, words = asyncio.run(write_kill_switch(ask, decision, 10.0, "n2"))
    assert (rounds, got) == (asked, outcome)
    assert ("written on 3 nodes" in words) == (outcome is OperationOutcome.DONE)


def test_restart_step_is_the_first_of_the_rungs_that_end_a_run() -> None:
    assert problem_of(LADDER) is None
    assert "restart_step must come before" in (problem_of((Rung.REQUEUE, Rung.RESTART_STEP)) or "")


def test_steps_lost_are_a_range_where_the_first_lines_of_the_new_step_may_have_been_missed() -> None:
    """Checkpoint at 20, hang after 24, and 25 is the first line that counts: five more may have been written before."""
    assert steps_lost(24, 1, 25, 1, 20).words == "0 steps lost"
    assert steps_lost(24, 1, 25, 1, 20, unseen=UNSEEN + 5).words == "0 to 4 steps lost"


async def answer_of_a_supervisor(
    written_at: float, read_every: bool, status: SupervisorStatus = SUPERVISOR
) -> tuple[OperationOutcome, str]:
    """What becomes of an order that was written at 0, where the supervisor's last word is from `written_at`."""
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def ask(node: str, command: Command, deadline_s: float) -> CommandResult:
        return CommandResult(command_id=command.id, ok=True)

    def seen() -> Sighting:
        return Sighting(status=status, written_at=written_at, read_at=now if read_every else written_at)

    fence = Fence(job_id="7", restarts=0, start_at=None)
    decision = replace(judge(SUPERVISOR), fence=fence)
    return await restart_step(ask, decision, "n1", 5, 60, seen, Time(lambda: now, sleep))


def test_an_order_to_a_supervisor_that_was_killed_before_it_fails_once_nobody_could_take_it_any_more() -> None:
    outcome, why = asyncio.run(answer_of_a_supervisor(-20.0, read_every=True))
    assert (outcome, why) == (OperationOutcome.FAILED, "the supervisor did not take the order within 60 s")


@pytest.mark.parametrize(
    ("written_at", "more_starts", "read_every", "expected"),
    [
        (1.0, 0, True, OperationOutcome.FAILED),
        (1.0, 1, True, OperationOutcome.UNKNOWN),
        (1.0, 0, False, OperationOutcome.UNKNOWN),
        (70.0, 0, True, OperationOutcome.FAILED),
    ],
    ids=[
        "died over it",
        "died after it had begun the next start",
        "no news from the supervisor",
        "lives, and is too slow",
    ],
)
def test_an_order_that_was_taken_has_failed_once_it_is_certain_that_no_step_of_it_runs(
    written_at: float, more_starts: int, read_every: bool, expected: OperationOutcome
) -> None:
    taken = replace(SUPERVISOR, order="d", answer=OrderAnswer.TAKEN, starts=SUPERVISOR.starts + more_starts)
    outcome, why = asyncio.run(answer_of_a_supervisor(written_at, read_every, taken))
    assert outcome is expected, why


def test_what_became_of_an_order_is_not_known_while_the_agent_of_the_batch_host_is_silent() -> None:
    assert asyncio.run(answer_of_a_supervisor(-20.0, read_every=False))[0] is OperationOutcome.UNKNOWN


def test_a_lost_node_is_left_to_slurm_but_for_a_job_that_lives_on_with_a_supervisor() -> None:
    lost = replace(INCIDENT, kind=IncidentKind.NODE_DOWN, exclude_nodes=("n1",))
    rule = Rule(acts=True, ladder=spec_of(IncidentKind.NODE_DOWN).ladder, source="test")
    situation = replace(SITUATION, rule=rule, nodes_silent=1, nodes_known=4, mounts_stalled=())
    there = decide(replace(replace(situation, supervisor=SUPERVISOR), incident=lost, config=LIMITS), "d")
    assert (there.verdict, there.action, there.avoid) == (Verdict.ALLOWED, Action.RESTART_STEP, ("n1",))
    without = decide(replace(situation, incident=lost, config=LIMITS), "d")
    assert without.action is Action.NONE
    assert "left to Slurm" in without.reason
