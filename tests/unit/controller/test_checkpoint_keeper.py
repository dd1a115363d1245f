"""Keeping the checkpoint from before a loss that went bad: who may, how often, and what is said of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
from msgspec.structs import replace

from slurm_watchdog.analysis.good_checkpoint import resumes_before, still_from
from slurm_watchdog.controller.checkpoint_keeper import AGAIN_S, TRIES, CheckpointKeeper
from slurm_watchdog.controller.ingest.command_queue import CommandQueue
from slurm_watchdog.controller.policy.rules import Rule
from slurm_watchdog.controller.ports.given import EvidencePorts
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.detect import loss_nan, loss_spike
from slurm_watchdog.detect.loss_nan import LossNan
from slurm_watchdog.detect.loss_spike import LossSpike
from slurm_watchdog.journal.journal import Journal
from slurm_watchdog.journal.writer import JournalWriter
from slurm_watchdog.knowledge.kept_checkpoints import KEPT, kept_path
from slurm_watchdog.model.cluster_view import LossPoint
from slurm_watchdog.model.incidents import Finding, Incident, IncidentKind, IncidentState, KeepRequest
from slurm_watchdog.model.observations import Checkpoint
from slurm_watchdog.model.protocol import CommandResult, KeepCheckpoint
from slurm_watchdog.model.slurm import SlurmView
from tests.builders.notices import INCIDENT
from tests.builders.views import cluster, job, progress, slurm_job

NOW = 1000.0
DISK = Checkpoint(
    job_id="7", directory="/d/run", layout="deepspeed", step=20, path="/d/run/global_step20", size_bytes=900
)
WANTED = KeepRequest(job_id="7", path="/d/run/global_step20", step=20, size_bytes=900, layout="deepspeed")
PLACE = "/d/run.kept-by-slurm-watchdog/global_step20"
ACT = Rule(mode="act", ladder=(), source="s")


class Place:
    """A job on n1 whose loss is NaN, and who would keep its checkpoint."""

    def __init__(self, journal: Journal) -> None:
        self.journal, self.state, self.commands = (
            journal,
            ClusterState(silent_after_s=600, report_lifetime_s=60),
            CommandQueue(),
        )
        self.state.apply_slurm(SlurmView(jobs=(slurm_job(batch_host="n1"),), nodes=()), NOW)
        self.said: list[str] = []
        self.rule, self.blind = ACT, ""
        self.incident = replace(INCIDENT, kind=IncidentKind.LOSS_NAN, state=IncidentState.FIRING)
        journal.save_incident(self.incident)
        self.keeper = self.another()

    def another(self, budget: int = 4) -> CheckpointKeeper:
        """A controller that begins now."""
        ports = EvidencePorts(
            journal=self.journal, writer=JournalWriter(self.journal, self.state.left_out), cluster=self.state,
            judgement=cast(Any, None), agents=self.commands, probes=cast(Any, None), news=self,
        )  # fmt: skip
        return CheckpointKeeper((budget, 3600.0), ports, lambda kind, job: self.rule, lambda now: self.blind or None)

    def diagnosed(self, incident: Incident, said: list[str]) -> None:
        self.said += said

    async def serve(
        self, now: float = NOW, wanted: KeepRequest = WANTED, kind: str = IncidentKind.LOSS_NAN
    ) -> list[Any]:
        """What n1 is asked."""
        finding = Finding(kind=kind, subject="job:7", truth=cast(Any, "bad"), summary="", wanted=(wanted,))
        self.keeper.serve([finding], [self.incident], now)
        await settle()
        return list(self.commands.pop("n1"))

    def notes(self) -> list[str]:
        return [text for _, text in self.journal.timeline(self.incident.id)]


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


@pytest.fixture
def place() -> Iterator[Place]:
    journal = Journal("sqlite://")
    yield Place(journal)
    journal.close()


def answer(place: Place, command: KeepCheckpoint, **result: Any) -> None:
    place.commands.resolve(CommandResult(command_id=command.id, **result))


def test_it_is_kept_once_and_the_incident_and_people_are_told_where_and_how_to_resume(place: Place) -> None:
    async def story() -> None:
        (command,) = await place.serve()
        assert (command.job_id, command.path, command.size_bytes) == ("7", WANTED.path, 900)
        assert command.uid == place.state.jobs["7"].uid
        assert await place.serve(NOW + 5) == [], "it is being asked"
        answer(place, command, ok=True, kept=PLACE)
        await settle()
        assert await place.serve(NOW + 600) == []

    asyncio.run(story())
    intent, outcome = place.notes()
    assert intent == "the checkpoint of step 20 is to be kept: /d/run/global_step20"
    assert outcome.startswith(f"{KEPT} of step 20, from before it: {PLACE} ") and place.said == [outcome]
    assert "load_checkpoint('/d/run.kept-by-slurm-watchdog', tag='global_step20')" in outcome
    assert "It is yours to delete" in outcome
    assert (kept_path(intent), kept_path(outcome)) == ("", PLACE)


def test_a_controller_that_was_killed_before_the_answer_asks_again_and_one_killed_after_it_does_not(
    place: Place,
) -> None:
    async def story() -> None:
        (first,) = await place.serve()
        await place.keeper.close()
        place.keeper = place.another()
        (second,) = await place.serve()
        assert second.id != first.id and second.path == first.path
        answer(place, second, ok=True, kept=PLACE)
        await settle()
        place.keeper = place.another()
        assert await place.serve(NOW + 600) == []

    asyncio.run(story())
    assert len(place.said) == 1


def test_a_node_that_refuses_is_asked_a_few_times_and_then_people_hear_why(place: Place) -> None:
    async def story() -> None:
        for number in range(TRIES):
            (command,) = await place.serve(NOW + number * AGAIN_S)
            assert place.said == []
            answer(place, command, ok=False, error="an old one is kept there already")
            await settle()
            assert await place.serve(NOW + number * AGAIN_S + 1.0) == []
        assert await place.serve(NOW + 600) == []

    asyncio.run(story())
    assert place.said == ["the checkpoint of step 20 could not be kept: an old one is kept there already"]


def _observes(place: Place) -> str:
    place.rule = replace(ACT, mode="observe")
    return "the mode is observe"


def _owner_objects(place: Place) -> str:
    place.rule = replace(ACT, refused="its owner wants it left alone")
    return "its owner wants it left alone"


def _paused(place: Place) -> str:
    place.journal.pause("the storage is moved", "root", NOW)
    return "paused: the storage is moved"


def _blind(place: Place) -> str:
    place.blind = "Slurm does not answer"
    return "Slurm does not answer"


def _no_host(place: Place) -> str:
    place.state.apply_slurm(SlurmView(jobs=(slurm_job(batch_host=None),), nodes=()), NOW)
    return "batch host is not known"


def _no_budget(place: Place) -> str:
    place.keeper = place.another(budget=0)
    return "are the budget"


@pytest.mark.parametrize("spoil", [_observes, _owner_objects, _paused, _blind, _no_host, _no_budget])
def test_what_keeps_an_action_from_a_job_keeps_this_from_it_and_is_said_once(
    place: Place, spoil: Callable[[Place], str]
) -> None:
    why = spoil(place)

    async def story() -> None:
        assert await place.serve() == []
        assert await place.serve(NOW + 60) == []

    asyncio.run(story())
    (note,) = place.notes()
    assert why in note and note.startswith("the checkpoint of step 20 (/d/run/global_step20) is not kept: ")
    assert place.said == []


def test_a_checkpoint_whose_size_nobody_knows_is_not_kept(place: Place) -> None:
    assert asyncio.run(place.serve(wanted=replace(WANTED, size_bytes=None))) == []
    assert "its size is not known" in place.notes()[0]


def test_nothing_is_kept_for_what_is_only_suspected_or_another_incident(place: Place) -> None:
    assert asyncio.run(place.serve(kind=IncidentKind.LOSS_SPIKE)) == []
    place.incident = replace(place.incident, state=IncidentState.PENDING)
    assert asyncio.run(place.serve()) == [] and place.notes() == []


def _points(losses: list[float]) -> tuple[LossPoint, ...]:
    return tuple(LossPoint(at=NOW - 500 + step, step=step, loss=loss) for step, loss in enumerate(losses))


def test_detectors_want_the_newest_one_from_before_and_none_from_after() -> None:
    nan = job(losses=_points([2.0] * 30 + [math.nan] * 4), checkpoints_on_disk=(DISK,))
    high = job(losses=_points([2.0 + 0.01 * (n % 3) for n in range(60)] + [9.0] * 5), checkpoints_on_disk=(DISK,))
    (found,) = loss_nan.detect(cluster(nan), LossNan())
    assert found.wanted == (WANTED,) and found.good_checkpoint
    (found,) = loss_spike.detect(cluster(high), LossSpike())
    assert found.wanted == (WANTED,), "long before anybody may act"
    assert not found.actionable and not found.good_checkpoint
    later = replace(DISK, step=31, path="/d/run/global_step31")
    (found,) = loss_nan.detect(cluster(replace(nan, checkpoints_on_disk=(later,))), LossNan())
    assert found.wanted == () and not found.good_checkpoint
    (found,) = loss_nan.detect(
        cluster(replace(nan, checkpoints_on_disk=(later,), earlier_checkpoints=(DISK, later))), LossNan()
    )
    assert found.wanted == (WANTED,), "one was made before the NaN was found"
    assert found.good_checkpoint and not found.actionable, "by itself the trainer takes the damaged one"
    assert resumes_before(replace(nan, checkpoints_on_disk=(replace(DISK, writing=True),)), 30).keep == WANTED


@pytest.mark.parametrize(
    ("saved_age_s", "on_disk", "step", "resumes"),
    [
        (None, (20, 40), 35, PLACE),  # it has made none of its own
        (200.0, (20, 40), 35, PLACE),  # before this start
        (10.0, (20, 40), 35, PLACE),  # one of step 30, and the damaged one of step 40 is still there
        (10.0, (30,), 35, ""),
        (10.0, (20, 40), 45, ""),  # written over by now
        (10.0, (30,), None, PLACE),
    ],
)
def test_a_start_that_went_back_is_gone_back_for_until_the_newest_checkpoint_is_its_own(
    saved_age_s: float | None, on_disk: tuple[int, ...], step: int | None, resumes: str
) -> None:
    disk = tuple(replace(DISK, step=each) for each in on_disk)
    view = job(run_age_s=100.0, saved_age_s=saved_age_s, checkpoints_on_disk=disk, progress=None)
    if step is not None:
        view = replace(view, progress=progress(5.0, step=step))
    assert still_from(view, PLACE) == resumes
