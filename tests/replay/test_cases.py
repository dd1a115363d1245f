"""Rows of the case book as traces without stacks, and the healthy things that look like them: what is found,
who is named, and that nothing else is told beside it."""

from __future__ import annotations

from typing import Any

import pytest

from slurm_watchdog.model.incidents import Incident
from tests.replay.scenes import JOB
from tests.replay.stories import COMPUTES, SAVES, SPINS, TRAINS, WAITS, Story, few

SHAPES = [{"step_s": 10.0}, {"step_s": 105.0, "every_s": 10.0}, {"nodes": 6, "per_node": 8, "every_s": 10.0}]


def told(story: Story) -> list[Incident]:
    """Incidents that fired, or are pending and not explained by another."""
    found = story.play().incidents
    return [i for i in found if i.fired_at is not None or i.inhibited_by is None]


def only(story: Story) -> Incident:
    found = told(story)
    assert len(found) == 1, [(i.kind, i.state, i.summary) for i in found]
    return found[0]


def limit_s(story: Story) -> float:
    return max(60.0, 3 * story.step_s * 1.15)


@pytest.mark.parametrize("shape", SHAPES)
def test_case_1_a_frozen_filesystem_on_two_nodes_is_an_outage_and_nothing_else(shape: dict[str, Any]) -> None:
    story = Story(**shape)
    story.train(12)
    story.fault("frozen filesystem", 0)
    other = story.per_node

    def frozen(rank: int, s: float) -> dict[str, Any]:
        stuck = {**SAVES, "path": "/gpfs/m4/main_log.txt", "state_age_s": s, "cpu": 0.0}
        return stuck if rank in (0, other) else SPINS

    story.go_on(limit_s(story) + 200, frozen)
    found = only(story)
    assert (found.kind, [c.rank for c in found.culprits]) == ("filesystem_outage", [0, other])
    assert found.detected_after_s is not None
    assert found.detected_after_s <= 75


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("power", [True, False])
def test_case_2_the_rank_that_waits_for_its_data_while_the_others_spin(shape: dict[str, Any], power: bool) -> None:
    story = Story(**shape, power=power)
    story.train(14)
    culprit = story.per_node + 1
    story.fault("data loader", culprit)
    story.go_on(limit_s(story) + 60, few({culprit: WAITS}, SPINS))
    found = only(story)
    assert (found.kind, [c.rank for c in found.culprits]) == ("collective_hang", [culprit])
    assert found.culprits[0].gpu_uuid == f"GPU-{culprit}"
    assert found.detected_after_s is not None
    assert found.detected_after_s <= limit_s(story) + 15


@pytest.mark.parametrize("shape", SHAPES)
def test_cases_2_and_3_all_gpus_are_busy_at_low_power_and_a_reporter_goes_on_writing(
    shape: dict[str, Any],
) -> None:
    story = Story(**shape)
    story.train(25)
    story.fault("evaluation")
    culprit = story.per_node + 1
    quiet = {**SPINS, "state": "S", "cpu": 0.01}
    pulse = lambda: story.log("[2022-04-01] PULSE: tr11-176B-ml is running for 2 days (1882409 on 'gpu_p13')")  # noqa: E731
    story.go_on(limit_s(story) + 100, few({culprit: quiet}, SPINS), pulse)
    found = only(story)
    assert (found.kind, [c.rank for c in found.culprits]) == ("collective_hang", [culprit])


def test_case_5_a_rank_is_gone_and_the_others_wait() -> None:
    story = Story()
    story.train(12)
    story.fault("dead rank", 5)
    story.go_on(420, few({5: None}, SPINS))
    found = {i.kind: i for i in told(story)}
    assert set(found) == {"dead_rank", "lingering_job"}
    assert all([c.rank for c in i.culprits] == [5] for i in found.values())
    assert found["dead_rank"].inhibited_by == found["lingering_job"].id


@pytest.mark.parametrize("left", [range(8), range(4)])
@pytest.mark.parametrize("doing", [WAITS, SPINS])
def test_case_18_ranks_that_stay_after_the_last_step(left: Any, doing: dict[str, Any]) -> None:
    story = Story(total=30)
    story.train(30)
    story.fault("teardown")
    story.go_on(660, lambda rank, s: doing if rank in left or s < 20 else None)
    found = only(story)
    assert (found.kind, [c.rank for c in found.culprits]) == ("wedged_teardown", list(left))


