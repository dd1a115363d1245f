"""Every word that Slurm has for a job's or a node's state, and what the rest of the watchdog makes of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurm_watchdog.model import slurm_states as table
from slurm_watchdog.model.slurm import SlurmJob
from slurm_watchdog.slurm import parse
from slurm_watchdog.slurm.client import Refusal, SlurmRefused
from slurm_watchdog.slurm.request_guard import require_running

SETS = {
    "waits": table.WAITING,
    "started": table.STARTED,
    "runs": table.RUNNING,
    "nodes": table.HOLDS_NODES,
    "had": table.HAD_PROCESSES,
    "alive": table.ALIVE,
    "comes": table.COMES,
    "requeued": table.REQUEUED,
    "holdable": table.CAN_BE_HELD,
    "held": table.HELD,
    "over": table.OVER,
    "failed": table.FAILED,
    "person": table.ENDED_BY_PERSON,
    "outside": table.ENDED_FROM_OUTSIDE,
    "restartable": table.RESTARTABLE,
}
WAITS = "waits alive comes requeued holdable"
HELD = "waits alive comes requeued held"
RUNS = "started runs nodes had alive comes"
JOBS = {
    "PENDING": WAITS,
    "REQUEUED": WAITS,
    "REQUEUE_FED": WAITS,
    "EXPEDITING": WAITS,
    "REQUEUE_HOLD": HELD,
    "SPECIAL_EXIT": HELD,
    "RESV_DEL_HOLD": HELD,
    "CONFIGURING": "started nodes alive comes",
    "POWER_UP_NODE": "started nodes alive comes",
    "RUNNING": f"{RUNS} restartable",
    "SUSPENDED": RUNS,
    "STOPPED": RUNS,
    "SIGNALING": RUNS,
    "RESIZING": RUNS,
    "UPDATE_DB": RUNS,
    "STAGE_OUT": RUNS,
    "COMPLETING": "nodes had alive requeued holdable",
    "COMPLETED": "over",
    "PREEMPTED": "over outside",
    "TIMEOUT": "over outside",
    "CANCELLED": "over person outside",
    "DEADLINE": "over person outside",
    "REVOKED": "over person outside",
    "BOOT_FAIL": "over failed outside",
    "FAILED": "over failed",
    "LAUNCH_FAILED": "over failed",
    "NODE_FAIL": "over failed outside",
    "OUT_OF_MEMORY": "over failed",
    "RECONFIG_FAIL": "over failed",
    "NEVER_HEARD_OF": "",
    "": "",
}


def test_every_state_of_the_table_has_its_row_here() -> None:
    assert set(table.JOB_STATES) == set(JOBS) - {"NEVER_HEARD_OF", ""}


@pytest.mark.parametrize("state", JOBS)
def test_a_jobs_state_is_in_its_sets_and_in_no_other(state: str) -> None:
    assert {name for name, words in SETS.items() if state in words} == set(JOBS[state].split())


@pytest.mark.parametrize("state", JOBS)
def test_processes_of_a_job_of_unknown_state_may_be_on_its_nodes(state: str) -> None:
    assert table.may_hold_nodes(state) is ("nodes" in JOBS[state].split() or not JOBS[state])


def test_no_other_module_keeps_a_set_of_states_of_its_own() -> None:
    """Two of them differ sooner or later, and the difference is a wrong restart."""
    words = "|".join(state for state in table.JOB_STATES if state not in {"FAILED", "CANCELLED", "COMPLETED"})
    several = re.compile(rf'"(?:{words})",\s*"(?:{words}|FAILED|CANCELLED|COMPLETED)"')
    package = Path(table.__file__).parents[1]
    assert [str(path) for path in package.rglob("*.py") if several.search(path.read_text())] == []


NODES = {
    # state: (lost, away, in a budget of nodes that are out, starts jobs)
    "IDLE": (False, False, False, True),
    "ALLOCATED": (False, False, False, True),
    "MIXED": (False, False, False, True),
    "IDLE+CLOUD": (False, False, False, True),
    "MIXED+CLOUD": (False, False, False, True),
    "IDLE+PLANNED": (False, False, False, True),
    "mixed-": (False, False, False, True),
    "IDLE+DYNAMIC_NORM": (False, False, False, True),
    "IDLE+RESERVED": (False, False, False, True),
    "IDLE+COMPLETING": (False, False, False, True),
    "DOWN": (True, False, True, False),
    "DOWN*": (True, False, True, False),
    "DOWN+NOT_RESPONDING": (True, False, True, False),
    "DOWN+CLOUD+NOT_RESPONDING": (True, False, True, False),
    "DOWN+CLOUD+POWERED_DOWN": (True, True, True, False),
    "DOWN+REBOOT_ISSUED+NOT_RESPONDING": (True, True, True, False),
    "IDLE+FAIL": (True, False, True, False),
    "ALLOCATED+FAIL": (True, False, True, False),
    "MIXED+NOT_RESPONDING": (True, False, True, False),
    "ALLOCATED*": (True, False, True, False),
    "ERROR": (True, False, True, False),
    "IDLE+DRAIN": (False, True, True, False),
    "DRAINED": (False, True, True, False),
    "MIXED+DRAIN": (False, False, True, False),
    "IDLE+COMPLETING+DRAIN": (False, False, True, False),
    "DOWN+DRAIN": (True, False, True, False),
    "IDLE~": (False, True, False, True),
    "IDLE+CLOUD+POWERED_DOWN": (False, True, False, True),
    "IDLE+POWERING_DOWN": (False, True, False, True),
    "MIXED+CLOUD+NOT_RESPONDING+POWERING_UP": (True, True, False, True),
    "IDLE+POWER_DOWN": (False, True, False, True),
    "ALLOCATED+POWER_DOWN": (False, False, False, True),
    "FUTURE": (False, True, False, False),
    "IDLE+REBOOT_ISSUED": (False, True, False, False),
    "IDLE+REBOOT_REQUESTED": (False, True, False, True),
    "MIXED+REBOOT_REQUESTED": (False, False, False, True),
    "MAINT": (False, True, False, False),
    "IDLE+MAINTENANCE+RESERVED": (False, True, False, False),
    "MIXED+MAINTENANCE+RESERVED": (False, False, False, False),
    "IDLE+MAINTENANCE+PLANNED": (False, True, False, False),
    "IDLE+BLOCKED": (False, False, False, False),
    "UNKNOWN+NOT_RESPONDING": (True, False, True, False),
    "INVALID_REG": (False, False, False, False),
    "": (False, False, False, False),
}


@pytest.mark.parametrize("state", NODES)
def test_a_nodes_state_says_whether_it_is_lost_away_out_or_open(state: str) -> None:
    told = table.is_lost(state), table.is_away(state), table.is_out(state), table.starts_jobs(state)
    assert told == NODES[state]
    assert not table.is_away(state, job_runs_there=True)


@pytest.mark.parametrize("word", table.NODE_WORDS)
def test_a_property_of_a_node_never_hides_that_a_job_has_it(word: str) -> None:
    assert table.is_away(f"ALLOCATED+{word}") is (word in table.ABSENT)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("IDLE*+DRAIN", {"IDLE", "NOT_RESPONDING", "DRAIN", "DRAINED"}),
        ("mixed-", {"MIXED", "PLANNED"}),
        ("ALLOCATED+DRAIN", {"ALLOCATED", "DRAIN"}),
        ("idle@", {"IDLE", "REBOOT_REQUESTED"}),
        ("", set()),
        (None, set()),
    ],
)
def test_slurms_states_of_nodes_are_taken_apart(state: str | None, words: set[str]) -> None:
    assert table.node_words(state) == words


def test_a_node_under_maintenance_starts_the_jobs_of_a_reservation() -> None:
    assert table.starts_jobs("IDLE+MAINTENANCE+RESERVED", in_maintenance=True)
    assert not table.starts_jobs("IDLE+MAINTENANCE+DRAIN", in_maintenance=True)


@pytest.mark.parametrize("state", sorted(table.JOB_STATES))
def test_a_signal_goes_to_jobs_that_have_processes_and_to_no_other(state: str) -> None:
    job = SlurmJob(job_id="5", state=state)
    if state in table.RUNNING:
        assert require_running(job, "5") is job
        return
    with pytest.raises(SlurmRefused) as caught:
        require_running(job, "5")
    over = state in table.OVER or state == "COMPLETING"
    assert caught.value.kind is (Refusal.FINISHED if over else Refusal.NOT_RUNNING)
    assert caught.value.terminal is over


def test_a_job_that_slurm_does_not_know_gets_no_signal() -> None:
    with pytest.raises(SlurmRefused, match="knows no job 5") as caught:
        require_running(None, "5")
    assert caught.value.kind is Refusal.NO_SUCH_JOB


@pytest.mark.parametrize(
    ("state", "reason", "priority", "held"),
    [
        ("PENDING", "JobHeldUser", 0, True),
        ("PENDING", "JobHeldAdmin", 0, True),
        ("PENDING", "Resources", 0, True),
        ("PENDING", "Resources", 1, False),
        ("PENDING", "BeginTime", None, False),
        ("PENDING", parse.REQUEUED_HELD, None, True),
        ("COMPLETING", parse.REQUEUED_HELD, 0, True),
        ("SPECIAL_EXIT", "None", 1, True),
        ("REQUEUE_HOLD", parse.REQUEUED_HELD, 0, True),
        ("REQUEUE_HOLD", "None", None, True),
        # Seen on 25.11.7: released, and no room for it yet.
        ("REQUEUE_HOLD", "Resources", 1, False),
        ("RESV_DEL_HOLD", "None", 1, True),
        # A suspended job has the priority 0 as well, and one that runs is not held whatever it is called.
        ("SUSPENDED", "None", 0, False),
        ("RUNNING", "JobHeldUser", 0, False),
        ("COMPLETED", "JobHeldUser", 0, False),
        ("SOMETHING_NEW", "None", 0, False),
    ],
)
def test_a_job_is_held_if_somebody_has_to_release_it(state: str, reason: str, priority: int | None, held: bool) -> None:
    assert parse.is_held(state, reason, priority) is held
