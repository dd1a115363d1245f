"""The last checkpoint from before a loss that went bad: which it is, whose, and which start it is named to."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from slurm_watchdog.analysis.good_checkpoint import resume_from, resumes_before
from slurm_watchdog.detect import job_rules
from slurm_watchdog.model.cluster_view import LossPoint
from slurm_watchdog.model.incidents import IncidentKind, IncidentState
from slurm_watchdog.model.observations import Checkpoint
from tests.builders.notices import INCIDENT
from tests.builders.views import cluster, job, progress

NOW = 1000.0
GOOD = "/d/run/global_step20"
DISK = Checkpoint(job_id="7", directory="/d/run", layout="deepspeed", step=20, path=GOOD, size_bytes=900)
LATER = replace(DISK, step=31, path="/d/run/global_step31")


def _points(losses: list[float]) -> tuple[LossPoint, ...]:
    return tuple(LossPoint(at=NOW - 500 + step, step=step, loss=loss) for step, loss in enumerate(losses))


NAN = job(losses=_points([2.0] * 30 + [math.nan] * 4), checkpoints_on_disk=(DISK,))


def test_an_incident_says_which_checkpoint_is_the_last_good_one() -> None:
    (found,) = job_rules.LOSS_NAN.detect(cluster(NAN))
    assert found.good_checkpoint == GOOD and found.actionable and GOOD in found.facts[1]
    (found,) = job_rules.LOSS_NAN.detect(cluster(replace(NAN, checkpoints_on_disk=(LATER,))))
    assert not found.good_checkpoint and not found.actionable
    both = replace(NAN, checkpoints_on_disk=(LATER,), earlier_checkpoints=(DISK, LATER))
    (found,) = job_rules.LOSS_NAN.detect(cluster(both))
    assert found.good_checkpoint == GOOD and not found.actionable, "by itself the trainer takes the damaged one"
    assert f"the last good one that was seen is {GOOD}, of step 20" in found.facts[1]
    high = job(losses=_points([2.0 + 0.01 * (n % 3) for n in range(60)] + [9.0] * 5), checkpoints_on_disk=(DISK,))
    (found,) = job_rules.LOSS_SPIKE.detect(cluster(high))
    assert not found.actionable and not found.good_checkpoint and GOOD in found.facts[1], "it may recover"
    writing = resumes_before(replace(NAN, checkpoints_on_disk=(replace(DISK, writing=True),)), 30)
    assert writing.good_path == GOOD and not writing.helps


def test_a_checkpoint_that_is_not_the_job_owners_is_never_the_last_good_one() -> None:
    theirs = replace(NAN, checkpoints_on_disk=(replace(DISK, foreign=True),))
    (found,) = job_rules.LOSS_NAN.detect(cluster(theirs))
    assert not found.good_checkpoint and GOOD not in " ".join(found.facts)


def test_the_next_start_is_named_the_last_good_one_of_an_open_incident_of_its_job() -> None:
    incident = replace(INCIDENT, kind=IncidentKind.LOSS_NAN, state=IncidentState.FIRING, good_checkpoint=GOOD)
    assert INCIDENT.job_ids == ("7",)
    assert resume_from(NAN, [incident], "") == GOOD
    over = replace(incident, state=IncidentState.RESOLVED)
    assert resume_from(NAN, [over, replace(incident, job_ids=("8",))], "") == ""


@pytest.mark.parametrize(
    ("saved_age_s", "on_disk", "step", "resumes"),
    [
        (None, (20, 40), 35, GOOD),  # it has made none of its own
        (200.0, (20, 40), 35, GOOD),  # before this start
        (10.0, (20, 40), 35, GOOD),  # one of step 30, and the damaged one of step 40 is still there
        (10.0, (30,), 35, ""),
        (10.0, (20, 40), 45, ""),  # written over by now
        (10.0, (30,), None, GOOD),
    ],
)
def test_a_start_that_went_back_is_gone_back_for_until_the_newest_checkpoint_is_its_own(
    saved_age_s: float | None, on_disk: tuple[int, ...], step: int | None, resumes: str
) -> None:
    disk = tuple(replace(DISK, step=each) for each in on_disk)
    view = job(run_age_s=100.0, saved_age_s=saved_age_s, checkpoints_on_disk=disk, progress=None)
    if step is not None:
        view = replace(view, progress=progress(5.0, step=step))
    assert resume_from(view, [], GOOD) == resumes
