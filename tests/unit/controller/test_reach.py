"""slurm_watchdog.controller.evidence.reach: machines that are asked whether they are there."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Mapping

from msgspec.structs import replace

from slurm_watchdog.controller.evidence.reach import Reach, SlurmdPort
from slurm_watchdog.controller.state.cluster import ClusterState
from slurm_watchdog.model.cluster_view import ClusterView
from slurm_watchdog.model.report import Report
from slurm_watchdog.model.slurm import SlurmNode, SlurmView
from tests.builders.lost_nodes import NOW, cluster

LATE = cluster(1, of=4, jobs_on=("n0", "n1"))
"""n0 says nothing, and has a job."""


def asked(
    there: Mapping[str, bool | None], view: ClusterView = LATE, rounds: int = 3
) -> tuple[ClusterState, list[list[str]]]:
    """The state after so many rounds, 5 s apart, and who was asked in each."""
    state = ClusterState(silent_after_s=40, report_lifetime_s=30)
    nodes = tuple(SlurmNode(name=f"n{number}", address=f"a{number}", state="ALLOCATED") for number in range(4))
    state.apply_slurm(SlurmView(jobs=(), nodes=nodes), NOW)
    calls: list[list[str]] = []

    async def answers(address: str) -> bool | None:
        calls[-1].append(address)
        return there.get(address, True)

    async def story() -> None:
        reach = Reach(state, answers)
        for number in range(rounds):
            calls.append([])
            reach.serve(replace(view, now=view.now + 5.0 * number))
            reach.serve(replace(view, now=view.now + 5.0 * number))  # the next tick
            for _ in range(5):
                await asyncio.sleep(0)
        await reach.close()

    asyncio.run(story())
    return state, calls


def test_a_machine_that_does_not_answer_while_two_others_do_is_counted_each_time() -> None:
    state, calls = asked({"a0": False})
    assert calls == [["a0", "a1", "a2"]] * 3, "n1 and n2 report"
    (found,) = state.surroundings(NOW + 12).unreached
    assert (found.name, found.tries, found.seconds) == ("n0", 3, 12.0)


def test_a_machine_counts_as_there_if_it_answers_or_nobody_can_tell() -> None:
    for there in (
        {"a0": True},
        {"a0": None},
        {"a0": False, "a1": False, "a2": False},
        {"a0": False, "a1": None, "a2": None},
    ):
        assert asked(there)[0].surroundings(NOW).unreached == (), there


def test_nobody_is_asked_after_a_node_that_reports_or_has_no_job() -> None:
    assert asked({"a0": False}, cluster(0, of=4, jobs_on=("n0",)))[1] == [[], [], []]
    assert asked({"a0": False}, cluster(1, of=4, jobs_on=("n1",)))[1] == [[], [], []]


def test_a_report_of_the_node_ends_the_matter() -> None:
    state, _ = asked({"a0": False})
    state.apply_report(Report(node="n0", boot_id="b", agent_id="a", sequence=1), NOW + 15)
    assert state.surroundings(NOW + 15).unreached == ()


def test_after_a_minute_it_is_asked_less_often() -> None:
    assert ["a0" in each for each in asked({"a0": False}, rounds=16)[1]] == [True] * 12 + [False] * 4


def test_a_port_that_is_open_or_refuses_is_a_machine_that_lives_and_a_name_without_address_says_nothing() -> None:
    async def ask() -> list[bool | None]:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            answers = SlurmdPort(bound.getsockname()[1])
            refused = await answers("127.0.0.1")
            bound.listen()
            return [refused, await answers("127.0.0.1"), await answers("no-such-node.invalid")]

    assert asyncio.run(ask()) == [True, True, None]


def test_a_controller_without_file_descriptors_says_nothing_about_the_node() -> None:
    async def ask() -> list[bool | None]:
        answers = SlurmdPort(1)
        await answers("127.0.0.1")
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
        try:
            without = await answers("127.0.0.1")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return [without, await answers("127.0.0.1")]

    assert asyncio.run(ask()) == [None, True]


def test_after_a_name_without_an_answer_none_is_looked_up_and_a_known_one_is_still_asked() -> None:
    async def ask() -> list[bool | None]:
        answers = SlurmdPort(1)
        return [
            await answers("localhost"),
            await answers("no-such-node.invalid"),
            await answers("127.0.0.1"),
            await answers("localhost"),
        ]

    assert asyncio.run(ask()) == [True, None, None, True]
