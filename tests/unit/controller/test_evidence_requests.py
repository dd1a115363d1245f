"""What detectors want to know is asked once, of those who are there, and forgotten when it may be asked again."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from slurm_watchdog.controller.evidence import requests
from slurm_watchdog.controller.evidence.requests import EARLY_DUMPS_AN_HOUR, EvidenceRequests
from slurm_watchdog.controller.ingest.command_queue import OF_ONE_USER, CommandQueue
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.incidents import Finding, IncidentKind, MountProbeRequest, StackRequest, Truth
from slurm_watchdog.model.observations import Event, EventKind, MountProbe, Role
from slurm_watchdog.model.protocol import Command, CommandResult, DumpStacks, ProbeMount
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from tests.builders.views import RECV, node_of, process, slurm_job, stack

NOW = 1000.0
STACKS = StackRequest(job_id="7", apart_s=10.0)
PROBE = MountProbeRequest(mount="/shared", directory="/shared/u", uid=1000, nodes=("n1", "n2"))


def finding(*wanted: StackRequest | MountProbeRequest) -> Finding:
    return Finding(
        kind=IncidentKind.COLLECTIVE_HANG,
        subject="job:7",
        truth=Truth.UNKNOWN,
        summary="",
        job_ids=("7",),
        wanted=wanted,
    )


class Place:
    """A state with job 7 on n1 and n2, and the commands to them."""

    def __init__(self) -> None:
        self.state = ClusterState(silent_after_s=600, report_lifetime_s=60)
        nodes = tuple(SlurmNode(name=node, address=node, state="IDLE") for node in ("n1", "n2"))
        self.state.apply_slurm(SlurmView(jobs=(slurm_job(),), nodes=nodes), NOW)
        for node in ("n1", "n2"):
            mine = tuple(process(rank) for rank in range(4) if node_of(rank) == node)
            report = Report(node=node, boot_id="b", agent_id="a", sequence=1, processes=mine)
            self.state.apply_report(report, NOW)
        self.commands = CommandQueue()
        self.requests = EvidenceRequests(self.state, self.commands, probe_deadline_s=10.0)

    def fetched(self) -> list[tuple[str, Command]]:
        return [(node, command) for node in ("n1", "n2") for command in self.commands.pop(node)]


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come at NOW."""
    monkeypatch.setattr(requests, "monotonic", lambda: NOW)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_stacks_are_asked_of_every_node_once_however_many_detectors_want_them() -> None:
    async def story() -> None:
        place = Place()
        place.requests.serve([finding(STACKS), finding(STACKS)], NOW)
        await settle()
        asked = place.fetched()
        assert [(node, type(command)) for node, command in asked] == [("n1", DumpStacks), ("n2", DumpStacks)]
        place.requests.serve([finding(STACKS)], NOW + 60)  # still out: nobody is asked again
        await settle()
        assert place.fetched() == []
        for node, command in asked:
            stacks = tuple(stack(rank, RECV) for rank in range(4) if node_of(rank) == node)
            place.commands.resolve(CommandResult(command_id=command.id, ok=True, stacks=stacks))
        await settle()
        view = place.state.job_view("7", NOW + 61)
        assert view is not None
        assert len(view.snapshots) == 1
        place.requests.serve([finding(STACKS)], NOW + 5)  # too soon after the last one
        await settle()
        assert place.fetched() == []
        place.requests.serve([finding(STACKS)], NOW + 61)
        await settle()
        assert len(place.fetched()) == 2
        await place.requests.close()

    asyncio.run(story())