def test_case_18_ranks_that_sit_there_after_a_traceback() -> None:
    story = Story()
    story.train(12)
    story.fault("traceback", 2)
    story.log("[rank2]: Traceback (most recent call last):")
    story.log("[rank2]: ValueError: cannot reshape")
    story.go_on(120, few({2: WAITS}, WAITS))
    found = told(story)
    assert "wedged_teardown" in {i.kind for i in found}
    assert not {"collective_hang", "stalled_progress", "gpu_idle_rank"} & {i.kind for i in found}


def test_a_rank_that_was_stopped_is_told_once_and_its_job_is_no_hang() -> None:
    story = Story()
    story.train(12)
    story.fault("stopped", 6)
    story.go_on(150, lambda rank, s: {**WAITS, "state": "T", "state_age_s": s} if rank == 6 else SPINS)
    found = only(story)
    assert (found.kind, [c.rank for c in found.culprits]) == ("rank_stopped", [6])


def test_a_card_that_falls_off_the_bus_is_told_and_what_its_rank_does_then_is_not() -> None:
    story = Story()
    story.train(12)
    story.fault("off the bus", 5)
    story.say(
        {
            "kind": "kmsg",
            "node": "n1",
            "line": "NVRM: Xid (PCI:0000:c1:00): 79, pid=280063, name=python, GPU has fallen off the bus.",
        }
    )
    story.go_on(40, few({5: {**WAITS, "state": "Z"}}, SPINS))
    assert [i.kind for i in told(story) if i.kind != "gpu_fault"] == []


# ------------------------------------------------------------------------------------------------ healthy


def healthy_evaluation(story: Story) -> None:
    """Twelve minutes that the log does not announce."""
    story.train(12)
    story.go_on(720, lambda rank, s: {**TRAINS, "gpu": {"util": 90, "power_w": 240.0}})
    story.train(5)


def healthy_checkpoint(story: Story) -> None:
    """Half an hour by rank 0 that nobody announces, the others in a barrier."""
    story.train(12)
    story.go_on(1780, few({0: SAVES}, SPINS))
    story.train(5)


def healthy_checkpoint_computed(story: Story) -> None:
    story.train(12)
    story.go_on(600, few({0: COMPUTES}, SPINS))
    story.train(5)


def healthy_announced_checkpoint(story: Story) -> None:
    """The log announces it, and rank 0 looks as if it waited."""
    story.train(12)
    story.log(f"saving checkpoint at iteration {story.step:7d} to /gpfs/m4/ckpt")
    story.go_on(1780, few({0: WAITS}, SPINS))
    story.log(f"  successfully saved checkpoint at iteration {story.step:7d} to /gpfs/m4/ckpt")
    story.train(5)


def healthy_sharded_checkpoint(story: Story) -> None:
    story.train(12)
    story.go_on(900, lambda rank, s: SAVES if int(s / 20 + rank) % 2 else SPINS)
    story.train(5)


def healthy_index(story: Story) -> None:
    """A long index that rank 0 builds between two steps."""
    story.train(12)
    story.go_on(1200, few({0: COMPUTES}, {**SPINS, "state": "S", "cpu": 0.02}))
    story.train(5)


def healthy_start(story: Story) -> None:
    """Compilation for forty minutes, with hardly a GPU at work."""
    story.go_on(1200, few({0: COMPUTES}, WAITS))
    story.go_on(1200, lambda rank, s: COMPUTES)
    story.train(8)


def healthy_ramp(story: Story) -> None:
    """The batch grows, and the steps with it."""
    for factor in (1.0, 1.3, 1.7, 2.2, 2.9, 3.8):
        story.train(10, slower=factor, batch=int(512 * factor))


def healthy_end(story: Story) -> None:
    """The last step, a last evaluation, a last checkpoint, and ranks that leave one after the other."""
    story.total = 15
    story.train(15)
    story.go_on(700, lambda rank, s: {**TRAINS, "gpu": {"util": 90, "power_w": 240.0}})
    story.go_on(600, few({0: SAVES}, SPINS))
    story.log("training finished")
    story.go_on(60, lambda rank, s: WAITS if s < 10 * rank or rank == 0 else None)
    story.say({"kind": "job", "job_id": JOB, "state": "COMPLETED"})
    story.go_on(30, lambda rank, s: None)


HEALTHY = (
    healthy_evaluation, healthy_checkpoint, healthy_checkpoint_computed, healthy_announced_checkpoint, healthy_sharded_checkpoint,
    healthy_index, healthy_start, healthy_ramp, healthy_end,
)  # fmt: skip


@pytest.mark.parametrize("tell", HEALTHY)
@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("power", [True, False])
def test_replay_of_a_healthy_story_reports_nothing(tell: Any, shape: dict[str, Any], power: bool) -> None:
    story = Story(**shape, power=power)
    tell(story)
    assert [(i.kind, i.state, i.summary) for i in story.play().incidents] == []
