"""The ladder, one stage at a time: given what the journal holds and what the world shows, what comes next."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.controller.actions.ladder.next_move import next_move
from slurm_watchdog.controller.actions.ladder.state import (
    Execute,
    Finish,
    LadderLimits,
    Observed,
    Reconcile,
    Stage,
    Wait,
    stage_of,
)
from slurm_watchdog.model.actions import (
    Action,
    ActionRun,
    Decision,
    Fence,
    Operation,
    OperationOutcome,
    OperationRecord,
    Verdict,
)
from slurm_watchdog.model.slurm import SlurmJob

LIMITS = LadderLimits(kill_switch_s=60, checkpoint_s=300, exit_s=30, step_s=120, mount_s=600, confirm_s=900)
DECISION = Decision(
    id="d",
    incident_id="i",
    action=Action.REQUEUE,
    verdict=Verdict.ALLOWED,
    by="rule",
    reason="",
    decided_at=1000.0,
    fence=Fence(job_id="7", restarts=2, start_at=900.0),
    exclude=("n1",),
    nodes=("n1", "n2"),
    step_at_decision=500,
)
GRACEFUL = replace(DECISION, action=Action.GRACEFUL_RESTART, kill_switch="/k", kill_switch_uid=1)
DONE, FAILED, UNKNOWN = OperationOutcome.DONE, OperationOutcome.FAILED, OperationOutcome.UNKNOWN

RUNNING = {"state": "RUNNING", "restarts": 2}
ENDED = {"state": "COMPLETED", "restarts": 2}
HELD = {"state": "PENDING", "restarts": 3, "held": True}
QUEUED = {"state": "PENDING", "restarts": 3}
NEXT = {"state": "RUNNING", "restarts": 3}


def test_what_slurm_answers_badly_is_waited_for_until_the_limit_and_what_it_refuses_not_at_all() -> None:
    away, odd = {"job_known": False}, {"job_known": False, "unread": "uid"}
    assert move(None, **away) == Wait(reason="Slurm does not answer")
    assert isinstance(move(None, **odd, unread_s=5.0), Wait)
    ended = move(None, **odd, unread_s=LIMITS.confirm_s + 1)
    assert "could not be used: uid" in ended.end.detail
    assert "scontrol show job 7" in ended.end.detail
    assert "1+1" in move(None, **away, refused="'1+1' does not name one job").end.detail
    written = record(Operation.WRITE_KILL_SWITCH)
    assert move(None, written, **away, refused="x").operation is Operation.REMOVE_KILL_SWITCH


def record(
    operation: Operation, outcome: OperationOutcome | None = DONE, attempt: int = 1, at: float = 1000.0
) -> OperationRecord:
    return OperationRecord(
        operation=operation,
        attempt=attempt,
        intent_at=at,
        outcome=outcome,
        outcome_at=None if outcome is None else at,
        detail="x",
    )


def move(job: dict[str, Any] | None, *records: OperationRecord, decision: Decision = DECISION, **world: Any) -> Any:
    given = {"now": 1050.0, "job_known": True, "step": 500}
    seen = Observed(
        decision=decision,
        records=records,
        limits=LIMITS,
        **{**given, **world},
        job=None if job is None else SlurmJob(job_id="7", **job),
    )
    return next_move(seen)


@pytest.mark.parametrize(
    ("job", "stage"),
    [
        (None, Stage.GONE),
        (RUNNING, Stage.SAME_RUN),
        ({"state": "COMPLETING", "restarts": 2}, Stage.ENDING),
        (ENDED, Stage.FINISHED),
        (HELD, Stage.HELD),
        ({"state": "COMPLETING", "restarts": 3, "held": True}, Stage.HELD),
        (QUEUED, Stage.QUEUED),
        (NEXT, Stage.NEXT_RUN),
        ({"state": "CANCELLED", "restarts": 3}, Stage.NEXT_RUN),
        ({"state": "PENDING", "restarts": 4, "held": True}, Stage.NEXT_RUN),
        ({"state": "RUNNING", "restarts": 1}, Stage.GONE),
    ],
)
def test_where_the_job_stands_seen_from_the_fence(job: dict[str, Any] | None, stage: Stage) -> None:
    seen = None if job is None else SlurmJob(job_id="7", **job)
    assert stage_of(ActionRun(decision=DECISION), seen) is stage


def test_while_slurm_does_not_answer_nothing_is_done() -> None:
    assert isinstance(move(None, job_known=False), Wait)


def test_the_rungs_of_a_requeue_in_their_order() -> None:
    requeued = record(Operation.REQUEUE_HOLD)
    excluded = {**HELD, "excluded_nodes": ("old", "n1")}
    assert move(RUNNING) == Execute(operation=Operation.REQUEUE_HOLD, attempt=1, only_unfinished=True)
    assert move({**HELD, "excluded_nodes": ("old",)}, requeued) == Execute(
        operation=Operation.EXCLUDE, attempt=1, nodes=("old", "n1")
    )
    assert move(excluded, requeued, record(Operation.EXCLUDE)) == Execute(operation=Operation.RELEASE, attempt=1)
    released = (requeued, record(Operation.EXCLUDE), record(Operation.RELEASE))
    assert isinstance(move(QUEUED, *released), Wait)
    end = move({**NEXT, "excluded_nodes": ("n1",)}, *released, next_first_step=401).end
    assert (end.ok, end.resumed_at_step, end.steps_lost, end.downtime_s) == (True, 401, 100, 50.0)
    assert "without n1" in end.detail


@pytest.mark.parametrize(
    ("loaded", "words"),
    [(400, "first new step 401"), (401, "its log continues at step 401"), (None, "first new step 401")],
)
def test_the_step_of_the_checkpoint_itself_is_not_said_to_be_a_new_one(loaded: int | None, words: str) -> None:
    operations = (Operation.REQUEUE_HOLD, Operation.EXCLUDE, Operation.RELEASE)
    world = {"next_first_step": 401, "loaded_step": loaded}
    end = move({**NEXT, "excluded_nodes": ("n1",)}, *map(record, operations), **world).end
    assert words in end.detail


def test_the_rungs_of_a_graceful_restart_in_their_order() -> None:
    def graceful(job: dict[str, Any], *records: OperationRecord, **world: Any) -> Any:
        return move(job, *records, decision=GRACEFUL, **world)

    written, saved = record(Operation.WRITE_KILL_SWITCH), record(Operation.WAIT_CHECKPOINT)
    assert graceful(RUNNING) == Execute(operation=Operation.WRITE_KILL_SWITCH, attempt=1)
    assert isinstance(graceful(RUNNING, written), Wait)
    assert graceful(RUNNING, written, complete_checkpoint_step=510) == Execute(
        operation=Operation.WAIT_CHECKPOINT, attempt=1
    )
    assert isinstance(graceful(RUNNING, written, saved, now=1010.0), Wait)
    assert graceful(RUNNING, written, saved) == Execute(
        operation=Operation.REQUEUE_HOLD, attempt=1, only_unfinished=True
    )
    assert graceful(ENDED, written, saved) == Execute(
        operation=Operation.REQUEUE_HOLD, attempt=1, only_unfinished=False
    )
    requeued = (written, saved, record(Operation.REQUEUE_HOLD))
    held = {**HELD, "excluded_nodes": ("n1",)}
    assert graceful(held, *requeued) == Execute(operation=Operation.REMOVE_KILL_SWITCH, attempt=1)
    assert graceful(held, *requeued, record(Operation.REMOVE_KILL_SWITCH)) == Execute(
        operation=Operation.RELEASE, attempt=1
    )


@pytest.mark.parametrize(
    ("job", "records", "world", "words"),
    [
        (None, (), {}, "does not know"),
        (ENDED, (), {}, "not run again"),
        (QUEUED, (), {}, "without this action"),
        (RUNNING, (), {"step": 501}, "makes steps again"),
        (RUNNING, (), {"stalled_mounts": ("/s",), "now": 1601.0}, "did not answer"),
        (RUNNING, (record(Operation.REQUEUE_HOLD, FAILED),), {}, "refused"),
        (
            HELD,
            (record(Operation.REQUEUE_HOLD),),
            {"stalled_mounts": ("/s",), "now": 1601.0},
            "scontrol release",
        ),
        (HELD, (record(Operation.REQUEUE_HOLD), record(Operation.RELEASE)), {}, "held again by a user"),
        (
            {**NEXT, "state": "FAILED"},
            (record(Operation.REQUEUE_HOLD), record(Operation.RELEASE)),
            {},
            "without a new step",
        ),
        (NEXT, (record(Operation.REQUEUE_HOLD), record(Operation.RELEASE)), {"now": 1901.0}, "no new step"),
    ],
)
def test_it_ends_in_writing_and_touches_nothing_if(job: Any, records: Any, world: dict[str, Any], words: str) -> None:
    decision = replace(DECISION, exclude=())
    given = move(job, *records, decision=decision, **world)
    assert isinstance(given, Finish), given
    assert not given.end.ok
    assert words in given.end.detail


@pytest.mark.parametrize(
    ("job", "world", "needless"),
    [
        (RUNNING, {"step": 501}, True),
        (NEXT, {}, True),
        (ENDED, {}, False),
        (None, {}, False),
    ],
)
def test_an_action_that_nothing_is_left_to_do_for_has_not_failed(
    job: Any, world: dict[str, Any], needless: bool
) -> None:
    end = move(job, **world).end
    assert (end.needless, end.outcome) == (needless, "needless" if needless else "failed")


@pytest.mark.parametrize(
    ("job", "records", "world"),
    [
        ({"state": "COMPLETING", "restarts": 2}, (), {}),
        ({"state": "FAILED", "restarts": 2, "starts_again": True}, (), {}),
        (RUNNING, (), {"paused": True}),
        (RUNNING, (), {"stalled_mounts": ("/s",)}),
        (HELD, (record(Operation.REQUEUE_HOLD),), {"paused": True}),
        (HELD, (record(Operation.REQUEUE_HOLD),), {"stalled_mounts": ("/s",)}),
        (RUNNING, (record(Operation.REQUEUE_HOLD, UNKNOWN, at=1049.0),), {}),
        (NEXT, (record(Operation.REQUEUE_HOLD), record(Operation.RELEASE)), {}),
    ],
)
def test_it_waits_if(job: Any, records: Any, world: dict[str, Any]) -> None:
    assert isinstance(move(job, *records, decision=replace(DECISION, exclude=()), **world), Wait)


@pytest.mark.parametrize(
    ("operation", "job", "outcome"),
    [
        (Operation.REQUEUE_HOLD, RUNNING, UNKNOWN),
        (Operation.REQUEUE_HOLD, HELD, DONE),
        (Operation.REQUEUE_HOLD, NEXT, DONE),
        (Operation.RELEASE, HELD, UNKNOWN),
        (Operation.RELEASE, QUEUED, DONE),
        (Operation.EXCLUDE, HELD, UNKNOWN),
        (Operation.WRITE_KILL_SWITCH, RUNNING, UNKNOWN),
        (Operation.WAIT_CHECKPOINT, RUNNING, DONE),
    ],
)
def test_an_answer_that_was_lost_is_read_off_the_world(
    operation: Operation, job: dict[str, Any], outcome: OperationOutcome
) -> None:
    settled = move(job, record(operation, None))
    assert isinstance(settled, Reconcile)
    assert (settled.operation, settled.attempt, settled.outcome) == (operation, 1, outcome)


def test_a_graceful_restart_that_fails_takes_its_kill_switch_away_before_it_ends() -> None:
    written = record(Operation.WRITE_KILL_SWITCH)
    removing = Execute(operation=Operation.REMOVE_KILL_SWITCH, attempt=1)
    for job, world in ((RUNNING, {"now": 1301.0}), (None, {}), (ENDED, {"now": 1121.0, "ended_s": 121.0})):
        assert move(job, written, decision=GRACEFUL, **world) == removing
        end = move(job, written, record(Operation.REMOVE_KILL_SWITCH), decision=GRACEFUL, **world)
        assert isinstance(end, Finish) and not end.end.ok


def test_a_save_that_took_longer_than_agents_need_is_waited_for_after_the_end_of_the_job() -> None:
    written = record(Operation.WRITE_KILL_SWITCH)
    late: dict[str, Any] = {"decision": GRACEFUL, "now": 1600.0}
    assert isinstance(move(ENDED, written, **late, ended_s=1.0), Wait)
    saved = move(ENDED, written, **late, ended_s=8.0, complete_checkpoint_step=510)
    assert saved == Execute(operation=Operation.WAIT_CHECKPOINT, attempt=1)
    assert move(ENDED, written, **late, ended_s=121.0) == Execute(operation=Operation.REMOVE_KILL_SWITCH, attempt=1)


def test_a_job_that_heard_its_kill_switch_is_run_again_although_the_answer_was_lost() -> None:
    lost = record(Operation.WRITE_KILL_SWITCH, UNKNOWN)
    saved = record(Operation.WAIT_CHECKPOINT)
    heard: dict[str, Any] = {"decision": GRACEFUL, "complete_checkpoint_step": 500}
    assert move(ENDED, lost, **heard) == Execute(operation=Operation.WAIT_CHECKPOINT, attempt=1)
    requeue = Execute(operation=Operation.REQUEUE_HOLD, attempt=1, only_unfinished=False)
    assert move(ENDED, lost, saved, **heard) == requeue
    removed = record(Operation.REMOVE_KILL_SWITCH)
    assert isinstance(move(ENDED, lost, removed, **heard, total_steps=500), Finish)
    assert isinstance(move({**ENDED, "state": "CANCELLED"}, lost, removed, **heard), Finish)
    assert isinstance(move(ENDED, lost, removed, decision=GRACEFUL), Wait)
    assert isinstance(move(ENDED, lost, removed, decision=GRACEFUL, now=1121.0, ended_s=121.0), Finish)
    listening = {"decision": GRACEFUL, "now": 1121.0, "taken_up_at": 1100.0}
    assert isinstance(move(ENDED, lost, removed, **listening), Wait)


def test_a_kill_switch_is_taken_away_even_if_the_next_run_has_begun() -> None:
    records = (
        record(Operation.WRITE_KILL_SWITCH),
        record(Operation.WAIT_CHECKPOINT),
        record(Operation.REQUEUE_HOLD),
    )
    given = move(NEXT, *records, decision=GRACEFUL, next_first_step=401)
    assert given == Execute(operation=Operation.REMOVE_KILL_SWITCH, attempt=1)


ARRAY = replace(GRACEFUL, hold_first=("7_[2-3]",))


def test_elements_that_would_see_the_kill_switch_are_held_before_it_and_released_after_the_restart() -> None:
    held = (record(Operation.HOLD_OTHERS), record(Operation.WRITE_KILL_SWITCH), record(Operation.WAIT_CHECKPOINT))
    gone = (*held, record(Operation.REQUEUE_HOLD), record(Operation.REMOVE_KILL_SWITCH), record(Operation.RELEASE))
    release = Execute(operation=Operation.RELEASE_OTHERS, attempt=1)
    assert move(RUNNING, decision=ARRAY) == Execute(operation=Operation.HOLD_OTHERS, attempt=1)
    assert move(RUNNING, held[0], decision=ARRAY) == Execute(operation=Operation.WRITE_KILL_SWITCH, attempt=1)
    assert isinstance(move(QUEUED, *gone, decision=ARRAY), Wait)
    assert move(NEXT, *gone, decision=ARRAY) == release
    assert isinstance(move(NEXT, *gone, record(Operation.RELEASE_OTHERS), decision=ARRAY), Wait)
    assert move(NEXT, *gone, decision=ARRAY, next_first_step=401) == release


def test_elements_that_are_held_are_released_only_after_the_switch_is_gone_however_the_action_ends() -> None:
    held = (record(Operation.HOLD_OTHERS), record(Operation.WRITE_KILL_SWITCH))
    late: dict[str, Any] = {"decision": ARRAY, "now": 1301.0}
    assert move(RUNNING, *held, **late) == Execute(operation=Operation.REMOVE_KILL_SWITCH, attempt=1)
    removed = (*held, record(Operation.REMOVE_KILL_SWITCH))
    assert move(RUNNING, *removed, **late) == Execute(operation=Operation.RELEASE_OTHERS, attempt=1)
    assert move(None, held[0], decision=ARRAY) == Execute(operation=Operation.RELEASE_OTHERS, attempt=1)
    refused = record(Operation.RELEASE_OTHERS, FAILED)
    end = move(RUNNING, *removed, refused, **late).end
    assert not end.ok and "`scontrol release 7_[2-3]` lets them run" in end.detail


def test_without_its_elements_held_no_kill_switch_is_written() -> None:
    end = move(RUNNING, record(Operation.HOLD_OTHERS, FAILED), record(Operation.RELEASE_OTHERS), decision=ARRAY).end
    assert not end.ok and "hold_others was refused" in end.detail and "left alone" in end.detail


@pytest.mark.parametrize(
    ("job", "world"),
    [
        ({**ENDED, "state": "CANCELLED"}, {}),
        (ENDED, {"total_steps": 500}),
        (ENDED, {"total_steps": 499}),
        (ENDED, {"total_steps": 510, "complete_checkpoint_step": 510}),
    ],
)
def test_a_job_that_is_finished_or_was_cancelled_is_not_run_again_after_its_checkpoint(job: Any, world: Any) -> None:
    records = (
        record(Operation.WRITE_KILL_SWITCH),
        record(Operation.WAIT_CHECKPOINT),
        record(Operation.REMOVE_KILL_SWITCH),
    )
    assert isinstance(move(job, *records, decision=GRACEFUL, **world), Finish)


def test_a_job_that_ended_well_before_its_last_lines_were_read_is_run_again_only_once_they_had_their_time() -> None:
    records = (record(Operation.WRITE_KILL_SWITCH), record(Operation.WAIT_CHECKPOINT))
    saved: dict[str, Any] = {"decision": GRACEFUL, "total_steps": 520, "complete_checkpoint_step": 500}
    assert isinstance(move(ENDED, *records, **saved, ended_s=2.0), Wait)
    assert isinstance(move(ENDED, *records, **saved, ended_s=2.0, step=520), Execute)  # finished: the kill switch goes
    requeue = Execute(operation=Operation.REQUEUE_HOLD, attempt=1, only_unfinished=False)
    assert move(ENDED, *records, **saved, ended_s=16.0) == requeue
    assert move({**ENDED, "state": "FAILED"}, *records, **saved, ended_s=2.0) == requeue


def test_a_time_that_passed_while_slurm_was_away_does_not_use_up_the_tries() -> None:
    late = move(RUNNING, record(Operation.REQUEUE_HOLD, UNKNOWN), now=5000.0)
    assert late == Execute(operation=Operation.REQUEUE_HOLD, attempt=2)
    tries = [record(Operation.REQUEUE_HOLD, UNKNOWN, n) for n in (1, 2, 3)]
    assert isinstance(move(RUNNING, *tries, now=5000.0), Finish)


def test_a_node_that_cannot_be_excluded_does_not_keep_the_job_held() -> None:
    requeued = record(Operation.REQUEUE_HOLD)
    refused = record(Operation.EXCLUDE, FAILED)
    in_vain = [record(Operation.EXCLUDE, UNKNOWN, n) for n in (1, 2, 3)]
    assert move(HELD, requeued, refused) == Execute(operation=Operation.RELEASE, attempt=1)
    assert move(HELD, requeued, *in_vain, now=1200.0) == Execute(operation=Operation.RELEASE, attempt=1)
    end = move(NEXT, requeued, refused, record(Operation.RELEASE), next_first_step=401).end
    assert end.ok and "without" not in end.detail


def test_a_job_that_no_restart_helps_stays_held_and_says_why() -> None:
    held = replace(DECISION, exclude=(), held_why="why")
    end = move(HELD, record(Operation.REQUEUE_HOLD), decision=held).end
    assert end.ok and end.detail.endswith("`scontrol release` lets it run. why")


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("JobArrayTaskLimit", "(JobArrayTaskLimit: another element of its array runs, and the array allows no more at once (%))"),
        ("(Priority)", "(Priority: jobs of higher priority come first)"),
        ("ReqNodeNotAvail, UnavailableNodes:n[3-4]", "(ReqNodeNotAvail: nodes that it needs are down, drained or reserved)"),
        ("QOSMaxGRESPerUser", "(QOSMaxGRESPerUser)"),
        ("None", ""),
    ],
)  # fmt: skip
def test_a_released_job_that_waits_says_what_for(reason: str, said: str) -> None:
    released = (record(Operation.REQUEUE_HOLD), record(Operation.RELEASE))
    job = {**QUEUED, "excluded_nodes": ("n1",), "reason": reason}
    waits = move(job, *released)
    assert isinstance(waits, Wait)
    assert waits.reason == f"the job is waiting in the queue {said}".rstrip()
    over = move(job, *released, now=3000.0)
    assert isinstance(over, Finish)
    assert not over.end.ok
    assert over.end.detail.startswith(f"released, and still waiting in the queue {said}".rstrip())
