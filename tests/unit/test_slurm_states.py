"""Every word that Slurm has for a job's state, and what the rest of the watchdog makes of it."""

from __future__ import annotations

import pytest

from watchdog.controller import run
from watchdog.model.slurm import SlurmJob
from watchdog.slurm import states
from watchdog.slurm.client import Refusal, SlurmRefused
from watchdog.slurm.requests import reachable
from watchdog.slurm.states import STAGES, Stage


@pytest.mark.parametrize("state", sorted(STAGES))
def test_each_state_belongs_to_one_stage_and_is_one_word(state: str) -> None:
    assert state.replace("_", "").isalpha()
    assert state.isupper()
    assert (state in states.FINISHED) == (STAGES[state] is Stage.OVER)
    assert not (state in states.WAITING and state in states.SIGNALLED)


@pytest.mark.parametrize("state", sorted(run.ACTIVE_STATES))
def test_what_the_controller_takes_for_running_has_processes(state: str) -> None:
    assert STAGES[state] is Stage.RUNS


@pytest.mark.parametrize("state", sorted(run.WAITS))
def test_what_the_controller_takes_for_waiting_will_run(state: str) -> None:
    assert STAGES[state] is Stage.WAITS


@pytest.mark.parametrize("state", sorted(STAGES))
def test_a_signal_goes_to_jobs_that_have_processes_and_to_no_other(state: str) -> None:
    job = SlurmJob(job_id="5", state=state)
    if STAGES[state] is Stage.RUNS:
        assert reachable(job, "5") is job
        return
    with pytest.raises(SlurmRefused) as caught:
        reachable(job, "5")
    over = STAGES[state] in {Stage.OVER, Stage.ENDS}
    assert caught.value.kind is (Refusal.FINISHED if over else Refusal.NOT_RUNNING)
    assert caught.value.terminal is over


def test_a_job_that_slurm_does_not_know_gets_no_signal() -> None:
    with pytest.raises(SlurmRefused, match="knows no job 5") as caught:
        reachable(None, "5")
    assert caught.value.kind is Refusal.NO_SUCH_JOB


@pytest.mark.parametrize(
    ("state", "reason", "priority", "held"),
    [
        ("PENDING", "JobHeldUser", 0, True),
        ("PENDING", "JobHeldAdmin", 0, True),
        ("PENDING", "Resources", 0, True),
        ("PENDING", "Resources", 1, False),
        ("PENDING", "BeginTime", None, False),
        ("PENDING", states.REQUEUED_HELD, None, True),
        ("COMPLETING", states.REQUEUED_HELD, 0, True),
        ("SPECIAL_EXIT", "None", 1, True),
        ("REQUEUE_HOLD", "None", 1, True),
        ("RESV_DEL_HOLD", "None", 1, True),
        # A suspended job has the priority 0 as well, and one that runs is not held whatever it is called.
        ("SUSPENDED", "None", 0, False),
        ("RUNNING", "JobHeldUser", 0, False),
        ("COMPLETED", "JobHeldUser", 0, False),
        ("SOMETHING_NEW", "None", 0, False),
    ],
)
def test_a_job_is_held_if_somebody_has_to_release_it(
    state: str, reason: str, priority: int | None, held: bool
) -> None:
    assert states.is_held(state, reason, priority) is held
