"""ends_soon: maintenance and time limits that come before the job is done; planned states are nobody's fault."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_watchdog.detect.job_rules import ENDS_SOON, EndsSoon
from slurm_watchdog.model.cluster_view import Checkpoint
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.slurm import Reservation
from slurm_watchdog.model.slurm_states import is_away, is_lost, is_out
from tests.builders.views import cluster, job, progress, slurm_job

NOW = 1_800_000_000.0
HOUR = 3600.0


def maint(begins_s: float, *nodes: str, lasts_s: float = HOUR, flags: str = "MAINT,IGNORE_JOBS") -> Reservation:
    return Reservation(
        name="maint",
        start_at=NOW + begins_s,
        end_at=NOW + begins_s + lasts_s,
        nodes=nodes,
        flags=tuple(flags.split(",")),
    )


def truth(
    *reservations: Reservation,
    settings: EndsSoon | None = None,
    runs: Any = None,
    date: float | None = NOW,
    **of_job: Any,
) -> Truth | None:
    seen = job(job=slurm_job(**{"nodes": ("n1", "n2"), **of_job}), progress=runs or progress(5.0))
    found = ENDS_SOON.detect(cluster(seen, reservations=reservations, date=date), settings or EndsSoon())
    return found[0].truth if found else None


LIMIT = {"start_at": NOW - HOUR, "time_limit_s": 1.5 * HOUR}
HALF = EndsSoon(time_limit=1800.0)


@pytest.mark.parametrize(
    ("reservations", "more", "said"),
    [
        ((), {}, Truth.OK),
        ((maint(1800, "n2", "n9"),), {}, Truth.BAD),
        ((maint(-60, "n2"),), {}, Truth.OK),
        ((maint(-2 * HOUR, "n2"),), {}, Truth.OK),
        ((maint(2 * HOUR, "n2"),), {}, Truth.OK),
        ((maint(1800, "n9"),), {}, Truth.OK),
        ((maint(1800, "n2", flags="MAINT,TIME_FLOAT"),), {}, Truth.OK),
        ((maint(1800, "n2", flags="SPEC_NODES"),), {}, Truth.OK),
        ((maint(1800, "n2"),), {"reservation": "maint"}, Truth.OK),
        ((maint(1800, "n2"),), {"settings": EndsSoon(maintenance=0.0)}, Truth.OK),
        ((maint(1800, "n2"),), {"state": "SUSPENDED"}, Truth.UNKNOWN),
        ((maint(1800, "n2"),), {"date": None}, None),
        ((maint(1800, "n2"),), {"runs": progress(5.0, total_steps=600, step_s=10.0)}, Truth.OK),
        ((maint(1800, "n2"),), {"runs": progress(5.0, total_steps=660, step_s=10.0)}, Truth.BAD),
        ((maint(1800, "n2"),), LIMIT, Truth.OK),
        ((maint(1799, "n2"),), LIMIT, Truth.BAD),
        ((maint(1800, "n2"),), LIMIT | {"start_at": None}, Truth.BAD),
        ((maint(2400, "n2"),), LIMIT | {"settings": HALF}, Truth.BAD),
        ((), LIMIT, Truth.OK),
        ((), LIMIT | {"settings": HALF}, Truth.BAD),
        ((), LIMIT | {"settings": HALF, "time_limit_s": None}, Truth.OK),
        ((), LIMIT | {"settings": HALF, "time_limit_s": 2 * HOUR}, Truth.OK),
    ],
)
def test_it_fires_for_what_ends_the_job_before_it_is_done(reservations: Any, more: Any, said: Truth | None) -> None:
    assert truth(*reservations, **more) is said


def test_the_sentence_names_what_when_and_the_nodes_and_may_be_acted_on() -> None:
    seen = job(job=slurm_job(nodes=("n1", "n2")), checkpoint=Checkpoint(step=480, age_s=60.0))
    (found,) = ENDS_SOON.detect(cluster(seen, reservations=(maint(1800, "n2"),), date=NOW), EndsSoon())
    assert found.summary == (
        "Job 7 is not done when maintenance (reservation maint) takes n2, in 30 min. "
        "Its last complete checkpoint is of step 480."
    )
    assert found.actionable and [each.node for each in found.culprits] == ["n2"] and found.exclude_nodes == ()


def test_a_job_that_its_own_limit_ends_first_is_not_said_to_be_cut_by_a_later_maintenance() -> None:
    seen = job(job=slurm_job(nodes=("n1", "n2"), **LIMIT))
    (found,) = ENDS_SOON.detect(cluster(seen, reservations=(maint(2400, "n2"),), date=NOW), HALF)
    assert "its time limit of 90 min ends it" in found.summary and found.culprits == (), found.summary


@pytest.mark.parametrize(
    "state",
    ["IDLE+POWERED_DOWN", "IDLE+POWERING_DOWN", "idle~", "IDLE+POWERING_UP", "idle#", "IDLE+REBOOT_ISSUED",
     "IDLE+REBOOT_REQUESTED", "idle@", "IDLE+PLANNED", "idle-", "IDLE+MAINT", "maint$", "FUTURE"],
)  # fmt: skip
def test_power_saving_reboots_and_plans_are_no_faults(state: str) -> None:
    assert not is_lost(state) and not is_out(state)
    assert is_away(state) or "PLANNED" in state or state == "idle-"
