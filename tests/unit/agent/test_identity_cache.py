"""Whom a hung child hangs on, and who is asked about again: with children that answer when the test says."""

from __future__ import annotations

from slurm_watchdog.agent.children.answers import ResolvedCall
from slurm_watchdog.agent.children.requests import ResolveCalls
from slurm_watchdog.agent.proc.system_call import BlockedCallHistory, SeenCall
from slurm_watchdog.agent.proc.table import NEW_AT_ONCE, ProcessTable
from slurm_watchdog.agent.processes.identity_cache import MAX_AT_ONCE, MAX_IDENTIFICATIONS
from slurm_watchdog.model.observations import CallTarget
from tests.builders.identities import World

LOOK, APART = "look:1000", "look:1000:apart"


def test_the_process_that_a_child_hangs_on_is_left_and_the_others_are_asked_about_again() -> None:
    world = World(1, 2, 3, 4)
    assert world.ask() == {LOOK: [1, 2, 3, 4]}
    world.probes.hang(LOOK, place=1)
    assert world.probes.hung == {f"{LOOK}:2"}
    assert world.ask() == {LOOK: [1, 3, 4]}
    world.answer(LOOK)
    assert world.ask() == {}
    assert [entry.known.environ is None for entry in world.table.entries.values()] == [False, True, False, False]
    assert [entry.known.start_ticks for entry in world.table.entries.values()] == [10, 0, 30, 40]


def test_each_users_processes_are_asked_of_his_own_child() -> None:
    world = World(1, 2)
    world.give(2, 1001)
    assert world.ask() == {LOOK: [1], "look:1001": [2]}
    world.probes.hang(LOOK)
    world.add(3, uid=1001)
    world.answer("look:1001")
    assert world.ask() == {"look:1001": [3]}, "and of no one else's"


def test_what_a_child_had_no_time_for_is_asked_about_again() -> None:
    world = World(1, 2, 3)
    world.ask()
    world.answer(LOOK, most=2)
    assert world.ask() == {LOOK: [3]}


def test_when_the_child_comes_back_its_process_is_asked_about_once_more() -> None:
    world = World(1)
    world.ask()
    world.probes.hang(LOOK)
    assert [world.ask() for _ in range(3)] == [{}, {}, {}]
    world.probes.come_back(f"{LOOK}:1")
    assert world.ask() == {LOOK: [1]}


def test_a_process_that_is_gone_is_forgotten_and_its_number_may_be_anothers() -> None:
    world = World(1)
    world.ask()
    world.probes.hang(LOOK)
    world.table.remove(1, 0.0)
    world.ask()
    assert world.looks.stuck == {}
    world.add(1)
    assert world.ask() == {LOOK: [1]}


def test_what_stands_in_d_is_asked_of_another_child() -> None:
    world = World(1, 2, state="D")
    world.add(50)
    assert world.ask() == {LOOK: [50], APART: [1, 2]}
    world.probes.hang(APART)
    assert world.probes.hung == {f"{LOOK}:1"}
    world.answer(LOOK)
    assert world.ask() == {APART: [2]}


def test_where_two_children_hang_on_the_same_process_each_is_set_aside() -> None:
    world = World(1)
    world.ask()
    world.add(2)
    world.table.entries[1].stat = world.table.entries[1].stat.__class__("python", "D", 1, 0, 0, 0)
    world.table.to_identify.add(1)
    world.ask()
    world.probes.hang(LOOK)
    world.probes.hang(APART)
    assert world.probes.hung == {f"{LOOK}:1", f"{APART}:1"}


def test_one_users_thousands_of_new_processes_cost_another_none_of_his_few() -> None:
    world = World(*range(1, 3001))
    for pid in (2990, 3000):
        world.give(pid, 1001)
    asked = world.ask()
    assert asked["look:1001"] == [2990, 3000] and len(asked[LOOK]) == MAX_AT_ONCE
    (problem,) = world.identities.problems()
    assert problem.startswith(f"{2998 - MAX_AT_ONCE} new processes of uid 1000 wait")


def test_a_process_on_which_a_child_spends_its_time_is_given_up() -> None:
    world = World(1, 2)
    for _ in range(4):
        world.ask()
        world.probes.finish(LOOK, error="given up after 5 s of CPU time", place=1)
    assert world.table.entries[2].identified >= MAX_IDENTIFICATIONS > world.table.entries[1].identified
    assert world.ask() == {LOOK: [1]}


def track(syscall: str, state: str = "D") -> BlockedCallHistory:
    return BlockedCallHistory(SeenCall(f"1 0x3 0x0 {syscall}", state, "w", syscall), 0.0, 0.0)


def test_blocked_calls_are_resolved_apart_and_nothing_of_a_process_that_a_child_hangs_on() -> None:
    world = World(1, 2, 3)
    world.ask()
    world.probes.hang(LOOK)
    tracks = {(1, 0, 1): track("write"), (2, 0, 2): track("openat"), (3, 0, 3): track("openat")}
    assert world.identities.resolve(tracks, 0.0, 1.0)
    request = world.probes.busy[APART].request
    assert isinstance(request, ResolveCalls)
    assert [(each.pid, each.syscall) for each in request.calls] == [(2, "openat"), (3, "openat")]
    assert world.identities.resolve(tracks, 0.0, 1.0) == []
    world.probes.finish(APART, [ResolvedCall(target=CallTarget("/shared/x", "/shared"))])
    target = tracks[2, 0, 2].target
    assert target is not None and (target.path, target.mount) == ("/shared/x", "/shared")
    world.identities.resolve(tracks, 0.0, 1.0)
    world.probes.hang(APART)
    assert world.probes.hung == {f"{LOOK}:1", f"{LOOK}:3"}
    assert world.identities.resolve({(3, 0, 3): track("fsync")}, 0.0, 1.0) == []


def test_answers_about_a_process_that_was_replaced_change_nobody() -> None:
    world = World(1)
    world.ask()
    world.table.remove(1, 0.0)
    world.add(1)
    world.answer(LOOK)
    assert world.table.entries[1].known.environ is None


def test_a_process_that_an_agent_before_knew_under_this_number_is_met_anew() -> None:
    world = World(1)
    entry = world.table.entries[1]
    entry.known = entry.known.__class__(1, 999, 1, "python", 1000)
    world.ask()
    world.answer(LOOK)
    assert 1 not in world.table.entries


def test_new_processes_beyond_a_ticks_are_looked_at_later_and_each_user_has_his_turn() -> None:
    crowd = set(range(1000, 1000 + 3 * NEW_AT_ONCE))
    few = {900_000, 900_001}
    owners = dict.fromkeys(crowd, 1000) | dict.fromkeys(few, 2000)
    world = World(1)
    world.table.read_owner = owners.__getitem__
    taken = set(world.table._next_new(crowd | few))
    assert few < taken and len(taken) == NEW_AT_ONCE, "the crowd is older, and does not come first"
    assert set(ProcessTable()._next_new(crowd)) == crowd, "who is not named looks gone"
