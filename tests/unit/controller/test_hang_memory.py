"""Hangs in the same place: told with the second, and the third of one job on another node is restarted no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from slurm_watchdog.controller.incidents.hang_memory import REMEMBERED_S, HangMemory
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.incidents import Culprit, Incident
from tests.builders.notices import INCIDENT
from tests.builders.views import BARRIER, COMPUTE, LOADER, RECV, cluster, job, progress, slurm_job, snapshot, stack

DAY = 86400.0


def hangs(number: int, *, rank: int | None = 1, frames: tuple[str, ...] = LOADER, step: int = 500, **owner: Any) -> tuple[Incident, ClusterView]:  # fmt: skip
    """An incident, and the job of it: rank 1 is on n1, rank 2 on n2. None: all wait in one collective."""
    stacks = [stack(each, frames if each == rank else RECV) for each in range(4)]
    culprits = () if rank is None else (Culprit(node=stacks[rank].node, rank=rank, pid=100 + rank),)
    incident = replace(INCIDENT, id=f"h{number}", culprits=culprits, jobs_now=("7",))
    stands = job(job=slurm_job(**owner), progress=progress(90.0, step=step), snapshots=(snapshot(5.0, stacks),))
    return incident, cluster(stands)


def remembered(*scenes: tuple[Incident, ClusterView]) -> tuple[HangMemory, list[str | None]]:
    memory = HangMemory()
    return memory, [memory.note(*scene, wall=n * DAY) for n, scene in enumerate(scenes)]


def test_the_second_hang_in_the_same_frames_says_where_the_first_one_is() -> None:
    memory, (first, second) = remembered(hangs(1), hangs(2, rank=2, step=700))
    assert first is None
    assert second is not None
    assert second.startswith("it hangs in the same place as incident h1, 24 h 00 min ago (job 7, rank 1 on ")
    assert "after step 500" in second and "DataLoader._try_get_data" in second
    assert memory.said("h2") == (second,) and memory.said("h1") == memory.said(None) == ()


@pytest.mark.parametrize(
    "other",
    [hangs(2, frames=COMPUTE), hangs(2, rank=None), hangs(2, uid=77)],
    ids=["other frames", "nobody is late", "another user's"],
)
def test_a_hang_elsewhere_is_no_repeat(other: tuple[Incident, ClusterView]) -> None:
    assert remembered(hangs(1), other)[1][1] is None


def test_all_ranks_in_one_collective_twice_is_a_repeat_that_holds_nothing() -> None:
    memory, said = remembered(*(hangs(n, rank=None) for n in range(3)))
    assert said[2] is not None and "2 times in all before" in said[2]
    assert memory.why_held("h2") is None


def test_the_third_of_a_job_at_one_step_on_another_node_is_held_with_its_reason() -> None:
    memory, _ = remembered(hangs(1), hangs(2), hangs(3, rank=2))
    assert memory.why_held("h2") is None
    why = memory.why_held("h3")
    assert why is not None
    assert why.startswith("the job hangs for the 3rd time after step 500 in ") and "on 2 nodes" in why
    assert "(incidents h2, h1)" in why


@pytest.mark.parametrize(
    "third",
    [hangs(3), hangs(3, rank=2, step=900), hangs(3, rank=2, frames=BARRIER), hangs(3, rank=2, name="other")],
    ids=["always the same node", "another step", "other frames", "another job of the user"],
)
def test_what_may_be_the_node_s_fault_or_another_matter_is_not_held(third: tuple[Incident, ClusterView]) -> None:
    assert remembered(hangs(1), hangs(2), third)[0].why_held("h3") is None


def test_a_job_without_stacks_leaves_nothing() -> None:
    incident, view = hangs(1)
    blank = replace(view, jobs=(replace(view.jobs[0], snapshots=()),))
    memory = HangMemory()
    assert memory.note(incident, blank, 1.0) is None and memory.place("h1") is None


def test_places_outlive_the_controller_and_old_ones_are_dropped(tmp_path: Path) -> None:
    journal = Journal(f"sqlite:///{tmp_path}/journal.sqlite")
    memory, _ = remembered(hangs(1), hangs(2))
    for incident_id in ("h1", "h2", "h2"):
        place = memory.place(incident_id)
        assert place is not None
        journal.hang_places.save(place)
    again = HangMemory(journal.hang_places.find())
    assert again.note(*hangs(3, rank=2), wall=2 * DAY) is not None
    assert again.said("h2") == memory.said("h2") and again.why_held("h3") is not None
    assert [each.incident_id for each in journal.hang_places.since(0.5 * DAY)] == ["h2"]
    assert again.note(*hangs(4), wall=3 * REMEMBERED_S) is None, "that was long ago"
    journal.close()