def test_the_next_dump_is_asked_for_when_the_last_one_is_old_enough_to_be_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last one was long on its way: two that are no two seconds apart show nothing together."""

    async def story() -> None:
        place, soon = Place(), StackRequest(job_id="7", apart_s=2.5)
        place.requests.serve([finding(soon)], NOW)
        await settle()
        monkeypatch.setattr(requests, "monotonic", lambda: NOW + 4.0)
        for node, command in place.fetched():
            stacks = tuple(stack(rank, RECV) for rank in range(4) if node_of(rank) == node)
            place.commands.resolve(CommandResult(command_id=command.id, ok=True, stacks=stacks))
        await settle()
        place.requests.serve([finding(soon)], NOW + 5.0)
        await settle()
        assert place.fetched() == []
        place.requests.serve([finding(soon)], NOW + 6.0)
        await settle()
        assert len(place.fetched()) == 2
        await place.requests.close()

    asyncio.run(story())


def test_a_node_that_gives_no_stacks_is_one_that_was_silent() -> None:
    async def story() -> None:
        place = Place()
        place.requests.serve([finding(STACKS)], NOW)
        await settle()
        for node, command in place.fetched():
            stacks = tuple(stack(rank, RECV) for rank in range(2)) if node == "n1" else ()
            place.commands.resolve(CommandResult(command_id=command.id, ok=node == "n1", stacks=stacks, error="hung"))
        await settle()
        view = place.state.job_view("7", NOW + 1)
        assert view is not None
        assert [each.silent_nodes for each in view.snapshots] == [("n2",)]
        await place.requests.close()

    asyncio.run(story())


def test_a_node_that_has_lost_its_last_rank_is_not_waited_for() -> None:
    async def story() -> None:
        place = Place()
        orphan = process(3, pid=999, role=Role.WORKER)
        gone = Report(node="n2", boot_id="b", agent_id="a", sequence=2, processes=(orphan,))
        assert place.state.apply_report(gone, NOW + 1) == "accepted"
        place.requests.serve([finding(STACKS)], NOW + 2)
        await settle()
        assert [node for node, _ in place.fetched()] == ["n1"]
        await place.requests.close()

    asyncio.run(story())


def test_a_job_that_nobody_knows_is_not_asked_about() -> None:
    async def story() -> None:
        place = Place()
        place.requests.serve([finding(StackRequest(job_id="8", apart_s=1.0))], NOW)
        await settle()
        assert place.fetched() == []

    asyncio.run(story())


def test_the_answers_about_a_mount_can_be_waited_for_but_not_for_ever() -> None:
    async def story() -> None:
        place = Place()
        place.requests.probe(PROBE, NOW)
        place.requests.probe(PROBE, NOW + 100)  # still out
        await settle()
        asked = place.fetched()
        assert [(node, type(command)) for node, command in asked] == [("n1", ProbeMount), ("n2", ProbeMount)]
        await place.requests.answered(["/shared"], 0.05)  # nobody answers, and it ends
        await place.requests.answered(["/elsewhere"], 60.0)  # about that nobody is asked
        await place.requests.answered([], 60.0)
        waiting = asyncio.ensure_future(place.requests.answered(["/shared"], 60.0))
        await settle()
        assert not waiting.done()
        for _, command in asked:
            probe = MountProbe(mount="/shared", responding=True, seconds=0.1, wrote=True)
            place.commands.resolve(CommandResult(command_id=command.id, ok=True, probe=probe))
        await asyncio.wait_for(waiting, 10)
        place.requests.probe(PROBE, NOW + 1)  # a moment ago
        await settle()
        assert place.fetched() == []

    asyncio.run(story())


def test_what_was_asked_long_ago_takes_no_memory() -> None:
    async def story() -> None:
        place = Place()
        for number in range(3 * requests.REMEMBERED):
            place.requests.probe(
                MountProbeRequest(mount=f"/m{number}", directory="/", uid=0, nodes=("n9",)), NOW + number
            )
            for task in list(place.requests._tasks.values()):
                task.cancel()
            await settle()
        assert len(place.requests._last) <= requests.REMEMBERED + requests.LATER_DUMPS_EVERY_S

    asyncio.run(story())


def test_a_question_that_breaks_down_is_logged_and_the_next_one_is_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        place = Place()

        def broken(*_: object) -> None:
            raise RuntimeError("no")

        place.state.apply_probe = broken  # type: ignore[method-assign]
        place.requests.probe(PROBE, NOW)
        await settle()
        for _, command in place.fetched():
            probe = MountProbe(mount="/shared", responding=True, seconds=0.1)
            place.commands.resolve(CommandResult(command_id=command.id, ok=True, probe=probe))
        await settle()
        place.requests.probe(PROBE, NOW + 100)
        await settle()
        assert len(place.fetched()) == 2
        await place.requests.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(story())
    assert "probe:n1:1000:/shared failed" in caplog.text


def test_probes_as_one_user_have_a_share_and_another_user_is_asked_for() -> None:
    async def story() -> None:
        place = Place()
        nodes = tuple(f"n{n}" for n in range(requests.PROBES_OF_USER + 7))
        place.requests.probe(MountProbeRequest(mount="/fuse", directory="/x", uid=1500, nodes=nodes), NOW)
        place.requests.probe(MountProbeRequest(mount="/shared", directory="/x", uid=1501, nodes=("n1",)), NOW)
        await settle()
        asked = Counter(command.uid for node in nodes for command in place.commands.pop(node))
        assert asked == {1500: requests.PROBES_OF_USER, 1501: 1}
        left_out = [(each.what, each.uid, each.count) for each in place.state.left_out.lately(0.0)]
        assert left_out == 7 * [("probes", 1500, 1)]
        await place.requests.close()

    asyncio.run(story())


def test_questions_about_one_users_jobs_leave_room_in_a_nodes_queue_for_anothers_and_for_actions() -> None:
    async def story() -> None:
        place = CommandQueue()

        def ask(n: int, uid: int | None) -> asyncio.Task[CommandResult]:
            command = DumpStacks(id=f"{uid}-{n}", job_id=str(n), restarts=0)
            return asyncio.create_task(place.ask("n1", command, 60.0, uid))

        tasks = [ask(n, 1500) for n in range(100)] + [ask(1, 1501), ask(2, None)]
        await settle()
        refused = [task.result() for task in tasks if task.done()]
        assert len(refused) == 100 - OF_ONE_USER
        assert {each.error for each in refused} == {
            f"{OF_ONE_USER} questions about jobs of uid 1500 wait for n1 already"
        }
        assert [each.id for each in place.pop("n1")][OF_ONE_USER:] == ["1501-1", "None-2"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(story())


def test_dumps_of_a_late_step_come_as_close_as_is_asked_and_belong_to_their_row() -> None:
    async def story() -> None:
        place = Place()
        early = StackRequest(job_id="7", apart_s=2.0, early=True)
        line = Event(kind=EventKind.PROGRESS, job_id="7", age_s=1.0, source="/l", step=3, pattern="json")
        report = Report(
            node="n1", boot_id="b", agent_id="a", sequence=2, processes=(process(0), process(1)), events=(line,)
        )
        place.state.apply_report(report, NOW)
        for number, moment in enumerate((NOW, NOW + 2.0, NOW + 4.0, NOW + 6.0, NOW + 8.0), 1):
            place.requests.serve([finding(early)], moment)
            await settle()
            for node, command in place.fetched():
                stacks = tuple(stack(rank, RECV) for rank in range(4) if node_of(rank) == node)
                place.commands.resolve(CommandResult(command_id=command.id, ok=True, stacks=stacks))
            await settle()
            view = place.state.job_view("7", moment + 1)
            assert view is not None
            assert view.row is not None
            assert (view.row.dumps, view.row.over, len(view.snapshots)) == (number, False, 0)
            place.requests.serve([finding(early)], moment + 1)
            await settle()
            assert place.fetched() == []
        await place.requests.close()

    asyncio.run(story())


def test_dumps_of_where_ranks_usually_are_are_no_evidence_of_a_hang_and_of_the_same_budget() -> None:
    async def story() -> None:
        place = Place()
        usual = StackRequest(job_id="7", apart_s=60.0, usual=True)
        taken = 0
        for number in range(50):
            moment = NOW + 60.0 * number
            for at in (moment, moment + 1):
                place.requests.serve([finding(usual)], at)
                await settle()
            commands = place.fetched()
            taken += bool(commands)
            for node, command in commands:
                stacks = tuple(stack(rank, RECV, state="S") for rank in range(4) if node_of(rank) == node)
                place.commands.resolve(CommandResult(command_id=command.id, ok=True, stacks=stacks))
            await settle()
        view = place.state.job_view("7", NOW)
        assert view is not None
        assert (view.row, view.snapshots, view.motion) == (None, (), None)
        assert taken == len(view.wait_dumps) == EARLY_DUMPS_AN_HOUR + int(49 * 60.0 * EARLY_DUMPS_AN_HOUR / 3600.0)
        assert {rank.key.rank for rank in view.wait_dumps[0].ranks} == {0, 1, 2, 3}
        assert all(rank.with_peers and rank.asleep for rank in view.wait_dumps[0].ranks)
        await place.requests.close()

    asyncio.run(story())
