"""A phase that the log announces, however its lines come to the controller: no healthy job is beyond its limit, and a
hang behind it is reported in time.

PHASE_STORIES=20000 tells so many instead of the usual number, PHASE_STORY=4711 one."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree

import pytest
from msgspec.structs import replace

from slurm_watchdog.analysis.progress_limit import loop_clock
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.detect.collective_hang import CollectiveHang, hang_finding
from slurm_watchdog.model.incidents import Truth
from slurm_watchdog.model.observations import Event, EventKind
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from tests.builders.phase_stories import UP_S, Delivery, Story, make_story
from tests.builders.thorough import first
from tests.builders.views import RECV, process, slurm_job, stack

SETTINGS = CollectiveHang()
STORIES = int(os.environ.get("PHASE_STORIES", "2000")) // 16 * 16
ONE = os.environ.get("PHASE_STORY", "")
PARTS = 16
SLACK_S = 60.0
"""Until a look, a scan and a report have brought the last fact."""
STEPS_OF_A_GAP = 3
"""Steps whose reports were lost, or came too old, count for one: a run of a dozen is still in its warm-up then."""
IN_PHASE_S = 3 * 240.0 + 3700.0
"""The longest limit of a phase."""
SLEEPS = ("<module> (train.py:47)",)


def is_reported(state: ClusterState, now: float) -> bool:
    """Whether a job beyond its limit, of which rank 0 stands in code of its own and the others wait, is a hang."""
    for back_s in (4.0, 2.0, 0.0):
        stacks = (stack(0, SLEEPS), *(stack(n, RECV) for n in range(1, 4)))
        state.runs.add_snapshot("7", 0, stacks, (), now - back_s)
    view = state.job_view("7", now)
    assert view is not None
    return hang_finding(view, now, SETTINGS).truth is Truth.BAD


def knows_pace(story: Story, delivery: Delivery) -> bool:
    """Whether enough is left of the story's steps for the controller to know the pace of the run."""
    gaps = sum(note.endswith(("cut n1", "lost n1")) for note in delivery.notes)
    told = sum(at > delivery.forgot_at + 10.0 for at in story.steps)
    return told > SETTINGS.warmup_steps + 1 + STEPS_OF_A_GAP * gaps


def is_patient(story: Story, delivery: Delivery) -> bool:
    """Whether it hangs in a phase; or two files tell the story, and of one of them something was lost: which of their
    lines came first is not known then."""
    return story.in_phase or (bool(delivery.notes) and any(file for _, file, _ in story.lines))


def longest_limit_s(story: Story, delivery: Delivery) -> float:
    """No limit of the training is longer: from the steps as they came."""
    pause_s = delivery.worst_gap_s + 36.0  # a save that no line announces, and the step after it
    return max(SETTINGS.floor, SETTINGS.factor * pause_s)


def tell(number: int, where: Path, *, calm: bool) -> str:
    """What goes wrong in one story; empty: nothing."""
    story = make_story(random.Random(number))
    delivery = Delivery(story, random.Random(-number), where, calm=calm)
    well_until = max(story.lines[-1][0], 0.0 if story.in_phase else story.ends_at) + 30.0
    for now in delivery.moments(story.ends_at + 4000.0):
        view = delivery.controller.job_view("7", now)
        assert view is not None
        clock = loop_clock(view, now, SETTINGS)
        what = f"story {number}, {now:.0f}: {clock.age_s:.0f} s, {clock.limit}, hangs since {story.ends_at:.0f} ({story.last_sign}), {delivery.notes}"
        if view.silent_nodes or clock.age_s < clock.limit.seconds:
            most_s = IN_PHASE_S if is_patient(story, delivery) else longest_limit_s(story, delivery)
            if now > story.ends_at + most_s + SLACK_S:
                return f"not reported: {what}" if knows_pace(story, delivery) else ""
        elif now < well_until:
            return f"beyond its limit while it is well: {what}"
        else:
            return "" if is_reported(delivery.controller, now) else f"beyond its limit and not reported: {what}"
    return f"never reported: {what}"


def test_a_save_that_is_announced_after_a_report_which_waited_for_the_controller_is_known() -> None:
    """The report of step 20 waits for 25 s in a socket of a controller that is stalled; then the save is announced."""
    state = ClusterState(silent_after_s=40.0, report_lifetime_s=30.0)
    node = SlurmNode(name="n1", address="n1", state="IDLE")
    state.apply_slurm(SlurmView(jobs=(slurm_job(nodes=("n1",)),), nodes=(node,)), 0.0)
    step = Event(kind=EventKind.PROGRESS, job_id="7", age_s=0.0, source="/7.out", pattern="key_value")
    save = Event(kind=EventKind.PHASE, job_id="7", age_s=0.0, source="/7.out", phase="checkpointing", line="saving")

    def report(number: int, at: float, *events: Event, comes_at: float | None = None) -> None:
        told = Report(node="n1", boot_id="b", agent_id="a", sequence=number, made_s=UP_S + at, events=events)
        told = replace(told, processes=(process(0),))
        assert state.apply_report(told, at if comes_at is None else comes_at) == "accepted"

    for number in range(1, 20):
        report(number, 5.0 * number, replace(step, step=number))
    report(20, 100.0, replace(step, step=20), comes_at=125.0)
    report(21, 105.0, save, comes_at=125.1)
    for number in range(22, 45):
        at = max(5.0 * number, 125.2)
        report(number, at, replace(save, age_s=at - 105.0))
    view = state.job_view("7", 220.0)
    assert view is not None and view.progress is not None
    assert view.progress.phase == "checkpointing"
    assert view.progress.age_s == pytest.approx(120.0)


@pytest.mark.parametrize("part", first(2, range(PARTS)))
def test_a_healthy_job_is_never_beyond_its_limit_and_a_hang_is_reported_in_time(
    part: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    numbers = [int(ONE)] if ONE and part == 0 else [] if ONE else range(part, STORIES, PARTS)
    wrong = []
    for number in numbers:
        where = tmp_path / str(number)
        where.mkdir()
        wrong += [what for what in (tell(number, where, calm=number % 10 == 0),) if what]
        rmtree(where)
    record_property("stories", len(numbers))
    print(f"{len(numbers)} stories")
    assert not wrong, "\n".join(wrong[:10])
    assert ONE or len(numbers) == STORIES // PARTS
