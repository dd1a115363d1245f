"""From findings to incidents: what opens, fires, freezes, is explained away and closes."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from slurm_watchdog.detect.registry import KINDS, causes_of
from slurm_watchdog.model.incidents import (
    Culprit,
    Finding,
    IncidentKind,
    StackRequest,
    Truth,
)
from tests.builders.incident_story import FIRING, PENDING, RESOLVED, Story, says

BAD, OK, UNKNOWN = says(Truth.BAD), says(Truth.OK), says(Truth.UNKNOWN)
HANG = IncidentKind.COLLECTIVE_HANG
OUTAGE = says(Truth.BAD, IncidentKind.FILESYSTEM_OUTAGE, subject="mount:k", actionable=False)
OUTAGE_OVER = replace(OUTAGE, truth=Truth.OK, job_ids=())


def test_bad_fires_at_once_without_a_hold_and_says_how_long_it_took() -> None:
    story = Story()
    assert story.after(0, BAD) == [(HANG, FIRING)]
    assert story.last[0].detected_after_s == 70.0
    assert story.last[0].runs == (("7", 0),)


def test_a_hold_keeps_it_pending_and_ok_in_between_leaves_no_trace() -> None:
    story = Story(hold_s=5)
    assert story.after(0, BAD) == [(HANG, PENDING)]
    assert story.after(4, BAD) == [(HANG, PENDING)]
    assert story.after(0, OK) == []
    assert story.after(1, BAD) == [(HANG, PENDING)]
    assert story.after(5, BAD) == [(HANG, FIRING)]


def test_it_resolves_after_ten_seconds_of_ok_without_a_break() -> None:
    story = Story()
    story.after(0, BAD)
    assert story.after(1, OK) == [(HANG, FIRING)]
    assert story.after(9, BAD) == [(HANG, FIRING)]
    assert story.after(1, OK) == [(HANG, FIRING)]
    assert story.after(9, UNKNOWN) == [(HANG, FIRING)]
    assert story.after(1, OK) == [(HANG, FIRING)]
    assert story.after(10, OK) == [(HANG, RESOLVED)]


def test_unknown_and_silence_open_nothing_and_close_nothing() -> None:
    story = Story()
    assert story.after(0, UNKNOWN) == []
    story.after(0, BAD)
    assert story.after(1000, UNKNOWN) == [(HANG, FIRING)]
    assert story.after(1000) == [(HANG, FIRING)]


def test_a_pending_incident_does_not_fire_while_nobody_can_say_that_it_is_still_bad() -> None:
    story = Story(hold_s=5)
    story.after(0, BAD)
    assert story.after(100, UNKNOWN) == [(HANG, PENDING)]
    assert story.after(100) == [(HANG, PENDING)]


def test_what_is_not_bad_at_this_moment_is_not_to_be_acted_on() -> None:
    for other in ([UNKNOWN], [OK], []):
        story = Story()
        story.after(0, BAD)
        assert story.open[0].actionable
        story.after(1, *other)
        assert not story.open[0].actionable
        story.after(1, BAD)
        assert story.open[0].actionable


def test_an_outage_hides_the_hang_and_the_hang_does_not_fire_on_what_was_seen_before_it_ended() -> None:
    story = Story()
    assert story.after(0, OUTAGE, BAD) == [(IncidentKind.FILESYSTEM_OUTAGE, FIRING), (HANG, PENDING)]
    story.after(1, OUTAGE_OVER, UNKNOWN)
    assert story.after(11, OUTAGE_OVER, UNKNOWN) == [
        (IncidentKind.FILESYSTEM_OUTAGE, RESOLVED),
        (HANG, PENDING),
    ]
    assert story.after(1, UNKNOWN) == [(HANG, PENDING)]
    assert story.after(1, OK) == []


def test_an_outage_explains_the_stall_of_the_same_mount_and_the_dead_rank_and_no_other_job() -> None:
    story = Story()
    stall = says(Truth.BAD, IncidentKind.FILESYSTEM_STALL, subject="mount:k")
    dead = says(Truth.BAD, IncidentKind.LINGERING_JOB)
    other = says(Truth.BAD, subject="job:8", job_ids=("8",))
    assert story.after(0, OUTAGE, stall, dead, other) == [
        (IncidentKind.FILESYSTEM_OUTAGE, FIRING),
        (IncidentKind.FILESYSTEM_STALL, PENDING),
        (IncidentKind.LINGERING_JOB, PENDING),
        (HANG, FIRING),
    ]


def test_a_hang_that_fires_already_is_explained_by_an_outage_that_is_seen_later() -> None:
    story = Story()
    story.after(0, BAD)
    story.after(1, BAD, OUTAGE)
    assert story.open[0].inhibited_by == story.open[1].id


def test_a_suspicion_keeps_a_pending_hang_from_firing_but_not_for_ever() -> None:
    story = Story()
    wanted = (StackRequest(job_id="7"),)
    maybe = says(Truth.UNKNOWN, IncidentKind.FILESYSTEM_STALL, subject="mount:k", wanted=wanted)
    assert story.after(0, maybe, BAD) == [(HANG, PENDING)]
    assert story.after(5, replace(maybe, truth=Truth.OK), BAD) == [(HANG, FIRING)]
    assert story.after(5, maybe, BAD) == [(HANG, FIRING)]


def test_the_end_of_the_job_or_a_new_run_closes_its_incident() -> None:
    for world in ({"restarts": {}, "over": frozenset({"7"})}, {"restarts": {"7": 1}}):
        story = Story()
        story.after(0, BAD)
        story.world = world
        assert story.after(1, BAD) == [(HANG, RESOLVED)]


def test_a_filesystem_incident_of_which_nobody_speaks_any_more_ends_with_its_jobs() -> None:
    story = Story()
    story.after(0, OUTAGE)
    assert story.after(5000) == [(IncidentKind.FILESYSTEM_OUTAGE, FIRING)]
    story.world = {"restarts": {}, "over": frozenset({"7"})}
    assert story.after(1, OUTAGE) == [(IncidentKind.FILESYSTEM_OUTAGE, FIRING)]
    assert story.after(1) == [(IncidentKind.FILESYSTEM_OUTAGE, RESOLVED)]


def test_an_incident_that_is_acted_on_is_left_alone_and_one_of_an_operator_while_its_run_lasts() -> None:
    story = Story()
    story.after(0, BAD)
    before = story.open[0]
    story.world = {"restarts": {"7": 1}, "acting": frozenset({before.id})}
    story.after(1000, OK)
    assert story.open == [before]
    story.world = {"restarts": {"7": 0}}
    story.open = [replace(before, kind=IncidentKind.OPERATOR_RESTART, runs=(("7", 0),))]
    assert story.after(1000, OK) == [(IncidentKind.OPERATOR_RESTART, FIRING)]
    story.world = {"restarts": {"7": 1}}
    assert story.after(1000, OK) == [(IncidentKind.OPERATOR_RESTART, RESOLVED)]


def test_the_job_that_the_newest_finding_names_first_stands_first() -> None:
    story = Story()
    stall = says(Truth.BAD, IncidentKind.FILESYSTEM_STALL, subject="mount:k", culprits=(Culprit(node="n1"),))
    story.after(0, stall)
    story.after(1, replace(stall, job_ids=("8",), culprits=()))
    assert story.open[0].job_ids == ("8", "7")
    assert story.open[0].culprits == (Culprit(node="n1"),)


def test_a_job_that_has_got_over_it_is_remembered_and_no_longer_acted_on() -> None:
    story = Story()
    stall = says(Truth.BAD, IncidentKind.FILESYSTEM_STALL, subject="mount:k", job_ids=("7", "8"))
    story.after(0, stall)
    assert story.last[0].jobs_now == ("7", "8")
    story.after(5, replace(stall, job_ids=("8",)))
    assert story.last[0].jobs_now == ("8",)
    assert set(story.last[0].job_ids) == {"7", "8"}


# ------------------------------------------------------------------------------------------------ which explains which


def told(story: Story) -> set[IncidentKind]:
    """What is open and not explained by something else."""
    return {incident.kind for incident in story.open if incident.inhibited_by is None}


def bad(kind: IncidentKind, **changes: Any) -> Finding:
    return says(Truth.BAD, kind, actionable=False, **changes)


def test_nothing_explains_itself_by_way_of_others() -> None:
    """In a circle of explanations everything would be hidden."""

    def causes(kind: IncidentKind, seen: tuple[IncidentKind, ...]) -> None:
        assert kind not in seen, (*seen, kind)
        for cause in causes_of(kind):
            causes(cause, (*seen, kind))

    for kind in KINDS:
        causes(kind, ())


def test_whatever_hangs_is_one_incident_under_its_first_cause() -> None:
    names = (IncidentKind.COLLECTIVE_HANG, IncidentKind.STALLED_PROGRESS, IncidentKind.GPU_IDLE_RANK)
    for cause in (
        OUTAGE,
        bad(IncidentKind.FILESYSTEM_STALL, subject="mount:k"),
        bad(IncidentKind.LINGERING_JOB),
        bad(IncidentKind.RANK_STOPPED),
    ):
        story = Story()
        story.after(0, cause, *(bad(kind) for kind in names))
        assert told(story) == {cause.kind}
    story = Story()
    story.after(0, *(bad(kind) for kind in names))
    assert told(story) == {IncidentKind.COLLECTIVE_HANG}


def test_a_job_that_is_stopped_by_somebody_is_a_hang_again_when_it_goes_on_and_hangs() -> None:
    story = Story()
    stopped = bad(IncidentKind.RANK_STOPPED)
    assert story.after(0, stopped, BAD) == [(IncidentKind.RANK_STOPPED, FIRING), (HANG, PENDING)]
    over = replace(stopped, truth=Truth.OK)
    story.after(1, over, BAD)
    assert story.after(11, over, BAD) == [(IncidentKind.RANK_STOPPED, RESOLVED), (HANG, FIRING)]


def test_a_card_that_stops_a_program_explains_its_dead_rank_and_not_a_hang_that_can_be_mended() -> None:
    card = bad(IncidentKind.GPU_FAULT, subject="gpu:n1/GPU-1")
    story = Story()
    story.after(
        0,
        card,
        bad(IncidentKind.DEAD_RANK),
        bad(IncidentKind.STALLED_PROGRESS),
        bad(IncidentKind.GPU_IDLE_RANK),
    )
    assert told(story) == {IncidentKind.GPU_FAULT}
    # Nothing is done about a card, and a requeue helps the job: so the hang, and a job that lingers, are told
    # and acted on.
    story = Story()
    story.after(0, card, BAD)
    assert told(story) == {IncidentKind.GPU_FAULT, HANG}
    # A card that only should be exchanged one day is about no job, and explains nothing.
    story = Story()
    story.after(0, replace(card, job_ids=()), bad(IncidentKind.DEAD_RANK))
    assert told(story) == {IncidentKind.GPU_FAULT, IncidentKind.DEAD_RANK}


def test_a_node_that_slurm_has_lost_explains_the_ranks_that_died_with_it() -> None:
    story = Story()
    story.after(
        0,
        bad(IncidentKind.NODE_DOWN, subject="node:n1"),
        bad(IncidentKind.DEAD_RANK),
        bad(IncidentKind.STALLED_PROGRESS),
    )
    assert told(story) == {IncidentKind.NODE_DOWN}


def test_what_is_wrong_with_a_card_outlives_the_job_that_suffered_from_it() -> None:
    story = Story()
    card = bad(IncidentKind.GPU_FAULT, subject="gpu:n1/GPU-1")
    story.after(0, card)
    story.world = {"restarts": {}, "over": frozenset({"7"})}
    assert story.after(10, replace(card, job_ids=())) == [(IncidentKind.GPU_FAULT, FIRING)]
    assert story.after(3000) == [(IncidentKind.GPU_FAULT, FIRING)]
    assert story.after(601) == [(IncidentKind.GPU_FAULT, RESOLVED)]


def test_a_job_that_stands_does_not_wait_for_stacks_that_may_never_come() -> None:
    story = Story()
    suspicion = replace(UNKNOWN, wanted=(StackRequest(job_id="7"),))
    assert story.after(0, suspicion, bad(IncidentKind.STALLED_PROGRESS)) == [(IncidentKind.STALLED_PROGRESS, FIRING)]
    story.after(60, BAD, bad(IncidentKind.STALLED_PROGRESS))
    assert told(story) == {HANG}


def test_who_stays_in_its_teardown_is_told_although_those_that_left_are_a_suspicion_of_their_own() -> None:
    story = Story()
    suspicion = replace(UNKNOWN, kind=IncidentKind.LINGERING_JOB, wanted=(StackRequest(job_id="7"),), duration_s=200.0)
    assert story.after(0, suspicion, bad(IncidentKind.WEDGED_TEARDOWN)) == [(IncidentKind.WEDGED_TEARDOWN, FIRING)]


def test_a_wedged_teardown_explains_the_hang_in_it() -> None:
    story = Story()
    story.after(
        0,
        BAD,
        bad(IncidentKind.WEDGED_TEARDOWN),
        bad(IncidentKind.STALLED_PROGRESS),
        bad(IncidentKind.LOG_ERROR),
    )
    assert told(story) == {IncidentKind.WEDGED_TEARDOWN}


def test_a_card_that_cost_a_rank_keeps_its_name_when_the_job_runs_again() -> None:
    story = Story()
    first = Culprit(node="n1", rank=3, pid=42, gpu_uuid="GPU-3")
    fault = says(Truth.BAD, IncidentKind.GPU_FAULT, subject="gpu:n1/GPU-3", culprits=(first,))
    story.after(0, fault)
    story.after(60, replace(fault, culprits=(Culprit(node="n1", gpu_uuid="GPU-3"),)))
    assert story.last[0].culprits == (first,)
    other = Culprit(node="n1", pid=77, gpu_uuid="GPU-3")
    story.after(60, replace(fault, culprits=(other,)))
    assert story.last[0].culprits == (other,)


def test_who_was_named_stays_so_until_a_finding_clears_them() -> None:
    story = Story()
    named = says(Truth.BAD, IncidentKind.COLLECTIVE_HANG, culprits=(Culprit(node="n1", rank=3),))
    story.after(0, named)
    story.after(60, replace(named, culprits=()))
    assert [each.rank for each in story.last[0].culprits] == [3]
    story.after(60, replace(named, culprits=(), clears=True))
    assert story.last[0].culprits == ()
