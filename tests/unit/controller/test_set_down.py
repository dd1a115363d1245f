"""When a node may be set DOWN that holds a requeued job up, and what is said where it may not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.actuate.by_slurm import objection
from slurm_watchdog.controller.actions.ladder.next_move import next_move
from slurm_watchdog.controller.actions.ladder.state import (
    Execute,
    LadderLimits,
    Observed,
    StuckNode,
    Wait,
    stuck_nodes,
    why_it_waits,
)
from slurm_watchdog.model.actions import (
    Action,
    Decision,
    Fence,
    Operation,
    OperationOutcome,
    OperationRecord,
    Verdict,
)
from slurm_watchdog.model.observations import BY_CLAIM, BY_SLURM, Process, Role
from slurm_watchdog.model.slurm import SlurmJob, SlurmNode, SlurmView, is_unkillable
from tests.builders.views import slurm_job

FENCE = Fence(job_id="7", restarts=0, start_at=900.0)
JOB = slurm_job(job_id="7", state="COMPLETING", restarts=1, nodes=("n2",))
NODE = SlurmNode(name="n2", address="", state="IDLE+COMPLETING+DRAIN", reason="Kill task failed (JobId=7 StepId=0)")
OTHER = slurm_job(job_id="8", nodes=("n2", "n3"))


def why(
    job: SlurmJob | None = JOB,
    node: SlurmNode | None = NODE,
    *others: SlurmJob,
    partial: str = "",
    unkillable: bool = False,
) -> str:
    jobs = (*((job,) if job else ()), *others)
    return objection(job, node, SlurmView(jobs=jobs, nodes=(), partial=partial), FENCE, unkillable=unkillable)


def test_a_node_on_which_slurm_has_given_up_and_nobody_else_runs_may_be_set_down() -> None:
    assert why() == ""
    assert why(JOB, NODE, replace(OTHER, state="COMPLETED"), replace(OTHER, job_id="9", nodes=("n3",))) == ""
    assert why(JOB, replace(NODE, reason="Kill task failed")) == ""


OBJECTIONS: dict[str, tuple[SlurmJob | None, SlurmNode | None, tuple[SlurmJob, ...], str]] = {
    "the job is not known": (None, NODE, (), ""),
    "the node is not known": (JOB, None, (), ""),
    "the job cannot be read": (replace(JOB, unreadable=("restarts",)), NODE, (), ""),
    "the job waits in the queue": (replace(JOB, state="PENDING"), NODE, (), ""),
    "it is the run of the decision": (replace(JOB, restarts=0), NODE, (), ""),
    "it is a later run": (replace(JOB, restarts=2), NODE, (), ""),
    "another node holds it": (replace(JOB, nodes=("n1",)), NODE, (), ""),
    "the node is not drained": (JOB, replace(NODE, state="IDLE+COMPLETING"), (), ""),
    "a person drained it": (JOB, replace(NODE, reason="bad fan"), (), ""),
    "it was done before": (JOB, replace(NODE, reason="slurm-watchdog: processes of job 7"), (), ""),
    "it is down": (JOB, replace(NODE, state="DOWN+DRAIN"), (), ""),
    "another job is stuck there": (JOB, replace(NODE, reason="Kill task failed (JobId=71 StepId=0)"), (), ""),
    "another job runs there": (JOB, NODE, (OTHER,), ""),
    "another job ends there": (JOB, NODE, (replace(OTHER, state="COMPLETING"),), ""),
    "a job of unknown state is there": (JOB, NODE, (replace(OTHER, state="UNREADABLE"),), ""),
    "a job may be anywhere": (JOB, NODE, (replace(OTHER, nodes=(), unreadable=("nodes",)),), ""),
    "not all jobs are shown": (JOB, NODE, (), "PrivateData"),
}


@pytest.mark.parametrize("case", OBJECTIONS)
def test_whatever_is_not_certain_keeps_the_node_as_it_is(case: str) -> None:
    job, node, others, partial = OBJECTIONS[case]
    assert why(job, node, *others, partial=partial)
    proven = why(job, node, *others, partial=partial, unkillable=True)
    assert bool(proven) == (case != "the node is not drained"), "what an agent shows overrules nothing else"


def process(pid: int, state: str, rank: int | None) -> Process:
    return Process(
        pid=pid, start_ticks=1, job_id="7", role=Role.RANK, comm="python", state=state, uid=1000, rank=rank,
        member_by=BY_SLURM, state_age_s=40.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("seen", "answer"),
    [
        (process(9, "D", 3), True),
        (replace(process(9, "D", 3), state_age_s=20.0), False),
        (replace(process(9, "D", 3), state_age_s=None), False),
        (replace(process(9, "D", 3), member_by=BY_CLAIM), False),
        (process(9, "S", 3), False),
        (process(9, "Z", 3), False),
    ],
)
def test_a_process_in_slurms_own_group_that_stays_in_state_d_cannot_be_killed(seen: Process, answer: bool) -> None:
    assert is_unkillable((process(8, "S", 0), seen), 30.0) is answer
    assert is_unkillable((), 30.0) is False


def test_the_sentence_names_the_process_the_node_and_the_command() -> None:
    (stuck,) = stuck_nodes(
        JOB, {"n2": NODE}, (JOB,), "", 1, lambda _: (process(8, "S", None), process(9, "D", 3)), 30.0
    )
    assert stuck.objection == ""
    sentence = why_it_waits((stuck,))
    assert "n2 (process 9 (python, rank 3) in state D, process 8 (python) in state S)" in sentence
    assert "scontrol update NodeName=n2 State=DOWN" in sentence
    assert "ends every job there" in sentence


def test_no_node_is_set_down_beyond_the_drain_budget() -> None:
    (stuck,) = stuck_nodes(JOB, {"n2": NODE, "n1": replace(NODE, name="n1")}, (JOB,), "", 1, lambda _: (), 30.0)
    assert "2 nodes are out of service, and 1 may be" in stuck.objection


RELEASED = (
    OperationRecord(
        operation=Operation.REQUEUE_HOLD,
        attempt=1,
        intent_at=1000.0,
        outcome=OperationOutcome.DONE,
        outcome_at=1001.0,
    ),
    OperationRecord(
        operation=Operation.RELEASE,
        attempt=1,
        intent_at=1002.0,
        outcome=OperationOutcome.DONE,
        outcome_at=1003.0,
    ),
)
STUCK = StuckNode(name="n2")
DECISION = Decision(
    id="d", incident_id="i", action=Action.REQUEUE, verdict=Verdict.ALLOWED, by="rule", reason="", decided_at=999.0, fence=FENCE
)  # fmt: skip


def move(after_s: float, *records: OperationRecord, stuck: StuckNode = STUCK, **world: Any) -> Any:
    limits = LadderLimits(
        kill_switch_s=60, checkpoint_s=300, exit_s=30, step_s=120, mount_s=600, confirm_s=900, set_down_after_s=after_s
    )  # fmt: skip
    records = (*RELEASED, *records)
    seen = Observed(
        decision=DECISION, records=records, limits=limits, now=1100.0, job_known=True, job=JOB, stuck=(stuck,), **world
    )
    return next_move(seen)


def test_the_rung_is_off_unless_a_site_wants_it_and_then_it_is_climbed_once() -> None:
    off = move(0.0)
    assert isinstance(off, Wait)
    assert "scontrol update NodeName=n2 State=DOWN" in off.reason
    assert move(60.0) == Execute(operation=Operation.SET_DOWN, attempt=1, nodes=("n2",))
    assert isinstance(move(600.0), Wait), "not before its time"
    assert "job 8 runs there" in move(60.0, stuck=StuckNode(name="n2", objection="job 8 runs there")).reason
    assert "paused" in move(60.0, paused=True).reason
    done = OperationRecord(
        operation=Operation.SET_DOWN,
        attempt=1,
        intent_at=1090.0,
        outcome=OperationOutcome.DONE,
        outcome_at=1091.0,
    )
    assert isinstance(move(60.0, done), Wait)
